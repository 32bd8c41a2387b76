"""Computes the frozen tables from their definition. Needs mpmath (development only); run on purpose only.

``python -m kvcore.codecs.tables.generate`` (or ``--check``) compares what it computes with the files beside
it, byte for byte; ``--write`` writes them. Both print the digests, which belong into `kvcore.codecs.tables`.
The integers are part of the format: once frames exist that were written with them, they never change.

Everything is computed in 60-digit arithmetic, so no rounding of a machine's doubles decides an integer.
Probabilities that are equal by symmetry are computed by the same operations, so they are equal to the last
digit too, and no rounding decides between them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from mpmath import mp, mpf  # type: ignore[import-untyped]

from kvcore.codecs.tables import DIGESTS
from kvcore.entropy import CLASSES, ESC, SYMBOLS, ZERO

__all__ = ["compute", "main"]

DIGITS = 60
TABLE_BITS = 11
TOTAL = 1 << TABLE_BITS
RAW_BITS = 16
"""What follows an escape."""

SINGLES = [(symbol,) for symbol in range(1, SYMBOLS)]
PAIRS = [(ZERO + k, ZERO - k) for k in range(1, 128)]
"""Symbols of +-k, where a table is mirrored exactly and so they change together."""
NEGATIVE_ZERO = 1
"""The symbol of an 8-bit float's negative zero; that of magnitude 127, which is NaN, would be there."""
FLOAT8_PAIRS = [(ZERO, NEGATIVE_ZERO), *PAIRS[:-1]]
"""Symbols of opposite 8-bit floats."""

EXPONENT_MEANS = ("0", "0.5", "1", "1.5", "2", "3", "4.5", "7")
EXPONENT_PHASES = ("0", "0.25", "0.5", "0.75")
EXPONENT_SPAN = 63
"""z of 0..62."""

FLOAT8_CENTRED = 16
"""Classes of the 8-bit floats with mean 0; the others have +-1.5 standard deviations, as keys often do."""
FLOAT8_MEAN = "1.5"


def between(low: mpf, high: mpf) -> mpf:
    """P(low < X < high) of a standard normal X, without cancellation in the tails."""
    if low >= 0:
        return (mp.erfc(low / mp.sqrt(2)) - mp.erfc(high / mp.sqrt(2))) / 2
    if high <= 0:
        return between(-high, -low)
    return 1 - (mp.erfc(high / mp.sqrt(2)) + mp.erfc(-low / mp.sqrt(2))) / 2


def above(low: mpf) -> mpf:
    """P(X > low) of a standard normal X."""
    return mp.erfc(low / mp.sqrt(2)) / 2


def gauss_table(index: int) -> list[int]:
    """Frequencies of integers k = rint(X), X ~ N(0, sigma): symbol k + 128."""
    sigma = mpf(6) / 100 * mpf(800) ** (mpf(index) / 31)
    half = mpf(1) / 2
    p = [mpf(0)] * SYMBOLS
    p[ESC] = 2 * above((127 + half) / sigma)
    for k in range(128):
        p[ZERO + k] = p[ZERO - k] = between((k - half) / sigma, (k + half) / sigma)
    return freeze(p, PAIRS)


def exponent_table(index: int) -> list[int]:
    """Frequencies of sign and exponent of X ~ N(mu s, s): 1 + 2z + sign where 2^-z <= abs(X) < 2^(1-z)."""
    mean, phase = mpf(EXPONENT_MEANS[index // 4]), mpf(EXPONENT_PHASES[index % 4])
    # The octave whose largest values, 3.5 standard deviations out, just stay below 2.
    s = mpf(2) ** (mp.floor(mp.log(2 / (mean + mpf(7) / 2), 2)) - phase)
    p = [mpf(0)] * SYMBOLS
    for z in range(EXPONENT_SPAN):
        low, high = mpf(2) ** -z / s, mpf(2) ** (1 - z) / s
        p[1 + 2 * z] = between(low - mean, high - mean)
        p[2 + 2 * z] = between(-high - mean, -low - mean)
    tiny = mpf(2) ** (1 - EXPONENT_SPAN) / s
    p[ESC] = above(2 / s - mean) + above(2 / s + mean) + between(-tiny - mean, tiny - mean)
    return freeze(p, SINGLES)


def float8_table(index: int, mantissa_bits: int, magnitudes: int) -> list[int]:
    """Frequencies of X ~ N(mu s, s) cast to an 8-bit float with that many finite magnitudes: 128 +- code."""
    if index < FLOAT8_CENTRED:
        return freeze(_cast(mpf(0), mpf(2) ** (index - 8), mantissa_bits, magnitudes), FLOAT8_PAIRS)
    octave, negative = divmod(index - FLOAT8_CENTRED, 2)
    f = freeze(_cast(mpf(FLOAT8_MEAN), mpf(2) ** (octave - 4), mantissa_bits, magnitudes), SINGLES)
    if negative:  # the table of the opposite mean is the mirror image
        for positive, opposite in FLOAT8_PAIRS:
            f[positive], f[opposite] = f[opposite], f[positive]
    return f


def _cast(mean: mpf, s: mpf, mantissa_bits: int, magnitudes: int) -> list[mpf]:
    """Probability of every symbol, X ~ N(mean s, s) rounded to the format's nearest value, saturating."""
    grid = [_magnitude(code, mantissa_bits) for code in range(magnitudes)]
    edges = [(a + b) / 2 / s for a, b in pairwise(grid)]
    p = [mpf(0)] * SYMBOLS
    p[ZERO], p[NEGATIVE_ZERO] = between(-mean, edges[0] - mean), between(-edges[0] - mean, -mean)
    for code, (low, high) in enumerate(pairwise(edges), 1):
        p[ZERO + code] = between(low - mean, high - mean)
        p[ZERO - code] = between(-high - mean, -low - mean)
    p[ZERO + magnitudes - 1] = above(edges[-1] - mean)
    p[ZERO - magnitudes + 1] = above(edges[-1] + mean)
    return p


def _magnitude(code: int, mantissa_bits: int) -> mpf:
    """Value of a magnitude code: the byte without its sign, the exponent in the bits above the mantissa."""
    bias = (1 << (6 - mantissa_bits)) - 1
    field, mantissa = divmod(code, 1 << mantissa_bits)
    significand = mantissa + ((1 << mantissa_bits) if field else 0)
    return significand * mpf(2) ** (max(field, 1) - bias - mantissa_bits)


def freeze(p: Sequence[mpf], groups: Sequence[tuple[int, ...]]) -> list[int]:
    """Turn probabilities of the 256 symbols into integer frequencies that sum to ``2**TABLE_BITS``.

    What rounding left over, or took too much, is settled in the groups: one for each symbol of a group at a
    time, where it matters most, the first of equals. What is too little for a group goes to the symbol of 0.
    """
    q = [v * TOTAL for v in p]
    f = [0 if v < mpf(1) / 8 else max(1, int(mp.nint(v))) for v in q]
    f[ESC] = max(1, f[ESC])
    size = len(groups[0])
    left = TOTAL - sum(f)
    while left >= size and (rising := [g for g in groups if f[g[0]] > 0]):
        best = max(rising, key=lambda g: q[g[0]] / f[g[0]])
        for symbol in best:
            f[symbol] += 1
        left -= size
    # Where 0 is as good as impossible it has no frequency to give: one group more, and 0 gets what is over.
    while (left <= -size or f[ZERO] + left < 0) and (falling := [g for g in groups if f[g[0]] > 1]):
        best = max(falling, key=lambda g: f[g[0]] / q[g[0]])
        for symbol in best:
            f[symbol] -= 1
        left += size
    f[ZERO] += left
    return f


def costs(frequency: Sequence[int]) -> list[int]:
    """256ths of a bit each symbol takes. One without frequency is coded as an escape and costs as much."""
    coded = [int(mp.nint(256 * (TABLE_BITS - mp.log(f, 2)))) if f else 0 for f in frequency]
    escape = coded[ESC] + RAW_BITS * 256
    return [escape if symbol == ESC or not f else coded[symbol] for symbol, f in enumerate(frequency)]


SETS: dict[str, tuple[str, Callable[[int], list[int]]]] = {
    "gauss": ("integer", gauss_table),
    "exponent": ("exponent", exponent_table),
    "e4m3fn": ("code", lambda index: float8_table(index, mantissa_bits=3, magnitudes=127)),
    "e5m2": ("code", lambda index: float8_table(index, mantissa_bits=2, magnitudes=124)),
}


def compute(name: str) -> bytes:
    """Return what the file of a table set must hold: canonical JSON, the same bytes on every machine.

    Parameters
    ----------
    name : {"gauss", "exponent", "e4m3fn", "e5m2"}
    """
    kind, table = SETS[name]
    with mp.workdps(DIGITS):
        frequency = [table(index) for index in range(CLASSES)]
        cost = [costs(row) for row in frequency]
    content = {"bits": TABLE_BITS, "cost": cost, "frequency": frequency, "kind": kind, "name": name}
    return (json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n").encode("ascii")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the files beside this one with their definition, or write them; return the exit status."""
    parser = argparse.ArgumentParser(description="Compute the frozen tables of the codec.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="only compare with the files (the default)")
    mode.add_argument("--write", action="store_true", help="write the files")
    write = parser.parse_args(arguments).write
    status = 0
    for name in SETS:
        data, path = compute(name), Path(__file__).with_name(f"{name}.json")
        if write:
            path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        same = digest == DIGESTS.get(name) and path.is_file() and path.read_bytes() == data
        status |= not same
        sys.stdout.write(f"{name} {digest} {'as frozen' if same else 'DIFFERS from what is frozen'}\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
