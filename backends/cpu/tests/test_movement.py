"""Moves that are large, crooked and turned over, against the reference: beyond the sizes of the conformance suite."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import Layout, SlotError

RNG = np.random.default_rng(4)


def memory(shape, *, shift=0, item=2):
    """Return an array of random bytes whose address is `shift` beyond a cache line."""
    nbytes = int(np.prod(shape)) * item
    raw = RNG.integers(0, 256, nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + shift
    return raw[start : start + nbytes].view(f"u{item}").reshape(shape)


def copies(arrays):
    return [a.copy() for a in arrays]


LARGE = {
    "NHD": ("L|KBNHD", (2, 40, 16, 8, 128), "LKTHD", (4, 2, 600, 8, 128), {}),
    "HND": ("L|KBHND", (2, 40, 8, 16, 128), "LKTHD", (4, 2, 600, 8, 128), {}),
    "K transposed": ("L|BH[K:DN,V:ND]", (40, 8, 2 * 16 * 128), "LKTHD", (4, 2, 600, 8, 128), {"N": 16, "D": 128}),
    "MLA": ("L|BNC", (40, 16, 576), "LTC", (8, 600, 576), {}),
    "odd rows": ("L|KBNHD", (2, 40, 16, 3, 77), "LKTHD", (8, 2, 600, 3, 77), {}),
    "into planes": ("L|KBNHD", (2, 40, 16, 8, 128), "LKHTD", (4, 2, 8, 600, 128), {}),
    "into transposed planes": ("L|KBNHD", (2, 40, 16, 8, 100), "LKHDT", (4, 2, 8, 100, 600), {}),
}


def case(name, shift):
    layout, shape, dense, chunk_shape, declared = LARGE[name]
    tensors = [memory(shape, shift=shift) for _ in range(chunk_shape[0])]
    chunk = memory(chunk_shape, shift=shift)
    if "[" in layout:
        return layout, [t.view(np.float16) for t in tensors], dense, chunk.view(np.float16), declared
    return layout, tensors, dense, chunk, declared


def indices(unit):
    if unit == "block":
        return RNG.permutation(40)[:38].astype(np.int64)
    slots = RNG.permutation(640)[:600].astype(np.int64)
    slots[100:180] = np.sort(slots[100:180])  # some neighbours
    slots[[7, 300]] = -1
    return slots


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("shift", [0, 2, 16])
@pytest.mark.parametrize("unit", ["slot", "block"])
@pytest.mark.parametrize("name", LARGE)
def test_large_moves(name, unit, shift, threads, isa, ref, monkeypatch, open_cpu):
    monkeypatch.setenv("KVCORE_CPU_THREADS", threads)
    cpu = open_cpu()
    layout, tensors, dense, chunk, declared = case(name, shift)
    index, skip = indices(unit), 5

    def run(backend):
        cache, out = copies(tensors), chunk.copy()
        paged, rows = Layout(layout, **declared).bind(cache), Layout(dense).bind(out)
        backend.gather_paged(paged, index, unit=unit, skip_tokens=skip, out=rows)
        back = copies(tensors)
        backend.scatter_paged(
            Layout(dense).bind(chunk), index, unit=unit, skip_tokens=skip, out=Layout(layout, **declared).bind(back)
        )
        return [a.view(np.uint16) for a in (out, *back)]

    for got, wanted in zip(run(cpu), run(ref), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize(("source", "target"), [("LKTHD", "LKHDT"), ("LKHDT", "LKTHD"), ("KLHTD", "LKDHT")])
def test_conversions_turn_over_every_size_of_element(source, target, item, cpu, ref):
    extents = {"L": 3, "K": 2, "T": 301, "H": 3, "D": 67}
    given_ = memory([extents[a] for a in source], item=item, shift=item)
    outs = [np.zeros([extents[a] for a in target], f"u{item}") for _ in range(2)]
    for backend, out in zip((cpu, ref), outs, strict=True):
        backend.convert_layout(Layout(source).bind(given_), out=Layout(target).bind(out))
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("digests", [False, True])
def test_large_batches_of_buffers(digests, cpu, ref):
    sizes = (0, 1, 15, 16, 17, (6 << 20) + 5, 262144, 262145)
    source = [memory((n,), item=1, shift=i) for i, n in enumerate(sizes)]
    results = []
    for backend in (cpu, ref):
        out = [np.zeros(n, np.uint8) for n in sizes]
        sums = np.zeros(len(sizes), np.uint64) if digests else None
        backend.copy_batch(source, out=out, digests=sums)
        results.append([*out, *([sums] if digests else [])])
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(got, wanted)


@settings(max_examples=200)
@given(
    blocks=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    block_tokens=st.integers(1, 4),
    data=st.data(),
)
def test_duplicate_blocks_are_found_exactly_where_tokens_collide(blocks, block_tokens, data, open_cpu):
    cpu = open_cpu()
    tokens = data.draw(st.integers((len(blocks) - 1) * block_tokens + 1, len(blocks) * block_tokens))
    skip = data.draw(st.integers(0, tokens))
    targets = [(blocks[t // block_tokens], t % block_tokens) for t in range(skip, tokens)]
    cache = [np.zeros((2, 6, block_tokens, 1, 3), np.uint16)]
    rows = Layout("L|KBNHD").bind(cache)
    chunk = Layout("LKTHD").bind(np.ones((1, 2, tokens, 1, 3), np.uint16))
    index = np.array(blocks, np.int64)
    if len(set(targets)) == len(targets):
        cpu.scatter_paged(chunk, index, unit="block", skip_tokens=skip, out=rows)
        assert int(cache[0].sum()) == 6 * len(targets)
    else:
        entry = next(i for i in range(len(targets)) if targets[i] in targets[:i])
        with pytest.raises(SlotError, match=f"entry {(entry + skip) // block_tokens} "):
            cpu.scatter_paged(chunk, index, unit="block", skip_tokens=skip, out=rows)
        assert not cache[0].any()


def test_of_two_tokens_with_one_target_one_wins_whole(isa, monkeypatch, open_cpu):
    monkeypatch.setenv("KVCORE_CPU_THREADS", "4")
    cpu = open_cpu()
    tokens = 3000
    cache = [np.zeros((2, 1, 8, 4, 64), np.uint16) for _ in range(2)]
    values = np.broadcast_to(np.arange(tokens, dtype=np.uint16)[:, None, None], (2, 2, tokens, 4, 64)).copy()
    index = RNG.integers(0, 8, tokens).astype(np.int64)
    cpu.scatter_paged(Layout("LKTHD").bind(values), index, check_duplicates=False, out=Layout("L|KBNHD").bind(cache))
    for layer in cache:
        for slot in range(8):
            for part in range(2):
                row = layer[part, 0, slot]
                assert (row == row.flat[0]).all()
                assert index[row.flat[0]] == slot


def test_scratch_of_a_refused_call_is_clean_for_the_next_one(cpu):
    cache = [np.zeros((2, 4, 4, 1, 8), np.uint16)]
    rows, chunk = Layout("L|KBNHD").bind(cache), Layout("LKTHD").bind(np.ones((1, 2, 3, 1, 8), np.uint16))
    for bad in ([5, 6, 5], [5, 6, 99]):
        with pytest.raises(SlotError):
            cpu.scatter_paged(chunk, np.array(bad, np.int64), out=rows)
    cpu.scatter_paged(chunk, np.array([5, 6, 7], np.int64), out=rows)
    assert int(cache[0].sum()) == 48
