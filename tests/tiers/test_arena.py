"""The host arena: what is granted, where pieces lie, and what becomes of leases."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore import BufferPool, KVMeta, Layout, LayoutDesc
from kvcore.errors import ConfigError, LayoutError, LeaseError, OutOfMemoryError
from kvcore.memory import ALIGNMENT, MemoryPlan, align_up
from kvcore.pages import HUGEPAGE_BYTES
from kvcore.runtime import HostRuntime, unique_shared_name
from kvcore.tiers.arena import HostArena
from kvcore.tiers.blocks import BlockAllocator, SizeSet
from kvcore.tiers.host_limits import HostLimits, clamp, read_limits

F16 = np.dtype(np.float16)
CHUNK = LayoutDesc(Layout("LKTHD", L=2, T=3, H=1, D=5), {"K": F16, "V": F16})  # 120 B: no multiple of anything
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def an_arena(nbytes=64 * KIB, **options):
    return HostArena(HostRuntime(), nbytes, **{"pinned": False, "limits": HostLimits(), **options})


@pytest.fixture
def arena():
    return an_arena()


# --- the sizes that are free


@given(st.sets(st.integers(1, 70_000)), st.sets(st.integers(1, 70_000)), st.lists(st.integers(0, 70_000)))
def test_the_set_of_sizes_against_a_sorted_list(added, dropped, asked):
    sizes = SizeSet(70_000)
    for number in [*added, *added]:
        sizes.add(number)
    for number in dropped:
        sizes.discard(number)
    left = sorted(added - dropped)
    assert sizes.greatest() == max(left, default=0)
    for number in asked:
        assert sizes.ceiling(number) == next((x for x in left if x >= number), None)


def test_the_best_fit_is_taken_however_many_blocks_are_free():
    blocks = BlockAllocator(1000 * 256)
    sizes = [256 * n for n in (1, 9, 1, 5, 1, 7, 1, 6, 1)]
    offsets = [blocks.take(size) for size in sizes]
    for index in (1, 3, 5, 7):
        blocks.give(offsets[index], sizes[index])
    assert blocks.take(6 * 256) == offsets[7]
    assert blocks.take(6 * 256) == offsets[5]  # 7 is the next best, and leaves one
    assert blocks.take(256) == offsets[5] + 6 * 256


@pytest.mark.parametrize("piece", [(0, 256), (512, 512), (256, 256), (768, 512), (-256, 256)], ids=str)
def test_a_block_that_was_not_taken_is_not_taken_back(piece):
    blocks = BlockAllocator(1024)
    assert [blocks.take(256) for _ in range(3)] == [0, 256, 512]
    blocks.give(0, 256)
    blocks.give(256, 256)
    before = sorted(blocks.free_blocks())
    with pytest.raises(LeaseError, match="was not taken"):
        blocks.give(*piece)
    assert sorted(blocks.free_blocks()) == before
    assert blocks.free_bytes == 768


@pytest.mark.parametrize("nbytes", [0, 255, 300])
def test_a_region_has_whole_units(nbytes):
    with pytest.raises(ValueError, match="whole units of 256 B"):
        BlockAllocator(nbytes)


# --- what the machine grants


@pytest.mark.parametrize(
    ("limits", "options", "granted", "notes"),
    [
        (HostLimits(available=8 * GIB), {"reserve": GIB}, 5 * GIB, []),
        (
            HostLimits(available=4 * GIB),
            {"reserve": GIB},
            3 * GIB,
            ["3 GiB instead of 5 GiB: 4 GiB of RAM available, 1 GiB reserved"],
        ),
        (
            HostLimits(available=GIB),
            {"reserve": 2 * GIB},
            0,
            ["0 B instead of 5 GiB: 1 GiB of RAM available, 2 GiB reserved"],
        ),
        (
            HostLimits(lockable=6 * MIB, memlock=8 * MIB),
            {"locked": True},
            6 * MIB,
            [
                "6 MiB instead of 5 GiB: RLIMIT_MEMLOCK is 8 MiB, of which 6 MiB are left; raise it (ulimit -l, "
                "LimitMEMLOCK=), or do without pinned memory"
            ],
        ),
        (HostLimits(lockable=None, memlock=8 * MIB), {"locked": True}, 5 * GIB, []),  # CAP_IPC_LOCK
        (HostLimits(lockable=6 * MIB, memlock=8 * MIB), {}, 5 * GIB, []),
        (
            HostLimits(shared=64 * MIB),
            {"shared": True},
            64 * MIB,
            ["64 MiB instead of 5 GiB: shared memory has room for 64 MiB"],
        ),
        (HostLimits(available=GIB, hugepages=2560), {"huge": True}, 5 * GIB, []),  # the pool is apart from the RAM
        (
            HostLimits(available=8 * GIB, hugepages=2559),
            {"huge": True},
            5 * GIB,
            [
                "ordinary pages: 2560 pages of 2 MiB are needed, 2559 are free in the 2048kB pool (vm.nr_hugepages)",
            ],
        ),
    ],
    ids=lambda v: str(v)[:60],
)
def test_a_size_is_fitted_to_the_machine(limits, options, granted, notes):
    size, huge, said = clamp(5 * GIB, limits, **options)
    assert (size, said) == (granted, notes)
    assert huge == (options.get("huge", False) and not notes)


def machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_are_read_from_the_system(tmp_path):
    pool = "hugepages/hugepages-2048kB"
    machine(
        tmp_path,
        proc__meminfo="MemTotal:  100 kB\nMemAvailable:      64 kB\n",
        proc__self__status="VmLck:\t      0 kB\nCapEff:\t0000000000004000\n",
    )
    for folder, free, reserved in (("sys/kernel/mm", "9", "2"), ("sys/devices/system/node/node1", "4", None)):
        (tmp_path / folder / pool).mkdir(parents=True)
        (tmp_path / folder / pool / "free_hugepages").write_text(f"{free}\n")
        if reserved is not None:
            (tmp_path / folder / pool / "resv_hugepages").write_text(f"{reserved}\n")
    limits = read_limits(root=tmp_path)
    assert (limits.available, limits.lockable, limits.hugepages) == (64 * KIB, None, 7)
    assert read_limits(1, root=tmp_path).hugepages == 4
    assert read_limits(2, root=tmp_path).hugepages == 0


def test_the_limit_of_a_control_group_counts_with_what_it_could_drop(tmp_path):
    machine(tmp_path, proc__meminfo="MemAvailable: 1000 kB\n", proc__self__cgroup="0::/a/b\n")
    group = tmp_path / "sys/fs/cgroup"
    for folder, limit in ((group / "a/b", "max"), (group / "a", str(500 * KIB)), (group, "max")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{400 * KIB}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {50 * KIB}\n")
    assert read_limits(root=tmp_path).available == 150 * KIB


def test_locked_memory_counts_what_is_locked_already(tmp_path, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 * MIB, 9 * MIB))
    machine(tmp_path, proc__self__status="VmLck:\t   2048 kB\nCapEff:\t0000000000000001\n")
    limits = read_limits(root=tmp_path)
    assert (limits.memlock, limits.lockable) == (8 * MIB, 6 * MIB)


def test_a_machine_that_tells_nothing_limits_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert read_limits(root=tmp_path) == HostLimits()


def test_this_machine_has_memory():
    assert 0 < read_limits().available < 1 << 50


def test_less_is_granted_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        arena = an_arena(MIB, limits=HostLimits(available=300 * KIB), reserve_bytes=50 * KIB)
    assert arena.capacity_bytes == 248 * KIB  # whole pages
    (note,) = arena.notes
    assert note == "250 KiB instead of 1 MiB: 300 KiB of RAM available, 50 KiB reserved"
    assert note in caplog.text
    arena.allocate_bytes(arena.capacity_bytes).free()


def test_too_little_is_refused_with_the_reason():
    limits = HostLimits(lockable=8 * KIB, memlock=64 * KIB)
    with pytest.raises(ConfigError, match=r"needs 16384 B, but gets 8192 B: .*RLIMIT_MEMLOCK is 64 KiB, of"):
        an_arena(MIB, pinned=True, limits=limits, min_bytes=16 * KIB)
    assert an_arena(MIB, pinned=True, limits=limits, obey_memlock=False).capacity_bytes == MIB


@pytest.mark.parametrize(
    "options",
    [{"nbytes": 0}, {"nbytes": -5}, {"reserve_bytes": -1}, {"min_bytes": 0}, {"nbytes": 512, "min_bytes": 513}],
)
def test_sizes_that_make_no_sense(options):
    with pytest.raises(ConfigError, match=r"at least 1 byte|needs 513 B, but gets 512 B: 512 B asked for"):
        an_arena(**options)


def test_huge_pages_are_not_shared_by_name():
    with pytest.raises(ConfigError, match="huge pages cannot be shared by name"):
        an_arena(hugepages=True, shared_name=unique_shared_name())


class GrantingRuntime(HostRuntime):
    """Notes what is asked for, and says what it is told to say."""

    def __init__(self, **answers):
        self.asked = {}
        self.answers = answers

    def alloc_host(self, nbytes, **wishes):
        self.asked = wishes
        buffer = super().alloc_host(nbytes)
        buffer.granted = self.answers
        return buffer


def test_huge_pages_are_taken_where_the_pool_has_them_and_ordinary_ones_elsewhere(caplog):
    runtime = GrantingRuntime(hugepages="yes")
    size = HUGEPAGE_BYTES + 1
    arena = HostArena(runtime, size, pinned=False, hugepages=True, limits=HostLimits(available=MIB, hugepages=2))
    assert runtime.asked["hugepages"] is True
    assert arena.notes == ()
    assert arena.capacity_bytes == align_up(size)
    with caplog.at_level(logging.WARNING):
        arena = HostArena(runtime, size, pinned=False, hugepages=True, limits=HostLimits(hugepages=1))
    assert runtime.asked["hugepages"] is False
    assert arena.notes == (
        "ordinary pages: 2 pages of 2 MiB are needed, 1 are free in the 2048kB pool (vm.nr_hugepages)",
    )
    assert arena.notes[0] in caplog.text
    assert arena.granted["hugepages"].startswith("no: ")


def test_what_the_runtime_did_not_grant_is_noted():
    runtime = GrantingRuntime(pinned="no: mlock: Operation not permitted", numa_node="3")
    arena = HostArena(runtime, KIB, numa_node=3, limits=HostLimits())
    assert runtime.asked == {"pinned": True, "hugepages": False, "numa_node": 3, "shared_name": None}
    assert arena.notes == ("pinned not granted, no: mlock: Operation not permitted",)
    assert arena.granted == {"pinned": "no: mlock: Operation not permitted", "numa_node": "3"}


def test_shared_memory_is_seen_by_others_and_its_name_is_taken_once():
    name, runtime = unique_shared_name(), HostRuntime()
    with an_arena(shared_name=name) as arena:
        with pytest.raises(FileExistsError):
            an_arena(shared_name=name)
        obj = arena.allocate_bytes(5)
        obj.bytes()[:] = (1, 2, 3, 4, 5)
        other = runtime.import_buffer(arena.export(runtime))
        assert bytes(other.array[:5]) == b"\1\2\3\4\5"
        other.free()
        obj.free()
        del obj
    assert not (Path("/dev/shm") / name).exists()


# --- leases


def test_it_stands_in_for_a_buffer_pool(arena):
    for pool in (arena, BufferPool(64 * KIB)):
        with pool.allocate([CHUNK, CHUNK], [KVMeta(group=0), KVMeta(group=1)]) as obj:
            assert (obj.nbytes, obj.offsets, [m.group for m in obj.metas]) == (256 + 120, (0, 256), [0, 1])
            assert obj.bytes().ctypes.data % ALIGNMENT == 0
            obj.bytes()[:] = np.arange(376) % 251
            assert obj.rows(1).nbytes == 120
            assert (pool.live_leases, pool.live_bytes) == (1, 512)
        with pool.allocate_bytes(1000) as obj:
            obj.set_used_size(10)
            assert len(obj.view()) == 10
        assert (pool.live_leases, pool.live_bytes) == (0, 0)
        with pytest.raises(LayoutError, match="2 groups need as many KVMeta"):
            pool.allocate([CHUNK, CHUNK], [KVMeta()])
        with pytest.raises(ConfigError, match="0 bytes or more"):
            pool.allocate_bytes(-1)


def test_an_ended_lease_is_of_no_use(arena):
    first = arena.allocate_bytes(100)
    first.free()
    second = arena.allocate_bytes(100)  # the same bytes, another generation
    for use in (first.bytes, first.view, first.free, lambda: first.set_used_size(1)):
        with pytest.raises(LeaseError, match="freed"):
            use()
    second.bytes()[:] = 1
    second.free()
    assert arena.memcheck().ok


def test_the_lease_of_another_arena_is_not_taken_for_its_own(arena):
    mine = arena.allocate_bytes(100)
    theirs = an_arena().allocate_bytes(100)
    with pytest.raises(LeaseError, match="not of this arena"):
        dataclasses.replace(theirs, _pool=arena).free()
    mine.free()


def test_memory_objects_that_were_dropped_without_being_freed_are_leaks(arena):
    kept = arena.allocate_bytes(300)
    arena.allocate_bytes(700)
    gc.collect()
    found = arena.memcheck()
    assert (found.leases, [(i.offset, i.nbytes) for i in found.leaked]) == (2, [(512, 768)])
    assert not found.ok
    kept.free()


def test_memcheck_finds_overlaps_and_lost_bytes(arena, monkeypatch):
    arena.allocate_bytes(512)
    monkeypatch.setattr(arena._blocks, "take", lambda nbytes: 256)  # an allocator gone wrong
    held = arena.allocate_bytes(512)
    assert arena.memcheck().overlaps == ((256, 512), (512, 768))
    monkeypatch.undo()
    monkeypatch.setattr(arena._blocks, "give", lambda *_: None)
    held.free()
    lost = an_arena()
    monkeypatch.setattr(lost._blocks, "give", lambda *_: None)
    lost.allocate_bytes(512).free()
    assert lost.memcheck().lost == ((0, 512),)


def test_poison_finds_what_is_written_through_a_view_that_was_kept():
    arena = an_arena(4 * KIB, poison=True)
    obj = arena.allocate_bytes(300)
    view = obj.bytes()
    obj.free()
    assert arena.memcheck().ok
    view[7] = 1
    assert arena.memcheck().written_after_free == ((0, 4 * KIB),)


def test_closing_waits_for_nobody_and_breaks_nothing(arena):
    obj = arena.allocate_bytes(100)
    with pytest.raises(LeaseError, match="1 live leases"):
        arena.close()
    obj.bytes()[:] = 3
    obj.free()
    with pytest.raises(LeaseError, match="views of it are in use"):  # the handle still knows where it was
        arena.close()
    arena.allocate_bytes(5).free()
    del obj
    arena.close()
    arena.close()
    with pytest.raises(LeaseError, match="closed"):
        arena.allocate_bytes(1)


# --- room


def test_a_batch_is_leased_as_a_whole_or_not_at_all(arena):
    held = arena.allocate_bytes(32 * KIB)
    with pytest.raises(OutOfMemoryError, match="40960 B in 5 pieces asked of an arena of 65536 B: 32768 B are free"):
        arena.allocate_batch([MemoryPlan.of_bytes(8 * KIB)] * 5)
    assert (arena.live_leases, arena.live_bytes, arena.largest_free) == (1, 32 * KIB, 32 * KIB)
    batch = arena.allocate_batch([MemoryPlan.of_bytes(n) for n in (1, 20 * KIB, 3000)])
    assert [obj.nbytes for obj in batch] == [1, 20 * KIB, 3000]
    assert arena.allocate_batch([]) == []
    for obj in [held, *batch]:
        obj.free()
    assert arena.largest_free == 64 * KIB


def test_what_can_never_fit_is_refused_without_reclaiming(arena):
    arena.reclaim = lambda nbytes: pytest.fail("reclaimed in vain")
    with pytest.raises(OutOfMemoryError, match="can never fit"):
        arena.allocate_bytes(64 * KIB + 1, timeout=60)


def test_what_is_missing_is_reclaimed(arena):
    held = [arena.allocate_bytes(8 * KIB) for _ in range(8)]
    asked = []

    def reclaim(nbytes):
        asked.append(nbytes)
        if not held:
            return 0
        held.pop(0).free()
        return 8 * KIB

    arena.reclaim = reclaim
    big = arena.allocate_bytes(20 * KIB)
    assert asked == [20 * KIB, 20 * KIB, 20 * KIB]  # in one piece, so what is free already is no help for certain
    assert len(held) == 5
    big.free()
    for obj in held:
        obj.free()


def test_reclaiming_that_lies_comes_to_an_end(arena):
    held = arena.allocate_bytes(64 * KIB)
    calls = []
    arena.reclaim = lambda nbytes: calls.append(nbytes) or 16 * KIB
    with pytest.raises(OutOfMemoryError):
        arena.allocate_bytes(1)
    assert len(calls) == 5
    held.free()


def test_an_error_of_reclaim_comes_through_and_nothing_is_leased(arena):
    def reclaim(nbytes):
        raise ZeroDivisionError

    held = arena.allocate_bytes(64 * KIB)
    arena.reclaim = reclaim
    with pytest.raises(ZeroDivisionError):
        arena.allocate_bytes(1)
    held.free()
    assert arena.live_leases == 0


def test_waiting_ends_with_room_or_with_time(arena):
    held = arena.allocate_bytes(64 * KIB)
    start = time.monotonic()
    with pytest.raises(OutOfMemoryError, match=r"waiting 0.05 s brought no more"):
        arena.allocate_bytes(1, timeout=0.05)
    assert time.monotonic() - start >= 0.05
    threading.Timer(0.05, held.free).start()
    arena.allocate([CHUNK], timeout=60).free()


def test_what_becomes_reclaimable_while_somebody_waits_is_reclaimed(arena):
    held = [arena.allocate_bytes(64 * KIB)]
    unlocked = threading.Event()

    def reclaim(nbytes):
        if not unlocked.is_set() or not held:
            return 0
        held.pop().free()
        return 64 * KIB

    arena.reclaim = reclaim
    threading.Timer(0.05, unlocked.set).start()  # frees nothing, and wakes nobody
    arena.allocate_bytes(1, timeout=60).free()


def test_threads_never_share_a_byte(arena):
    failures = []

    def work(seed):
        mine = random.Random(seed)
        held = []
        for _ in range(400):
            if held and (mine.random() < 0.5 or len(held) > 6):
                obj, mark = held.pop(mine.randrange(len(held)))
                if not (obj.bytes() == mark).all():
                    failures.append(obj)
                obj.free()
            else:
                obj = arena.allocate_bytes(mine.randrange(3000), timeout=60)
                mark = mine.randrange(256)
                obj.bytes()[:] = mark
                held.append((obj, mark))
        for obj, _ in held:
            obj.free()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert (arena.live_leases, arena.largest_free) == (0, 64 * KIB)
    assert arena.memcheck().ok


def test_ten_thousand_operations_leak_neither_bytes_nor_descriptors():
    def state():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    arena, rng = an_arena(MIB), random.Random(5)
    held, before = [], state()
    for _ in range(10_000):
        if held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held))).free()
        else:
            try:
                held.append(arena.allocate_bytes(rng.randrange(20_000)))
            except OutOfMemoryError:
                held.pop().free()
    assert arena.memcheck().ok
    assert arena.live_leases == len(held)
    for obj in held:
        obj.free()
    assert (arena.live_bytes, arena.largest_free) == (0, MIB)
    assert sum(1 for _ in arena._blocks.free_blocks()) == 1
    assert state() == before


class ArenaAgainstByteMap(RuleBasedStateMachine):
    """The arena against a map that says for each unit of the region whose it is."""

    UNITS = 64

    def __init__(self):
        super().__init__()
        self.arena = an_arena(self.UNITS * ALIGNMENT, poison=True)
        self.base = self.arena._buffer.array.ctypes.data
        self.map = [0] * self.UNITS
        self.held = {}

    def longest_free(self):
        runs = "".join("x" if owner else "." for owner in self.map).split("x")
        return max(map(len, runs))

    def mark(self, obj):
        start = obj.bytes().ctypes.data - self.base
        assert start % ALIGNMENT == 0
        units = range(start // ALIGNMENT, (start + max(align_up(obj.nbytes), ALIGNMENT)) // ALIGNMENT)
        assert all(self.map[unit] == 0 for unit in units)
        for unit in units:
            self.map[unit] = obj.generation
        obj.bytes()[:] = obj.generation % 200
        self.held[obj.generation] = obj

    @rule(nbytes=st.integers(0, 20 * ALIGNMENT))
    def allocate(self, nbytes):
        units = max(-(-nbytes // ALIGNMENT), 1)
        if units <= self.longest_free():
            self.mark(self.arena.allocate_bytes(nbytes))
        else:
            with pytest.raises(OutOfMemoryError):
                self.arena.allocate_bytes(nbytes)

    @rule(sizes=st.lists(st.integers(1, 12 * ALIGNMENT), min_size=2, max_size=6))
    def allocate_batch(self, sizes):
        before = self.arena.live_leases
        try:
            batch = self.arena.allocate_batch([MemoryPlan.of_bytes(n) for n in sizes])
        except OutOfMemoryError:
            assert self.arena.live_leases == before
            # Refused with reason: even in one piece they would not fit.
            assert sum(-(-n // ALIGNMENT) for n in sizes) > self.longest_free()
        else:
            for obj in batch:
                self.mark(obj)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        generation = data.draw(st.sampled_from(sorted(self.held)))
        obj = self.held.pop(generation)
        assert (obj.bytes() == generation % 200).all()
        obj.free()
        self.map = [0 if owner == generation else owner for owner in self.map]
        with pytest.raises(LeaseError):
            obj.free()

    @rule()
    def free_everything(self):
        for obj in self.held.values():
            obj.free()
        self.held, self.map = {}, [0] * self.UNITS
        assert self.arena.largest_free == self.arena.capacity_bytes

    @invariant()
    def the_books_agree(self):
        assert self.arena.live_bytes == sum(map(bool, self.map)) * ALIGNMENT
        assert self.arena.live_leases == len(self.held)
        assert self.arena.largest_free == self.longest_free() * ALIGNMENT
        assert self.arena.memcheck().ok


TestArenaAgainstByteMap = ArenaAgainstByteMap.TestCase
