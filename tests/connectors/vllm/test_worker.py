"""The worker side: what it loads is what was saved, what it cannot load it says, and it saves nothing wrong."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvcore.connectors.vllm import worker
from kvcore.connectors.vllm.metadata import Save, StepMetadata
from kvcore.errors import ConfigError

from .caches import Group, MambaSpec, SlidingWindowSpec, attention_name
from .ranks import BLOCK, CHUNK, Rank, attention

TOKENS = list(range(500, 500 + 3 * CHUNK + 5))
ROOM = [[1, 2, 3, 4, 5, 6, 7]]
ELSEWHERE = [[20, 9, 18, 11, 16, 13, 14]]
HIT = 3 * CHUNK


def sliding(numbers, window):
    return Group([attention_name(n) for n in numbers], SlidingWindowSpec(block_size=BLOCK, sliding_window=window))


def wait(side, seconds=20.0):
    """Return what is received, once something is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        received = side.received()
        if received.requests:
            return received
        time.sleep(0.005)
    raise AssertionError("no load has ended")


def step(*loads, saves=()):
    return StepMetadata(loads=loads, saves=saves)


@pytest.mark.parametrize(
    "cache", [{}, {"layout": "BLHNC"}, {"backend": "CPU_ATTN"}, {"backend": "CPU_ATTN", "kernel_block": 8}]
)
def test_what_is_saved_is_loaded_into_other_blocks(tmp_path, cache):
    with Rank(f"fs:{tmp_path}", cache=cache) as rank:
        rank.save(TOKENS, ROOM)
    with Rank(f"fs:{tmp_path}", cache=cache) as rank:
        assert rank.hit(TOKENS) == HIT
        rank.spoil()
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT)))
        assert rank.right(TOKENS, ELSEWHERE, HIT)
        assert rank.side.failed_blocks() == set()
        untouched = [b for b in range(24) if b not in ELSEWHERE[0][: HIT // BLOCK]]
        assert all((t.reshape(24, -1)[untouched] == -1).all() for t in rank.caches.tensors.values())


def test_engines_with_other_memory_layouts_share(tmp_path):
    with Rank(f"fs:{tmp_path}", cache={"backend": "CPU_ATTN"}) as rank:
        rank.save(TOKENS, ROOM)
    with Rank(f"fs:{tmp_path}", [attention(block_size=32)], cache={"layout": "BLNHC"}) as rank:
        rank.side.start_loads(step(rank.load(TOKENS, [[5, 9, 3, 2]], HIT)))
        assert rank.right(TOKENS, [[5, 9, 3, 2]], HIT)


def test_only_the_tokens_that_vllm_has_not_itself_are_written(tmp_path):
    with Rank(f"fs:{tmp_path}") as rank:
        rank.save(TOKENS, ROOM)
        rank.spoil()
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT, start=BLOCK)))
        assert rank.right(TOKENS, ELSEWHERE, HIT, start=BLOCK)
        assert all((tensor[ELSEWHERE[0][0]] == -1).all() for tensor in rank.caches.tensors.values())


def test_asynchronous_loads_end_aside(tmp_path):
    with Rank(f"fs:{tmp_path}") as rank:
        rank.save(TOKENS, ROOM)
        rank.spoil()
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT, asynchronous=True)))
        received = wait(rank.side)
        assert (received.requests, received.failed) == ({"r"}, frozenset())
        assert rank.right(TOKENS, ELSEWHERE, HIT)
        assert rank.side.received().requests == frozenset()


def lose(rank, tokens, number):
    """Remove one chunk from everywhere."""
    rank.side.engine.tiers.delete([rank.keys(tokens)[number]])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_load_that_fails_is_told_by_block_from_the_first_token_on(tmp_path, asynchronous):
    with Rank(f"fs:{tmp_path}") as rank:
        rank.save(TOKENS, ROOM)
        lose(rank, TOKENS, 1)
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT, asynchronous=asynchronous)))
        if asynchronous:
            assert wait(rank.side).requests == {"r"}
        assert rank.side.failed_blocks() == set(ELSEWHERE[0][CHUNK // BLOCK : HIT // BLOCK])
        assert rank.side.failed_blocks() == set()
        assert rank.right(TOKENS, ELSEWHERE, CHUNK)


def test_a_store_that_raises_fails_the_load_and_not_the_engine(tmp_path):
    with Rank(f"fs:{tmp_path}") as rank:
        rank.save(TOKENS, ROOM)
    with Rank(f"fault:get.eio=1.0:fs:{tmp_path}") as rank:
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT)))
        assert rank.side.failed_blocks() == set(ELSEWHERE[0][: HIT // BLOCK])


def test_nothing_is_saved_of_what_was_computed_from_a_failed_load(tmp_path):
    longer = [*TOKENS, *range(2 * CHUNK)]
    room = [[*ELSEWHERE[0], 21, 22, 23, 8]]
    with Rank(f"fs:{tmp_path}") as rank:
        rank.save(TOKENS, ROOM)
        lose(rank, TOKENS, 0)
        rank.spoil()
        rank.side.start_loads(step(rank.load(longer, room, HIT)))
        chunks = rank.keys(longer)
        poisoned = Save("r", chunks[3:], (room[0],), HIT, len(longer))
        rank.side.save(step(saves=(poisoned,)))
        rank.side.engine.flush()
        assert rank.side.engine.stats().stores == 1
        # vLLM computes from the first failed block on, in two steps.
        assert rank.side.failed_blocks()
        part = 3 * BLOCK
        rank.compute(longer[:part], room)
        rank.side.save(step(saves=(Save("r", chunks[:1], (room[0],), 0, part),)))
        rank.compute(longer, room, part)
        rank.side.save(step(saves=(Save("r", chunks[1:], (room[0],), part, len(longer)),)))
        rank.side.engine.flush()
        assert rank.hit(longer) == 5 * CHUNK
        rank.spoil()
        rank.side.start_loads(step(rank.load(longer, [list(range(1, 13))], 5 * CHUNK)))
        assert rank.right(longer, [list(range(1, 13))], 5 * CHUNK)


def test_other_requests_that_share_a_failed_block_save_nothing_either(tmp_path):
    with Rank(f"fs:{tmp_path}") as rank:
        rank.save(TOKENS, ROOM)
        lose(rank, TOKENS, 0)
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT)))
        other = [*TOKENS[:HIT], *range(CHUNK)]
        table = [*ELSEWHERE[0][: HIT // BLOCK], 22, 23]
        rank.side.save(step(saves=(Save("s", rank.keys(other)[3:], (table,), HIT, len(other)),)))
        assert rank.side.engine.stats().stores == 1


def test_blocks_are_clean_again_once_all_their_slots_are_written(tmp_path):
    with Rank(f"fs:{tmp_path}") as rank:
        rank.save(TOKENS, ROOM)
        lose(rank, TOKENS, 2)
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT)))
        first, second = ELSEWHERE[0][2 * CHUNK // BLOCK :][:2]
        assert rank.side.watches
        slots = np.arange(BLOCK) + first * BLOCK
        rank.side.written([np.append(slots, -1)])
        assert rank.side.watches
        rank.side.written([np.arange(BLOCK) + second * BLOCK])
        assert not rank.side.watches


def test_a_later_load_into_a_failed_block_cleans_it(tmp_path):
    with Rank(f"fs:{tmp_path}") as rank:
        rank.save(TOKENS, ROOM)
        lose(rank, TOKENS, 2)
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT)))
        assert rank.side.watches
        other = [ELSEWHERE[0][4:6]]
        rank.side.start_loads(step(rank.load(TOKENS, other, CHUNK)))
        assert not rank.side.watches


def test_layer_by_layer(tmp_path):
    with Rank(f"fs:{tmp_path}", load="layerwise") as rank:
        rank.save(TOKENS, ROOM)
        rank.spoil()
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT)))
        tensors = rank.caches.tensors
        assert all((tensor == -1).all() for tensor in tensors.values())
        rank.side.wait_for_layer(attention_name(0))
        assert (tensors[attention_name(1)] == -1).all()
        assert not (tensors[attention_name(0)][ELSEWHERE[0][:6]] == -1).any()
        rank.side.wait_for_layer(attention_name(1))
        rank.side.wait_for_layer("model.norm")
        rank.side.save(StepMetadata())
        assert rank.side.failed_blocks() == set()
        assert rank.right(TOKENS, ELSEWHERE, HIT)


def test_layer_by_layer_a_missing_chunk_is_told(tmp_path):
    with Rank(f"fs:{tmp_path}", load="layerwise") as rank:
        rank.save(TOKENS, ROOM)
        lose(rank, TOKENS, 1)
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT)))
        for number in (0, 1):
            rank.side.wait_for_layer(attention_name(number))
        rank.side.save(StepMetadata())
        assert rank.side.failed_blocks() == set(ELSEWHERE[0][CHUNK // BLOCK : HIT // BLOCK])


def test_a_layer_that_nobody_waited_for_fails_the_load(tmp_path):
    with Rank(f"fs:{tmp_path}", load="layerwise") as rank:
        rank.save(TOKENS, ROOM)
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT)))
        rank.side.wait_for_layer(attention_name(0))
        rank.side.save(StepMetadata())
        assert rank.side.failed_blocks() == set(ELSEWHERE[0][: HIT // BLOCK])


def test_layer_by_layer_a_failure_is_told_in_its_own_step(tmp_path):
    """vLLM asks for the blocks first, and has the step saved after it has run a draft model."""
    with Rank(f"fs:{tmp_path}", load="layerwise") as rank:
        rank.save(TOKENS, ROOM)
        lose(rank, TOKENS, 1)
        rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT)))
        for number in (0, 1):
            rank.side.wait_for_layer(attention_name(number))
        assert rank.side.failed_blocks() == set(ELSEWHERE[0][CHUNK // BLOCK : HIT // BLOCK])
        rank.side.save(step(saves=(Save("r", rank.keys(TOKENS), tuple(ELSEWHERE), HIT, len(TOKENS)),)))
        assert rank.side.failed_blocks() == set()
        assert rank.side.engine.stats().stores == 1


def no_memory(*args):
    raise MemoryError("none left")


def no_thread(self):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("where", "name", "what"), [(worker, "request_kv", no_memory), (threading.Thread, "start", no_thread)]
)
def test_a_request_goes_on_whose_load_cannot_even_begin(tmp_path, monkeypatch, where, name, what):
    with Rank(f"fs:{tmp_path}") as rank:
        rank.save(TOKENS, ROOM)
        with monkeypatch.context() as patch:
            patch.setattr(where, name, what)
            rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT, asynchronous=True)))
            assert wait(rank.side).requests == {"r"}
        assert rank.side.failed_blocks() == set(ELSEWHERE[0][: HIT // BLOCK])


def test_closing_does_not_wait_for_loads_that_have_not_begun(tmp_path):
    with Rank(f"fs:{tmp_path}") as rank:
        rank.save(TOKENS, ROOM)
    count = 20
    rank = Rank(f"fault:get.latency=50ms:fs:{tmp_path}", load_threads=1)
    loads = [rank.load([n, *TOKENS], ELSEWHERE, HIT, request=str(n), asynchronous=True) for n in range(count)]
    rank.side.start_loads(step(*loads))
    rank.side.close()
    assert rank.side.engine.stats().retrieves < count
    assert rank.side.received().requests == {str(n) for n in range(count)}
    assert rank.side.failed_blocks() == set(ELSEWHERE[0][: HIT // BLOCK])


def hybrid():
    return [attention((0, 2)), sliding((1, 3), 2 * BLOCK)]


def test_groups_have_tables_of_their_own_and_a_window_is_enough(tmp_path):
    windows = [0, 0, 0, 0, 8, 9, 10]  # vLLM has given the others back
    with Rank(f"fs:{tmp_path}", hybrid()) as rank:
        blocks = [ROOM[0], [11, 12, 13, 14, 15, 16, 17]]
        rank.save(TOKENS, blocks)
    with Rank(f"fs:{tmp_path}", hybrid()) as rank:
        rank.spoil()
        target = [ELSEWHERE[0], windows]
        rank.side.start_loads(step(rank.load(TOKENS, target, HIT, asynchronous=True)))
        assert wait(rank.side).failed == frozenset()
        assert rank.right(TOKENS, target, HIT)
        assert all((tensor[0] == -1).all() for tensor in rank.caches.tensors.values())


def test_of_several_groups_failures_are_told_by_request(tmp_path):
    with Rank(f"fs:{tmp_path}", hybrid()) as rank:
        rank.save(TOKENS, [ROOM[0], [11, 12, 13, 14, 15, 16, 17]])
        rank.side.engine.clear()
        load = rank.load(TOKENS, [ROOM[0], [0, 0, 0, 0, 8, 9, 10]], HIT, asynchronous=True)
        rank.side.start_loads(step(load))
        received = wait(rank.side)
        assert (received.requests, received.failed) == ({"r"}, {"r"})
        assert rank.side.failed_blocks() == set()
        assert rank.side.received().failed == frozenset()


def test_a_window_that_has_slid_past_is_not_saved(tmp_path):
    with Rank(f"fs:{tmp_path}", hybrid()) as rank:
        rank.compute(TOKENS, [ROOM[0], [11, 12, 13, 14, 15, 16, 17]])
        table = [0, 0, 0, 14, 15, 16, 17]
        keys = rank.keys(TOKENS)
        rank.side.save(step(saves=(Save("r", keys, (ROOM[0], table), 0, len(TOKENS)),)))
        rank.side.engine.flush()
        assert rank.hit(TOKENS) == HIT
        assert rank.hit(TOKENS[: 2 * CHUNK + 1]) == 0


def states(mode="align"):
    recurrent = Group([f"model.layers.{n}.mixer" for n in (1, 3)], MambaSpec(block_size=BLOCK, mamba_cache_mode=mode))
    return [attention((0, 2)), recurrent]


def test_states_are_those_of_the_ends_of_steps(tmp_path):
    table = [[1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17]]
    with Rank(f"fs:{tmp_path}", states()) as rank:
        rank.save(TOKENS[: 2 * CHUNK], table)  # in one step: chunk 0 has no state of its own
        rank.save(TOKENS[:HIT], table, 2 * CHUNK)
        assert rank.hit(TOKENS) == HIT
        assert rank.hit(TOKENS[: 2 * CHUNK + 1]) == 2 * CHUNK
        assert rank.hit(TOKENS[: CHUNK + 1]) == 0
    with Rank(f"fs:{tmp_path}", states()) as rank:
        target = [ELSEWHERE[0], [0, 0, 0, 0, 0, 9, 10]]
        rank.spoil()
        rank.side.start_loads(step(rank.load(TOKENS, target, HIT, asynchronous=True)))
        assert wait(rank.side).failed == frozenset()
        assert rank.right(TOKENS, target, HIT)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_another_number_of_ranks_reads_what_was_stored(tmp_path, first, second):
    """Tensor parallelism, at the level of the workers: no engine with several ranks fits here."""

    def ranks(degree):
        heads = 4 // degree
        return [
            Rank(f"fs:{tmp_path}", [attention(num_kv_heads=heads)], rank=r, degree=degree, kv_heads=4)
            for r in range(degree)
        ]

    for rank in ranks(first):
        with rank:
            rank.save(TOKENS, ROOM)
    for rank in ranks(second):
        with rank:
            assert rank.hit(TOKENS) == HIT
            rank.spoil()
            rank.side.start_loads(step(rank.load(TOKENS, ELSEWHERE, HIT)))
            assert rank.right(TOKENS, ELSEWHERE, HIT)


def test_a_consumer_saves_nothing(tmp_path):
    with Rank(f"fs:{tmp_path}", saves=False) as rank:
        rank.save(TOKENS, ROOM)
        assert rank.side.engine.stats().stores == 0


@pytest.mark.parametrize("load", ["sync", "layerwise"])
@pytest.mark.parametrize("groups", [hybrid, states])
def test_loads_within_a_step_are_refused_where_failures_could_not_be_told(tmp_path, load, groups):
    with pytest.raises(ConfigError, match="use load='async'"):
        Rank(f"fs:{tmp_path}", groups(), load=load)


def test_closing_waits_for_what_is_on_its_way(tmp_path):
    rank = Rank(f"fault:put.latency=50ms:fs:{tmp_path}")
    rank.compute(TOKENS, ROOM)
    rank.side.save(step(saves=(Save("r", rank.keys(TOKENS), (ROOM[0],), 0, len(TOKENS)),)))
    rank.side.close()
    rank.side.close()
    with Rank(f"fs:{tmp_path}") as later:
        assert later.hit(TOKENS) == HIT


def test_ranks_that_share_out_states_do_not_read_one_anothers(tmp_path):
    table = [[1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17]]
    groups = [attention((0, 2), num_kv_heads=1), states()[1]]
    known = {"degree": 2, "kv_heads": 2}
    with (
        Rank(f"fs:{tmp_path}", groups, rank=0, **known) as first,
        Rank(f"fs:{tmp_path}", groups, rank=1, **known) as other,
    ):
        first.save(TOKENS[:CHUNK], table)
        assert first.hit(TOKENS) == CHUNK
        assert other.hit(TOKENS) == 0
