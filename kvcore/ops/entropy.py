"""Checked entropy-coding ops: tiles of values to symbols to bytes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.entropy import TILE_CHANNELS, TILE_TOKENS, EncodedTiles, TableSet, TileChoice, tile_capacity
from kvcore.errors import ConfigError, LayoutError
from kvcore.ops.base import OpsBase

__all__ = ["EntropyOps"]


class EntropyOps(OpsBase):
    """KVS1 tiles. `kvcore.hookspecs.entropy` defines each op."""

    def choose_classes(
        self,
        values: Any,
        tables: TableSet,
        *,
        use_offsets: bool = False,
        skip: Any = None,
        out: TileChoice | None = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> TileChoice:
        """Turn values ``[M, T, W]`` into symbols, and choose each channel's table; see `kvcore.hookspecs.entropy`."""
        function = self.resolve("choose_classes")
        array = self._tiles(values, tables, use_offsets)
        count, tokens, width = array.shape
        if skip is not None:
            if tables.kind != "integer":
                raise ConfigError(f"tokens can be skipped with integer tables, not with {tables.kind!r} ones")
            skip = self._in(skip, "skip", ("uint8",))
            if skip.shape != (count, tokens):
                raise LayoutError(f"skip is {list(skip.shape)}; {[count, tokens]} would fit")
        given = out if out is not None else TileChoice(None, None, None)
        inputs = (array,) if skip is None else (array, skip)
        symbols, out_symbols = self._out(given.symbols, "out.symbols", array.shape, np.uint8, *inputs)
        classes, out_classes = self._out(given.classes, "out.classes", (count, width), np.uint8, *inputs)
        offsets, out_offsets = self._out(given.offsets, "out.offsets", (count, width), np.int8, *inputs)
        native = TileChoice(symbols, classes, offsets)
        function(
            array, tables=tables, use_offsets=use_offsets, skip=skip, out=native, stream=stream, workspace=workspace
        )
        return out if out is not None else TileChoice(out_symbols, out_classes, out_offsets)

    def encode_symbols(
        self,
        values: Any,
        choice: TileChoice,
        tables: TableSet,
        *,
        use_offsets: bool = False,
        out: EncodedTiles | None = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> EncodedTiles:
        """Encode tiles to bytes, each in its smallest mode; see `kvcore.hookspecs.entropy`."""
        function = self.resolve("encode_symbols")
        array = self._tiles(values, tables, use_offsets)
        count, tokens, width = array.shape
        chosen = TileChoice(
            self._in(choice.symbols, "choice.symbols", ("uint8",)),
            self._in(choice.classes, "choice.classes", ("uint8",)),
            self._in(choice.offsets, "choice.offsets", ("int8",)),
        )
        if chosen.symbols.shape != array.shape or {chosen.classes.shape, chosen.offsets.shape} != {(count, width)}:
            raise LayoutError(
                f"the choice is for tiles {list(chosen.symbols.shape)}, the values are {list(array.shape)}"
            )
        given = out if out is not None else EncodedTiles(None, None, None)
        capacity, inputs = tile_capacity(tokens, width), (array, *chosen)
        payload, out_payload = self._out(given.payload, "out.payload", (count, capacity), np.uint8, *inputs)
        modes, out_modes = self._out(given.modes, "out.modes", (count,), np.uint8, *inputs)
        words, out_words = self._out(given.words, "out.words", (count,), np.uint16, *inputs)
        native = EncodedTiles(payload, modes, words)
        function(array, chosen, tables=tables, use_offsets=use_offsets, out=native, stream=stream, workspace=workspace)
        return out if out is not None else EncodedTiles(out_payload, out_modes, out_words)

    def decode_symbols(
        self,
        tiles: EncodedTiles,
        tables: TableSet,
        *,
        use_offsets: bool = False,
        out: Any,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Decode tiles into int16 `out` ``[M, T, W]``; see `kvcore.hookspecs.entropy`.

        Raises
        ------
        CorruptFrameError
            The bytes of a tile are not what the encoder writes.
        LayoutError, ConfigError, UnsupportedOpError
        """
        function = self.resolve("decode_symbols")
        native = self._tiles(out, tables, use_offsets)
        count = native.shape[0]
        coded = EncodedTiles(
            self._in(tiles.payload, "tiles.payload", ("uint8",)),
            self._in(tiles.modes, "tiles.modes", ("uint8",)),
            self._in(tiles.words, "tiles.words", ("uint16",)),
        )
        if len(coded.payload.shape) != 2 or {coded.payload.shape[0], *coded.modes.shape, *coded.words.shape} != {count}:
            raise LayoutError(
                f"out is for {count} tiles; payload {list(coded.payload.shape)} and its modes and words are not"
            )
        native, _ = self._out(native, "out", native.shape, np.int16, *coded)
        function(coded, tables=tables, use_offsets=use_offsets, out=native, stream=stream, workspace=workspace)
        return out

    def _tiles(self, values: Any, tables: TableSet, use_offsets: bool) -> Any:
        array = self._in(values, "values", ("int16",))
        if len(array.shape) != 3 or not 1 <= array.shape[1] <= TILE_TOKENS or not 1 <= array.shape[2] <= TILE_CHANNELS:
            raise LayoutError(
                f"tiles are [M, 1..{TILE_TOKENS} tokens, 1..{TILE_CHANNELS} channels], got {list(array.shape)}"
            )
        if not isinstance(tables, TableSet):
            raise ConfigError(f"tables is a TableSet, got a {type(tables).__qualname__}")
        if use_offsets and tables.kind != "integer":
            raise ConfigError(f"offsets go with integer tables; {tables.name!r} has kind {tables.kind!r}")
        return array
