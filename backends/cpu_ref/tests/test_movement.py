"""Gather, scatter, convert and copy, against loops over single elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Layout, SlotError

L, B, N, H, D = 2, 3, 4, 2, 5
SLOTS = B * N


def cache(fill=None):
    """A cache and its tensors ``[2, B, N, H, D]``, one a layer; a canary lies behind every row."""
    padded = [np.full((2, B, N, H, D + 1), -7, np.float32) for _ in range(L)]
    tensors = [p[..., :D] for p in padded]
    for i, tensor in enumerate(tensors):
        tensor[...] = fill if fill is not None else np.arange(tensor.size).reshape(tensor.shape) + 1000 * i
    return Layout("L|KBNHD").bind(tensors), tensors, padded


def chunk(tokens, fill=0.0):
    array = np.full((L, 2, tokens, H, D), fill, np.float32)
    return Layout("LKTHD").bind(array), array


def index(*values):
    return np.array(values, np.int64)


slot_lists = st.lists(st.integers(-1, SLOTS - 1), max_size=12)


@given(slot_lists, st.data())
def test_gather_takes_each_token_from_its_slot(ref, slots, data):
    skip = data.draw(st.integers(0, len(slots)))
    rows, tensors, _ = cache()
    out, array = chunk(len(slots), fill=-1)
    assert ref.gather_paged(rows, index(*slots), skip_tokens=skip, out=out) is out
    for layer in range(L):
        for t, slot in enumerate(slots):
            if t < skip or slot == -1:
                assert (array[layer, :, t] == -1).all()
            else:
                np.testing.assert_array_equal(array[layer, :, t], tensors[layer][:, slot // N, slot % N])


@given(st.lists(st.integers(-1, SLOTS - 1), max_size=12, unique_by=lambda s: s if s >= 0 else object()), st.data())
def test_scatter_puts_each_token_into_its_slot_and_leaves_all_else(ref, slots, data):
    skip = data.draw(st.integers(0, len(slots)))
    rows, tensors, padded = cache(fill=-1)
    _, array = source = chunk(len(slots))
    array[...] = np.arange(array.size).reshape(array.shape)
    assert ref.scatter_paged(source[0], index(*slots), skip_tokens=skip, out=rows) is rows
    expected = [np.full((2, B, N, H, D), -1, np.float32) for _ in range(L)]
    for layer in range(L):
        for t, slot in enumerate(slots):
            if t >= skip and slot >= 0:
                expected[layer][:, slot // N, slot % N] = array[layer, :, t]
        np.testing.assert_array_equal(tensors[layer], expected[layer])
        assert (padded[layer][..., D] == -7).all()


@pytest.mark.parametrize("tokens", [0, 1, N - 1, N, N + 1, 3 * N])
def test_blocks_are_slots_by_the_block(ref, tokens):
    blocks = index(2, 0, 1)[: -(-tokens // N)]
    slots = index(*(int(blocks[t // N]) * N + t % N for t in range(tokens)))
    rows, _, _ = cache()
    (by_block, a), (by_slot, b) = chunk(tokens), chunk(tokens)
    ref.gather_paged(rows, blocks, unit="block", out=by_block)
    ref.gather_paged(rows, slots, out=by_slot)
    np.testing.assert_array_equal(a, b)
    target, tensors, _ = cache(fill=-1)
    ref.scatter_paged(by_block, blocks, unit="block", out=target)
    assert sum(int((t != -1).sum()) for t in tensors) == tokens * L * 2 * H * D


def test_chunks_share_the_tokens_in_order(ref):
    rows, tensors, _ = cache()
    (a, first), (b, empty), (c, last) = chunk(2), chunk(0), chunk(3)
    ref.gather_paged(rows, index(5, 4, 3, 2, 1), out=[a, b, c])
    np.testing.assert_array_equal(first[0, 0, 1], tensors[0][0, 1, 0])
    np.testing.assert_array_equal(last[1, 1, 2], tensors[1][1, 0, 1])
    assert empty.size == 0


@pytest.mark.parametrize("bad", [SLOTS, SLOTS + 5, -2, 1 << 40])
@pytest.mark.parametrize("scatter", [False, True])
def test_a_slot_out_of_range_is_named_and_nothing_is_written(ref, bad, scatter):
    rows, tensors, _ = cache(fill=-1)
    source, array = chunk(3, fill=5)
    call = (
        (lambda i: ref.scatter_paged(source, i, out=rows))
        if scatter
        else (lambda i: ref.gather_paged(rows, i, out=source))
    )
    with pytest.raises(SlotError, match=rf"token 1 has slot {bad}, outside -1 .. {SLOTS - 1}"):
        call(index(0, bad, 2))
    assert all((t == -1).all() for t in tensors)
    assert (array == 5).all()


def test_a_block_out_of_range_is_named(ref):
    rows, _, _ = cache()
    with pytest.raises(SlotError, match=rf"token {N} has block {B}, outside -1 .. {B - 1}"):
        ref.gather_paged(rows, index(0, B), unit="block", out=chunk(N + 1)[0])


def test_the_index_of_a_skipped_token_is_not_looked_at(ref):
    rows, tensors, _ = cache()
    out, array = chunk(3, fill=9)
    ref.gather_paged(rows, index(999, -5, 1), skip_tokens=2, out=out)
    assert (array[:, :, :2] == 9).all()
    np.testing.assert_array_equal(array[0, 0, 2], tensors[0][0, 0, 1])
    # Within a block, too: its first tokens are skipped, so only the second block counts.
    ref.gather_paged(rows, index(999, 1), unit="block", skip_tokens=N, out=chunk(N + 1)[0])


def test_two_tokens_with_one_target_are_named_and_nothing_is_written(ref):
    rows, tensors, _ = cache(fill=-1)
    with pytest.raises(SlotError, match="tokens 1 and 3 have one target, slot 7"):
        ref.scatter_paged(chunk(4)[0], index(-1, 7, -1, 7), out=rows)
    assert all((t == -1).all() for t in tensors)
    ref.scatter_paged(chunk(2, fill=3)[0], index(7, 7), check_duplicates=False, out=rows)
    assert (tensors[0][:, 1, 3] == 3).all()
    ref.scatter_paged(
        chunk(3, fill=4)[0], index(7, 7, 1), skip_tokens=1, out=rows
    )  # the first is skipped: no duplicate


def test_between_any_two_layouts_and_back(ref):
    tensors = [np.random.default_rng(i).normal(size=(B, H, N, 2 * D)).astype(np.float16) for i in range(L)]
    source = Layout("L|BHN(KD)").bind(tensors)
    target_tensors = np.zeros((B, L, 2, N, H, D), np.float16)
    target = Layout("BLKNHD").bind(target_tensors)
    order = np.random.default_rng(5).permutation(SLOTS).astype(np.int64)
    middle = ref.gather_paged(source, order)
    ref.scatter_paged(middle, order, out=target)
    for part, layer in source.planes():
        np.testing.assert_array_equal(source.array(part, layer), target.array(part, layer))


def test_every_bit_pattern_moves_as_it_is(ref):
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(1, 2, 64, 2, 256)
    out = np.zeros_like(bits)
    dtypes = {"K": "bfloat16", "V": "bfloat16"}
    ref.convert_layout(Layout("LKTHD").bind(bits, dtypes=dtypes), out=Layout("LKTHD").bind(out, dtypes=dtypes))
    np.testing.assert_array_equal(out, bits)


def test_converting_matches_parts_by_name_and_elements_by_index(ref):
    source = np.random.default_rng(0).normal(size=(L, 2, 7, H, D)).astype(np.float32)
    pairs = [[np.zeros((1, H, 7, D), np.float32) for _ in range(2)] for _ in range(L)]
    ref.convert_layout(Layout("LKTHD").bind(source), out=Layout("LK|1HTD").bind(pairs))
    for layer in range(L):
        for side in range(2):
            np.testing.assert_array_equal(pairs[layer][side][0], source[layer, side].transpose(1, 0, 2))


def test_copies_fill_their_targets_and_digest_on_the_way(ref):
    sources = [b"", b"abc", bytes(range(200)), np.arange(50, dtype=np.uint8)[10:30]]
    targets = [np.full(len(s) + 2, 0xEE, np.uint8) for s in sources]
    digests = np.zeros(4, np.uint64)
    ref.copy_batch(sources, out=[t[1:-1] for t in targets], digests=digests)
    for source, target in zip(sources, targets, strict=True):
        assert target.tobytes() == b"\xee" + bytes(source) + b"\xee"
    np.testing.assert_array_equal(digests, ref.digest(sources))
