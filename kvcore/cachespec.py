"""`KVCacheSpec`: what a model's KV cache consists of, group by group.

Hybrid models keep several kinds of cache side by side: full attention, sliding windows, recurrent states, indexers.
Each kind is a group with its own layers, layout, types and block size. Everything is declared; binding checks the
declaration against the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore.dtypes import dtype_name, to_dtype
from kvcore.errors import LayoutError
from kvcore.layout import Layout, RowLayout

__all__ = ["KINDS", "CacheGroup", "KVCacheSpec"]

KINDS = ("attention", "recurrent", "aux")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one kind of cache.

    Parameters
    ----------
    layers : tuple of int
        The model's layers, in order.
    layout : Layout
        Of the tensors of these layers.
    dtypes : mapping of str to dtype
        Element type of each part; K and V may differ.
    block_tokens : int
        Slots in a block of the tensors.
    bytes_per_token : int
        KV bytes of one token over all layers of the group. Declared, so that a wrong head size cannot hide.
    logical_tokens : int, optional
        Tokens of the sequence that a block stands for, where it is not `block_tokens` (recurrent states, compressed
        caches).
    window : int, optional
        Tokens that attention looks back; None for all.
    kind : {"attention", "recurrent", "aux"}
    shares_with : int, optional
        Index of the group whose blocks it uses (indexers that live in another group's pages).
    scales : mapping of str to float32 array, optional
        Dequantisation scales of a quantised cache by part: ``[layers]`` per tensor or ``[layers, heads]`` per head.

    Raises
    ------
    LayoutError
        A declaration that contradicts itself.
    """

    layers: tuple[int, ...]
    layout: Layout
    dtypes: Mapping[str, np.dtype[Any]] = field(hash=False)
    block_tokens: int
    bytes_per_token: int
    logical_tokens: int | None = None
    window: int | None = None
    kind: str = "attention"
    shares_with: int | None = None
    scales: Mapping[str, np.ndarray[Any, np.dtype[np.float32]]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise LayoutError(f"a cache group has distinct layers, at least one; got {self.layers}")
        if self.kind not in KINDS:
            raise LayoutError(f"unknown kind of cache {self.kind!r}; known are {', '.join(KINDS)}")
        for name in ("block_tokens", "bytes_per_token", "logical_tokens", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LayoutError(f"{name} must be positive, got {value}")
        if set(self.dtypes) != set(self.layout.parts):
            raise LayoutError(
                f"{self.layout}: dtypes for {sorted(self.dtypes)}, its parts are {list(self.layout.parts)}"
            )
        object.__setattr__(self, "dtypes", {p: to_dtype(d) for p, d in self.dtypes.items()})
        for part, scale in self.scales.items():
            if part not in self.dtypes:
                raise LayoutError(f"scales for part {part!r}, but the parts are {', '.join(self.layout.parts)}")
            if scale.dtype != np.float32 or scale.ndim not in (1, 2) or scale.shape[0] != len(self.layers):
                raise LayoutError(
                    f"scales of {part} must be float32 [{len(self.layers)}] (per tensor) or "
                    f"[{len(self.layers)}, heads] (per head), got {scale.dtype} {list(scale.shape)}"
                )

    def bind(self, tensors: Any) -> RowLayout:
        """Bind to the group's tensors and check every declaration against them.

        Raises
        ------
        LayoutError
            Extents, dtypes, block size or bytes per token differ from the declaration.
        """
        paged = self.layout.paged and not self.layout.opaque
        rows = self.layout.bind(tensors, dtypes=self.dtypes, **({"N": self.block_tokens} if paged else {}))
        if rows.layers != len(self.layers):
            raise LayoutError(f"{self.layout}: {rows.layers} layers of tensors for {len(self.layers)} declared layers")
        for part in rows.parts:
            segment, _ = rows.segment(part)
            if segment.dtype != self.dtypes[part]:
                raise LayoutError(
                    f"{self.layout}: part {part} holds {dtype_name(segment.dtype)}, "
                    f"declared {dtype_name(self.dtypes[part])}"
                )
            scale = self.scales.get(part)
            if scale is not None and scale.ndim == 2 and scale.shape[1] != segment.heads:
                raise LayoutError(f"scales of {part} are for {scale.shape[1]} heads, its tensors have {segment.heads}")
        per_token = rows.nbytes // rows.tokens if rows.tokens else self.bytes_per_token
        if self.layout.opaque:
            per_token = -(-per_token // (self.logical_tokens or self.block_tokens))
        if per_token != self.bytes_per_token:
            raise LayoutError(
                f"{self.layout}: {per_token} B per token in the tensors, {self.bytes_per_token} B declared"
            )
        return rows


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The groups of a model's cache, in the order of its block tables.

    Raises
    ------
    LayoutError
        No group; a layer in two groups of one kind; or `shares_with` pointing at no other group.
    """

    groups: tuple[CacheGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("a KV cache has at least one group")
        owners: dict[tuple[str, int], int] = {}
        for i, group in enumerate(self.groups):
            for layer in group.layers:
                other = owners.setdefault((group.kind, layer), i)
                if other != i:
                    raise LayoutError(f"layer {layer} is in groups {other} and {i}, both of kind {group.kind}")
            target = group.shares_with
            if target is not None and (target == i or not 0 <= target < len(self.groups)):
                raise LayoutError(f"group {i} shares blocks with group {target}, which is not another group")

    def bind(self, tensors: Sequence[Any]) -> tuple[RowLayout, ...]:
        """Bind every group to its tensors, in order (see `CacheGroup.bind`)."""
        if len(tensors) != len(self.groups):
            raise LayoutError(f"{len(self.groups)} groups need as many sets of tensors, got {len(tensors)}")
        return tuple(group.bind(t) for group, t in zip(self.groups, tensors, strict=True))
