"""Moving KV between paged caches, dense chunks and memories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.hookspecs.markers import hookspec
from kvcore.layout import RowLayout

__all__ = [
    "kvcore_op_convert_layout",
    "kvcore_op_copy_batch",
    "kvcore_op_gather_paged",
    "kvcore_op_scatter_paged",
]


@hookspec(firstresult=True)
def kvcore_op_gather_paged(
    src: RowLayout,
    index: Any,
    *,
    unit: str = "slot",
    skip_tokens: int = 0,
    out: Sequence[RowLayout],
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Copy tokens out of a paged cache into dense chunks.

    Token ``t`` of the request lies in row ``slot(t)`` of the cache. With ``unit="slot"``, ``slot(t) = index[t]`` where
    ``slot = block_id * block_size + offset``. With ``unit="block"``, ``index`` holds block ids and
    ``slot(t) = index[t // block_size] * block_size + t % block_size``. An index of -1 skips: those tokens of the
    chunk keep the bytes they had. The chunks of ``out`` divide the request among them in order: the first takes
    tokens ``0 .. T_0 - 1``, the second the next ``T_1``, and so on.

    For every part (K, V, ...), layer, head and channel:
    ``out[part, layer, t, head, channel] = src[part, layer, slot(t), head, channel]``, byte for byte.

    Parameters
    ----------
    src : RowLayout
        The cache: blocks of ``block_size`` tokens.
    index : int64 array ``[n]``, contiguous
        Slots, one per token: ``n`` = sum of the chunks' tokens. Or block ids: ``n`` = that sum divided by
        ``block_size``, rounded up.
    unit : {"slot", "block"}
    skip_tokens : int
        This many leading tokens of the request are neither read nor written; their indices are not looked at.
    out : sequence of RowLayout
        Dense chunks (one block each) with the cache's parts, layers, heads, channels and element sizes.

    Raises
    ------
    SlotError
        An index outside -1 .. slots - 1 (or blocks - 1) of a token that is not skipped; names its position. A slot
        beyond the cache's tokens in a last, partial block does not exist: blocks are whole.

    Notes
    -----
    Exactness: bit-exact. Duplicate indices are fine. Nothing is written when an error is raised.
    """


@hookspec(firstresult=True)
def kvcore_op_scatter_paged(
    src: Sequence[RowLayout],
    index: Any,
    *,
    unit: str = "slot",
    skip_tokens: int = 0,
    check_duplicates: bool = True,
    out: RowLayout,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Copy tokens of dense chunks into a paged cache: the reverse of `kvcore_op_gather_paged`.

    For every token of the request that is neither skipped by ``skip_tokens`` nor by an index of -1:
    ``out[part, layer, slot(t), head, channel] = src[part, layer, t, head, channel]``, byte for byte. All other bytes
    of the cache, padding and other layers included, stay as they were.

    Parameters
    ----------
    src : sequence of RowLayout
        Dense chunks, in the order of the request's tokens.
    index : int64 array ``[n]``, contiguous
        As for gather.
    unit : {"slot", "block"}
    skip_tokens : int
        As for gather.
    check_duplicates : bool
        True: two tokens with one target raise, before anything is written. False: which of them wins is unspecified.
    out : RowLayout
        The cache.

    Raises
    ------
    SlotError
        An index out of range, or a duplicate target under ``check_duplicates``; names the positions.

    Notes
    -----
    Exactness: bit-exact.
    """


@hookspec(firstresult=True)
def kvcore_op_convert_layout(src: RowLayout, *, out: RowLayout, stream: Any = None, workspace: Any = None) -> Any:
    """Copy one dense chunk into another dense layout, byte for byte.

    Parts are matched by name, then element ``[layer, token, head, channel]`` goes to the element of the same index.
    Both sides have equal extents and element sizes; memory of the two must not overlap. Exactness: bit-exact.

    Parameters
    ----------
    src : RowLayout
        Dense: one block.
    out : RowLayout
        Dense: one block.
    """


@hookspec(firstresult=True)
def kvcore_op_copy_batch(
    src: Sequence[Any],
    *,
    digests: Any = None,
    out: Sequence[Any],
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Copy a batch of byte buffers, between host and device in any direction: ``out[i][:] = src[i][:]``.

    Parameters
    ----------
    src : sequence of uint8 arrays ``[n_i]``, contiguous
        Host or device memory.
    digests : uint64 array ``[len(src)]``, optional
        If given, receives the digest (see `kvcore_op_digest`) of each buffer moved, from the same pass.
    out : sequence of uint8 arrays ``[n_i]``, contiguous
        Destinations; ``out[i]`` has the size of ``src[i]`` and overlaps neither a source nor another destination.

    Notes
    -----
    Exactness: bit-exact. Entries may be empty, and so may the batch.
    """
