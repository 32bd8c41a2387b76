"""Defects that users of serdes know, each as a test; and `drop_tokens`, which must not pass for what it is not."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore import KVMeta, Layout, LayoutDesc
from kvcore.codecs import FrameReader
from kvcore.codecs.key_ring import KeyRing
from kvcore.errors import ConfigError, CorruptFrameError, UnsupportedOpError
from kvcore.serde import create_serde, create_serde_processor, registry
from kvcore.serde.drop_tokens import kept_ranges, register

from .objects import fill, key, kv_desc


def stored(make, serde, src, under=None):
    dst = make(serde.serializer.estimate_serialized_size(src.plan))
    dst.set_used_size(serde.serializer.serialize(src, dst, under or key()))
    return dst


def refused(serde, src, dst, under):
    with pytest.raises(CorruptFrameError) as caught:
        serde.deserializer.deserialize(src, dst, under)
    return caught.value.reason


@pytest.fixture
def sealed(tmp_path):
    """Configurations of encryption after lossless, by tenant and key file."""
    KeyRing.generate(tmp_path / "a")
    KeyRing.generate(tmp_path / "b")

    def config(file="a", **options):
        step = {"type": "aesgcm", "key_file": str(tmp_path / file), **options}
        return {"type": "chain", "steps": ["lossless", step]}

    return config


def test_swapped_encrypted_frames_of_one_tenant(make, backend, sealed):
    """Both are good, both are the tenant's, and each opens under its own key alone."""
    serde = create_serde(sealed(tenant="acme"), backend)
    one, other = (stored(make, serde, make(kv_desc(), seed=i), key(i)) for i in (1, 2))
    assert refused(serde, one, make(kv_desc()), key(2)) in {"authentication", "identity"}
    assert refused(serde, other, make(kv_desc()), key(1)) in {"authentication", "identity"}
    for frame, number in ((one, 1), (other, 2)):
        back = make(kv_desc())
        serde.deserializer.deserialize(frame, back, key(number))
        assert back.view() == make(kv_desc(), seed=number).view()


def test_another_tenant_key_or_plain_reader_gets_a_miss(make, backend, sealed):
    frame = stored(make, create_serde(sealed(salt="acme"), backend), make(kv_desc(), seed=1))
    for config, reason in (
        (sealed(salt="emca"), "authentication"),
        (sealed("b", salt="acme"), "authentication"),
        (sealed(salt="acme", bits=128), "authentication"),
        ("lossless", "encrypted"),
    ):
        back = make(kv_desc())
        assert refused(create_serde(config, backend), frame, back, key()) == reason
        assert set(bytes(back.view())) == {0xA5}, "nothing of it is let out"


def test_an_encrypted_frame_that_was_altered_is_a_miss(make, backend, sealed):
    serde = create_serde(sealed(), backend)
    frame = stored(make, serde, make(kv_desc(layers=1, tokens=2, heads=1), seed=1))
    for place in range(0, frame.used_size, 7):
        frame.view()[place] ^= 4
        refused(serde, frame, make(kv_desc(layers=1, tokens=2, heads=1)), key())
        frame.view()[place] ^= 4
    serde.deserializer.deserialize(frame, make(kv_desc(layers=1, tokens=2, heads=1)), key())


def test_a_wrong_key_file_is_told_before_anything_is_made(tmp_path, backend):
    with pytest.raises(ConfigError, match="nowhere"):
        create_serde({"type": "aesgcm", "key_file": str(tmp_path / "nowhere")}, backend)
    short = tmp_path / "short"
    short.write_text("abcd")
    short.chmod(0o600)
    with pytest.raises(ConfigError):
        create_serde({"type": "aesgcm", "key_file": str(short)}, backend)


def test_a_codec_dtype_or_layout_that_changed_over_old_frames_is_a_miss_and_no_garbage(make, backend):
    frames = {name: stored(make, create_serde(name, backend), make(kv_desc(), seed=1)) for name in ("raw", "int8")}
    for name in ("fp8", "kvs1", "int4"):
        back = make(kv_desc())
        with pytest.raises(UnsupportedOpError, match="codec: the frame is stored as int8"):
            create_serde(name, backend).deserializer.deserialize(frames["int8"], back, key())
        assert set(bytes(back.view())) == {0xA5}
    for desc in (
        kv_desc(dtype="float16"),
        kv_desc(heads=1, width=16),
        kv_desc(layers=1),
        LayoutDesc(Layout("LTC", L=2, T=20, C=32), {"C": "bfloat16"}),
    ):
        assert refused(create_serde("raw", backend), frames["raw"], make(desc), key()) == "layout"


def test_a_variable_length_codec_reloads(make, backend):
    """What counts is what was written: not what was estimated, nor what a larger frame left in the same buffer."""
    with create_serde_processor("lossless", backend) as processor:
        srcs = [make(kv_desc(), seed=i, scale=10.0**i) for i in range(4)]
        srcs[1].bytes()[:] = 0
        dsts = [make(processor.estimate_serialized_size(srcs[0].plan)) for _ in srcs]
        for _ in range(2):
            for dst in dsts:
                dst.reset_used_size()
            keys = [key(i) for i in range(4)]
            sizes = processor.take_serialize_results(processor.submit_serialize(srcs, dsts, keys), timeout=None)
            assert len(set(sizes)) > 1
            backs = [make(kv_desc()) for _ in srcs]
            task = processor.submit_deserialize(dsts, backs, keys)
            assert processor.take_deserialize_results(task, timeout=None) == (None,) * 4
            assert all(back.view() == src.view() for back, src in zip(backs, srcs, strict=True))
            srcs.reverse()


@pytest.mark.parametrize("config", ["raw", "lossless"])
def test_multi_group_objects_of_odd_sizes(pool, make, backend, config):
    """The second group starts at a multiple of 256, which the first one's size is not; what is between is not KV."""
    descs = [
        kv_desc(layers=1, tokens=3, heads=1, width=5, dtype="float16"),
        LayoutDesc(Layout("LTC", L=3, T=7, C=9), {"C": "bfloat16"}),
        kv_desc(layers=2, tokens=1, heads=3, width=1, dtype="float32"),
    ]
    metas = [KVMeta(9, group=i) for i in range(3)]
    serde = create_serde(config, backend)
    src, back = (pool.allocate(descs, metas) for _ in range(2))
    fill(src, 4)
    src.bytes()[60:256] = 0x11
    back.bytes()[:] = 0xA5
    frame = stored(make, serde, src)
    serde.deserializer.deserialize(frame, back, key())
    for group in range(3):
        for plane in src.rows(group).planes():
            assert (back.rows(group).bytes_view(*plane) == src.rows(group).bytes_view(*plane)).all()
    assert set(bytes(back.view()[60:256])) == {0xA5}


# --- dropped tokens


@pytest.fixture
def dropping(monkeypatch, backend):
    monkeypatch.setattr(registry._SERDES, "_factories", dict(registry._SERDES._factories))
    register()
    register()
    return lambda **options: create_serde({"type": "drop_tokens", **options}, backend)


def test_dropped_tokens_come_back_as_zeros_and_kept_ones_to_the_bit(make, dropping):
    serde = dropping(first=2, last=3)
    src, back = make(kv_desc(), seed=1, base_position=64), make(kv_desc(), base_position=64)
    frame = stored(make, serde, src)
    assert frame.used_size < src.nbytes
    serde.deserializer.deserialize(frame, back, key())
    kept = np.zeros(20, bool)
    for start, stop in kept_ranges(20, 2, 3):
        kept[start:stop] = True
    assert kept.sum() == 5
    for part, layer in src.rows().planes():
        found, given = (obj.rows().bytes_view(part, layer)[0] for obj in (back, src))
        assert (found[kept] == given[kept]).all()
        assert not found[~kept].any()


def test_no_reader_of_whole_chunks_or_of_other_options_takes_them(make, backend, dropping):
    frame = stored(make, dropping(first=2, last=3), make(kv_desc(), seed=1))
    for serde in (create_serde("raw", backend), dropping(first=3, last=3), dropping(first=5, last=0)):
        back = make(kv_desc())
        assert refused(serde, frame, back, key()) == "layout"
        assert set(bytes(back.view())) == {0xA5}
    whole = stored(make, create_serde("raw", backend), make(kv_desc(), seed=1))
    assert refused(dropping(first=2, last=3), whole, make(kv_desc()), key()) == "layout"


def test_runs_of_kept_tokens_keep_their_positions(make, backend, dropping):
    frame = stored(make, dropping(first=2, last=3, codec="small"), make(kv_desc(), seed=1, base_position=100))
    reader = FrameReader(frame.view(), expect_namespace=None, expect_key=None, digest=backend.digest)
    assert [(group.base_position, group.rows) for group in reader.groups] == [(100, 2), (117, 3)]
    assert reader.header.tokens == 20


@pytest.mark.parametrize(
    ("first", "last", "ranges"),
    [(4, 6, [(0, 4), (14, 20)]), (0, 6, [(14, 20)]), (4, 0, [(0, 4)]), (10, 10, [(0, 20)]), (99, 0, [(0, 20)])],
)
def test_what_is_kept(first, last, ranges):
    assert kept_ranges(20, first, last) == ranges


def test_keeping_nothing_is_refused(dropping):
    for options in ({"first": 0, "last": 0}, {"first": -1, "last": 5}, {"first": 2.5, "last": 5}):
        with pytest.raises(ConfigError, match="keeps the first and last"):
            dropping(**options)
