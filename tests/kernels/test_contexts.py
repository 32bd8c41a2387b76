"""The context in which kernels run on a CPU: collectives are real, order is drawn, and what would hang is named."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvcore.kernels import get_include

WIDTHS = (16, 32, 64)
BLOCKS, THREADS = 3, 128
FLAGS = ("-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ on PATH")


@pytest.fixture(scope="module")
def contexts(tmp_path_factory):
    """Return a function that runs a case of contexts.cpp, under sanitizers, and returns the finished process."""
    program = tmp_path_factory.mktemp("contexts") / "contexts"
    source = Path(__file__).parent / "contexts.cpp"
    subprocess.run(["g++", *FLAGS, *SANITIZERS, "-I", get_include(), source, "-o", program], check=True)

    def run(case, width=32, seed=1):
        environment = {"ASAN_OPTIONS": "detect_stack_use_after_return=0"}
        return subprocess.run([program, case, str(width), str(seed)], capture_output=True, text=True, env=environment)

    return run


def numbers(done):
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def collectives(width):
    """Return what the kernel of that name must give, thread by thread."""
    rows = []
    for block in range(BLOCKS):
        values = [(block * THREADS + t) ** 2 for t in range(THREADS)]
        for t in range(THREADS):
            first = t // width * width
            warp = values[first : first + width]
            ballot = sum(1 << lane for lane, value in enumerate(warp) if value % 3 == 0)
            rows += [sum(warp), ballot, warp[(t - first + 1) % width], values[THREADS - 1 - t]]
    return rows


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_shuffles_ballots_and_shared_memory(contexts, width, seed):
    assert numbers(contexts("collectives", width, seed)) == collectives(width)


def test_the_order_is_drawn_from_the_seed(contexts):
    results = {seed: numbers(contexts("race", seed=seed)) for seed in range(8)}
    assert results[0] == [BLOCKS * THREADS - 1], "seed 0 is the order of numbers"
    assert len(set(map(tuple, results.values()))) > 4
    assert numbers(contexts("race", seed=5)) == results[5]


def test_orders_are_permutations(contexts):
    assert numbers(contexts("order")) == [0]


def test_a_missing_barrier_shows(contexts):
    assert numbers(contexts("missing_barrier")) != list(reversed(range(THREADS)))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("skips_barrier", ["waits at a barrier", "thread 17 has ended", "all threads of the block"]),
        ("skips_ballot", ["waits at a ballot", "thread 17 waits at a barrier", "all lanes of the warp"]),
        ("shuffles_elsewhere", ["waits at a shuffle (64 bits)", "thread 17 waits at a ballot"]),
        ("shuffles_from_nowhere", ["thread 17: shuffle from a lane that is not in the warp"]),
        ("waits_in_flat", ["thread 17: barrier in a kernel that is declared flat"]),
    ],
)
def test_threads_that_part_end_the_process_by_name(contexts, case, width, words):
    done = contexts(case, width)
    assert done.returncode != 0
    assert f"kvcore: kernel {case}, block 1, thread " in done.stderr
    assert [word for word in words if word not in done.stderr] == []


def test_sanitizers_see_through_fibers(contexts):
    assert "heap-buffer-overflow" in contexts("beyond_shared").stderr
    assert "signed integer overflow" in contexts("overflow").stderr


def test_portable_division_and_square_root_are_the_processors_own(contexts):
    tried, wrong = numbers(contexts("portable"))
    assert tried > 2_000_000
    assert wrong == 0
