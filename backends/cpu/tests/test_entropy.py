"""Entropy coding with tables of any precision; the conformance suite has the shipped sets, which are of 11 bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.entropy import EncodedTiles, TableSet, tile_bytes, tile_capacity
from kvcore.errors import CorruptFrameError

# The backend is opened once for all examples.
IN_EACH_SET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_tables(rng, bits, kind="integer"):
    """Return a table set: some tables with few symbols, some with many, one with nothing but ESC."""
    frequency = np.zeros((32, 256), np.uint16)
    for k in range(32):
        used = int(rng.integers(1, min(256, 1 << bits) + 1)) if k else 1
        symbols = np.concatenate([[0], 1 + rng.choice(255, used - 1, replace=False)])
        weights = rng.dirichlet(np.full(used, 0.3)) * ((1 << bits) - used)
        frequency[k, symbols] = 1 + weights.astype(np.int64)
        frequency[k, symbols[-1]] += (1 << bits) - int(frequency[k].sum())
    cost = rng.integers(0, 65536, (32, 256)).astype(np.uint16)
    return TableSet("random", kind, bits, frequency, cost, bytes(32))


def check_coding(cpu, ref, values, tables, *, use_offsets):
    """Compare with the reference: choice, bytes, and values."""
    choice = cpu.choose_classes(values, tables, use_offsets=use_offsets)
    wanted = ref.choose_classes(values, tables, use_offsets=use_offsets)
    for got, want in zip(choice, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    coded = cpu.encode_symbols(values, choice, tables, use_offsets=use_offsets)
    expected = ref.encode_symbols(values, choice, tables, use_offsets=use_offsets)
    np.testing.assert_array_equal(coded.modes, expected.modes)
    np.testing.assert_array_equal(coded.words, expected.words)
    for m, (mode, words) in enumerate(zip(coded.modes.tolist(), coded.words.tolist(), strict=True)):
        size = tile_bytes(mode, words, values.shape[2], tables, use_offsets)
        np.testing.assert_array_equal(coded.payload[m, :size], expected.payload[m, :size])
    back = np.empty_like(values)
    cpu.decode_symbols(coded, tables, use_offsets=use_offsets, out=back)
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("bits", range(1, 16))
def test_tables_of_every_precision(cpu, ref, bits):
    rng = np.random.default_rng(bits)
    for width in (64, 37, 5):
        tables = random_tables(rng, bits)
        for spread in (0.3, 4, 60):
            values = np.rint(rng.normal(3, spread, (3, 40, width))).astype(np.int16)
            check_coding(cpu, ref, values, tables, use_offsets=spread == 4)


@pytest.mark.parametrize("kind", ["exponent", "code"])
@pytest.mark.parametrize("bits", [9, 12])
def test_other_kinds_at_other_precisions(cpu, ref, kind, bits):
    rng = np.random.default_rng(bits)
    values = rng.integers(100, 140 if kind == "code" else 400, (2, 30, 33)).astype(np.int16)
    check_coding(cpu, ref, values, random_tables(rng, bits, kind), use_offsets=False)


@IN_EACH_SET
@given(
    seed=st.integers(0, 2**32), bits=st.sampled_from([8, 10, 11, 13]), width=st.integers(1, 64), tiles=st.integers(1, 4)
)
def test_bytes_that_were_changed_are_refused_or_are_another_tile(cpu, ref, seed, bits, width, tiles):
    rng = np.random.default_rng(seed)
    tables, tokens = random_tables(rng, bits), int(rng.integers(1, 20))
    values = np.rint(rng.normal(0, 9, (tiles, tokens, width))).astype(np.int16)
    choice = ref.choose_classes(values, tables, use_offsets=False)
    coded = ref.encode_symbols(values, choice, tables, use_offsets=False)
    payload = np.array(coded.payload)
    front = tile_capacity(tokens, width) // 3
    flip = np.uint8(1 << rng.integers(0, 8))
    payload[:, :front] ^= np.where(rng.random((tiles, front)) < 0.02, flip, np.uint8(0))
    changed = EncodedTiles(payload, coded.modes, coded.words)

    def decoded(backend):
        try:
            return backend.decode_symbols(changed, tables, use_offsets=False, out=np.zeros_like(values)).tobytes()
        except CorruptFrameError as error:
            return error.reason

    assert decoded(cpu) == decoded(ref)


def test_costs_of_a_full_tile_of_the_dearest_symbols_fit(cpu, ref):
    tables = random_tables(np.random.default_rng(0), 11)
    dear = TableSet("dear", "integer", 11, tables.frequency, np.full((32, 256), 65535, np.uint16), bytes(32))
    values = np.full((1, 256, 3), 7, np.int16)
    check_coding(cpu, ref, values, dear, use_offsets=False)
