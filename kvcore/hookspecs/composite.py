"""Composites: what `kvcore.codecs` composes from ops, and a backend may supply in one piece.

None of them has to be there. A fused implementation is used wherever the composition would be, and gives the same
bytes: its definition is the composition's code, named below. It is marked with `@kvcore.hookimpl` and named after its
spec, like an op; a device's backend fuses so that only coded bytes cross the link to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.hookspecs.markers import hookspec
from kvcore.rows import RowLayout

__all__ = [
    "kvcore_fused_decode_scatter",
    "kvcore_fused_decode_segments",
    "kvcore_fused_encode_segments",
    "kvcore_fused_gather_encode",
]


@hookspec(firstresult=True)
def kvcore_fused_encode_segments(
    x: Any,
    *,
    tables: Any,
    rule: Any,
    raw_rows: Sequence[int] = (),
    raw_values: Any = None,
    unroped: bool = False,
    names: Sequence[str] | None = None,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Encode KVS1 segments of one shape ``[S, T, C]``: as `kvcore.codecs.segments.encode_segments`, without its checks.

    Returns
    -------
    list of CodedSegment
    """


@hookspec(firstresult=True)
def kvcore_fused_decode_segments(
    segments: Sequence[Any],
    *,
    tables: Any,
    tokens: int,
    channels: int,
    dtype: Any,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Decode KVS1 segments of one shape and up to 256 tokens: as `kvcore.codecs.segments.decode_segments`.

    Parameters
    ----------
    segments : sequence of CodedSegment
        Whole ones: bytes that follow the last tile, or tiles too many, are an error.

    Returns
    -------
    Decoded

    Raises
    ------
    CorruptFrameError
        As the composition.
    """


@hookspec(firstresult=True)
def kvcore_fused_gather_encode(
    src: RowLayout,
    index: Any,
    *,
    codec: Any,
    group: Any,
    unit: str = "slot",
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Encode tokens of a paged cache: as `kvcore.codecs.composites.gather_encode`.

    Returns
    -------
    list of list of CodedSegment, or None
        By layer; None hands the request back to the composition (a codec that is not fused, say).
    """


@hookspec(firstresult=True)
def kvcore_fused_decode_scatter(
    layers: Sequence[Sequence[Any]],
    index: Any,
    *,
    codec: Any,
    group: Any,
    unit: str = "slot",
    out: RowLayout,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Decode into tokens of a paged cache: as `kvcore.codecs.composites.decode_scatter`.

    Returns
    -------
    RowLayout or None
        ``out``; None, with nothing written, hands the request back to the composition.
    """
