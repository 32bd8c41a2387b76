"""Traces, made-up loads, and their replay, through the library and through ``kvcore simulate``."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvcore.cli import app
from kvcore.errors import ConfigError
from kvcore.tiers.simulation import Simulation
from kvcore.tiers.traces import Request, Trace, read_trace, write_trace
from kvcore.tiers.workloads import WORKLOADS, chunk_chain, generate

PAGE = Path(__file__).parents[2] / "docs" / "eviction.md"
BUILT_IN = ("lru", "lfu", "fifo", "mru", "arc", "ttl")
HEADER = {"kvcore_trace": 1, "chunk_tokens": 4, "bytes_per_token": 2}
C = 8  # bytes of a chunk of these traces


def trace_of(*prompts, tenants=None):
    """Return a trace of prompts of whole chunks; a chunk's key is the path to it: "a", "ab"."""
    tenants = tenants or [""] * len(prompts)
    requests = [
        Request(float(i), 4 * len(p), tuple(p[: n + 1] for n in range(len(p))), t)
        for i, (p, t) in enumerate(zip(prompts, tenants, strict=True))
        if p
    ]
    return Trace(4, tuple(requests), 2)


PROMPTS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=12)

# --- traces ---------------------------------------------------------------------------------------------------------


def write_lines(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_trace_is_read_as_it_was_written(tmp_path):
    trace = Trace(
        4,
        (
            Request(0.0, 3, ()),
            Request(0.5, 9, ("ä", "b"), "team", (7, 9)),
            Request(0.5, 4, ("ä",)),
        ),
        3,
    )
    write_trace(trace, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl") == trace


def request(**changes):
    line = {"time": 1.0, "tokens": 9, "chunks": ["a", "b"], **changes}
    return {name: value for name, value in line.items() if value is not None}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["nonsense"], "line 1 is not JSON"),
        (["[" * 100_000], "line 1 is not JSON"),
        (["[1]"], "line 1 is not a JSON object"),
        ([{"chunk_tokens": 4}], "line 1: there is no field kvcore_trace"),
        ([{**HEADER, "kvcore_trace": 2, "new": 0}], "line 1, field kvcore_trace: 2 .* it reads 1"),
        ([{**HEADER, "kvcore_trace": True}], "line 1, field kvcore_trace"),
        ([{**HEADER, "chunk_tokens": 0}], "line 1, field chunk_tokens: 0"),
        ([{**HEADER, "bytes_per_token": 1.5}], "line 1, field bytes_per_token: 1.5"),
        ([HEADER, request(), "{"], "line 3 is not JSON"),
        ([HEADER, request(time=None)], "line 2: there is no field time; needed are time, tokens, chunks"),
        ([HEADER, request(tenent="x")], "line 2: unknown field tenent"),
        ([HEADER, request(time="1")], "line 2, field time: '1' is not a number"),
        ([HEADER, request(time=float("nan"))], "line 2, field time: nan"),
        ([HEADER, request(time=True)], "line 2, field time: True"),
        ([HEADER, request(time=10**400)], r"line 2, field time: 10+\.\.\. is not a number"),
        ([HEADER, request(time=-1)], "line 2, field time: -1"),
        ([HEADER, request(), request(time=0.5)], "line 3, field time: 0.5 is before the 1"),
        ([HEADER, request(tokens="9")], "line 2, field tokens: '9'"),
        ([HEADER, request(tokens=7)], "line 2, field tokens: 7 has not 2 full chunks of 4"),
        ([HEADER, request(tokens=12)], "line 2, field tokens: 12"),
        ([HEADER, request(chunks="ab")], "line 2, field chunks: 'ab' is not a list"),
        ([HEADER, request(chunks=["a", 3])], r"line 2, field chunks: is wrong: \[1\], 3"),
        ([HEADER, request(chunks=["a", ""])], r"line 2, field chunks: is wrong: \[1\], ''"),
        ([HEADER, request(chunks=["a", "a"])], r"line 2, field chunks: is no chain: \[1\], 'a', follows 'a'"),
        ([HEADER, request(), request(chunks=["b", "a"])], r"line 3, .*'b', is the first, but follows 'a' on line 2"),
        ([HEADER, request(tenant=1)], "line 2, field tenant: 1 is not a string"),
        ([HEADER, request(bytes=[1])], r"line 2, field bytes: \[1\] has 1 numbers for 2 chunks"),
        ([HEADER, request(bytes=[1, 0])], r"line 2, field bytes: is wrong: \[1\], 0"),
    ],
)
def test_a_bad_trace_is_an_error_that_names_line_and_field(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(write_lines(tmp_path / "t.jsonl", *lines))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl cannot be read: No such file"):
        read_trace(tmp_path / "gone.jsonl")
    (tmp_path / "t").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(tmp_path / "t")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(trace_of("a"), tmp_path / "no" / "t")


# --- loads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WORKLOADS)
def test_equal_seeds_give_equal_files_that_can_be_read(kind, tmp_path):
    write_trace(generate(kind, 200, seed=3), tmp_path / "one")
    write_trace(generate(kind, 200, seed=3), tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert read_trace(tmp_path / "one") == generate(kind, 200, seed=3)
    assert generate(kind, 200, seed=4) != generate(kind, 200, seed=3)
    assert generate(kind, 100, seed=3).requests == generate(kind, 200, seed=3).requests[:100]


@pytest.mark.parametrize(("kind", "least", "most"), [("chat", 0.5, 0.95), ("rag", 0.05, 0.6), ("agent", 0.8, 0.995)])
def test_loads_share_as_much_as_such_loads_do(kind, least, most):
    row = Simulation(generate(kind, 400)).unlimited()
    assert least < row.token_hit_rate < most
    assert len({request.tenant for request in generate(kind, 400).requests}) >= 3


def test_prompts_share_chunks_as_far_as_they_begin_alike():
    one = chunk_chain([("system", 10), ("question", 7)], 4)
    assert len(one) == 4
    assert chunk_chain([("system", 10), ("question", 7), ("answer", 3)], 4)[:4] == one
    assert len(chunk_chain([("system", 10), ("question", 7), ("answer", 3)], 4)) == 5
    other = chunk_chain([("system", 10), ("another", 7)], 4)
    assert other[:2] == one[:2]
    assert not set(other[2:]) & set(one)
    assert not set(chunk_chain([("x", 4), ("system", 10)], 4)) & set(one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chats", 1), r"no load 'chats'; did you mean 'chat'\? there are chat, rag, agent"),
        (("chat", 0), "requests=0"),
    ],
)
def test_a_load_that_is_not_there_is_an_error(arguments, message):
    with pytest.raises(ConfigError, match=message):
        generate(*arguments)


# --- replay ---------------------------------------------------------------------------------------------------------


def test_hits_evictions_and_refusals_are_counted():
    row = Simulation(trace_of("ab", "ab", "cd", "ab", "efg")).run("lru", 2 * C)
    assert (row.requests, row.tokens, row.bytes) == (5, 44, 11 * C)
    assert (row.hit_tokens, row.hit_bytes) == (8, 2 * C)  # the second "ab" only
    assert (row.evictions, row.evicted_bytes) == (6, 6 * C)
    assert row.refused == 1  # "efg" has no room beside "e" and "ef"
    assert row.peak_bytes == 2 * C
    assert row.token_hit_rate == 8 / 44


def test_tokens_behind_the_last_chunk_are_never_hits():
    trace = Trace(4, (Request(0, 6, ("a",)), Request(1, 6, ("a",))), 2)
    row = Simulation(trace).unlimited()
    assert (row.token_hit_rate, row.byte_hit_rate) == (4 / 12, 1 / 2)


def test_recorded_sizes_count_and_the_option_is_for_the_rest():
    requests = (Request(0, 8, ("a", "b"), "", (3, 5)), Request(1, 4, ("a",)), Request(2, 4, ("c",)))
    simulation = Simulation(Trace(4, requests, 2), bytes_per_token=10)
    assert simulation.unique_bytes == 3 + 5 + 40
    row = simulation.unlimited()
    assert (row.bytes, row.hit_bytes) == (3 + 5 + 3 + 40, 3)


def test_a_tenant_above_its_quota_loses_its_chunks_first():
    trace = trace_of("a", "b", "x", "y", "a", "b", tenants=["u", "u", "batch", "batch", "u", "u"])
    assert Simulation(trace).run("lru", 3 * C).hit_tokens == 0
    assert Simulation(trace).run("lru", 3 * C, quotas={"batch": 0}).hit_tokens == 8


def test_chunks_expire_between_requests():
    trace = trace_of("a", "b", "c", "d", "a")
    assert Simulation(trace).run("ttl", 100 * C, options={"ttl_s": 4.5}).hit_tokens == 4
    row = Simulation(trace).run("ttl", 100 * C, options={"ttl_s": 3.5})
    assert (row.hit_tokens, row.evictions) == (0, 1)


def test_the_watermark_keeps_room_free():
    trace = trace_of(*"abcdefghij")
    row = Simulation(trace).run("lru", 10 * C, watermark=0.5)
    assert row.peak_bytes <= 5 * C
    assert row.evictions > 0


def test_a_capacity_below_one_chunk_is_an_error():
    with pytest.raises(ConfigError, match="capacity of 7 bytes is below one chunk, which has up to 8"):
        Simulation(trace_of("a")).run("lru", C - 1)


def lru_hits(trace, capacity):
    """Count the hits of LRU over chains, with a list of keys, the oldest first."""
    order, hits = [], 0
    for request in trace.requests:
        keys = request.chunks
        hits += sum(1 for _ in itertools.takewhile(order.__contains__, keys))
        for n, key in enumerate(keys):
            if key in order:
                order.remove(key)
            elif len(order) == capacity:
                ends = [k for k in order if not any(o != k and o.startswith(k) for o in order) and k not in keys[:n]]
                if not ends:
                    break
                order.remove(ends[0])
            order.append(key)
    return hits


@given(PROMPTS, st.integers(1, 8))
def test_lru_has_the_hits_of_a_list_that_is_searched(prompts, capacity):
    trace = trace_of(*prompts)
    assert Simulation(trace).run("lru", capacity * C).hit_tokens == 4 * lru_hits(trace, capacity)


@given(PROMPTS, st.integers(1, 8), st.sampled_from(BUILT_IN))
def test_no_policy_beats_the_optimum_and_none_exceeds_the_capacity(prompts, capacity, policy):
    simulation = Simulation(trace_of(*prompts))
    row, optimum, unlimited = (
        simulation.run(policy, capacity * C),
        simulation.optimum(capacity * C),
        simulation.unlimited(),
    )
    assert row.hit_tokens <= optimum.hit_tokens <= unlimited.hit_tokens
    assert max(row.peak_bytes, optimum.peak_bytes) <= capacity * C
    assert unlimited.peak_bytes == simulation.unique_bytes
    if capacity * C >= simulation.unique_bytes:
        assert row.hit_tokens == unlimited.hit_tokens
        assert row.evictions == row.refused == 0


def best_hits(trace, capacity):
    """Try everything: after each request, keep any chunks of those that are there and those that it asked for."""
    best = {frozenset(): 0}
    for request in trace.requests:
        following = {}
        for kept, hits in best.items():
            hits += sum(1 for _ in itertools.takewhile(kept.__contains__, request.chunks))
            there = kept.union(request.chunks)
            for some in itertools.combinations(sorted(there), min(capacity, len(there))):
                following[frozenset(some)] = max(hits, following.get(frozenset(some), 0))
        best = following
    return max(best.values())


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=60)
def test_the_optimum_is_the_best_of_everything_that_can_be_kept(prompts, capacity):
    trace = trace_of(*prompts)
    assert Simulation(trace).optimum(capacity * C).hit_tokens == 4 * best_hits(trace, capacity)


# --- the command ----------------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


@pytest.fixture
def chat(tmp_path):
    write_trace(generate("chat", 60), tmp_path / "chat.jsonl")
    return tmp_path / "chat.jsonl"


def test_the_table_has_a_row_for_each_policy_and_capacity(chat):
    done = run(chat, "--policy", "lru,arc", "--capacity", "1GiB,2GiB")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()[1:8]]
    assert [(row[0], row[1]) for row in rows] == [
        *((name, size) for size in ("1.0", "2.0") for name in ("lru", "arc", "optimum")),
        ("unlimited", "-"),
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_object_has_what_the_library_says(chat):
    done = run(chat, "--policy", "lfu", "--capacity", "1GiB", "--bytes-per-token", "65536", "--json")
    report = json.loads(done.stdout)
    row = Simulation(read_trace(chat), bytes_per_token=65536).run("lfu", 1 << 30)
    assert report["bytes_per_token"] == 65536
    assert report["rows"][0]["hit_tokens"] == row.hit_tokens
    assert report["rows"][0]["token_hit_rate"] == row.token_hit_rate
    assert [r["policy"] for r in report["rows"]] == ["lfu", "optimum", "unlimited"]
    page = PAGE.read_text("utf-8")
    assert all(f"`{key}`" in page for key in report)
    fields = re.search(r"`\{(policy, .*?)\}`", page)
    assert fields is not None
    assert fields[1].split(", ") == list(report["rows"][0])


def test_quota_watermark_and_ttl_reach_the_replay(chat):
    def hits(*arguments):
        report = json.loads(run(chat, "--capacity", "1GiB", "--json", *arguments).stdout)
        return report["rows"][0]

    trace = Simulation(read_trace(chat))
    assert (
        hits("--quota", "team-0=0.1GiB")["hit_tokens"]
        == trace.run("lru", 1 << 30, quotas={"team-0": int(0.1 * 2**30)}).hit_tokens
    )
    assert hits("--watermark", "0.5")["peak_bytes"] == trace.run("lru", 1 << 30, watermark=0.5).peak_bytes
    assert (
        hits("--policy", "ttl", "--ttl", "1")["evictions"]
        == trace.run("ttl", 1 << 30, options={"ttl_s": 1.0}).evictions
    )


def test_a_trace_is_generated(tmp_path):
    out = tmp_path / "rag.jsonl"
    done = run("--generate", "rag", "--out", out, "--requests", "50", "--seed", "7", "--json")
    assert json.loads(done.stdout)["requests"] == 50
    assert read_trace(out) == generate("rag", 50, seed=7)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_drawn(chat, suffix):
    path = chat.with_suffix(suffix)
    assert run(chat, "--policy", "lru,arc", "--capacity", "1GiB,2GiB", "--plot", path).exit_code == 0
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to replay"),
        (["TRACE", "--generate", "chat", "--out", "OUT"], "give one of the two"),
        (["--generate", "chat"], "needs the file to write"),
        (["--generate", "chatt", "--out", "OUT"], "did you mean 'chat'"),
        (["TRACE", "--out", "OUT"], "is for --generate"),
        (["TRACE", "--policy", "lru,acr"], "no policy 'acr'; did you mean 'arc'"),
        (["TRACE", "--capacity", "big"], "--capacity 'big' is not a size"),
        (["TRACE", "--capacity", "0"], "less than one byte"),
        (["TRACE", "--capacity", "1MiB"], "below one chunk"),
        (["TRACE", "--quota", "team"], "write TENANT=SIZE"),
        (["TRACE", "--quota", "a=x"], "is not a size"),
        (["TRACE", "--quota", "a=1", "--quota", "a=2"], "has a quota already"),
        (["TRACE", "--watermark", "2"], "watermark 2"),
        (["TRACE", "--policy", "ttl", "--ttl", "-1"], "is no time to live"),
        (["GONE"], "cannot be read"),
        pytest.param(
            ["TRACE", "--plot", "GONE/x.png"],
            "no such directory",
            marks=pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib"),
        ),
    ],
)
def test_a_wrong_use_is_one_message_and_writes_nothing(chat, arguments, message):
    before = sorted(chat.parent.iterdir())
    places = {"TRACE": str(chat), "OUT": str(chat.parent / "out"), "GONE": str(chat.parent / "gone")}
    done = run(*[re.sub("TRACE|OUT|GONE", lambda m: places[m[0]], a) for a in arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert sorted(chat.parent.iterdir()) == before


def test_a_picture_without_matplotlib_names_the_extra(chat, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    done = run(chat, "--plot", chat.parent / "x.png")
    assert done.exit_code == 2
    assert "kvcore[eval]" in done.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("1.5KiB", 1536),
        ("2MB", 2_000_000),
        ("1g", 10**9),
        ("7 B", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_read_as_people_write_them(chat, text, nbytes):
    report = json.loads(
        run(chat, "--bytes-per-token", "1", "--capacity", "1GiB", "--quota", f"t={text}", "--json").stdout
    )
    assert report["quotas"] == {"t": nbytes}


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ kvcore (simulate .*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, done.output


def test_the_trace_of_the_page_is_read(tmp_path):
    lines = re.findall(r"^```json\n(.*?)\n```$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(lines) == 2
    trace = read_trace(write_lines(tmp_path / "t.jsonl", *lines))
    assert trace.requests == (Request(0.25, 700, ("9f31", "c04e"), "team-0"),)
