"""A backend on one stream: its ops and waits are that stream's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.arrays import ArrayRef
from kvcore.errors import LayoutError, QuantizationError
from kvcore.ops import fetch, of_all_streams, on_host, on_stream, send

pytest.importorskip("kvcore_emu")

NAN = np.full((4, 8), np.nan, np.float32)


@pytest.fixture
def emu() -> Iterator[kvcore.Backend]:
    backend = kvcore.open_backend("emu", fallback="error")
    yield backend
    backend.runtime.check()


def test_without_a_stream_it_is_the_backend(emu: kvcore.Backend) -> None:
    assert on_stream(emu, None) is emu
    assert of_all_streams(emu) is of_all_streams(on_stream(emu, emu.runtime.stream())) is emu


def test_ops_and_errors_are_the_streams(emu: kvcore.Backend) -> None:
    stream, x = emu.runtime.stream(), send(emu, NAN)
    emu.runtime.check()
    queued = on_stream(emu, stream)
    queued.reduce_absmax(x, 1)
    emu.runtime.check()  # the default stream knows of nothing
    with pytest.raises(QuantizationError, match="reduce_absmax"):
        queued.runtime.check()
    queued.reduce_absmax(x, 1, stream=emu.runtime.stream())  # a stream that is named is taken
    queued.runtime.check()


def test_what_is_sent_and_fetched_goes_by_the_stream(emu: kvcore.Backend) -> None:
    queued = on_stream(emu, emu.runtime.stream())
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    largest = queued.reduce_absmax(send(queued, x), 1)
    assert fetch(queued, largest).tolist() == [[3], [7], [11]]
    with pytest.raises(LayoutError):
        queued.runtime.array(x)  # the rest of the runtime is the backend's


@pytest.mark.parametrize("waits", ["event", "synchronize"])
def test_events_are_recorded_and_waited_for_on_the_stream(emu: kvcore.Backend, waits: str) -> None:
    for seed in range(8):
        emu.runtime.reseed(seed)  # type: ignore[attr-defined]  # the emulated device's
        first, second = (on_stream(emu, emu.runtime.stream()) for _ in range(2))
        x, copy = send(first, np.ones(64, np.uint8)), ArrayRef.of(emu.runtime.empty((64,), np.dtype(np.uint8)))
        if waits == "event":
            second.runtime.wait(first.runtime.record())
        else:
            first.runtime.synchronize()
        second.copy_batch([x], out=[copy])
        assert fetch(second, copy).all()


def test_host_arrays_are_staged_on_the_stream(emu: kvcore.Backend) -> None:
    staged: Any = on_host(on_stream(emu, emu.runtime.stream()))
    assert staged.reduce_absmax(np.ones((2, 3), np.float32), 1).tolist() == [[1], [1]]
    with pytest.raises(QuantizationError):
        staged.reduce_absmax(NAN, 1)
