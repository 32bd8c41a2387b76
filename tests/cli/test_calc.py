"""`kvcore calc`: what fits, and how it is printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

import kvcore
from kvcore.capacity import LayerShape, ModelShape, Place, bits_of, find_model, plan
from kvcore.capacity.bits import BITS, LOSSLESS_BITS
from kvcore.capacity.configs import built_in_models
from kvcore.dtypes import to_dtype
from kvcore.errors import ConfigError
from kvcore.layout import Layout
from kvcore.memory import LayoutDesc, MemoryPlan
from kvcore.serde import SerdeConfig, create_serde

ROOT = Path(__file__).parents[2]
CODECS_PAGE = (ROOT / "docs" / "codecs.md").read_text("utf-8")


def test_the_measured_bits_are_those_of_the_page():
    figures = CODECS_PAGE.partition("## Figures")[2]
    rows = re.findall(r"^\| (`.*?) \| ([\d.]+) \| 1", figures, re.MULTILINE)
    names = {"`cachegen`, `per_head=True`": ["cachegen per_head"]}
    page = {n: float(bits) for cell, bits in rows for n in names.get(cell, re.findall(r"`([^`]+)`", cell))}
    assert page.pop("raw") == bits_of(SerdeConfig("raw"), "bfloat16")
    assert page == BITS
    others = re.search(r"`lossless` on the same values cast to other types.*?: (.*)\.", CODECS_PAGE)[1]
    assert {n: float(b) for n, b in re.findall(r"(\w+) ([\d.]+)", others)} == {
        name: bits for name, bits in LOSSLESS_BITS.items() if name != "bfloat16"
    }


@pytest.mark.parametrize(
    "name", ["fp8", "fp8_e5m2", "int8", "int4", "turboquant_4bit", "turboquant_k8v4", "asym_k16_v8"]
)
def test_codecs_whose_size_is_that_of_their_layout_take_the_bits_of_the_table(name):
    preset = name.partition("_")[2]
    configs = {
        "fp8_e5m2": SerdeConfig("fp8", {"fp8_dtype": "e5m2"}),
        "turboquant_4bit": SerdeConfig("turboquant", {"preset": preset}),
        "turboquant_k8v4": SerdeConfig("turboquant", {"preset": preset}),
    }
    config = configs.get(name, SerdeConfig(name))
    serde = create_serde(config, kvcore.open_backend("cpu_ref"))
    layout = Layout("LKHTD", L=30, T=256, H=3, D=64)
    desc = LayoutDesc(layout, {p: to_dtype("bfloat16") for p in "KV"})
    nbytes = serde.serializer.estimate_serialized_size(MemoryPlan.of([desc]))
    elements = desc.nbytes / 2
    assert 8 * nbytes / elements == pytest.approx(bits_of(config, "bfloat16"), abs=0.03)


@pytest.mark.parametrize(
    ("serde", "codec"),
    [
        ("kvs1", "balanced"),
        ('{"type": "kvs1", "preset": "small"}', "small"),
        ("high", "high"),
        ("naive", "raw"),
        ("kivi", "int4"),
        ('{"type": "cachegen", "per_head": true}', "cachegen per_head"),
        (
            '{"type": "chain", "steps": [{"type": "kvs1", "preset": "high"}, {"type": "aesgcm", "key_file": "k"}]}',
            "high",
        ),
    ],
)
def test_serdes_are_sized_by_what_codes_the_kv(run, serde, codec):
    rows = run("calc", "SmolLM2-135M", "--serde", serde, "--json").json()["rows"]
    assert {row["serde"] for row in rows} == {"raw", codec}


shapes = st.builds(
    LayerShape,
    kind=st.just("attention"),
    heads=st.integers(1, 12),
    widths=st.lists(st.integers(1, 64), min_size=2, max_size=2).map(tuple),
    window=st.none() | st.integers(1, 4096),
) | st.one_of(
    st.builds(LayerShape, kind=st.just("latent"), heads=st.just(1), widths=st.tuples(st.integers(1, 64), st.just(8))),
    st.builds(LayerShape, kind=st.just("index"), heads=st.just(1), widths=st.just((132,))),
    st.builds(LayerShape, kind=st.just("recurrent"), state=st.integers(1, 10_000)),
)
models = st.builds(
    ModelShape,
    name=st.just("m"),
    layers=st.lists(st.lists(shapes, max_size=2).map(tuple), min_size=1, max_size=6).map(tuple),
    dtype=st.sampled_from(["bfloat16", "float16", ""]),
    source=st.just("made up"),
)


@given(
    model=models,
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    sizes=st.lists(st.integers(0, 1 << 42), min_size=2, max_size=2),
    chunk=st.integers(1, 512),
    chunks=st.integers(1, 64),
    serde=st.sampled_from(["raw", "fp8", "balanced", "lossless"]),
)
def test_what_is_said_to_fit_does_and_no_more_would(model, ranks, sizes, chunk, chunks, serde):
    places = [Place("host", sizes[0], host=True), Place("disk", sizes[1])]
    try:
        planned = plan(
            model,
            ranks=ranks,
            serdes=[SerdeConfig(serde)],
            places=places,
            chunk_tokens=chunk,
            prompt_tokens=chunks * chunk,
        )
    except ConfigError:
        heads = [s.heads for layer in model.layers for s in layer if s.kind == "attention"]
        assert any(max(h, ranks) % min(h, ranks) for h in heads)
        return
    assert planned.rows[0].tier == "host"
    assert {row.serde for row in planned.rows[1:]} == {"raw", serde}
    for row in planned.rows:
        if row.chunk_bytes:
            fit = row.tokens // chunk
            assert fit * row.chunk_bytes <= row.nbytes < (fit + 1) * row.chunk_bytes
        else:
            assert row.tokens is None
        if row.prompt_bytes:
            assert row.prompts * row.prompt_bytes <= row.nbytes < (row.prompts + 1) * row.prompt_bytes
        assert row.prompt_bytes == chunks * row.chunk_bytes + row.state_bytes
    raw = next(row for row in planned.rows if row.tier == "disk" and row.serde == "raw")
    assert raw.chunk_bytes == planned.token_bytes * chunk
    # Ranks together have all of it, and each has its part.
    assert planned.token_bytes <= planned.rank_token_bytes * ranks
    assert planned.rank_token_bytes <= planned.token_bytes
    assert planned.held_bytes <= planned.rank_token_bytes * chunks * chunk + planned.state_bytes
    if ranks == 1 and not any(s.window for layer in model.layers for s in layer):
        assert planned.held_bytes == planned.token_bytes * chunks * chunk + planned.state_bytes


@given(
    heads=st.integers(1, 8),
    width=st.integers(1, 64),
    layers=st.integers(1, 4),
    dtype=st.sampled_from(["bfloat16", "fp8"]),
)
def test_a_chunk_has_the_bytes_that_its_memory_object_has(heads, width, layers, dtype):
    shape = LayerShape("attention", heads, (width, width))
    planned = plan(ModelShape("m", ((shape,),) * layers, "", ""), dtype=dtype)
    layout = Layout("LKTHD", L=layers, T=256, H=heads, D=width)
    desc = LayoutDesc(layout, dict.fromkeys("KV", to_dtype(dtype)))
    assert planned.rows[0].chunk_bytes == desc.nbytes == 256 * planned.token_bytes


def test_ranks_beyond_the_heads_have_one_each_and_stores_hold_it_once(run):
    values = run(
        "calc", "Llama-3.1-8B", "--tp", "16", "--host", "64GiB", "--disk", "1TiB", "--serde", "raw", "--json"
    ).json()
    assert values["rank_token_bytes"] == values["token_bytes"] // 8
    host, disk = values["rows"]
    assert (host["token_bytes"], disk["token_bytes"]) == (2 * 131_072, 131_072)


def test_the_table_says_what_is_measured_and_on_what(run):
    done = run("calc", "meta-llama/Llama-3.1-8B-Instruct", "--host", "64GB", "--disk", "2TB")
    assert done.code == 0
    assert "128.0 KiB (131,072 B)" in done.out
    assert re.search(r"^disk +1.819 TiB balanced\* +3.51 +28,754 7.02 MiB", done.out, re.MULTILINE)
    assert re.search(r"^host +59.6 GiB raw +16 +131,072 +32 MiB +488,192 +59$", done.out, re.MULTILINE)
    assert "bits measured on SmolLM2-135M" in done.out
    assert "*" not in run("calc", "Llama-3.1-8B", "--serde", "raw").out


def test_a_file_or_a_folder_is_read_as_a_named_model_is(run, tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder, file = (run("calc", str(path), "--json").json() for path in (tmp_path, tmp_path / "config.json"))
    assert folder == file
    assert folder["token_bytes"] == 2 * 2 * 4 * 8 * 2
    assert "assumed" in run("calc", str(tmp_path)).out
    assert "assumed" not in run("calc", str(tmp_path), "--dtype", "float16").out


def test_without_a_model_the_built_in_ones_are_listed(run):
    rows = run("calc", "--json").json()
    assert {row["model"] for row in rows} == set(built_in_models())
    assert all(find_model(row["model"]).token_bytes(row["dtype"]) == row["token_bytes"] for row in rows)
    assert run("calc", "--dtype", "fp8", "--json").json()[0]["token_bytes"] == rows[0]["token_bytes"] // 2
    assert "Gemma-3-27b" in run("calc").out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["Llama-3.1-8"], "did you mean Llama-3.1-8B"),
        (["nowhere/config.json"], "cannot read nowhere/config.json"),
        (["Llama-3.1-8B", "--tp", "3"], "cannot be shared out to 3 ranks"),
        (["Llama-3.1-8B", "--disk", "lots"], "--disk 'lots' is not a size"),
        (["Llama-3.1-8B", "--serde", "own"], "how much serde own takes has not been measured"),
        (["Llama-3.1-8B", "--dtype", "fp8", "--serde", "high"], "not measured, or the codec does not take it"),
        (["Llama-3.1-8B", "--dtype", "bf17"], "unknown element type"),
        (["Llama-3.1-8B", "--tokens", "100"], "no whole chunk of 256"),
        (["DeepSeek-V3", "--serde", "asym_k16_v8"], "latent rows"),
        (["--host", "1GB"], "name a model"),
        (["--serde", "high"], "name a model"),
        (["Llama-3.1-8B", "--serde", '{"type": "chain", "steps": []}'], "at least one"),
    ],
)
def test_what_means_nothing_is_refused(run, arguments, complaint):
    done = run("calc", *arguments)
    assert done.code == 2
    assert done.out == ""
    assert complaint in done.err


def test_files_that_are_no_configuration_are_refused(run, tmp_path):
    for text, complaint in (("{", "is no JSON"), ("[]", "holds no object")):
        (tmp_path / "config.json").write_text(text)
        assert complaint in run("calc", str(tmp_path)).err


def test_neither_a_backend_nor_torch_is_loaded():
    code = (
        "import sys\nfrom kvcore.cli import app\n"
        "try:\n app(['calc', 'Gemma-3-27b', '--disk', '1TB', '--json'])\nexcept SystemExit:\n pass\n"
        "names = ('torch', 'transformers', 'kvcore_cpu', 'kvcore_cpu_ref')\n"
        "print([n for n in names if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["model"] == "Gemma-3-27b"


def test_bits_are_of_elements_as_wide_as_they_are():
    assert [bits_of(SerdeConfig("raw"), name) for name in ("float32", "bfloat16", "fp8")] == [32, 16, 8]
    assert bits_of(SerdeConfig("fp8"), "float32") == bits_of(SerdeConfig("fp8"), "bfloat16") == BITS["fp8"]
