"""Integers of whole segments in tiles: 256 tokens at a time, and of these 64 channels at a time.

The tiles of a segment ``[T, C]`` follow one another: those of its first 256 tokens by ascending channels, then those of
the next 256, and so on; the last ones are shorter or narrower.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.frame_values import SegmentSize, align
from kvcore.codecs.parts import Reader
from kvcore.codecs.places import collected, empty, fetched, near, on_device, piece, spread
from kvcore.entropy import TILE_CHANNELS, TILE_TOKENS, EncodedTiles, TableSet, tile_bytes, tile_capacity
from kvcore.errors import CorruptFrameError
from kvcore.ops import Backend

__all__ = ["decode_tiles", "encode_tiles", "max_tiles_size", "tile_count"]


def encode_tiles(
    backend: Backend,
    values: Any,
    tables: TableSet,
    *,
    use_offsets: bool = False,
    skip: npt.NDArray[np.uint8] | None = None,
) -> list[CodedSegment]:
    """Encode int16 values ``[S, T, C]`` of S segments; nothing but tiles is in the result's bytes.

    Of values on a device, their tiles alone are brought over the link, for two waits.

    Tokens flagged in `skip`, uint8 ``[S, T]``, count in no statistic (see the op `choose_classes`).
    """
    count, tokens, channels = values.shape
    there, areas = on_device(values), _areas(tokens, channels)
    if not areas:
        return [CodedSegment(b"")] * count
    placed = None if skip is None or (there and not skip.any()) else near(backend, skip)
    coded: list[EncodedTiles] = []
    for start, stop, first, last in areas:
        block = values[:, start:stop, first:last]
        skipped = None if placed is None else placed[:, start:stop]
        if not there:
            block = np.ascontiguousarray(block)
            skipped = None if skipped is None else np.ascontiguousarray(skipped)
        choice = backend.choose_classes(block, tables, use_offsets=use_offsets, skip=skipped)
        coded.append(backend.encode_symbols(block, choice, tables, use_offsets=use_offsets))
    found = fetched(backend, [array for c in coded for array in (c.modes, c.words)])
    if there:
        backend.runtime.check()
    modes, words = (np.stack(found[i::2], axis=1).tolist() for i in (0, 1))  # [segment][area]
    tiles = [tuple(zip(m, w, strict=True)) for m, w in zip(modes, words, strict=True)]
    sizes = [
        [_size(tile, last - first, tables, use_offsets) for tile, (_, _, first, last) in zip(own, areas, strict=True)]
        for own in tiles
    ]
    if not there:
        data = [
            b"".join([c.payload[s, :size].tobytes() for c, size in zip(coded, own, strict=True)])
            for s, own in enumerate(sizes)
        ]
    else:
        rows = [c.payload for c in coded]
        packed = collected(
            backend,
            [
                piece(r, s * r.strides[0], size)
                for s, own in enumerate(sizes)
                for r, size in zip(rows, own, strict=True)
            ],
        )
        backend.runtime.check()
        ends = list(itertools.accumulate((sum(own) for own in sizes), initial=0))
        data = [packed[start:stop].tobytes() for start, stop in itertools.pairwise(ends)]
    return [CodedSegment(d, t) for d, t in zip(data, tiles, strict=True)]


def decode_tiles(
    backend: Backend,
    readers: Sequence[Reader],
    directory: Sequence[tuple[tuple[int, int], ...]],
    tables: TableSet,
    *,
    tokens: int,
    channels: int,
    use_offsets: bool = False,
) -> Any:
    """Decode the tiles that come next in each reader.

    Parameters
    ----------
    backend : Backend
    readers : sequence of Reader
        S segments.
    directory : sequence of tuple of (int, int)
        Mode and word count of each segment's tiles.
    tables : TableSet
    tokens, channels : int
    use_offsets : bool

    Returns
    -------
    int16 array ``[S, T, C]``
        Where the backend computes.

    Raises
    ------
    CorruptFrameError
        The bytes are no such tiles. A device may find that later, when it is waited for.
    """
    values = empty(backend, (len(readers), tokens, channels), np.int16)
    areas = _areas(tokens, channels)
    for tiles in directory:
        if len(tiles) != len(areas):
            raise CorruptFrameError(f"{len(tiles)} tiles for {tokens} tokens of {channels} channels", reason="length")
    coded: list[list[memoryview]] = []
    for index, (start, stop, first, last) in enumerate(areas):
        capacity = tile_capacity(stop - start, last - first)
        coded.append([])
        for reader, tiles in zip(readers, directory, strict=True):
            mode, words = tiles[index]
            size = tile_bytes(mode, words, last - first, tables, use_offsets)
            if size is None or size > capacity:
                raise CorruptFrameError(f"mode {mode} with {words} words is no tile", reason="stream")
            coded[-1].append(reader.take(size))
    numbers = np.array(directory, np.int64).reshape(len(readers), len(areas), 2).T  # [mode or words, area, segment]
    modes, words16 = (near(backend, n.astype(t, "C")) for n, t in zip(numbers, (np.uint8, np.uint16), strict=True))
    payloads = _payloads(backend, coded)
    for index, (start, stop, first, last) in enumerate(areas):
        block = values[:, start:stop, first:last]
        out = block if on_device(block) or block.flags.c_contiguous else np.empty(block.shape, np.int16)
        held = EncodedTiles(payloads[index], modes[index], words16[index])
        backend.decode_symbols(held, tables, use_offsets=use_offsets, out=out)
        if out is not block:
            block[...] = out
    return values


def max_tiles_size(tokens: int, channels: int, bits: int = 16) -> SegmentSize:
    """Return the most that the tiles of a segment take, bytes and tiles, where differences of values have `bits` bits.

    A tile never takes more than its packed form (see the op `encode_symbols`).
    """
    areas = _areas(tokens, channels)
    nbytes = sum(
        align(4 + 2 * -(-(stop - start) * (last - first) * bits // 16), 4) for start, stop, first, last in areas
    )
    return nbytes, ((0, 0),) * len(areas)


def tile_count(tokens: int, channels: int) -> int:
    """Return how many tiles a segment of this shape has."""
    return len(_areas(tokens, channels))


def _payloads(backend: Backend, coded: Sequence[Sequence[memoryview]]) -> list[Any]:
    """Return the tiles of each area as rows ``[S, bytes]``; what follows a shorter tile means nothing."""
    shapes = [(len(tiles), max(map(len, tiles), default=0)) for tiles in coded]
    rows = [empty(backend, shape, np.uint8) for shape in shapes]
    if rows and on_device(rows[0]):
        targets = [
            piece(area, s * area.shape[1], len(tile))
            for area, tiles in zip(rows, coded, strict=True)
            for s, tile in enumerate(tiles)
        ]
        data = b"".join([tile for tiles in coded for tile in tiles])
        spread(backend, np.frombuffer(data, np.uint8), targets)
        return rows
    for area, tiles in zip(rows, coded, strict=True):
        for row, tile in zip(area, tiles, strict=True):
            row[: len(tile)] = np.frombuffer(tile, np.uint8)
    return rows


def _size(tile: tuple[int, int], width: int, tables: TableSet, use_offsets: bool) -> int:
    """Return the bytes of a tile that an encoder made."""
    size = tile_bytes(*tile, width, tables, use_offsets)
    if size is None:
        raise CorruptFrameError(f"mode {tile[0]} with {tile[1]} words is no tile", reason="stream")
    return size


def _areas(tokens: int, channels: int) -> list[tuple[int, int, int, int]]:
    """Return (first token, last + 1, first channel, last + 1) of each tile, in stored order."""
    return [
        (t, min(t + TILE_TOKENS, tokens), c, min(c + TILE_CHANNELS, channels))
        for t in range(0, tokens, TILE_TOKENS)
        for c in range(0, channels, TILE_CHANNELS)
    ]
