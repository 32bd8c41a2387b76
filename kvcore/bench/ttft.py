"""Time to the first token of a real vLLM: cold, from its own prefix cache, and from kvcore in a new process.

For each length there is a document, and several users whose prompts begin with it and end each in their own way. Each
place that KV may come from is measured in an engine of its own, and every engine is warmed up first.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcore.bench.engine import EngineProcess, Generated
from kvcore.errors import ConfigError

__all__ = ["CHUNK_TOKENS", "Conversation", "EngineOptions", "TtftRow", "conversations", "measure_ttft", "metrics_of"]

CHUNK_TOKENS = 256
NEW_TOKENS = 8
_OWN_TOKENS = 48
_WARM_UP_TOKENS = 640
_WARM_UP_SHIFT = 7

_COUNTS_HITS = re.compile(r"(kvcore_\w+_(tokens|chunks)|vllm:(external_)?prefix_cache_\w+)_total\b")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How engines are started.

    Parameters
    ----------
    python : str
        Of the engine's environment.
    model : str
        A directory of Hugging Face.
    folder : Path
        Stores are put here.
    store : str
        URI of kvcore's store; empty: a directory in `folder`.
    serde : str or dict
        How kvcore codes KV there.
    load : str
        How the connector loads.
    chunk_tokens : int
        In which kvcore stores and finds KV.
    """

    python: str
    model: str
    folder: Path
    store: str = ""
    serde: Any = "raw"
    load: str = "async"
    chunk_tokens: int = CHUNK_TOKENS

    def kvcore(self) -> dict[str, Any]:
        """Return the fields of vLLM's ``KVTransferConfig`` for kvcore."""
        tier = {"store": self.store or f"fs:{self.folder / 'kvcore'}", "serde": self.serde, "name": "store"}
        return {
            "kv_connector": "KVCoreConnector",
            "kv_connector_module_path": "kvcore.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "chunk_tokens": self.chunk_tokens, "max_local_cpu_size": "2GiB", "pinned": False, "load": self.load,
                "tiers": [tier],
            },
        }  # fmt: skip

    def example(self) -> dict[str, Any]:
        """Return the same for the connector that vLLM brings as an example: one file a layer and prompt."""
        where = {"shared_storage_path": str(self.folder / "example")}
        return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": where}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A document, and what users ask about it.

    Parameters
    ----------
    tokens : int
        Of the document.
    prompts : list of list of int
        One for each user.
    """

    tokens: int
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class TtftRow:
    """Times to the first token of one length, in milliseconds: medians.

    Parameters
    ----------
    tokens : int
        Of the document; prompts have some more.
    plain_ms : float or None
        Computed, by an engine without a connector.
    own_ms : float or None
        The next user, from that engine's own prefix cache.
    cold_ms : float
        Computed by an engine that stores it with kvcore.
    store_ms, host_ms : float
        In a new engine: from kvcore's store, and the next user from kvcore's host memory.
    example_ms : float or None
        The same prompt once more, from vLLM's ExampleConnector.
    speedup : float
        The less of `plain_ms` and `cold_ms`, by `store_ms`: they are the same work, at different times of the machine.
    hit_tokens : int
        That the new engine did not compute.
    example_hit_tokens : int or None
        That the engine with the ExampleConnector did not compute; it caches whole prompts, to the block.
    identical : bool
        Whether all engines generate the same tokens for all prompts that they were given.
    """

    tokens: int
    plain_ms: float | None
    own_ms: float | None
    cold_ms: float
    store_ms: float
    host_ms: float | None
    example_ms: float | None
    speedup: float
    hit_tokens: int
    example_hit_tokens: int | None
    identical: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def conversations(
    document: Sequence[int], lengths: Sequence[int], *, users: int, repeats: int, chunk_tokens: int = CHUNK_TOKENS
) -> list[Conversation]:
    """Return what is asked: `repeats` documents of each length, no two of which begin alike.

    Raises
    ------
    ConfigError
        A length is less than a chunk and one token, or there is not enough text.
    """
    made = []
    for number, (length, repeat) in enumerate(itertools.product(lengths, range(repeats))):
        start = 97 * number
        if length <= chunk_tokens:
            raise ConfigError(f"{length} tokens hold no chunk of {chunk_tokens} and a token to compute; take more")
        if start + length > len(document):
            raise ConfigError(f"the text has {len(document):,} tokens, too few for documents of {length:,}")
        shared = list(document[start : start + length])
        tails = [list(document[at : at + _OWN_TOKENS]) for at in range(repeat, repeat + 53 * users, 53)]
        made.append(Conversation(length, [shared + tail for tail in tails]))
    return made


def measure_ttft(
    asked: Sequence[Conversation], options: EngineOptions, say: Say, *, plain: bool = True, example: bool = True
) -> tuple[list[TtftRow], dict[str, Any]]:
    """Measure all engines, one after the other.

    Parameters
    ----------
    asked : sequence of Conversation
    options : EngineOptions
    say : callable
        Told what happens, for a progress display.
    plain, example : bool
        Also measure an engine without a connector, and one with vLLM's ExampleConnector.

    Returns
    -------
    rows : list of TtftRow
        One for each length.
    about : dict
        ``version`` of vLLM, ``metrics`` and ``hit_rate`` of the warm engine.

    Raises
    ------
    KVCoreError
        An engine fails; the message has the end of its log.
    """
    most = max(len(prompt) for one in asked for prompt in one.prompts) + NEW_TOKENS
    answers: dict[str, list[list[Generated]]] = {}
    with_kvcore = options.kvcore()
    if plain:
        with _engine(options, None, most, say, "without a connector") as engine:
            answers["plain"] = [_ask(engine, one.prompts, say, "plain") for one in asked]
    with _engine(options, with_kvcore, most, say, "kvcore, cold") as engine:
        answers["cold"] = [_ask(engine, one.prompts[:1], say, "cold") for one in asked]
        say("kvcore, cold: write what is on its way")
    with _engine(options, with_kvcore, most, say, "kvcore, warm") as engine:
        answers["warm"] = [_ask(engine, one.prompts, say, "warm", forget=True) for one in asked]
        page, version = engine.metrics_text(), engine.about["version"]
    if example:
        with _engine(options, options.example(), most, say, "ExampleConnector") as engine:
            answers["example"] = [_ask(engine, one.prompts[:1] * 2, say, "example", forget=True) for one in asked]
    rows = [
        _row(length, [number for number, one in enumerate(asked) if one.tokens == length], answers)
        for length in dict.fromkeys(one.tokens for one in asked)
    ]
    metrics = metrics_of(page)
    return rows, {"version": version, "metrics": metrics, "hit_rate": _hit_rate(metrics)}


def metrics_of(page: str) -> list[str]:
    """Return the lines of a Prometheus page that count hits: kvcore's, and vLLM's own view of them."""
    return [line for line in page.splitlines() if _COUNTS_HITS.match(line)]


def _engine(
    options: EngineOptions, connector: Mapping[str, Any] | None, most: int, say: Say, what: str
) -> EngineProcess:
    say(f"{what}: start the engine")
    engine = EngineProcess(
        options.python, options.model, connector=connector, timeout=1800, max_model_len=most, max_num_seqs=4,
        max_num_batched_tokens=max(most, 2048), served_model_name=Path(options.model).name,
    )  # fmt: skip
    try:
        # Of odd tokens, so that no prompt begins like it; twice, for the first run of anything is slow.
        warm_up = [token + _WARM_UP_SHIFT for token in range(100, 100 + _WARM_UP_TOKENS)]
        engine.generate([warm_up, [1, *warm_up]], tokens=2, together=False)
        engine.forget()
    except BaseException:
        engine.kill()
        raise
    return engine


def _ask(
    engine: EngineProcess, prompts: Sequence[Sequence[int]], say: Say, what: str, *, forget: bool = False
) -> list[Generated]:
    """Give prompts to an engine one after the other."""
    answers = []
    for number, prompt in enumerate(prompts):
        say(f"{what}: {len(prompt):,} tokens, user {number + 1}")
        answers += engine.generate([prompt], tokens=NEW_TOKENS, pause=0.5)
        if forget:
            engine.forget()
    return answers


def _row(length: int, numbers: Sequence[int], answers: Mapping[str, list[list[Generated]]]) -> TtftRow:
    def median(name: str, first: int, last: int | None) -> float | None:
        times = [one.ttft for n in numbers for one in answers.get(name, {n: []})[n][first:last] if one.ttft]
        return round(1e3 * statistics.median(times), 1) if times else None

    cold, store = median("cold", 0, 1) or 0.0, median("warm", 0, 1) or 0.0
    plain = median("plain", 0, 1)
    return TtftRow(
        tokens=length,
        plain_ms=plain,
        own_ms=median("plain", 1, None),
        cold_ms=cold,
        store_ms=store,
        host_ms=median("warm", 1, None),
        example_ms=median("example", 1, 2),
        speedup=round(min(plain or cold, cold) / store, 2) if store else 0.0,
        hit_tokens=min(answers["warm"][n][0].cached for n in numbers),
        example_hit_tokens=min(answers["example"][n][1].cached for n in numbers) if "example" in answers else None,
        identical=all(_agree(n, answers) for n in numbers),
    )


def _agree(number: int, answers: Mapping[str, list[list[Generated]]]) -> bool:
    """Whether engines that were given the same prompt went on alike."""
    users = [[one.tokens for one in by_number[number]] for name, by_number in answers.items() if name != "example"]
    longest = max(users, key=len)
    # Twice the same prompt: the example's second answer came from its store.
    again = [one.tokens for one in answers["example"][number]] if "example" in answers else []
    return all(one == longest[: len(one)] for one in users) and all(tokens == longest[0] for tokens in again)


def _hit_rate(metrics: Sequence[str]) -> float | None:
    """Return the share of tokens asked for that kvcore had."""

    def total(name: str) -> float:
        return sum(float(value) for value in _values(metrics, name))

    asked = total("kvcore_lookup_tokens_total")
    return round(total("kvcore_hit_tokens_total") / asked, 4) if asked else None


def _values(metrics: Sequence[str], name: str) -> Iterator[str]:
    for line in metrics:
        labelled, _, value = line.rpartition(" ")
        if labelled.partition("{")[0] == name:
            yield value
