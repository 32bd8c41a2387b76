"""`AsyncStore`: batches of a store without waiting, each answered once, and none left behind."""

import select

import pytest

from kvcore.errors import KVCoreError, StoreError
from kvcore.tiers.stores import MemoryStore
from kvcore.tiers.stores.async_store import AsyncStore
from kvcore.tiers.stores.contract import StoreStat

from .objects import chain


class Failing(MemoryStore):
    """Cannot store one key, and fails as a whole at reads."""

    def put(self, key, frame):
        if bytes(frame) == b"bad":
            raise StoreError(28, "no room")
        return super().put(key, frame)

    def get_batch(self, keys):
        raise ZeroDivisionError


@pytest.fixture
def opened():
    made = []

    def make(store):
        made.append(AsyncStore(store))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_batches_are_answered_key_by_key(opened):
    store, keys = opened(MemoryStore()), chain(3)
    puts, gets, stats = store.event_fds()
    task = store.submit_put([(key, b"frame %d" % i) for i, key in enumerate(keys[:2])])
    assert select.select([puts], [], [], 10)[0]
    assert store.query_put(task) == (7, 7)
    task = store.submit_get(keys)
    assert select.select([gets], [], [], 10)[0]
    found = store.query_get(task)
    assert [None if one is None else bytes(one) for one in found] == [b"frame 0", b"frame 1", None]
    task = store.submit_stat(keys)
    assert select.select([stats], [], [], 10)[0]
    assert store.query_stat(task) == (StoreStat(7), StoreStat(7), None)
    with pytest.raises(LookupError):
        store.query_stat(task)


def test_what_fails_is_the_outcome_of_its_keys(opened):
    store, keys = opened(Failing()), chain(2)
    first, second = store.query_put(store.submit_put([(keys[0], b"good"), (keys[1], b"bad")]), timeout=None)
    assert first == 4
    assert isinstance(second, StoreError)
    outcomes = store.query_get(store.submit_get(keys), timeout=None)
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError] * 2


def test_too_few_outcomes_are_an_error_of_each_key(opened):
    class Short(MemoryStore):
        def stat_batch(self, keys):
            return super().stat_batch(keys)[1:]

    store = opened(Short())
    outcomes = store.query_stat(store.submit_stat(chain(2)), timeout=10)
    assert ["1 results for a task of 2 keys" in str(outcome) for outcome in outcomes] == [True, True]


def test_after_close_batches_are_refused_and_leave_no_task(opened):
    store, keys = opened(MemoryStore()), chain(1)
    store.close()
    for submit, given in ((store.submit_put, [(keys[0], b"")]), (store.submit_get, keys), (store.submit_stat, keys)):
        with pytest.raises(KVCoreError, match="closed"):
            submit(given)
    assert [len(queue) for queue in (store._puts, store._gets, store._stats)] == [0, 0, 0]
