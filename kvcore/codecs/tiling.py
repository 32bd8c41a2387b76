"""Integers of whole segments in tiles: 256 tokens at a time, and of these 64 channels at a time.

The tiles of a segment ``[T, C]`` follow one another: those of its first 256 tokens by ascending channels, then those of
the next 256, and so on; the last ones are shorter or narrower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.parts import Reader
from kvcore.entropy import TILE_CHANNELS, TILE_TOKENS, EncodedTiles, TableSet, tile_bytes, tile_capacity
from kvcore.errors import CorruptFrameError, LayoutError
from kvcore.ops import Backend

__all__ = ["decode_tiles", "encode_tiles", "host", "tile_count"]

Int16s = npt.NDArray[np.int16]


def encode_tiles(
    backend: Backend,
    values: Int16s,
    tables: TableSet,
    *,
    use_offsets: bool = False,
    skip: npt.NDArray[np.uint8] | None = None,
) -> list[CodedSegment]:
    """Encode int16 values ``[S, T, C]`` of S segments; nothing but tiles is in the result's bytes.

    Tokens flagged in `skip`, uint8 ``[S, T]``, count in no statistic (see the op `choose_classes`).
    """
    count, tokens, channels = values.shape
    data: list[list[bytes]] = [[] for _ in range(count)]
    tiles: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for start, stop, first, last in _areas(tokens, channels):
        block = np.ascontiguousarray(values[:, start:stop, first:last])
        skipped = None if skip is None else np.ascontiguousarray(skip[:, start:stop])
        choice = backend.choose_classes(block, tables, use_offsets=use_offsets, skip=skipped)
        coded = EncodedTiles(*map(host, backend.encode_symbols(block, choice, tables, use_offsets=use_offsets)))
        for s in range(count):
            tile = int(coded.modes[s]), int(coded.words[s])
            tiles[s].append(tile)
            data[s].append(coded.payload[s, : tile_bytes(*tile, last - first, tables, use_offsets)].tobytes())
    return [CodedSegment(b"".join(d), tuple(t)) for d, t in zip(data, tiles, strict=True)]


def decode_tiles(
    backend: Backend,
    readers: Sequence[Reader],
    directory: Sequence[tuple[tuple[int, int], ...]],
    tables: TableSet,
    *,
    tokens: int,
    channels: int,
    use_offsets: bool = False,
) -> Int16s:
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

    Raises
    ------
    CorruptFrameError
        The bytes are no such tiles.
    """
    values = np.empty((len(readers), tokens, channels), np.int16)
    areas = _areas(tokens, channels)
    for tiles in directory:
        if len(tiles) != len(areas):
            raise CorruptFrameError(f"{len(tiles)} tiles for {tokens} tokens of {channels} channels", reason="length")
    for index, (start, stop, first, last) in enumerate(areas):
        block = np.empty((len(readers), stop - start, last - first), np.int16)
        capacity = tile_capacity(stop - start, last - first)
        payload = np.zeros((len(readers), capacity), np.uint8)
        for s, reader in enumerate(readers):
            mode, words = directory[s][index]
            size = tile_bytes(mode, words, last - first, tables, use_offsets)
            if size is None or size > capacity:
                raise CorruptFrameError(f"mode {mode} with {words} words is no tile", reason="stream")
            payload[s, :size] = np.frombuffer(reader.take(size), np.uint8)
        modes = np.array([tiles[index][0] for tiles in directory], np.uint8)
        words16 = np.array([tiles[index][1] for tiles in directory], np.uint16)
        backend.decode_symbols(EncodedTiles(payload, modes, words16), tables, use_offsets=use_offsets, out=block)
        values[:, start:stop, first:last] = block
    return values


def tile_count(tokens: int, channels: int) -> int:
    """Return how many tiles a segment of this shape has."""
    return len(_areas(tokens, channels))


def host(array: Any) -> npt.NDArray[Any]:
    """Return an array of the backend as NumPy, for what the host puts together."""
    if not isinstance(array, np.ndarray):
        raise LayoutError("segments are composed in host memory; a device's backend has to supply fused ones")
    return array


def _areas(tokens: int, channels: int) -> list[tuple[int, int, int, int]]:
    """Return (first token, last + 1, first channel, last + 1) of each tile, in stored order."""
    return [
        (t, min(t + TILE_TOKENS, tokens), c, min(c + TILE_CHANNELS, channels))
        for t in range(0, tokens, TILE_TOKENS)
        for c in range(0, channels, TILE_CHANNELS)
    ]
