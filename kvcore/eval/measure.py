"""The measurement: every document's KV through every subject, and what the model predicts from what comes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from kvcore.entropy import TILE_TOKENS
from kvcore.errors import ConfigError, KVCoreError
from kvcore.eval.scoring import Predictions, Scores, compare, prefill, score
from kvcore.eval.subjects import BF16_BITS, Array, Chunk, Stored, Subject, leveled, measured_levels
from kvcore.ops import Backend
from kvcore.rope import RopeParams

__all__ = ["Prefix", "Result", "Row", "Stage", "Tally", "Tick", "measure", "prepare", "relative_kl"]

Tick: TypeAlias = Callable[[str], None]
"""Called when a step is done, with what it was about."""
Stage: TypeAlias = Callable[[str, "int | None"], Tick]
"""Called when a stage begins, with what it does and its number of steps, where that is known."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one subject costs, and what it saves.

    Parameters
    ----------
    codec : str
    bits_k, bits_v : float, optional
        Bits per element of K and of V, all side information included; None where the two cannot be told apart.
    bits : float
        The same of both.
    ratio : float
        Bytes in bfloat16 over bytes stored.
    kl : float
        Mean Kullback-Leibler divergence from the predictions that bfloat16 KV gives, nats per token.
    ppl_delta_pct, ppl_se_pct : float
        Difference in perplexity, and its standard error (of paired differences, tokens taken as independent), percent.
    agree_pct : float
        Tokens for which greedy decoding chooses the same, percent.
    """

    codec: str
    bits_k: float | None
    bits_v: float | None
    bits: float
    ratio: float
    kl: float
    ppl_delta_pct: float
    ppl_se_pct: float
    agree_pct: float


@dataclass(slots=True)
class Tally:
    """What was seen of one subject so far."""

    codec: str
    k_bytes: float = 0.0
    v_bytes: float = 0.0
    k_elements: int = 0
    v_elements: int = 0
    scores: list[Scores] = field(default_factory=list)
    apart: bool = True

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.codec,
            self.k_bytes + other.k_bytes,
            self.v_bytes + other.v_bytes,
            self.k_elements + other.k_elements,
            self.v_elements + other.v_elements,
            self.scores + other.scores,
            self.apart and other.apart,
        )

    def row(self) -> Row:
        """Sum up."""
        kl = np.concatenate([s.kl for s in self.scores])
        extra = np.concatenate([s.loss - s.reference_loss for s in self.scores])
        agree = np.concatenate([s.agree for s in self.scores])
        factor = math.exp(float(extra.mean()))
        error = float(extra.std(ddof=1)) / math.sqrt(extra.size)
        bits = 8 * (self.k_bytes + self.v_bytes) / (self.k_elements + self.v_elements)
        return Row(
            codec=self.codec,
            bits_k=8 * self.k_bytes / self.k_elements if self.apart else None,
            bits_v=8 * self.v_bytes / self.v_elements if self.apart else None,
            bits=bits,
            ratio=BF16_BITS / bits,
            kl=float(kl.mean()),
            ppl_delta_pct=100 * (factor - 1),
            ppl_se_pct=100 * factor * error,
            agree_pct=100 * float(agree.mean()),
        )


def relative_kl(tally: Tally, baseline: Tally) -> tuple[float, float]:
    """Return a subject's mean KL over another's on the same tokens, and the standard error of that quotient.

    A few tokens have most of the KL, and the same ones in every subject: pairing them is what makes two subjects
    comparable at all. The other's KL must not be 0. The error is that of a quotient of means to first order, tokens
    taken as independent.
    """
    kl, base = (np.concatenate([s.kl for s in t.scores]) for t in (tally, baseline))
    mean = float(base.mean())
    quotient = float(kl.mean()) / mean
    return quotient, float((kl - quotient * base).std(ddof=1)) / math.sqrt(kl.size) / mean


@dataclass(frozen=True, slots=True)
class Prefix:
    """A document's prefix as the model sees it: its KV, the tokens after it, and what is predicted of them.

    Parameters
    ----------
    k, v : bfloat16 arrays ``[layers, heads, T, width]``
    following : tuple of int
        The token before the first that is scored, and the scored ones.
    reference : Predictions
        From this very KV.
    rope : RopeParams, optional
    """

    k: Array
    v: Array
    following: tuple[int, ...]
    reference: Predictions
    rope: RopeParams | None

    def chunks(self) -> list[Chunk]:
        """Return the prefix 256 tokens at a time, as caches store it; the last one may be shorter."""
        return [
            Chunk(
                self.k[:, :, start : start + TILE_TOKENS], self.v[:, :, start : start + TILE_TOKENS], start, self.rope
            )
            for start in range(0, self.k.shape[2], TILE_TOKENS)
        ]

    def measure(self, model: Any, backend: Backend, subject: Subject, tick: Tick) -> Tally:
        """Return what a subject does to this prefix. Ticks once a chunk, and once for the predictions.

        Raises
        ------
        KVCoreError
            What the subject raised, with its name in front.
        """
        stored: list[Stored] = []
        for chunk in self.chunks():
            try:
                stored.append(subject.store(backend, chunk))
            except KVCoreError as error:
                raise KVCoreError(f"{subject.name}, tokens from {chunk.position}: {error}") from error
            tick(subject.name)
        k = np.concatenate([s.k for s in stored], axis=2)
        v = np.concatenate([s.v for s in stored], axis=2)
        scores = compare(self.reference, score(model, k, v, self.following))
        tick(subject.name)
        return Tally(
            subject.name,
            sum(s.k_bytes for s in stored),
            sum(s.v_bytes for s in stored),
            self.k.size,
            self.v.size,
            [scores],
            all(s.apart for s in stored),
        )


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that was measured.

    Parameters
    ----------
    rows : list of Row
        One for each subject, all documents together.
    by_document : list of list of Row
        The same for each document.
    against_fp8 : list of (float, float)
        Each subject's mean KL over that of ``fp8``, and the standard error; empty where that is 0 or not measured.
    levels : tuple of int, optional
        The level constants that were used.
    """

    rows: list[Row]
    by_document: list[list[Row]]
    against_fp8: list[tuple[float, float]]
    levels: tuple[int, int] | None


def measure(
    model: Any,
    backend: Backend,
    chosen: Sequence[Subject],
    documents: Sequence[Sequence[int]],
    *,
    prefix: int,
    scored: int,
    rope: RopeParams | None,
    levels: tuple[int, int] | str | None,
    stage: Stage,
) -> Result:
    """Put every document's KV through every subject.

    Parameters
    ----------
    model : PreTrainedModel
        On the CPU or not; codecs get host memory.
    backend : Backend
    chosen : sequence of Subject
    documents : sequence of sequence of int
        Tokens, at least ``prefix + scored + 1`` of each.
    prefix, scored : int
        Tokens whose KV is coded, and tokens that are predicted behind it.
    rope : RopeParams, optional
        How the model rotates its keys.
    levels : tuple of int, ``"auto"`` or None
        Level constants with which the KVS1 presets are measured too; ``"auto"`` measures them on these documents.
    stage : callable

    Raises
    ------
    ConfigError
        A document is too short.
    KVCoreError
        A subject cannot hold the values, or the model keeps more or other than plain keys and values.
    """
    tick = stage("compute the documents", len(documents))
    prefixes = []
    for number, tokens in enumerate(documents):
        prefixes.append(prepare(model, tokens, prefix, scored, rope))
        tick(f"{number + 1} of {len(documents)}")
    if isinstance(levels, str):
        stage("measure level constants", None)
        levels = measured_levels(backend, [chunk for known in prefixes for chunk in known.chunks()])
    everything = [*chosen, *(leveled(chosen, levels) if levels is not None else ())]
    chunks = sum(len(known.chunks()) for known in prefixes)
    tick = stage("measure", len(everything) * (chunks + len(prefixes)))
    tallies = [[known.measure(model, backend, subject, tick) for known in prefixes] for subject in everything]
    totals = [sum(parts[1:], parts[0]) for parts in tallies]
    fp8 = next((total for total in totals if total.codec == "fp8" and total.row().kl > 0), None)
    return Result(
        rows=[total.row() for total in totals],
        by_document=[[parts[number].row() for parts in tallies] for number in range(len(prefixes))],
        against_fp8=[] if fp8 is None else [relative_kl(total, fp8) for total in totals],
        levels=levels,
    )


def prepare(model: Any, tokens: Sequence[int], prefix: int, scored: int, rope: RopeParams | None) -> Prefix:
    """Compute the KV of a prefix and the reference's predictions behind it.

    Parameters
    ----------
    tokens : sequence of int
        At least ``prefix + scored + 1``.

    Raises
    ------
    ConfigError
        There are fewer.
    UnsupportedOpError
        The model keeps more or other than plain keys and values.
    """
    if len(tokens) < prefix + scored + 1:
        raise ConfigError(f"{len(tokens)} tokens; {prefix} + {scored} + 1 are needed")
    k, v = prefill(model, tokens[:prefix])
    following = tuple(tokens[prefix : prefix + scored + 1])
    return Prefix(k, v, following, score(model, k, v, following), rope)
