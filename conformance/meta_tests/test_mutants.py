"""The suite catches every mutant, for the right reason, and says how to reproduce it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvcore.hookspecs import op_names
from kvcore_conformance.mutants import MUTANTS, Mutant, judge
from kvcore_conformance.mutants.catalogue import COMPOSITES, Call

MADE = "kvcore_conformance.mutants.made"


def run(source):
    """Run a snippet here; it stands alone, so it needs no names of ours."""
    exec(compile(source, "<snippet>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.key)
def test_the_suite_catches(mutant, score):
    outcome = judge(mutant)
    score[mutant.key] = False
    assert outcome.caught(mutant.op), f"{mutant.title}: {outcome.failed or 'no test failed'}\n{outcome.output[-3000:]}"
    if "ConformanceFailure" in outcome.message:
        assert outcome.source, "the failure came without a snippet"
        with pytest.raises(Exception, match=r"."):
            run(outcome.source)
        run(outcome.source.replace(f"from {MADE} import {mutant.key}", f"from {MADE} import unchanged as {mutant.key}"))
    score[mutant.key] = True


def test_there_are_mutants_of_every_op_and_no_two_are_one():
    assert {mutant.op for mutant in MUTANTS} == {*op_names(), *COMPOSITES, "runtime"}
    assert len({mutant.key for mutant in MUTANTS}) == len(MUTANTS) >= 24


def test_composites_without_a_defect_pass():
    outcome = judge(Mutant("unchanged", "encode_segments", Call.run), "unchanged")
    assert (outcome.failed, outcome.passed > 200) == ("", True), outcome.output[-3000:]


def test_a_snippet_fails_in_a_process_of_its_own_and_only_with_the_defect():
    mutant = next(m for m in MUTANTS if m.key == "quantize_fp8_does_not_saturate")
    source = judge(mutant).source
    broken = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=120)
    assert broken.returncode == 1
    assert "AssertionError" in broken.stderr
    whole = source.replace(f"import {mutant.key}", f"import unchanged as {mutant.key}")
    fine = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=False, timeout=120)
    assert fine.returncode == 0, fine.stderr


@pytest.mark.parametrize("name", ["no_such_mutant", "quantize"])
def test_unknown_mutants_are_refused(name):
    from kvcore_conformance.mutants import made

    with pytest.raises(AttributeError, match="no mutant"):
        getattr(made, name)
