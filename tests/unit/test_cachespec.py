"""Cache groups: everything is declared, and every declaration is held against the tensors."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore import CacheGroup, KVCacheSpec, Layout, LayoutError

B, N, H, D = 3, 4, 2, 8
KV16 = {"K": np.dtype(np.float16), "V": np.dtype(np.float16)}
PER_TOKEN = 2 * H * D * 2  # one layer


def group(layers=(0, 1), **changes):
    given = {
        "layout": Layout("L|KBNHD"),
        "dtypes": KV16,
        "block_tokens": N,
        "bytes_per_token": PER_TOKEN * len(layers),
    }
    return CacheGroup(layers, **{**given, **changes})


def tensors(layers=2, heads=H, width=D, block=N, dtype=np.float16):
    return [np.zeros((2, B, block, heads, width), dtype) for _ in range(layers)]


def test_what_agrees_is_bound():
    rows = group().bind(tensors())
    assert (rows.layers, rows.blocks, rows.block_tokens) == (2, B, N)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "distinct layers, at least one"),
        ({"layers": (1, 2, 1)}, r"distinct layers, at least one; got \(1, 2, 1\)"),
        ({"kind": "mamba"}, "unknown kind of cache 'mamba'; known are attention, recurrent, aux"),
        ({"block_tokens": 0}, "block_tokens must be positive, got 0"),
        ({"bytes_per_token": -1}, "bytes_per_token must be positive, got -1"),
        ({"logical_tokens": 0}, "logical_tokens must be positive"),
        ({"window": 0}, "window must be positive"),
        ({"dtypes": {"K": np.dtype(np.float16)}}, r"dtypes for \['K'\], its parts are \['K', 'V'\]"),
        ({"scales": {"Q": np.ones(2, np.float32)}}, "scales for part 'Q', but the parts are K, V"),
        ({"scales": {"K": np.ones(2)}}, r"scales of K must be float32 \[2\] .*got float64 \[2\]"),
        ({"scales": {"K": np.ones(3, np.float32)}}, r"must be float32 \[2\] .*got float32 \[3\]"),
        ({"scales": {"V": np.ones((2, H, 1), np.float32)}}, r"scales of V .*got float32 \[2, 2, 1\]"),
    ],
)
def test_declarations_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(LayoutError, match=message):
        group(**changes)


@pytest.mark.parametrize(
    ("declared", "given", "message"),
    [
        ({"layers": (0, 1, 2)}, {}, "2 layers of tensors for 3 declared layers"),
        ({"block_tokens": 16}, {}, r"axis N .*has extent 4.* 16 would fit"),
        ({"bytes_per_token": 2 * PER_TOKEN + 2}, {}, "128 B per token in the tensors, 130 B declared"),
        ({}, {"width": D // 2}, "64 B per token in the tensors, 128 B declared"),
        ({"layout": Layout("L|KBNHD", H=4)}, {}, r"axis H .*extent 2.* 4 would fit"),
        ({"scales": {"K": np.ones((2, H + 1), np.float32)}}, {}, "scales of K are for 3 heads, its tensors have 2"),
        ({}, {"dtype": np.float32}, r"part K is declared float16 \(2 B\)"),
    ],
)
def test_tensors_that_differ_from_the_declaration_are_refused(declared, given, message):
    with pytest.raises(LayoutError, match=message):
        group(**declared).bind(tensors(**given))


def test_a_wrong_head_size_cannot_hide_behind_a_right_total():
    swapped = group(layout=Layout("L|KBNHD", H=H, D=D))
    with pytest.raises(LayoutError, match="axis H"):
        swapped.bind(tensors(heads=D, width=H))


def test_a_quantised_cache_with_scales_per_tensor_and_per_head():
    scales = {"K": np.ones(2, np.float32), "V": np.ones((2, H), np.float32)}
    dtypes = {"K": "float8_e4m3fn", "V": "float8_e4m3fn"}
    quantised = group(dtypes=dtypes, bytes_per_token=2 * 2 * H * D, scales=scales)
    rows = quantised.bind(tensors(dtype=np.uint8))
    assert rows.dtypes == "float8_e4m3fn"
    assert quantised.scales["V"].shape == (2, H)


def test_k_and_v_of_different_types():
    mixed = group(dtypes={"K": "float8_e4m3fn", "V": "int8"}, bytes_per_token=2 * 2 * H * D)
    rows = mixed.bind(tensors(dtype=np.uint8))
    assert [(s.parts, str(s.dtype)) for s in rows.segments] == [(("K",), "float8_e4m3fn"), (("V",), "int8")]


def hybrid():
    full = group((0, 3))
    window = group((1,), window=512)
    state = CacheGroup(
        (2,),
        Layout("L|B*"),
        {"page": np.dtype(np.uint8)},
        block_tokens=1,
        bytes_per_token=25,
        logical_tokens=8,
        kind="recurrent",
    )
    indexer = CacheGroup(
        (0, 3),
        Layout("L|B[v:N128,s:N4]"),
        {"v": np.dtype(np.uint8), "s": np.dtype(np.uint8)},
        block_tokens=N,
        bytes_per_token=2 * 132,
        kind="aux",
        shares_with=0,
    )
    return full, window, state, indexer


def test_a_hybrid_model_binds_group_by_group():
    spec = KVCacheSpec(hybrid())
    pages = [np.zeros((B, N * 132), np.uint8) for _ in range(2)]
    state = [np.zeros((B, 50), np.float32)]  # 200 B for 8 tokens: 25 B each
    full, window, states, indexer = spec.bind([tensors(2), tensors(1), state, pages])
    assert (full.layers, window.layers, states.parts, indexer.parts) == (2, 1, ("page",), ("v", "s"))


def test_the_bytes_of_a_state_are_counted_by_the_tokens_it_stands_for():
    _, _, state, _ = hybrid()
    with pytest.raises(LayoutError, match="26 B per token in the tensors, 25 B declared"):
        state.bind([np.zeros((B, 51), np.float32)])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda full, window, state, indexer: (), "at least one group"),
        (
            lambda full, window, state, indexer: (full, group((3,))),
            "layer 3 is in groups 0 and 1, both of kind attention",
        ),
        (lambda full, window, state, indexer: (indexer, full), "group 0 shares blocks with group 0"),
        (lambda full, window, state, indexer: (full, group((9,), shares_with=2)), "group 1 shares blocks with group 2"),
        (
            lambda full, window, state, indexer: (full, group((9,), shares_with=-1)),
            "group 1 shares blocks with group -1",
        ),
    ],
)
def test_groups_that_contradict_one_another_are_refused(groups, message):
    with pytest.raises(LayoutError, match=message):
        KVCacheSpec(groups(*hybrid()))


def test_every_group_needs_its_tensors():
    with pytest.raises(LayoutError, match="1 groups need as many sets of tensors, got 2"):
        KVCacheSpec((group(),)).bind([tensors(), tensors()])
