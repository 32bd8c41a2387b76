"""The scheduler side, one situation at a time; all of them at once are in the model's tests."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest

from kvcore.connectors.vllm.metadata import Load, Save, StepMetadata
from kvcore.connectors.vllm.scheduler import SchedulerSide
from kvcore.engine.keys import Namespace, chunk_keys
from kvcore.errors import ConfigError, KVCoreError

from .requests_made import KINDS, Maker
from .scheduler_model import FakeLookups

SPACE = Namespace("model", "1", chunk_tokens=8)
CAT = "ca" * 32


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Maker:
    return Maker(request.param)


def side_of(stored: list[int] = (), **more: Any) -> tuple[SchedulerSide, FakeLookups]:  # type: ignore[assignment]
    """A side over a cache that holds all chunks of some tokens."""
    lookups = FakeLookups(4)
    lookups.stored = {key.digest for key in chunk_keys(SPACE, list(stored), partial=True)}
    return SchedulerSide(SPACE, lookups, block_tokens=4, **more), lookups


def first_step(make: Maker, side: SchedulerSide, request: Any, count: int, computed: int = 0) -> StepMetadata:
    blocks = (list(range(1, 2 + (computed + count) // 4)),)
    side.update_state_after_alloc(request, make.blocks(blocks), 0)
    return side.build_connector_meta(
        make.output(new=[(request, blocks, computed)], scheduled={request.request_id: count})
    )


def next_step(make: Maker, side: SchedulerSide, request: Any, count: int, computed: int) -> StepMetadata:
    return side.build_connector_meta(
        make.output(cached=[(request, None, computed)], scheduled={request.request_id: count})
    )


TOKENS = list(range(30))
KEYS = chunk_keys(SPACE, TOKENS)


def test_a_load_names_the_chunks_the_blocks_and_the_tokens(make: Maker) -> None:
    side, lookups = side_of(TOKENS)
    request = make.request("r", TOKENS)
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 4) == (20, True)
    assert lookups.questions["r"] == (KEYS, 30, 4)
    side.update_state_after_alloc(request, make.blocks(([5, 6, 7, 8, 9, 10],)), 20)
    meta = side.build_connector_meta(make.output(scheduled={}))
    assert meta == StepMetadata((Load("r", tuple(KEYS), 4, 24, ([5, 6, 7, 8, 9, 10],), 30, True),))
    assert pickle.loads(pickle.dumps(meta)) == meta
    assert not side.build_connector_meta(make.output(scheduled={})), "once"
    side.update_state_after_alloc(request, make.blocks(([5, 6, 7, 8, 9, 10, 11, 12],)), 0)
    blocks = ([5, 6, 7, 8, 9, 10, 11, 12],)
    meta = side.build_connector_meta(make.output(new=[(request, blocks, 24)], scheduled={"r": 6}))
    assert not meta, "what was loaded is stored already"


def test_the_scheduler_may_take_less_than_it_was_offered_and_not_more(make: Maker) -> None:
    side, _ = side_of(TOKENS, asynchronous=False)
    request = make.request("r", TOKENS)
    assert side.get_num_new_matched_tokens(request, 0) == (24, False)
    with pytest.raises(KVCoreError, match="28 tokens of request r loaded that were not offered"):
        side.update_state_after_alloc(request, make.blocks(([1] * 7,)), 28)
    assert side.get_num_new_matched_tokens(request, 0) == (24, False)
    side.update_state_after_alloc(request, make.blocks(([1, 2, 3, 4],)), 12)
    meta = side.build_connector_meta(make.output(new=[(request, ([1, 2, 3, 4],), 12)], scheduled={"r": 3}))
    assert meta.loads == (Load("r", tuple(KEYS[:2]), 0, 12, ([1, 2, 3, 4],), 30, False),)
    with pytest.raises(KVCoreError, match="not offered"):
        side.update_state_after_alloc(request, make.blocks(([1],)), 4)


def test_blocks_are_copied(make: Maker) -> None:
    side, _ = side_of()
    request = make.request("r", TOKENS)
    tables = {"r": ([1, 2, 3, 4],)}
    output = make.output(new=[(request, ([1, 2],), 0)], scheduled={"r": 16}, tables=tables)
    side.on_new_request(request)
    (save,) = side.build_connector_meta(output).saves
    tables["r"][0][0] = 99
    assert save == Save("r", tuple(KEYS[:2]), ([1, 2, 3, 4],), 0, 16)


def test_chunked_prefill_saves_each_chunk_in_the_step_that_completes_it(make: Maker) -> None:
    side, _ = side_of()
    request = make.request("r", TOKENS)
    side.on_new_request(request)
    steps = [first_step(make, side, request, 5)]
    steps += [next_step(make, side, request, count, at) for at, count in ((5, 5), (10, 3), (13, 17))]
    saves = [[(save.keys, save.computed, save.total) for save in meta.saves] for meta in steps]
    assert saves == [[], [((KEYS[0],), 0, 10)], [], [(tuple(KEYS[1:]), 10, 30)]]


def test_tokens_that_vllm_has_itself_are_saved_too_unless_they_are_known_to_be_stored(make: Maker) -> None:
    side, _ = side_of()
    request = make.request("r", TOKENS)
    assert side.get_num_new_matched_tokens(request, 16) == (0, False)
    assert [save.keys for save in first_step(make, side, request, 14, 16).saves] == [tuple(KEYS)]
    side, _ = side_of(TOKENS[:24])
    request = make.request("s", TOKENS)
    assert side.get_num_new_matched_tokens(request, 16) == (8, True)
    assert not first_step(make, side, request, 14, 16).saves


def test_generated_chunks_are_saved_when_their_tokens_are_known(make: Maker) -> None:
    side, _ = side_of()
    request = make.request("r", TOKENS)
    side.on_new_request(request)
    assert first_step(make, side, request, 30).saves
    for at in range(30, 33):  # vLLM runs ahead: it schedules tokens that are not sampled yet
        assert not next_step(make, side, request, 1, at).saves
    for token in (7, 8):
        request.append_output_token_ids(token)
    (save,) = next_step(make, side, request, 1, 33).saves
    assert save.keys == (chunk_keys(SPACE, [*TOKENS, 7, 8])[3],)
    assert (save.computed, save.total) == (30, 32)


def test_drafts_that_may_be_rejected_are_not_saved(make: Maker) -> None:
    side, _ = side_of()
    request = make.request("r", TOKENS)
    side.on_new_request(request)
    first_step(make, side, request, 30)
    request.append_output_token_ids(1)
    assert not next_step(make, side, request, 5, 30).saves, "one token and four drafts"
    request.append_output_token_ids(2)  # one of them was taken
    (save,) = next_step(make, side, request, 5, 31).saves
    assert save.total == 32
    assert save.keys == (chunk_keys(SPACE, [*TOKENS, 1, 2])[3],)


def test_only_prompts_are_saved_on_demand(make: Maker) -> None:
    side, _ = side_of(save_decode=False)
    request = make.request("r", TOKENS)
    side.on_new_request(request)
    assert first_step(make, side, request, 30).saves
    for at in range(30, 40):
        request.append_output_token_ids(1)
        assert not next_step(make, side, request, 1, at).saves


def test_the_end_of_a_prompt_is_saved_and_found_on_demand(make: Maker) -> None:
    side, _ = side_of(save_partial_chunk=True)
    request = make.request("r", TOKENS)
    side.on_new_request(request)
    (save,) = first_step(make, side, request, 30).saves
    assert save.keys == tuple(chunk_keys(SPACE, TOKENS, partial=True))
    request.append_output_token_ids(1)
    assert not next_step(make, side, request, 1, 30).saves
    side, _ = side_of(TOKENS, save_partial_chunk=True)
    assert side.get_num_new_matched_tokens(make.request("s", TOKENS), 0) == (28, True)


def test_the_end_of_a_prompt_that_is_computed_anew_is_saved_anew(make: Maker) -> None:
    side, _ = side_of(save_partial_chunk=True)
    request = make.request("r", TOKENS)
    side.on_new_request(request)
    first = first_step(make, side, request, 30).saves
    (again,) = next_step(make, side, request, 20, 10).saves
    assert again.keys == first[0].keys[1:]
    assert not next_step(make, side, request, 1, 30).saves


def test_a_cache_that_claims_all_of_a_prompt_leaves_its_last_token(make: Maker) -> None:
    side, lookups = side_of(TOKENS)
    lookups.answer = lambda request: 8  # type: ignore[method-assign]
    assert side.get_num_new_matched_tokens(make.request("r", TOKENS[:8]), 0) == (4, True)


def test_an_answer_that_is_late_is_asked_for_again_and_one_that_is_old_too(make: Maker) -> None:
    side, lookups = side_of(TOKENS)
    lookups.slow = 2
    request = make.request("r", TOKENS)
    assert side.get_num_new_matched_tokens(request, 0) == (None, False)
    lookups.age = 100.0
    assert side.get_num_new_matched_tokens(request, 0) == (None, False)
    assert lookups.asks == 1, "the question stays while it is not answered"
    assert side.get_num_new_matched_tokens(request, 0) == (24, True)
    assert lookups.asks == 2
    lookups.age, lookups.stored = 0.0, set()
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert lookups.asks == 2


def test_lookups_hear_of_every_step(make: Maker) -> None:
    side, lookups = side_of()
    for _ in range(3):
        side.build_connector_meta(make.output(scheduled={}))
    assert lookups.steps == 3


def test_a_request_whose_load_failed_is_computed_and_one_that_was_preempted_may_load_again(make: Maker) -> None:
    side, _ = side_of(TOKENS)
    request = make.request("r", TOKENS)
    assert side.get_num_new_matched_tokens(request, 0) == (24, True)
    side.update_state_after_alloc(request, make.blocks(([1] * 6,)), 24)
    side.build_connector_meta(make.output(scheduled={}))
    request.num_preemptions += 1
    assert side.get_num_new_matched_tokens(request, 0) == (24, True)
    side.update_state_after_alloc(request, make.blocks(([1] * 6,)), 24)
    side.build_connector_meta(make.output(scheduled={}))
    assert side.get_num_new_matched_tokens(request, 0) == (0, False), "it has lost its blocks without a preemption"
    request.num_preemptions += 1
    assert side.get_num_new_matched_tokens(request, 0) == (0, False), "and may not try for ever"
    (save,) = first_step(make, side, request, 30).saves
    assert save.keys == tuple(KEYS), "what could not be read is saved again"


def test_a_load_that_failed_as_a_whole_is_not_tried_again(make: Maker) -> None:
    from types import SimpleNamespace

    side, _ = side_of(TOKENS, groups=2)
    request = make.request("r", TOKENS)
    side.on_new_request(request)
    side.update_connector_output(SimpleNamespace(failed_recving={"r", "unknown"}))
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)


def test_after_a_failed_load_all_from_there_on_is_saved(make: Maker) -> None:
    side, _ = side_of(TOKENS)
    request = make.request("r", TOKENS)
    assert side.get_num_new_matched_tokens(request, 0) == (24, True)
    side.update_state_after_alloc(request, make.blocks(([1] * 6,)), 24)
    side.build_connector_meta(make.output(scheduled={}))
    (save,) = first_step(make, side, request, 18, computed=12).saves  # vLLM goes back to the first block that failed
    assert (save.keys, save.computed, save.total) == (tuple(KEYS[1:]), 12, 30)


def test_small_hits_are_not_worth_it(make: Maker) -> None:
    side, _ = side_of(TOKENS, min_retrieve_tokens=21)
    assert side.get_num_new_matched_tokens(make.request("r", TOKENS), 4) == (0, False)
    assert side.get_num_new_matched_tokens(make.request("s", TOKENS), 0) == (24, True)


@pytest.mark.parametrize("stop", [8, 9, 16, 17])
def test_the_last_token_is_never_loaded(make: Maker, stop: int) -> None:
    side, _ = side_of(TOKENS)
    assert side.get_num_new_matched_tokens(make.request("r", TOKENS[:stop]), 0)[0] == (stop - 1) // 8 * 8 + (
        4 if stop % 8 == 0 else 0
    )


def test_producers_never_load_and_consumers_never_save(make: Maker) -> None:
    side, lookups = side_of(TOKENS, loads=False)
    request = make.request("r", TOKENS)
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not lookups.questions
    assert first_step(make, side, request, 30).saves
    side, _ = side_of(saves=False)
    request = make.request("s", TOKENS)
    side.on_new_request(request)
    assert not first_step(make, side, request, 30)


def test_who_wants_the_logprobs_of_a_prompt_has_it_computed(make: Maker) -> None:
    side, lookups = side_of(TOKENS, prefetch=True)
    request = make.request("r", TOKENS, skip_reading=True)
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not lookups.questions
    assert not lookups.prefetched


def test_several_groups_always_load_asynchronously(make: Maker) -> None:
    side, _ = side_of(TOKENS, groups=2, asynchronous=False)
    assert side.get_num_new_matched_tokens(make.request("r", TOKENS), 0) == (24, True)


def test_what_a_request_will_need_is_told_at_its_arrival(make: Maker) -> None:
    side, lookups = side_of(prefetch=True)
    side.on_new_request(make.request("r", TOKENS))
    assert lookups.prefetched == KEYS


def test_an_uncacheable_request_is_computed_counted_and_logged_once(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    side, lookups = side_of(TOKENS)
    for number in range(3):
        request = make.request(f"r{number}", TOKENS, mm_features=[make.feature("mine", 3, 4)])
        side.on_new_request(request)
        assert side.get_num_new_matched_tokens(request, 0) == (0, False)
        assert not first_step(make, side, request, 30)
    assert side.uncacheable == {"media": 3}
    assert lookups.reasons == ["media"] * 3
    assert len(caplog.records) == 1
    assert not lookups.questions


def test_tokens_that_are_none_are_not_cached(make: Maker) -> None:
    side, lookups = side_of()
    request = make.request("r", [-1, *TOKENS])
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert lookups.reasons == ["tokens"]


def test_a_session_gets_keys_for_what_it_was_sent_later(make: Maker) -> None:
    side, _ = side_of()
    request = make.request("r", TOKENS[:12], resumable=True)
    side.on_new_request(request)
    assert first_step(make, side, request, 12).saves
    request.append_output_token_ids(77)
    del request._all_token_ids[12:]
    request.mm_features.append(make.feature(CAT, 13, 2))
    for token in range(12, 30):
        request.append_output_token_ids(token)
    (save,) = first_step(make, side, request, 18, computed=12).saves
    image = [key for key in chunk_keys(SPACE, TOKENS) if key.start >= 8]
    assert [key.start for key in save.keys] == [8, 16]
    assert not set(save.keys) & set(image), "the image is part of them"


def test_nothing_is_remembered_of_requests_that_are_gone(make: Maker) -> None:
    side, _ = side_of()
    known, short = make.request("known", TOKENS), make.request("short", TOKENS[:3])
    for request, count in ((known, 30), (short, 3)):
        side.on_new_request(request)
        first_step(make, side, request, count)
    assert not side.build_connector_meta(make.output(scheduled={}, preempted={"known", "short"}, tables={}))
    for request in (known, short):
        assert side.request_finished(request, ([1],)) == (False, None)
    assert not side.build_connector_meta(make.output(scheduled={}))
    assert len(side) == 0


def test_windows_need_tables_that_say_which_blocks_were_given_back(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    side, lookups = side_of(windowed=True, groups=2)
    request = make.request("r", TOKENS)
    side.on_new_request(request)
    blocks = ([1, 2, 3, 4], [5, 6, 7, 8])
    assert not side.build_connector_meta(make.output(new=[(request, blocks, 0)], scheduled={"r": 16})).saves
    assert lookups.reasons == ["blocks"]
    assert "which blocks were given back" in caplog.text


def test_reset_finds_nothing_of_before_and_saves_nothing_that_was_begun(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvcore")
    side, _ = side_of(TOKENS)
    running = make.request("running", TOKENS)
    side.on_new_request(running)
    assert side.reset_cache() is True
    assert not first_step(make, side, running, 30)
    later = make.request("later", TOKENS)
    assert side.get_num_new_matched_tokens(later, 0) == (0, False)
    (save,) = first_step(make, side, later, 30).saves
    assert not {key.digest for key in save.keys} & {key.digest for key in KEYS}


def test_a_name_that_is_used_again_is_another_request(make: Maker) -> None:
    side, _ = side_of()
    first, second = make.request("r", TOKENS), make.request("r", TOKENS[::-1])
    side.on_new_request(first)
    first_step(make, side, first, 30)
    side.on_new_request(second)
    (save,) = first_step(make, side, second, 30).saves
    assert save.keys == tuple(chunk_keys(SPACE, TOKENS[::-1]))


def test_requests_of_others_are_left_alone(make: Maker) -> None:
    side, _ = side_of()
    stranger = make.request("stranger", TOKENS)
    side.update_state_after_alloc(stranger, make.blocks(([1],)), 0)
    assert not side.build_connector_meta(make.output(new=[(stranger, ([1],), 0)], scheduled={"stranger": 30}))
    assert side.request_finished(stranger) == (False, None)
    assert not side.build_connector_meta(make.output(scheduled={}))


def test_nothing_is_remembered_after_ten_thousand_requests() -> None:
    make = Maker("stand-in")
    side, lookups = side_of(TOKENS[:16])
    for number in range(10_000):
        request = make.request(f"r{number}", TOKENS[: 10 + number % 20])
        side.on_new_request(request)
        count = side.get_num_new_matched_tokens(request, 0)[0] or 0
        blocks = (list(range(1, 9)),)
        side.update_state_after_alloc(request, make.blocks(blocks), count)
        if number % 3:
            new = [(request, blocks, count)]
            side.build_connector_meta(make.output(new=new, scheduled={request.request_id: request.num_tokens - count}))
        side.request_finished(request, blocks)
    side.build_connector_meta(make.output(scheduled={}))
    left = {name: len(value) for name, value in vars(side).items() if isinstance(value, (dict, list, set))}
    assert not any(left.values()), left
    assert not lookups.questions


@pytest.mark.parametrize("bad", [{"block_tokens": 0}, {"block_tokens": 4, "groups": 0}])
def test_impossible_engines_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least one group"):
        SchedulerSide(SPACE, FakeLookups(4), **bad)


def test_closing_it_closes_the_lookups() -> None:
    side, lookups = side_of()
    side.close()
    assert lookups.closed
