"""The digest, in Python integers; and copying with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

__all__ = ["G", "copy_batch", "digest", "digest_of", "mix"]

Array = npt.NDArray[Any]
G = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mix(z: int) -> int:
    """The finaliser of SplitMix64."""
    z &= _WORD
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _WORD
    return z ^ z >> 31


def digest_of(data: bytes) -> int:
    """Return the digest of some bytes."""
    total = mix(len(data) ^ 0xD6E8FEB86659FD93)
    for i, start in enumerate(range(0, len(data), 16)):
        block = data[start : start + 16].ljust(16, b"\0")
        low, high = int.from_bytes(block[:8], "little"), int.from_bytes(block[8:], "little")
        total += mix((mix(low + G * (2 * i + 1)) ^ high) + G * (2 * i + 2))
    return total & _WORD


def digest(src: Sequence[Array], *, out: Array) -> None:
    """One digest per buffer."""
    for i, buffer in enumerate(src):
        out[i] = digest_of(buffer.tobytes())


def copy_batch(src: Sequence[Array], *, digests: Array | None = None, out: Sequence[Array]) -> None:
    """out[i] = src[i], byte by byte."""
    for i, (source, target) in enumerate(zip(src, out, strict=True)):
        for k in range(source.shape[0]):
            target[k] = source[k]
        if digests is not None:
            digests[i] = digest_of(source.tobytes())
