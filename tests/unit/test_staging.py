"""Host arrays through a device's ops: what arrives, what comes back, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.arrays import ArrayRef
from kvcore.codecs.tables import table_set
from kvcore.entropy import EncodedTiles, tile_capacity
from kvcore.errors import ConfigError, LayoutError, QuantizationError, UnsupportedOpError
from kvcore.ops import fetch, on_host, send

pytest.importorskip("kvcore_emu")

F32 = np.arange(32, dtype=np.float32).reshape(4, 8)


@pytest.fixture(scope="module")
def emu() -> kvcore.Backend:
    return kvcore.open_backend("emu", fallback="error")


@pytest.fixture
def staged(emu: kvcore.Backend) -> kvcore.Backend:
    return on_host(emu)


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


# --- fetch and send


def test_what_is_sent_is_fetched_whatever_its_strides_were(emu: kvcore.Backend) -> None:
    for array in (F32, F32.T, F32[:, ::2], F32[:, ::-1], np.float32(3).reshape(()), F32[:0]):
        assert fetch(emu, send(emu, array)).tolist() == array.tolist()


def test_send_takes_arrays_of_other_libraries(emu: kvcore.Backend) -> None:
    torch = pytest.importorskip("torch")
    array = torch.arange(6).reshape(2, 3).to(torch.bfloat16)
    assert fetch(emu, send(emu, array)).astype(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert fetch(emu, send(emu, ArrayRef.of(F32))).tolist() == F32.tolist()


def test_fetch_refuses_what_is_not_row_major(emu: kvcore.Backend) -> None:
    there = ArrayRef.of(send(emu, F32))
    for shape, strides in (((8, 4), (4, 32)), ((4, 4), (32, 8)), ((4, 8), (-32, 4)), ((4, 8), (0, 4))):
        view = ArrayRef.at(there.address, shape, "float32", strides=strides, device=there.device, owner=there)
        with pytest.raises(LayoutError, match="row-major"):
            fetch(emu, view)
    one = ArrayRef.at(there.address, (1, 8), "float32", strides=(999, 4), device=there.device, owner=there)
    assert fetch(emu, one).tolist() == F32[:1].tolist()  # a dim of one element is never strided over


# --- out


def test_what_an_op_leaves_alone_is_left_alone(staged: kvcore.Backend) -> None:
    tables = table_set("gauss")
    values = np.random.default_rng(0).integers(-20, 20, (3, 16, 8)).astype(np.int16)
    reference = kvcore.open_backend("cpu_ref")
    given = []
    for backend in (reference, staged):
        choice = backend.choose_classes(values, tables)
        out = EncodedTiles(
            np.full((3, tile_capacity(16, 8)), 0x5A, np.uint8), np.zeros(3, np.uint8), np.zeros(3, np.uint16)
        )
        assert backend.encode_symbols(values, choice, tables, out=out) is out
        given.append([a.tobytes() for a in out])
    assert given[0] == given[1]
    assert b"\x5a" * 8 in given[0][0]


@pytest.mark.parametrize(
    "call",
    [
        lambda ops: ops.reduce_absmax(F32, 1, out=read_only(np.zeros((4, 1), np.float32))),
        lambda ops: ops.copy_batch([b"abc"], out=[bytes(3)]),
    ],
)
def test_an_out_that_is_read_only_is_refused(staged: kvcore.Backend, call: Callable[[kvcore.Backend], Any]) -> None:
    with pytest.raises(LayoutError, match="read-only"):
        call(staged)


def test_buffers_and_digests_are_written_as_by_ops_of_the_host(staged: kvcore.Backend) -> None:
    out, digests = [bytearray(3), np.zeros(2, np.uint8)], np.zeros(2, np.uint64)
    assert staged.copy_batch([b"abc", bytearray(b"de")], digests=digests, out=out) is out
    assert out[0] == b"abc"
    assert out[1].tobytes() == b"de"
    assert digests.tolist() == kvcore.open_backend("cpu_ref").digest([b"abc", b"de"]).tolist()


def test_an_out_that_shares_memory_is_refused_unless_the_op_works_in_place(staged: kvcore.Backend) -> None:
    keys = np.random.default_rng(0).standard_normal((3, 2, 8), np.float32)
    table = np.full((2, 3, 4), np.sqrt(0.5), np.float32)
    wanted = staged.shift_rope(keys.copy(), *table)
    memory = np.zeros(96, np.float32)
    view, shifted = memory[:48].reshape(3, 2, 8), memory[1:49].reshape(3, 2, 8)
    view[...] = keys
    with pytest.raises(LayoutError, match="shares memory"):
        staged.shift_rope(view, *table, out=shifted)
    with pytest.raises(LayoutError, match="shares memory"):
        staged.rotate(view, seed=1, block=8, out=view)
    assert view.tolist() == keys.tolist()
    assert staged.shift_rope(view, *table, out=view) is view
    assert view.tolist() == wanted.tolist()


def test_an_element_type_that_the_device_lacks_is_left_to_the_host(
    emu: kvcore.Backend, staged: kvcore.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedOpError("not of this element type")

    out, digests = np.zeros(3, np.uint8), np.zeros(1, np.uint64)
    known = kvcore.open_backend("cpu_ref").digest([b"abc"]).tolist()
    for op in ("reduce_absmax", "copy_batch"):
        monkeypatch.setattr(emu, op, refuse)
    with monkeypatch.context() as m:
        m.setattr("kvcore.ops.staging.send", lambda _, array: array)
        assert staged.copy_batch([b"abc"], digests=digests, out=[out])[0].tobytes() == b"abc"
    assert digests.tolist() == known


def test_an_error_leaves_out_as_it_was(staged: kvcore.Backend) -> None:
    out = np.full((4, 1), 7, np.float32)
    with pytest.raises(QuantizationError):
        staged.reduce_absmax(np.full_like(F32, np.nan), 1, out=out)
    assert set(out.flat) == {7}


# --- streams and settings


def test_a_stream_is_refused(emu: kvcore.Backend, staged: kvcore.Backend) -> None:
    with pytest.raises(UnsupportedOpError, match="takes no stream"):
        staged.reduce_absmax(F32, 1, stream=emu.runtime.stream())


@pytest.mark.parametrize("stream", [0, "default", object()])
def test_a_device_refuses_a_stream_that_is_none(emu: kvcore.Backend, stream: Any) -> None:
    with pytest.raises(ConfigError, match=r"is a .*, and no stream"):
        emu.reduce_absmax(send(emu, F32), 1, stream=stream)


def test_variables_that_name_the_devices_backend_and_kernels_are_not_the_hosts() -> None:
    source = (
        "import json, kvcore, numpy as np\n"
        "from kvcore.ops import on_host\n"
        "staged = on_host(kvcore.open_backend())\n"
        "rows = kvcore.Layout('BNHD').bind(np.ones((2, 2, 1, 4), np.float32))\n"
        "chunk = staged.gather_paged(rows, np.array([3, 0]))\n"
        "print(json.dumps([staged.name, staged.spec.name, float(chunk.array('X', 0).sum())]))\n"
    )
    variables = {"KVCORE_BACKEND": "emu", "KVCORE_KERNELS": "gather_paged=emulated"}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["emu (staged)", kvcore.open_backend().spec.name, 8]


def test_an_error_of_the_device_names_no_op_that_only_moves_bytes(emu: kvcore.Backend) -> None:
    stream = emu.runtime.stream()
    x, out = send(emu, np.full((4, 8), np.inf, np.float32)), send(emu, np.zeros((4, 1), np.float32))
    flat = ArrayRef.at(ArrayRef.of(out).address, (16,), "uint8", device="emu:0", owner=out)
    emu.runtime.check()
    emu.copy_batch([np.zeros(16, np.uint8)], out=[flat], stream=stream)
    emu.reduce_absmax(x, 1, out=out, stream=stream)
    with pytest.raises(QuantizationError, match=r"^reduce_absmax: element 0 in C order is not finite; nonfinite='sat"):
        emu.runtime.check(stream)
