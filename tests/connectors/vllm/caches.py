"""Caches as vLLM has them, without vLLM: specs, groups, attention modules and tensors of the same names and shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

LAYOUTS = {  # physical order of L, B, H, N, C
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 8
    head_size_v: int = 8
    kv_quant_mode: int = 0
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False
    prefix_cacheable = True


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 32


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int = 64


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    head_size_v: int = 0
    model_version: str | None = None


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    block_size: int = 32
    nbytes: int = 640
    mamba_cache_mode: str = "align"
    tp_replicated: bool = False
    prefix_cacheable = True


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, Any]
    prefix_cacheable = True


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool = True


@dataclass
class Module:
    backend: str = "FLASH_ATTN"
    kv_sharing_target_layer_name: str | None = None
    kv_cache_dtype: str = "auto"
    source: str = "vllm.v1.attention.backends.flash_attn"

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self.backend, __module__=self.source)


def attention_name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


@dataclass
class Caches:
    """Some groups, allocated in one of vLLM's layouts."""

    groups: list[Group]
    blocks: int = 6
    layout: str = "LBHNC"
    backend: str = "FLASH_ATTN"
    dtype: Any = np.float32
    kernel_block: int | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    modules: dict[str, Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for group in self.groups:
            by_spec: dict[Any, list[str]] = {}
            for name in group.layer_names:
                spec = group.kv_cache_spec
                by_spec.setdefault(getattr(spec, "kv_cache_specs", {}).get(name, spec), []).append(name)
            for spec, names in by_spec.items():
                for name, tensor in zip(names, self._views(spec, len(names)), strict=True):
                    self.tensors[name] = tensor
                    recurrent = isinstance(spec, MambaSpec)
                    self.modules.setdefault(name, Module("MAMBA2" if recurrent else self.backend))

    def _views(self, spec: Any, layers: int) -> list[np.ndarray]:
        if isinstance(spec, MambaSpec):
            return list(np.zeros((layers, self.blocks, 1, 1, spec.nbytes), np.int8))
        kernel = self.kernel_block or spec.block_size
        content = spec.head_size + spec.head_size_v
        shape = (layers, self.blocks * spec.block_size // kernel, spec.num_kv_heads, kernel, content)
        order = LAYOUTS[self.layout]
        memory = np.arange(math.prod(shape)).astype(self.dtype).reshape([shape[axis] for axis in order])
        return list(memory.transpose(np.argsort(order)))
