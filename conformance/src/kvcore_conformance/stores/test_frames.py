"""Frames: any size, any contiguous buffer; whose memory is whose."""

from __future__ import annotations

import array
from collections.abc import Callable

import numpy as np
import pytest

from kvcore.errors import ConfigError
from kvcore.tiers.stores import Store, StoreStat, StoreStats
from kvcore_conformance.stores.effort import Effort
from kvcore_conformance.stores.space import Space, content

SIZES = (0, 1, 2, 511, 512, 4095, 4096, 4097, 65536, 65537)


@pytest.mark.parametrize("nbytes", SIZES)
def test_any_size(space: Space, store: Store, nbytes: int) -> None:
    _there_and_back(space, store, nbytes)


def test_a_large_frame(space: Space, store: Store, effort: Effort) -> None:
    _there_and_back(space, store, effort.largest)
    _there_and_back(space, store, effort.largest + 1)


def _there_and_back(space: Space, store: Store, nbytes: int) -> None:
    key, frame = space.key(), content(nbytes)
    assert store.put(key, frame) == nbytes
    assert store.stat(key) == StoreStat(nbytes)
    view = store.get(key)
    assert isinstance(view, memoryview)
    assert (view.format, view.ndim, view.nbytes, view.readonly) == ("B", 1, nbytes, True)
    assert view == frame
    out = bytearray(nbytes)
    assert store.get_into(key, memoryview(out)) == nbytes
    assert out == frame
    stats = store.stats()
    assert (stats.hits % 2, stats.misses, stats.torn) == (0, 0, 0)


@pytest.mark.parametrize(
    "kind",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: memoryview(bytearray(data)),
        lambda data: memoryview(data).cast("I"),
        lambda data: memoryview(data).cast("B", (2, 2, len(data) // 4)),
        lambda data: np.frombuffer(data, "<f4"),
        lambda data: np.frombuffer(data, "<u2").reshape(4, -1).data,
        lambda data: array.array("H", data),
        lambda data: memoryview(b"before" + data)[6:],
    ],
    ids=["bytes", "bytearray", "view", "writable", "typed", "cubic", "numpy", "numpy-view", "array", "slice"],
)
def test_any_contiguous_buffer_is_a_frame(space: Space, store: Store, kind: Callable[[bytes], bytes]) -> None:
    key, data = space.key(), content(4096)
    assert store.put(key, kind(data)) == len(data)
    assert store.get(key) == data
    assert store.put_batch([(key, kind(data[::-1]))]) == [len(data)]
    assert store.get(key) == data[::-1]


@pytest.mark.parametrize(
    "frame",
    ["text", None, 5, memoryview(b"abcdef")[::2], np.arange(16, dtype=np.uint8).reshape(4, 4).T],
    ids=["text", "none", "int", "strided", "transposed"],
)
def test_what_is_no_contiguous_buffer_is_refused_before_anything_is_written(
    space: Space, store: Store, frame: bytes
) -> None:
    key = space.key()
    store.put(key, b"frame")
    with pytest.raises(ConfigError):
        store.put(key, frame)
    assert store.get(key) == b"frame"
    assert store.stats().puts == 1


def test_the_buffer_is_the_callers_again(space: Space, store: Store) -> None:
    key, other = space.keys(2)
    for nbytes in (5, 5000, 300_000):
        first, second = content(nbytes, 1), content(nbytes, 2)
        buffer = bytearray(first)
        assert store.put(key, buffer) == nbytes
        buffer[:] = second
        assert store.get(key) == first
        assert store.put_batch([(other, buffer)]) == [nbytes]
        buffer[:] = first
        assert store.get(other) == second
        buffer.append(0)  # an exported buffer could not be resized


def test_what_was_read_stays_as_it_is(space: Space, store: Store) -> None:
    for nbytes in (5, 5000, 300_000):
        key, first = space.key(nbytes), content(nbytes, 1)
        store.put(key, first)
        view, (batched,) = store.get(key), store.get_batch([key])
        assert isinstance(view, memoryview)
        assert isinstance(batched, memoryview)
        store.put(key, content(nbytes, 2))
        assert view == first
        store.delete(key)
        assert view == first
        assert batched == first
        assert view.readonly
        assert batched.readonly
        with pytest.raises(TypeError):
            view[0] = 0
    store.close()
    assert view == first


def test_get_into_fills_the_callers_memory(space: Space, store: Store) -> None:
    key, other = space.keys(2)
    frame = content(5000)
    store.put(key, frame)
    for room, before in ((5000, 0), (5001, 0), (9000, 0), (5000, 1), (5000, 4096)):
        memory = bytearray(before + room)
        assert store.get_into(key, memoryview(memory)[before:]) == len(frame)
        assert memory[:before] == bytes(before)
        assert memory[before : before + len(frame)] == frame
    assert store.get_into(other, memoryview(bytearray(8))) is None
    assert store.stats() == StoreStats(puts=1, hits=5, misses=1, put_bytes=5000, hit_bytes=25_000)


@pytest.mark.parametrize("room", [0, 1, 4999])
def test_a_frame_that_is_longer_than_the_memory_is_a_miss(space: Space, store: Store, room: int) -> None:
    key = space.key()
    store.put(key, content(5000))
    memory = bytearray(room + 16)
    assert store.get_into(key, memoryview(memory)[:room]) is None
    assert memory[room:] == bytes(16)
    assert store.get(key) == content(5000)


def test_get_into_of_an_empty_frame_is_not_a_miss(space: Space, store: Store) -> None:
    key = space.key()
    store.put(key, b"")
    assert store.get_into(key, memoryview(bytearray(0))) == 0
    assert store.get_into(key, memoryview(bytearray(4))) == 0
