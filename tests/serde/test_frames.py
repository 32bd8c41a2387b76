"""`FrameSerializer` and `FrameDeserializer`: chunks to one frame and back, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore import BufferPool, KVMeta, Layout, LayoutDesc, RopeParams, open_backend
from kvcore.codecs import FrameReader, get_codec
from kvcore.engine import Namespace, chunk_keys
from kvcore.engine.plain import plain_engine
from kvcore.errors import ConfigError, CorruptFrameError, LayoutError, QuantizationError, UnsupportedOpError
from kvcore.memory import MemoryPlan
from kvcore.serde import FrameDeserializer, FrameSerializer
from kvcore.serde.groups import UNKNOWN_POSITION, groups_of
from kvcore.tiers.stores import MemoryStore

from .objects import fill, key, kv_desc, values

CODECS = ("raw", "lossless", "high", "balanced", "small", "int8", "int4", "int2", "fp8", "fp8_e5m2", "cachegen")
LAYOUTS = {
    "kv": kv_desc(),
    "kv-by-head": LayoutDesc(Layout("LKHTD", L=2, H=3, T=5, D=4), {"K": "float16", "V": "float16"}),
    "kv-apart": LayoutDesc(Layout("L[K:THD,V:THE]", L=2, T=7, H=2, D=6, E=3), {"K": "float16", "V": "float32"}),
    "mla": LayoutDesc(Layout("LTC", L=2, T=9, C=24), {"C": "bfloat16"}),
    "values-alone": LayoutDesc(Layout("LTHD", L=2, T=9, H=2, D=5), {"X": "bfloat16"}),
    "fp8": kv_desc(dtype="float8_e4m3fn"),
    "indexer": LayoutDesc(Layout("L[v:T128,s:T4]", L=2, T=5), {"v": "uint8", "s": "uint8"}),
    "pages": LayoutDesc(Layout("L[page:T33]", L=3, T=2), {"page": "uint8"}),
}


def round_trip(make, backend, codec, what, **meta):
    """Serialise and deserialise; return source, bytes and result."""
    src = make(what, seed=1, **meta)
    serializer = FrameSerializer(codec, backend)
    dst = make(serializer.estimate_serialized_size(src.plan))
    dst.set_used_size(serializer.serialize(src, dst, key()))
    back = make(what, **meta)
    FrameDeserializer(backend, [serializer.codec.name]).deserialize(dst, back, key())
    return src, dst, back


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("meta", [{}, {"base_position": 512, "layers": (7, 9), "heads": (4, 6)}], ids=["bare", "meta"])
def test_raw_brings_back_every_byte_of_every_layout(make, backend, layout, meta):
    if meta:
        count = layout.layout.extents["L"]
        heads = layout.layout.extents.get("H", 1)
        meta = {**meta, "layers": (7, 7 + count), "heads": (4, 4 + heads)}
    src, dst, back = round_trip(make, backend, "raw", layout, **meta)
    assert back.view() == src.view()
    assert dst.used_size == dst.nbytes, "the estimate of raw is exact"
    group = FrameReader(dst.view(), expect_namespace=None, expect_key=None, digest=backend.digest).groups[0]
    assert group.layers[0] == (7 if meta else 0)
    assert group.head_start == (4 if meta else 0)
    assert group.base_position == (512 if meta else UNKNOWN_POSITION)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", ["kv", "mla"])
def test_every_codec_goes_through(make, backend, codec, layout):
    rope = RopeParams(8)
    src, dst, back = round_trip(make, backend, codec, LAYOUTS[layout], base_position=0, rope=rope)
    lossless = get_codec(codec).lossless
    assert (back.view() == src.view()) == lossless
    assert np.abs(values(back) - values(src)).mean() < 0.6
    assert dst.used_size <= dst.nbytes


def test_the_frame_is_the_one_that_an_engine_writes(make, backend):
    """The same KV gives the same bytes, so that stores written before can be read by serdes, and the other way."""
    rope = RopeParams(8, theta=5e4)
    for codec in ("raw", "balanced", "fp8"):
        space = Namespace(model="m", revision="1", chunk_tokens=16, kv_dtype="bfloat16", rope=rope)
        store = MemoryStore()
        cache = plain_engine(store, space, layers=2, heads=2, width=8, backend=backend, codec=codec)
        tokens = list(range(40))
        src = make(kv_desc(tokens=32), seed=3)
        cache.store(tokens[:32], src.rows(), wait=True)
        for chunk in chunk_keys(space, tokens):
            obj = make(kv_desc(tokens=16), base_position=chunk.start, rope=rope, namespace=space.digest)
            backend.convert_layout(src.rows().select(tokens=(chunk.start, chunk.stop)), out=obj.rows())
            serializer = FrameSerializer(codec, backend)
            dst = make(serializer.estimate_serialized_size(obj.plan))
            size = serializer.serialize(obj, dst, chunk)
            assert bytes(store.get(chunk)) == bytes(dst.view()[:size])


@pytest.mark.parametrize("codec", ["raw", "balanced", "turboquant_4bit"])
def test_every_backend_writes_the_same_frame(make, backend, codec):
    """Of a device's too, to which objects in host memory are brought."""
    pytest.importorskip("kvcore_emu")
    rope = RopeParams(16)
    src = make(kv_desc(tokens=40, width=16), seed=1, base_position=0, rope=rope)
    results = set()
    for name in ("cpu_ref", "cpu", "emu"):
        opened = open_backend(name)
        serializer = FrameSerializer(codec, opened)
        dst = make(serializer.estimate_serialized_size(src.plan))
        dst.set_used_size(serializer.serialize(src, dst, key()))
        back = make(kv_desc(tokens=40, width=16), base_position=0, rope=rope)
        FrameDeserializer(opened).deserialize(dst, back, key())
        results.add((bytes(dst.view()), bytes(back.view())))
    assert len(results) == 1


def test_groups_of_a_hybrid_model_keep_their_own_shape(pool, make, backend):
    """Groups of odd sizes, with padding between them in the object, and layers that interleave."""
    descs = [kv_desc(tokens=5, heads=1, width=3), kv_desc(layers=1, tokens=5, width=7), LAYOUTS["pages"]]
    metas = [KVMeta(64, layers=(0, 2)), KVMeta(64, layers=(1, 2)), KVMeta(64, layers=(0, 3))]
    for codec, exact in (("raw", True), ("balanced", False)):
        wanted = descs if exact else descs[:2]
        src = fill(pool.allocate(wanted, metas[: len(wanted)]), 5)
        back = pool.allocate(wanted, metas[: len(wanted)])
        serializer = FrameSerializer(codec, backend)
        dst = make(serializer.estimate_serialized_size(src.plan))
        dst.set_used_size(serializer.serialize(src, dst, key()))
        FrameDeserializer(backend).deserialize(dst, back, key())
        for group in range(len(wanted)):
            one, other = src.rows(group), back.rows(group)
            same = [one.bytes_view(*plane).tobytes() == other.bytes_view(*plane).tobytes() for plane in one.planes()]
            assert all(same) == exact


def test_mla_rows_are_cut_where_their_rotation_is(make, backend):
    (group,) = groups_of(MemoryPlan.of([LAYOUTS["mla"]], KVMeta(rope=RopeParams(8))))
    assert [(part.name, part.width) for part in group.parts] == [("C", 16), ("R", 8)]
    src, _, back = round_trip(make, backend, "raw", LAYOUTS["mla"], rope=RopeParams(8))
    assert back.view() == src.view()


def test_a_row_of_unknown_position_is_not_position_0(make, backend):
    """At position 0 KVS1 keeps a row bit for bit; where the position is not known no row is taken for that one."""
    for layout in (kv_desc(tokens=6), kv_desc(tokens=600)):
        src, _, back = round_trip(make, backend, "small", layout, base_position=0)
        first, again = (obj.rows().select(tokens=(0, 1)).array("K", 0) for obj in (src, back))
        assert first.tobytes() == again.tobytes()
        src, _, back = round_trip(make, backend, "small", layout, rope=RopeParams(8))
        kept = (src.rows().array("V", 0) == back.rows().array("V", 0)).all(axis=(0, 2, 3))
        assert not kept.any()


def test_any_two_layouts_of_one_group_are_interchangeable(make, backend):
    """What is stored does not depend on the order of axes in memory."""
    src = make(LAYOUTS["kv-by-head"], seed=2)
    turned = LayoutDesc(Layout("LKTHD", L=2, H=3, T=5, D=4), {"K": "float16", "V": "float16"})
    other = make(turned)
    backend.convert_layout(src.rows(), out=other.rows())
    serializer = FrameSerializer("raw", backend)
    frames = []
    for obj in (src, other):
        dst = make(serializer.estimate_serialized_size(obj.plan))
        frames.append(bytes(dst.view()[: serializer.serialize(obj, dst, key())]))
    assert frames[0] == frames[1]


def test_nothing_is_written_beyond_the_frame_nor_read_beyond_the_used_size(make, backend):
    src = make(kv_desc(), seed=1)
    for codec in ("raw", "balanced"):
        serializer = FrameSerializer(codec, backend)
        dst = make(serializer.estimate_serialized_size(src.plan) + 64)
        size = serializer.serialize(src, dst, key())
        assert set(bytes(dst.view()[size:])) == {0xA5}
        frame = bytes(dst.view()[:size])
        dst.set_used_size(size - 1)
        with pytest.raises(CorruptFrameError) as caught:
            FrameDeserializer(backend).deserialize(dst, make(kv_desc()), key())
        assert caught.value.reason == "truncated"
        dst.reset_used_size()
        assert bytes(dst.view()[:size]) == frame, "serialising is deterministic, reading changes nothing"
        with pytest.raises(CorruptFrameError) as caught:
            FrameDeserializer(backend).deserialize(dst, make(kv_desc()), key())
        assert caught.value.reason == "length"


@pytest.mark.parametrize("codec", ["raw", "balanced"])
def test_bytes_that_nobody_may_write_can_be_read(make, backend, codec):
    """A frame that a store holds, and lends."""
    src, dst, back = round_trip(make, backend, codec, kv_desc())

    def held(size):
        return np.frombuffer(bytes(dst.view()).ljust(size, b"\0"), np.uint8)

    lent, again = BufferPool(1 << 20, held).allocate_bytes(dst.used_size), make(kv_desc())
    FrameDeserializer(backend).deserialize(lent, again, key())
    assert again.view() == back.view()
    with pytest.raises(LayoutError, match="read-only"):
        FrameSerializer(codec, backend).serialize(src, lent, key())


@pytest.mark.parametrize("codec", ["raw", "balanced", "fp8"])
def test_a_destination_that_is_too_small_stays_as_it_is(make, backend, codec):
    src = make(kv_desc(), seed=1)
    serializer = FrameSerializer(codec, backend)
    size = serializer.serialize(src, make(serializer.estimate_serialized_size(src.plan)), key())
    dst = make(size - 1)
    with pytest.raises(LayoutError, match=f"takes {size} B"):
        serializer.serialize(src, dst, key())
    assert set(bytes(dst.view())) == {0xA5}


def test_a_frame_of_something_else_is_a_miss(make, backend):
    _, dst, back = round_trip(make, backend, "raw", kv_desc(), base_position=16)
    reader = FrameDeserializer(backend)

    def reason(obj, wanted):
        with pytest.raises(CorruptFrameError) as caught:
            reader.deserialize(dst, obj, wanted)
        return caught.value.reason

    assert reason(back, key(2)) == "identity"
    assert reason(make(kv_desc(), base_position=16), key(1, b"\xbb" * 32)) == "identity"
    assert reason(make(kv_desc(), base_position=32), key()) == "layout"
    assert reason(make(kv_desc()), key()) == "layout"
    assert reason(make(kv_desc(dtype="float16"), base_position=16), key()) == "layout"
    assert reason(make(kv_desc(tokens=19), base_position=16), key()) == "layout"
    assert reason(make([kv_desc(), kv_desc()], base_position=16), key()) == "layout"
    for place in (3, 90, dst.nbytes - 1):
        dst.view()[place] ^= 1
        assert reason(back, key()) in {"foreign", "identity", "crc", "digest"}
        dst.view()[place] ^= 1
    reader.deserialize(dst, back, key())


def test_a_codec_that_is_not_accepted_is_told_by_name(make, backend):
    _, dst, back = round_trip(make, backend, "small", kv_desc())
    with pytest.raises(UnsupportedOpError, match=r"codec.*small.*lossless, raw"):
        FrameDeserializer(backend, ["raw", "lossless"]).deserialize(dst, back, key())
    with pytest.raises(ConfigError, match=r"no codec 'smal'.*did you mean 'small'"):
        FrameDeserializer(backend, ["smal"])


def test_frames_that_omit_keys_are_read_by_who_names_their_codec(make, backend):
    src = make(kv_desc(), seed=1)
    serializer = FrameSerializer("asym_k_elsewhere_v8", backend)
    dst = make(serializer.estimate_serialized_size(src.plan))
    assert serializer.serialize(src, dst, key()) == dst.nbytes
    back = make(kv_desc(), seed=9)
    keys = back.rows().array("K", 1).tobytes()
    with pytest.raises(UnsupportedOpError, match="do not hold all parts"):
        FrameDeserializer(backend).deserialize(dst, back, key())
    FrameDeserializer(backend, ["asym_k_elsewhere_v8"]).deserialize(dst, back, key())
    assert back.rows().array("K", 1).tobytes() == keys
    found, stored = (obj.rows().array("V", 1).astype(np.float32) for obj in (back, src))
    assert np.abs(found - stored).max() < 0.2


def test_nan_follows_the_policy(make, backend):
    src = make(kv_desc(dtype="float16"), seed=1)
    src.rows().array("V", 1)[0, 3, 1, 2] = np.nan
    for name, policies in (("fp8", ("saturate",)), ("balanced", ("saturate", "raw")), ("int4", ("saturate",))):
        dst = make(2 * src.nbytes)
        with pytest.raises(QuantizationError, match="part V"):
            FrameSerializer(name, backend).serialize(src, dst, key())
        assert set(bytes(dst.view())) == {0xA5}, "nothing is written"
        for policy in policies:
            serializer = FrameSerializer(get_codec(name, nonfinite=policy), backend)
            dst = make(serializer.estimate_serialized_size(src.plan))
            dst.set_used_size(serializer.serialize(src, dst, key()))
            back = make(kv_desc(dtype="float16"))
            FrameDeserializer(backend).deserialize(dst, back, key())
            found = back.rows().array("V", 1)[0, 3, 1, 2]
            assert np.isnan(found) if policy == "raw" else found == 0


def test_bad_objects_are_refused_before_anything_is_written(make, backend):
    serializer, plain = FrameSerializer("raw", backend), make(4096)
    src = make(kv_desc(), seed=1, namespace=b"\xbb" * 32)
    for call, why in (
        (lambda: serializer.serialize(src, plain, key()), "namespace bbbb"),
        (lambda: FrameDeserializer(backend).deserialize(plain, src, key()), "namespace bbbb"),
        (lambda: serializer.serialize(plain, plain, key()), "plain bytes has no KV"),
        (lambda: serializer.serialize(make(kv_desc()), make(kv_desc()), key()), "destination of a frame is a buffer"),
        (lambda: FrameDeserializer(backend).deserialize(make(kv_desc()), make(kv_desc()), key()), "source of a frame"),
        (lambda: serializer.serialize(make(kv_desc(), layers=(3, 4)), plain, key()), "layers 3:4, the chunk has 2"),
        (lambda: serializer.serialize(make(kv_desc(), heads=(0, 4)), plain, key()), "heads 0:4, the chunk has 2"),
        (lambda: serializer.estimate_serialized_size(MemoryPlan.of([kv_desc(tokens=0)])), "rows must be in 1"),
    ):
        with pytest.raises(LayoutError, match=why):
            call()
    uneven = LayoutDesc(Layout("L[K:THD,V:TC]", L=1, T=2, H=2, D=4, C=4), {"K": "float16", "V": "float16"})
    with pytest.raises(LayoutError, match="differ in their heads"):
        serializer.serialize(make(uneven), plain, key())
    assert set(bytes(plain.view())) == {0xA5}


def test_names_are_checked(backend):
    with pytest.raises(ConfigError, match="did you mean 'balanced'"):
        FrameSerializer("balancd", backend)
    assert "cpu" in FrameSerializer("raw").backend.spec.device_types, "without a backend one of the host is opened"
