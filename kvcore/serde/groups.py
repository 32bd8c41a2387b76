"""What a frame says about memory objects: the groups of a frame, from layouts and `KVMeta`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvcore.arrays import ArrayRef
from kvcore.codecs.frame import GroupInfo, PartInfo
from kvcore.dtypes import dtype_name
from kvcore.errors import LayoutError
from kvcore.keys import Key
from kvcore.memory import KVMeta, LayoutDesc, MemoryPlan
from kvcore.rope import RopeParams
from kvcore.rows import RowLayout

__all__ = ["UNKNOWN_POSITION", "check_namespace", "groups_of", "rows_by_group_part", "stored_layout", "tokens_of"]

UNKNOWN_POSITION = -1
"""Base position of a group whose place in its sequence is not known: none of its rows is at position 0."""

_UINT8 = np.dtype(np.uint8)


def groups_of(plan: MemoryPlan) -> tuple[GroupInfo, ...]:
    """Return the groups of the frame that holds objects of a plan, one for each chunk.

    K and V are stored by head, ``LKHTD``, whatever the order in memory; a nameless part as ``LHTD``, packed rows as
    ``LTC``, opaque pages as ``L*``, other parts as ``L[name:HTD,...]``. Packed rows whose rotation is known and does
    not cover them are MLA's: their last channels, as many as are rotated, are a part R of their own, so that codecs can
    take the rotation off.

    Raises
    ------
    LayoutError
        The plan has no chunks, a range of layers or heads has not the extent of its chunk, or parts of one chunk differ
        in their heads.
    """
    if not plan.descs:
        raise LayoutError("an object of plain bytes has no KV to code; give one that was allocated by layout")
    return tuple(
        replace(
            _group(desc, meta.layers, meta.heads, meta.rope),
            base_position=UNKNOWN_POSITION if meta.base_position is None else meta.base_position,
        )
        for desc, meta in zip(plan.descs, plan.metas, strict=True)
    )


def tokens_of(plan: MemoryPlan) -> int:
    """Return the tokens that a frame of such objects stands for: those of the chunk that has most."""
    return max(desc.tokens for desc in plan.descs)


def check_namespace(metas: Sequence[KVMeta], key: Key) -> None:
    """Raise `LayoutError` for KV that is known to be of another namespace than its key."""
    for meta in metas:
        if meta.namespace and meta.namespace != key.namespace:
            raise LayoutError(
                f"the object holds KV of namespace {meta.namespace.hex()[:16]}..., its key is of "
                f"{key.namespace.hex()[:16]}...; give each object the key of its own KV"
            )


def rows_by_group_part(rows: RowLayout, group: GroupInfo) -> RowLayout:
    """Return rows with the group's parts: MLA's packed rows as C and R, which are ranges of them; all others as is."""
    if rows.parts != ("C",) or len(group.parts) == 1:
        return rows
    whole, _ = rows.segment("C")
    segments, start = [], 0
    for part in group.parts:
        bases = tuple(tuple(base + start * whole.dim_stride for base in bases) for bases in whole.bases)
        segments.append(replace(whole, parts=(part.name,), bases=bases, width=part.width))
        start += part.width
    return replace(rows, segments=tuple(segments))


@functools.lru_cache(maxsize=256)
def _group(
    desc: LayoutDesc, layers: tuple[int, int] | None, heads: tuple[int, int] | None, rope: RopeParams | None
) -> GroupInfo:
    """The group of a chunk at position 0: what is the same for the thousands of chunks of a model."""
    rows = desc.bind(ArrayRef(0, (desc.nbytes,), (1,), _UINT8))
    parts = {name: rows.segment(name)[0] for name in rows.parts}
    counts = {name: segment.heads for name, segment in parts.items()}
    if len(set(counts.values())) != 1:
        raise LayoutError(
            f"{desc.layout}: parts differ in their heads ({counts}), and a frame's groups have one number"
        )
    count = next(iter(counts.values()))
    first_layer, _ = _range("layers", layers, rows.layers, desc)
    first_head, _ = _range("heads", heads, count, desc)
    infos = [PartInfo(name, dtype_name(segment.dtype), segment.width) for name, segment in parts.items()]
    if rows.parts == ("C",) and rope is not None and rope.rotary_dims < infos[0].width:
        dtype = infos[0].dtype
        infos = [PartInfo("C", dtype, infos[0].width - rope.rotary_dims), PartInfo("R", dtype, rope.rotary_dims)]
    return GroupInfo(
        stored_layout(rows.parts),
        tuple(range(first_layer, first_layer + rows.layers)),
        tuple(infos),
        rows=desc.tokens,
        head_count=count,
        head_start=first_head,
        rope=rope,
    )


def stored_layout(parts: tuple[str, ...]) -> str:
    """Return the axis string of the stored chunk of some parts."""
    known: dict[tuple[str, ...], str] = {("K", "V"): "LKHTD", ("X",): "LHTD", ("C",): "LTC", ("page",): "L*"}
    return known.get(parts) or f"L[{','.join(f'{part}:HTD' for part in parts)}]"


def _range(what: str, given: tuple[int, int] | None, extent: int, desc: LayoutDesc) -> tuple[int, int]:
    first, last = (0, extent) if given is None else given
    if last - first != extent or first < 0:
        raise LayoutError(f"{desc.layout}: KVMeta says {what} {first}:{last}, the chunk has {extent}")
    return first, last
