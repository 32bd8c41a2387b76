"""Frames that are written into memory of the caller's, and raw layers that are used where they lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvcore
from kvcore.codecs import FrameWriter, GroupInfo, PartInfo, encode_frame, plan_frame, raw, write_frame
from kvcore.codecs.frame import frame_bound
from kvcore.codecs.frame_reader import FrameReader
from kvcore.errors import CorruptFrameError, LayoutError

BACKEND = kvcore.open_backend("cpu_ref", fallback="error")
PARTS = (PartInfo("K", "float16", 5), PartInfo("V", "float16", 3))
GROUP = GroupInfo("LKHTD", (2, 5), PARTS, rows=3, head_count=2)  # segments of 30 and 18 B: gaps between all of them
IDENTITY = {"tokens": 3, "namespace": b"n" * 32, "key": b"k" * 32}


def rows(group: GroupInfo = GROUP) -> kvcore.RowLayout:
    rng = np.random.default_rng(0)
    layers = [
        [rng.normal(size=(group.head_count, group.rows, part.width)).astype(part.dtype) for part in group.parts]
        for _ in group.layers
    ]
    return kvcore.Layout("L|[K:HTD,V:HTE]", H=group.head_count, T=group.rows, D=5, E=3).bind(
        [np.concatenate([x.reshape(-1) for x in layer]) for layer in layers]
    )


@pytest.mark.parametrize("codec", ["raw", "lossless", "balanced", "int4"])
def test_a_frame_is_the_same_wherever_it_is_written(codec):
    wanted = encode_frame(BACKEND, [GROUP], [rows()], codec=codec, **IDENTITY)
    memory = bytearray(b"\xa5" * (len(wanted) + 9))
    frame = encode_frame(BACKEND, [GROUP], [rows()], codec=codec, out=memory, **IDENTITY)
    assert isinstance(frame, memoryview)
    assert frame == wanted
    assert memory == wanted + b"\xa5" * 9, "gaps are cleared, and nothing beyond the frame is written"


def test_memory_that_does_not_take_the_frame_is_left_alone():
    plan = plan_frame([GROUP], **IDENTITY)
    short = bytearray(b"\xa5" * (plan.nbytes - 1))
    with pytest.raises(LayoutError, match=f"takes {plan.nbytes} B.*has {plan.nbytes - 1} B"):
        FrameWriter(plan, short)
    assert set(short) == {0xA5}
    with pytest.raises(LayoutError, match="is read-only"):
        FrameWriter(plan, bytes(plan.nbytes))
    with pytest.raises(LayoutError, match="contiguous"):
        FrameWriter(plan, memoryview(bytearray(2 * plan.nbytes))[::2])
    segments = [[bytes(30)] * 2 + [bytes(18)] * 2] * 2
    with pytest.raises(LayoutError, match="takes"):
        write_frame([GROUP], segments, digest=BACKEND.digest, out=short, **IDENTITY)
    assert set(short) == {0xA5}


def test_layers_are_bound_where_they_lie():
    source = rows()
    plan = plan_frame([GROUP], **IDENTITY)
    writer = FrameWriter(plan)
    chunk = raw.bind_layers(GROUP, [writer.layer_view(i) for i in range(2)])
    assert not chunk.readonly
    BACKEND.convert_layout(source, out=chunk)
    frame = writer.finish(BACKEND.digest)
    assert frame == encode_frame(BACKEND, [GROUP], [source], codec="raw", **IDENTITY)
    reader = FrameReader(frame, expect_namespace=None, expect_key=None, digest=BACKEND.digest)
    bound = raw.bind_layers(GROUP, reader.layer_views([0, 1]))
    assert bound.readonly
    for part, layer in source.planes():
        assert (bound.array(part, layer) == source.array(part, layer)).all()
    with pytest.raises(LayoutError, match="a raw layer of this group has"):
        raw.bind_layers(GROUP, [reader.layer(0)[:-1]])


def test_views_of_layers_are_verified():
    frame = bytearray(encode_frame(BACKEND, [GROUP], [rows()], codec="raw", **IDENTITY))
    frame[-1] ^= 1
    reader = FrameReader(frame, expect_namespace=None, expect_key=None, digest=BACKEND.digest)
    assert [bytes(view) for view in reader.layer_views([0])] == [bytes(reader.layer(0))]
    with pytest.raises(CorruptFrameError, match="layer 5"):
        reader.layer_views([0, 1])


def test_plans_of_raw_frames_are_alike_but_for_whose_they_are():
    """Plans are remembered by shape: nothing of one chunk may be in the frame of another."""
    for position, key in ((0, b"k" * 32), (256, b"l" * 32), (-1, b"m" * 32)):
        group = replace(GROUP, base_position=position)
        identity = {**IDENTITY, "key": key}
        frame = FrameWriter(plan_frame([group], **identity)).finish(BACKEND.digest)
        reader = FrameReader(frame, expect_namespace=b"n" * 32, expect_key=key, digest=BACKEND.digest)
        assert reader.groups == (group,)
        reader.verify()


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_a_bound_is_exact_where_values_do_not_matter(codec):
    frame = encode_frame(BACKEND, [GROUP], [rows()], codec=codec, **IDENTITY)
    assert frame_bound([GROUP], tokens=3, codec=codec) == len(frame)
