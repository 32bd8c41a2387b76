"""From vLLM's groups, attention backends and tensors to parts: the right bytes, or a refusal that says why."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvcore.connectors.vllm.layouts import INTERIORS, CacheGeometry, bind_caches, layer_number
from kvcore.errors import LayoutError

from .caches import (
    LAYOUTS,
    Caches,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    Group,
    MambaSpec,
    MLAAttentionSpec,
    Module,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    attention_name,
)

F32 = ("float32", "float32")


def group(spec, *numbers):
    return Group([attention_name(n) for n in numbers], spec)


def bind(caches, *, chunk_tokens=32, **geometry):
    known = {"model_layers": 4, "kv_heads": 2, "kv_dtype": F32, **geometry}
    return bind_caches(
        caches.groups,
        caches.tensors,
        caches.modules,
        CacheGeometry(**known),
        chunk_tokens=chunk_tokens,
        num_blocks=caches.blocks,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("v_width", [8, 4])
def test_k_and_v_of_each_token_lie_where_the_backend_reads_them(layout, v_width):
    caches = Caches([group(FullAttentionSpec(head_size_v=v_width), 1, 0)], layout=layout)
    (one,) = bind(caches)
    assert one.part.layers == (0, 1)
    assert one.layer_names == (attention_name(0), attention_name(1))
    for index, name in enumerate(one.layer_names):
        view = caches.tensors[name].transpose(0, 2, 1, 3)  # [blocks, tokens, heads, content]
        assert np.array_equal(one.rows.array("K", index), view[..., :8])
        assert np.array_equal(one.rows.array("V", index), view[..., 8:])
    assert (one.part.heads, one.part.all_heads, one.part.window) == ((0, 2), 2, None)
    assert one.part.desc.tokens == 32


def test_on_a_cpu_k_is_transposed_and_v_is_not():
    caches = Caches([group(FullAttentionSpec(), 0)], backend="CPU_ATTN")
    (one,) = bind(caches)
    halves = caches.tensors[attention_name(0)].reshape(6, 2, 2, 16 * 8)  # [blocks, heads, K|V, ...]
    assert np.array_equal(one.rows.array("K", 0), halves[:, :, 0].reshape(6, 2, 8, 16).transpose(0, 3, 1, 2))
    assert np.array_equal(one.rows.array("V", 0), halves[:, :, 1].reshape(6, 2, 16, 8).transpose(0, 2, 1, 3))


def test_blocks_of_the_kernel_may_be_pieces_of_the_tables_blocks():
    caches = Caches([group(FullAttentionSpec(block_size=32), 0)], backend="CPU_ATTN", kernel_block=8)
    (one,) = bind(caches)
    assert (one.rows.blocks, one.rows.block_tokens, one.block_tokens) == (24, 8, 32)


def test_latents_are_packed_rows_without_heads():
    caches = Caches([group(MLAAttentionSpec(head_size=12), 0, 1)], backend="CPU_MLA")
    (one,) = bind(caches, degree=4, rank=2)
    assert np.array_equal(one.rows.array("C", 1)[:, :, 0], caches.tensors[attention_name(1)][:, 0])
    assert (one.part.heads, one.rows.parts) == (None, ("C",))


def test_fp8_in_bytes_is_bound_as_the_format_that_was_declared():
    caches = Caches([group(FullAttentionSpec(kv_quant_mode=1), 0)], dtype=np.uint8)
    (one,) = bind(caches, kv_dtype=("float8_e4m3fn", "float8_e4m3fn"))
    assert one.rows.array("K", 0).dtype == ml_dtypes.float8_e4m3fn
    with pytest.raises(LayoutError, match="no fp8 format"):
        bind(caches, kv_dtype=F32)


def test_an_element_type_other_than_declared_is_refused():
    with pytest.raises(LayoutError, match=r"holds float16.*float32"):
        bind(Caches([group(FullAttentionSpec(), 0)], dtype=np.float16))


def test_groups_are_parts_with_their_windows_and_tables():
    caches = Caches([group(FullAttentionSpec(), 1, 3), group(SlidingWindowSpec(), 0, 2)])
    full, sliding = bind(caches)
    assert (full.group, full.part.layers, full.part.window) == (0, (1, 3), None)
    assert (sliding.group, sliding.part.layers, sliding.part.window) == (1, (0, 2), 32)
    (local,) = bind(Caches([group(ChunkedLocalAttentionSpec(), 0)]))
    assert local.part.window == 64


def test_a_window_that_is_kept_in_full_is_cached_in_full():
    # vLLM without its hybrid manager keeps all tokens; others may share any block of them, so all must be right.
    (one,) = bind(Caches([group(FullAttentionSpec(sliding_window=32), 0)]))
    assert one.part.window is None


def test_layers_of_one_group_that_differ_are_parts_of_their_own():
    specs = {attention_name(0): FullAttentionSpec(), attention_name(1): FullAttentionSpec(head_size=4, head_size_v=4)}
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    wide, narrow = bind(Caches([Group(list(specs), uniform)]))
    assert (wide.part.layers, narrow.part.layers) == ((0,), (1,))
    assert wide.group == narrow.group == 0


def test_recurrent_states_are_opaque_pages():
    caches = Caches([group(FullAttentionSpec(block_size=32), 1), Group(["model.layers.0.mixer"], MambaSpec())])
    _, state = bind(caches)
    assert state.part.kind == "recurrent"
    assert state.aligned_states
    assert state.part.desc.nbytes == 640
    assert (state.block_tokens, state.rows.blocks) == (32, 6)
    assert state.part.heads is None


def test_ranks_that_share_out_a_state_have_parts_of_their_own():
    caches = Caches([Group(["model.layers.0.mixer"], MambaSpec())])
    (mine,), (theirs,) = bind(caches, degree=2, rank=0), bind(caches, degree=2, rank=1)
    assert mine.part != theirs.part
    replicated = Caches([Group(["model.layers.0.mixer"], MambaSpec(tp_replicated=True))])
    assert bind(replicated, degree=2, rank=0)[0].part == bind(replicated, degree=2, rank=1)[0].part


@pytest.mark.parametrize(
    ("kv_heads", "degree", "rank", "here", "expected"),
    [(8, 2, 1, 4, (4, 8)), (8, 8, 5, 1, (5, 6)), (2, 8, 0, 1, (0, 1)), (2, 8, 3, 1, (0, 1)), (2, 8, 4, 1, (1, 2))],
)
def test_heads_of_a_rank(kv_heads, degree, rank, here, expected):
    caches = Caches([group(FullAttentionSpec(num_kv_heads=here), 0)])
    (one,) = bind(caches, kv_heads=kv_heads, degree=degree, rank=rank)
    assert (one.part.heads, one.part.all_heads) == (expected, kv_heads)


@pytest.mark.parametrize(("kv_heads", "degree", "here"), [(8, 2, 2), (6, 4, 1), (3, 2, 1), (0, 2, 1)])
def test_heads_that_cannot_be_told_are_refused(kv_heads, degree, here):
    caches = Caches([group(FullAttentionSpec(num_kv_heads=here), 0)])
    with pytest.raises(LayoutError, match="which heads these are"):
        bind(caches, kv_heads=kv_heads, degree=degree)


def test_layers_of_others_and_of_drafts_are_left_out():
    names = [attention_name(0), attention_name(1), "draft_model.model.layers.0.self_attn.attn", attention_name(4)]
    caches = Caches([Group(names, FullAttentionSpec())])
    caches.modules[names[1]] = Module(kv_sharing_target_layer_name=names[0])
    caches.tensors[names[1]] = caches.tensors[names[0]]
    (one,) = bind(caches)
    assert one.layer_names == (names[0],)


def test_a_model_of_drafts_alone_has_nothing_to_cache():
    with pytest.raises(LayoutError, match="no KV cache that could be cached"):
        bind(Caches([group(FullAttentionSpec(), 7)]))


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


ODD = [
    (FullAttentionSpec(), "ROCM_ATTN", "attention backend 'ROCM_ATTN'.*FLASH_ATTN"),
    (FullAttentionSpec(), "CPU_MLA", "attention backend 'CPU_MLA'.*FLASH_ATTN"),
    (MLAAttentionSpec(), "FLASH_ATTN", "attention backend 'FLASH_ATTN'.*CPU_MLA"),
    (FullAttentionSpec(kv_quant_mode=2), "FLASH_ATTN", "scales lie in its blocks"),
    (FullAttentionSpec(num_head_slots=4), "FLASH_ATTN", "num_head_slots"),
    (FullAttentionSpec(state_content_bytes=64), "FLASH_ATTN", "state_content_bytes"),
    (FullAttentionSpec(tokens_per_state=4), "FLASH_ATTN", "tokens_per_state"),
    (FullAttentionSpec(non_causal=True), "FLASH_ATTN", "non_causal"),
    (MLAAttentionSpec(model_version="deepseek_v4"), "CPU_MLA", "model_version"),
    (SinkFullAttentionSpec(), "FLASH_ATTN", "kind SinkFullAttentionSpec; known are FullAttentionSpec"),
]


@pytest.mark.parametrize(("spec", "backend", "said"), ODD)
def test_what_is_not_known_is_refused_with_what_is(spec, backend, said):
    with pytest.raises(LayoutError, match=said):
        bind(Caches([group(spec, 0)], backend=backend))


def test_a_backend_with_the_name_of_another_is_refused():
    caches = Caches([group(FullAttentionSpec(), 0)])
    bind(caches)
    for module in caches.modules.values():
        module.source = "vllm.v1.attention.backends.rocm_aiter_fa"
    with pytest.raises(LayoutError, match=r"attention backend 'FLASH_ATTN \(rocm_aiter_fa\)'"):
        bind(caches)


def test_states_that_vllm_does_not_keep_are_refused():
    with pytest.raises(LayoutError, match="--mamba-cache-mode align"):
        bind(Caches([Group(["model.layers.0.mixer"], MambaSpec(mamba_cache_mode="none"))]))
    with pytest.raises(LayoutError, match="multiple of 32"):
        bind(Caches([Group(["model.layers.0.mixer"], MambaSpec())]), chunk_tokens=48)


@pytest.mark.parametrize("change", [{"num_kv_heads": 3}, {"head_size": 16}, {"block_size": 24}])
def test_tensors_of_another_shape_than_the_spec_says_are_refused(change):
    caches = Caches([group(FullAttentionSpec(), 0)])
    caches.groups[0].kv_cache_spec = dataclasses.replace(caches.groups[0].kv_cache_spec, **change)
    with pytest.raises(LayoutError, match="has a tensor"):
        bind(caches)


def test_another_number_of_blocks_than_the_tables_have_is_refused():
    caches = Caches([group(FullAttentionSpec(), 0)])
    caches.blocks = 5
    with pytest.raises(LayoutError, match=r"6 blocks.*5 of 16"):
        bind(caches)


def test_two_layers_of_one_number_or_one_memory_are_refused():
    names = [attention_name(0), "model.layers.0.cross_attn.attn"]
    with pytest.raises(LayoutError, match="are of one layer"):
        bind(Caches([Group(names, FullAttentionSpec())]))
    caches = Caches([group(FullAttentionSpec(), 0, 1)])
    caches.tensors[attention_name(1)] = caches.tensors[attention_name(0)]
    with pytest.raises(LayoutError, match="are the same memory"):
        bind(caches)


def test_a_layer_without_a_module_or_tensor_is_refused():
    caches = Caches([group(FullAttentionSpec(), 0)])
    del caches.tensors[attention_name(0)]
    with pytest.raises(LayoutError, match="has no tensor"):
        bind(caches)


@pytest.mark.parametrize(
    ("name", "number"), [("model.layers.12.self_attn.attn", 12), ("language_model.model.layers.0.mixer", 0)]
)
def test_numbers_of_layers(name, number):
    assert layer_number(name) == number


@pytest.mark.parametrize("name", ["model.norm", "model.layers.0.self_attn.1.attn", "model.layers0.attn"])
def test_names_without_one_number_are_refused(name):
    with pytest.raises(LayoutError, match="numbers in its name"):
        layer_number(name)


def test_every_backend_of_the_table_has_a_layout():
    assert set(INTERIORS.values()) == {"tokens", "transposed", "latent"}


def test_the_page_names_all_backends_of_the_table():
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text(encoding="utf-8")
    rows = {
        "tokens": "| K, then V, token by token |",
        "transposed": "| K transposed, then V |",
        "latent": "| one packed row a token (MLA) |",
    }
    for interior, row in rows.items():
        (line,) = [line for line in page.splitlines() if line.startswith(row)]
        assert sorted(re.findall(r"`(\w+)`", line)) == sorted(n for n, i in INTERIORS.items() if i == interior)
