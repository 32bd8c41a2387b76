"""Serdes: memory objects of KV to bytes and back, as stores and controllers drive them. See docs/serdes.md."""

from __future__ import annotations

from kvcore.serde.config import SerdeConfig
from kvcore.serde.contract import (
    BytesDeserializer,
    BytesSerializer,
    Deserializer,
    LayoutDescGroup,
    MemoryObjGroup,
    MultiDeserializer,
    MultiSerializer,
    Serde,
    SerdeProcessor,
    Serializer,
    serialized_layout_desc,
)
from kvcore.serde.frames import FrameDeserializer, FrameSerializer
from kvcore.serde.multi import single_to_multi_deserializer, single_to_multi_serializer
from kvcore.serde.processor import AsyncSerdeProcessor
from kvcore.serde.registry import (
    create_serde,
    create_serde_processor,
    get_registered_serde_types,
    register_serde_factory,
)

__all__ = [
    "AsyncSerdeProcessor",
    "BytesDeserializer",
    "BytesSerializer",
    "Deserializer",
    "FrameDeserializer",
    "FrameSerializer",
    "LayoutDescGroup",
    "MemoryObjGroup",
    "MultiDeserializer",
    "MultiSerializer",
    "Serde",
    "SerdeConfig",
    "SerdeProcessor",
    "Serializer",
    "create_serde",
    "create_serde_processor",
    "get_registered_serde_types",
    "register_serde_factory",
    "serialized_layout_desc",
    "single_to_multi_deserializer",
    "single_to_multi_serializer",
]
