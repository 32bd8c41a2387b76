"""pack_bits, unpack_bits and count_symbols."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kvcore import Backend
from kvcore.errors import ConfigError, LayoutError
from kvcore_conformance.arena import pattern, place
from kvcore_conformance.checks import Subject
from kvcore_conformance.profiles import explore
from kvcore_conformance.strategies import byte_arrays, out_like, shapes

PACK = pytest.mark.kvcore_op("pack_bits")
UNPACK = pytest.mark.kvcore_op("unpack_bits")
COUNT = pytest.mark.kvcore_op("count_symbols")
EVERY_WIDTH = pytest.mark.parametrize("bits", range(1, 9))
BOTH_TYPES = pytest.mark.parametrize("dtype", ["uint8", "int8"])


def _range(dtype: str, bits: int) -> tuple[int, int]:
    return (0, (1 << bits) - 1) if dtype == "uint8" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def _packed(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] * bits // 8))


@PACK
@EVERY_WIDTH
@BOTH_TYPES
@explore(0.7, data=st.data(), shape=shapes(empty=True))
def test_pack(subject: Subject, bits: int, dtype: str, data: Any, shape: tuple[int, ...]) -> None:
    subject.require("pack_bits", dtype=dtype)
    x = data.draw(byte_arrays(dtype, shape, *_range(dtype, bits)))
    out = data.draw(out_like(_packed(shape, bits), "uint8"))
    subject.check("pack_bits", x, bits, out=out)


@PACK
@EVERY_WIDTH
@BOTH_TYPES
def test_pack_refuses_values_that_do_not_fit(subject: Subject, bits: int, dtype: str) -> None:
    subject.require("pack_bits", dtype=dtype)
    low, high = _range(dtype, bits)
    for bad in (low - 1, high + 1, -128, 127, 255):
        if low <= bad <= high or not (0 if dtype == "uint8" else -128) <= bad <= (255 if dtype == "uint8" else 127):
            continue
        x = np.full((3, 5), high, np.dtype(dtype))
        x[2, 4] = bad
        out = place(pattern(3 * _packed((5,), bits)[0]).reshape(3, -1))
        subject.check("pack_bits", place(x), bits, out=out)


@UNPACK
@EVERY_WIDTH
@BOTH_TYPES
@explore(0.7, data=st.data(), shape=shapes(empty=True))
def test_unpack(subject: Subject, bits: int, dtype: str, data: Any, shape: tuple[int, ...]) -> None:
    subject.require("unpack_bits", dtype="uint8")
    # Any bytes: the bits that no value uses are ignored.
    x = data.draw(byte_arrays("uint8", _packed(shape, bits), 0, 255))
    subject.check("unpack_bits", x, bits, shape[-1], out=data.draw(out_like(shape, dtype)))


@PACK
@EVERY_WIDTH
@BOTH_TYPES
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 33])
def test_pack_rows_of_every_length(subject: Subject, bits: int, dtype: str, count: int) -> None:
    subject.require("pack_bits", dtype=dtype)
    low, high = _range(dtype, bits)
    x = place((low + np.arange(2 * count) * 5 % (high - low + 1)).astype(dtype).reshape(2, count))
    out = place(pattern(2 * _packed((count,), bits)[0]).reshape(2, -1) if count else np.zeros((2, 0), np.uint8))
    subject.check("pack_bits", x, bits, out=out)
    subject.check_fresh("pack_bits", x, bits, out=out)
    subject.check_plan("pack_bits", x, bits, out=out)


@UNPACK
@EVERY_WIDTH
@BOTH_TYPES
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 33])
def test_unpack_rows_of_every_length(subject: Subject, bits: int, dtype: str, count: int) -> None:
    subject.require("unpack_bits", dtype="uint8")
    shape = _packed((2, count), bits)
    x = place(pattern(shape[0] * shape[1]).reshape(shape))
    out = place(np.zeros((2, count), dtype))
    subject.check("unpack_bits", x, bits, count, out=out)
    subject.check_fresh("unpack_bits", x, bits, count, out=out)
    subject.check_plan("unpack_bits", x, bits, count, out=out)


@COUNT
@explore(2.0, data=st.data(), shape=shapes(min_dims=2, empty=True), full=st.booleans())
def test_count(subject: Subject, data: Any, shape: tuple[int, ...], full: bool) -> None:
    x = data.draw(byte_arrays("uint8", shape, 0, 255 if full else 3))
    out = data.draw(out_like((*shape[:-2], shape[-1], 256), "uint32"))
    subject.check("count_symbols", x, out=out)


@COUNT
@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 257])
@pytest.mark.parametrize("channels", [1, 3])
def test_count_around_a_chunk(subject: Subject, tokens: int, channels: int) -> None:
    x = place(np.arange(tokens * channels).reshape(tokens, channels).astype(np.uint8))
    out = place(np.full((channels, 256), 7, np.uint32))
    subject.check("count_symbols", x, out=out)
    subject.check_fresh("count_symbols", x, out=out)
    subject.check_plan("count_symbols", x, out=out)


@COUNT
@pytest.mark.parametrize("symbol", [0, 128, 255])
def test_count_of_one_symbol(subject: Subject, symbol: int) -> None:
    x = place(np.full((300, 2), symbol, np.uint8))
    subject.check("count_symbols", x, out=place(np.full((2, 256), 9, np.uint32)))


@PACK
@EVERY_WIDTH
@BOTH_TYPES
@pytest.mark.parametrize("channels", [96, 128])
def test_larger_pack_as_the_reference(
    subject: Subject, reference: Backend, bits: int, dtype: str, channels: int
) -> None:
    subject.require("pack_bits", dtype=dtype)
    low, high = _range(dtype, bits)
    x = place((low + pattern(257 * channels).astype(np.int64) % (high - low + 1)).astype(dtype).reshape(257, channels))
    out = place(np.zeros(_packed((257, channels), bits), np.uint8))
    subject.check("pack_bits", x, bits, out=out, reference=reference)


@UNPACK
@EVERY_WIDTH
@BOTH_TYPES
@pytest.mark.parametrize("channels", [96, 128])
def test_larger_unpack_as_the_reference(
    subject: Subject, reference: Backend, bits: int, dtype: str, channels: int
) -> None:
    subject.require("unpack_bits", dtype="uint8")
    shape = _packed((257, channels), bits)
    x = place(pattern(shape[0] * shape[1]).reshape(shape))
    subject.check("unpack_bits", x, bits, channels, out=place(np.zeros((257, channels), dtype)), reference=reference)


@COUNT
@pytest.mark.parametrize("channels", [96, 128])
def test_larger_counts_as_the_reference(subject: Subject, reference: Backend, channels: int) -> None:
    subject.require("count_symbols", dtype="uint8")
    x = place(pattern(257 * channels).reshape(257, channels))
    subject.check("count_symbols", x, out=place(np.zeros((channels, 256), np.uint32)), reference=reference)


@PACK
@UNPACK
def test_torch_tensors(subject: Subject) -> None:
    torch = pytest.importorskip("torch")
    subject.require("pack_bits", dtype="uint8")
    subject.require("unpack_bits", dtype="uint8")
    x = torch.arange(9, dtype=torch.uint8).reshape(1, 9) % 8
    packed = torch.zeros((1, 4), dtype=torch.uint8)
    assert subject.ops.pack_bits(x, 3, out=packed) is packed
    subject.backend.runtime.check()
    wanted = sum(int(v) << (3 * i) for i, v in enumerate(x[0])).to_bytes(4, "little")
    assert bytes(packed.numpy().tobytes()) == wanted, "pack_bits: torch tensors differ"
    back = torch.zeros_like(x)
    subject.ops.unpack_bits(packed, 3, 9, out=back)
    subject.backend.runtime.check()
    assert torch.equal(back, x), "unpack_bits: torch tensors differ"


@PACK
@UNPACK
@COUNT
def test_bad_arguments_are_refused(subject: Subject) -> None:
    x, out = place(np.zeros((2, 8), np.uint8)), place(np.zeros((2, 1), np.uint8))
    for bits in (0, 9, -1):
        subject.check_raises(ConfigError, "pack_bits", x, bits, out=out)
        subject.check_raises(ConfigError, "unpack_bits", out, bits, 8, out=x)
    subject.check_raises(LayoutError, "pack_bits", x, 2, out=out)
    subject.check_raises(LayoutError, "pack_bits", place(np.zeros((2, 8), np.int16)), 1, out=out)
    subject.check_raises(LayoutError, "unpack_bits", out, 1, 9, out=place(np.zeros((2, 9), np.uint8)))
    subject.check_raises(LayoutError, "unpack_bits", out, 1, 8, out=place(np.zeros((2, 8), np.int32)))
    subject.check_raises(LayoutError, "count_symbols", x, out=place(np.zeros((8, 255), np.uint32)))
    subject.check_raises(LayoutError, "count_symbols", x, out=place(np.zeros((8, 256), np.int64)))
    subject.check_raises(LayoutError, "pack_bits", x, 8, out=x)  # no memory of its own
    subject.check_raises(LayoutError, "unpack_bits", x[:, :1], 8, 1, out=x[:, :1])
    frozen = place(np.zeros((2, 1), np.uint8))
    frozen.flags.writeable = False
    subject.check_raises(LayoutError, "pack_bits", x, 1, out=frozen)
