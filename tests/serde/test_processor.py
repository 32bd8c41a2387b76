"""`AsyncSerdeProcessor`: batches that nobody waits for, an answer for each object, and two descriptors that wake."""

from __future__ import annotations

import os
import select
import threading

import pytest

from kvcore.completion import TaskError
from kvcore.errors import ConfigError, CorruptFrameError, KVCoreError, LayoutError, LeaseError
from kvcore.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    FrameDeserializer,
    FrameSerializer,
    MultiDeserializer,
    MultiSerializer,
    Serializer,
    serialized_layout_desc,
)

from .objects import key, kv_desc


class Copying(Serializer):
    """Writes the bytes of its source; what `hooks` has for a key is called before."""

    def __init__(self):
        self.hooks = {}
        self.order = []

    def serialize(self, src, dst, key):
        self.order.append(("store", key.digest[-1]))
        self.hooks.get(key.digest[-1], lambda: None)()
        dst.view()[: src.used_size] = src.view()
        return src.used_size

    def estimate_serialized_size(self, layout):
        return layout.nbytes + 10


class CopyingBack(Deserializer):
    def __init__(self, order):
        self.order = order

    def deserialize(self, src, dst, key):
        self.order.append(("load", key.digest[-1]))
        dst.view()[:] = src.view()


@pytest.fixture
def copying():
    forth = Copying()
    with AsyncSerdeProcessor(forth, CopyingBack(forth.order)) as processor:
        yield processor


@pytest.fixture
def frames(backend):
    with AsyncSerdeProcessor(FrameSerializer("balanced", backend), FrameDeserializer(backend)) as processor:
        yield processor


def wait(fd: int) -> None:
    assert select.select([fd], [], [], 10)[0], "nothing woke who waited"


def test_batches_go_through_and_back(make, frames):
    srcs = [make(kv_desc(), seed=i, base_position=20 * i) for i in range(5)]
    plan = serialized_layout_desc(srcs[0].plan, frames)
    assert (plan.nbytes, plan.descs) == (frames.estimate_serialized_size(srcs[0].plan), ())
    dsts = [make(plan.nbytes) for _ in srcs]
    keys = [key(i) for i in range(5)]
    sizes = frames.take_serialize_results(frames.submit_serialize(srcs, dsts, keys), timeout=None)
    assert [dst.used_size for dst in dsts] == list(sizes), "narrowed to what was written"
    assert all(size < plan.nbytes for size in sizes)
    backs = [make(kv_desc(), base_position=20 * i) for i in range(5)]
    answers = frames.take_deserialize_results(frames.submit_deserialize(dsts, backs, keys), timeout=None)
    assert answers == (None,) * 5
    assert all(bytes(back.view()) != b"\xa5" * back.nbytes for back in backs)


def test_one_bad_object_does_not_keep_the_others_of_its_batch(make, frames):
    """And a variable-length codec reloads what it wrote, not what was estimated."""
    srcs = [make(kv_desc(), seed=i) for i in range(4)]
    srcs[1].rows().array("K", 0)[0, 3, 0, 0] = float("nan")
    dsts = [make(frames.estimate_serialized_size(srcs[0].plan)) for _ in srcs]
    dsts[2] = make(40)
    keys = [key(i) for i in range(4)]
    first, nan, small, last = frames.take_serialize_results(frames.submit_serialize(srcs, dsts, keys), timeout=None)
    assert isinstance(first, int)
    assert isinstance(last, int)
    assert "part K" in str(nan)
    assert isinstance(small, LayoutError)
    backs = [make(kv_desc()) for _ in srcs]
    task = frames.submit_deserialize([dsts[0], dsts[1], dsts[0], dsts[3]], backs, [key(0), key(1), key(2), key(3)])
    good, unwritten, foreign, also_good = frames.take_deserialize_results(task, timeout=None)
    assert (good, also_good) == (None, None)
    assert isinstance(unwritten, CorruptFrameError)
    assert isinstance(foreign, CorruptFrameError)
    assert foreign.reason == "identity"
    task = frames.submit_deserialize(dsts[:2], backs[:2], keys[:2])
    wait(frames.get_deserialize_event_fd())
    while (answer := frames.query_deserialize_result(task)) is None:
        pass
    assert answer is False


def test_the_final_answer_is_given_once(make, copying):
    gate = threading.Event()
    copying.serializer.hooks[1] = gate.wait
    task = copying.submit_serialize([make(8)], [make(20)], [key(1)])
    assert copying.query_serialize_result(task) is None
    assert copying.take_serialize_results(task, timeout=0.01) is None
    for other in (copying.query_deserialize_result, copying.take_deserialize_results):
        with pytest.raises(TaskError):
            other(task)
    gate.set()
    wait(copying.get_serialize_event_fd())
    assert copying.query_serialize_result(task) is True
    for spent in (copying.query_serialize_result, copying.take_serialize_results):
        with pytest.raises(TaskError):
            spent(task)
    with pytest.raises(TaskError):
        copying.query_serialize_result(10**9)


def test_each_direction_wakes_by_a_descriptor_of_its_own(make, copying):
    fds = copying.get_serialize_event_fd(), copying.get_deserialize_event_fd()
    assert len(set(fds)) == 2
    for fd in fds:
        assert not os.get_blocking(fd)
        assert not os.get_inheritable(fd)
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    assert poll.poll(0) == []
    src, dst = make(8), make(8)
    store = copying.submit_serialize([src], [make(20)], [key(1)])
    assert [fd for fd, _ in poll.poll(10_000)] == [fds[0]]
    assert copying.query_serialize_result(store) is True, "what woke is there to be taken"
    load = copying.submit_deserialize([src], [dst], [key(1)])
    wait(fds[1])
    assert copying.query_deserialize_result(load) is True


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="there is no eventfd here")
def test_a_descriptor_counts_tasks_not_objects(make, copying):
    tasks = [copying.submit_serialize([make(8)] * 3, [make(20) for _ in range(3)], [key(1)] * 3) for _ in range(4)]
    tasks.append(copying.submit_serialize([], [], []))
    for task in tasks:
        copying.take_serialize_results(task, timeout=None)
    copying._workers.close()  # a task is signalled right after its answer can be taken
    assert os.eventfd_read(copying.get_serialize_event_fd()) == 5
    with pytest.raises(BlockingIOError):
        os.eventfd_read(copying.get_deserialize_event_fd())


def test_loads_overtake_the_rest_of_a_batch_of_stores(make, copying):
    entered, gate = threading.Event(), threading.Event()
    copying.serializer.hooks[1] = lambda: (entered.set(), gate.wait(10))
    store = copying.submit_serialize([make(8)] * 3, [make(20) for _ in range(3)], [key(1), key(2), key(3)])
    assert entered.wait(10)
    load = copying.submit_deserialize([make(8)] * 2, [make(8), make(8)], [key(4), key(5)])
    gate.set()
    copying.take_deserialize_results(load, timeout=None)
    copying.take_serialize_results(store, timeout=None)
    assert copying.serializer.order == [("store", 1), ("load", 4), ("load", 5), ("store", 2), ("store", 3)]


def test_submitting_waits_for_nothing(make, copying):
    gate = threading.Event()
    copying.serializer.hooks[1] = gate.wait
    tasks = [copying.submit_serialize([make(8)], [make(20)], [key(1)]) for _ in range(50)]
    gate.set()
    assert all(copying.take_serialize_results(task, timeout=None) == (8,) for task in tasks)


def test_workers_share_the_objects_of_one_batch(make):
    forth, together = Copying(), threading.Barrier(3)
    forth.hooks = {1: lambda: together.wait(10), 2: lambda: together.wait(10)}
    with AsyncSerdeProcessor(forth, CopyingBack(forth.order), max_workers=2) as processor:
        task = processor.submit_serialize([make(8)] * 2, [make(20), make(20)], [key(1), key(2)])
        together.wait(10)
        assert processor.take_serialize_results(task, timeout=None) == (8, 8)


def test_close_waits_for_what_is_under_way_and_frees_everything(make):
    forth, gate = Copying(), threading.Event()
    forth.hooks[1] = lambda: gate.wait(10)
    processor = AsyncSerdeProcessor(forth, CopyingBack(forth.order), max_workers=2)
    tasks = [processor.submit_serialize([make(8)], [make(20)], [key(number)]) for number in (1, 2, 3)]
    fds = processor.get_serialize_event_fd(), processor.get_deserialize_event_fd()
    threading.Timer(0.05, gate.set).start()
    processor.close()
    processor.close()
    assert len(forth.order) == 3
    assert not [t for t in threading.enumerate() if "Copying" in t.name]
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with pytest.raises(KVCoreError, match="closed and takes no more work"):
        processor.submit_serialize([make(8)], [make(20)], [key(1)])
    assert [processor.query_serialize_result(task) for task in tasks] == [True] * 3


def test_ten_thousand_tasks_leave_no_descriptor_or_thread_behind(make, copying):
    src, dst, before = make(8), make(8), (len(os.listdir("/proc/self/fd")), threading.active_count())
    for _ in range(5):
        tasks = [copying.submit_deserialize([src], [dst], [key(1)]) for _ in range(2000)]
        assert all(copying.take_deserialize_results(task, timeout=None) == (None,) for task in tasks)
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 1
    assert not len(copying._deserialized)


def test_a_batch_that_does_not_fit_together_is_refused_whole(make, copying):
    obj, big = make(8), make(20)
    for call, why in (
        (lambda: copying.submit_serialize([obj], [big], []), "got 1, 1 and 0"),
        (lambda: copying.submit_serialize([obj, obj], [big], [key(1)]), "got 2, 1 and 1"),
        (lambda: copying.submit_serialize([(obj,)], [big], [key(1)]), "takes single objects, not tuple"),
        (lambda: copying.submit_deserialize([(obj,)], [obj], [key(1)]), "the bytes are one memory object, not tuple"),
        (lambda: copying.submit_deserialize([obj], [(obj, None)], [key(1)]), "takes single objects, not tuple"),
    ):
        with pytest.raises(ValueError, match=why):
            call()
    assert copying.serializer.order == []


def test_an_error_that_nobody_foresaw_is_the_answer_of_its_object(make, copying, caplog):
    def leaves():
        raise SystemExit(1)

    copying.serializer.hooks = {1: lambda: 1 / 0, 2: leaves}
    task = copying.submit_serialize([make(8)] * 3, [make(20) for _ in range(3)], [key(1), key(2), key(3)])
    surprise, left, fine = copying.take_serialize_results(task, timeout=None)
    assert isinstance(surprise, ZeroDivisionError)
    assert "SystemExit" in str(left)
    assert fine == 8


def test_an_object_that_was_freed_is_an_error_of_its_own(make, copying):
    stale = make(8)
    stale.free()
    task = copying.submit_serialize([stale, make(8)], [make(20), make(20)], [key(1), key(2)])
    freed, fine = copying.take_serialize_results(task, timeout=None)
    assert isinstance(freed, LeaseError)
    assert fine == 8


class Joining(MultiSerializer):
    group_size = 2

    def serialize(self, src, dst, key):
        data = b"".join(bytes(one.view()) for one in src if one is not None)
        dst.view()[: len(data)] = data
        return len(data)

    def estimate_serialized_size(self, layout):
        return sum(one.nbytes for one in layout if one is not None)


class Parting(MultiDeserializer):
    group_size = 2

    def deserialize(self, src, dst, key):
        at = 0
        for one in dst:
            if one is not None:
                one.view()[:] = src.view()[at : at + one.nbytes]
                at += one.nbytes


def test_groups_go_through_like_single_objects(make):
    with AsyncSerdeProcessor(Joining(), Parting()) as processor:
        assert processor.group_size == 2
        pairs = [(make(3), make(5)), (None, make(7))]
        layouts = tuple(None if one is None else one.plan for one in pairs[1])
        assert processor.estimate_serialized_size(layouts) == 7
        dsts = [make(10), make(10)]
        task = processor.submit_serialize(pairs, dsts, [key(1), key(2)])
        assert processor.take_serialize_results(task, timeout=None) == (8, 7)
        assert dsts[1].used_size == 7
        back = (make(3), make(5))
        for one in back:
            one.bytes()[:] = 0
        task = processor.submit_deserialize([dsts[0]], [back], [key(1)])
        assert processor.take_deserialize_results(task, timeout=None) == (None,)
        assert [bytes(one.view()) for one in back] == [b"\xa5" * 3, b"\xa5" * 5]
        for bad in (make(3), (make(3),), (make(3), None, None)):
            with pytest.raises(ValueError, match="takes groups of 2, not"):
                processor.submit_serialize([bad], [make(10)], [key(1)])


def test_the_two_sides_must_go_together():
    for forth, back in ((Copying(), Parting()), (Joining(), CopyingBack([]))):
        with pytest.raises(ConfigError, match="are no serde"):
            AsyncSerdeProcessor(forth, back)
    with pytest.raises(ConfigError, match="max_workers=0"):
        AsyncSerdeProcessor(Copying(), CopyingBack([]), max_workers=0)


def test_many_threads_submit_and_each_gets_its_own_answers(make, copying):
    wrong = []

    def client(number):
        for size in range(1, 40):
            task = copying.submit_serialize([make(size)], [make(64)], [key(number)])
            if copying.take_serialize_results(task, timeout=None) != (size,):
                wrong.append((number, size))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
