"""The order-free 64-bit digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import hookimpl

__all__ = ["GOLDEN", "digest_bytes", "kvcore_op_digest", "mix"]

GOLDEN = 0x9E3779B97F4A7C15
Words = npt.NDArray[np.uint64]


@hookimpl
def kvcore_op_digest(
    src: Sequence[npt.NDArray[np.uint8]],
    *,
    out: npt.NDArray[np.uint64],
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    for i, buffer in enumerate(src):
        out[i] = digest_bytes(buffer)
    return out


def digest_bytes(buffer: npt.NDArray[np.uint8]) -> np.uint64:
    """Digest one buffer: the sum over 16-byte blocks of their mixed words, plus its mixed length."""
    padded = np.zeros(-(-buffer.size // 16) * 16, np.uint8)
    padded[: buffer.size] = buffer
    words = padded.view("<u8").astype(np.uint64)
    low, high = words[0::2], words[1::2]
    index = np.arange(low.size, dtype=np.uint64)
    golden = np.uint64(GOLDEN)
    blocks = mix((mix(low + golden * (2 * index + 1)) ^ high) + golden * (2 * index + 2))
    length = mix(np.array([buffer.size], np.uint64) ^ np.uint64(0xD6E8FEB86659FD93))
    return np.uint64(np.add.reduce(np.concatenate([blocks, length]), dtype=np.uint64))


def mix(z: Words) -> Words:
    """The finaliser of SplitMix64, a bijection of 64-bit words; arithmetic modulo 2**64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
