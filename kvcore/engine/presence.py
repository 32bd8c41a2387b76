"""How much of a prefix is there: which chunks of which parts tiers have, and what can be gone on from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from kvcore.engine.keys import ChunkKey
from kvcore.engine.parts import CachePart, PartKeys, Shard, shardings, whole_model

__all__ = ["Presence", "StoredPart", "longest"]

Locate = Callable[[Sequence[ChunkKey]], Sequence[object | None]]
"""From keys of objects to what is known of each: None for those that are nowhere."""


class StoredPart:
    """A part, and the ways in which its chunks may have been stored.

    Parameters
    ----------
    part : CachePart
    parts : sequence of CachePart
        All of the engine.
    model_layers : int
        Layers of the model.
    hash : str
        The namespace's.
    reshard : bool
        Also look for what other tensor-parallel degrees have stored.
    """

    def __init__(
        self,
        part: CachePart,
        parts: Sequence[CachePart],
        *,
        model_layers: int,
        hash: str,  # noqa: A002 - the namespace's word
        reshard: bool = True,
    ) -> None:
        self.part = part
        self.ways: list[tuple[tuple[Shard, PartKeys], ...]] = []
        for shards in shardings(part):
            named = ((shard, whole_model(shard.part, model_layers, parts)) for shard in shards)
            self.ways.append(tuple((shard, PartKeys(shard.part, whole=whole, hash=hash)) for shard, whole in named))
            if not reshard:
                break
        self._lock = threading.Lock()
        self._order = list(range(len(self.ways)))

    def key(self, chunk: ChunkKey) -> ChunkKey:
        """Return the key under which this engine stores the part of a chunk."""
        return self.ways[0][0][1](chunk)

    def order(self) -> list[int]:
        """Return numbers of `ways`, the one that was right last first: a store was filled by one degree."""
        with self._lock:
            return list(self._order)

    def prefer(self, way: int) -> None:
        """Say that a way was right."""
        with self._lock:
            if self._order[0] != way:
                self._order.remove(way)
                self._order.insert(0, way)

    def objects(self, way: int, chunk: ChunkKey) -> list[tuple[Shard, ChunkKey]]:
        """Return the objects that hold the part of a chunk, if it was stored in a way."""
        return [(shard, keys(chunk)) for shard, keys in self.ways[way]]


class Presence:
    """What is there of some chunks, asked for part by part and only where it matters.

    Parameters
    ----------
    parts : sequence of StoredPart
    keys : sequence of ChunkKey
        Chunks of a prefix, first to last.
    locate : callable
        Asks the tiers.
    """

    def __init__(self, parts: Sequence[StoredPart], keys: Sequence[ChunkKey], locate: Locate) -> None:
        self._parts, self._keys, self._locate = parts, keys, locate
        self._known: list[dict[int, bool]] = [{} for _ in parts]

    def leading(self, part: int) -> int:
        """Return how many leading chunks of a part are there."""
        at = 0
        while at < len(self._keys):
            found = self._run(part, range(at, len(self._keys)))
            if not found:
                break
            at += found
        return at

    def has(self, part: int, chunks: Iterable[int]) -> bool:
        """Whether a part has all of these chunks."""
        known = self._known[part]
        asked = [i for i in chunks if i not in known]
        if asked:
            self._ask(part, asked)
        return all(known[i] for i in chunks)

    def _ask(self, part: int, chunks: Sequence[int]) -> None:
        known = self._known[part]
        missing = list(chunks)
        for way in self._parts[part].order():
            there = self._there(part, way, missing)
            if any(there):
                self._parts[part].prefer(way)
            known.update({i: True for i, found in zip(missing, there, strict=True) if found})
            missing = [i for i, found in zip(missing, there, strict=True) if not found]
            if not missing:
                return
        known.update(dict.fromkeys(missing, False))

    def _run(self, part: int, chunks: range) -> int:
        """Return how many leading ones of some chunks are there, in the first way that has the first of them."""
        for way in self._parts[part].order():
            some = chunks if way == self._parts[part].order()[0] else chunks[:1]
            found = _leading(self._there(part, way, some))
            if found:
                self._parts[part].prefer(way)
                return found
        return 0

    def _there(self, part: int, way: int, chunks: Sequence[int]) -> list[bool]:
        objects = [self._parts[part].objects(way, self._keys[i]) for i in chunks]
        answers = iter(self._locate([key for one in objects for _, key in one]))
        return [sum(next(answers) is None for _ in one) == 0 for one in objects]


def longest(
    parts: Sequence[CachePart],
    presence: Presence,
    *,
    chunks: int,
    chunk_tokens: int,
    tail: int,
    num_tokens: int,
    block_tokens: int,
) -> int:
    """Return the most tokens that can be gone on from, given what is there.

    Parameters
    ----------
    parts : sequence of CachePart
    presence : Presence
        Of the full chunks, and of the last one that is not full.
    chunks, chunk_tokens : int
        Full chunks, and tokens of each.
    tail : int
        Tokens of the last chunk, which is not full; 0 without one.
    num_tokens : int
        Of the sequence: one of them at least is left to compute, because an engine whose cache covers all of its
        prompt has nothing to run, and so no logits for the next token.
    block_tokens : int
        The engine takes multiples of these.
    """
    most = chunks
    for number, part in enumerate(parts):
        if part.prefix:
            most = min(most, presence.leading(number))
    candidates = [most * chunk_tokens]
    if tail and most == chunks and all(presence.has(n, [chunks]) for n, part in enumerate(parts) if part.prefix):
        candidates.insert(0, chunks * chunk_tokens + tail)
    candidates += [n * chunk_tokens for n in range(most - 1, 0, -1)]
    for tokens in candidates:
        usable = min(tokens, num_tokens - 1)
        usable -= usable % block_tokens
        if usable <= 0:
            continue
        if any(part.recurrent for part in parts) and usable != tokens:
            continue  # a state is that of its place, and of no other
        if all(
            presence.has(number, part.needed(usable, chunk_tokens))
            for number, part in enumerate(parts)
            if not part.prefix
        ):
            return usable
    return 0


def _leading(found: Sequence[bool]) -> int:
    return next((i for i, there in enumerate(found) if not there), len(found))
