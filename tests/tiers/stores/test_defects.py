"""Defects that users of KV caches have met, one test for each: the defect must not come back here."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.dtypes import to_dtype
from kvcore.engine import ChunkKey, Namespace, chunk_keys
from kvcore.engine.engine import CacheEngine
from kvcore.engine.kv import DenseKV
from kvcore.engine.plain import plain_engine
from kvcore.engine.transfer import StoreReport
from kvcore.errors import StoreError
from kvcore.tiers.stores import FsStore, StoreKey
from kvcore.tiers.stores.capped import CappedStore

CHUNK, LAYERS, HEADS, WIDTH = 8, 2, 3, 16
TOKENS = list(range(100, 100 + 3 * CHUNK + 1))
Opener = Callable[..., CacheEngine]


def namespace(**changes: Any) -> Namespace:
    return Namespace(**{"model": "m", "revision": "1", "chunk_tokens": CHUNK, **changes})


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens engines over a store, and closes them."""
    backend, caches = kvcore.open_backend("cpu_ref", fallback="error"), []

    def open_cache(store: Any, *, layers: int = LAYERS, heads: int = HEADS, **changes: Any) -> CacheEngine:
        codec = {name: changes.pop(name) for name in ("codec", "codecs") if name in changes}
        extents = {"layers": layers, "heads": heads, "width": WIDTH}
        caches.append(plain_engine(store, namespace(**changes), **extents, backend=backend, **codec))
        return caches[-1]

    yield open_cache
    for cache in caches:
        cache.close()


def kv(dtype: str = "bfloat16", layers: int = LAYERS, heads: int = HEADS, seed: int = 0) -> list[list[np.ndarray]]:
    """K and V of every layer, ``[1, heads, tokens, width]``."""
    rng = np.random.default_rng(seed)
    shape = (1, heads, len(TOKENS), WIDTH)
    return [[rng.standard_normal(shape).astype(to_dtype(dtype)) for _ in "KV"] for _ in range(layers)]


def rows_of(arrays: list[list[np.ndarray]]) -> kvcore.RowLayout:
    return kvcore.Layout("LK|1HTD").bind(arrays)


def save(engine: CacheEngine, arrays: list[list[np.ndarray]]) -> StoreReport:
    return engine.store(TOKENS, rows_of(arrays), wait=True)


def loaded(engine: CacheEngine, memory: Callable[..., DenseKV] = DenseKV) -> list[bytes]:
    """The bytes of each chunk that is served."""
    extents, dtypes = engine.parts[0].desc.layout.extents, engine.parts[0].desc.dtypes
    shape = 1, extents["H"], len(TOKENS), extents["D"]
    room = [[np.zeros(shape, dtypes[part]) for part in "KV"] for _ in range(extents["L"])]
    served = engine.retrieve(TOKENS, memory(engine.backend, rows_of(room)))
    return expected(room, int(served.sum()) // CHUNK)


def expected(arrays: list[list[np.ndarray]], chunks: int = 3) -> list[bytes]:
    cut = [slice(n * CHUNK, (n + 1) * CHUNK) for n in range(chunks)]
    return [b"".join(x[0, :, at].transpose(1, 0, 2).tobytes() for layer in arrays for x in layer) for at in cut]


def keys() -> list[ChunkKey]:
    return chunk_keys(namespace(), TOKENS)


def path_of(root: Path, key: ChunkKey | StoreKey) -> Path:
    return root / key.namespace.hex() / key.digest.hex()[:2] / f"{key.digest.hex()}.kvf"


# The same directory, and other settings than those it was written with


@pytest.mark.parametrize("new", ["balanced", "fp8", "int8", "cachegen"])
def test_codec_changed_over_an_old_directory(tmp_path: Path, opened: Opener, new: str) -> None:
    arrays = kv()
    save(opened(FsStore(tmp_path), codec="int4"), arrays)
    cache = opened(FsStore(tmp_path), codec=new)
    assert loaded(cache) == []
    assert cache.misses == {"codec": 1}
    assert len(list(FsStore(tmp_path).list())) == 3, "they stay, for those who accept them"
    assert len(loaded(opened(FsStore(tmp_path), codec="int4"))) == 3


def test_element_type_changed_over_an_old_directory(tmp_path: Path, opened: Opener) -> None:
    save(opened(FsStore(tmp_path)), kv())
    for dtype in ("float8_e4m3fn", "float16"):
        cache, arrays = opened(FsStore(tmp_path), kv_dtype=dtype), kv(dtype)
        assert cache.lookup(TOKENS) == 0, "another element type is another namespace"
        assert loaded(cache) == []
        save(cache, arrays)
        assert loaded(cache) == expected(arrays)
    assert loaded(opened(FsStore(tmp_path))) == expected(kv())


def test_element_type_changed_under_the_same_key(tmp_path: Path, opened: Opener) -> None:
    """As from a writer that has no element type in its namespace."""
    store = FsStore(tmp_path)
    save(opened(store, kv_dtype="float16"), kv("float16"))
    for ours, theirs in zip(keys(), chunk_keys(namespace(kv_dtype="float16"), TOKENS), strict=True):
        path_of(tmp_path, ours).parent.mkdir(parents=True, exist_ok=True)
        path_of(tmp_path, theirs).rename(path_of(tmp_path, ours))
    cache = opened(store)
    assert loaded(cache) == []
    assert cache.misses == {"identity": 1}


@pytest.mark.parametrize("change", [{"heads": HEADS - 1}, {"layers": LAYERS + 1}], ids=["heads", "layers"])
def test_layout_changed_over_an_old_directory(tmp_path: Path, opened: Opener, change: dict[str, int]) -> None:
    save(opened(FsStore(tmp_path)), kv())
    cache, arrays = opened(FsStore(tmp_path), **change), kv(**change)
    assert loaded(cache) == []
    assert cache.misses == {"layout": 1}
    assert save(cache, arrays).chunks_written > 0, "what was read is aside, and can be stored again"
    assert loaded(cache)[0] == expected(arrays, 1)[0]


@pytest.mark.parametrize("codec", ["balanced", "lossless"])
def test_frames_of_variable_length_are_read_again_after_a_restart(tmp_path: Path, opened: Opener, codec: str) -> None:
    """Their sizes come from the store, not from the shape, nor from what an earlier process remembered."""
    first = opened(FsStore(tmp_path), codec=codec)
    save(first, kv())
    before = loaded(first)
    assert len(before) == 3
    store = CappedStore(FsStore(tmp_path), 1 << 20)
    assert len({store.stat(key).nbytes for key in keys()}) > 1
    second = opened(store, codec=codec)
    assert second.lookup(TOKENS) == 3 * CHUNK
    assert loaded(second) == before
    assert store.used_bytes == sum(store.stat(key).nbytes for key in keys())


# Writers


def test_two_writers_of_one_key(tmp_path: Path, opened: Opener) -> None:
    """Each with another codec, so that the frames differ in length: whichever is there is whole."""
    arrays, coded = kv(), ("raw", "balanced")
    frames, served = [], []
    for codec in coded:
        with FsStore(tmp_path / codec) as alone:
            cache = opened(alone, codec=codec)
            save(cache, arrays)
            frames.append([bytes(alone.get(key)) for key in keys()])
            served.append(loaded(cache))
    assert served[0] != served[1]
    store, stop = FsStore(tmp_path / "kv", sync=False), time.monotonic() + 0.6
    store.put_batch(list(zip(keys(), frames[0], strict=True)))

    def write(number: int) -> int:
        own, rounds = FsStore(tmp_path / "kv", sync=False), 0
        while time.monotonic() < stop:
            own.put_batch(list(zip(keys(), frames[number], strict=True)))
            rounds += 1
        return rounds

    reader, seen = opened(store, codecs=coded), set()
    with ThreadPoolExecutor(2) as pool:
        rounds = [pool.submit(write, number) for number in (0, 1)]
        while time.monotonic() < stop:
            # A frame that was replaced by a longer one after its size was asked for is a miss; never a mixture.
            for chunk, one in enumerate(loaded(reader)):
                assert one in (served[0][chunk], served[1][chunk])
                seen.add(one)
        assert all(future.result() > 2 for future in rounds)
    assert len(seen) > 1
    assert set(reader.misses) <= {"absent"}
    assert store.stats().quarantined == 0
    assert list((tmp_path / "kv" / "incoming").iterdir()) == []


@pytest.mark.parametrize("left", [0, 40, 200, -1])
def test_a_short_write_that_was_published(tmp_path: Path, opened: Opener, left: int) -> None:
    """By a writer that does not check what `write` returned: a frame's name over a part of a frame."""
    arrays = kv()
    save(opened(FsStore(tmp_path)), arrays)
    path = path_of(tmp_path, keys()[1])
    os.truncate(path, left if left >= 0 else path.stat().st_size - 1)
    cache = opened(FsStore(tmp_path))
    assert loaded(cache) == expected(arrays, 1)
    assert cache.misses == {"truncated": 1}
    assert save(cache, arrays).chunks_written == 1
    assert loaded(cache) == expected(arrays)
    os.truncate(path, left if left >= 0 else path.stat().st_size - 1)
    assert opened(CappedStore(FsStore(tmp_path), 1 << 20)).lookup(TOKENS) == CHUNK, "a scan does not even offer it"


# Names


@pytest.mark.parametrize("text", ["m" * 5000, "ä" * 300], ids=["long", "wide"])
def test_a_model_name_of_more_than_255_bytes(tmp_path: Path, opened: Opener, text: str) -> None:
    arrays, store = kv(), FsStore(tmp_path)
    cache = opened(store, model=text, adapter=text, salt=text)
    save(cache, arrays)
    assert loaded(cache) == expected(arrays)
    for key in list(store.list()):
        assert store.quarantine(key, "a" * 32)
    names = [path.name for path in tmp_path.rglob("*")]
    assert len(names) > 6
    assert max(map(len, names)) <= 255


def test_a_directory_with_a_name_of_more_than_255_bytes(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="shorter path") as caught:
        FsStore(tmp_path / ("d" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG


def test_model_names_with_slashes(tmp_path: Path, opened: Opener) -> None:
    names = [
        "meta-llama/Llama-3.1-8B",
        "meta-llama_Llama-3.1-8B",
        "meta-llama",
        "../../outside",
        "/",
        "a\\b",
        "a\0b",
        ".",
    ]
    root = tmp_path / "deep" / "er" / "kv"
    for seed, name in enumerate(names):
        cache, arrays = opened(FsStore(root), model=name), kv(seed=seed)
        assert cache.lookup(TOKENS) == 0, "no other model's"
        save(cache, arrays)
    for seed, name in enumerate(names):
        assert loaded(opened(FsStore(root), model=name)) == expected(kv(seed=seed))
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and root not in path.parents]
    assert outside == []
    assert len([path for path in root.iterdir() if len(path.name) == 64]) == len(names)


# Batches, evictions, the end


def test_one_bad_object_in_a_batch(tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = FsStore(tmp_path), os.open
    names = [StoreKey(b"n" * 32, bytes([n]) * 32) for n in range(5)]

    def failing(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) == str(path_of(tmp_path, names[2])):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **kwargs)

    store.put_batch([(name, name.digest) for name in names])
    rooms = [memoryview(bytearray(32)) for _ in names]
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing)
        for found in (store.get_batch(names), CappedStore(store, 1 << 20, check=None).get_batch(names)):
            assert [getattr(one, "errno", one) for one in found] == [
                name.digest if name != names[2] else errno.EIO for name in names
            ]
        into = store.get_batch_into(list(zip(names, rooms, strict=True)))
    assert [getattr(one, "errno", one) for one in into] == [32, 32, errno.EIO, 32, 32]
    assert [bytes(room) for n, room in enumerate(rooms) if n != 2] == [
        name.digest for name in names if name != names[2]
    ]
    path_of(tmp_path, names[2]).unlink()
    path_of(tmp_path, names[2]).mkdir()
    put = store.put_batch([(name, b"new") for name in names])
    assert [one if isinstance(one, int) else type(one) for one in put] == [3, 3, StoreError, 3, 3]
    assert list((tmp_path / "incoming").iterdir()) == []


def test_one_bad_chunk_costs_itself_and_what_follows(tmp_path: Path, opened: Opener) -> None:
    arrays, store = kv(), FsStore(tmp_path)
    save(opened(store), arrays)
    frame = bytearray(store.get(keys()[1]))
    frame[-1] ^= 1
    store.put(keys()[1], frame)
    cache = opened(store)
    assert loaded(cache) == expected(arrays, 1)
    assert cache.misses == {"digest": 1}
    assert save(cache, arrays).chunks_written == 1
    assert loaded(cache) == expected(arrays)


def test_eviction_while_reading(tmp_path: Path, opened: Opener) -> None:
    """Of the store's frames, when the first chunk is being copied: what is on its way is whole, or a miss."""
    arrays, inner = kv(), FsStore(tmp_path)
    save(opened(inner), arrays)
    store = CappedStore(inner, 3 * inner.stat(keys()[0]).nbytes)
    cache, other = opened(store), StoreKey(b"o" * 32, b"o" * 32)
    view = store.get(keys()[0])
    frame = bytes(view)

    class Evicting(DenseKV):
        def write(self, *given: Any, **named: Any) -> None:
            store.put(other, bytes(store.capacity_bytes))
            super().write(*given, **named)

    served = loaded(cache, Evicting)
    assert len(served) >= 1
    assert served == expected(arrays, len(served))
    assert list(store.list()) == [other]
    assert view == frame
    assert loaded(cache) == []
    assert cache.lookup(TOKENS) == 0


@pytest.mark.parametrize("layer", ["plain", "direct", "capped"])
def test_close_while_busy(tmp_path: Path, layer: str) -> None:
    """Each call is done, or says that the store is closed; nothing is torn, nothing is left over."""
    inner = FsStore(tmp_path, sync=False, direct=layer == "direct")
    store = CappedStore(inner, 1 << 19, check=None) if layer == "capped" else inner
    names = [StoreKey(b"n" * 32, bytes([n]) * 32) for n in range(8)]
    begun = threading.Barrier(5)

    def frame(n: int) -> bytes:
        return bytes([n]) * (50_000 + 4096 * n)

    def work(seed: int) -> int:
        begun.wait(20)
        for step in range(100_000):
            n = (step + 3 * seed) % len(names)
            try:
                if seed % 2:
                    assert store.put(names[n], frame(n)) == len(frame(n))
                else:
                    found = store.get(names[n])
                    assert found is None or found == frame(n)
            except StoreError as error:
                assert "closed" in str(error)  # noqa: PT017 - of another thread
                return step
        return -1

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, seed) for seed in range(4)]
        begun.wait(20)
        time.sleep(0.2)
        store.close()
        assert all(future.result() > 0 for future in futures)
    store.close()
    assert list((tmp_path / "incoming").iterdir()) == []
    again = FsStore(tmp_path)
    left = list(again.list())
    assert left
    assert all(again.get(name) == frame(name.digest[0]) for name in left)
