"""A store and a serde are a store of memory objects: batches, outcomes by key, and nothing that leaks."""

import select
import threading

import numpy as np
import pytest

from kvcore.errors import (
    CorruptFrameError,
    KVCoreError,
    LeaseError,
    OutOfMemoryError,
    QuantizationError,
    StoreError,
)
from kvcore.keys import StoreKey
from kvcore.layout import Layout
from kvcore.memory import BufferPool, LayoutDesc, align_up
from kvcore.serde.contract import Deserializer
from kvcore.serde.frames import FrameDeserializer, FrameSerializer
from kvcore.serde.processor import AsyncSerdeProcessor
from kvcore.tiers.serde_store import SerdeStore
from kvcore.tiers.stores import MemoryStore

from .objects import DESC, PLAN, chain, filled, holds, raw_serde


@pytest.fixture
def pool():
    pool = BufferPool(1 << 20)
    yield pool
    assert pool.live_leases == 0


@pytest.fixture
def serde():
    with raw_serde() as serde:
        yield serde


@pytest.fixture
def objects():
    return BufferPool(1 << 20)


@pytest.fixture
def store(serde, pool):
    inner = MemoryStore()
    store = SerdeStore(inner, serde, pool, window=2)
    yield store
    store.close()


def test_objects_come_back_to_the_bit(store, objects):
    keys = chain(9)  # more than both windows
    stored = store.put(keys, filled(objects, keys))
    assert all(isinstance(n, int) and n > DESC.nbytes for n in stored)
    assert [store.store.stat(key).nbytes for key in keys] == list(stored)
    back = [objects.allocate([DESC]) for _ in keys]
    assert store.get(keys, back) == (True,) * 9
    assert all(holds(obj, key) for obj, key in zip(back, keys, strict=True))


def test_absent_keys_are_misses_and_leave_the_others_alone(store, objects):
    keys = chain(5)
    store.put(keys[::2], filled(objects, keys[::2]))
    back = [objects.allocate([DESC]) for _ in keys]
    assert store.get(keys, back) == (True, False, True, False, True)
    assert all(holds(back[i], keys[i]) for i in (0, 2, 4))


def test_an_empty_batch_is_done_at_once(store):
    assert store.put([], []) == () == store.get([], [])
    assert store.query_put(store.submit_put([], [])) == ()


def test_a_batch_has_one_layout_and_as_many_keys_as_objects(store, objects):
    keys = chain(2)
    other = LayoutDesc(Layout("LKTHD", L=2, T=3, H=1, D=8), DESC.dtypes)
    mixed = [objects.allocate([DESC]), objects.allocate([other])]
    for call in (store.put, store.get, store.submit_put, store.submit_get):
        with pytest.raises(ValueError, match="one layout, but number 1"):
            call(keys, mixed)
        with pytest.raises(ValueError, match="2 keys and 1 objects"):
            call(keys, mixed[:1])
    assert list(store.store.list()) == []


def test_one_bad_object_in_a_batch_does_not_keep_the_others_out(pool, objects):
    keys = chain(5)
    objs = filled(objects, keys)
    objs[2].bytes().view(np.float32)[3] = np.nan
    with raw_serde("fp8") as serde:
        store = SerdeStore(MemoryStore(), serde, pool, window=2)
        stored = store.put(keys, objs)
        store.close()
    assert isinstance(stored[2], QuantizationError)
    assert {StoreKey.of(key) for i, key in enumerate(keys) if i != 2} == set(store.store.list())


def test_a_corrupt_frame_is_told_moved_aside_and_can_be_stored_again(store, objects):
    keys = chain(3)
    objs = filled(objects, keys)
    store.put(keys, objs)
    frame = bytearray(store.store.get(keys[1]))
    frame[-1] ^= 1
    store.store.put(keys[1], frame)
    got = store.get(keys, [objects.allocate([DESC]) for _ in keys])
    assert (got[0], got[2]) == (True, True)
    assert isinstance(got[1], CorruptFrameError)
    assert not store.store.exists(keys[1])
    assert store.store.stats().quarantined == 1
    store.put(keys[1:2], objs[1:2])
    assert store.get(keys, [objects.allocate([DESC]) for _ in keys]) == (True,) * 3


class Keyless(Deserializer):
    """Has not the key that the frames were sealed with."""

    def deserialize(self, src, dst, key):
        raise CorruptFrameError("no such key here", reason="key")


def test_a_frame_that_only_lacks_its_key_here_stays_for_those_who_have_it(pool, objects):
    keys = chain(1)
    with AsyncSerdeProcessor(FrameSerializer("raw"), Keyless()) as serde:
        store = SerdeStore(MemoryStore(), serde, pool)
        store.put(keys, filled(objects, keys))
        (outcome,) = store.get(keys, [objects.allocate([DESC])])
        store.close()
    assert isinstance(outcome, CorruptFrameError)
    assert store.store.exists(keys[0])


def test_without_room_for_buffers_a_batch_fails_as_a_whole_and_leaks_nothing(serde, objects):
    keys = chain(4)
    objs = filled(objects, keys)
    full = SerdeStore(MemoryStore(), serde, BufferPool(512), window=2)
    with pytest.raises(OutOfMemoryError):
        full.put(keys, objs)
    assert list(full.store.list()) == []
    outcomes = full.query_put(full.submit_put(keys, objs), timeout=None)
    assert [type(outcome) for outcome in outcomes] == [OutOfMemoryError] * 4
    assert full._pool.live_leases == 0
    full.close()


class Broken(MemoryStore):
    """Fails in ways that the contract does not know."""

    def put_batch(self, items):
        raise ZeroDivisionError

    def get_batch_into(self, items):
        raise ZeroDivisionError


def test_a_store_that_breaks_the_contract_leaks_no_buffers(serde, pool, objects):
    keys = chain(6)
    objs = filled(objects, keys)
    store = SerdeStore(Broken(), serde, pool, window=2)
    with pytest.raises(ZeroDivisionError):
        store.put(keys, objs)
    for key in keys:
        store.store.put(key, b"frame")
    outcomes = store.query_get(store.submit_get(keys, objs), timeout=None)
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError] * 6
    store.close()


def test_a_store_that_refuses_one_key_tells_so(pool, serde, objects):
    class Picky(MemoryStore):
        def put(self, key, frame):
            if key is keys[1]:
                raise StoreError(28, "no room")
            return super().put(key, frame)

    keys = chain(3)
    store = SerdeStore(Picky(), serde, pool)
    stored = store.put(keys, filled(objects, keys))
    assert isinstance(stored[1], StoreError)
    assert isinstance(stored[0], int)
    assert isinstance(stored[2], int)
    store.close()


def test_the_descriptor_wakes_who_waits_after_the_answer_is_there(store, objects):
    keys = chain(2)
    task = store.submit_put(keys, filled(objects, keys))
    assert select.select([store.get_put_event_fd()], [], [], 10)[0]
    assert all(isinstance(n, int) for n in store.query_put(task))
    with pytest.raises(LookupError):
        store.query_put(task)
    task = store.submit_get(keys, [objects.allocate([DESC]) for _ in keys])
    assert select.select([store.get_get_event_fd()], [], [], 10)[0]
    assert store.query_get(task) == (True, True)


def test_close_while_busy_waits_for_what_is_under_way(serde, pool, objects):
    entered, go = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def put(self, key, frame):
            entered.set()
            go.wait(10)
            return super().put(key, frame)

    keys = chain(2)
    store = SerdeStore(Slow(), serde, pool)
    task = store.submit_put(keys, filled(objects, keys))
    entered.wait(10)
    threading.Timer(0.05, go.set).start()
    store.close()
    assert len(list(store.store.list())) == 2
    assert all(isinstance(n, int) for n in store.query_put(task))


def test_frames_are_handed_to_a_sink_before_their_buffers_go(store, objects):
    keys = chain(5)
    seen = {}
    store.put(keys, filled(objects, keys), sink=lambda key, frame: seen.update({key: bytes(frame)}))
    assert seen == {key: bytes(store.store.get(key)) for key in keys}
    again = {}
    store.get(keys, [objects.allocate([DESC]) for _ in keys], sink=lambda key, frame: again.update({key: bytes(frame)}))
    assert again == seen


def test_after_close_a_batch_is_refused_and_leaves_no_task(store, objects):
    keys = chain(1)
    objs = filled(objects, keys)
    store.close()
    for call in (store.submit_put, store.submit_get):
        with pytest.raises(KVCoreError, match="closed"):
            call(keys, objs)
    assert len(store._puts) == len(store._gets) == 0


def test_what_is_larger_than_any_frame_is_not_read_and_does_not_keep_the_others_out(store, objects, pool):
    keys = chain(3)
    objs = filled(objects, keys)
    store.put(keys, objs)
    store.store.put(keys[1], bytes(2 * pool.capacity_bytes))
    got = store.get(keys, [objects.allocate([DESC]) for _ in keys])
    assert (got[0], got[2]) == (True, True)
    assert isinstance(got[1], CorruptFrameError)
    assert got[1].reason == "length"
    assert not store.store.exists(keys[1])
    store.put(keys[1:2], objs[1:2])
    assert store.get(keys, [objects.allocate([DESC]) for _ in keys]) == (True,) * 3


def test_frames_of_any_size_use_the_same_buffers(store, objects, pool):
    keys = chain(40)
    for i, key in enumerate(keys):  # no frames, but of as many sizes as those of a codec may have
        store.store.put(key, bytes(100 * i))
    for key in keys:
        (outcome,) = store.get([key], [objects.allocate([DESC])])
        assert isinstance(outcome, CorruptFrameError)
    assert len(pool._idle) <= 4
    assert sum(map(len, pool._idle.values())) <= 4


class Freeing(FrameSerializer):
    """Serialises an object that is given up at that moment, as one whose read took too long."""

    victim = None

    def serialize(self, src, dst, key):
        nbytes = super().serialize(src, dst, key)
        if key.digest == self.victim:
            src.free()
        return nbytes


def test_an_object_that_is_given_up_while_it_is_serialised_is_not_stored(pool, objects):
    keys = chain(3)
    serializer = Freeing("raw")
    serializer.victim = keys[1].digest
    with AsyncSerdeProcessor(serializer, FrameDeserializer()) as serde:
        store = SerdeStore(MemoryStore(), serde, pool)
        stored = store.put(keys, filled(objects, keys))
        store.close()
    assert isinstance(stored[1], LeaseError)
    assert {StoreKey.of(key) for key in (keys[0], keys[2])} == set(store.store.list())


@pytest.mark.parametrize("buffers", [1, 2, 3, 5])
def test_with_room_for_a_few_buffers_a_batch_takes_longer_and_is_done(serde, objects, buffers):
    keys = chain(9)
    size = align_up(serde.estimate_serialized_size(PLAN))
    tight = BufferPool(buffers * size)
    store = SerdeStore(MemoryStore(), serde, tight, window=3)
    assert all(isinstance(n, int) for n in store.put(keys, filled(objects, keys)))
    store.store.delete(keys[4])
    back = [objects.allocate([DESC]) for _ in keys]
    assert store.get(keys, back) == tuple(i != 4 for i in range(9))
    assert all(holds(obj, key) for i, (obj, key) in enumerate(zip(back, keys, strict=True)) if i != 4)
    assert tight.live_leases == 0
    store.close()
