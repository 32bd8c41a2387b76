"""What `kvcore calc` reads from configurations, held against the caches that transformers makes of them."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
from importlib.resources import files

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from kvcore.capacity import ModelShape, find_model, read_config
from kvcore.capacity.configs import built_in_models
from kvcore.errors import ConfigError

HAVE_TORCH = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
needs_torch = pytest.mark.skipif(not HAVE_TORCH, reason="torch and transformers are not installed")

BASE = {"vocab_size": 64, "intermediate_size": 16}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 3}
MOE = {"num_experts_per_tok": 1, "moe_intermediate_size": 8}


@st.composite
def sizes(draw, *, head_dim: bool = True):
    """Layers, heads, KV heads and widths that make a tiny model."""
    kv, times = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    width = 4 * draw(st.integers(1, 3))
    values = {
        "num_hidden_layers": draw(st.integers(1, 6)),
        "num_attention_heads": kv * times,
        "num_key_value_heads": kv,
        "hidden_size": kv * times * width,
    }
    return {**BASE, **values, **({"head_dim": 2 * draw(st.integers(1, 4))} if head_dim else {})}


@st.composite
def configs(draw, *only: str):
    """A type of model and what its configuration says; of all types, or some."""
    window = draw(st.integers(2, 12))
    period = draw(st.integers(2, 4))
    kinds = {
        "llama": sizes(),
        "mistral": sizes().map(lambda c: {**c, "sliding_window": draw(st.sampled_from([None, window]))}),
        "mixtral": sizes().map(lambda c: {**c, **MOE, "num_local_experts": 2}),
        "qwen2": sizes(head_dim=False).map(
            lambda c: {
                **c,
                "sliding_window": window,
                "use_sliding_window": draw(st.booleans()),
                "max_window_layers": draw(st.integers(0, 4)),
            }
        ),
        "gemma2": sizes().map(lambda c: {**c, "sliding_window": window}),
        "gemma3_text": sizes().map(lambda c: {**c, "sliding_window": window, "sliding_window_pattern": period}),
        "gemma4_text": sizes().map(
            lambda c: {
                **c,
                "sliding_window": window,
                "num_kv_shared_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"] * c["num_hidden_layers"],
                "num_hidden_layers": 2 * c["num_hidden_layers"],
                "per_layer_config": {str(2 * i + 1): {"head_dim": 4 * period} for i in range(c["num_hidden_layers"])},
                "hidden_size_per_layer_input": 4,
                "vocab_size_per_layer_input": 64,
            }
        ),
        "cohere2": sizes().map(lambda c: {**c, "sliding_window": window, "eos_token_id": 2}),
        "gpt_oss": sizes().map(lambda c: {**c, **MOE, "sliding_window": window, "num_local_experts": 2}),
        "falcon": sizes(head_dim=False).map(
            lambda c: {
                "vocab_size": 64,
                "hidden_size": c["hidden_size"],
                "num_hidden_layers": c["num_hidden_layers"],
                "num_attention_heads": c["num_attention_heads"],
                "multi_query": draw(st.booleans()),
            }
        ),
        "gpt2": sizes(head_dim=False).map(
            lambda c: {
                "vocab_size": 64,
                "n_embd": c["hidden_size"],
                "n_layer": c["num_hidden_layers"],
                "n_head": c["num_attention_heads"],
            }
        ),
        "deepseek_v3": sizes(head_dim=False).map(
            lambda c: {
                **c,
                **MOE,
                "num_key_value_heads": c["num_attention_heads"],
                "q_lora_rank": None,
                "kv_lora_rank": 2 * period,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 6,
                "v_head_dim": 10,
                "n_routed_experts": 2,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            }
        ),
        "jamba": sizes(head_dim=False).map(
            lambda c: {
                **c,
                "num_hidden_layers": c["num_hidden_layers"] + period,
                "attn_layer_period": period,
                "attn_layer_offset": draw(st.integers(0, period - 1)),
                "mamba_d_state": 5,
                "mamba_d_conv": 3,
                "mamba_expand": 2,
                "num_experts": 1,
            }
        ),
        "bamba": sizes(head_dim=False).map(
            lambda c: {
                **c,
                **MAMBA2,
                "hidden_size": 8 * c["num_attention_heads"],
                "mamba_n_heads": 2 * c["num_attention_heads"],
                "mamba_n_groups": 1,
                "attn_layer_indices": [0],  # without any, transformers has no cache for it
            }
        ),
        "mamba": st.just(
            {"vocab_size": 64, "hidden_size": 8 * period, "num_hidden_layers": 2, "state_size": 6, "conv_kernel": 3}
        ),
        "mamba2": st.just(
            {
                "vocab_size": 64,
                "hidden_size": 16,
                "num_hidden_layers": period,
                "state_size": 6,
                "conv_kernel": 3,
                "num_heads": 4,
                "head_dim": 8,
                "n_groups": 2,
            }
        ),
        "falcon_h1": sizes().map(lambda c: {**c, **MAMBA2, "mamba_d_ssm": 32}),
        "qwen3_next": sizes().map(
            lambda c: {
                **c,
                **MOE,
                "num_hidden_layers": period + 3,  # the fourth attends, and transformers wants one that does
                "num_experts": 2,
                "shared_expert_intermediate_size": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 4,
                "linear_value_head_dim": 6,
                "linear_conv_kernel_dim": 3,
            }
        ),
    }
    kind = draw(st.sampled_from(only or sorted(kinds)))
    return kind, draw(kinds[kind])


def elements(cache, shape: ModelShape, tokens: int) -> list[tuple[int, int]]:
    """Return (elements that grow with the sequence, those of a state) of each layer of a cache.

    The convolution's newest column, which transformers keeps and engines do not, is left out; so is what a window
    leaves: transformers keeps one token fewer than the window, once there are more.
    """
    found = []
    for layer, shapes in zip(cache.layers, shape.layers, strict=True):
        window = next((s.window for s in shapes if s.window), None)
        kept = tokens if window is None or tokens < window else window - 1
        grown = sum(x.numel() for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None)
        assert grown % kept == 0
        states = getattr(layer, "recurrent_states", {}), getattr(layer, "conv_states", {})
        state = sum(x.numel() for x in states[0].values())
        state += sum(x.numel() // x.shape[-1] * (x.shape[-1] - 1) for x in states[1].values())
        found.append((grown // kept, state))
    return found


@needs_torch
@given(drawn=configs("llama", "gemma2", "qwen2"), tokens=st.integers(3, 14))
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_a_tiny_models_cache_has_the_bytes_that_are_calculated(drawn, tokens):
    check_against_transformers(drawn, tokens)


@needs_torch
@pytest.mark.slow
@given(drawn=configs(), tokens=st.integers(3, 14))
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
def test_so_has_that_of_every_type_of_model(drawn, tokens):
    check_against_transformers(drawn, tokens)


def check_against_transformers(drawn, tokens):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    kind, values = drawn
    given = {"model_type": kind, **values}
    config = AutoConfig.for_model(kind, **values)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config)
    parameters = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in parameters else "past_key_values"
    with torch.no_grad():
        model(torch.arange(tokens)[None], use_cache=True, **{argument: cache})
    shape = read_config(given)
    real = elements(cache, shape, tokens)
    assert [sum(s.token_bytes(1) for s in layer) for layer in shape.layers] == [grown for grown, _ in real]
    assert [sum(s.state for s in layer) for layer in shape.layers] == [state for _, state in real]
    # What transformers writes to disk says the same as what its author gave.
    assert read_config(json.loads(json.dumps(config.to_dict()))).layers == shape.layers
    assert (
        read_config({"text_config": given, "vision_config": {"hidden_size": 8}, "dtype": "float16"}).dtype == "float16"
    )


@needs_torch
def test_what_a_configuration_leaves_out_is_had_from_its_type():
    sparse = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    assert read_config(sparse).layers == find_model("Gemma-3-4b").layers


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True, "num_layers": 2}, "encoder-decoder"),
        ({"model_type": "zamba2", "num_hidden_layers": 2}, "several layers share"),
        (
            {"model_type": "odd", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8},
            "num_key_value_heads",
        ),
        ({"model_type": "llama", "num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 8}, "no multiple"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"]}, "1 kinds of layers for 2"),
        ({"num_hidden_layers": 1, "layer_types": ["laser"]}, "'laser' are not known"),
        ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "sliding_window"),
        ({"num_hidden_layers": 1, "layer_types": ["mamba"]}, "mamba_d_state"),
        (
            {
                "model_type": "llama",
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "hidden_size": 4,
                "swa_num_key_value_heads": 4,
            },
            "swa_num_key_value_heads = 4",
        ),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 4, "num_key_value_heads": [1]},
            "not one number for each of 2 layers",
        ),
        ({}, "num_hidden_layers"),
    ],
)
def test_what_cannot_be_read_for_sure_is_refused(values, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_config(values)


def test_heads_may_differ_from_layer_to_layer():
    shape = read_config(
        {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": [1, 2]}
    )
    assert [layer[0].heads for layer in shape.layers] == [1, 2]
    assert shape.token_bytes("bfloat16") == 2 * 2 * 3 * 8


def test_some_layers_may_be_set_apart():
    values = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": 2}
    shape = read_config({**values, "per_layer_config": {"01": {"head_dim": 16, "num_key_value_heads": 1}}})
    assert [(layer[0].heads, layer[0].widths) for layer in shape.layers] == [(2, (8, 8)), (1, (16, 16)), (2, (8, 8))]
    for apart in ({"07": {"head_dim": 16}}, {"01": {"kv_lora_rank": 16}}):
        with pytest.raises(ConfigError, match="per_layer_config of layer"):
            read_config({**values, "per_layer_config": apart})


@needs_torch
def test_a_complete_configuration_leaves_nothing_out():
    values = {"model_type": "nemotron", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    assert read_config(values).token_bytes("fp8") == 2 * 2 * 32


def test_layers_that_share_the_kv_of_others_keep_none():
    values = {"num_hidden_layers": 5, "num_attention_heads": 2, "hidden_size": 16, "num_key_value_heads": 1}
    assert read_config({**values, "num_kv_shared_layers": 2}).token_bytes("fp8") == 3 * 2 * 8


def test_an_indexer_keeps_eight_bit_keys_and_their_scales():
    values = {"model_type": "deepseek_v32", "num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    shape = read_config({**values, "index_head_dim": 128, "index_topk": 2048, "index_n_heads": 64})
    assert shape.token_bytes("bfloat16") == 3 * (576 * 2 + 128 + 4)
    assert shape.token_bytes("fp8") == 3 * (576 + 128 + 4)


def test_built_in_models_have_the_figures_that_are_published():
    known = {
        "Llama-3.1-8B": 131_072,
        "Llama-3.1-70B": 327_680,
        "Llama-3.1-405B": 516_096,
        "Qwen2.5-7B": 57_344,
        "DeepSeek-V3": 61 * 576 * 2,
        "SmolLM2-135M": 23_040,
    }
    models = built_in_models()
    assert {name: models[name].token_bytes("bfloat16") for name in known} == known
    assert all(shape.dtype and "/" in shape.source for shape in models.values())


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("llama-3.1-8b", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Meta-Llama-3.1-70B-Instruct", "Llama-3.1-70B"),
        ("google/gemma-3-27b-it", "Gemma-3-27b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
    ],
)
def test_models_go_by_the_names_that_people_use(given, found):
    assert find_model(given).name == found


JUNK = (0, -1, 1.5, "", "x", True, False, [], {}, [1], ["x"], [None], {"a": 1}, {"1": 3})
FIELDS = {
    "attn_layer_indices", "dtype", "full_attn_idxs", "full_attention_interval", "layer_types", "mamba_d_head",
    "mamba_expand", "no_rope_layer_interval", "no_rope_layers", "num_kv_shared_layers", "per_layer_config",
    "sliding_window_pattern", "text_config",
}  # fmt: skip
BUILT_IN = json.loads(files("kvcore.capacity").joinpath("models.json").read_text("utf-8"))
CONFIGS = {
    **{model["config"]["model_type"]: model["config"] for model in BUILT_IN.values()},
    "llama4_text": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 8,
        "attention_chunk_size": 16,
    },
    "nemotron": {"model_type": "nemotron", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32},
}


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_field_that_means_nothing_is_an_error_that_says_so(data):
    values = data.draw(st.sampled_from(list(CONFIGS.values())))
    field = data.draw(st.sampled_from(sorted({*values, *FIELDS})))
    with contextlib.suppress(ConfigError):
        read_config({**values, field: data.draw(st.sampled_from(JUNK))})


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"layer_types": 2}, "layer_types = 2 in its configuration is no list"),
        ({"attn_layer_indices": "x"}, "attn_layer_indices = 'x' in its configuration is no list"),
        (
            {"sliding_window": 4, "_sliding_window_pattern": [1]},
            r"_sliding_window_pattern = \[1\] in its configuration",
        ),
        ({"attention_chunk_size": 4, "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
        ({"per_layer_config": [1]}, "per_layer_config = .* is no object"),
    ],
)
def test_the_field_that_means_nothing_is_named(values, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_config({**CONFIGS["llama"], **values})


def test_an_encoder_keeps_no_kv():
    for said in ({"model_type": "bert"}, {"model_type": "odd", "architectures": ["OddForMaskedLM"]}):
        with pytest.raises(ConfigError, match="is an encoder"):
            read_config({**CONFIGS["llama"], **said})


def test_qwens_window_is_used_only_where_the_configuration_says_so():
    values = {**CONFIGS["qwen2"], "sliding_window": 4}
    del values["use_sliding_window"]
    assert {layer[0].window for layer in read_config(values).layers} == {None}
    assert {layer[0].window for layer in read_config({**values, "use_sliding_window": True}).layers} == {4}


def test_values_of_no_width_of_their_own_are_as_wide_as_keys():
    assert read_config({**CONFIGS["llama"], "v_head_dim": 0}).layers == read_config(CONFIGS["llama"]).layers


def test_states_do_not_shrink_with_the_kv():
    jamba = find_model("Jamba-v0.1")
    assert jamba.state_bytes("fp8") == jamba.state_bytes("bfloat16") == jamba.state_bytes("float32") // 2


def test_a_file_that_is_no_configuration_is_not_read_whole(tmp_path):
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF\xff")
    with pytest.raises(ConfigError, match=r"is no text; give the config\.json"):
        find_model(str(weights))
    os.truncate(weights, 1 << 40)
    with pytest.raises(ConfigError, match="too large for a configuration"):
        find_model(str(weights))
    with pytest.raises(ConfigError, match="File name too long"):
        find_model("x" * 300)


@needs_torch
@pytest.mark.parametrize("name", sorted(built_in_models()))
def test_a_built_in_model_reads_as_transformers_completes_it(name):
    from transformers import AutoConfig

    values = BUILT_IN[name]["config"]
    if values["model_type"] == "kimi_k2":
        values = {**values, "model_type": "deepseek_v3"}
    full = AutoConfig.for_model(**values).to_dict()
    assert read_config(json.loads(json.dumps(full)), name).layers == find_model(name).layers
