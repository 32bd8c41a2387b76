"""Composites: what `kvcore.codecs` composes from ops, and a backend may supply in one piece.

None of them has to be there. A fused implementation is used wherever the composition would be, and gives the same
bytes: its definition is the composition's code, named below. It is marked with `@kvcore.hookimpl` and named after its
spec, like an op. Of a device's memory the composition brings only coded bytes over the link, as a fused one has to; a
fused one saves launches and waits.
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
    raw_rows: Sequence[Sequence[int]] = (),
    raw_values: Any = None,
    unroped: bool = False,
    names: Sequence[str] | None = None,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Encode KVS1 segments of one shape ``[S, T, C]``: as `kvcore.codecs.segments.encode_segments`, without its checks.

    A segment's bytes depend on nothing but its own rows: each has its own raw rows, and its own count t of the others
    in all statistics; it is stored whole if T is at most 4 or t below 2, whatever the segments beside it are.

    Parameters
    ----------
    x : float16, bfloat16 or float32 array ``[S, T, C]``
        Its raw rows may hold anything, NaN and infinities too. They are read as zeros, count in no statistic, have
        multiplier 0, and are the tokens that `kvcore_op_choose_classes` skips.
    raw_rows : sequence of sequence of int
        For each segment its raw rows, at most 4, ascending and below T; ``()`` if no segment has any.
    raw_values : array ``[S, T, C]``, optional
        Where raw rows are stored from, bit for bit, in the logical dtype; `x` if None.
    tables, rule, unroped, names
        As the composition.

    Returns
    -------
    list of CodedSegment

    Raises
    ------
    QuantizationError
        A NaN or infinity in a row that is not raw, or values beyond every step. Nothing has been written.
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

    Segments may differ in their raw rows, and in whether all their rows are; they have UNROPED in common.

    Parameters
    ----------
    segments : sequence of CodedSegment
        Whole ones: bytes that follow the last tile, or tiles too many, are an error.

    Returns
    -------
    Decoded
        Of S segments: ``rows`` is a list of S lists, ``raw`` one of S arrays ``[rows of the segment, C]`` of `dtype`,
        and ``tiles`` one of S counts, 0 where all rows are raw.

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

    `codec` has all that decides the bytes. A lossy one's policy ``codec.nonfinite`` comes before everything else, so
    before RoPE is taken off.

    Returns
    -------
    list of list of CodedSegment, or None
        By layer; None hands the request back to the composition (a codec that is not fused, say, or a policy).

    Raises
    ------
    QuantizationError
        As `Codec.encode`.
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
