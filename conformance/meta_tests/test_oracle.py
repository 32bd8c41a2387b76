"""The oracle and the memory under watch: what the suite itself stands on."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Layout, Quantized
from kvcore.dtypes import to_dtype
from kvcore.entropy import KINDS
from kvcore_conformance.arena import GUARD_BYTES, arenas, clone, pattern, place, root
from kvcore_conformance.layouts import DENSE, LAYOUTS, bound, caches, chunks_for
from kvcore_conformance.oracle.digest import digest_of
from kvcore_conformance.oracle.movement import locate, parts_of, row_of
from kvcore_conformance.oracle.numbers import FORMATS, f32, groups
from kvcore_conformance.profiles import PROFILES, active, explore
from kvcore_conformance.tiles import ANY, TileCase, encoded, make, other_tables

SMALL = [name for name, fmt in FORMATS.items() if fmt.nbytes <= 2]


@pytest.mark.parametrize("name", SMALL)
def test_every_bit_pattern_decodes_to_its_value(name):
    fmt = FORMATS[name]
    bits = np.arange(1 << 8 * fmt.nbytes, dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = bits.astype(f"u{fmt.nbytes}").view(to_dtype(name)).astype(np.float64)
    decoded = np.array([fmt.decode(int(b)) for b in bits])
    assert np.array_equal(decoded, values, equal_nan=True)
    assert np.array_equal(np.signbit(decoded[~np.isnan(values)]), np.signbit(values[~np.isnan(values)]))
    assert fmt.largest == float(ml_dtypes.finfo(to_dtype(name)).max)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_decoded_encodes_to_the_same_bits(name):
    fmt = FORMATS[name]
    for bits in range(1 << min(16, 8 * fmt.nbytes)):
        value = fmt.decode(bits << max(8 * fmt.nbytes - 16, 0))
        if not math.isnan(value) and (fmt.infinite or math.isfinite(value)):
            assert fmt.encode(value) == bits << max(8 * fmt.nbytes - 16, 0)


@pytest.mark.parametrize("name", SMALL)
def test_a_value_between_two_goes_to_the_nearer_and_a_tie_to_the_even_one(name):
    fmt = FORMATS[name]
    for bits in range(0, fmt.top, 1 if fmt.nbytes == 1 else 97):
        low, high = fmt.decode(bits), fmt.decode(bits + 1)
        middle = (low + high) / 2
        assert Fraction(middle) * 2 == Fraction(low) + Fraction(high)
        assert fmt.encode(middle) == bits + bits % 2
        assert fmt.encode(math.nextafter(middle, -math.inf)) == bits
        assert fmt.encode(math.nextafter(middle, math.inf)) == bits + 1
    assert fmt.encode(fmt.largest * 8) == fmt.top


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float32_rounds_as_the_format_does(value):
    fmt = FORMATS["float32"]
    rounded = f32(value)
    if math.isfinite(rounded):
        assert fmt.decode(fmt.encode(value)) == rounded
    else:
        assert fmt.encode(value) & 0x7FFFFFFF == fmt.top


def test_groups_go_through_the_reduced_axes_in_c_order():
    found = dict(groups((2, 3, 2), (0, 2)))
    assert list(found) == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert found[(0, 1, 0)] == [(0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)]


def test_digests_known_by_hand():
    # mix(0 ^ 0xD6E8FEB86659FD93), worked out from the definition.
    z = 0xD6E8FEB86659FD93
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    assert digest_of(b"") == z ^ (z >> 31)
    assert len({digest_of(b"\0" * n) for n in range(40)}) == 40


# --- memory


@given(
    st.permutations(range(3)),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 7),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_placed_arrays_hold_their_values_and_touch_no_guard(order, gaps, flip, shift, extent):
    values = pattern(3 * extent * 4 * 2).view(np.float16).reshape(3, extent, 4)
    array = place(values, order=order, gaps=gaps, flip=flip, shift=shift)
    assert array.tobytes() == values.tobytes()
    assert not extent or flip or array.flags.aligned == (shift % 2 == 0)
    memory = root(array)
    before = memory.copy()
    array.view(np.uint16)[...] ^= 0xFFFF
    assert (memory != before).sum() == values.nbytes
    assert np.array_equal(memory[:GUARD_BYTES], before[:GUARD_BYTES])
    assert np.array_equal(memory[-GUARD_BYTES:], before[-GUARD_BYTES:])


def test_a_gap_of_a_shifted_array_is_as_many_bytes_wider():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert place(values, shift=1).strides == (12, 4)
    assert place(values, gaps=(1, 0), shift=1).strides == (17, 4)
    assert place(values, gaps=(0, 1), shift=3).strides == (33, 11)
    assert np.array_equal(place(values, gaps=(2, 1), flip=3, shift=3), values)


def test_clones_share_what_was_shared_and_nothing_else():
    x = place(np.arange(12, dtype=np.int32).reshape(3, 4), order=(1, 0), flip=1)
    half = x[1:, ::2]
    copy = clone({"x": x, "half": [half], "q": Quantized(half, x, None)})
    assert copy["half"][0].tobytes() == half.tobytes()
    assert copy["x"].strides == x.strides
    assert len(arenas(copy)) == 1
    assert not np.shares_memory(copy["x"], x)
    copy["x"][1, 0] = 99
    assert copy["half"][0][0, 0] == 99
    assert copy["q"].codes[0, 0] == 99
    assert x[1, 0] == 4


# --- tables


@pytest.mark.parametrize("kind", KINDS)
def test_other_tables_are_of_every_precision_and_have_what_shipped_ones_do_not(kind):
    for bits in range(1, 16):
        sets = [other_tables(kind, bits, seed) for seed in range(4)]
        assert {tables.bits for tables in sets} == {bits}
        frequency = np.concatenate([tables.frequency for tables in sets])
        assert {0, 1 << bits} <= set(frequency.flat)


@pytest.mark.parametrize("name", ANY)
def test_likely_values_of_other_tables_are_coded_in_mode_rans(name):
    modes = []
    for bits in range(1, 16):
        tables = other_tables(name.removeprefix("any "), bits, seed=1)
        modes += encoded(TileCase(tables, False, place(make(tables, (2, 40, 33), "likely", bits)))).modes.tolist()
    assert modes.count(2) > len(modes) // 2


# --- layouts


@pytest.mark.parametrize("case", [*LAYOUTS, *DENSE], ids=lambda case: case.name)
@given(data=st.data())
def test_every_element_of_a_layout_has_bytes_of_its_own(case, data):
    dtypes = data.draw(st.sampled_from(case.dtypes))
    cache = data.draw(caches(LAYOUTS[0] if case in DENSE else case, {"": "float16"} if case in DENSE else dtypes))
    if case in DENSE:
        cache = data.draw(chunks_for(cache, [2]))[0]
    seen = set()
    for part in parts_of(cache.text):
        heads, width = row_of(cache, part)
        for layer, slot, head, channel in itertools.product(
            range(cache.extents.get("L", 1)), range(cache.tokens), range(heads), range(width)
        ):
            memory, offset, size = locate(cache, part, layer, slot, head, channel)
            assert offset >= GUARD_BYTES
            assert offset + size <= memory.size - GUARD_BYTES
            taken = set(range(offset, offset + size))
            assert not taken & seen
            seen |= taken
    assert len(seen) == cache.rows.nbytes


def test_an_element_of_a_layout_is_where_numpy_says():
    cache = bound("L|BKHND", {"L": 2, "B": 3, "N": 4, "H": 2, "D": 5}, {"": "uint8"}, pads=(1, 0, 2))
    memory, offset, _ = locate(cache, "V", 1, slot=2 * 4 + 3, head=1, channel=4)
    assert memory[offset] == cache.tensors[1][2, 1, 1, 3, 4]
    fused = bound("KL|(BN)HD", {"L": 2, "B": 3, "N": 4, "H": 2, "D": 5}, {"": "uint8"})
    memory, offset, _ = locate(fused, "K", 1, slot=7, head=0, channel=2)
    assert memory[offset] == fused.tensors[0][1][7, 0, 2]
    turned = bound("L|BH[K:DN,V:ND]", {"L": 1, "B": 2, "N": 3, "H": 2, "D": 4}, {"": "uint8"})
    memory, offset, _ = locate(turned, "K", 0, slot=4, head=1, channel=3)
    assert memory[offset] == turned.tensors[0][1, 1, 3 * 3 + 1]
    memory, offset, _ = locate(turned, "V", 0, slot=4, head=1, channel=3)
    assert memory[offset] == turned.tensors[0][1, 1, 12 + 1 * 4 + 3]


def test_the_binder_agrees_with_the_oracle():
    # Two readings of a layout string, written apart: kvcore's and the oracle's.
    cache = bound("L|B[v:N6,s:N2]", {"L": 1, "B": 2, "N": 3}, {"": "uint8"})
    rows = Layout("L|B[v:N6,s:N2]", N=3).bind(cache.tensors)
    memory, offset, _ = locate(cache, "s", 0, slot=4, head=0, channel=1)
    assert rows.bytes_view("s", 0)[1, 1, 0, 1, 0] == memory[offset]


# --- profiles


def test_exploring_runs_as_often_as_the_profile_says_and_asks_pytest_for_fixtures_only():
    import inspect

    calls = []

    @explore(0.5, n=st.integers(0, 10**6))
    def test(fixture, n):
        calls.append((fixture, n))

    assert list(inspect.signature(test).parameters) == ["fixture"]
    test(fixture="f")
    first = list(calls)
    calls.clear()
    test(fixture="f")
    assert calls == first, "a derandomised profile tries other inputs the second time"
    assert len(calls) == round(active().examples * 0.5)
    assert {f for f, _ in calls} == {"f"}


def test_profiles_grow():
    sizes = [PROFILES[name].examples for name in ("tiny", "quick", "ci", "nightly")]
    assert sizes == sorted(sizes)
    assert [p.derandomize for p in PROFILES.values()] == [True, True, True, False]
