"""Several engines in several processes over one directory: spawned, each with threads and tiers of its own."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

import pytest

from .world import CHUNK, HEADS, Pages, blocks_for, engine, paged, tiers

SHARED = list(range(100, 100 + 4 * CHUNK + 3))
REVISIONS = ("1", "2")
"""Of two engines in each process, whose KV differs."""


def own(number: int) -> list[int]:
    """The tokens that a process stores, which share a prefix with all others'."""
    return [*SHARED[: 2 * CHUNK], *range(1000 * (number + 1), 1000 * (number + 1) + 2 * CHUNK), 1]


def computed(tokens: list[int], revision: str) -> tuple[Pages, list[int]]:
    """The KV of a model: that of revision 2 is what other tokens have in revision 1."""
    pages, blocks = Pages((0, 1), (0, HEADS)), blocks_for(len(tokens))
    pages.compute(tokens if revision == "1" else [token + 1 for token in tokens], blocks)
    return pages, blocks


def put(cache, tokens: list[int], revision: str, *, wait: bool = False) -> None:
    pages, blocks = computed(tokens, revision)
    cache.store_keys(cache.keys(tokens), paged([pages], blocks), wait=wait)


def got(cache, tokens: list[int], revision: str) -> int:
    """Return how many tokens are there, -1 if one of them is wrong."""
    pages, blocks = Pages((0, 1), (0, HEADS)), blocks_for(len(tokens))
    keys = cache.keys(tokens)
    upto = cache.retrieve_keys(keys, paged([pages], blocks), start=0, stop=cache.lookup_keys(keys, len(tokens)))
    truth = tokens if revision == "1" else [token + 1 for token in tokens]
    return upto if all(pages.right(truth, blocks, range(upto))) else -1


def opened(directory: str, revision: str):
    over = tiers(f"fs:{directory}")
    return engine([Pages((0, 1), (0, HEADS)).part()], over, namespace={"revision": revision}, own=True)


def work(number: int, directory: str, ready: Barrier, answers: Queue[tuple[int, list[int], int]]) -> None:
    """What each process does: find what the parent stored, and store at the same time what the others do."""
    engines = [opened(directory, revision) for revision in REVISIONS]
    found = [got(cache, SHARED, revision) for cache, revision in zip(engines, REVISIONS, strict=True)]
    ready.wait(60)
    for again in range(3):
        for cache, revision in zip(engines, REVISIONS, strict=True):
            put(cache, own(number), revision)
            put(cache, [5 + again] * (3 * CHUNK), revision)  # as all others do
    for cache in engines:
        cache.close()
    answers.put((number, found, sum(cache.misses.total() for cache in engines)))


@pytest.mark.parametrize("processes", [3])
def test_spawned_processes_share_a_directory(tmp_path, processes):
    context = multiprocessing.get_context("spawn")
    ready, answers = context.Barrier(processes), context.Queue()
    engines = [opened(str(tmp_path), revision) for revision in REVISIONS]
    try:
        for cache, revision in zip(engines, REVISIONS, strict=True):
            put(cache, SHARED, revision, wait=True)
        started = [
            context.Process(target=work, args=(n, str(tmp_path), ready, answers), daemon=True) for n in range(processes)
        ]
        for process in started:  # while this process has engines, with threads, open
            process.start()
        told = sorted(answers.get(timeout=120) for _ in started)
        for process in started:
            process.join(60)
        assert [process.exitcode for process in started] == [0] * processes
        assert told == [(n, [4 * CHUNK, 4 * CHUNK], 0) for n in range(processes)]
        for cache, revision in zip(engines, REVISIONS, strict=True):
            for number in range(processes):
                assert got(cache, own(number), revision) == 4 * CHUNK
            for again in range(3):
                assert got(cache, [5 + again] * (3 * CHUNK + 1), revision) == 3 * CHUNK
            assert cache.misses == {}
    finally:
        for cache in engines:
            cache.close()
