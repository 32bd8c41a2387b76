"""Native libraries as the core calls them: what their status words say, how arguments are packed, and forks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore import Layout, Quantized, QuantSpec
from kvcore.errors import CorruptFrameError, QuantizationError, SlotError
from kvcore.kernels.abi import OK, pack_bytes_args
from kvcore.kernels.library import status_error

X = np.zeros((3, 8), np.float32)
NAN = X.copy()
NAN[1, 2] = np.nan
CACHE = Layout("BNHD").bind(np.zeros((4, 2, 1, 8), np.float32))
ROWS = QuantSpec.symmetric(8, (1,))
BOOK = QuantSpec.codebook((-1.0, 0.0, 1.0), (1,))
SCALE = np.array([[1], [1], [0]], np.float32)


def chunk(tokens: int) -> kvcore.RowLayout:
    return Layout("THD").bind(np.zeros((tokens, 1, 8), np.float32))


@pytest.mark.parametrize(
    ("op", "status", "kind", "message"),
    [
        ("gather_paged", 5 << 8 | 1, SlotError, "entry 5 of the index is outside of the cache; -1 skips a token"),
        ("scatter_paged", 2 << 8 | 2, SlotError, "entry 2 of the index has the same target as an earlier one"),
        (
            "quantize",
            7 << 8 | 3,
            QuantizationError,
            "element 7 in C order is not finite; nonfinite=.saturate. takes",
        ),
        ("reduce_moments", 7 << 8 | 3, QuantizationError, "element 7 in C order is not finite; nothing was written"),
        ("dequantize", 16 << 8 | 4, QuantizationError, "the scale of the group that begins with element 16 in C order"),
        ("rotate", 1 << 8 | 5, QuantizationError, "element 1 in C order is beyond 2\\*\\*100 in magnitude"),
        ("dequantize", 1 << 8 | 6, QuantizationError, "is a code that the codebook has no level for"),
        ("decode_symbols", 3 << 8 | 9, CorruptFrameError, "tile 3: a state that no encoder leaves"),
    ],
)
def test_a_status_word_of_a_device_says_what_is_known_there(
    op: str, status: int, kind: type[Exception], message: str
) -> None:
    error = status_error(op, status)
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error
    assert status_error(op, OK) is None


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda b: b.gather_paged(CACHE, np.array([0, 99999])),
            SlotError,
            r"gather_paged: entry 1 of the index, slot 99999, is outside of -1 \.\. 7 of RowLayout\('BNHD'.*; -1 skips",
        ),
        (
            lambda b: b.gather_paged(CACHE, np.array([-2]), unit="block"),
            SlotError,
            r"entry 0 of the index, block -2, is outside of -1 \.\. 3 of RowLayout",
        ),
        (
            lambda b: b.scatter_paged(chunk(3), np.array([5, 1, 5]), out=CACHE),
            SlotError,
            "entry 2 of the index, slot 5, has the same target as an earlier one; each slot takes one token",
        ),
        (
            lambda b: b.quantize(NAN, ROWS),
            QuantizationError,
            r"quantize: element \[1, 2\], nan, is not finite; nonfinite='saturate' takes it; nothing was written",
        ),
        (
            lambda b: b.reduce_moments(NAN, np.zeros((1, 1), np.int32), 1),
            QuantizationError,
            r"\[1, 2\], nan, is not",
        ),
        (
            lambda b: b.reduce_moments(X + 40000, np.zeros((1, 1), np.int32), 1),
            QuantizationError,
            r"element \[0, 0\], 40000\.0, is beyond -32768 \.\. 32767",
        ),
        (
            lambda b: b.quantize(X, ROWS, scale=SCALE),
            QuantizationError,
            r"the scale of the group that begins with element \[2, 0\] is outside of 2\*\*-100",
        ),
        (
            lambda b: b.dequantize(Quantized(X.astype(np.int8), SCALE, None), ROWS),
            QuantizationError,
            r"dequantize: the scale of the group that begins with element \[2, 0\]",
        ),
        (
            lambda b: b.dequantize(Quantized(np.full((1, 8), 3, np.uint8), SCALE[:1], None), BOOK),
            QuantizationError,
            r"element \[0, 0\], 3, is a code that the codebook has no level for",
        ),
        (
            lambda b: b.pack_bits(np.array([1, 9], np.uint8), 3),
            QuantizationError,
            r"element \[1\], 9, does not fit",
        ),
    ],
)
def test_a_native_host_backend_shows_what_is_wrong(
    call: Callable[[kvcore.Backend], Any], kind: type[Exception], message: str
) -> None:
    pytest.importorskip("kvcore_cpu")
    with pytest.raises(kind, match=message):
        call(kvcore.open_backend("cpu", fallback="error"))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_buffers_are_packed_as_lists_of_addresses_and_sizes(count: int) -> None:
    src = [np.zeros(n + 1, np.uint8) for n in range(count)]
    out = [np.zeros(n + 1, np.uint8) for n in range(count)]
    args, _keep = pack_bytes_args(src, out, None)
    sources, targets, sizes, digests, counted = np.frombuffer(args, np.uint64).tolist()
    assert (digests, counted) == (0, count)
    wanted = ([a.ctypes.data for a in src], [a.ctypes.data for a in out], [a.size for a in src])
    for at, values in zip((sources, targets, sizes), wanted, strict=True):
        assert list((ctypes.c_uint64 * count).from_address(at)) == values if count else True


def test_a_process_that_forks_while_a_library_is_in_use_does_not_wait_for_ever() -> None:
    pytest.importorskip("kvcore_cpu")
    source = (
        "import os, threading, warnings\n"
        "import kvcore, numpy as np\n"
        "from kvcore.codecs.tables import table_set\n"
        "from kvcore_cpu.native import library\n"
        "warnings.simplefilter('ignore')\n"
        "cpu, held, done = kvcore.open_backend('cpu'), threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with library()._lock:\n"  # what a thread has that is making tables
        "        held.set(); done.wait()\n"
        "threading.Thread(target=hold).start(); held.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    cpu.choose_classes(np.zeros((1, 8, 8), np.int16), table_set('gauss'))\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])); done.set()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = child.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        child.wait()
        raise
    assert output == "7\n"
