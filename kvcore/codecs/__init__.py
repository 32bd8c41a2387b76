"""Codecs and the frame that stores what they make. See docs/frame.md."""

from __future__ import annotations

from kvcore.codecs.contract import Codec, CodedSegment
from kvcore.codecs.frame import (
    FrameHeader,
    FramePlan,
    FrameReader,
    FrameWriter,
    GroupInfo,
    PartInfo,
    encode_frame,
    plan_frame,
    stream_layers,
    write_frame,
)
from kvcore.codecs.registry import PRESETS, codec_of, get_codec

__all__ = [
    "PRESETS",
    "Codec",
    "CodedSegment",
    "FrameHeader",
    "FramePlan",
    "FrameReader",
    "FrameWriter",
    "GroupInfo",
    "PartInfo",
    "codec_of",
    "encode_frame",
    "get_codec",
    "plan_frame",
    "stream_layers",
    "write_frame",
]
