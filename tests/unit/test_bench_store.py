"""`kvcore bench --suite store`: what is measured, against what, and that no figure is given of what was not done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcore.bench import cases, store, store_cases
from kvcore.bench.data import KV, made_up_kv
from kvcore.bench.store import BATCH, SINGLES, Latency, StoreCase, aims, measure_store, measure_tasks
from kvcore.bench.store_cases import Bench
from kvcore.bench.store_limits import NO_LIMIT, limits_of
from kvcore.cli import app, bench_store
from kvcore.errors import KVCoreError, StoreError
from kvcore.keys import StoreKey
from kvcore.ops import open_backend
from kvcore.tiers.stores import FsStore, MemoryStore, open_store


@pytest.fixture
def kv(tmp_path: Path) -> KV:
    return made_up_kv(tmp_path / "kv.npy", layers=2, heads=2, tokens=32, width=32)


@pytest.fixture
def bench(kv: KV, tmp_path: Path) -> Iterator[Bench]:
    with Bench(open_backend("cpu_ref"), kv, tmp_path) as one:
        yield one
    assert one.pool.live_leases == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the calls of a case move."""
    now = [0.0]
    monkeypatch.setattr(store.time, "perf_counter", lambda: now[0])
    return now


class FakePeer:
    """Takes 5 ms, and cannot do what is called ``impossible``."""

    def seconds(self, request: dict[str, Any], loops: int) -> float:
        if request["what"] == "impossible":
            raise KVCoreError("no such thing")
        return 0.005


def spend(clock: list[float], seconds: float) -> Any:
    def call() -> None:
        clock[0] += seconds

    return call


def test_what_goes_before_is_not_timed(clock: list[float]) -> None:
    hour = spend(clock, 3600)
    case = StoreCase(
        "p", 1_000_000, spend(clock, 0.001), spend(clock, 0.001), batch=spend(clock, 0.004), before=hour,
        roofline_before=hour,
    )  # fmt: skip
    (row,) = measure_store([case], None, 2)
    assert row.kvcore_gbps == row.roofline_gbps == pytest.approx(1)
    assert row.batch_gbps == pytest.approx(2)


def test_percentiles_are_calls_that_were_made() -> None:
    seconds = [number / 1000 for number in range(100, 0, -1)]
    assert Latency.of(seconds) == Latency(50.0, 95.0, 99.0, 100)
    assert Latency.of([0.002]) == Latency(2.0, 2.0, 2.0, 1)
    assert Latency.of([0.001, 0.003]) == Latency(1.0, 3.0, 3.0, 2)


def test_rates_ratios_and_aims_are_those_of_the_samples(clock: list[float]) -> None:
    case = StoreCase(
        "p", 10_000_000, spend(clock, 0.010), spend(clock, 0.005), {"what": "w"}, batch=spend(clock, 0.040),
        size_ratio=2.0, limit="memcpy", aim=0.5, note="said",
    )  # fmt: skip
    (row,) = measure_store([case], FakePeer(), 3)  # type: ignore[arg-type]
    assert (row.kvcore_gbps, row.peer_gbps, row.roofline_gbps) == (1.0, 2.0, 2.0)
    assert (row.ratio_peer, row.ratio_roofline, row.size_ratio) == (0.5, 0.5, 2.0)
    assert row.single == Latency(10.0, 10.0, 10.0, 3 * SINGLES)
    assert row.batch == Latency(40.0, 40.0, 40.0, 3)
    assert row.batch_gbps == BATCH * 0.010 / 0.040
    assert (row.met, row.note) == (True, "said")
    (alone,) = measure_store([case], None, 1)
    assert alone.note == ""
    assert row.to_dict()["single"] == {"p50_ms": 10.0, "p95_ms": 10.0, "p99_ms": 10.0, "samples": 12}


@pytest.mark.parametrize(("took", "met"), [(0.0099, True), (0.0101, False)])
def test_an_aim_is_met_or_missed(clock: list[float], took: float, met: bool) -> None:
    case = StoreCase("p", 1000, spend(clock, took), spend(clock, 0.005), limit="memcpy", aim=0.5)
    (row,) = measure_store([case], None, 2)
    (aim,) = aims([row], [])
    assert (aim["path"], aim["what"], aim["aim"], aim["met"]) == ("p", "of memcpy", 0.5, met)


def test_without_a_roofline_there_is_no_aim_and_what_the_peer_cannot_do_is_a_note(clock: list[float]) -> None:
    case = StoreCase("p", 1000, spend(clock, 0.001), None, {"what": "impossible"}, aim=0.5)
    (row,) = measure_store([case], FakePeer(), 2)  # type: ignore[arg-type]
    assert row.met is row.peer_gbps is row.ratio_peer is row.batch is row.batch_gbps is None
    assert "no such thing" in row.note
    assert aims([row], []) == []


def test_every_case_does_its_work_and_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    found: dict[str, StoreCase] = {}
    for case in store_cases.store_cases(bench, ()):
        assert case.path not in found
        found[case.path] = case
        for before, call in (
            (case.before, case.call), (case.roofline_before, case.roofline), (case.before, case.batch),
        ):  # fmt: skip
            for step in (before, call):
                if step is not None:
                    step()
    serdes = ("raw", "fp8", "kvs1", "int4", "aesgcm")
    both = [f"{label} {verb} {name}" for label in ("memory", "fs") for name in serdes for verb in ("put", "get")]
    assert {*both, "memory put", "memory get", "fs put", "fs get", "fs sync=0 put raw"} <= set(found)
    assert {path: case.aim for path, case in found.items() if case.aim} == {
        "memory put": 0.8, "memory get": 0.8, "memory put raw": 0.6, "memory get raw": 0.6, "fs get": 0.8,
        "aesgcm step encrypt": 0.9, "aesgcm step decrypt": 0.9,
    }  # fmt: skip
    assert found["memory put raw"].size_ratio == pytest.approx(1, abs=0.1)
    assert found["memory put fp8"].size_ratio == pytest.approx(2, abs=0.3)
    assert {path for path, case in found.items() if case.peer} == {
        f"{name} {verb}" for name in ("fp8", "aesgcm") for verb in ("serialize", "deserialize")
    } | {f"{label} {verb} raw" for label in ("fs", "fs sync=0") for verb in ("put", "get")}
    for folder in ("store", "unsynced"):
        with FsStore(tmp_path / folder) as left:
            assert list(left.list()) == []
    assert not list(tmp_path.glob("*.bin"))


def test_a_store_of_the_users_keeps_what_was_there_and_nothing_else(bench: Bench, tmp_path: Path) -> None:
    key, uri = StoreKey(b"n" * 32, b"d" * 32), f"fs:{tmp_path / 'mine'}"
    with open_store(uri) as mine:
        mine.put(key, b"frame")
    paths = []
    for case in store_cases.store_cases(bench, [uri, "memory:", "memory:?capacity=1MiB"]):
        case.call()
        paths.append(case.path)
    with open_store(uri) as mine:
        assert list(mine.list()) == [key]
    assert {"fs get raw", "memory get raw", "memory 2 get raw"} <= set(paths)
    assert not any("sync=0" in path for path in paths)


def test_what_was_put_comes_back(bench: Bench) -> None:
    wanted = bytes(bench.sources[0].view())
    for case in store_cases.store_cases(bench, ["memory:"]):
        bench.targets[0].bytes()[:] = 0
        case.call()
        if case.path in ("raw deserialize", "memory get raw", "memory get aesgcm"):
            assert bytes(bench.targets[0].view()) == wanted


def test_without_the_library_encryption_is_left_out_and_that_is_said(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_cases.importlib.util, "find_spec", lambda name: None)
    assert "aesgcm" not in bench.serdes()
    assert bench.left_out == ['aesgcm: needs cryptography: pip install "kvcore[crypto]"']


class Lossy(MemoryStore):
    """Takes everything, keeps nothing."""

    def get_into(self, key: Any, out: memoryview) -> int | None:
        return None

    def stat(self, key: Any) -> None:
        return None


class Full(MemoryStore):
    """Has no room."""

    def put(self, key: Any, frame: Any) -> int:
        raise StoreError(28, "no room")


@pytest.mark.parametrize(("kind", "why"), [(Lossy, "is not there"), (Full, "no room")])
def test_no_figure_is_given_of_what_was_not_done(
    kind: type[MemoryStore], why: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_cases, "open_store", lambda uri: kind())

    def run_all() -> None:
        for case in store_cases.store_cases(bench, ["memory:"]):
            case.call()

    with pytest.raises(KVCoreError, match=why):
        run_all()


def test_a_store_beside_which_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    with ExitStack() as closing, FsStore(tmp_path / "folder" / "store") as files:
        (tmp_path / "folder" / f"kvcore-bench-{os.getpid()}.bin").mkdir()  # in the way of the plain file
        with pytest.raises(KVCoreError, match=r"cannot write .*beside the store's directory"):
            limits_of(files, 100, closing)
        closing.pop_all()


@pytest.mark.parametrize(("sync", "name", "syncs"), [(True, "write, fsync", 1), (False, "write", 0)])
def test_files_are_held_against_files_that_are_as_safe(
    sync: bool, name: str, syncs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as closing, FsStore(tmp_path / "store", sync=sync) as files:
        writing, reading = limits_of(files, 100, closing)
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        assert writing.before is not None
        assert writing.call is not None
        writing.before()
        writing.call()
        assert (writing.name, reading.name, len(synced)) == (name, "read", syncs)
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize("uri", ["capped:1MiB:memory:", "fs:{}?direct=1"])
def test_stores_of_which_nothing_can_be_said_are_held_against_nothing(uri: str, tmp_path: Path) -> None:
    with ExitStack() as closing, open_store(uri.format(tmp_path / "store")) as one:
        if isinstance(one, FsStore) and not one.direct:
            pytest.skip(one.notes[0])
        assert limits_of(one, 100, closing) == (NO_LIMIT, NO_LIMIT)
    assert not list(tmp_path.glob("*.bin"))


def test_tasks_are_timed_beyond_their_work() -> None:
    rows = measure_tasks(1)
    assert [row["path"] for row in rows] == ["serde task", "serde task, 64 under way", "store task"]
    for row in rows:
        assert 0 < row["us"] <= row["p99_us"]
        assert row["met"] == (row["us"] < 50)


@pytest.fixture
def unpinned(kv: KV, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command run in this process: it would pin it to a core, and measure for a minute."""
    monkeypatch.setenv("KVCORE_CPU_THREADS", "1")  # which the command sets too; this restores it
    monkeypatch.setattr(cases, "pinned", lambda: None)
    monkeypatch.setattr(bench_store, "made_up", lambda folder: kv)


@pytest.mark.usefixtures("unpinned")
def test_the_command_prints_one_object_or_tables(tmp_path: Path) -> None:
    picture = tmp_path / "bars.png"
    arguments = ["bench", "--suite", "store", "--backend", "cpu_ref", "--repeats", "1", "--store", "memory:"]
    done = CliRunner().invoke(app, [*arguments, "--json", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["suite"] == "store"
    assert report["left_out"] == []
    assert report["object_bytes"] == 2 * 2 * 32 * 2 * 32 * 2
    assert {"raw serialize", "memory put", "memory get kvs1"} <= {row["path"] for row in report["rows"]}
    assert all(row["single"]["samples"] == SINGLES for row in report["rows"])
    assert {aim["path"] for aim in report["aims"]} >= {"memory put", "memory get raw", "serde task"}
    assert picture.stat().st_size > 1000
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "memory get raw: " in done.output
    assert done.output.count("aim >= 0.6: ") == 2
    assert done.output.count("aim < 50: ") == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--suite", "copy", "--store", "memory:"], "--suite copy uses no store"),
        (["--suite", "copy", "--lengths", "512", "--users", "2"], "it takes no --lengths and no --users"),
        (["--suite", "ttft", "--lengths", ""], "--lengths '' is not numbers of tokens"),
        (["--suite", "store", "--store", "nowhere:"], "nowhere"),
        (["--suite", "store", "--store", "fs:/proc/version/x"], "/proc/version"),
    ],
)
@pytest.mark.usefixtures("unpinned")
def test_what_cannot_be_is_refused_before_anything_runs(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr(store, "measure_tasks", never)
    done = CliRunner().invoke(app, ["bench", *arguments], env={**os.environ, "COLUMNS": "160"})
    assert done.exit_code in (1, 2), done.output
    assert complaint in done.output
