"""Packing small integers and counting symbols."""

from __future__ import annotations

from typing import Any

from kvcore.hookspecs.markers import hookspec

__all__ = ["kvcore_op_count_symbols", "kvcore_op_pack_bits", "kvcore_op_unpack_bits"]


@hookspec(firstresult=True)
def kvcore_op_pack_bits(x: Any, *, bits: int, out: Any, stream: Any = None, workspace: Any = None) -> Any:
    """Pack the values of each row into `bits` bits each, least significant bit first.

    Bit ``j`` of value ``i`` is bit ``(i*bits + j) % 8`` of byte ``(i*bits + j) // 8`` of its row; unused bits of the
    last byte are zero. Signed values are stored as their low `bits` bits in two's complement.

    Parameters
    ----------
    x : uint8 or int8 array ``[..., n]``
    bits : int
        1 .. 8.
    out : uint8 array ``[..., ceil(n*bits/8)]``

    Raises
    ------
    QuantizationError
        A value outside ``0 .. 2**bits - 1`` (uint8) or ``-2**(bits-1) .. 2**(bits-1) - 1`` (int8).

    Notes
    -----
    Exactness: bit-exact.
    """


@hookspec(firstresult=True)
def kvcore_op_unpack_bits(x: Any, *, bits: int, out: Any, stream: Any = None, workspace: Any = None) -> Any:
    """Unpack what `kvcore_op_pack_bits` packed; int8 output is sign-extended.

    Parameters
    ----------
    x : uint8 array ``[..., ceil(n*bits/8)]``
        Unused bits of the last byte are ignored.
    bits : int
        1 .. 8.
    out : uint8 or int8 array ``[..., n]``

    Notes
    -----
    Exactness: bit-exact.
    """


@hookspec(firstresult=True)
def kvcore_op_count_symbols(x: Any, *, out: Any, stream: Any = None, workspace: Any = None) -> Any:
    """Count how often each byte value occurs in each channel.

    ``out[..., c, s]`` is the number of tokens t with ``x[..., t, c] == s``.

    Parameters
    ----------
    x : uint8 array ``[..., T, C]``
        T may be 0.
    out : uint32 array ``[..., C, 256]``

    Notes
    -----
    Exactness: bit-exact.
    """
