"""Where vLLM keeps its KV: from its cache groups, attention backends and tensors to parts with bound layouts.

vLLM hands out one tensor a layer, a view ``[B, H, N, C]`` (block, head, token, content) with the strides of whatever
physical layout it chose; the strides are read, never assumed. What lies *inside* a block is the attention backend's
business, so it is in a table of those whose source says it. An unknown backend, quantisation or kind of cache is
refused with what was found and what is known: a wrong guess would store garbage that looks like KV.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.arrays import ArrayRef
from kvcore.dtypes import dtype_name
from kvcore.engine.parts import CachePart
from kvcore.errors import LayoutError
from kvcore.layout import Layout, RowLayout
from kvcore.memory import chunk_desc

__all__ = ["INTERIORS", "SPEC_KINDS", "BoundPart", "CacheGeometry", "bind_caches", "gives_blocks_back", "layer_number"]

INTERIORS = {
    # The content of a token is its K, then its V.
    "FLASH_ATTN": "tokens",
    "FLASH_ATTN_DIFFKV": "tokens",
    "FLASHINFER": "tokens",
    "FLEX_ATTENTION": "tokens",
    "TRITON_ATTN": "tokens",
    "TRITON_ATTN_DIFFKV": "tokens",
    "TRITON_FLASH_ATTN": "tokens",
    "TRITON_FLASHINFER": "tokens",
    # K transposed in the first half of a (block, head), V in the second; `prove_transposed` holds it to that.
    "CPU_ATTN": "transposed",
    # One packed row a token: the latent, then the rotated part of the key.
    "CPU_MLA": "latent",
    "CUTLASS_MLA": "latent",
    "FLASHINFER_MLA": "latent",
    "FLASHMLA": "latent",
    "FLASH_ATTN_MLA": "latent",
    "TRITON_MLA": "latent",
}
"""Attention backends of vLLM 0.32 whose block interior is known, by their `get_name()`."""

_NAMESAKES = {"rocm_aiter_fa"}
"""Modules of vLLM whose backend has the name of another one, and blocks that may look otherwise inside."""

SPEC_KINDS = {
    "FullAttentionSpec": "attention",
    "SlidingWindowSpec": "attention",
    "ChunkedLocalAttentionSpec": "attention",
    "MLAAttentionSpec": "latent",
    "MambaSpec": "recurrent",
}
"""Kinds of cache that can be saved and restored, by the exact class of vLLM's spec."""

_TEXTS = {
    "tokens": ("L|BHN[K:D,V:D]", "L|BHN[K:D,V:E]"),
    "transposed": ("L|BH[K:DN,V:ND]", "L|BH[K:DN,V:NE]"),
    "latent": ("L|B1NC", "L|B1NC"),
    "pages": ("L|B*", "L|B*"),
}
_DRAFT_PREFIX = "draft_model."


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What of the model and of this rank decides which part of the KV a tensor holds.

    Parameters
    ----------
    model_layers : int
        Layers of the model; what vLLM numbers beyond them belongs to a draft model, whose KV is not cached.
    kv_heads : int
        KV heads of the model, all ranks together; 0 where there are none.
    rank, degree : int
        This rank among those that share out the heads, and their number.
    kv_dtype : (str, str)
        Element type of K and V: vLLM keeps fp8 in bytes and names the format elsewhere.
    """

    model_layers: int
    kv_heads: int
    rank: int = 0
    degree: int = 1
    kv_dtype: tuple[str, str] = ("bfloat16", "bfloat16")


@dataclass(frozen=True, slots=True)
class BoundPart:
    """A part of the KV, and where it lies in vLLM's memory.

    Parameters
    ----------
    part : CachePart
    rows : RowLayout
        Its layers, in the order of `part.layers`; blocks as the tensors have them, which may be smaller than those of
        the block tables.
    group : int
        Index of the cache group, and so of the block table.
    block_tokens : int
        Tokens of the sequence that a block of the table stands for.
    layer_names : tuple of str
        In the order of `part.layers`.
    aligned_states : bool
        Recurrent parts: only the state where a step ends is in its block ("align"), not that of every block ("all").
    interior : str
        ``"tokens"``, ``"transposed"``, ``"latent"`` or ``"pages"``.
    """

    part: CachePart
    rows: RowLayout
    group: int
    block_tokens: int
    layer_names: tuple[str, ...]
    aligned_states: bool = False
    interior: str = "tokens"


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's cache: all that must be equal for layers to be one part comes first."""

    interior: str
    window: int | None
    heads: int
    width: int
    v_width: int
    shape: tuple[int, ...]
    name: str
    number: int
    spec: Any
    tensor: Any

    @property
    def kin(self) -> tuple[Any, ...]:
        return self.interior, self.window, self.heads, self.width, self.v_width, self.shape


def layer_number(name: str) -> int:
    """Return the number of a layer, which is the one number in its name.

    Raises
    ------
    LayoutError
        The name has none, or several.
    """
    numbers = re.findall(r"(?<![^.])\d+(?![^.])", name)
    if len(numbers) != 1:
        raise LayoutError(
            f"layer {name!r} has {len(numbers)} numbers in its name where one is expected; the layers of this model "
            "cannot be told apart"
        )
    return int(numbers[0])


def gives_blocks_back(spec: Any) -> bool:
    """Whether a group of this kind gives blocks of a request back before it is finished: it needs its last tokens."""
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is not None:
        return any(map(gives_blocks_back, inner.values()))
    return type(spec).__name__ not in ("FullAttentionSpec", "MLAAttentionSpec")


def bind_caches(
    groups: Sequence[Any],
    tensors: Mapping[str, Any],
    layers: Mapping[str, Any],
    geometry: CacheGeometry,
    *,
    chunk_tokens: int,
    num_blocks: int,
    group_ids: Sequence[int] | None = None,
) -> tuple[BoundPart, ...]:
    """Bind vLLM's caches, group by group.

    Parameters
    ----------
    groups : sequence of KVCacheGroupSpec
        All of the engine's.
    tensors : mapping of str to tensor
        As `register_kv_caches` is given them.
    layers : mapping of str to layer
        The model's attention modules by name, which know their attention backend and whose KV they share.
    geometry : CacheGeometry
    chunk_tokens : int
        Tokens of a stored chunk.
    num_blocks : int
        Blocks of the engine's block tables.
    group_ids : sequence of int, optional
        The groups to bind; all if not given.

    Returns
    -------
    tuple of BoundPart
        By group, then by their first layers.

    Raises
    ------
    LayoutError
        A kind of cache, attention backend or form of tensor that is not known, with what is.
    """
    found: list[BoundPart] = []
    for index in range(len(groups)) if group_ids is None else group_ids:
        kin: dict[tuple[Any, ...], list[_Layer]] = {}
        for layer in _layers_of(groups[index], tensors, layers, geometry):
            kin.setdefault(layer.kin, []).append(layer)
        block_tokens = int(groups[index].kv_cache_spec.block_size)
        found.extend(_bind(one, index, block_tokens, geometry, chunk_tokens, num_blocks) for one in kin.values())
    if not found:
        raise LayoutError("vLLM has no KV cache that could be cached: all of its layers belong to others or to drafts")
    return tuple(sorted(found, key=lambda one: (one.group, one.part.layers)))


def _layers_of(
    group: Any, tensors: Mapping[str, Any], layers: Mapping[str, Any], geometry: CacheGeometry
) -> Iterator[_Layer]:
    for name in group.layer_names:
        if name.startswith(_DRAFT_PREFIX):
            continue
        module = layers.get(name)
        if module is None or name not in tensors:
            missing = "module" if module is None else "tensor"
            raise LayoutError(f"vLLM names a layer {name!r} in a cache group and has no {missing} of this name")
        if getattr(module, "kv_sharing_target_layer_name", None):
            continue  # its KV is another layer's, which is saved
        number = layer_number(name)
        if number >= geometry.model_layers:
            continue  # a draft's
        spec = group.kv_cache_spec
        spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
        yield _layer(name, number, spec, module, tensors[name])


def _layer(name: str, number: int, spec: Any, module: Any, tensor: Any) -> _Layer:
    kind = SPEC_KINDS.get(type(spec).__name__)
    if kind is None:
        raise LayoutError(
            f"layer {name!r} has a cache of kind {type(spec).__name__}; known are {', '.join(SPEC_KINDS)}"
        )
    shape = tuple(int(n) for n in tensor.shape)
    if kind == "recurrent":
        if spec.mamba_cache_mode not in ("align", "all"):
            raise LayoutError(
                f"layer {name!r} keeps one recurrent state a request (mamba_cache_mode {spec.mamba_cache_mode!r}), so "
                "the states of prefixes are nowhere; start vLLM with --enable-prefix-caching --mamba-cache-mode align"
            )
        return _Layer("pages", None, 1, 0, 0, shape[1:], name, number, spec, tensor)
    backend = _backend_name(module.get_attn_backend())
    interior = INTERIORS.get(backend)
    if interior is None or (interior == "latent") != (kind == "latent"):
        known = ", ".join(sorted(n for n, i in INTERIORS.items() if (i == "latent") == (kind == "latent")))
        raise LayoutError(
            f"layer {name!r} ({type(spec).__name__}) has attention backend {backend!r}; what its blocks look like "
            f"inside is known of {known}. Choose one of them (--attention-backend), or do without kvcore"
        )
    _check_dense(name, spec)
    heads, width, v_width = int(spec.num_kv_heads), int(spec.head_size), int(spec.head_size_v)
    content = width if kind == "latent" else width + v_width
    rows = (heads, shape[2] if len(shape) == 4 else 0, content)
    if len(shape) != 4 or shape[1:] != rows or spec.block_size % shape[2]:
        raise LayoutError(
            f"layer {name!r} of {backend} has a tensor {list(shape)}; [blocks, {heads}, tokens that divide "
            f"{spec.block_size}, {content}] would fit {type(spec).__name__}"
        )
    window = getattr(spec, "sliding_window", None) if type(spec).__name__ != "FullAttentionSpec" else None
    window = getattr(spec, "attention_chunk_size", None) if "Chunked" in type(spec).__name__ else window
    return _Layer(interior, window, heads, width, v_width, shape[1:], name, number, spec, tensor)


def _backend_name(backend: Any) -> str:
    """Return what an attention backend is called, with its module where the name is another's too."""
    name, module = str(backend.get_name()), str(getattr(backend, "__module__", "")).rpartition(".")[2]
    return f"{name} ({module})" if module in _NAMESAKES else name


def _check_dense(name: str, spec: Any) -> None:
    """Refuse caches whose content is not plain K and V: packed, pooled, quantised with scales of their own."""
    mode = getattr(spec, "kv_quant_mode", 0)
    if int(mode) not in (0, 1):  # NONE, FP8_PER_TENSOR
        raise LayoutError(
            f"layer {name!r} has a cache quantised as {getattr(mode, 'name', mode)}, whose scales lie in its blocks; "
            "known are NONE and FP8_PER_TENSOR (--kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2)"
        )
    odd = {
        "num_head_slots": getattr(spec, "num_head_slots", None),
        "state_content_bytes": getattr(spec, "state_content_bytes", None),
        "tokens_per_state": None if getattr(spec, "tokens_per_state", 1) == 1 else spec.tokens_per_state,
        "non_causal": getattr(spec, "non_causal", False) or None,
        "model_version": getattr(spec, "model_version", None),
    }
    told = {key: value for key, value in odd.items() if value is not None}
    if told:
        raise LayoutError(f"layer {name!r} has a cache of a form that is not known here: {told}")


def _bind(
    same: Sequence[_Layer],
    group: int,
    block_tokens: int,
    geometry: CacheGeometry,
    chunk_tokens: int,
    num_blocks: int,
) -> BoundPart:
    ordered = sorted(same, key=lambda layer: layer.number)
    first = ordered[0]
    numbers = tuple(layer.number for layer in ordered)
    names = tuple(layer.name for layer in ordered)
    if len(set(numbers)) < len(numbers):
        raise LayoutError(f"several caches of group {group} are of one layer: {', '.join(names)}")
    dense, differing = _TEXTS[first.interior]
    wide = first.v_width != first.width and first.interior in ("tokens", "transposed")
    extents: dict[str, int] = {}
    dtypes: dict[str, object] = {}
    if first.interior != "pages":
        dtypes = _dtypes(first, geometry)
    if first.interior in ("tokens", "transposed"):
        extents = {"D": first.width, **({"E": first.v_width} if wide else {})}
        extents |= {"N": first.shape[1]} if first.interior == "transposed" else {}
    rows = Layout(differing if wide else dense).bind([layer.tensor for layer in ordered], dtypes=dtypes, **extents)
    smaller = 1 if first.interior == "pages" else block_tokens // rows.block_tokens
    if rows.blocks != num_blocks * smaller:
        raise LayoutError(
            f"the tensors of group {group} have {rows.blocks} blocks of {rows.block_tokens} tokens; vLLM's tables have "
            f"{num_blocks} of {block_tokens}"
        )
    rows.check_writable()
    if first.interior == "pages":
        return _bound_pages(rows, numbers, names, first.spec, group, block_tokens, chunk_tokens, geometry)
    heads, all_heads = (None, 0) if first.interior == "latent" else _heads(first, geometry)
    part = CachePart(chunk_desc(rows, chunk_tokens), numbers, heads=heads, all_heads=all_heads, window=first.window)
    return BoundPart(part, rows, group, block_tokens, names, interior=first.interior)


def _bound_pages(
    rows: RowLayout,
    numbers: tuple[int, ...],
    names: tuple[str, ...],
    spec: Any,
    group: int,
    block_tokens: int,
    chunk_tokens: int,
    geometry: CacheGeometry,
) -> BoundPart:
    if chunk_tokens % block_tokens:
        raise LayoutError(
            f"recurrent states are kept every {block_tokens} tokens, and chunks have {chunk_tokens}: their ends do not "
            f"meet; set chunk_tokens to a multiple of {block_tokens} (a multiple of "
            f"{math.lcm(block_tokens, 256)} meets chunks of 256 too)"
        )
    # A state that ranks share out has no heads in it; but a rank's share must not pass for another's.
    shared = geometry.degree > 1 and not getattr(spec, "tp_replicated", False)
    heads = (geometry.rank, geometry.rank + 1) if shared else None
    part = CachePart(
        chunk_desc(rows, 1), numbers, heads=heads, all_heads=geometry.degree if shared else 0, kind="recurrent"
    )
    aligned = spec.mamba_cache_mode == "align"
    return BoundPart(part, rows, group, block_tokens, names, aligned_states=aligned, interior="pages")


def _dtypes(layer: _Layer, geometry: CacheGeometry) -> dict[str, object]:
    """Element types by part: those of the tensor, or the fp8 format that its bytes hold."""
    held, told = dtype_name(ArrayRef.of(layer.tensor).dtype), geometry.kv_dtype
    if held not in ("uint8", "int8"):
        if told != (held, held):
            raise LayoutError(f"layer {layer.name!r} holds {held}, and the cache was declared as {'/'.join(told)}")
        return {}
    if not all(one.startswith("float8") for one in told):
        raise LayoutError(f"layer {layer.name!r} holds bytes; {'/'.join(told)} is declared, which is no fp8 format")
    return {"C": told[0]} if layer.interior == "latent" else {"K": told[0], "V": told[1]}


def _heads(layer: _Layer, geometry: CacheGeometry) -> tuple[tuple[int, int], int]:
    """Return the range of the model's KV heads that this rank holds, and how many the model has."""
    if geometry.degree == 1:
        return (0, layer.heads), layer.heads
    per_rank = max(geometry.kv_heads // geometry.degree, 1)
    fits = geometry.kv_heads % geometry.degree == 0 or geometry.degree % max(geometry.kv_heads, 1) == 0
    if layer.heads != per_rank or not fits or not geometry.kv_heads:
        raise LayoutError(
            f"layer {layer.name!r} has {layer.heads} KV heads on this rank; {geometry.kv_heads} of the model over "
            f"{geometry.degree} ranks would be {per_rank}: which heads these are cannot be told"
        )
    replicas = max(geometry.degree // geometry.kv_heads, 1)
    start = geometry.rank // replicas * per_rank
    return (start, start + per_rank), geometry.kv_heads
