"""Chains: steps compose, and what is between them is used over and over."""

from __future__ import annotations

import threading
import zlib

import pytest

from kvcore import BufferPool
from kvcore.codecs import FrameReader
from kvcore.codecs.key_ring import KeyRing
from kvcore.errors import ConfigError, CorruptFrameError
from kvcore.memory import MemoryPlan
from kvcore.serde import BytesDeserializer, BytesSerializer, Serde, create_serde, register_serde_factory, registry
from kvcore.serde import scratch as scratch_module
from kvcore.serde.scratch import Scratch

from .objects import key, kv_desc


class Deflating(BytesSerializer):
    """A step of variable size, for tests: u32 length, then zlib."""

    def serialize(self, src, dst, key):
        data = len(src.view()).to_bytes(4, "little") + zlib.compress(src.view())
        dst.view()[: len(data)] = data
        return len(data)

    def estimate_serialized_size(self, layout):
        return 4 + layout.nbytes + layout.nbytes // 1000 + 64


class Inflating(BytesDeserializer):
    def deserialize(self, src, dst, key):
        data = zlib.decompress(src.view()[4:])
        dst.view()[: len(data)] = data
        dst.set_used_size(len(data))

    def estimate_deserialized_size(self, src):
        return int.from_bytes(src.view()[:4], "little")


@pytest.fixture
def squeeze(monkeypatch):
    monkeypatch.setattr(registry._SERDES, "_factories", dict(registry._SERDES._factories))
    register_serde_factory("squeeze", lambda backend: Serde(Deflating(), Inflating()))


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    KeyRing.generate(path)
    return str(path)


def stored(make, serde, src):
    dst = make(serde.serializer.estimate_serialized_size(src.plan))
    dst.set_used_size(serde.serializer.serialize(src, dst, key()))
    return dst


def test_steps_are_undone_in_the_other_order(make, backend, squeeze, key_file):
    steps = [{"type": "kvs1", "preset": "small"}, "squeeze", {"type": "aesgcm", "key_file": key_file}]
    for names in (["lossless"], steps[:1], ["lossless", "squeeze"], [steps[0], steps[2]]):
        serde = create_serde({"type": "chain", "steps": names}, backend)
        src, back = make(kv_desc(), seed=1), make(kv_desc())
        dst = stored(make, serde, src)
        serde.deserializer.deserialize(dst, back, key())
        assert (back.view() == src.view()) == (names[0] == "lossless")


def test_a_chain_of_one_is_that_serde(make, backend):
    src = make(kv_desc(), seed=1)
    alone, chained = (create_serde(c, backend) for c in ("fp8", {"type": "chain", "steps": ["fp8"]}))
    assert stored(make, alone, src).view() == stored(make, chained, src).view()


def test_nested_chains_count_as_their_steps(make, backend, squeeze):
    flat = create_serde({"type": "chain", "steps": ["fp8", "squeeze", "squeeze"]}, backend)
    inner = {"type": "chain", "steps": ["squeeze", {"type": "chain", "steps": ["squeeze"]}]}
    nested = create_serde({"type": "chain", "steps": ['{"type": "chain", "steps": ["fp8"]}', inner]}, backend)
    src = make(kv_desc(), seed=1)
    assert stored(make, flat, src).view() == stored(make, nested, src).view()


def test_a_step_of_bytes_alone_gets_raw_before_it(make, backend, squeeze, key_file):
    src = make(kv_desc(), seed=1)
    wanted = stored(make, create_serde({"type": "chain", "steps": ["raw", "squeeze"]}, backend), src)
    for config in ("squeeze", {"type": "chain", "steps": ["squeeze"]}):
        assert stored(make, create_serde(config, backend), src).view() == wanted.view()
    sealed = stored(make, create_serde({"type": "aesgcm", "key_file": key_file}, backend), src)
    reader = FrameReader(sealed.view(), expect_namespace=None, expect_key=None, digest=backend.digest)
    assert reader.codecs == ("raw", "aesgcm")


def test_a_later_step_of_kv_is_refused(backend, squeeze):
    for steps in (["raw", "fp8"], ["squeeze", "raw"], ["raw", {"type": "chain", "steps": ["fp8", "squeeze"]}]):
        with pytest.raises(ValueError, match="takes KV, and what comes before it makes bytes"):
            create_serde({"type": "chain", "steps": steps}, backend)


def test_estimates_compose(backend, squeeze, key_file):
    plan = MemoryPlan.of([kv_desc()])
    kvs1 = create_serde("kvs1", backend).serializer.estimate_serialized_size(plan)
    chain = create_serde({"type": "chain", "steps": ["kvs1", "squeeze"]}, backend).serializer
    assert chain.estimate_serialized_size(plan) == Deflating().estimate_serialized_size(MemoryPlan.of_bytes(kvs1))
    raw = create_serde("raw", backend).serializer.estimate_serialized_size(plan)
    sealed = create_serde({"type": "aesgcm", "key_file": key_file}, backend).serializer
    assert sealed.estimate_serialized_size(plan) == raw + 7 + 33, "the step's name, and the envelope with a key id"


def test_a_chain_is_deterministic_if_all_steps_are(make, backend, squeeze, key_file):
    plain = create_serde({"type": "chain", "steps": ["kvs1", "squeeze"]}, backend)
    secret = create_serde({"type": "chain", "steps": ["kvs1", {"type": "aesgcm", "key_file": key_file}]}, backend)
    assert plain.serializer.deterministic
    assert not secret.serializer.deterministic
    src = make(kv_desc(), seed=1)
    assert stored(make, plain, src).view() == stored(make, plain, src).view()
    assert stored(make, secret, src).view() != stored(make, secret, src).view()


def test_an_error_of_any_step_comes_through_and_leaves_the_chain_usable(make, backend, squeeze):
    serde = create_serde({"type": "chain", "steps": ["fp8", "squeeze"]}, backend)
    src = make(kv_desc(), seed=1)
    dst = stored(make, serde, src)
    bad = make(kv_desc(), seed=1)
    bad.rows().array("K", 0)[0, 0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match="part K"):
        serde.serializer.serialize(bad, make(dst.nbytes), key())
    with pytest.raises(CorruptFrameError):
        serde.deserializer.deserialize(dst, make(kv_desc()), key(2))
    serde.deserializer.deserialize(dst, make(kv_desc()), key())
    assert stored(make, serde, src).view() == dst.view()


# --- what is between two steps


def test_no_buffer_is_allocated_once_there_are_enough(make, backend, squeeze, monkeypatch):
    serde = create_serde({"type": "chain", "steps": ["fp8", "squeeze", "squeeze"]}, backend)
    src, back = make(kv_desc(), seed=1), make(kv_desc())
    dst = make(serde.serializer.estimate_serialized_size(src.plan))

    def both():
        dst.reset_used_size()
        dst.set_used_size(serde.serializer.serialize(src, dst, key()))
        serde.deserializer.deserialize(dst, back, key())

    both()

    def refuse(*_):
        raise AssertionError("a buffer was allocated")

    monkeypatch.setattr(scratch_module.BufferPool, "allocate_bytes", refuse)
    for _ in range(3):
        both()


def test_a_buffer_is_lent_to_one_at_a_time():
    scratch, wrong = Scratch(), []

    def client(number):
        for _ in range(100):
            with scratch.bytes(1000 + number) as obj:
                view = obj.view()
                assert len(view) == 1000 + number
                view[:] = bytes([number]) * len(view)
                if bytes(view) != bytes([number]) * len(view):
                    wrong.append(number)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= scratch.idle <= 6


def test_few_buffers_are_kept_and_none_that_is_much_too_large():
    scratch = Scratch(kept=2)
    with scratch.bytes(1 << 20) as large:
        address = large.bytes().ctypes.data
    with scratch.bytes(1 << 19) as half:
        assert half.bytes().ctypes.data == address
    with scratch.bytes(1 << 16) as small:
        assert small.bytes().ctypes.data != address
    with scratch.bytes(0) as nothing:
        assert nothing.used_size == 0
    assert scratch.idle == 2


def test_a_buffer_comes_back_after_an_error():
    scratch = Scratch()
    with pytest.raises(KeyError), scratch.bytes(10):
        raise KeyError
    assert scratch.idle == 1


def test_steps_that_are_no_chain_of_frames_say_so(backend, key_file):
    with pytest.raises(ConfigError, match="two names of one thing"):
        create_serde({"type": "aesgcm", "key_file": key_file, "salt": "a", "tenant": "b"}, backend)
    pool = BufferPool(1 << 20)
    step = registry.create_step(registry.SerdeConfig("aesgcm", {"key_file": key_file}), backend)
    with pytest.raises(ValueError, match="let a codec come first"):
        step.serializer.serialize(pool.allocate([kv_desc()]), pool.allocate_bytes(1 << 14), key())
