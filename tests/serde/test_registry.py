"""Serdes by name: what users may write, what each name means, and how a package brings its own."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import numpy as np
import pytest

from kvcore.codecs import FrameReader
from kvcore.errors import ConfigError
from kvcore.serde import (
    AsyncSerdeProcessor,
    FrameDeserializer,
    FrameSerializer,
    Serde,
    SerdeConfig,
    create_serde,
    create_serde_processor,
    get_registered_serde_types,
    register_serde_factory,
    registry,
)

from .objects import key, kv_desc, values

BUILT_IN = {
    "raw": "raw",
    "naive": "raw",
    "lossless": "lossless",
    "kvs1": "balanced",
    '{"type": "kvs1", "preset": "high"}': "high",
    '{"type": "kvs1", "preset": "small", "levels": [-4, 9], "nonfinite": "raw"}': "small",
    '{"type": "kvs1", "preset": "lossless"}': "lossless",
    "fp8": "fp8",
    '{"type": "fp8", "fp8_dtype": "e5m2"}': "fp8_e5m2",
    '{"type": "fp8", "fp8_dtype": "float8_e4m3fn", "scaled": false}': "fp8",
    "int8": "int8",
    "int4": "int4",
    "int2": "int2",
    "kivi": "int4",
    '{"type": "kivi", "bits": 2}': "int2",
    "cachegen": "cachegen",
    '{"type": "cachegen", "model": "mistralai/Mistral-7B-Instruct-v0.2"}': "cachegen",
    '{"type": "cachegen", "nlayers": 2, "per_head": true}': "cachegen",
    '{"type": "cachegen", "config": {"nlayers": 2, "kspecs": [[0, 2, 64]], "vspecs": [[0, 1, 32], [1, 2, 16]]}}': (
        "cachegen"
    ),
    "turboquant": "turboquant_4bit",
    **{f'{{"type": "turboquant", "preset": "{p}"}}': f"turboquant_{p}" for p in ("k8v4", "4bit", "k3v4", "3bit")},
    "asym_k16_v8": "asym_k16_v8",
    '{"type": "asym_k16_v8", "mode": "k_elsewhere", "scope": "page", "page_tokens": 8}': "asym_k_elsewhere_v8",
}


@pytest.fixture
def own_names(monkeypatch):
    """Let a test register names that are gone after it."""
    monkeypatch.setattr(registry._SERDES, "_factories", dict(registry._SERDES._factories))


@pytest.mark.parametrize(("config", "codec"), BUILT_IN.items())
def test_every_name_works_and_means_its_codec(make, backend, config, codec):
    src, back = make(kv_desc(width=32), seed=1), make(kv_desc(width=32))
    with create_serde_processor(config, backend) as processor:
        dst = make(processor.estimate_serialized_size(src.plan))
        (size,) = processor.take_serialize_results(processor.submit_serialize([src], [dst], [key()]), timeout=None)
        assert size == dst.used_size
        reader = FrameReader(dst.view(), expect_namespace=None, expect_key=None, digest=backend.digest)
        assert reader.codec.name == codec
        answer = processor.take_deserialize_results(processor.submit_deserialize([dst], [back], [key()]), timeout=None)
        assert answer == (None,)
    if "elsewhere" not in config:
        error = np.abs(values(back) - values(src)).mean()
        assert (error == 0) if reader.codec.lossless else (0 < error < 0.5)


def test_a_serde_reads_its_own_codec_and_the_exact_ones(make, backend):
    frames = {}
    for name in ("raw", "lossless", "fp8", "int4"):
        forth = create_serde(name, backend).serializer
        src = make(kv_desc(), seed=1)
        frames[name] = make(forth.estimate_serialized_size(src.plan))
        frames[name].set_used_size(forth.serialize(src, frames[name], key()))

    def reads(config):
        back, got = create_serde(config, backend).deserializer, set()
        for name, frame in frames.items():
            try:
                back.deserialize(frame, make(kv_desc()), key())
            except NotImplementedError:
                continue
            got.add(name)
        return got

    assert reads("fp8") == {"raw", "lossless", "fp8"}
    assert reads({"type": "int4", "accept": ["int4", "fp8"]}) == {"int4", "fp8"}
    with pytest.raises(ConfigError, match="add 'int4' to accept"):
        create_serde({"type": "int4", "accept": ["raw"]}, backend)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("kvs2", r"no serde 'kvs2'; did you mean 'kvs1'\? there are raw, naive.*chain"),
        ("RAW", "did you mean 'raw'"),
        ("", "is a name"),
        ({"type": 3}, "is a name"),
        ({"preset": "high"}, 'an object with a type, as in {"type": "raw"}'),
        ("[1]", "an object with a type"),
        ('{"type": "raw"', "is no JSON"),
        ({"type": "raw", "preset": "high"}, "serde raw takes accept, not 'preset'"),
        ({"type": "kvs1", "presets": "high"}, "kvs1 takes preset, levels, nonfinite, accept, not 'presets'"),
        ({"type": "kvs1", "preset": "hihg"}, "no preset 'hihg'; it has high, balanced, small, lossless"),
        ({"type": "kvs1", "preset": "lossless", "levels": [0, 0]}, "takes neither levels nor nonfinite"),
        ({"type": "fp8", "fp8_dtype": "e3m4"}, "it has e4m3fn, e5m2"),
        ({"type": "fp8", "nonfinite": "raw"}, "no policy nonfinite='raw'"),
        ({"type": "kivi", "bits": 3}, "8, 4 or 2 bits, not 3"),
        ({"type": "turboquant", "preset": "2bit"}, "k8v4, 4bit, k3v4, 3bit"),
        ({"type": "cachegen", "model": "gpt-5"}, "how many layers"),
        ({"type": "cachegen", "model": "qwen-7b", "config": {}}, "not from both"),
        ({"type": "cachegen", "config": {"nlayers": 2}}, "nlayers, kspecs and vspecs"),
        ({"type": "cachegen", "config": {"nlayers": 2, "kspecs": [[0, 1, 32]], "vspecs": [[0, 2, 32]]}}, "cover each"),
        ({"type": "asym_k16_v8", "mode": "v"}, "kv, v_only, k_elsewhere"),
        ({"type": "asym_k16_v8", "scope": "page"}, "page_tokens"),
        ({"type": "aesgcm"}, "path of a key file"),
        ({"type": "chain"}, "chain takes steps, and needs 'steps'"),
        ({"type": "chain", "steps": []}, "at least one step"),
        ({"type": "chain", "steps": "raw"}, "a list of serdes"),
        ({"type": "chain", "steps": [{"type": "chain", "steps": ["raw"], "x": 1}]}, "takes steps, and nothing else"),
        ({"type": "drop_tokens"}, "no serde 'drop_tokens'"),
        ({"type": "kvs1", "accept": "raw"}, r"a list of codecs, as in \['raw'\]"),
        ({"type": "kvs1", "accept": 3}, "serde kvs1 cannot be made with options {'accept': 3}"),
        ({"type": "kvs1", "levels": [1]}, r"two integers in -128..127, eighths of an octave, got \(1,\)"),
        ({"type": "kvs1", "levels": "12"}, "two integers"),
        ({"type": "fp8", "scaled": "false"}, "option scaled of serde fp8 is true or false, not 'false'"),
        ({"type": "fp8", "fp8_dtype": 8}, "serde fp8 cannot be made with options {'fp8_dtype': 8}"),
        ({"type": "chain", "steps": ["raw", {"type": "asym_k16_v8", "mode": []}]}, "serde asym_k16_v8 cannot be made"),
    ],
)
def test_what_means_nothing_is_refused_with_what_there_is(backend, config, why):
    with pytest.raises(ValueError, match=why):
        create_serde(config, backend)


def test_configurations_have_three_forms():
    wanted = SerdeConfig("kvs1", {"preset": "high"})
    assert SerdeConfig.of({"type": "kvs1", "preset": "high"}) == wanted
    assert SerdeConfig.of(' {"type": "kvs1", "preset": "high"}\n') == wanted
    assert SerdeConfig.of(wanted) is wanted
    assert SerdeConfig.of("raw") == SerdeConfig.of('"raw"') == SerdeConfig("raw")
    given = {"type": "kvs1", "preset": "high"}
    SerdeConfig.of(given)
    assert given == {"type": "kvs1", "preset": "high"}, "what is given is left as it is"
    with pytest.raises(ConfigError, match="options of serde raw go by name"):
        SerdeConfig("raw", {1: 2})


def test_a_program_registers_its_own(backend, own_names):
    calls = []

    def factory(given, *, codec="raw"):
        calls.append((given, codec))
        return Serde(FrameSerializer(codec, given), FrameDeserializer(given))

    register_serde_factory("mine", factory)
    assert get_registered_serde_types()[-1] == "mine"
    processor = create_serde_processor({"type": "mine", "codec": "fp8"}, backend, max_workers=2)
    processor.close()
    assert isinstance(processor, AsyncSerdeProcessor)
    assert calls == [(backend, "fp8")], "called once"
    with pytest.raises(ValueError, match="serde mine takes codec, not 'kodec'"):
        create_serde({"type": "mine", "kodec": "fp8"}, backend)
    for name in ("mine", "raw"):
        with pytest.raises(ValueError, match=f"there is a serde '{name}' already"):
            register_serde_factory(name, factory)
    register_serde_factory("broken", lambda given: "no serde")
    with pytest.raises(ConfigError, match="returned str, not a Serde"):
        create_serde("broken", backend)
    register_serde_factory("any", lambda given, **options: Serde(FrameSerializer(**options), FrameDeserializer(given)))
    assert create_serde({"type": "any", "codec": "int8"}, backend).serializer.codec.name == "int8"


def test_a_package_brings_its_own(backend, monkeypatch, own_names):
    point = importlib.metadata.EntryPoint("theirs", "kvcore.serde.builtin:fp8", "kvcore.serdes")

    def entry_points(*, group):
        return [point] if group == registry.ENTRY_POINT_GROUP else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert "theirs" in get_registered_serde_types()
    assert create_serde("theirs", backend).serializer.codec.name == "fp8"


def test_without_a_backend_the_one_of_the_host_is_used():
    serde = create_serde("raw")
    assert "cpu" in serde.serializer.backend.spec.device_types


def test_importing_serdes_loads_no_optional_library():
    code = "import sys, kvcore.serde; print([m for m in ('cryptography', 'torch', 'redis') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
