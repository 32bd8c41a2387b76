"""Groups of objects that are serialised together: the bridge for serdes of single objects."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import ConfigError
from kvcore.keys import Key
from kvcore.memory import MemoryObj
from kvcore.serde.contract import (
    Deserializer,
    LayoutDescGroup,
    MemoryObjGroup,
    MultiDeserializer,
    MultiSerializer,
    Serializer,
)

__all__ = ["check_group", "single_to_multi_deserializer", "single_to_multi_serializer"]


def check_group(group: Sequence[object], slots: Sequence[str], needed: Sequence[str] = ()) -> None:
    """Refuse a group that has not these slots, or lacks one that is needed.

    Raises
    ------
    ConfigError
        Which is a ValueError, as the contract has it.
    """
    if len(group) != len(slots):
        raise ConfigError(f"a group of {len(group)} objects, where {len(slots)} are wanted: {', '.join(slots)}")
    for slot, one in zip(slots, group, strict=True):
        if one is None and slot in needed:
            raise ConfigError(f"slot {slot} of the group is None, and it is needed: {', '.join(needed)}")


def single_to_multi_serializer(serializer: Serializer) -> MultiSerializer:
    """Return a serialiser of groups of one that writes the bytes that `serializer` writes."""
    return _OneSerializer(serializer)


def single_to_multi_deserializer(deserializer: Deserializer) -> MultiDeserializer:
    """Return a deserialiser of groups of one that reads the bytes that `deserializer` reads."""
    return _OneDeserializer(deserializer)


_SLOT = ("object",)


class _OneSerializer(MultiSerializer):
    group_size = 1

    def __init__(self, serializer: Serializer) -> None:
        self._serializer = serializer
        self.deterministic = serializer.deterministic

    def serialize(self, src: MemoryObjGroup, dst: MemoryObj, key: Key) -> int:
        check_group(src, _SLOT, _SLOT)
        (one,) = src
        return 0 if one is None else self._serializer.serialize(one, dst, key)

    def estimate_serialized_size(self, layout: LayoutDescGroup) -> int:
        check_group(layout, _SLOT)
        (one,) = layout
        return 0 if one is None else self._serializer.estimate_serialized_size(one)


class _OneDeserializer(MultiDeserializer):
    group_size = 1

    def __init__(self, deserializer: Deserializer) -> None:
        self._deserializer = deserializer
        self.partial = deserializer.partial

    def deserialize(self, src: MemoryObj, dst: MemoryObjGroup, key: Key) -> None:
        check_group(dst, _SLOT)
        (one,) = dst
        if one is not None:
            self._deserializer.deserialize(src, one, key)
