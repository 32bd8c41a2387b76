"""Each call by itself: what it answers, what it leaves alone, what it counts, what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcore.errors import ConfigError
from kvcore.keys import TempKey
from kvcore.tiers.stores import Store, StoreKey, StoreStat, StoreStats
from kvcore_conformance.stores.space import Space, refused
from kvcore_conformance.stores.targets import Target


class BadKey:
    """What looks like a key and is none."""

    def __init__(self, namespace: bytes, digest: bytes) -> None:
        self.namespace = namespace
        self.digest = digest


def test_what_was_put_is_there_until_it_is_deleted(space: Space, store: Store) -> None:
    key = space.key()
    assert store.get(key) is None
    assert store.stat(key) is None
    assert store.exists(key) is False
    assert store.put(key, b"frame") == 5
    assert store.get(key) == b"frame"
    assert store.stat(key) == StoreStat(5)
    assert store.exists(key) is True
    assert store.delete(key) is True
    assert store.delete(key) is False
    assert store.get(key) is None
    assert store.stat(key) is None
    assert store.exists(key) is False
    assert space.listed() == []


@pytest.mark.parametrize("frame", [b"a longer frame than before", b"short", b""])
def test_a_put_replaces_the_frame(space: Space, store: Store, frame: bytes) -> None:
    key = space.key()
    store.put(key, b"the first frame")
    assert store.get(key) == b"the first frame"
    assert store.put(key, frame) == len(frame)
    assert store.get(key) == frame
    assert store.stat(key) == StoreStat(len(frame))
    assert space.listed() == [key]


def test_an_empty_frame_is_not_a_miss(space: Space, store: Store) -> None:
    key = space.key()
    assert store.put(key, b"") == 0
    assert store.get(key) == b""
    assert store.stat(key) == StoreStat(0)
    assert store.exists(key)
    assert space.listed() == [key]
    assert store.delete(key)


def test_keys_hold_all_byte_values_and_differ_in_every_byte(space: Space, store: Store) -> None:
    digests = [bytes(range(n, n + 32)) for n in range(0, 256, 32)]
    digests += [bytes(32), bytes([255]) * 32, b"\r\n\0*?[]\\/%{}:. ~" * 2]
    first = bytes(range(32))
    for at in range(32):
        changed = bytearray(first)
        changed[at] ^= 1
        digests.append(bytes(changed))
    frames = {space.key(digest): digest for digest in digests}
    for key, frame in frames.items():
        store.put(key, frame)
    for key, frame in frames.items():
        assert store.get(key) == frame
    assert space.listed() == sorted(frames)


def test_namespaces_do_not_meet(space: Space, store: Store) -> None:
    one, two = space.key(7, namespace=1), space.key(7, namespace=2)
    store.put(one, b"one")
    assert store.get(two) is None
    assert not store.delete(two)
    store.put(two, b"two")
    assert store.get(one) == b"one"
    assert list(store.list(one.namespace)) == [one]
    assert list(store.list(two.namespace)) == [two]
    assert list(store.list(space.namespace(3))) == []
    assert space.listed() == sorted([one, two])
    assert store.delete(one)
    assert store.get(two) == b"two"


def test_a_list_gives_each_key_once_and_as_store_keys(space: Space, store: Store) -> None:
    keys = [*space.keys(40), *space.keys(5, namespace=1)]
    for key in keys:
        store.put(key, b"twice")
        store.put(key, b"frame")
    store.delete(keys[0])
    assert space.listed() == sorted(keys[1:])
    found = list(store.list(space.namespace()))
    assert sorted(found) == sorted(keys[1:40])
    assert all(type(key) is StoreKey for key in found)


def test_any_object_with_the_two_digests_is_a_key(space: Space, store: Store) -> None:
    key = space.key()
    other = TempKey(key.namespace, key.digest, tenant="somebody")
    store.put(other, b"frame")
    assert store.get(key) == b"frame"
    assert store.stat(other) == StoreStat(5)
    assert space.listed() == [key]
    assert store.delete(other)


def test_quarantine_makes_the_key_a_miss_that_can_be_stored_again(space: Space, store: Store) -> None:
    key = space.key()
    assert store.quarantine(key, "crc") is False
    for round_ in range(2):  # the second time there is one in quarantine already
        store.put(key, b"bad")
        assert store.quarantine(key, "crc") is True
        assert store.get(key) is None
        assert store.stat(key) is None
        assert space.listed() == []
        assert store.quarantine(key, "crc") is False
        assert store.stats().quarantined == round_ + 1
    store.put(key, b"good")
    assert store.get(key) == b"good"
    assert space.listed() == [key]


@pytest.mark.parametrize("reason", ["", "Digest", "../up", "a b", "a" * 33, "é"])
def test_a_quarantine_reason_is_one_word(space: Space, store: Store, reason: str) -> None:
    key = space.key()
    store.put(key, b"frame")
    with pytest.raises(ConfigError):
        store.quarantine(key, reason)
    assert store.get(key) == b"frame"


@pytest.mark.parametrize("reason", ["a", "digest", "crc-32", "a" * 32])
def test_these_are_words(space: Space, store: Store, reason: str) -> None:
    key = space.key()
    store.put(key, b"frame")
    assert store.quarantine(key, reason)


def test_calls_are_counted(space: Space, store: Store) -> None:
    key, other = space.keys(2)
    before = store.stats()
    assert before == StoreStats()
    store.put(key, b"four")
    store.put(key, b"sixsix")
    store.get(key)
    store.get(other)
    store.delete(key)
    store.delete(key)
    store.put(key, b"")
    store.quarantine(key, "crc")
    store.quarantine(key, "crc")
    assert store.stats() == StoreStats(
        puts=3, hits=1, misses=1, deletes=1, quarantined=1, torn=0, put_bytes=10, hit_bytes=6
    )
    assert before == StoreStats()


def test_looking_has_no_effect_and_is_not_counted(space: Space, store: Store) -> None:
    key, other = space.keys(2)
    store.put(key, b"frame")
    counted = store.stats()
    for _ in range(3):
        store.exists(key)
        store.exists(other)
        store.stat(key)
        store.stat(other)
        store.stat_batch([key, other])
        list(store.list(space.namespace()))
    assert store.stats() == counted
    assert space.listed() == [key]


@pytest.mark.parametrize(
    ("namespace", "digest"),
    [(b"", bytes(32)), (bytes(32), bytes(31)), (bytes(33), bytes(32))],
    ids=["no-namespace", "short-digest", "long-namespace"],
)
def test_a_bad_key_is_refused_before_anything_is_written(
    space: Space, store: Store, namespace: bytes, digest: bytes
) -> None:
    bad = BadKey(namespace, digest)
    space.key()  # of this test's own
    calls: list[Callable[[], object]] = [
        lambda: store.put(bad, b"frame"),
        lambda: store.get(bad),
        lambda: store.stat(bad),
        lambda: store.exists(bad),
        lambda: store.delete(bad),
        lambda: store.quarantine(bad, "crc"),
        lambda: store.get_into(bad, memoryview(bytearray(8))),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="32 bytes"):
            call()
    assert store.stats() == StoreStats()


def test_a_closed_store_refuses_every_call(space: Space, store: Store) -> None:
    key = space.key()
    store.put(key, b"frame")
    counted = store.stats()
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.stat(key),
        lambda: store.exists(key),
        lambda: store.delete(key),
        lambda: store.quarantine(key, "crc"),
        lambda: list(store.list()),
        lambda: list(store.list(key.namespace)),
        lambda: store.get_into(key, memoryview(bytearray(8))),
        lambda: store.put_batch([(key, b"")]),
        lambda: store.get_batch([key]),
        lambda: store.stat_batch([key]),
        lambda: store.delete_batch([key]),
    ]
    for call in calls:
        for error in refused(call):
            assert "closed" in str(error)
    assert store.stats() == counted


def test_a_store_is_a_context(space: Space, store_target: Target) -> None:
    key = space.key()
    with store_target.open() as store:
        store.put(key, b"frame")
        assert store.get(key) == b"frame"
    assert refused(lambda: store.get(key))


def test_closing_keeps_what_is_persistent(space: Space, store: Store, store_target: Target) -> None:
    keys = space.keys(3)
    for key in keys:
        store.put(key, key.digest)
    store.put(keys[0], b"replaced")
    store.delete(keys[1])
    again = space.reopen()
    expected = [b"replaced", None, keys[2].digest] if store_target.persistent else [None, None, None]
    assert [again.get(key) for key in keys] == expected
    assert space.listed() == sorted(key for key, frame in zip(keys, expected, strict=True) if frame is not None)
    assert again.stats().puts == 0


def test_two_open_stores_see_one_another(space: Space, store: Store, store_target: Target) -> None:
    if not store_target.persistent:
        pytest.skip("each opening of a volatile store is a store of its own")
    key = space.key()
    with store_target.open() as other:
        store.put(key, b"first")
        assert other.get(key) == b"first"
        other.put(key, b"second, longer")
        assert store.get(key) == b"second, longer"
        assert store.stat(key) == StoreStat(14)
        assert other.delete(key)
        assert store.get(key) is None
        assert not store.delete(key)


def test_the_name_says_what_it_is_and_no_secret(store: Store, store_target: Target) -> None:
    assert store.name
    assert store.name == store.name.strip()
    for secret in store_target.secrets:
        assert secret not in store.name
        assert secret not in repr(store)
