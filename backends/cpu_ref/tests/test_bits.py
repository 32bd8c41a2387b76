"""Packing, counting and digesting, against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvcore import QuantizationError

MASK = (1 << 64) - 1
GOLDEN = ["b55a8fa067537a73", "0414f5f99c528d5a", "2971b2d43ae675f8", "f044b0b18a7ecbb3"]


@given(st.integers(1, 8), st.booleans(), st.integers(0, 20), st.data())
def test_bit_j_of_value_i_is_where_the_definition_has_it(ref, bits, signed, count, data):
    low = -(1 << (bits - 1)) if signed else 0
    values = data.draw(st.lists(st.integers(low, low + (1 << bits) - 1), min_size=count, max_size=count))
    x = np.array(values, np.int8 if signed else np.uint8)[None]
    packed = ref.pack_bits(x, bits)
    number = sum((v & ((1 << bits) - 1)) << (i * bits) for i, v in enumerate(values))
    assert packed.tobytes() == number.to_bytes(-(-count * bits // 8), "little")
    np.testing.assert_array_equal(ref.unpack_bits(packed, bits, count, dtype=x.dtype), x)


def test_three_bits_least_significant_first(ref):
    np.testing.assert_array_equal(ref.pack_bits(np.uint8([[1, 2, 3, 4, 5]]), 3), [[0b11_010_001, 0b0_101_100_0]])


def test_unused_bits_of_the_last_byte_are_ignored(ref):
    np.testing.assert_array_equal(ref.unpack_bits(np.uint8([[0b11111_101]]), 3, 1), [[5]])
    np.testing.assert_array_equal(ref.unpack_bits(np.uint8([[0b11111_101]]), 3, 1, dtype="int8"), [[-3]])


@pytest.mark.parametrize(
    ("value", "dtype", "bits"), [(4, np.uint8, 2), (255, np.uint8, 7), (2, np.int8, 2), (-3, np.int8, 2)]
)
def test_values_that_do_not_fit_are_refused_and_nothing_is_written(ref, value, dtype, bits):
    out = np.full((1, 1), 0xAA, np.uint8)
    with pytest.raises(QuantizationError, match=f"do not fit {bits} bits"):
        ref.pack_bits(np.array([[value]], dtype), bits, out=out)
    assert out[0, 0] == 0xAA


def test_rows_are_packed_each_by_itself(ref):
    x = np.random.default_rng(0).integers(0, 8, (3, 2, 5)).astype(np.uint8)
    whole = ref.pack_bits(x, 3)
    assert whole.shape == (3, 2, 2)
    for i, j in np.ndindex(3, 2):
        np.testing.assert_array_equal(whole[i, j], ref.pack_bits(x[i, j], 3))


@given(arrays(np.uint8, st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 4))))
def test_symbols_are_counted_by_channel(ref, x):
    counts = ref.count_symbols(x)
    assert counts.shape == (x.shape[0], x.shape[2], 256)
    for i, c in np.ndindex(x.shape[0], x.shape[2]):
        column = x[i, :, c].tolist()
        assert counts[i, c].tolist() == [column.count(s) for s in range(256)]


# --- digest


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def digest(data):
    golden = 0x9E3779B97F4A7C15
    total = mix(len(data) ^ 0xD6E8FEB86659FD93)
    padded = data + bytes(-len(data) % 16)
    for i in range(len(padded) // 16):
        low = int.from_bytes(padded[16 * i : 16 * i + 8], "little")
        high = int.from_bytes(padded[16 * i + 8 : 16 * i + 16], "little")
        inner = mix((low + golden * (2 * i + 1)) & MASK) ^ high
        total += mix((inner + golden * (2 * i + 2)) & MASK)
    return total & MASK


@given(st.lists(st.binary(max_size=70), max_size=4))
def test_digests_are_those_of_the_definition(ref, buffers):
    assert ref.digest(buffers).tolist() == [digest(b) for b in buffers]


def test_digests_that_were_written_down(ref):
    # Stored records carry digests: these must never change.
    buffers = [b"", b"\0", b"abc", bytes(range(256))]
    assert [f"{d:016x}" for d in ref.digest(buffers).tolist()] == GOLDEN


@given(st.binary(min_size=1, max_size=64), st.data())
def test_any_damage_is_seen(ref, data, draw):
    at = draw.draw(st.integers(0, len(data) * 8 - 1))
    flipped = bytearray(data)
    flipped[at // 8] ^= 1 << at % 8
    same, other, longer, shorter = ref.digest([data, bytes(flipped), data + b"\0", data[:-1]])
    assert len({same, other, longer, shorter}) == 4


def test_order_of_blocks_and_words_matters(ref):
    a, b = bytes(range(8)), bytes(range(8, 16))
    x, y = a + b, bytes(range(100, 116))
    assert len(set(ref.digest([a + b, b + a, x + y, y + x]).tolist())) == 4
