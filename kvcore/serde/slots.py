"""Keys and values in objects of their own: groups whose slots each hold one part, in one frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.frame import GroupInfo
from kvcore.errors import CorruptFrameError, LayoutError
from kvcore.keys import Key
from kvcore.memory import MemoryObj, MemoryPlan
from kvcore.rows import RowLayout
from kvcore.serde.contract import LayoutDescGroup, MemoryObjGroup, MultiDeserializer, MultiSerializer
from kvcore.serde.frames import FrameDeserializer, FrameSerializer
from kvcore.serde.groups import check_namespace, groups_of, stored_layout, tokens_of
from kvcore.serde.multi import check_group

__all__ = ["SLOTS", "SlotsDeserializer", "SlotsSerializer"]

SLOTS = ("K", "V")
"""The slots of a group, and the parts of its frame."""


class SlotsSerializer(MultiSerializer):
    """Writes a frame of the parts that slots hold: the bytes that an object of both, ``LKTHD``, would give.

    Parameters
    ----------
    serializer : FrameSerializer
    stored : sequence of str
        Slots that are stored, of `SLOTS`. Each is needed; others are not looked at.
    """

    group_size = len(SLOTS)

    def __init__(self, serializer: FrameSerializer, stored: Sequence[str] = SLOTS) -> None:
        self._serializer = serializer
        self._stored = tuple(stored)
        self.deterministic = serializer.deterministic

    def serialize(self, src: MemoryObjGroup, dst: MemoryObj, key: Key) -> int:
        """See `MultiSerializer.serialize`.

        Raises
        ------
        LayoutError
            A slot holds more than one part, or the slots differ in their layers, heads, tokens or positions.
        """
        check_group(src, SLOTS, self._stored)
        held = {slot: one for slot, one in zip(SLOTS, src, strict=True) if one is not None and slot in self._stored}
        group, tokens = _joined({slot: one.plan for slot, one in held.items()})
        for one in held.values():
            check_namespace(one.metas, key)
        rows = _bound({slot: one.rows() for slot, one in held.items()})
        return self._serializer.serialize_rows([group], [rows], tokens, dst, key)

    def estimate_serialized_size(self, layout: LayoutDescGroup) -> int:
        """See `MultiSerializer.estimate_serialized_size`."""
        check_group(layout, SLOTS)
        held = {slot: one for slot, one in zip(SLOTS, layout, strict=True) if one is not None and slot in self._stored}
        if not held:
            return 0
        group, tokens = _joined(held)
        return self._serializer.estimate_groups([group], tokens)


class SlotsDeserializer(MultiDeserializer):
    """Reads the frames of a `SlotsSerializer`: a slot of None, and one that is not stored, is left alone.

    Parameters
    ----------
    deserializer : FrameDeserializer
    stored : sequence of str
        As in `SlotsSerializer`.
    """

    group_size = len(SLOTS)

    def __init__(self, deserializer: FrameDeserializer, stored: Sequence[str] = SLOTS) -> None:
        self._deserializer = deserializer
        self._stored = tuple(stored)
        self.partial = deserializer.partial

    def deserialize(self, src: MemoryObj, dst: MemoryObjGroup, key: Key) -> None:
        """See `MultiDeserializer.deserialize`; `LayoutError` as `SlotsSerializer.serialize`."""
        check_group(dst, SLOTS)
        held = {slot: one for slot, one in zip(SLOTS, dst, strict=True) if one is not None and slot in self._stored}
        if not held:
            return
        group, tokens = _joined({slot: one.plan for slot, one in held.items()})
        for one in held.values():
            check_namespace(one.metas, key)
        rows = {slot: one.rows() for slot, one in held.items()}
        if len(held) < len(self._stored):
            # Parts are decoded together: the one that nobody wants goes to memory that is let go.
            group = _around(self._deserializer.groups(src, key), group)
            rest = replace(group, parts=tuple(part for part in group.parts if part.name not in held))
            rows |= {part.name: allocate_rows(rest) for part in rest.parts}
        bound = _bound({slot: rows[slot] for slot in SLOTS if slot in rows})
        self._deserializer.deserialize_rows(src, [group], [bound], tokens, key)


def _joined(plans: dict[str, MemoryPlan]) -> tuple[GroupInfo, int]:
    """Return the group that the parts of some slots make, and the tokens of its chunk."""
    found: dict[str, GroupInfo] = {}
    for slot, plan in plans.items():
        groups = groups_of(plan)
        if len(groups) != 1 or len(groups[0].parts) != 1:
            held = "; ".join(", ".join(part.name for part in group.parts) for group in groups)
            raise LayoutError(f"slot {slot} holds one part, as in LTHD, not {held}")
        found[slot] = groups[0]
    layout = stored_layout(tuple(found))
    named = {
        slot: replace(group, layout=layout, parts=(replace(group.parts[0], name=slot),))
        for slot, group in found.items()
    }
    first = next(iter(named.values()))
    for slot, group in named.items():
        if replace(group, parts=first.parts) != first:
            raise LayoutError(f"slot {slot} holds {group}, another one {first}: all but the parts must be the same")
    parts = tuple(group.parts[0] for group in named.values())
    return replace(first, parts=parts), max(map(tokens_of, plans.values()))


def _bound(rows: dict[str, RowLayout]) -> RowLayout:
    """Return the rows of several slots, one part each, as rows of one chunk."""
    first = next(iter(rows.values()))
    segments = tuple(replace(one.segments[0], parts=(slot,)) for slot, one in rows.items())
    return replace(
        first,
        text=stored_layout(tuple(rows)),
        segments=segments,
        readonly=any(one.readonly for one in rows.values()),
        owner=tuple(one.owner for one in rows.values()),
    )


def _around(stored: Sequence[GroupInfo], group: GroupInfo) -> GroupInfo:
    """Return what a group with some of the parts must be in a frame that holds more: nobody here knows the others."""
    if len(stored) != 1:
        raise CorruptFrameError(f"the frame has {len(stored)} groups, expected 1", reason="layout")
    there = {part.name: part for part in stored[0].parts}
    known = {part.name: part for part in group.parts}
    if tuple(there) != SLOTS:
        raise CorruptFrameError(f"the frame has parts {', '.join(there)}, expected {', '.join(SLOTS)}", reason="layout")
    return replace(group, layout=stored_layout(SLOTS), parts=tuple((there | known).values()))
