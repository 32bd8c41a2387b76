"""The frozen tables are what their definition says, fit the data they are for, and cannot be altered."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import ConfigError
from kvcore.codecs import tables
from kvcore.codecs.tables import generate, parse_table_set, table_set
from kvcore.entropy import CLASSES, ESC, SYMBOLS, ZERO, TableSet

NAMES = ("gauss", "exponent", "e4m3fn", "e5m2")
FOLDER = Path(tables.__file__).parent
# Written here a second time on purpose: frames name these, so they change with the format or never.
FROZEN = {
    "gauss": "e5b80cd1975644a4f528e2c4a8e590c6b2df75fc1a02cef41bad1d52dc8d0e3e",
    "exponent": "d3ff7c863129b691737442afba5a9d7bdc0376fd6c085d3906fee49f3537057f",
    "e4m3fn": "643b81d7b4af592abbbc76aac920700f7523d6ee566a46c7953d23ab62424092",
    "e5m2": "a492a725aef57f1f499d17892d1feef96d6c27431b99e062897ebe87482dd664",
}
SAMPLES = 100_000
NEGATIVE_ZERO = 1


def sigma(index: int) -> float:
    return 0.06 * 800 ** (index / 31)


def drawn(name: str, index: int) -> np.ndarray:
    """Return the symbols of values drawn from the distribution that a class is for."""
    x = np.random.default_rng(index).standard_normal(SAMPLES)
    if name == "gauss":
        k = np.rint(x * sigma(index)).astype(int)
        return np.where(abs(k) <= 127, k + 128, ESC)
    if name == "exponent":
        mean, phase = (0, 0.5, 1, 1.5, 2, 3, 4.5, 7)[index // 4], (0, 0.25, 0.5, 0.75)[index % 4]
        x = ((x + mean) * 2.0 ** (math.floor(math.log2(2 / (mean + 3.5))) - phase)).astype(np.float32)
        z = 127 - ((x.view(np.uint32) >> 23) & 255).astype(int)
        return np.where((z >= 0) & (z <= 62), 1 + 2 * z + np.signbit(x), ESC)
    mean, octave = (0, index - 8) if index < 16 else ((1.5, -1.5)[index % 2], (index - 16) // 2 - 4)
    dtype, largest = (ml_dtypes.float8_e4m3fn, 448) if name == "e4m3fn" else (ml_dtypes.float8_e5m2, 57344)
    byte = np.clip((x + mean) * 2.0**octave, -largest, largest).astype(dtype).view(np.uint8).astype(int)
    symbol = np.where(byte < 128, ZERO + byte, ZERO - (byte & 127))
    symbol[byte == 128] = NEGATIVE_ZERO
    return symbol


@pytest.mark.parametrize("name", NAMES)
def test_the_definition_reproduces_the_file_byte_for_byte(name):
    assert generate.compute(name) == (FOLDER / f"{name}.json").read_bytes()


def test_the_digests_are_the_frozen_ones():
    assert {name: table_set(name).digest.hex() for name in tables.DIGESTS} == FROZEN


@pytest.mark.parametrize("name", NAMES)
def test_every_class_fits_what_it_is_for(name):
    t = table_set(name)
    cost = t.cost / 256
    for index in range(CLASSES):
        share = np.bincount(drawn(name, index), minlength=SYMBOLS) / SAMPLES
        entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
        raw = 16 * share[(t.frequency[index] == 0) | (np.arange(SYMBOLS) == ESC)].sum()
        bits = cost @ share
        # As short as can be, but for the words of escapes and what 11 bits lose; and the best class.
        assert entropy - 0.002 < bits[index] - raw < entropy + 0.03, index
        assert bits[index] == bits.min(), index


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_256ths_of_a_bit_and_escapes_include_their_word(name):
    t = table_set(name)
    ideal = 256 * (t.bits - np.log2(np.maximum(t.frequency, 1)))
    escape = np.broadcast_to(ideal[:, :1] + 16 * 256, ideal.shape)
    escaped = (t.frequency == 0) | (np.arange(SYMBOLS) == ESC)
    assert np.abs(np.where(escaped, escape, ideal) - t.cost).max() <= 0.5 + 1e-9


@given(st.sampled_from(NAMES), st.integers(0, CLASSES - 1), st.integers(0, (1 << 11) - 1))
def test_the_lookup_finds_the_interval_that_holds_a_slot(name, index, slot):
    t = table_set(name)
    symbol = t.symbol[index, slot]
    assert t.start[index, symbol] <= slot < t.start[index, symbol] + t.frequency[index, symbol]


@pytest.mark.parametrize("name", NAMES)
def test_arrays_have_the_stated_shapes_and_sums(name):
    t = table_set(name)
    assert (t.name, t.bits) == (name, 11)
    assert (t.frequency.dtype, t.frequency.shape) == (np.uint16, (32, 256))
    assert (t.cost.dtype, t.cost.shape) == (np.uint16, (32, 256))
    assert (t.start.dtype, t.start.shape) == (np.uint32, (32, 256))
    assert (t.symbol.dtype, t.symbol.shape) == (np.uint8, (32, 2048))
    assert (t.frequency.sum(axis=1) == 2048).all()
    assert (t.frequency[:, ESC] >= 1).all()


def mirrored(f: np.ndarray) -> np.ndarray:
    """Swap each 8-bit float of frequencies ``[..., 256]`` with its negative, zeros too; symbol 255 has none."""
    swapped = f[..., [0, *range(255, 0, -1)]]
    swapped[..., [NEGATIVE_ZERO, ZERO, 255]] = f[..., [ZERO, NEGATIVE_ZERO, 255]]
    return swapped


def test_gauss_tables_are_mirrored_exactly():
    f = table_set("gauss").frequency
    assert (f[:, 129:] == f[:, 127:0:-1]).all()


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_centred_tables_are_mirrored_but_for_the_remainder_that_zero_gets(name):
    f = table_set(name).frequency[:16].astype(int)
    difference = f - mirrored(f)
    assert (np.abs(difference[:, ZERO]) <= 1).all()
    assert (np.delete(difference, [ZERO, NEGATIVE_ZERO], axis=1) == 0).all()


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_tables_of_opposite_means_are_mirror_images(name):
    f = table_set(name).frequency[16:]
    assert (f[0::2] == mirrored(f[1::2])).all()
    assert (f[0::2, 128:].sum(axis=1) > f[0::2, 1:128].sum(axis=1)).all()


@pytest.mark.parametrize(
    ("name", "coded"), [("exponent", range(1, 127)), ("e4m3fn", range(1, 255)), ("e5m2", (1, *range(5, 252)))]
)
def test_what_is_no_symbol_has_no_frequency(name, coded):
    used = np.flatnonzero(table_set(name).frequency.any(axis=0)).tolist()
    assert set(used) <= {ESC, *coded}


def test_a_set_is_loaded_once():
    assert table_set("gauss") is table_set("gauss")


@pytest.mark.parametrize("table", ["frequency", "cost", "start", "symbol"])
def test_arrays_cannot_be_made_writable(table):
    array = getattr(table_set("gauss"), table)
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


@pytest.mark.parametrize("call", [table_set, lambda name: parse_table_set(name, b"{}")])
def test_an_unknown_set_is_refused_with_those_that_exist(call):
    with pytest.raises(ConfigError, match="table set 'laplace'; known are gauss, exponent, e4m3fn, e5m2"):
        call("laplace")


@given(st.sampled_from(NAMES), st.data())
def test_one_flipped_bit_is_noticed(name, data):
    content = bytearray((FOLDER / f"{name}.json").read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ConfigError, match="altered tables"):
        parse_table_set(name, bytes(content))


def test_a_damaged_installation_is_named(tmp_path):
    shutil.copy(FOLDER / "__init__.py", tmp_path)
    shutil.copy(FOLDER / "gauss.json", tmp_path / "exponent.json")
    spec = importlib.util.spec_from_file_location("damaged_tables", tmp_path / "__init__.py")
    damaged = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(damaged)
    with pytest.raises(ConfigError, match=r"cannot read .*gauss\.json.*reinstall kvcore"):
        damaged.table_set("gauss")
    with pytest.raises(ConfigError, match=r"'exponent': the file has SHA-256 .*reinstall kvcore"):
        damaged.table_set("exponent")


def test_the_generator_writes_and_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "__file__", str(tmp_path / "generate.py"))
    monkeypatch.setattr(generate, "SETS", {"gauss": generate.SETS["gauss"]})
    monkeypatch.setattr(generate, "compute", functools.cache(generate.compute))
    assert generate.main([]) == 1
    assert generate.main(["--write"]) == 0
    assert generate.main(["--check"]) == 0
    written = tmp_path / "gauss.json"
    assert written.read_bytes() == (FOLDER / "gauss.json").read_bytes()
    written.write_bytes(written.read_bytes().replace(b"2047", b"2046", 1))
    capsys.readouterr()
    assert generate.main(["--check"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def parts(**changes):
    frequency = np.zeros((32, 256), np.uint16)
    frequency[:, ESC], frequency[:, ZERO] = 1, 3
    cost = np.full((32, 256), 18 * 256, np.uint16)
    mine = {"name": "mine", "kind": "integer", "bits": 2, "frequency": frequency, "cost": cost}
    return mine | {"digest": bytes(32)} | changes


def test_a_set_of_ones_own_is_copied():
    given_parts = parts()
    t = TableSet(**given_parts)
    given_parts["frequency"][:] = 0
    assert t.frequency[5, ZERO] == 3
    assert t.symbol[31].tolist() == [ESC, ZERO, ZERO, ZERO]
    assert t.start[0, [ESC, ESC + 1, ZERO, ZERO + 1, 255]].tolist() == [0, 1, 1, 4, 4]
    assert t != TableSet(**parts())
    assert repr(t) == "TableSet(name='mine', kind='integer', bits=2)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.bits = 3


def without_escape():
    frequency = parts()["frequency"]
    frequency[7, ESC], frequency[7, ZERO] = 0, 4
    return frequency


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "float"}, "kind 'float' is none of integer, exponent, code"),
        ({"bits": 16}, "bits is 16, not an integer in 1..15"),
        ({"bits": 0}, "bits is 0"),
        ({"bits": True}, "bits is True"),
        ({"bits": 2.0}, "bits is 2.0"),
        ({"bits": 3}, r"table 0 sum to 4, not to 2\*\*3"),
        ({"frequency": [[1]]}, r"frequency is list, not uint16 \[32, 256\]"),
        ({"frequency": parts()["frequency"].astype(np.int64)}, r"frequency is int64 \[32, 256\], not uint16"),
        ({"frequency": parts()["frequency"][:, :255]}, r"frequency is uint16 \[32, 255\]"),
        ({"frequency": without_escape()}, "table 7 has no frequency for the escape symbol 0"),
        ({"cost": parts()["cost"][0]}, r"cost is uint16 \[256\]"),
        ({"digest": bytes(8)}, "digest is .*, not 32 bytes"),
        ({"digest": "0" * 32}, "digest is '0"),
    ],
)
def test_what_is_no_table_set_is_refused(changes, message):
    with pytest.raises(ConfigError, match=f"table set 'mine' cannot be used: .*{message}"):
        TableSet(**parts(**changes))
