"""The checked ops: bad arguments end before any implementation is called; good ones arrive in the form it expects.

The backend here only records: whatever reaches it has passed the checks.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
import torch

import kvcore
from kvcore import BackendSpec, ConfigError, Layout, LayoutError, Probe, Quantized, QuantSpec, hookimpl
from kvcore.codecs.tables import table_set
from kvcore.entropy import TileChoice
from kvcore.hookspecs import OP_PREFIX, op_specs
from kvcore.plugins import API_VERSION
from kvcore.plugins.discover import Candidate

B, N, H, D = 3, 4, 2, 8
F32 = np.zeros((4, 8), np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)


class Recorder:
    """A backend that has every op, does nothing and remembers its calls."""

    def __init__(self, monkeypatch):
        self.calls = []
        module = ModuleType("kvcore_recorder")
        for op, spec in op_specs().items():
            setattr(module, OP_PREFIX + op, self.implementation(op, spec))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        spec = BackendSpec(
            "recorder", ("cpu",), 0, API_VERSION, lambda: Probe(True, "ready"), {"recording": module.__name__}
        )
        self.backend = kvcore.open_backend(
            "recorder", fallback="error", found=[Candidate("recorder", "usable", "", spec)]
        )

    def implementation(self, op, spec):
        def record(*args, **kwargs):
            bound = inspect.signature(spec).bind(*args, **kwargs)
            self.calls.append((op, bound.arguments))
            return kwargs["out"]

        record.__signature__ = inspect.signature(spec)
        record.__name__ = OP_PREFIX + op
        return hookimpl(record)

    def last(self):
        ((op, arguments),) = self.calls
        self.calls.clear()
        return op, arguments


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


@pytest.fixture
def ops(recorder):
    return recorder.backend


def paged(dtype=np.float16, heads=H, layers=1):
    return Layout("L|KBNHD").bind([np.zeros((2, B, N, heads, D), dtype) for _ in range(layers)])


def dense(tokens, dtype=np.float16, heads=H, layers=1):
    return Layout("LKTHD").bind(np.zeros((layers, 2, tokens, heads, D), dtype))


def slots(*values):
    return np.array(values, np.int64)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def quantized(codes=(4, 8), scale=(4, 1), zero=None, dtype=np.int8):
    given = None if zero is None else np.zeros(zero, np.int32)
    return Quantized(np.zeros(codes, dtype), np.ones(scale, np.float32), given)


ROWS = (1,)  # axis of F32 that shares a scale
SYM, AFF = QuantSpec.symmetric(4, ROWS), QuantSpec.affine(4, ROWS)
BOOK, FP8 = QuantSpec.codebook((-1.0, 0.0, 1.0), ROWS), QuantSpec.fp8("float8_e4m3fn", ROWS)


# --- what reaches an implementation


@pytest.mark.parametrize(
    ("op", "call", "shape", "dtype"),
    [
        ("reduce_absmax", lambda b: b.reduce_absmax(F32, 1), (4, 1), np.float32),
        ("reduce_absmax", lambda b: b.reduce_absmax(F32, (-1, 0)), (1, 1), np.float32),
        ("reduce_minmax", lambda b: b.reduce_minmax(F32, 0), (2, 1, 8), np.float32),
        ("reduce_norm", lambda b: b.reduce_norm(F32.astype(BF16), 0), (1, 8), np.float32),
        ("reduce_moments", lambda b: b.reduce_moments(F32, np.zeros((1, 8), np.int32), 0), (2, 1, 8), np.int64),
        ("dequantize", lambda b: b.dequantize(quantized(), SYM), (4, 8), np.float32),
        ("dequantize", lambda b: b.dequantize(quantized(), SYM, dtype="bf16"), (4, 8), BF16),
        ("dequantize", lambda b: b.dequantize(quantized(), SYM, dtype=torch.float16), (4, 8), np.float16),
        ("rotate", lambda b: b.rotate(F32, seed=3, block=8), (4, 8), np.float32),
        ("rotate", lambda b: b.rotate(F32, seed=3, block=4, dtype=np.float16), (4, 8), np.float16),
        ("pack_bits", lambda b: b.pack_bits(np.zeros((2, 9), np.uint8), 3), (2, 4), np.uint8),
        ("unpack_bits", lambda b: b.unpack_bits(np.zeros((2, 4), np.uint8), 3, 9), (2, 9), np.uint8),
        ("unpack_bits", lambda b: b.unpack_bits(np.zeros((2, 4), np.uint8), 3, 10, dtype=np.int8), (2, 10), np.int8),
        ("count_symbols", lambda b: b.count_symbols(np.zeros((3, 5, 7), np.uint8)), (3, 7, 256), np.uint32),
        ("digest", lambda b: b.digest([b"abc", bytearray(5)]), (2,), np.uint64),
        (
            "shift_rope",
            lambda b: b.shift_rope(np.zeros((5, 2, 8), np.float16), *np.zeros((2, 5, 4), np.float32)),
            (5, 2, 8),
            np.float16,
        ),
    ],
)
def test_out_is_allocated_as_the_op_wants_it_and_returned(recorder, op, call, shape, dtype):
    out = call(recorder.backend)
    assert (out.shape, out.dtype) == (shape, dtype)
    called, arguments = recorder.last()
    assert called == op
    assert arguments["out"] is out
    assert arguments["stream"] is arguments["workspace"] is None


@pytest.mark.parametrize(("spec", "zero"), [(SYM, False), (AFF, True), (BOOK, False), (FP8, False)])
def test_quantize_allocates_codes_scales_and_where_needed_zeros(recorder, spec, zero):
    out = recorder.backend.quantize(F32, spec)
    assert (out.codes.shape, out.codes.dtype) == (F32.shape, spec.code_dtype)
    assert (out.scale.shape, out.scale.dtype) == ((4, 1), np.float32)
    assert (out.zero is not None) == zero
    if zero:
        assert (out.zero.shape, out.zero.dtype) == ((4, 1), np.int32)


def test_out_that_is_given_is_filled_and_returned_whatever_library_owns_it(recorder):
    for out in (np.zeros((4, 1), np.float32), torch.zeros((4, 1)), np.zeros((4, 9), np.float32)[:, ::9]):
        assert recorder.backend.reduce_absmax(torch.zeros(4, 8), 1, out=out) is out
        _, arguments = recorder.last()
        assert isinstance(arguments["out"], np.ndarray)
        assert np.shares_memory(arguments["out"], out if isinstance(out, np.ndarray) else out.numpy())
    given = quantized()
    assert recorder.backend.quantize(F32, SYM, out=given) is given


def test_torch_tensors_arrive_as_views(recorder):
    tensor = torch.zeros(4, 8, dtype=torch.bfloat16)
    recorder.backend.reduce_norm(tensor, 0)
    _, arguments = recorder.last()
    assert arguments["x"].dtype == BF16
    assert arguments["x"].ctypes.data == tensor.data_ptr()


def test_axes_arrive_sorted_and_positive(recorder):
    recorder.backend.reduce_norm(np.zeros((2, 3, 4), np.float32), (-1, 0))
    assert recorder.last()[1]["axes"] == (0, 2)


def test_stream_and_workspace_are_passed_on(recorder):
    stream, workspace = object(), object()
    recorder.backend.digest([b"x"], stream=stream, workspace=workspace)
    _, arguments = recorder.last()
    assert arguments["stream"] is stream
    assert arguments["workspace"] is workspace


def test_gather_makes_the_canonical_chunk(recorder):
    chunk = recorder.backend.gather_paged(paged(layers=3), slots(3, -1, 0))
    assert (chunk.text, chunk.tokens, chunk.layers) == ("LKTHD", 3, 3)
    _, arguments = recorder.last()
    assert list(arguments["out"]) == [chunk]
    chunk = recorder.backend.gather_paged(paged(), slots(2, 1), unit="block")
    assert chunk.tokens == 2 * N


def test_chunks_arrive_as_a_sequence_and_come_back_as_given(recorder):
    one, several = dense(2), [dense(1), dense(1)]
    assert recorder.backend.gather_paged(paged(), slots(0, 1), out=one) is one
    assert list(recorder.last()[1]["out"]) == [one]
    assert recorder.backend.gather_paged(paged(), slots(0, 1), out=several) is several
    assert list(recorder.last()[1]["out"]) == several
    cache = paged()
    assert recorder.backend.scatter_paged(one, slots(0, 1), out=cache) is cache
    assert list(recorder.last()[1]["src"]) == [one]


def test_copies_arrive_as_bytes(recorder):
    out = [bytearray(3), np.zeros(2, np.int8)]
    digests = np.zeros(2, np.uint64)
    assert recorder.backend.copy_batch([b"abc", memoryview(b"de")], out=out, digests=digests) is out
    _, arguments = recorder.last()
    assert [x.dtype for x in (*arguments["src"], *arguments["out"])] == [np.uint8] * 4
    assert arguments["digests"] is digests


# --- what does not

BUFFER = np.zeros(100, np.uint8)
BAD = {
    # dtypes
    "absmax of float64": (
        lambda b: b.reduce_absmax(np.zeros(3), 0),
        LayoutError,
        "x has dtype float64; float16 or bfloat16 or",
    ),
    "absmax of ints": (lambda b: b.reduce_absmax(np.zeros(3, np.int8), 0), LayoutError, "x has dtype int8"),
    "absmax of a list": (lambda b: b.reduce_absmax([1.0, 2.0], 0), LayoutError, "cannot take a list as an array"),
    "absmax on a device": (lambda b: b.reduce_absmax(torch.zeros(3, device="meta"), 0), LayoutError, "memory on meta"),
    "moments exponent": (
        lambda b: b.reduce_moments(F32, np.zeros((1, 8)), 0),
        LayoutError,
        "exponent has dtype float64; int32",
    ),
    "pack float": (lambda b: b.pack_bits(F32, 4), LayoutError, "x has dtype float32; uint8 or int8"),
    "count int8": (lambda b: b.count_symbols(np.zeros((2, 2), np.int8)), LayoutError, "x has dtype int8; uint8"),
    "codes of another spec": (
        lambda b: b.dequantize(quantized(dtype=np.uint8), SYM),
        LayoutError,
        "codes has dtype uint8; int8",
    ),
    "values as int": (
        lambda b: b.dequantize(quantized(), SYM, dtype="int8"),
        LayoutError,
        "values come as float16, bfloat16, fl",
    ),
    "values as nothing": (lambda b: b.dequantize(quantized(), SYM, dtype="f"), ConfigError, "unknown element type 'f'"),
    "unpack to int16": (
        lambda b: b.unpack_bits(np.zeros((1, 1), np.uint8), 1, 8, dtype="int16"),
        LayoutError,
        "gives uint8 or int8, not int16",
    ),
    # axes and shapes
    "axis beyond": (
        lambda b: b.reduce_norm(F32, 2),
        LayoutError,
        r"axes \(2,\) are not one or more distinct axes .* 2 dims",
    ),
    "axis below": (lambda b: b.reduce_norm(F32, -3), LayoutError, "are not one or more distinct axes"),
    "axis twice": (lambda b: b.reduce_norm(F32, (0, -2)), LayoutError, "distinct axes"),
    "no axes": (lambda b: b.reduce_norm(F32, ()), LayoutError, "one or more distinct axes"),
    "empty axis": (lambda b: b.reduce_norm(F32[:0], 0), LayoutError, "are empty; there is nothing to reduce"),
    "quantise empty": (lambda b: b.quantize(F32[:, :0], SYM), LayoutError, "there is nothing to quantise"),
    "spec axis beyond": (
        lambda b: b.quantize(F32[0], SYM),
        LayoutError,
        r"shares scales over axes \(1,\), x \[8\] has no such axis",
    ),
    "exponent shape": (
        lambda b: b.reduce_moments(F32, np.zeros((1, 7), np.int32), 0),
        LayoutError,
        r"exponent \[1, 7\] does not broadcast to x",
    ),
    "exponent dims": (
        lambda b: b.reduce_moments(F32, np.zeros(8, np.int32), 0),
        LayoutError,
        "does not broadcast to x",
    ),
    "scale shape": (
        lambda b: b.quantize(F32, SYM, scale=np.ones((1, 8), np.float32)),
        LayoutError,
        r"scale is \[1, 8\]; \[4, 1\] would fit",
    ),
    "given scale of affine": (
        lambda b: b.quantize(F32, AFF, scale=np.ones((4, 1), np.float32)),
        ConfigError,
        "affine .* a scale cannot be given",
    ),
    "scale of dequantize": (
        lambda b: b.dequantize(quantized(scale=(4, 8)), SYM),
        LayoutError,
        r"scale is \[4, 8\]; \[4, 1\]",
    ),
    "zero of dequantize": (
        lambda b: b.dequantize(quantized(zero=(1, 1), dtype=np.uint8), AFF),
        LayoutError,
        r"zero is \[1, 1\]; \[4, 1\]",
    ),
    "rotate width": (
        lambda b: b.rotate(F32, seed=0, block=16),
        LayoutError,
        r"last axis of x \[4, 8\] is not a multiple of block=16",
    ),
    "rotate scalar": (lambda b: b.rotate(np.float32(1).reshape(()), seed=0, block=1), LayoutError, "is not a multiple"),
    "pack scalar": (lambda b: b.pack_bits(np.zeros((), np.uint8), 1), LayoutError, "a scalar has no rows"),
    "unpack count": (
        lambda b: b.unpack_bits(np.zeros((1, 2), np.uint8), 3, 6),
        LayoutError,
        "6 values of 3 bits do not fill rows of x",
    ),
    "unpack negative": (lambda b: b.unpack_bits(np.zeros((1, 0), np.uint8), 3, -1), LayoutError, "-1 values"),
    "count 1-d": (lambda b: b.count_symbols(np.zeros(4, np.uint8)), LayoutError, r"takes \[..., T, C\], got \[4\]"),
    "rope table": (
        lambda b: b.shift_rope(F32[:, None], *np.zeros((2, 5, 4), np.float32)),
        LayoutError,
        r"need cos and sin \[T, R\], got \[5, 4\]",
    ),
    "rope too wide": (
        lambda b: b.shift_rope(F32[:, None], *np.zeros((2, 4, 5), np.float32)),
        LayoutError,
        "5 pairs rotates 10 channels, heads have 8",
    ),
    "rope sin": (
        lambda b: b.shift_rope(F32[:, None], np.zeros((4, 2), np.float32), np.zeros((4, 3), np.float32)),
        LayoutError,
        "cos and sin",
    ),
    "rope out": (
        lambda b: b.shift_rope(F32[:, None], *np.zeros((2, 4, 2), np.float32), out=np.zeros((4, 1, 8), np.int16)),
        LayoutError,
        "out has dtype int16",
    ),
    # static arguments
    "policy": (lambda b: b.reduce_absmax(F32, 0, nonfinite="ignore"), ConfigError, "nonfinite='ignore' is no policy"),
    "propagate into ints": (
        lambda b: b.quantize(F32, SYM, nonfinite="propagate"),
        ConfigError,
        "kind 'int' cannot carry NaN",
    ),
    "block": (lambda b: b.rotate(F32, seed=0, block=6), ConfigError, "power of two from 1 to 1024, got 6"),
    "seed": (lambda b: b.rotate(F32, seed=1 << 64, block=8), ConfigError, r"seed must be 0 .. 2\*\*64 - 1"),
    "bits": (lambda b: b.pack_bits(np.zeros((1, 1), np.uint8), 0), ConfigError, "bits must be 1 to 8, got 0"),
    # out
    "out shape": (
        lambda b: b.reduce_norm(F32, 0, out=np.zeros((8,), np.float32)),
        LayoutError,
        r"out is float32 \[8\]; float32 \[1, 8\]",
    ),
    "out dtype": (lambda b: b.reduce_norm(F32, 0, out=np.zeros((1, 8))), LayoutError, "out is float64"),
    "out read-only": (
        lambda b: b.reduce_norm(F32, 0, out=read_only(np.zeros((1, 8), np.float32))),
        LayoutError,
        "out is read-only",
    ),
    "out codes": (
        lambda b: b.quantize(F32, SYM, out=quantized(codes=(8, 4))),
        LayoutError,
        r"out.codes is int8 \[8, 4\]",
    ),
    "out scale": (lambda b: b.quantize(F32, SYM, out=quantized(scale=(1, 1))), LayoutError, "out.scale is float32"),
    "digest out": (
        lambda b: b.digest([b"a"], out=np.zeros(2, np.uint64)),
        LayoutError,
        r"out is uint64 \[2\]; uint64 \[1\]",
    ),
    # gather and scatter
    "index dtype": (lambda b: b.gather_paged(paged(), np.zeros(2, np.int32)), LayoutError, r"int64 \[n\], got int32"),
    "index dims": (
        lambda b: b.gather_paged(paged(), np.zeros((1, 2), np.int64)),
        LayoutError,
        r"int64 \[n\], got int64 \[1, 2\]",
    ),
    "index strides": (lambda b: b.gather_paged(paged(), np.zeros(4, np.int64)[::2]), LayoutError, "must be contiguous"),
    "gather from dense": (
        lambda b: b.gather_paged(dense(4), slots(0), out=dense(1)),
        LayoutError,
        "is dense; gather and scatter",
    ),
    "gather to paged": (
        lambda b: b.gather_paged(paged(), slots(0), out=paged()),
        LayoutError,
        "paged where a dense chunk",
    ),
    "too few slots": (
        lambda b: b.gather_paged(paged(), slots(0), out=dense(2)),
        LayoutError,
        "2 tokens, so 2 slots are needed; 1 were",
    ),
    "too many blocks": (
        lambda b: b.gather_paged(paged(), slots(0, 1), unit="block", out=dense(4)),
        LayoutError,
        "so 1 blocks are needed; 2 were given",
    ),
    "unit": (lambda b: b.gather_paged(paged(), slots(0), unit="page", out=dense(1)), ConfigError, "unit='page'"),
    "skip too much": (
        lambda b: b.gather_paged(paged(), slots(0), skip_tokens=2, out=dense(1)),
        ConfigError,
        "skip_tokens=2",
    ),
    "skip negative": (
        lambda b: b.gather_paged(paged(), slots(0), skip_tokens=-1, out=dense(1)),
        ConfigError,
        "skip_tokens",
    ),
    "other heads": (
        lambda b: b.gather_paged(paged(), slots(0), out=dense(1, heads=1)),
        LayoutError,
        "do not hold the same",
    ),
    "other dtype": (
        lambda b: b.gather_paged(paged(), slots(0), out=dense(1, BF16)),
        LayoutError,
        "do not hold the same",
    ),
    "other layers": (
        lambda b: b.scatter_paged(dense(1, layers=2), slots(0), out=paged()),
        LayoutError,
        "do not hold the same",
    ),
    "second chunk": (
        lambda b: b.scatter_paged([dense(1), dense(1, heads=3)], slots(0, 1), out=paged()),
        LayoutError,
        "do not hold",
    ),
    "scatter to read-only": (
        lambda b: b.scatter_paged(
            dense(1), slots(0), out=Layout("L|KBNHD").bind([read_only(np.zeros((2, B, N, H, D), np.float16))])
        ),
        LayoutError,
        "read-only",
    ),
    "scatter to a broadcast cache": (
        lambda b: b.scatter_paged(
            dense(1), slots(0), out=Layout("L|KBNHD").bind([torch.zeros((2, 1, N, H, D)).half().expand(2, B, N, H, D)])
        ),
        LayoutError,
        "share bytes",
    ),
    "another device": (
        lambda b: b.scatter_paged(
            dense(1), slots(0), out=Layout("L|KBNHD").bind([torch.zeros((2, B, N, H, D), device="meta").half()])
        ),
        LayoutError,
        "one layout is on .*meta",
    ),
    # convert
    "convert paged": (lambda b: b.convert_layout(paged(), out=dense(4)), LayoutError, "the source .* is paged"),
    "convert to paged": (lambda b: b.convert_layout(dense(4), out=paged()), LayoutError, "the target .* is paged"),
    "convert length": (
        lambda b: b.convert_layout(dense(4), out=dense(5)),
        LayoutError,
        "axis T: the source has 4 tokens, the target 5",
    ),
    "convert heads": (lambda b: b.convert_layout(dense(4), out=dense(4, heads=1)), LayoutError, "do not hold the same"),
    # copies
    "copy sizes": (lambda b: b.copy_batch([b"abc"], out=[bytearray(2)]), LayoutError, r"got \[2\] B for \[3\] B"),
    "copy counts": (lambda b: b.copy_batch([b"abc"], out=[]), LayoutError, r"got \[\] B for \[3\] B"),
    "copy to bytes": (lambda b: b.copy_batch([b"abc"], out=[b"xyz"]), LayoutError, r"out\[0\] is read-only"),
    "copy floats": (
        lambda b: b.copy_batch([F32], out=[F32]),
        LayoutError,
        r"src\[0\] must be contiguous bytes, uint8 \[n\], got float32",
    ),
    "copy strided": (
        lambda b: b.copy_batch([BUFFER[:20:2]], out=[bytearray(10)]),
        LayoutError,
        r"src\[0\] must be contiguous",
    ),
    "copy onto itself": (
        lambda b: b.copy_batch([BUFFER[:10]], out=[BUFFER[5:15]]),
        LayoutError,
        r"out\[0\] overlaps src\[0\]",
    ),
    "copy back": (lambda b: b.copy_batch([BUFFER[5:15]], out=[BUFFER[:10]]), LayoutError, r"overlaps"),
    "copy twice": (
        lambda b: b.copy_batch([b"abc", b"def"], out=[BUFFER[:3], BUFFER[2:5]]),
        LayoutError,
        r"out\[1\] overlaps out\[0\]",
    ),
    "copy within": (
        lambda b: b.copy_batch([BUFFER[:50], b"de"], out=[bytearray(50), BUFFER[20:22]]),
        LayoutError,
        "overlaps src",
    ),
    "copy digests": (
        lambda b: b.copy_batch([b"abc"], out=[bytearray(3)], digests=np.zeros(1, np.int64)),
        LayoutError,
        "digests is int64",
    ),
    "digest floats": (lambda b: b.digest([F32]), LayoutError, r"src\[0\] must be contiguous bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_end_before_the_backend_is_called(recorder, name):
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call(recorder.backend)
    assert recorder.calls == []


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.copy_batch(
            [BUFFER[:10], BUFFER[:10]], out=[BUFFER[10:20], BUFFER[20:30]]
        ),  # one source, two copies
        lambda b: b.copy_batch([BUFFER[10:20]], out=[BUFFER[:10]]),  # neighbours
        lambda b: b.copy_batch([BUFFER[5:5]], out=[BUFFER[5:5]]),  # nothing overlaps nothing
        lambda b: b.copy_batch([], out=[]),
        lambda b: b.digest([]),
        lambda b: b.gather_paged(paged(), slots()),
        lambda b: b.gather_paged(paged(), slots(0), skip_tokens=1),
        lambda b: b.gather_paged(paged(), slots(0, 1), unit="block", out=dense(N + 1)),
        lambda b: b.shift_rope(F32[:, None], *np.zeros((2, 4, 0), np.float32)),
        lambda b: b.pack_bits(np.zeros((0, 5), np.uint8), 4),
        lambda b: b.count_symbols(np.zeros((0, 3), np.uint8)),
        lambda b: b.quantize(F32, QuantSpec.symmetric(8, ())),
    ],
)
def test_edges_that_are_fine_reach_the_backend(recorder, call):
    call(recorder.backend)
    assert len(recorder.calls) == 1


ARENA = np.zeros(4096, np.uint8)
WORDS = ARENA.view(np.float32)[:64].reshape(8, 8)  # the first 256 bytes
KEYS, TABLE = WORDS.reshape(2, 4, 8), np.zeros((2, 2, 4), np.float32)
TILES = ARENA[:256].view(np.int16).reshape(2, 8, 8)

SHARED = {
    "absmax into x": lambda b: b.reduce_absmax(WORDS, 1, out=WORDS[:, :1]),
    "moments into exponent": lambda b: b.reduce_moments(
        F32, ARENA[:32].view(np.int32).reshape(1, 8), 0, out=ARENA[16:144].view(np.int64).reshape(2, 1, 8)
    ),
    "codes into x": lambda b: b.quantize(
        WORDS, SYM, out=Quantized(ARENA[255:319].view(np.int8).reshape(8, 8), np.zeros((8, 1), np.float32), None)
    ),
    "scale into given scale": lambda b: b.quantize(
        F32, SYM, scale=WORDS[:4, :1], out=Quantized(np.zeros((4, 8), np.int8), WORDS[:4, :1], None)
    ),
    "values into codes": lambda b: b.dequantize(
        Quantized(ARENA[:64].view(np.int8).reshape(8, 8), np.zeros((8, 1), np.float32), None), SYM, out=WORDS
    ),
    "rotate in place": lambda b: b.rotate(WORDS, seed=1, block=8, out=WORDS),
    "pack in place": lambda b: b.pack_bits(ARENA[:64], 8, out=ARENA[:64]),
    "unpack in place": lambda b: b.unpack_bits(ARENA[:64], 4, 128, out=ARENA[:128]),
    "count into x": lambda b: b.count_symbols(
        ARENA[:8].reshape(2, 4), out=ARENA[:4096].view(np.uint32).reshape(4, 256)
    ),
    "shift by a token": lambda b: b.shift_rope(KEYS[:, :3], *TABLE, out=KEYS[:, 1:]),
    "shift as another dtype": lambda b: b.shift_rope(
        KEYS, *TABLE, out=ARENA[:128].view(np.float16).reshape(KEYS.shape)
    ),
    "shift into the table": lambda b: b.shift_rope(np.zeros((2, 4, 8), np.float32), WORDS[:2, :4], TABLE[0], out=KEYS),
    "symbols into values": lambda b: b.choose_classes(
        TILES,
        table_set("gauss"),
        out=TileChoice(ARENA[:128].reshape(2, 8, 8), np.zeros((2, 8), np.uint8), np.zeros((2, 8), np.int8)),
    ),
    "digest into a buffer": lambda b: b.digest([ARENA[:5], ARENA[7:16]], out=ARENA[8:24].view(np.uint64)),
    "digests into a source": lambda b: b.copy_batch(
        [ARENA[:8]], digests=ARENA[:8].view(np.uint64), out=[np.zeros(8, np.uint8)]
    ),
    "digests into a target": lambda b: b.copy_batch(
        [np.zeros(8, np.uint8)], digests=ARENA[:8].view(np.uint64), out=[ARENA[:8]]
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_an_out_that_shares_memory_with_an_input_is_refused(recorder, name):
    with pytest.raises(LayoutError, match="shares memory with an input"):
        SHARED[name](recorder.backend)
    assert recorder.calls == []


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.shift_rope(KEYS, *TABLE, out=KEYS),
        lambda b: b.shift_rope(KEYS[::-1], *TABLE, out=KEYS[::-1]),
        lambda b: b.rotate(WORDS[:, :4], seed=1, block=4, out=WORDS[:, 4:]),  # side by side
        lambda b: b.rotate(WORDS[::2], seed=1, block=8, out=WORDS[1::2]),
        lambda b: b.reduce_absmax(WORDS[:, :7], 1, out=WORDS[:, 7:]),
        lambda b: b.pack_bits(ARENA[:64], 8, out=ARENA[64:128]),
    ],
)
def test_an_out_beside_an_input_is_fine_and_so_is_the_same_view_in_place(recorder, call):
    call(recorder.backend)
    assert len(recorder.calls) == 1


def test_every_op_is_a_method_that_says_what_it_does(ops):
    for op in op_specs():
        assert inspect.getdoc(getattr(ops, op))
        parameters = inspect.signature(getattr(ops, op)).parameters
        assert {"out", "stream", "workspace"} <= set(parameters)
    assert repr(ops) == f"Backend('recorder', {len(op_specs())} of {len(op_specs())} ops)"
