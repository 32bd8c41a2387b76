"""The toy engine answers the same with a cache as without, and computes less."""

import contextlib

import pytest

from kvcore.errors import ConfigError

from .toy_engine import BLOCK, ToyConnector, ToyEngine

CHUNK = 32
PROMPT = list(range(100, 245))  # four chunks, a block and a token
WARM = 4 * CHUNK


@contextlib.contextmanager
def running(folder, weights=1, **settings):
    toy = ToyEngine(weights)
    small = {"chunk_tokens": CHUNK, "max_local_cpu_size": "8 MiB", "pinned": False, "local_disk": str(folder)}
    toy.connector = ToyConnector(toy, {**small, **settings})
    try:
        yield toy
    finally:
        toy.connector.close()


def plain(prompt, weights=1):
    return ToyEngine(weights).prefill("plain", prompt)


def test_a_prompt_is_computed_once_for_all_engines(tmp_path):
    with running(tmp_path) as toy:
        assert toy.prefill("cold", PROMPT) == plain(PROMPT)
        assert toy.computed == len(PROMPT)
    with running(tmp_path) as toy:  # another process, say
        assert toy.prefill("warm", PROMPT) == plain(PROMPT)
        assert toy.computed == len(PROMPT) - WARM
        assert toy.connector.cache.stats().hit_rate == pytest.approx(WARM / len(PROMPT))


def test_prompts_share_what_they_begin_with(tmp_path):
    other = [*PROMPT[:70], *range(500, 560)]
    with running(tmp_path) as toy:
        toy.prefill("first", PROMPT)
        toy.connector.cache.flush()
        before = toy.computed
        assert toy.prefill("second", other) == plain(other)
        assert toy.computed - before == len(other) - 2 * CHUNK


def test_a_prompt_that_is_stored_whole_is_loaded_but_for_its_last_block(tmp_path):
    with running(tmp_path) as toy:
        toy.prefill("first", PROMPT)
        toy.connector.cache.flush()
        before = toy.computed
        toy.prefill("second", PROMPT[:WARM])
        assert toy.computed - before == BLOCK


def test_other_weights_find_nothing(tmp_path):
    with running(tmp_path) as toy:
        toy.prefill("first", PROMPT)
    with running(tmp_path, weights=2) as toy:
        assert toy.prefill("second", PROMPT) == plain(PROMPT, weights=2)
        assert toy.computed == len(PROMPT)


def test_a_damaged_chunk_is_computed_again(tmp_path):
    with running(tmp_path) as toy:
        toy.prefill("first", PROMPT)
    for file in tmp_path.rglob("*.kvf"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with running(tmp_path) as toy:
        assert toy.prefill("second", PROMPT) == plain(PROMPT)
        assert toy.computed == len(PROMPT)


def test_a_typo_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'local_disk'"), running(tmp_path, local_disc="x"):
        pass
