"""A writing process is killed at random points: no torn frame is served, nothing acknowledged is lost."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

from kvcore_conformance.stores.crash import KEYS, frame_of, key_of, version_of
from kvcore_conformance.stores.effort import Effort
from kvcore_conformance.stores.space import Space
from kvcore_conformance.stores.targets import Target

PATIENCE = 60.0


def _kill_a_writer(
    target: Target, namespace: bytes, first: int, lines: int, seconds: float
) -> list[tuple[str, int, int]]:
    """Start a writer, kill it `seconds` after it has said some lines, and return all that it said."""
    command = [sys.executable, "-m", "kvcore_conformance.stores.crash", namespace.hex(), str(first)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        with writer.stdin:
            writer.stdin.write(f"{target.uri}\n")
        said = []
        for line in writer.stdout:
            said.append(line)
            if len(said) == lines:
                time.sleep(seconds)
                writer.kill()
        assert writer.wait(PATIENCE) == -9, "the writer ended by itself"
    events = []
    for line in said:
        what, n, version = line.split()
        events.append((what, int(n), int(version)))
    return events


def test_a_killed_writer_leaves_whole_frames(store_target: Target, effort: Effort) -> None:
    if not store_target.persistent:
        pytest.skip("a volatile store dies with its process")
    if store_target.uri is None:
        pytest.skip("another process cannot open this store: its Target has no uri")
    chance = random.Random(store_target.name)
    with Space(store_target) as space:
        namespace = space.namespace()
        keys = [space.key(key_of(namespace, n).digest) for n in range(KEYS)]
        acknowledged: dict[int, int] = {}
        for round_ in range(effort.crashes):
            first = 1 + 1_000_000 * round_
            events = _kill_a_writer(
                store_target, namespace, first, chance.randrange(1, 24), chance.random() ** 2 * 0.05
            )
            begun: dict[int, set[int]] = {}
            for what, n, version in events:
                if what == "begin":
                    begun.setdefault(n, set()).add(version)
                else:
                    acknowledged[n] = version
            store = space.reopen()
            for n, (key, view) in enumerate(zip(keys, store.get_batch(keys), strict=True)):
                if view is None:
                    assert n not in acknowledged, f"round {round_}: a frame that was acknowledged is gone"
                    continue
                assert isinstance(view, memoryview), f"round {round_}: {view!r}"
                seen = version_of(n, view)
                assert seen is not None, f"round {round_}: {view.nbytes} bytes that nobody put there"
                newest = acknowledged.get(n, -1)
                assert seen == newest or seen in {v for v in begun.get(n, ()) if v > newest}
                stat = store.stat(key)
                assert stat is not None
                assert stat.nbytes == view.nbytes
            assert set(space.listed()) == {key for key in keys if store.exists(key)}
            # Every key can be stored again.
            version = first + 999_999
            assert store.put_batch([(key, frame_of(n, version)) for n, key in enumerate(keys)]) == [
                len(frame_of(n, version)) for n in range(KEYS)
            ]
            assert all(view == frame_of(n, version) for n, view in enumerate(store.get_batch(keys)))
            acknowledged = dict.fromkeys(range(KEYS), version)
