"""The engine in a process of its own, what is measured on it, and the commands: over a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcore.bench.engine import EngineProcess, check_engine_python
from kvcore.bench.engine_prompts import read_document, shared_prompts
from kvcore.bench.ttft import EngineOptions, conversations, measure_ttft, metrics_of
from kvcore.cli import app
from kvcore.errors import ConfigError, KVCoreError

PROMPT = list(range(2, 902))


@pytest.fixture
def engine_python(tmp_path, monkeypatch) -> str:
    """An interpreter that finds the stand-in as `vllm`."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("fake_vllm.py"), folder / "vllm.py")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return sys.executable


@pytest.fixture
def model(tmp_path) -> str:
    """A directory with a tokenizer: each word of a text is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{n}": n for n in range(1, 500)}}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture
def engine(engine_python):
    with EngineProcess(engine_python, "some/model", timeout=60) as running:
        yield running


def test_prompts_are_answered_each_for_itself(engine):
    assert engine.about["version"] == "0.32.0"
    assert engine.about["batched_tokens"] == 4096
    together = engine.generate([PROMPT, PROMPT[::-1]], tokens=3)
    assert [len(one.tokens) for one in together] == [3, 3]
    assert together[0].tokens != together[1].tokens
    assert [one.cached for one in together] == [0, 0]
    one_by_one = engine.generate([PROMPT, PROMPT[::-1]], tokens=3, together=False)
    assert [one.tokens for one in one_by_one] == [one.tokens for one in together]
    assert [one.cached for one in one_by_one] == [768, 768]
    assert engine.forget()
    assert engine.generate([PROMPT], tokens=3)[0].cached == 0


def test_requests_that_are_aborted_say_so(engine):
    got = engine.generate([PROMPT] * 3, tokens=2, abort=[1], abort_after=0.01)
    assert [one.aborted for one in got] == [False, True, False]
    assert got[1].tokens == []


def test_functions_are_called_with_the_worker(engine):
    assert engine.call("operator", "concat", " and more") == ["a worker and more"]


def test_an_engine_that_dies_is_an_error_with_its_log(engine):
    with pytest.raises(KVCoreError, match="ended with 3"):
        engine.generate([[666]], tokens=1)


def test_a_start_that_fails_says_why(engine_python):
    with pytest.raises(KVCoreError, match="ValueError: thirteen sequences bring bad luck"):
        EngineProcess(engine_python, "some/model", max_num_seqs=13)


def test_a_call_that_takes_too_long_ends_the_engine(engine_python):
    engine = EngineProcess(engine_python, "some/model", timeout=5)
    began = time.monotonic()
    with pytest.raises(KVCoreError, match="took more than 5 s"):
        engine.idle(60)
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.killpg(engine.pid, 0)
    engine.kill()


def test_what_the_processes_hold_is_counted(engine):
    usage = engine.usage()
    assert usage.processes == 1
    assert usage.rss > 1 << 20
    assert usage.threads >= 1
    assert usage.descriptors >= 3


def test_killing_it_leaves_nothing(engine):
    os.kill(engine.pid, signal.SIGSTOP)
    engine.kill()
    with pytest.raises(ProcessLookupError):
        os.killpg(engine.pid, 0)


def test_an_environment_without_an_engine_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="make vllm-env"):
        check_engine_python(str(tmp_path / "bin" / "python"))
    with pytest.raises(ConfigError, match="no environment with vllm"):
        check_engine_python(sys.executable)


def test_users_share_what_they_are_told_to(model):
    document = read_document(model, least=5000)
    assert len(document) >= 5000
    prompts = shared_prompts(list(range(9000)), shared=300, own=40, users=5)
    assert {tuple(prompt[:300]) for prompt in prompts} == {tuple(range(300))}
    assert len({tuple(prompt) for prompt in prompts}) == 5
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        read_document("/nowhere")


def test_documents_begin_unlike_one_another():
    asked = conversations(range(20_000), [300, 2000], users=3, repeats=2)
    assert [one.tokens for one in asked] == [300, 300, 2000, 2000]
    assert len({one.prompts[0][0] for one in asked}) == 4
    for one in asked:
        assert len({tuple(prompt[: one.tokens]) for prompt in one.prompts}) == 1
        assert len({tuple(prompt) for prompt in one.prompts}) == 3
    with pytest.raises(ConfigError, match="no chunk"):
        conversations(range(20_000), [256], users=1, repeats=1)
    assert conversations(range(20_000), [256], users=1, repeats=1, chunk_tokens=128)[0].tokens == 256
    with pytest.raises(ConfigError, match="too few"):
        conversations(range(1000), [2000], users=1, repeats=1)


def test_each_engine_is_given_what_it_is_measured_on(engine_python, tmp_path):
    asked = conversations(range(20_000), [300, 1000], users=2, repeats=1)
    options = EngineOptions(engine_python, "some/model", tmp_path)
    said: list[str] = []
    rows, about = measure_ttft(asked, options, said.append)
    assert [(row.tokens, row.hit_tokens, row.identical) for row in rows] == [(300, 256, True), (1000, 1024, True)]
    assert all(None not in row.to_dict().values() for row in rows)
    assert all(row.speedup == round(min(row.plain_ms, row.cold_ms) / row.store_ms, 2) for row in rows)
    assert about["version"] == "0.32.0"
    assert [line for line in said if "start the engine" in line] == [
        f"{what}: start the engine"
        for what in ("without a connector", "kvcore, cold", "kvcore, warm", "ExampleConnector")
    ]


def test_lines_of_a_metrics_page_that_count_hits():
    page = '# HELP x\nkvcore_hit_tokens_total{a="b c"} 3.0\nvllm:prefix_cache_hits_total 1.0\nother_total 2.0\n'
    assert metrics_of(page) == ['kvcore_hit_tokens_total{a="b c"} 3.0', "vllm:prefix_cache_hits_total 1.0"]


def test_the_suite_prints_one_object(engine_python, model, tmp_path):
    plot = tmp_path / "lines.svg"
    arguments = ["bench", "--suite", "ttft", "--engine-python", engine_python, "--model", model, "--lengths", "900,300"]
    done = CliRunner().invoke(app, [*arguments, "--users", "2", "--plot", str(plot), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [row["tokens"] for row in report["rows"]] == [300, 900]
    assert report["engine"] == "vllm 0.32.0"
    assert plot.read_text().lstrip().startswith("<?xml")
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert re.search(r"900 .*768 +yes", done.stdout)
    done = CliRunner().invoke(app, [*arguments, "--chunk-tokens", "128"])
    assert done.exit_code == 0, done.output
    assert re.search(r"900 .*896 +yes", done.stdout)
    assert "chunks of 128 tokens" in done.stdout.replace("\n", " ")


def test_the_demo_is_warm_after_a_restart(engine_python, model):
    arguments = ["vllm-demo", "--engine-python", engine_python, "--model", model, "--lengths", "300,900"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["tokens_identical"]
    assert [row["hit_tokens"] for row in report["rows"]] == [256, 768]
    assert [row["plain_ms"] for row in report["rows"]] == [None, None]
    assert CliRunner().invoke(app, arguments).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "--suite", "ttft", "--backend", "cpu"], "takes no --backend"),
        (["bench", "--suite", "copy", "--engine-python", "x"], "takes no --engine-python"),
        (["bench", "--suite", "ttft", "--engine-python", "/nowhere/python"], "make vllm-env"),
        (["vllm-demo", "--engine-python", "/nowhere/python"], "make vllm-env"),
        (["bench", "--suite", "ttft", "--store", "fs:a", "--store", "fs:b"], "give --store once"),
    ],
)
def test_what_a_command_cannot_do_it_says(arguments, said):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert said in done.stderr
