"""Three hundred random requests four times over, each compared with the plain engine; nothing leaks."""

from __future__ import annotations

import random

import pytest

from kvcore.bench.engine import Usage

from .reference import assert_same
from .serving import SMALL, made_up

pytestmark = pytest.mark.slow

REQUESTS, NEW, ROUNDS = 300, 12, 4
OPTIONS = {**SMALL, "max_model_len": 2048}
# Blocks for three requests of full length: evictions and now and then a preemption.
BLOCKS = 48


def drawn() -> list[list[int]]:
    """Return prompts that share beginnings of all lengths, some of them twice."""
    choose = random.Random(11)
    trunks = made_up(6, 1800, seed=12)
    prompts: list[list[int]] = []
    while len(prompts) < REQUESTS:
        if prompts and choose.random() < 0.2:
            prompts.append(choose.choice(prompts))
            continue
        trunk = choose.choice(trunks)[: choose.randrange(1, 1700)]
        prompts.append(trunk + made_up(1, choose.randrange(1, 200), seed=choose.randrange(1 << 30))[0])
    return prompts


def batches(prompts: list[list[int]]) -> list[list[int]]:
    """Return the indices of the requests in groups that come together."""
    choose, groups, at = random.Random(13), [], 0
    while at < len(prompts):
        count = choose.randrange(1, 9)
        groups.append(list(range(at, min(at + count, len(prompts)))))
        at += count
    return groups


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_long_run(start, references, small, tmp_path, load):
    prompts = drawn()
    expected = references.of(small("gqa"), prompts, NEW, **OPTIONS)
    # Host memory holds a fraction, and the store fails now and then.
    store = f"fault:get.flip=0.02,get.eio=0.02,put.enospc=0.02,seed=5:fs:{tmp_path}"
    extra = {"load": load, "tiers": [store], "max_local_cpu_size": "8MiB", "pinned": False, "save_decode": True}
    options = {**OPTIONS, "in_process": False, "enable_prefix_caching": load == "async"}
    engine = start(small("gqa"), extra, num_gpu_blocks_override=BLOCKS, max_num_batched_tokens=512, **options)
    choose = random.Random(14)

    def once() -> Usage:
        for number, group in enumerate(batches(prompts)):
            aborted = [at for at in range(len(group)) if len(group) > 2 and choose.random() < 0.1]
            got = engine.generate([prompts[n] for n in group], tokens=NEW, abort=aborted, abort_after=0.02)
            for at, index in enumerate(group):
                if not got[at].aborted:
                    assert_same([got[at]], [expected[index]])
            if number % 5 == 4:
                engine.forget()
        engine.idle(1.0)
        return engine.usage()

    # The first rounds fill what is kept of what was seen: the host tier, thread pools, counters, the allocator. The
    # plain engine itself grows by 20 MiB a round.
    usage = [once() for _ in range(ROUNDS)]
    counters = engine.counters()
    print(usage, {name: value for name, value in counters.items() if "kvcore" in name})
    assert counters["vllm:external_prefix_cache_hits"] > 30_000
    *_, before, after = usage
    assert after.processes == before.processes
    # A pool starts a thread when it first has more to do than those it has: late, where loads come one at a time. What
    # leaked with requests, or with reads that fail, would be dozens a round.
    assert after.threads <= before.threads + 2
    assert after.descriptors <= before.descriptors
    assert after.rss < before.rss + (40 << 20)
