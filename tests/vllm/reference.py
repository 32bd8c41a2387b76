"""What a plain engine generates, kept from run to run: one is started only for what is new."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from kvcore.bench.engine import EngineProcess, Generated
from kvcore.connectors.vllm.weights import content_digest

__all__ = ["References", "agreement", "assert_same"]

_NEAR = 2e-3
"""Natural logarithms: two batches of one prompt differ in the fifth decimal, other KV in the first."""


class References:
    """The plain engine's answers, one file for each prompt.

    Parameters
    ----------
    python : str
        Of the engine's environment.
    folder : Path
        Where they are kept. The names have all that an answer depends on, but for the code of kvcore: no part of it is
        in a plain engine.
    """

    def __init__(self, python: str, folder: Path) -> None:
        self._python = python
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)

    def of(self, model: str, prompts: Sequence[Sequence[int]], tokens: int = 16, **options) -> list[Generated]:
        """Return what the plain engine goes on with, each prompt for itself."""
        places = [self._place(model, prompt, tokens, options) for prompt in prompts]
        missing = {place: prompt for place, prompt in zip(places, prompts, strict=True) if not place.exists()}
        if missing:
            plain = {"enable_prefix_caching": False, **options, "timeout": 1800}
            with EngineProcess(self._python, model, **plain) as engine:
                answers = engine.generate(list(missing.values()), tokens=tokens, together=False)
            for place, answer in zip(missing, answers, strict=True):
                scratch = place.with_suffix(".new")
                scratch.write_text(json.dumps(asdict(answer)), "utf-8")
                scratch.rename(place)
        return [Generated(**json.loads(place.read_text("utf-8"))) for place in places]

    def _place(self, model: str, prompt: Sequence[int], tokens: int, options: dict) -> Path:
        told = sorted((name, value) for name, value in options.items() if name not in ("in_process", "timeout"))
        said = [_content(Path(model)), list(prompt), tokens, told, metadata.version("torch"), platform.processor()]
        return self._folder / f"{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]}.json"


def _content(model: Path) -> list[str]:
    """What a model is, wherever it lies."""
    return [content_digest(model).hex(), (model / "config.json").read_text("utf-8")]


def assert_same(got: Sequence[Generated], expected: Sequence[Generated], *, near: float = _NEAR) -> None:
    """Fail unless each answer has the plain engine's tokens, and probabilities that no other KV would give."""
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.finish == other.finish, (index, one)
        assert one.tokens == other.tokens, (index, one.cached, agreement([one], [other]))
        worst = max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
        assert worst < near, (index, one.cached, worst)


def agreement(got: Sequence[Generated], expected: Sequence[Generated]) -> float:
    """Return the share of tokens up to the first that differs, over all answers."""
    agreed = total = 0
    for one, other in zip(got, expected, strict=True):
        same = [a == b for a, b in zip(one.tokens, other.tokens, strict=False)]
        agreed += same.index(False) if False in same else len(same)
        total += len(other.tokens)
    return agreed / total
