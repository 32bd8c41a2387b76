"""Codecs and the frame that stores what they make. See docs/frame.md."""

from __future__ import annotations

from kvcore.codecs.frame import (
    CODECS,
    FrameHeader,
    FramePlan,
    FrameReader,
    FrameWriter,
    GroupInfo,
    PartInfo,
    plan_frame,
    write_frame,
)

__all__ = [
    "CODECS",
    "FrameHeader",
    "FramePlan",
    "FrameReader",
    "FrameWriter",
    "GroupInfo",
    "PartInfo",
    "plan_frame",
    "write_frame",
]
