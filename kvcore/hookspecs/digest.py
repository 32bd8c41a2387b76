"""Integrity of moved and stored bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.hookspecs.markers import hookspec

__all__ = ["kvcore_op_digest"]


@hookspec(firstresult=True)
def kvcore_op_digest(src: Sequence[Any], *, out: Any, stream: Any = None, workspace: Any = None) -> Any:
    """Digest byte buffers to 64 bits each, in any order of evaluation.

    All arithmetic is modulo 2**64. A buffer of n bytes is cut into 16-byte blocks, the last one padded with zeros;
    block i, read as two little-endian 64-bit words (lo, hi), contributes

    ``h(i) = mix((mix(lo + G*(2*i + 1)) ^ hi) + G*(2*i + 2))``, ``G = 0x9E3779B97F4A7C15``,

    and the digest is ``sum h(i) + mix(n ^ 0xD6E8FEB86659FD93)``. ``mix(z)`` is the finaliser of SplitMix64 (Steele, Lea
    and Flood 2014): ``z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31``.
    It detects damage; it is not cryptographic.

    Parameters
    ----------
    src : sequence of uint8 arrays ``[n_i]``, contiguous
    out : uint64 array ``[len(src)]``

    Notes
    -----
    Exactness: bit-exact. ``n_i`` may be 0, and so may the number of buffers.
    """
