"""The native backend in each of its instruction sets, and the reference to compare it with."""

from __future__ import annotations

import hypothesis
import pytest

import kvcore
import kvcore_cpu
import kvcore_cpu_ref
from kvcore.plugins.discover import Candidate
from kvcore.settings import VARIABLES
from kvcore_cpu.native import choice, library

# The same examples on every run, and no limit of time for one of them.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


def open_alone(module):
    """Open a backend without regard to what else is installed."""
    spec = module.backend()
    answer = spec.probe()
    assert answer.usable, answer.reason
    return kvcore.open_backend(spec.name, fallback="error", found=[Candidate(spec.name, "usable", "", spec, answer)])


@pytest.fixture(scope="session")
def instruction_sets():
    """Return the names of those that this machine has, best first."""
    choice()  # the library is there, and typed
    name = library().dll.kvcore_cpu_isa
    return [text.decode() for rank in range(9) if (text := name(rank)) is not None]


@pytest.fixture(scope="session")
def open_cpu():
    """Return what opens the backend anew, with the settings of that moment."""
    return lambda: open_alone(kvcore_cpu)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Keep the tests free of what the caller's environment says, and of one another's settings."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.fixture(params=["avx2", "scalar"])
def isa(request, monkeypatch, instruction_sets):
    """Return an instruction set of this machine; whatever is opened in the test uses it."""
    if request.param not in instruction_sets:
        pytest.skip(f"this machine has no {request.param}")
    monkeypatch.setenv("KVCORE_CPU_ISA", request.param)
    return request.param


@pytest.fixture
def cpu(isa, open_cpu):
    """Return the backend with its checked ops, in one instruction set after the other."""
    return open_cpu()


@pytest.fixture
def ref():
    """Return the reference."""
    return open_alone(kvcore_cpu_ref)
