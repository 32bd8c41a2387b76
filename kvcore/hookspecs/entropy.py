"""Entropy coding: classes, tiles of symbols, the rANS bitstream KVS1."""

from __future__ import annotations

from typing import Any

from kvcore.entropy import EncodedTiles, TableSet, TileChoice
from kvcore.hookspecs.markers import hookspec

__all__ = ["kvcore_op_choose_classes", "kvcore_op_decode_symbols", "kvcore_op_encode_symbols"]


@hookspec(firstresult=True)
def kvcore_op_choose_classes(
    values: Any,
    *,
    tables: TableSet,
    use_offsets: bool,
    skip: Any = None,
    out: TileChoice,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Turn the values of tiles into symbols, and choose each channel's table.

    Symbols, by the kind of the table set; 0 is ESC:

    ============= ==================================================================================================
    ``integer``   ``k = value - offset``; symbol ``k + 128`` for -127 <= k <= 127, else ESC. With ``use_offsets``, a
                  channel's offset is the mean of its values over the tokens that are not skipped, in integers rounded
                  half to even, held within -127 .. 127; otherwise (or if all are skipped) 0.
    ``exponent``  bits 0-7 of a value are an exponent field, bit 8 is the sign. ``z = base - exponent``; symbol
                  ``1 + 2*z + (sign xor majority)`` for 0 <= z <= 62, else ESC; base and majority: see below.
    ``code``      bits 0-6 of a value are the magnitude m of an 8-bit float, bit 7 is the sign: symbol ``128 + m`` if
                  positive; if negative ``128 - m`` for m of 1 .. 126, 1 for negative zero, ESC for m = 127 (NaN).
    ============= ==================================================================================================

    A skipped token gets the symbol of value "offset" (128; kind ``integer`` only) and counts in no statistic.

    With ``hist`` the histogram of a channel's symbols over the tokens that are not skipped, its table is the lowest
    class of least ``sum hist[s] * cost[class][s]`` (integers). For kind ``exponent`` the candidates are, in this order
    of preference where costs are equal: base = m-3 .. m+2 ascending, with m the largest exponent field of the channel
    (bases outside 0 .. 255 left out), then majority 0 before 1, then the lowest class.

    Parameters
    ----------
    values : int16 array ``[M, T, W]``
        M tiles of T <= 256 tokens and W <= 64 channels.
    tables : TableSet
    use_offsets : bool
        Kind ``integer`` only.
    skip : uint8 array ``[M, T]``, optional
        1 for tokens to skip (kind ``integer`` only).
    out : TileChoice
        ``symbols`` uint8 ``[M, T, W]``; ``classes`` uint8 ``[M, W]`` (for kind ``exponent`` with majority in bit 7);
        ``offsets`` int8 ``[M, W]`` (for kind ``exponent`` the byte of ``base``).

    Notes
    -----
    Exactness: bit-exact; integers throughout.
    """


@hookspec(firstresult=True)
def kvcore_op_encode_symbols(
    values: Any,
    choice: TileChoice,
    *,
    tables: TableSet,
    use_offsets: bool,
    out: EncodedTiles,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Encode tiles, each in the smallest of three modes (the lowest mode where sizes are equal).

    Parts of a tile are little-endian; "pad" is zero bytes up to a multiple of 4.

    ========= === ========================================================================================== ===========
    mode          bytes                                                                                      word count
    ========= === ========================================================================================== ===========
    constant  0   side bytes, the one symbol, pad                                                            0
    packed    1   least value int16, width b uint8, 0; ``value - least`` in b bits each, token-major, LSB    n
                  first, filled up to n whole uint16 words with zero bits; pad. b as small as it can be.
    rans      2   classes uint8 ``[W]``, side bytes, pad, state uint32 for each of ``min(32, W)`` lanes,     n
                  n uint16 words, pad
    ========= === ========================================================================================== ===========

    Side bytes turn symbols into values: the offsets ``[W]`` (kind ``integer`` with ``use_offsets``, and kind
    ``exponent``), else nothing; in a constant tile of kind ``exponent`` the classes precede them (the majority bit).
    Mode constant is open to tiles whose symbols are all equal and not ESC.

    rANS, with n = `TableSet.bits`: channel ``32*j + l`` is lane l of sub-step j. Decoding, which defines the stream:
    for each token, for each sub-step, every lane with a channel there, with the table of its channel's class::

        s = symbol[x & (2**n - 1)];  x = f[s] * (x >> n) + (x & (2**n - 1)) - start[s]

    then each lane with ``x < 2**15``, in ascending order, takes the next word: ``x = x << 16 | word``; then each lane
    whose s was ESC, ascending, takes one word: its value. All states end at ``2**15``, with no word left. The encoder
    runs backwards from ``2**15``: for each sub-step it pushes the values of ESC lanes, descending; then, for each lane
    descending, if ``x >= f << (31 - n)``, the low word of x, and shifts x right by 16; then
    ``x = (x // f << n) + x % f + start``. The words are reversed at the end.

    Parameters
    ----------
    values : int16 array ``[M, T, W]``
    choice : TileChoice
        As `kvcore_op_choose_classes` made it. A symbol of frequency 0 in its table is coded as ESC.
    tables : TableSet
    use_offsets : bool
    out : EncodedTiles
        ``payload`` uint8 ``[M, tile_capacity(T, W)]``: bytes beyond a tile's size are left alone; ``modes`` uint8
        ``[M]``; ``words`` uint16 ``[M]``.

    Notes
    -----
    Exactness: bit-exact. A tile never takes more than its packed form. Sources: Duda 2013 (asymmetric numeral systems);
    Giesen 2014 (interleaved rANS with shared streams).
    """


@hookspec(firstresult=True)
def kvcore_op_decode_symbols(
    tiles: EncodedTiles,
    *,
    tables: TableSet,
    use_offsets: bool,
    out: Any,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Decode what `kvcore_op_encode_symbols` wrote; defined there.

    Every tile is checked: mode, table classes, initial states within ``2**15 .. 2**31 - 1``, words enough, final states
    ``2**15`` with all words taken, packed values within int16, padding zero. An exponent ``base - z`` is taken modulo
    256. Nothing outside ``out`` is written and nothing outside a tile's bytes is read, whatever the bytes are.

    Parameters
    ----------
    tiles : EncodedTiles
        ``payload`` uint8 ``[M, capacity]``; bytes beyond a tile's size are ignored.
    tables : TableSet
    use_offsets : bool
    out : int16 array ``[M, T, W]``
        The values.

    Raises
    ------
    CorruptFrameError
        With reason ``"stream"``; names the first tile that is bad. ``out`` is then unspecified.

    Notes
    -----
    Exactness: bit-exact.
    """
