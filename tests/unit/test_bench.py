"""`kvcore bench`: what it prints, that ratios are ratios, and what happens where the peer cannot do something."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcore.bench import cases
from kvcore.bench.cases import Case, measure
from kvcore.bench.data import made_up_kv, tiles_of
from kvcore.bench.peer import Peer
from kvcore.bench.suites import SUITES
from kvcore.cli import app
from kvcore.errors import KVCoreError
from kvcore.ops import open_backend

ROW = {
    "path", "unit", "kvcore_gbps", "spread", "peer_gbps", "roofline_gbps", "ratio_peer", "ratio_roofline", "note",
}  # fmt: skip


class FakePeer:
    """Answers at a known speed; cannot do what is called ``impossible``."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def seconds(self, request: dict[str, Any], loops: int) -> float:
        if request["what"] == "impossible":
            raise KVCoreError("the peer cannot do impossible: no such thing")
        self.asked.append((request["what"], loops))
        return 0.01


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only `spend` moves."""
    now = [0.0]
    monkeypatch.setattr(cases.time, "perf_counter", lambda: now[0])
    return now


def test_ratios_and_rates_are_those_of_the_samples(ticking: list[float]) -> None:
    def spend(seconds: float) -> Any:
        def call() -> None:
            ticking[0] += seconds

        return call

    case = Case("p", 10_000_000, spend(0.001), spend(0.0005), {"what": "w"})
    (row,) = measure([case], FakePeer(), 5)  # type: ignore[arg-type]
    assert row.kvcore_gbps == pytest.approx(10)
    assert row.peer_gbps == pytest.approx(1)
    assert row.roofline_gbps == pytest.approx(20)
    assert row.ratio_peer == pytest.approx(10)
    assert row.ratio_roofline == pytest.approx(0.5)
    assert (row.spread, row.note) == (pytest.approx(0), "")
    assert set(row.to_dict()) == ROW


def test_what_the_peer_cannot_do_is_a_note_and_no_figure(ticking: list[float]) -> None:
    def call() -> None:
        ticking[0] += 0.001

    (row,) = measure([Case("p", 1000, call, None, {"what": "impossible"})], FakePeer(), 3)  # type: ignore[arg-type]
    assert row.peer_gbps is row.ratio_peer is row.roofline_gbps is None
    assert "no such thing" in row.note


def test_the_peer_is_asked_line_by_line_and_its_death_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    worker = tmp_path / "worker.py"
    worker.write_text(
        textwrap.dedent(
            """
            import json, sys
            for line in sys.stdin:
                request = json.loads(line)
                if request["what"] == "die":
                    break
                print("chatter of a library")
                print(json.dumps({"name": "fake 1", "seconds": 0.5} if request["what"] != "bad" else {"error": "why"}))
                sys.stdout.flush()
            """
        )
    )
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{worker}"\n')
    python.chmod(0o755)
    with Peer(str(python)) as peer:
        assert peer.name == "fake 1"
        assert peer.seconds({"what": "x"}, 3) == 0.5
        with pytest.raises(KVCoreError, match="cannot do bad: why"):
            peer.seconds({"what": "bad"}, 1)
        with pytest.raises(KVCoreError, match="has died"):
            peer.seconds({"what": "die"}, 1)
    with pytest.raises(KVCoreError, match="does not start"):
        Peer(str(tmp_path / "nothing"))


@pytest.mark.parametrize("suite", ["copy", "quant", "entropy", "codec"])
def test_every_case_of_a_suite_runs(suite: str, tmp_path: Path) -> None:
    kv = made_up_kv(tmp_path / "kv.npy", layers=2, heads=1, tokens=768, width=64)
    backend = open_backend("cpu_ref")
    paths = []
    for case in SUITES[suite](backend, kv):
        paths.append(case.path)
        if suite != "quant":  # of whole caches: minutes on the reference
            case.call()
    assert len(paths) == len(set(paths)) >= 6


def test_tiles_are_those_that_the_codec_makes(tmp_path: Path) -> None:
    kv = made_up_kv(tmp_path / "kv.npy", layers=2, heads=2, tokens=300, width=32)
    tiles = tiles_of(open_backend("cpu_ref"), kv, "balanced")
    assert set(tiles) == {"K", "V"}
    for coded in tiles.values():
        assert coded.values.shape == (4, 256, 32)
        assert coded.skip is not None
        assert coded.skip[:, 0].all()
        assert not coded.skip[:, 1:].any()
        assert 0 < (coded.choice.symbols != 128).mean() < 1


def in_a_new_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvcore bench``, which pins its process to a core and sets how many threads it may use."""
    command = [sys.executable, "-m", "kvcore", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    picture = tmp_path / "bars.png"
    arguments = ["--suite", "entropy", "--backend", "cpu_ref", "--model", "none", "--repeats", "1", "--json"]
    done = in_a_new_process(*arguments, "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["suite"] == "entropy"
    assert report["kv"].startswith("made up")
    assert [set(row) for row in report["rows"]] == [ROW] * 6
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--plot", "no/such.png"], "there is no such directory"),
        (["--plot", "bars.doc"], "its ending names no format"),
        (["--plot", "bars"], "its ending names no format"),
        (["--backend", "emu"], "emu has emu memory"),
        (["--suite", "dispatch", "--plot", "bars.png"], "it takes no --plot"),
        (["--suite", "dispatch", "--backend", "cpu", "--peer-python", "p"], "no --backend and no --peer-python"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was run")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCORE_CPU_THREADS", "1")  # which the command sets too; this restores it
    monkeypatch.setattr(cases, "pinned", never)
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2, done.output
    assert complaint in " ".join(done.output.split())


@pytest.mark.skipif(importlib.util.find_spec("lmcache") is not None, reason="LMCache is installed")
@pytest.mark.parametrize("with_torch", [True, False])
def test_a_peer_without_lmcache_is_told_and_ended(with_torch: bool, tmp_path: Path) -> None:
    python, ended = tmp_path / "python", tmp_path / "ended"
    isolated = "" if with_torch else " -S"
    python.write_text(f'#!/bin/sh\n"{sys.executable}"{isolated} "$@"\necho done > "{ended}"\n')
    python.chmod(0o755)
    with pytest.raises(KVCoreError, match=rf"{python} has no LMCache.*{'lmcache' if with_torch else 'torch'}"):
        Peer(str(python))
    assert ended.read_text() == "done\n"
