"""Memory objects: sizes, leases, and the generations that expose stale handles."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from kvcore import ArrayRef, BufferPool, KVMeta, Layout, LayoutDesc, chunk_desc
from kvcore.errors import ConfigError, LayoutError, LeaseError, OutOfMemoryError
from kvcore.memory import ALIGNMENT, align_up, aligned_bytes

F16 = np.dtype(np.float16)
CHUNK = LayoutDesc(Layout("LKTHD", L=2, T=3, H=1, D=5), {"K": F16, "V": F16})  # 120 B: no multiple of anything


@pytest.fixture
def pool():
    return BufferPool(1 << 20)


# --- what a chunk takes


@pytest.mark.parametrize(
    ("layout", "dtypes", "nbytes"),
    [
        (Layout("LKTHD", L=3, T=256, H=2, D=64), {"K": "bfloat16", "V": "bfloat16"}, 3 * 2 * 256 * 2 * 64 * 2),
        (Layout("LTC", L=2, T=7, C=576), {"C": "float8_e4m3fn"}, 2 * 7 * 576),
        (
            Layout("L[K:THD,V:THE]", L=2, T=3, H=4, D=5, E=3),
            {"K": "float16", "V": "float32"},
            2 * 3 * 4 * (5 * 2 + 3 * 4),
        ),
        (Layout("L[v:T128,s:T4]", L=2, T=5), {"v": "uint8", "s": "uint8"}, 2 * 5 * 132),
        (Layout("LKTHD", L=1, T=0, H=2, D=4), {"K": "float16", "V": "float16"}, 0),
        (Layout("TD", T=4, D=3), {"X": "int8"}, 12),
    ],
    ids=str,
)
def test_the_size_of_a_chunk_and_its_binding(layout, dtypes, nbytes):
    desc = LayoutDesc(layout, dtypes)
    assert (desc.nbytes, desc.tokens) == (nbytes, layout.extents["T"])
    buffer = np.arange(nbytes + 7, dtype=np.uint32).astype(np.uint8)
    rows = desc.bind(buffer, offset=7)
    assert rows.nbytes == nbytes
    assert {p: rows.segment(p)[0].dtype for p in rows.parts} == desc.dtypes
    stored = b"".join(rows.bytes_view(p, i).tobytes() for p, i in rows.planes())
    assert sorted(stored) == sorted(buffer[7:].tobytes())
    if layout.text != "L[v:T128,s:T4]":
        assert stored == buffer[7:].tobytes()  # layer 0's parts, then layer 1's: layers can be loaded in order


@pytest.mark.parametrize(
    ("layout", "dtypes", "message"),
    [
        (Layout("L|KBNHD"), {"K": F16, "V": F16}, "describes no dense chunk"),
        (Layout("L|1THD"), {"X": F16}, "describes no dense chunk"),
        (Layout("LKTHD", L=1, H=2, D=3), {"K": F16, "V": F16}, "a chunk needs every extent; T not declared"),
        (Layout("LKTHD", L=1, T=1, H=2, D=3), {"K": F16}, r"dtypes for \['K'\], but its parts are \['K', 'V'\]"),
        (Layout("LKTHD", L=1, T=1, H=2, D=3), {"K": F16, "V": "int8"}, "parts of different dtypes need regions"),
    ],
    ids=str,
)
def test_what_describes_no_chunk_is_refused(layout, dtypes, message):
    with pytest.raises(LayoutError, match=message):
        LayoutDesc(layout, dtypes)


@pytest.mark.parametrize(
    ("buffer", "offset", "message"),
    [
        (np.zeros(119, np.uint8), 0, "takes 120 B at offset 0, the buffer has 119 B"),
        (np.zeros(128, np.uint8), 9, "takes 120 B at offset 9, the buffer has 128 B"),
        (np.zeros(128, np.uint8), -1, "at offset -1"),
        (np.zeros((2, 64), np.uint8), 0, "binds to contiguous bytes"),
        (np.zeros(256, np.uint8)[::2], 0, "binds to contiguous bytes"),
        (np.zeros(128, np.uint16), 0, "binds to contiguous bytes"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer, offset, message):
    with pytest.raises(LayoutError, match=message):
        CHUNK.bind(buffer, offset=offset)


def test_a_chunk_binds_to_any_bytes_in_place():
    store = bytearray(120)
    CHUNK.bind(store).bytes_view("V", 1)[...] = 9
    assert store == bytes(90) + b"\x09" * 30
    assert CHUNK.bind(bytes(120)).readonly
    rows = CHUNK.bind(ArrayRef.at(4096, (120,), "uint8", device="cuda:0"))
    assert rows.device == "cuda:0"
    assert rows.segments[0].bases == ((4096, 4156), (4126, 4186))


# --- the canonical chunk of a cache


@pytest.mark.parametrize(
    ("text", "tensors", "dtypes", "extents", "chunk"),
    [
        ("L|KBNHD", [np.zeros((2, 3, 4, 2, 8), np.float16)], {}, {}, "LKTHD D=8 H=2 L=1 T=9"),
        ("L|BNC", [np.zeros((3, 4, 20), np.float16)] * 2, {}, {}, "LTC C=20 L=2 T=9"),
        ("L|BNHD", [np.zeros((3, 4, 2, 8), np.float16)], {}, {}, "LTHD D=8 H=2 L=1 T=9"),
        ("L|KBNHD", [np.zeros((2, 3, 4, 2, 8), np.uint8)], {"K": "int8"}, {}, "L[K:THD,V:THD] D=8 H=2 L=1 T=9"),
        (
            "L|B[K:ND,V:NE]",
            [np.zeros((3, 40), np.float16)],
            {},
            {"N": 4, "D": 6, "E": 4},
            "L[K:THD,V:THE] D=6 E=4 H=1 L=1 T=9",
        ),
        ("L|B[v:N128,s:N4]", [np.zeros((3, 528), np.uint8)], {}, {"N": 4}, "L[v:T128,s:T4] L=1 T=9"),
        ("L|B*", [np.zeros((3, 5), np.float32)], {}, {}, "L[page:T20] L=1 T=9"),
    ],
)
def test_the_canonical_chunk(text, tensors, dtypes, extents, chunk):
    rows = Layout(text, **extents).bind(tensors, dtypes=dtypes)
    desc = chunk_desc(rows, 9)
    assert str(desc.layout) == chunk
    assert desc.nbytes * rows.tokens == rows.nbytes * 9
    assert desc.bind(np.zeros(desc.nbytes, np.uint8)).signature == rows.signature


def test_a_cache_without_a_canonical_chunk_says_so():
    rows = Layout("L|BN[a:HD,b:HE]", H=2, D=3, E=4).bind([np.zeros((3, 4, 14), np.float32)])
    with pytest.raises(LayoutError, match="no canonical chunk; give the dense layout yourself"):
        chunk_desc(rows, 4)


# --- leases


def test_groups_are_aligned_and_do_not_overlap(pool):
    other = LayoutDesc(Layout("LTC", L=1, T=3, C=100), {"C": np.dtype(np.int8)})
    with pool.allocate([CHUNK, other, CHUNK]) as obj:
        assert obj.offsets == (0, 256, 768)
        assert (obj.nbytes, obj.used_size, obj.bytes().size) == (888, 888, 888)
        start = obj.bytes().ctypes.data
        assert start % ALIGNMENT == 0
        for group, offset in enumerate(obj.offsets):
            assert obj.rows(group).segments[0].bases[0][0] == start + offset
            obj.rows(group).bytes_view(obj.rows(group).parts[0], 0)[...] = group + 1
        assert [obj.bytes()[o] for o in obj.offsets] == [1, 2, 3]
        with pytest.raises(LayoutError, match="group 3 of a memory object with 3 groups"):
            obj.rows(3)
        with pytest.raises(LayoutError, match="group -1"):
            obj.rows(-1)


def test_meta_belongs_to_groups(pool):
    one, two = KVMeta(base_position=256), KVMeta(base_position=512, group=1, namespace=b"n")
    with pool.allocate([CHUNK, CHUNK], one) as obj:
        assert obj.metas == (one, one)
    with pool.allocate([CHUNK, CHUNK], [one, two]) as obj:
        assert obj.metas == (one, two)
    with pool.allocate([CHUNK]) as obj:
        assert obj.metas == (KVMeta(),)
    with pool.allocate_bytes(10, two) as obj:
        assert obj.metas == (two,)
    with pytest.raises(LayoutError, match="2 groups need as many KVMeta, got 1"):
        pool.allocate([CHUNK, CHUNK], [one])
    assert pool.live_leases == 0
    with pytest.raises(AttributeError):
        one.group = 2


USES = {
    "bytes": lambda obj: obj.bytes(),
    "view": lambda obj: obj.view(),
    "rows": lambda obj: obj.rows(),
    "set_used_size": lambda obj: obj.set_used_size(obj.nbytes),
    "with": lambda obj: obj.__enter__(),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_free_raises_also_when_the_buffer_lives_on(pool, use):
    old = pool.allocate([CHUNK])
    buffer = old.bytes()
    old.free()
    with pytest.raises(LeaseError, match=rf"generation {old.generation} was freed"):
        USES[use](old)
    new = pool.allocate([CHUNK])  # the pool hands the same buffer out again
    assert np.shares_memory(new.bytes(), buffer)
    with pytest.raises(LeaseError, match=rf"generation {old.generation} was freed"):
        USES[use](old)
    with pytest.raises(LeaseError, match="freed twice"):
        old.free()
    USES[use](new)
    assert pool.live_leases == 1


def test_double_free_raises_and_harms_nothing(pool):
    obj = pool.allocate_bytes(100)
    obj.free()
    with pytest.raises(LeaseError, match=rf"generation {obj.generation} is freed twice; free each lease once"):
        obj.free()
    first, second = pool.allocate_bytes(100), pool.allocate_bytes(100)
    assert not np.shares_memory(first.bytes(), second.bytes())


def test_leaving_the_context_frees_also_after_an_error(pool):
    with pytest.raises(ZeroDivisionError), pool.allocate_bytes(5):
        1 // (1 - pool.live_leases)  # there is one lease here
    assert (pool.live_leases, pool.live_bytes) == (0, 0)


def test_bytes_objects_narrow_and_never_widen(pool):
    obj = pool.allocate_bytes(1000)
    obj.set_used_size(600)
    assert (obj.used_size, obj.nbytes, obj.bytes().size, obj.view().nbytes, obj.view().format) == (
        600,
        1000,
        600,
        600,
        "B",
    )
    obj.set_used_size(600)
    for wrong in (601, 1000, -1):
        with pytest.raises(LeaseError, match=f"cannot narrow an object of 600 used bytes to {wrong} B"):
            obj.set_used_size(wrong)
    obj.set_used_size(0)
    assert obj.bytes().size == 0


def test_typed_objects_have_the_size_of_their_layout(pool):
    obj = pool.allocate([CHUNK])
    obj.set_used_size(obj.nbytes)
    for wrong in (obj.nbytes - 1, obj.nbytes + 1, 0):
        with pytest.raises(LeaseError, match=r"typed chunks \(LKTHD .*float16\) has 120 B and cannot be narrowed"):
            obj.set_used_size(wrong)
    assert obj.used_size == obj.nbytes


def test_objects_of_no_bytes_and_negative_sizes(pool):
    with pool.allocate_bytes(0) as obj:
        assert obj.bytes().size == 0
    with pool.allocate([]) as obj:
        assert (obj.nbytes, obj.descs) == (0, ())
    with pytest.raises(ConfigError, match="0 bytes or more, got -5"):
        pool.allocate_bytes(-5)


# --- capacity


def test_the_capacity_is_kept_and_the_refusal_has_the_figures():
    pool = BufferPool(1024)
    held = pool.allocate_bytes(512)
    with pytest.raises(OutOfMemoryError, match="600 B asked of a pool of 1024 B that has 512 B under lease"):
        pool.allocate_bytes(600)
    assert (pool.live_leases, pool.live_bytes) == (1, 512)
    held.free()
    pool.allocate_bytes(600).free()  # the idle buffer of another size makes room
    with pytest.raises(OutOfMemoryError, match="1025 B asked"):
        pool.allocate_bytes(1025)


def test_a_refused_allocation_leaves_no_lease():
    def refuse(nbytes):
        raise OutOfMemoryError(f"no {nbytes} B here")

    pool = BufferPool(1 << 20, refuse)
    with pytest.raises(OutOfMemoryError, match="no 256 B here"):
        pool.allocate_bytes(10)
    assert (pool.live_leases, pool.live_bytes) == (0, 0)


def test_the_given_allocator_is_asked_for_aligned_sizes():
    asked = []

    def allocate(nbytes):
        asked.append(nbytes)
        return aligned_bytes(nbytes)

    pool = BufferPool(1 << 20, allocate)
    for size in (1, 256, 257, 0):
        pool.allocate_bytes(size)
    assert asked == [256, 256, 512, 256]


@given(st.integers(0, 1 << 40), st.sampled_from([1, 64, 256, 4096]))
def test_aligning_rounds_up_to_the_next_multiple(nbytes, alignment):
    up = align_up(nbytes, alignment)
    assert up % alignment == 0
    assert 0 <= up - nbytes < alignment


@pytest.mark.parametrize("nbytes", [0, 1, 255, 4096])
def test_fresh_memory_is_aligned(nbytes):
    array = aligned_bytes(nbytes)
    assert array.nbytes == nbytes
    assert array.ctypes.data % ALIGNMENT == 0 or nbytes == 0


def test_threads_never_share_a_buffer_nor_lose_a_lease():
    pool = BufferPool(1 << 16)
    clashes = []

    def work(mark):
        for _ in range(300):
            with pool.allocate_bytes(64) as obj:
                obj.bytes()[:] = mark
                if not (obj.bytes() == mark).all():
                    clashes.append(mark)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert (pool.live_leases, pool.live_bytes) == (0, 0)


class PoolAgainstModel(RuleBasedStateMachine):
    """A pool under random use, against a dictionary of what each lease should hold."""

    live = Bundle("live")
    CAPACITY = 4096

    def __init__(self):
        super().__init__()
        self.pool = BufferPool(self.CAPACITY)
        self.model = {}
        self.freed = []

    @rule(target=live, size=st.integers(0, 1500), mark=st.integers(0, 255))
    def allocate(self, size, mark):
        room = self.CAPACITY - sum(max(align_up(obj.nbytes), ALIGNMENT) for obj, _ in self.model.values())
        needs = max(align_up(size), ALIGNMENT)
        try:
            obj = self.pool.allocate_bytes(size)
        except OutOfMemoryError:
            assert needs > room
            return None
        assert needs <= room
        obj.bytes()[:] = mark
        assert obj.generation not in self.model
        self.model[obj.generation] = (obj, bytes([mark]) * size)
        return obj

    @rule(obj=live, share=st.floats(0, 1))
    def narrow(self, obj, share):
        if obj is None or obj.generation not in self.model:
            return
        size = int(obj.used_size * share)
        obj.set_used_size(size)
        self.model[obj.generation] = (obj, self.model[obj.generation][1][:size])

    @rule(obj=consumes(live))
    def free(self, obj):
        if obj is None:
            return
        obj.free()
        del self.model[obj.generation]
        self.freed.append(obj)

    @precondition(lambda self: self.freed)
    @rule(pick=st.integers(0, 100), use=st.sampled_from(["bytes", "view", "free"]))
    def use_after_free(self, pick, use):
        stale = self.freed[pick % len(self.freed)]
        with pytest.raises(LeaseError):
            getattr(stale, use)()

    @invariant()
    def every_lease_has_its_own_bytes(self):
        for obj, content in self.model.values():
            assert obj.bytes().tobytes() == content

    @invariant()
    def the_counters_are_right(self):
        assert self.pool.live_leases == len(self.model)
        assert self.pool.live_bytes == sum(max(align_up(obj.nbytes), ALIGNMENT) for obj, _ in self.model.values())
        assert self.pool.live_bytes <= self.CAPACITY


PoolAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolAgainstModel = PoolAgainstModel.TestCase
