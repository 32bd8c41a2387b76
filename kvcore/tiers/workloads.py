"""Loads of LLM services, made up: multi-turn chats, retrieval-augmented generation, and agents.

They have the shape of such loads (what prompts share, how they grow, what is popular), not the numbers of any service:
good for comparing policies and for tests. What your service does, only a trace of it says.
"""

from __future__ import annotations

import difflib
import hashlib
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from kvcore.errors import ConfigError
from kvcore.tiers.traces import BYTES_PER_TOKEN, Request, Trace

__all__ = ["WORKLOADS", "chunk_chain", "generate"]

Segment: TypeAlias = "tuple[str, int]"
"""A text by name, and its tokens: the same name is the same text."""

_Prompt: TypeAlias = "tuple[float, str, list[Segment]]"


def generate(
    kind: str, requests: int = 1000, seed: int = 0, *, chunk_tokens: int = 256, bytes_per_token: int = BYTES_PER_TOKEN
) -> Trace:
    """Return a trace of a made-up load; equal arguments give equal traces.

    Parameters
    ----------
    kind : str
        Of `WORKLOADS`: ``"chat"``, ``"rag"``, ``"agent"``.
    requests : int
    seed : int
    chunk_tokens, bytes_per_token : int
        As in `Trace`.

    Raises
    ------
    ConfigError
        There is no such load, or a number is below 1.
    """
    if kind not in WORKLOADS:
        near = difflib.get_close_matches(kind.lower(), WORKLOADS, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"there is no load {kind!r}; {hint}there are {', '.join(WORKLOADS)}")
    for name, value in (("requests", requests), ("chunk_tokens", chunk_tokens), ("bytes_per_token", bytes_per_token)):
        if value < 1:
            raise ConfigError(f"{name}={value}: the least is 1")
    made = []
    for (time, tenant, segments), _ in zip(WORKLOADS[kind](random.Random(seed)), range(requests), strict=False):
        tokens = sum(count for _, count in segments)
        made.append(Request(round(time, 3), tokens, chunk_chain(segments, chunk_tokens), tenant))
    return Trace(chunk_tokens, tuple(made), bytes_per_token)


def chunk_chain(segments: Sequence[Segment], chunk_tokens: int) -> tuple[str, ...]:
    """Return the keys of the full chunks of a prompt that is made of named texts.

    Each key is a digest of all that is before the chunk's end, so prompts share keys as far as they begin alike.
    """
    keys: list[str] = []
    digest, room = hashlib.blake2b(digest_size=8), chunk_tokens
    for name, count in segments:
        start = 0
        while count - start >= room:
            start += room
            digest.update(f"{name}\0{start}\n".encode())
            keys.append(digest.copy().hexdigest())
            room = chunk_tokens
        if start < count:
            digest.update(f"{name}\0{count}\n".encode())
            room -= count - start
    return tuple(keys)


def _chat(rng: random.Random) -> Iterator[_Prompt]:
    """Chats of several turns: each prompt is the one before, its answer, and a question."""
    turns: list[tuple[float, int, str, list[Segment]]] = []
    arrival, session = 0.0, 0
    while True:
        if not turns or arrival < turns[0][0]:
            tenant = f"team-{_popular(rng, 4)}"
            segments = [(f"system of {tenant}", 1200)]
            heapq.heappush(turns, (arrival, session, tenant, segments))
            session, arrival = session + 1, arrival + rng.expovariate(1 / 4)
            continue
        time, number, tenant, segments = heapq.heappop(turns)
        turn = len(segments)
        prompt = [*segments, (f"{number}: question {turn}", rng.randint(20, 600))]
        yield time, tenant, prompt
        if rng.random() < 0.85:
            prompt.append((f"{number}: answer {turn}", rng.randint(50, 900)))
            heapq.heappush(turns, (time + 5 + rng.expovariate(1 / 60), number, tenant, prompt))


def _rag(rng: random.Random) -> Iterator[_Prompt]:
    """Questions on documents, some of which are popular; the best match comes first."""
    time, number = 0.0, 0
    while True:
        tenant = f"team-{_popular(rng, 4)}"
        names = dict.fromkeys(f"{tenant}: document {_popular(rng, 400)}" for _ in range(3))
        texts = [(name, 500 + 37 * (sum(name.encode()) % 60)) for name in names]
        yield time, tenant, [(f"system of {tenant}", 600), *texts, (f"question {number}", rng.randint(10, 120))]
        time, number = time + rng.expovariate(1 / 2), number + 1


def _agent(rng: random.Random) -> Iterator[_Prompt]:
    """Agents: long instructions and tools, many quick steps with their results, and now and then parallel branches."""
    steps: list[tuple[float, int, str, list[Segment]]] = []
    arrival, task = 0.0, 0
    while True:
        if not steps or arrival < steps[0][0]:
            tenant = f"team-{_popular(rng, 3)}"
            tools = [(f"tools of {tenant}", 6000), (f"task {task}", rng.randint(200, 3000))]
            heapq.heappush(steps, (arrival, task, tenant, tools))
            task, arrival = task + 1, arrival + rng.expovariate(1 / 30)
            continue
        time, number, tenant, segments = heapq.heappop(steps)
        yield time, tenant, segments
        if rng.random() >= 0.93:
            continue
        branches = 3 if rng.random() < 0.05 else 1
        for _ in range(branches):
            task += branches > 1
            name = task if branches > 1 else number
            result = (f"{name}: step {len(segments)}", rng.randint(60, 1500))
            heapq.heappush(steps, (time + 1 + rng.expovariate(1 / 6), name, tenant, [*segments, result]))


def _popular(rng: random.Random, count: int) -> int:
    """Return a number below `count`: the smaller the more likely, about as 1/(n + 1)."""
    return min(int(math.exp(rng.random() * math.log(count + 1))) - 1, count - 1)


WORKLOADS: dict[str, Callable[[random.Random], Iterator[_Prompt]]] = {"chat": _chat, "rag": _rag, "agent": _agent}
"""Loads by name."""
