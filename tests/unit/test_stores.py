"""The contract of stores, the same for each: written over factories, so that any store can be put to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvcore.engine import Namespace, chunk_keys
from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import FsStore, MemoryStore, Store, StoreKey, StoreStat, open_store

# A store's factory takes an empty folder of its own and may use it or not.
FACTORIES: dict[str, Callable[[Path], Store]] = {
    "fs": FsStore,
    "memory": lambda folder: MemoryStore(),
}


def key(n: int, namespace: int = 0) -> StoreKey:
    return StoreKey(bytes([namespace]) * 32, bytes([n]) * 32)


@pytest.fixture(params=sorted(FACTORIES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = FACTORIES[request.param](tmp_path / "store")
    yield opened
    opened.close()


def test_put_get_stat_delete(store: Store) -> None:
    assert store.get(key(1)) is None
    assert store.stat(key(1)) is None
    assert store.put(key(1), b"frame") == 5
    assert store.get(key(1)) == b"frame"
    assert store.stat(key(1)) == StoreStat(5)
    assert store.exists(key(1))
    assert store.delete(key(1))
    assert not store.delete(key(1))
    assert not store.exists(key(1))
    assert store.get(key(1)) is None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "<u2")])
def test_any_contiguous_buffer_is_a_frame(store: Store, kind: Callable[[bytes], bytes]) -> None:
    assert store.put(key(1), kind(b"abcdef")) == 6
    assert store.get(key(1)) == b"abcdef"


def test_what_is_no_contiguous_buffer_is_refused(store: Store) -> None:
    for frame in ("text", None, memoryview(b"abcdef")[::2]):
        with pytest.raises(ConfigError, match="contiguous"):
            store.put(key(1), frame)  # type: ignore[arg-type]
    assert not store.exists(key(1))


def test_an_empty_frame_is_not_a_miss(store: Store) -> None:
    store.put(key(1), b"")
    assert store.get(key(1)) == b""
    assert store.stat(key(1)) == StoreStat(0)


def test_a_frame_belongs_to_its_reader_and_the_buffer_to_its_writer(store: Store) -> None:
    buffer = bytearray(b"first")
    store.put(key(1), buffer)
    buffer[:] = b"other"
    view = store.get(key(1))
    assert view is not None
    assert view.readonly
    store.put(key(1), b"second")
    store.delete(key(1))
    assert view == b"first"


def test_keys_of_the_engine_are_keys_of_the_store(store: Store) -> None:
    namespace = Namespace("tiny", "r1", chunk_tokens=2)
    chunks = chunk_keys(namespace, [1, 2, 3, 4])
    for chunk in chunks:
        store.put(chunk, chunk.digest)
    assert {found.digest for found in store.list(namespace.digest)} == {chunk.digest for chunk in chunks}
    assert store.get(StoreKey.of(chunks[1])) == chunks[1].digest


def test_namespaces_do_not_meet(store: Store) -> None:
    store.put(key(1, namespace=1), b"one")
    assert store.get(key(1, namespace=2)) is None
    store.put(key(1, namespace=2), b"two")
    assert store.get(key(1, namespace=1)) == b"one"
    assert list(store.list(bytes([2]) * 32)) == [key(1, namespace=2)]
    assert sorted(store.list()) == [key(1, namespace=1), key(1, namespace=2)]


def test_quarantine_makes_room(store: Store) -> None:
    assert not store.quarantine(key(1), "crc")
    store.put(key(1), b"bad")
    assert store.quarantine(key(1), "crc")
    assert store.get(key(1)) is None
    assert list(store.list()) == []
    store.put(key(1), b"good")
    assert store.get(key(1)) == b"good"
    assert store.stats().quarantined == 1


@pytest.mark.parametrize("reason", ["", "../../etc", "Digest", "a" * 33])
def test_a_quarantine_reason_is_one_word(store: Store, reason: str) -> None:
    store.put(key(1), b"bad")
    with pytest.raises(ConfigError, match="reason"):
        store.quarantine(key(1), reason)
    assert store.exists(key(1))


def test_counters(store: Store) -> None:
    store.put(key(1), b"four")
    store.get(key(1))
    store.get(key(2))
    store.delete(key(1))
    store.delete(key(1))
    counted = store.stats()
    store.exists(key(1))
    store.stat(key(1))
    list(store.list())
    assert store.stats() == counted
    assert (counted.puts, counted.hits, counted.misses, counted.deletes, counted.torn) == (1, 1, 1, 1, 0)
    assert (counted.put_bytes, counted.hit_bytes) == (4, 4)


def test_a_closed_store_refuses(store: Store) -> None:
    store.close()
    store.close()
    for call in (
        lambda: store.put(key(1), b""),
        lambda: store.get(key(1)),
        lambda: store.exists(key(1)),
        lambda: store.delete(key(1)),
        lambda: store.quarantine(key(1), "crc"),
        lambda: store.list(),
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


@pytest.mark.parametrize(("namespace", "digest"), [(b"", bytes(32)), (bytes(32), bytes(31)), (bytes(33), bytes(32))])
def test_a_key_has_two_digests_of_32_bytes(namespace: bytes, digest: bytes) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        StoreKey(namespace, digest)


def test_writers_of_one_key_do_not_mix(store: Store) -> None:
    frames = [bytes([n]) * (1000 + 100 * n) for n in range(4)]
    store.put(key(1), frames[0])

    def work(frame: bytes) -> list[bytes]:
        seen = []
        for _ in range(10):
            store.put(key(1), frame)
            view = store.get(key(1))
            assert view is not None
            seen.append(bytes(view))
        return seen

    with ThreadPoolExecutor(len(frames)) as pool:
        seen = [frame for part in pool.map(work, frames) for frame in part]
    assert set(seen) <= set(frames)
    assert store.get(key(1)) in frames
    assert (store.stats().puts, store.stats().hits) == (41, 41)


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of calls, against a dict."""

    factory: Callable[[Path], Store]
    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvcore-test-"))
        self.store = type(self).factory(self.folder / "store")
        self.model: dict[StoreKey, bytes] = {}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(
        target=keys,
        digest=st.binary(min_size=32, max_size=32),
        namespace=st.sampled_from([b"a" * 32, b"b" * 32]),
    )
    def name(self, digest: bytes, namespace: bytes) -> StoreKey:
        return StoreKey(namespace, digest)

    @rule(name=keys, frame=st.binary(max_size=64))
    def put(self, name: StoreKey, frame: bytes) -> None:
        assert self.store.put(name, frame) == len(frame)
        self.model[name] = frame

    @rule(name=keys)
    def get(self, name: StoreKey) -> None:
        assert self.store.get(name) == self.model.get(name)

    @rule(name=keys)
    def look(self, name: StoreKey) -> None:
        expected = self.model.get(name)
        assert self.store.exists(name) == (expected is not None)
        assert self.store.stat(name) == (None if expected is None else StoreStat(len(expected)))

    @rule(name=keys)
    def delete(self, name: StoreKey) -> None:
        assert self.store.delete(name) == (self.model.pop(name, None) is not None)

    @rule(name=keys, reason=st.sampled_from(["crc", "digest"]))
    def quarantine(self, name: StoreKey, reason: str) -> None:
        assert self.store.quarantine(name, reason) == (self.model.pop(name, None) is not None)

    @rule(namespace=st.sampled_from([b"a" * 32, b"b" * 32, b"c" * 32]))
    def list_one(self, namespace: bytes) -> None:
        found = list(self.store.list(namespace))
        assert sorted(found) == sorted(name for name in self.model if name.namespace == namespace)

    @invariant()
    def lists_all(self) -> None:
        assert sorted(self.store.list()) == sorted(self.model)


@pytest.mark.parametrize("kind", sorted(FACTORIES))
def test_any_sequence_of_calls(kind: str) -> None:
    machine = type("Machine", (StoreMachine,), {"factory": staticmethod(FACTORIES[kind])})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=25, deadline=None))


def test_open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_store("memory:"), MemoryStore)
    open_store(f"fs:{tmp_path}/a").put(key(1), b"frame")
    assert open_store("fs:a").get(key(1)) == b"frame"


@pytest.mark.parametrize(
    ("uri", "match"),
    [
        ("fss:/a", "did you mean 'fs'"),
        ("memroy:", "did you mean 'memory'"),
        ("FS:/a", "did you mean 'fs'"),
        ("gopher://x", "fs:DIRECTORY"),
        ("/var/cache", "write 'fs:/var/cache'"),
        ("", "not the URI"),
        ("fs:", "needs a directory"),
        ("memory:5GB", "no path"),
    ],
)
def test_uris_that_open_nothing(uri: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        open_store(uri)
