"""Layouts bound to tensors: every row of the table of layouts addresses the elements that it names, and no others.

`LOGICAL` holds what the caches contain, ``[layer, K/V, block, token, head, channel]``, every element different. Each
case arranges it in memory as some engine does, with plain NumPy; binding must find every element again.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore import ArrayRef, Layout, LayoutError

L, B, N, H, D = 2, 3, 4, 5, 6
LOGICAL = np.arange(L * 2 * B * N * H * D, dtype=np.float32).reshape(L, 2, B, N, H, D)
PACKED = LOGICAL[:, 0, :, :, :, :].reshape(L, B, N, H * D)  # rows of MLA: no heads, no K/V pair


def by_layer(axes):
    """One tensor per layer, of the axes KBNHD in another order."""
    order = [1 + "KBNHD".index(a) for a in axes]
    return [np.ascontiguousarray(layer) for layer in LOGICAL.transpose(0, *order)]


def pairs(shape):
    """Nested lists: K's tensors of all layers, then V's."""
    return [[LOGICAL[layer, side].reshape(shape).copy() for layer in range(L)] for side in range(2)]


TABLE = {
    "L|KBNHD": by_layer("KBNHD"),
    "L|KBHND": by_layer("KBHND"),
    "L|BKNHD": by_layer("BKNHD"),
    "L|BKHND": by_layer("BKHND"),
    "L|BHN(KD)": [a.reshape(B, H, N, 2 * D) for a in by_layer("BHNKD")],
    "L|BNH(KD)": [a.reshape(B, N, H, 2 * D) for a in by_layer("BNHKD")],
    "BLKNHD": np.ascontiguousarray(LOGICAL.transpose(2, 0, 1, 3, 4, 5)),
    "BLKHND": np.ascontiguousarray(LOGICAL.transpose(2, 0, 1, 4, 3, 5)),
    "KL|(BN)HD": pairs((B * N, H, D)),
    "KL|BNHD": pairs((B, N, H, D)),
    "LK|BNHD": [(LOGICAL[i, 0].copy(), LOGICAL[i, 1].copy()) for i in range(L)],
}
OPEN = {"KL|(BN)HD": {"N": N}}  # what fused axes leave open


@pytest.mark.parametrize("text", TABLE)
def test_paged_caches_with_heads(text):
    rows = Layout(text, **OPEN.get(text, {})).bind(TABLE[text])
    assert (rows.layers, rows.blocks, rows.block_tokens, rows.parts) == (L, B, N, ("K", "V"))
    assert rows.paged
    assert rows.nbytes == LOGICAL.nbytes
    for layer, (side, part) in itertools.product(range(L), enumerate("KV")):
        np.testing.assert_array_equal(rows.array(part, layer), LOGICAL[layer, side])


@pytest.mark.parametrize(
    ("text", "shape"), [("L|BNC", (B, N, H * D)), ("L|(BN)1C", (B * N, 1, H * D)), ("L|B1NC", (B, 1, N, H * D))]
)
def test_packed_rows(text, shape):
    tensors = [PACKED[i].reshape(shape).copy() for i in range(L)]
    rows = Layout(text, **({"N": N} if "(" in text else {})).bind(tensors)
    assert rows.parts == ("C",)
    for layer in range(L):
        np.testing.assert_array_equal(rows.array("C", layer), PACKED[layer][:, :, None, :])


def test_k_transposed_within_the_block():
    # K of a block and head is [D, N], V is [N, D], one after the other.
    tensors = [
        np.concatenate(
            [
                LOGICAL[i, 0].transpose(0, 2, 3, 1).reshape(B, H, D * N),
                LOGICAL[i, 1].transpose(0, 2, 1, 3).reshape(B, H, N * D),
            ],
            axis=-1,
        )
        for i in range(L)
    ]
    rows = Layout("L|BH[K:DN,V:ND]", N=N, D=D).bind(tensors)
    for layer, (side, part) in itertools.product(range(L), enumerate("KV")):
        np.testing.assert_array_equal(rows.array(part, layer), LOGICAL[layer, side])
    assert [s.contiguous_rows for s in rows.segments] == [False, True]
    with pytest.raises(LayoutError, match="the regions leave"):
        Layout("L|BH[K:DN,V:ND]", N=N, D=D - 1).bind(tensors)


def test_k_and_v_of_different_width_in_one_tensor():
    k = np.arange(L * B * N * 6, dtype=np.float32).reshape(L, B, N, 6)
    v = -1 - np.arange(L * B * N * 4, dtype=np.float32).reshape(L, B, N, 4)
    tensors = [np.concatenate([k[i].reshape(B, -1), v[i].reshape(B, -1)], axis=1) for i in range(L)]
    rows = Layout("L|B[K:ND,V:NE]", N=N, D=6, E=4).bind(tensors)
    for layer in range(L):
        np.testing.assert_array_equal(rows.array("K", layer)[:, :, 0], k[layer])
        np.testing.assert_array_equal(rows.array("V", layer)[:, :, 0], v[layer])


def test_k_and_v_of_different_width_on_sides_of_a_k_axis():
    # Each side has room for the wider one; V's rows are shorter, and what is left of its side is padding.
    k = np.arange(B * N * 6, dtype=np.float32).reshape(B, N, 6)
    v = -1 - np.arange(B * N * 4, dtype=np.float32).reshape(B, N, 4)
    tensor = np.full((2, B, N * 6), np.nan, np.float32)
    tensor[0], tensor[1, :, : N * 4] = k.reshape(B, -1), v.reshape(B, -1)
    rows = Layout("L|KB[K:ND,V:NE]", N=N, D=6, E=4).bind([tensor])
    np.testing.assert_array_equal(rows.array("K", 0)[:, :, 0], k)
    np.testing.assert_array_equal(rows.array("V", 0)[:, :, 0], v)


def test_values_of_a_page_and_then_its_scales():
    values, scales = 128, 4
    page = (
        np.arange(L * B * N * (values + scales), dtype=np.uint32).astype(np.uint8).reshape(L, B, N * (values + scales))
    )
    rows = Layout("L|B[v:N128,s:N4]", N=N).bind(list(page))
    assert rows.parts == ("v", "s")
    for layer in range(L):
        expected = page[layer, :, : N * values].reshape(B, N, 1, values)
        np.testing.assert_array_equal(rows.array("v", layer), expected)
        np.testing.assert_array_equal(rows.array("s", layer), page[layer, :, N * values :].reshape(B, N, 1, scales))
    assert rows.nbytes == page.nbytes


def test_opaque_pages_are_bytes_whatever_the_tensors_type():
    states = np.random.default_rng(0).normal(size=(L, B, 3, 7)).astype(np.float16)
    rows = Layout("L|B*").bind(list(states))
    assert (rows.parts, rows.blocks, rows.block_tokens) == (("page",), B, 1)
    for layer in range(L):
        np.testing.assert_array_equal(rows.array("page", layer)[:, 0, 0], states[layer].reshape(B, -1).view(np.uint8))


def test_the_dynamic_cache_of_transformers():
    tensors = [
        tuple(torch.from_numpy(LOGICAL[i, k, 0].transpose(1, 0, 2).copy())[None] for k in range(2)) for i in range(L)
    ]
    rows = Layout("LK|1HTD").bind(tensors)
    assert (rows.paged, rows.blocks, rows.block_tokens) == (False, 1, N)
    for layer, (side, part) in itertools.product(range(L), enumerate("KV")):
        np.testing.assert_array_equal(rows.array(part, layer)[0], LOGICAL[layer, side, 0])


@pytest.mark.parametrize("axes", ["LKTHD", "LKHTD", "KLTHD", "TLKHD"])
def test_dense_chunks(axes):
    chunk = LOGICAL.transpose(2, 3, 0, 1, 4, 5).reshape(B * N, L, 2, H, D)  # T L K H D
    tensor = np.ascontiguousarray(chunk.transpose(["TLKHD".index(a) for a in axes]))
    rows = Layout(axes).bind(tensor)
    for layer, (side, part) in itertools.product(range(L), enumerate("KV")):
        np.testing.assert_array_equal(rows.array(part, layer)[0], LOGICAL[layer, side].reshape(B * N, H, D))


def test_a_dense_chunk_of_packed_rows():
    rows = Layout("LTC").bind(PACKED.reshape(L, B * N, H * D))
    for layer in range(L):
        np.testing.assert_array_equal(rows.array("C", layer)[0, :, 0], PACKED[layer].reshape(B * N, -1))


# --- any order of axes, any strides


@st.composite
def arrangements(draw):
    """A layout string with one tensor, or lists of them, that holds `LOGICAL` in some order and with some strides."""
    order = draw(st.permutations("LKBNHD"))
    lists = draw(st.sampled_from(["", "L", "K", "LK", "KL"]))
    dims = [a for a in order if a not in lists]
    view = LOGICAL.transpose(["LKBNHD".index(a) for a in (*lists, *dims)])
    fuse = draw(st.sampled_from([None, *range(len(dims) - 1)]))
    steps = [draw(st.sampled_from([1, -1, 2, -3])) for _ in dims]
    text = list(dims)
    if fuse is not None:
        view = view.reshape(*view.shape[: len(lists) + fuse], -1, *view.shape[len(lists) + fuse + 2 :])
        text[fuse : fuse + 2] = [f"({dims[fuse]}{dims[fuse + 1]})"]
        del steps[-1]

    def stretched(array):
        """The same elements with padding between them, or back to front."""
        base = np.full([n * abs(s) for n, s in zip(array.shape, steps, strict=True)], -1, np.float32)
        window = base[tuple(slice(None, None, s) for s in steps)]
        window[...] = array
        return window

    def nested(array, depth):
        return [nested(a, depth - 1) for a in array] if depth else stretched(array)

    declared = {a: LOGICAL.shape["LKBNHD".index(a)] for a in ("" if fuse is None else dims[fuse : fuse + 2])}
    return (f"{lists}|" if lists else "") + "".join(text), nested(view, len(lists)), declared


@given(arrangements())
def test_any_order_of_axes_and_any_strides(case):
    text, tensors, declared = case
    rows = Layout(text, **declared).bind(tensors)
    assert rows.layers == L
    for layer, (side, part) in itertools.product(range(L), enumerate("KV")):
        np.testing.assert_array_equal(rows.array(part, layer), LOGICAL[layer, side])
    rows.check_writable()
    rows.array("V", 1)[2, 3, 4, 5] = 7.5
    again = Layout(text, **declared).bind(tensors)
    assert (again.array("V", 1) != LOGICAL[1, 1]).sum() == 1


def test_unit_dims_are_skipped_wherever_they_are():
    for at in range(6):
        text = "KBNHD"[:at] + "1" + "KBNHD"[at:]
        rows = Layout(f"L|{text}").bind([np.expand_dims(a, at) for a in TABLE["L|KBNHD"]])
        np.testing.assert_array_equal(rows.array("V", 1), LOGICAL[1, 1])


# --- sources of memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_torch_is_bound_in_place(dtype):
    tensors = [torch.zeros((2, B, N, H, D), dtype=dtype) for _ in range(L)]
    rows = Layout("L|KBNHD").bind(tensors)
    segment, side = rows.segment("V")
    assert segment.bases[side][1] == tensors[1][1].data_ptr()
    rows.bytes_view("V", 1)[2, 3, 4, 5] = 0x3C
    assert tensors[1].view(torch.uint8)[1, 2, 3, 4].reshape(D, -1)[5].eq(0x3C).all()
    assert sum(int(t.view(torch.uint8).ne(0).sum()) for t in tensors) == dtype.itemsize


def test_a_device_is_bound_without_being_touched():
    tensors = [torch.empty((2, B, N, H, D), dtype=torch.bfloat16, device="meta") for _ in range(L)]
    rows = Layout("L|KBNHD").bind(tensors)
    assert rows.device == "meta"
    assert (rows.segments[0].token_stride, rows.segments[0].dim_stride) == (H * D * 2, 2)
    with pytest.raises(LayoutError, match="memory on meta cannot be read"):
        rows.array("K", 0)


def test_raw_pointers_are_bound_with_their_strides():
    pool = np.zeros((B, N, 2, H, D + 2), np.float16)
    pool[..., :D] = LOGICAL[0].transpose(1, 2, 0, 3, 4)
    ref = ArrayRef.at(pool.ctypes.data, (B, N, 2, H, D), "float16", strides=pool.strides, owner=pool)
    rows = Layout("L|BNKHD").bind([ref])
    np.testing.assert_array_equal(rows.array("V", 0), LOGICAL[0, 1].astype(np.float16))


def test_the_layout_keeps_the_tensors_alive():
    rows = Layout("L|KBNHD").bind([np.full((2, 64, 16, 4, 8), 3, np.float32)])
    noise = [np.full((2, 64, 16, 4, 8), -1, np.float32) for _ in range(8)]  # would reuse freed memory
    assert (rows.array("K", 0) == 3).all()
    assert len(noise) == 8


def test_part_types_are_declared_where_the_tensors_do_not_know_them():
    codes = np.arange(2 * B * N * H * D, dtype=np.uint8).reshape(2, B, N, H, D)
    rows = Layout("L|KBNHD").bind([codes], dtypes={"K": "float8_e4m3fn", "V": "float8_e5m2"})
    assert rows.dtypes == "float8_e4m3fn/float8_e5m2"
    np.testing.assert_array_equal(rows.array("V", 0).view(np.uint8), codes[1])
    assert rows.array("K", 0).dtype == ml_dtypes.float8_e4m3fn


def test_regions_of_different_types_share_bytes():
    page = np.arange(B * (N * D * 2 + N * 4), dtype=np.uint32).astype(np.uint8).reshape(B, -1)
    rows = Layout("L|B[K:ND,V:NE]", N=N, D=D, E=1).bind([page], dtypes={"K": "bfloat16", "V": "float32"})
    np.testing.assert_array_equal(rows.bytes_view("V", 0)[2].reshape(-1), page[2, N * D * 2 :])
    np.testing.assert_array_equal(rows.bytes_view("K", 0)[1].reshape(-1), page[1, : N * D * 2])


# --- what cannot be confused


def test_two_blocks_are_not_taken_for_k_and_v():
    square = np.arange(2 * 2 * N * H * D, dtype=np.float32).reshape(2, 2, N, H, D)  # two blocks, and the pair K, V
    first, second = Layout("L|KBNHD").bind([square]), Layout("L|BKNHD").bind([square])
    np.testing.assert_array_equal(first.array("V", 0)[0], square[1, 0])
    np.testing.assert_array_equal(second.array("V", 0)[0], square[0, 1])
    assert first.segments[0].block_stride == square.strides[1]
    assert second.segments[0].block_stride == square.strides[0]


def test_heads_are_not_taken_for_tokens():
    square = np.arange(2 * B * 4 * 4 * D, dtype=np.float32).reshape(2, B, 4, 4, D)  # as many heads as tokens in a block
    first, second = Layout("L|KBNHD").bind([square]), Layout("L|KBHND").bind([square])
    np.testing.assert_array_equal(first.array("K", 0), second.array("K", 0).swapaxes(1, 2))
    assert not np.array_equal(first.array("K", 0), second.array("K", 0))


def test_two_layers_are_not_taken_for_k_and_v():
    square = [[np.full((B, N, H, D), 10 * i + j, np.float32) for j in range(2)] for i in range(2)]
    assert Layout("LK|BNHD").bind(square).array("V", 0)[0, 0, 0, 0] == 1
    assert Layout("KL|BNHD").bind(square).array("V", 0)[0, 0, 0, 0] == 10


# --- what does not fit


def tensor(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


GOOD = tensor(2, B, N, H, D)


@pytest.mark.parametrize(
    ("text", "tensors", "options", "message"),
    [
        ("L|KBNHD", [tensor(3, B, N, H, D)], {}, r"axis K \(K/V pair\) has extent 3 in tensor \[0\] .*but 2 would fit"),
        ("L|KBNHD", [GOOD], {"N": 16}, r"axis N \(token within a block\) has extent 4 .*but 16 would fit \(declared\)"),
        (
            "L|KBNHD",
            [GOOD, tensor(2, B, N, H + 1, D)],
            {},
            r"axis H .* extent 6 in tensor \[1\].* 5 would fit \(tensor \[0\]",
        ),
        ("L|KBNHD", [GOOD[0]], {}, r"tensor \[0\] has 4 dims \(3, 4, 5, 6\), but 5 would fit \(K B N H D\)"),
        (
            "L|KBNHD",
            GOOD,
            {},
            r"axis L \(layer\) is a list level, but a ndarray was given; pass a list of tensors, or write L",
        ),
        ("LKBNHD", [GOOD], {}, "it has no list level, but a list was given where a tensor would fit"),
        ("L|KBNHD", [[GOOD]], {}, "it has 1 list level, but a list was given where a tensor would fit"),
        ("L|KBNHD", [], {}, r"axis L \(layer\) is an empty list"),
        ("L|KBNHD", [GOOD], {"L": 2}, r"axis L \(layer\) has extent 1 in list level 0, but 2 would fit \(declared\)"),
        ("LK|BNHD", [[GOOD[0]] * 3], {}, r"axis K .* extent 3 in list level 1, but 2 would fit \(the pair K, V\)"),
        ("L|(BN)1C", [tensor(12, 2, 8)], {"N": 4}, r"a unit dim has extent 2 in tensor \[0\]"),
        (
            "KL|(BN)HD",
            [[tensor(12, H, D)], [tensor(12, H, D)]],
            {},
            r"\(BN\) of extent 12 .* leaves B \(block\) and N .* open",
        ),
        (
            "KL|(BN)HD",
            [[tensor(12, H, D)], [tensor(12, H, D)]],
            {"N": 5},
            r"\(BN\) has extent 12 .*, which is not B=\? x N=5",
        ),
        ("L|BHN(KD)", [tensor(B, H, N, 7)], {}, r"\(KD\) has extent 7 .*, which is not K=2 x D=\?"),
        ("L|(KB)NHD", [tensor(6, N, H, D)], {"B": 4}, r"\(KB\) has extent 6 .*, which is not K=2 x B=4"),
        ("L|B[v:N128,s:N4]", [tensor(B, N * 132, dtype=np.uint8)], {}, r"region v leaves N .* open; declare it"),
        (
            "L|B[v:N128,s:N4]",
            [tensor(B, N * 132, dtype=np.uint8)],
            {"N": 5},
            "region v takes 640 B, but 528 B are left",
        ),
        (
            "L|B[v:N128,s:N4]",
            [tensor(B, N * 140, dtype=np.uint8)],
            {"N": N},
            r"the regions leave 32 B of tensor \[0\] undescr",
        ),
        ("L|B*", [tensor(B, 4, 6)[:, :, ::2]], {}, r"the dims \(4, 3\) of tensor \[0\] .* must be contiguous"),
        ("L|B*", [tensor(B)], {}, r"has 1 dims .* but 1 and more would fit"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_the_axis_and_what_would(text, tensors, options, message):
    with pytest.raises(LayoutError, match=message) as caught:
        Layout(text).bind(tensors, **options)
    assert f"layout {text!r}" in str(caught.value) or "extent" in str(caught.value)


def test_layers_that_differ_are_refused():
    with pytest.raises(LayoutError, match=r"part K of layer 1 has strides, width or dtype .* groups of a KVCacheSpec"):
        Layout("L|KBNHD").bind([GOOD, tensor(2, B, N, H, D + 2)[..., :D]])
    with pytest.raises(LayoutError, match="part K of layer 1"):
        Layout("L|KBNHD").bind([GOOD, GOOD.astype(np.float64)])


def test_tensors_of_several_devices_are_refused():
    tensors = [torch.zeros(2, B, N, H, D), torch.zeros(2, B, N, H, D, device="meta")]
    with pytest.raises(LayoutError, match="several devices: cpu, meta"):
        Layout("L|KBNHD").bind(tensors)


def test_declared_types_must_have_the_size_of_the_elements():
    with pytest.raises(LayoutError, match=r"part K is declared bfloat16 \(2 B\), .*tensor \[0\] holds float32 \(4 B\)"):
        Layout("L|KBNHD").bind([GOOD], dtypes={"K": "bfloat16"})
    with pytest.raises(LayoutError, match="dtypes name Q, but its parts are K, V"):
        Layout("L|KBNHD").bind([GOOD], dtypes={"Q": "float32"})


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.sampled_from([*sorted(TABLE), "L|BNC", "LTC", "LKTHD"]))
def test_any_shape_fits_or_is_refused_with_the_layout_named(shape, text):
    layout = Layout(text)
    node = np.zeros(shape, np.float32)
    for axis in reversed(layout.list_axes):
        node = [node] * (2 if axis == "K" else 1)
    try:
        rows = layout.bind(node)
    except LayoutError as error:
        assert repr(text) in str(error)  # noqa: PT017 - either outcome is right, and each has its own check
        return
    elements = sum(np.prod(rows.array(p, i).shape) for p, i in rows.planes())
    assert elements == np.prod(shape) * 2 ** layout.list_axes.count("K")


@pytest.mark.parametrize("blocks", [0, 1])
def test_caches_of_no_blocks_are_caches(blocks):
    rows = Layout("L|KBNHD").bind([tensor(2, blocks, N, H, D)])
    assert (rows.blocks, rows.tokens, rows.nbytes) == (blocks, blocks * N, blocks * N * H * D * 2 * 4)
    assert rows.array("V", 0).shape == (blocks, N, H, D)
