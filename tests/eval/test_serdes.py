"""`kvcore eval --serde`: the bits are those of whole frames, and what comes back is what the serde gives back."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import kvcore
from kvcore import BufferPool, Layout, LayoutDesc
from kvcore.cli import app
from kvcore.codecs.key_ring import KeyRing
from kvcore.codecs.registry import get_codec
from kvcore.dtypes import BFLOAT16
from kvcore.errors import ConfigError, QuantizationError
from kvcore.eval.serdes import SerdeSubject, serde_subjects
from kvcore.eval.subjects import Chunk, CodecSubject
from kvcore.keys import StoreKey
from kvcore.rope import RopeParams
from kvcore.serde import Deserializer, Serde, SerdeConfig, Serializer, create_serde, register_serde_factory

HAVE_TORCH = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
needs_torch = pytest.mark.skipif(not HAVE_TORCH, reason="torch and transformers are not installed")

BACKEND = kvcore.open_backend("cpu_ref", fallback="error")
LOSSY = [
    '{"type": "kvs1", "preset": "high"}',
    "kvs1",
    '{"type": "kvs1", "preset": "small"}',
    "fp8",
    '{"type": "fp8", "fp8_dtype": "e5m2"}',
    "cachegen",
    "int8",
    "int4",
    "int2",
    '{"type": "turboquant", "preset": "k8v4"}',
    "turboquant",
    "asym_k16_v8",
]


def chunk(tokens: int = 64, *, position: int = 256, width: int = 16, rope: RopeParams | None = None) -> Chunk:
    values = np.random.default_rng(0).standard_normal((2, 2, 2, tokens, width)).astype(np.float32).astype(BFLOAT16)
    return Chunk(values[0], values[1], position, rope)


def one(config: str) -> SerdeSubject:
    return serde_subjects([config], BACKEND)[0]


def frame_of(config: str, given: Chunk) -> bytes:
    """The frame that a tier with this serde would keep of a chunk, made without the code under test."""
    layers, heads, tokens, width = given.k.shape
    desc = LayoutDesc(Layout("LKTHD", L=layers, T=tokens, H=heads, D=width), {"K": "bfloat16", "V": "bfloat16"})
    pool = BufferPool(1 << 28)
    serde = create_serde(config, BACKEND)
    kv = pool.allocate([desc], kvcore.KVMeta(base_position=given.position, rope=given.rope))
    for layer in range(layers):
        for part, x in (("K", given.k), ("V", given.v)):
            kv.rows().array(part, layer)[0] = x[layer].transpose(1, 0, 2)
    frame = pool.allocate_bytes(serde.serializer.estimate_serialized_size(kv.plan))
    nbytes = serde.serializer.serialize(kv, frame, StoreKey(b"n" * 32, b"k" * 32))
    return bytes(frame.view()[:nbytes])


# --- subjects


@pytest.mark.parametrize("config", ["raw", "lossless"])
@pytest.mark.parametrize("tokens", [1, 64, 256])
def test_a_lossless_serde_gives_every_bit_back(config, tokens):
    given = chunk(tokens)
    stored = one(config).store(BACKEND, given)
    assert (stored.k.tobytes(), stored.v.tobytes()) == (given.k.tobytes(), given.v.tobytes())


@pytest.mark.parametrize("config", [*LOSSY, "raw", "lossless"])
def test_bytes_are_those_of_the_frame(config):
    given = chunk(rope=RopeParams(16, 10_000.0))
    stored = one(config).store(BACKEND, given)
    assert stored.k_bytes + stored.v_bytes == len(frame_of(config, given))
    assert stored.apart
    assert (stored.k.shape, stored.k.dtype) == (given.k.shape, BFLOAT16)


@pytest.mark.parametrize("config", LOSSY)
def test_lossy_serdes_err_but_not_by_much(config):
    given = chunk(256, width=64)
    stored = one(config).store(BACKEND, given)
    error = np.abs(stored.v.astype(np.float32) - given.v.astype(np.float32)).mean()
    assert 0 < error < 0.5
    same_keys = stored.k.tobytes() == given.k.tobytes()
    assert same_keys == (config == "asym_k16_v8")


@pytest.mark.parametrize(
    ("config", "codec"), [('{"type": "kvs1", "preset": "high"}', "high"), ("kvs1", "balanced"), ("int4", "int4")]
)
def test_a_serde_and_its_codec_are_measured_alike(config, codec):
    given = chunk(256)
    by_serde = one(config).store(BACKEND, given)
    by_codec = CodecSubject(codec, get_codec(codec)).store(BACKEND, given)
    assert by_serde.k.tobytes() == by_codec.k.tobytes()
    assert by_serde.v.tobytes() == by_codec.v.tobytes()
    # The frame's header and the place of the first layer, which both halves share, are all that is between them.
    for frame, segments in ((by_serde.k_bytes, by_codec.k_bytes), (by_serde.v_bytes, by_codec.v_bytes)):
        assert -128 <= frame - segments <= 512


@settings(max_examples=15)
@given(tokens=st.integers(1, 256), position=st.integers(0, 1 << 20))
def test_keys_and_values_have_shares_by_what_they_take(tokens, position):
    given = chunk(tokens, position=position)
    stored = one("asym_k16_v8").store(BACKEND, given)
    assert stored.k_bytes >= given.k.nbytes
    assert stored.v_bytes >= given.v.size
    assert stored.k_bytes - stored.v_bytes == pytest.approx(given.k.nbytes - given.v.size, abs=2 * 2 * 64 + 64)


def test_a_sealed_frame_counts_its_envelope(tmp_path):
    key_file = str(tmp_path / "keys")
    KeyRing.generate(tmp_path / "keys")
    chain = json.dumps({"type": "chain", "steps": ["kvs1", {"type": "aesgcm", "key_file": key_file}]})
    sealed, plain = (one(config).store(BACKEND, chunk()) for config in (chain, "kvs1"))
    assert sealed.k_bytes + sealed.v_bytes == len(frame_of(chain, chunk()))
    assert 29 <= sealed.k_bytes + sealed.v_bytes - plain.k_bytes - plain.v_bytes <= 64
    assert sealed.apart
    assert sealed.k.tobytes() == plain.k.tobytes()
    assert one(chain).name == "serde kvs1 + aesgcm"


def test_a_value_that_a_serde_refuses_is_an_error():
    given = chunk()
    given.k[0, 0, 5, 3] = np.nan
    with pytest.raises(QuantizationError):
        one("fp8").store(BACKEND, given)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("raw", "serde raw"),
        ('{"type": "kvs1", "preset": "small"}', "serde kvs1 small"),
        ('{"type": "fp8", "fp8_dtype": "e5m2"}', "serde fp8 fp8_dtype=e5m2"),
        ('{"type": "kvs1", "preset": "high", "levels": [0, -4]}', "serde kvs1 high levels=[0,-4]"),
        ('{"type": "fp8", "scaled": false, "accept": ["fp8"]}', "serde fp8 scaled=false"),
        ('{"type": "chain", "steps": ["fp8"]}', "serde fp8"),
    ],
)
def test_names_say_what_makes_a_difference(config, name):
    assert one(config).name == name


@pytest.mark.parametrize(
    ("configs", "complaint"),
    [
        (["zip"], "zip"),
        (['{"type": "kvs1", "preset": "hihg"}'], "no preset 'hihg'"),
        (['{"type": "kvs1"'], "no JSON"),
        (["fp8", '{"type": "fp8"}'], "fp8 is given twice"),
        (['{"type": "asym_k16_v8", "slots": true}'], "in objects of their own"),
        (['{"type": "asym_k16_v8", "mode": "k_elsewhere"}'], "stores no whole chunks"),
    ],
)
def test_what_cannot_be_measured_is_refused(configs, complaint):
    with pytest.raises(ConfigError, match=complaint):
        serde_subjects(configs, BACKEND)


class _Bytes(Serializer, Deserializer):
    """A serde that writes no frame: the bytes as they are, and seven more."""

    def estimate_serialized_size(self, layout):
        return layout.nbytes + 7

    def serialize(self, src, dst, key):
        dst.view()[: src.nbytes] = src.view()
        return src.nbytes + 7

    def deserialize(self, src, dst, key):
        dst.view()[:] = src.view()[:-7]


def test_bytes_that_are_no_frame_are_not_told_apart():
    register_serde_factory("bytes_for_eval", lambda backend: Serde(_Bytes(), _Bytes()))
    given = chunk()
    stored = SerdeSubject(SerdeConfig("bytes_for_eval"), BACKEND).store(BACKEND, given)
    assert stored.k_bytes + stored.v_bytes == 2 * given.k.nbytes + 7
    assert not stored.apart
    assert stored.v.tobytes() == given.v.tobytes()


# --- the command


@needs_torch
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--serde", "zip"], "zip"),
        (["--serde", "raw", "--serde", "raw"], "raw is given twice"),
        (["--serde", "raw", "--codec", ""], "there is no codec ''"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_loaded(tmp_path, arguments, complaint):
    done = CliRunner().invoke(app, ["eval", *arguments, "--model", str(tmp_path)])  # where there is no model
    assert (done.exit_code, done.stdout) == (2, "")
    assert complaint in done.stderr


@needs_torch
def test_a_tiny_model_through_serdes_and_a_codec(tiny_model, in_a_new_process, tmp_path):
    (tmp_path / "text.txt").write_text("A document of some length. " * 40)
    arguments = ["--model", str(tiny_model), "--text", str(tmp_path / "text.txt"), "--prefix", "300", "--scored", "60"]
    arguments += ["--codec", "fp8", *(word for name in ("raw", "kvs1", "int2") for word in ("--serde", name))]
    done = in_a_new_process(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    rows = {row["codec"]: row for row in report["rows"]}
    assert list(rows) == ["fp8", "serde raw", "serde kvs1", "serde int2"]
    assert (rows["serde raw"]["kl"], rows["serde raw"]["agree_pct"]) == (0, 100)
    assert 0 < rows["fp8"]["kl"] < rows["serde kvs1"]["kl"] < rows["serde int2"]["kl"]
    assert 16 < rows["serde raw"]["bits"] < 17  # two small layers: the head counts
    for row in rows.values():
        assert row["bits"] == pytest.approx((row["bits_k"] + row["bits_v"]) / 2)
    assert set(report["kl_over_fp8"]) == set(rows)
    people = in_a_new_process(*arguments)
    assert people.returncode == 0
    assert "serde int2" in people.stdout


@needs_torch
def test_serdes_alone_need_no_codec(tiny_model, in_a_new_process, tmp_path):
    (tmp_path / "text.txt").write_text("12345678" * 40)
    arguments = ["--model", str(tiny_model), "--text", str(tmp_path / "text.txt"), "--prefix", "100", "--scored", "20"]
    done = in_a_new_process(*arguments, "--serde", '{"type": "turboquant", "preset": "3bit"}', "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert [row["codec"] for row in report["rows"]] == ["serde turboquant 3bit"]
    assert report["kl_over_fp8"] == {}
