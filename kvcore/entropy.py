"""What entropy coding shares: the sizes of a tile, its modes, and the frequency tables.

A **tile** is up to 256 tokens x 64 channels of 16-bit values, coded in 32 lanes; each channel is coded with
one of the 32 tables of a `TableSet`. The shipped sets are in `kvcore.codecs.tables`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError

__all__ = [
    "CLASSES",
    "ESC",
    "KINDS",
    "LANES",
    "MODE_CONSTANT",
    "MODE_PACKED",
    "MODE_RANS",
    "SYMBOLS",
    "TILE_CHANNELS",
    "TILE_TOKENS",
    "ZERO",
    "EncodedTiles",
    "TableSet",
    "TileChoice",
    "tile_bytes",
    "tile_capacity",
]

TILE_TOKENS = 256
TILE_CHANNELS = 64
LANES = 32
MODE_CONSTANT, MODE_PACKED, MODE_RANS = 0, 1, 2

CLASSES = 32
"""Tables of a set; the class of a channel is the index of its table."""
SYMBOLS = 256
ESC = 0
"""The symbol of every value that has none of its own; the value follows as a raw 16-bit word."""
ZERO = 128
"""The symbol of 0 in the kinds ``integer`` and ``code``."""
KINDS = ("integer", "exponent", "code")

# A state of at least 2**15 must still be one after the low bits are taken off.
_MAX_BITS = 15
_DIGEST_BYTES = 32


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy that nobody can make writable again: the bytes below it are immutable."""
    return np.frombuffer(array.tobytes(), dtype=array.dtype).reshape(array.shape)


@dataclass(frozen=True, slots=True, eq=False)
class TableSet:
    """32 frozen frequency tables, one for each class, and what coders derive from them.

    The arrays are copied, and read-only for good. Two sets are equal only if they are the same object; what
    names a set across processes is its `digest`.

    Parameters
    ----------
    name : str
        What people call it.
    kind : {"integer", "exponent", "code"}
        How values become symbols.
    bits : int
        The frequencies of a table sum to ``2**bits``; 1..15.
    frequency : uint16 array ``[32, 256]``
        Table by class, frequency by symbol. Symbol 0 (ESC) never has frequency 0.
    cost : uint16 array ``[32, 256]``
        256ths of a bit that coding a symbol takes. ESC includes its raw word; a symbol of frequency 0 is
        coded as ESC and costs as much.
    digest : bytes
        SHA-256 of the file the set is shipped as; frames carry the first 8 bytes.

    Attributes
    ----------
    start : uint32 array ``[32, 256]``
        Sum of the frequencies of the symbols below.
    symbol : uint8 array ``[32, 2**bits]``
        The symbol whose interval ``start <= i < start + frequency`` holds i.

    Raises
    ------
    ConfigError
        The parts are no table set; the message says which and why.
    """

    name: str
    kind: str
    bits: int
    frequency: npt.NDArray[np.uint16] = field(repr=False)
    cost: npt.NDArray[np.uint16] = field(repr=False)
    digest: bytes = field(repr=False)
    start: npt.NDArray[np.uint32] = field(init=False, repr=False)
    symbol: npt.NDArray[np.uint8] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()
        wide = self.frequency.astype(np.uint32)
        alphabet = np.tile(np.arange(SYMBOLS, dtype=np.uint8), CLASSES)
        derived = {
            "frequency": self.frequency,
            "cost": self.cost,
            "start": np.cumsum(wide, axis=1, dtype=np.uint32) - wide,
            "symbol": np.repeat(alphabet, wide.reshape(-1)).reshape(CLASSES, 1 << self.bits),
        }
        for name, table in derived.items():
            object.__setattr__(self, name, _frozen(table))
        object.__setattr__(self, "digest", bytes(self.digest))

    def _check(self) -> None:
        """Refuse parts that do not make a table set."""
        if self.kind not in KINDS:
            self._refuse(f"kind {self.kind!r} is none of {', '.join(KINDS)}")
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 1 <= self.bits <= _MAX_BITS:
            self._refuse(f"bits is {self.bits!r}, not an integer in 1..{_MAX_BITS}")
        for name in ("frequency", "cost"):
            table = getattr(self, name)
            is_array = isinstance(table, np.ndarray)
            if not is_array or table.dtype != np.uint16 or table.shape != (CLASSES, SYMBOLS):
                found = f"{table.dtype} {list(table.shape)}" if is_array else type(table).__name__
                self._refuse(f"{name} is {found}, not uint16 [{CLASSES}, {SYMBOLS}]")
        if not isinstance(self.digest, (bytes, bytearray)) or len(self.digest) != _DIGEST_BYTES:
            self._refuse(f"digest is {self.digest!r}, not {_DIGEST_BYTES} bytes")
        total = self.frequency.sum(axis=1, dtype=np.int64)
        for index in np.flatnonzero(total != 1 << self.bits)[:1].tolist():
            self._refuse(f"the frequencies of table {index} sum to {total[index]}, not to 2**{self.bits}")
        for index in np.flatnonzero(self.frequency[:, ESC] == 0)[:1].tolist():
            self._refuse(f"table {index} has no frequency for the escape symbol {ESC}")

    def _refuse(self, why: str) -> None:
        raise ConfigError(f"table set {self.name!r} cannot be used: {why}")


class TileChoice(NamedTuple):
    """Symbols of tiles and what they were chosen with: the output of `choose_classes`.

    ``symbols`` uint8 ``[M, T, W]``, ``classes`` uint8 ``[M, W]``, ``offsets`` int8 ``[M, W]``.
    """

    symbols: Any
    classes: Any
    offsets: Any


class EncodedTiles(NamedTuple):
    """Coded tiles: ``payload`` uint8 ``[M, capacity]``, ``modes`` uint8 ``[M]``, ``words`` uint16 ``[M]``.

    The size of each within its row follows from mode and words: `tile_bytes`.
    """

    payload: Any
    modes: Any
    words: Any


def tile_capacity(tokens: int, width: int) -> int:
    """Return the most bytes that a tile takes: those of its packed form with 16 bits a value."""
    return -(-(4 + 2 * tokens * width) // 4) * 4


def tile_bytes(mode: int, words: int, width: int, tables: TableSet, use_offsets: bool) -> int | None:
    """Return the size of a coded tile, a multiple of 4; None if there is no such mode, or it has no words."""
    exponent = tables.kind == "exponent"
    side = width if use_offsets or exponent else 0
    if mode == MODE_CONSTANT and words == 0:
        size = side + width * exponent + 1
    elif mode == MODE_PACKED:
        size = 4 + 2 * words
    elif mode == MODE_RANS:
        size = -(-(width + side) // 4) * 4 + 4 * min(LANES, width) + 2 * words
    else:
        return None
    return -(-size // 4) * 4
