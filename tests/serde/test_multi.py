"""Groups: one object as a group of one, keys and values in objects of their own, and slots that are None."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvcore import Layout, LayoutDesc
from kvcore.codecs.key_ring import KeyRing
from kvcore.errors import CorruptFrameError, LayoutError
from kvcore.serde import (
    FrameDeserializer,
    FrameSerializer,
    MultiSerializer,
    create_serde,
    create_serde_processor,
    single_to_multi_deserializer,
    single_to_multi_serializer,
)
from kvcore.serde.slots import SlotsDeserializer, SlotsSerializer

from .objects import key, kv_desc

PART = LayoutDesc(Layout("LTHD", L=2, T=20, H=2, D=8), {"X": "bfloat16"})


def asym(backend, **options):
    return create_serde({"type": "asym_k16_v8", "slots": True, **options}, backend)


def frame_of(make, serde, src):
    layout = tuple(None if one is None else one.plan for one in src)
    dst = make(serde.serializer.estimate_serialized_size(layout))
    dst.set_used_size(serde.serializer.serialize(src, dst, key()))
    return dst


# --- groups of one


def test_a_group_of_one_gives_the_bytes_of_its_object(make, backend):
    forth, back = FrameSerializer("balanced", backend), FrameDeserializer(backend)
    multi, multi_back = single_to_multi_serializer(forth), single_to_multi_deserializer(back)
    src = make(kv_desc(), seed=1)
    size = forth.estimate_serialized_size(src.plan)
    assert multi.estimate_serialized_size((src.plan,)) == size
    assert multi.estimate_serialized_size((None,)) == 0
    assert (multi.group_size, multi_back.group_size, multi.deterministic) == (1, 1, True)
    one, other = make(size), make(size)
    assert forth.serialize(src, one, key()) == multi.serialize((src,), other, key())
    assert one.view() == other.view()
    other.set_used_size(forth.serialize(src, one, key()))
    direct, bridged = make(kv_desc()), make(kv_desc())
    back.deserialize(other, direct, key())
    multi_back.deserialize(other, (bridged,), key())
    assert direct.view() == bridged.view()
    multi_back.deserialize(other, (None,), key())


def test_other_groups_than_of_one_raise(make, backend):
    multi = single_to_multi_serializer(FrameSerializer("raw", backend))
    back = single_to_multi_deserializer(FrameDeserializer(backend))
    src, dst = make(kv_desc()), make(9000)
    for group in ((), (src, src)):
        with pytest.raises(ValueError, match=f"a group of {len(group)} objects, where 1 are wanted"):
            multi.serialize(group, dst, key())
        with pytest.raises(ValueError, match="where 1 are wanted"):
            back.deserialize(dst, group, key())
        with pytest.raises(ValueError, match="where 1 are wanted"):
            multi.estimate_serialized_size(tuple(one.plan for one in group))
    with pytest.raises(ValueError, match="slot object of the group is None"):
        multi.serialize((None,), dst, key())
    assert set(bytes(dst.view())) == {0xA5}


# --- keys and values in objects of their own


@pytest.mark.parametrize("codec", ["raw", "lossless", "balanced", "fp8", "asym_k16_v8"])
def test_two_slots_give_the_bytes_of_an_object_of_both(make, backend, codec):
    both = make(kv_desc(), seed=1, base_position=40)
    k, v = make(PART, base_position=40), make(PART, base_position=40)
    for layer in range(2):
        k.rows().array("X", layer)[...] = both.rows().array("K", layer)
        v.rows().array("X", layer)[...] = both.rows().array("V", layer)
    single = FrameSerializer(codec, backend)
    size = single.estimate_serialized_size(both.plan)
    slots = SlotsSerializer(single)
    assert slots.estimate_serialized_size((k.plan, v.plan)) == size
    one, other = make(size), make(size)
    assert single.serialize(both, one, key()) == slots.serialize((k, v), other, key())
    assert one.view() == other.view()
    other.set_used_size(single.serialize(both, one, key()))
    back, whole = SlotsDeserializer(FrameDeserializer(backend)), make(kv_desc(), base_position=40)
    FrameDeserializer(backend).deserialize(other, whole, key())
    for given in itertools.product([True, False], repeat=2):
        group = tuple(make(PART, base_position=40) if wanted else None for wanted in given)
        back.deserialize(other, group, key())
        for part, obj in zip("KV", group, strict=True):
            if obj is not None:
                assert obj.rows().array("X", 1).tobytes() == whole.rows().array(part, 1).tobytes()


@pytest.mark.parametrize("options", [{}, {"scope": "tensor"}, {"scope": "page", "page_tokens": 7}])
@pytest.mark.parametrize("mode", ["kv", "v_only", "k_elsewhere"])
def test_every_mode_and_scope_comes_back(make, backend, mode, options):
    """And what one scope wrote, a reader that would write another one reads."""
    serde = asym(backend, mode=mode, **options)
    k, v = make(PART, seed=1), make(PART, seed=2)
    dst = frame_of(make, serde, (k, v))
    back = make(PART, seed=8), make(PART, seed=9)
    before = bytes(back[0].view())
    asym(backend, mode=mode).deserializer.deserialize(dst, back, key())
    assert bytes(back[0].view()) == (bytes(k.view()) if mode == "kv" else before)
    error = back[1].rows().array("X", 0).astype(np.float32) - v.rows().array("X", 0).astype(np.float32)
    assert 0 < np.abs(error).max() < 0.25


def test_keys_that_are_elsewhere_stay_as_they_are_whichever_slots_are_wanted(make, backend):
    serde = asym(backend, mode="k_elsewhere")
    dst = frame_of(make, serde, (make(PART, seed=1), make(PART, seed=2)))
    both, keys, vals = (make(PART, seed=8), make(PART, seed=9)), make(PART, seed=8), make(PART, seed=9)
    before = bytes(keys.view())
    for group in (both, (keys, None), (None, vals)):
        serde.deserializer.deserialize(dst, group, key())
    assert bytes(both[0].view()) == bytes(keys.view()) == before
    assert both[1].view() == vals.view()


@pytest.mark.parametrize(("mode", "partial"), [("kv", False), ("v_only", False), ("k_elsewhere", True)])
def test_groups_say_whether_something_of_them_may_be_left_as_it_is(backend, mode, partial, tmp_path):
    KeyRing.generate(tmp_path / "keys")
    slots = {"type": "asym_k16_v8", "slots": True, "mode": mode}
    steps = [slots, {"type": "aesgcm", "key_file": str(tmp_path / "keys")}]
    for config in (slots, {"type": "chain", "steps": steps}):
        with create_serde_processor(config, backend) as processor:
            assert processor.partial is partial
    alone = create_serde({"type": "asym_k16_v8", "mode": mode}, backend)
    assert single_to_multi_deserializer(alone.deserializer).partial is partial


def test_values_alone_need_no_keys(make, backend):
    serde, v = asym(backend, mode="v_only"), make(PART, seed=2)
    without, with_keys = frame_of(make, serde, (None, v)), frame_of(make, serde, (make(PART, seed=1), v))
    assert without.view() == with_keys.view()
    assert without.used_size < PART.nbytes
    back = make(PART)
    serde.deserializer.deserialize(without, (None, back), key())
    assert bytes(back.view()) != b"\xa5" * back.nbytes
    serde.deserializer.deserialize(without, (None, None), key())
    alone = create_serde({"type": "asym_k16_v8", "mode": "v_only"}, backend)
    named = make(LayoutDesc(Layout("L[V:THD]", L=2, T=20, H=2, D=8), {"V": "bfloat16"}))
    named.bytes()[:] = v.bytes()
    dst = make(alone.serializer.estimate_serialized_size(named.plan))
    assert alone.serializer.serialize(named, dst, key()) == dst.nbytes == without.used_size
    assert dst.view() == without.view()


def test_a_slot_that_is_needed_and_missing_is_refused_before_anything_is_written(make, backend):
    v, dst = make(PART, seed=2), make(20_000)
    for mode, group, slot in (("kv", (None, v), "K"), ("kv", (v, None), "V"), ("v_only", (v, None), "V")):
        serde = asym(backend, mode=mode)
        with pytest.raises(ValueError, match=f"slot {slot} of the group is None, and it is needed"):
            serde.serializer.serialize(group, dst, key())
        layout = tuple(None if one is None else one.plan for one in group)
        assert serde.serializer.estimate_serialized_size(layout) >= 0
    for group in ((v,), (v, v, v)):
        for call in (
            lambda group=group: serde.serializer.serialize(group, dst, key()),
            lambda group=group: serde.deserializer.deserialize(dst, group, key()),
            lambda group=group: serde.serializer.estimate_serialized_size(group),
        ):
            with pytest.raises(ValueError, match="where 2 are wanted: K, V"):
                call()
    assert asym(backend).serializer.estimate_serialized_size((None, None)) == 0
    assert set(bytes(dst.view())) == {0xA5}


def test_slots_must_be_of_one_chunk(make, backend):
    serde, k = asym(backend), make(PART, seed=1, base_position=20)
    longer = LayoutDesc(Layout("LTHD", L=2, T=21, H=2, D=8), {"X": "bfloat16"})
    for other in (make(PART, base_position=40), make(longer, base_position=20), make(PART, layers=(2, 4))):
        with pytest.raises(LayoutError, match="all but the parts must be the same"):
            serde.serializer.serialize((k, other), make(20_000), key())
    with pytest.raises(LayoutError, match="slot V holds one part, as in LTHD, not K, V"):
        serde.serializer.serialize((k, make(kv_desc(), base_position=20)), make(20_000), key())
    with pytest.raises(LayoutError, match="namespace"):
        serde.serializer.serialize((k, make(PART, base_position=20, namespace=b"x" * 32)), make(20_000), key())


def test_a_frame_of_other_parts_is_a_miss_whichever_slots_are_wanted(make, backend):
    values_alone = frame_of(make, asym(backend, mode="v_only"), (None, make(PART, seed=2)))
    reader = asym(backend).deserializer
    for group in ((make(PART), make(PART)), (make(PART), None), (None, make(PART))):
        with pytest.raises(CorruptFrameError) as caught:
            reader.deserialize(values_alone, group, key())
        assert caught.value.reason == "layout"


def test_groups_go_through_chains_and_the_processor(make, backend, tmp_path):
    path = tmp_path / "keys"
    KeyRing.generate(path)
    steps = [{"type": "asym_k16_v8", "slots": True}, {"type": "aesgcm", "key_file": str(path)}]
    config = {"type": "chain", "steps": steps}
    assert isinstance(create_serde(config, backend).serializer, MultiSerializer)
    with create_serde_processor(config, backend) as processor:
        assert processor.group_size == 2
        groups = [(make(PART, seed=i), make(PART, seed=i + 10)) for i in range(3)]
        size = processor.estimate_serialized_size(tuple(one.plan for one in groups[0]))
        dsts, keys = [make(size) for _ in groups], [key(i) for i in range(3)]
        broken = (groups[1][0], None)
        task = processor.submit_serialize([groups[0], broken, groups[2]], dsts, keys)
        first, missing, last = processor.take_serialize_results(task, timeout=None)
        assert (first, last) == (size, size)
        assert isinstance(missing, ValueError)
        backs = [(make(PART), make(PART)), (None, make(PART))]
        task = processor.submit_deserialize([dsts[0], dsts[2]], backs, [keys[0], keys[2]])
        assert processor.take_deserialize_results(task, timeout=None) == (None, None)
        assert backs[0][0].view() == groups[0][0].view()
