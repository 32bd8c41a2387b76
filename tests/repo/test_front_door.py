"""The Makefile, the CI script and the changelog fragments say the same things."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

CI_BUDGET_MINUTES = 90
CI_PROCESSORS = 2
GOOD = {
    "model": "m",
    "prompt_tokens": 1800,
    "hit_tokens": 1792,
    "backend": "cpu_ref",
    "codec": "balanced",
    "cold_ttft_ms": 6000.0,
    "warm_ttft_ms": 300.0,
    "host_ttft_ms": 200.0,
    "speedup": 20.0,
    "tiers": {"host": {"hits": 7}, "disk": {"hits": 7}},
    "raw_bytes": 45,
    "stored_bytes": 10,
    "ratio": 4.5,
    "tokens_identical": True,
    "generated": "text",
}


def rules(root) -> dict[str, tuple[str, list[str]]]:
    """Return target -> (its line of the Makefile, its recipe)."""
    found = {}
    target = ""
    for line in (root / "Makefile").read_text("utf-8").splitlines():
        if line.startswith("\t"):
            found[target][1].append(line)
        elif match := re.match(r"([\w$(){}./%-]+):(?!=)", line):
            target = match[1]
            found[target] = (line, [])
    return found


def test_every_target_is_short_and_explained(root):
    for target, (line, recipe) in rules(root).items():
        if not target.startswith("."):
            assert len(recipe) <= 2, target
            assert " ## " in line or target.startswith("$(") or "%" in target, target


def test_every_explained_target_is_phony_and_listed_by_help(root):
    text = (root / "Makefile").read_text("utf-8").replace("\\\n", " ")
    declared = set(re.search(r"^\.PHONY:(.*)$", text, re.MULTILINE)[1].split())
    explained = {target for target, (line, _) in rules(root).items() if " ## " in line}
    assert declared == explained
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert {line.split()[1] for line in done.stdout.splitlines()} == explained


def test_ci_runs_targets_that_exist_within_its_budget(root):
    script = (root / ".ci" / "run").read_text("utf-8")
    steps = re.findall(r'^ +" ?(\d+)  ([\w-]+)[^"]*"  +# \S', script, re.MULTILINE)
    assert len(steps) == script[script.index("budgets=(") :].split("\n)")[0].count("\n")
    assert {target for _, target in steps} <= set(rules(root))
    required = {"check", "check-kernels", "test", "test-wheels", "test-suite", "test-kernel-mutants", "docs"}
    required |= {
        "conformance",
        "conformance-sanitize",
        "conformance-simulated",
        "conformance-stores",
        "conformance-triton",
    }
    required |= {"conformance-triton", "demo-check"}
    assert required <= {target for _, target in steps}
    assert sum(int(minutes) for minutes, _ in steps) < CI_BUDGET_MINUTES * CI_PROCESSORS


def test_changelog_fragments_are_of_a_known_kind(root, core):
    kinds = {kind["directory"] for kind in core["tool"]["towncrier"]["type"]}
    names = [path.name for path in (root / "changes").iterdir() if path.name != "README.md"]
    pattern = re.compile(rf"(\d+|\+[\w-]+)\.({'|'.join(kinds)})\.md")
    assert [name for name in names if not pattern.fullmatch(name)] == []


@pytest.mark.parametrize(
    ("change", "arguments", "complaint"),
    [
        ({}, [], None),
        ({"tokens_identical": False}, [], None),
        ({"tokens_identical": False, "ratio": 0.99}, ["exact"], "tokens_identical"),
        ({"tokens_identical": 1}, ["exact"], "tokens_identical"),
        ({"ratio": 0.99}, ["exact"], None),
        ({"ratio": 3.9}, [], "ratio 3.9 is under 4"),
        ({"hit_tokens": 1791}, [], "multiple of 256"),
        ({"hit_tokens": 1280}, [], "under 1536"),
        ({"tiers": {"host": {"hits": 7}, "disk": {"hits": 6}}}, [], "not once all chunks"),
        ({"tiers": {"disk": {"hits": 7}}}, [], "not once all chunks"),
        ({"speedup": 4.9}, [], "under 5"),
        ({"hit_tokens": None}, [], "must be numbers"),
    ],
)
def test_the_demos_figures_are_held_against_the_promises(root, change, arguments, complaint):
    given = json.dumps({**GOOD, **change})
    command = [sys.executable, str(root / ".ci" / "check_demo.py"), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (complaint is None)
    assert (complaint or "") in done.stderr


def test_a_demo_that_lacks_a_field_is_found(root):
    given = json.dumps({name: value for name, value in GOOD.items() if name != "ratio"})
    command = [sys.executable, str(root / ".ci" / "check_demo.py")]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ratio" in done.stderr
