"""The layout of vLLM's CPU attention, held to what its own operator writes. Runs where vLLM is installed."""

from __future__ import annotations

import importlib.util
import warnings
from types import SimpleNamespace

import pytest

from kvcore.connectors.vllm.layouts import CacheGeometry, bind_caches
from kvcore.connectors.vllm.proof import prove_transposed
from kvcore.errors import LayoutError

from .caches import FullAttentionSpec, Group, attention_name

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make vllm-env, and run with its Python", allow_module_level=True)
torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm import _custom_ops


class Module:
    kv_sharing_target_layer_name = None

    def __init__(self, isa, kv_cache_dtype="auto"):
        self.isa, self.kv_cache_dtype = isa, kv_cache_dtype

    def get_attn_backend(self):
        return SimpleNamespace(get_name=lambda: "CPU_ATTN")


def bound(dtype, block, width, module, *, heads=3, kv_dtype=None, quant=0):
    name = attention_name(0)
    spec = FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=width, head_size_v=width, kv_quant_mode=quant
    )
    tensor = torch.zeros((4, heads, block, 2 * width), dtype=dtype)
    declared = kv_dtype or str(dtype).removeprefix("torch.")
    geometry = CacheGeometry(1, heads, kv_dtype=(declared, declared))
    groups = [Group([name], spec)]
    (one,) = bind_caches(groups, {name: tensor}, {name: module}, geometry, chunk_tokens=256, num_blocks=4)
    return one, tensor


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("width", [64, 96])
def test_the_layout_is_what_vllm_writes(isa, dtype, block, width):
    module = Module(isa)
    prove_transposed(*bound(dtype, block, width, module), module)


@pytest.mark.parametrize(("told", "held"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_so_it_is_of_fp8(told, held):
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has fp8 caches on CPUs with AVX-512 only")
    module = Module("vec", told)
    prove_transposed(*bound(torch.uint8, 64, 64, module, kv_dtype=held, quant=1), module)


def test_another_packing_is_refused(monkeypatch):
    written = _custom_ops.cpu_attn_reshape_and_cache

    def other(key, value, key_cache, value_cache, *args, **more):  # K and V where the other one belongs
        written(key, value, value_cache, key_cache, *args, **more)

    monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", other)
    module = Module("vec")
    with pytest.raises(LayoutError, match="instruction set 'vec' does not store K"):
        prove_transposed(*bound(torch.float32, 32, 64, module), module)


def test_one_element_out_of_place_is_enough(monkeypatch):
    written = _custom_ops.cpu_attn_reshape_and_cache

    def other(key, value, key_cache, value_cache, *args, **more):
        written(key, value, key_cache, value_cache, *args, **more)
        value_cache[-1, -1, -1, -1] += 1

    monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", other)
    module = Module("vec")
    with pytest.raises(LayoutError, match="does not store V"):
        prove_transposed(*bound(torch.float32, 32, 64, module), module)


def test_an_unnamed_instruction_set_is_refused():
    module = Module(None)
    with pytest.raises(LayoutError, match="does not say which instruction set"):
        prove_transposed(*bound(torch.float32, 32, 64, module), module)
