"""A plain engine over a store: what it retrieves is what was stored, or it is a miss that can be stored again."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.codecs import GroupInfo, PartInfo, get_codec, write_frame
from kvcore.dtypes import to_dtype
from kvcore.engine import ChunkKey, chunk_keys
from kvcore.engine.engine import CacheEngine
from kvcore.engine.kv import DenseKV
from kvcore.engine.transfer import StoreReport
from kvcore.plugins.discover import Candidate
from kvcore.tiers.stores import FsStore, MemoryStore

from .plain import (
    CHUNK,
    HEADS,
    LAYERS,
    TOKENS,
    WIDTH,
    Arrays,
    arrays,
    expected,
    loaded,
    namespace,
    opened,
    reference,
    rows_of,
)


@pytest.fixture
def backend() -> kvcore.Backend:
    return reference()


def store_of(engine: CacheEngine) -> Any:
    return engine.tiers.tiers[0].store.store


def save(engine: CacheEngine, kv: Arrays, tokens: list[int] = TOKENS, progress: Any = None) -> StoreReport:
    return engine.store(tokens, rows_of(kv), wait=True, progress=progress)


@pytest.mark.parametrize("make", [lambda path: MemoryStore(), FsStore], ids=["memory", "fs"])
def test_what_is_loaded_is_what_was_saved(backend, tmp_path, make):
    kv, cache = arrays(len(TOKENS)), opened(backend, make(tmp_path / "kv"))
    raw = LAYERS * 2 * HEADS * WIDTH * 2 * 3 * CHUNK
    report = save(cache, kv)
    stored = sum(store_of(cache).stat(key).nbytes for key in store_of(cache).list())
    assert report == StoreReport(24, 3, 0, raw, stored, tokens_written=24)
    assert save(cache, kv) == StoreReport(24, 0, 3, raw, stored)
    assert cache.lookup(TOKENS) == 24
    assert loaded(cache, TOKENS) == (24, expected(kv, 24))
    assert cache.misses == {}


@settings(max_examples=40, deadline=None)
@given(
    extents=st.fixed_dictionaries({n: st.integers(1, 4) for n in ("layers", "heads", "width")}),
    dtypes=st.tuples(*[st.sampled_from(["bfloat16", "float32", "float16", "uint8"])] * 2),
    chunk=st.integers(1, 9),
    count=st.integers(0, 30),
)
def test_any_shape_comes_back_bit_by_bit(extents, dtypes, chunk, count):
    backend = reference()
    cache = opened(backend, MemoryStore(), kv_dtype=dtypes, chunk_tokens=chunk, **extents)
    tokens, kv = list(range(count)), arrays(count, dtypes, **extents)
    report = save(cache, kv, tokens)
    hit = max(count - 1, 0) // chunk * chunk
    assert report.tokens == count // chunk * chunk
    assert cache.lookup(tokens) == hit
    assert loaded(cache, tokens) == (hit, expected(kv, hit))


def test_the_bytes_of_a_frame_do_not_depend_on_where_the_engine_keeps_its_kv(backend):
    kv = arrays(CHUNK + 1)
    room = (1, CHUNK + 1, HEADS, WIDTH + 3)
    wide = [[np.zeros(room, part.dtype).transpose(0, 2, 1, 3)[..., 2:-1] for part in layer] for layer in kv]
    for layer, copy in zip(kv, wide, strict=True):
        for part, target in zip(layer, copy, strict=True):
            target[...] = part
    frames = []
    for tensors in (kv, wide):
        cache = opened(backend, MemoryStore())
        save(cache, tensors, TOKENS[: CHUNK + 1])
        frames.append([bytes(store_of(cache).get(key)) for key in store_of(cache).list()])
    assert frames[0] == frames[1]


def test_a_token_is_always_left_to_compute(backend):
    cache = opened(backend, MemoryStore())
    save(cache, arrays(len(TOKENS)))
    for length, hit in ((0, 0), (1, 0), (8, 0), (9, 8), (16, 8), (17, 16), (24, 16), (25, 24)):
        assert cache.lookup(TOKENS[:length]) == hit
        assert loaded(cache, TOKENS[:length])[0] == hit


# --- frames that are not what was asked for


def other_frame(backend: kvcore.Backend, key: ChunkKey, **changes: Any) -> bytes:
    """A well-formed frame, different from the right one in one way."""
    parts = [PartInfo(name, changes.get("dtype", "bfloat16"), WIDTH) for name in "KV"]
    group = GroupInfo(
        changes.get("layout", "LKHTD"),
        range(LAYERS),
        parts,
        rows=CHUNK,
        head_count=changes.get("heads", HEADS),
        base_position=changes.get("base_position", key.start),
    )
    nbytes = CHUNK * parts[0].row_bytes
    segments = [[bytes(nbytes)] * (2 * group.head_count) for _ in range(LAYERS)]
    return bytes(
        write_frame(
            [group],
            segments,
            tokens=changes.get("tokens", CHUNK),
            namespace=changes.get("namespace", key.namespace),
            key=changes.get("digest", key.digest),
            digest=backend.digest,
        )
    )


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :] if at >= 0 else flipped(frame, len(frame) + at)


DAMAGE = {
    "empty": (lambda f, k, b: b"", "truncated"),
    "cut short": (lambda f, k, b: f[:-1], "truncated"),
    "cut in the head": (lambda f, k, b: f[:40], "truncated"),
    "foreign": (lambda f, k, b: b"something else altogether" * 100, "foreign"),
    "newer format": (lambda f, k, b: f[:4] + b"\x02\x00" + f[6:], "version"),
    "bit flip in the head": (lambda f, k, b: flipped(f, 90), "crc"),
    "bit flip in a layer": (lambda f, k, b: flipped(f, -1), "digest"),
    "bytes behind the end": (lambda f, k, b: f + b"\0", "length"),
    "another namespace's": (lambda f, k, b: other_frame(b, k, namespace=bytes(32)), "identity"),
    "another chunk's": (lambda f, k, b: other_frame(b, k, digest=bytes(32)), "identity"),
    "another shape": (lambda f, k, b: other_frame(b, k, heads=HEADS + 1), "layout"),
    "another element type": (lambda f, k, b: other_frame(b, k, dtype="float16"), "layout"),
    "another layout": (lambda f, k, b: other_frame(b, k, layout="LKTHD"), "layout"),
    "another position": (lambda f, k, b: other_frame(b, k, base_position=0), "layout"),
    "another number of tokens": (lambda f, k, b: other_frame(b, k, tokens=CHUNK - 1), "layout"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("make", [lambda path: MemoryStore(), FsStore], ids=["memory", "fs"])
def test_a_bad_frame_is_a_miss_set_aside_and_stored_again(backend, tmp_path, make, damage):
    spoil, reason = DAMAGE[damage]
    store, kv = make(tmp_path / "kv"), arrays(len(TOKENS))
    cache = opened(backend, store)
    save(cache, kv)
    key = chunk_keys(cache.namespace, TOKENS)[1]
    good = bytes(store.get(key))
    store.put(key, spoil(good, key, backend))
    assert loaded(cache, TOKENS) == (8, expected(kv, 8))
    assert cache.misses == {reason: 1}
    assert store.stats().quarantined == 1
    assert cache.lookup(TOKENS) == 8
    report = save(cache, kv)
    assert (report.chunks_written, report.chunks_present) == (1, 2)
    assert bytes(store.get(key)) == good
    assert loaded(cache, TOKENS)[1] == expected(kv, 24)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_flip_of_any_bit_is_ever_served(data):
    backend = reference()
    cache, kv = opened(backend, MemoryStore()), arrays(CHUNK + 1)
    tokens = TOKENS[: CHUNK + 1]
    save(cache, kv, tokens)
    (key,) = store_of(cache).list()
    frame = bytearray(store_of(cache).get(key))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    store_of(cache).put(key, bytes(frame))
    assert loaded(cache, tokens) == (0, [])
    assert sum(cache.misses.values()) == 1


def test_the_right_frame_is_told_from_other_wellformed_ones(backend):
    """The frames of the damages above would be taken if they did not differ."""
    cache = opened(backend, MemoryStore())
    key = chunk_keys(cache.namespace, TOKENS[:9])[0]
    store_of(cache).put(key, other_frame(backend, key))
    assert loaded(cache, TOKENS[:9])[0] == 8


# --- stores that fail


def failing(inner: MemoryStore, *broken: str) -> MemoryStore:
    """A view of a store in which some methods fail, as a broken disk does."""

    def fail(name: str) -> Callable[..., None]:
        def method(*arguments: object) -> None:
            raise kvcore.StoreError(errno.EIO, f"{name} failed")

        return method

    view = type("Failing", (MemoryStore,), {name: fail(name) for name in broken})()
    view.__dict__.update(inner.__dict__)
    return view


def test_a_store_that_cannot_be_read_is_a_miss(backend):
    inner = MemoryStore()
    save(opened(backend, inner), arrays(len(TOKENS)))
    blind = opened(backend, failing(inner, "stat"))
    assert blind.lookup(TOKENS) == 0
    assert set(blind.misses) == {"store"}
    broken = opened(backend, failing(inner, "get_into"))
    assert broken.lookup(TOKENS) == 24
    assert loaded(broken, TOKENS) == (0, [])
    assert broken.misses == {"store": 1}


def test_a_bad_frame_that_cannot_be_set_aside_is_a_miss_all_the_same(backend):
    inner = MemoryStore()
    save(opened(backend, inner), arrays(len(TOKENS)))
    key = chunk_keys(namespace(), TOKENS)[0]
    inner.put(key, b"KVS1")
    cache = opened(backend, failing(inner, "quarantine"))
    assert loaded(cache, TOKENS) == (0, [])
    assert cache.misses == {"truncated": 1}


def test_a_chunk_that_vanishes_after_the_lookup_ends_the_prefix(backend):
    cache, kv, room = opened(backend, MemoryStore()), arrays(len(TOKENS)), arrays(len(TOKENS))
    save(cache, kv)
    keys = cache.keys(TOKENS)
    hit = cache.lookup_keys(keys, len(TOKENS))
    assert hit == 24
    store_of(cache).delete(keys[1])
    assert cache.retrieve_keys(keys, DenseKV(backend, rows_of(room)), start=0, stop=hit) == 8
    assert expected(room, 8) == expected(kv, 8)
    assert cache.misses == {"absent": 1}


def test_a_store_that_is_full_raises_and_keeps_the_chunks_before(backend):
    kv, frame = arrays(len(TOKENS)), opened(backend, MemoryStore())
    size = save(frame, kv, TOKENS[:CHUNK]).stored_bytes
    cache = opened(backend, MemoryStore(capacity_bytes=2 * size))
    with pytest.raises(kvcore.StoreError, match="does not fit"):
        save(cache, kv)
    assert loaded(cache, TOKENS) == (16, expected(kv, 16))


def test_a_store_that_cannot_be_asked_raises_when_saving(backend):
    cache = opened(backend, failing(MemoryStore(), "stat"))
    with pytest.raises(kvcore.StoreError, match="stat failed"):
        save(cache, arrays(len(TOKENS)))


# --- what is refused


def test_rows_of_another_shape_are_refused_and_nothing_is_stored(backend):
    cache = opened(backend, MemoryStore())
    for kv in (arrays(30, heads=HEADS + 1), arrays(30, ("float16", "float16")), arrays(30, layers=LAYERS + 1)):
        with pytest.raises(kvcore.LayoutError, match="do not hold the same"):
            save(cache, kv)
    assert list(store_of(cache).list()) == []


def test_a_backend_without_the_ops_is_refused_at_once():
    spec = kvcore.BackendSpec("bare", ("cpu",), -1, kvcore.API_VERSION, lambda: kvcore.Probe(True, "a test"))
    bare = kvcore.open_backend("bare", fallback="error", found=[Candidate("bare", "usable", "a test", spec)])
    with pytest.raises(kvcore.UnsupportedOpError, match="convert_layout"):
        opened(bare, MemoryStore())


# --- codecs


def normal(tokens: int, dtype: str = "bfloat16") -> list[list[np.ndarray]]:
    rng = np.random.default_rng(4)
    shape = (1, HEADS, tokens, WIDTH)
    return [[rng.standard_normal(shape).astype(to_dtype(dtype)) for _ in range(2)] for _ in range(LAYERS)]


def floats(planes: list[list[bytes]], dtype: str = "bfloat16") -> np.ndarray:
    return np.array([np.frombuffer(part, to_dtype(dtype)) for layer in planes for part in layer], np.float32)


@pytest.mark.parametrize("codec", ["lossless", "high", "balanced", "small", "cachegen", "int8", "fp8"])
def test_chunks_of_every_codec_come_back(backend, codec):
    kv, cache = normal(len(TOKENS)), opened(backend, MemoryStore(), codec=codec)
    seen: list[int] = []
    report = save(cache, kv, progress=seen.append)
    assert (report.tokens, report.chunks_written, report.chunks_refused, seen) == (24, 3, 0, [8, 16, 24])
    assert cache.lookup(TOKENS) == 24
    hit, planes = loaded(cache, TOKENS)
    assert hit == 24
    assert cache.misses == {}
    if codec == "lossless":
        assert planes == expected(kv, 24)
    else:
        wanted = floats(expected(kv, 24))
        assert 0 < np.abs(floats(planes) - wanted).max() < 0.6


def test_a_frame_of_a_codec_that_is_not_accepted_is_a_miss_and_stays(backend):
    store, kv = MemoryStore(), normal(len(TOKENS))
    save(opened(backend, store, codec="small"), kv)
    frames = {key: bytes(store.get(key)) for key in store.list()}
    fine = opened(backend, store, codec="high")
    assert fine.lookup(TOKENS) == 24
    assert loaded(fine, TOKENS) == (0, [])
    assert fine.misses == {"codec": 1}
    assert store.stats().quarantined == 0
    # What is there is never coded again.
    assert save(fine, kv).chunks_present == 3
    assert {key: bytes(store.get(key)) for key in store.list()} == frames
    anything = opened(backend, store, codec="high", codecs=("high", "small"))
    assert loaded(anything, TOKENS)[0] == 24


def test_raw_and_lossless_frames_are_accepted_by_all_unless_said_otherwise(backend):
    for codec in ("raw", "lossless"):
        store, kv = MemoryStore(), normal(len(TOKENS))
        save(opened(backend, store, codec=codec), kv)
        for reader in ("raw", "lossless", "balanced"):
            assert loaded(opened(backend, store, codec=reader), TOKENS)[1] == expected(kv, 24)
        only = opened(backend, store, codec="balanced", codecs=["balanced"])
        assert loaded(only, TOKENS) == (0, [])
        assert only.misses == {"codec": 1}


def test_a_nan_ends_the_prefix_of_a_lossy_codec_and_nothing_else(backend, caplog):
    kv = normal(len(TOKENS))
    kv[1][0][0, 2, 11, 3] = np.nan
    cache = opened(backend, MemoryStore(), codec="balanced")
    with caplog.at_level("WARNING", "kvcore"):
        report = save(cache, kv)
        assert save(cache, kv).chunks_refused == 2
    assert (report.tokens, report.chunks_written, report.chunks_refused) == (8, 1, 2)
    assert report.raw_bytes == LAYERS * 2 * HEADS * WIDTH * 2 * CHUNK
    assert [r.message.split(":")[0] for r in caplog.records] == ["not cached, nor are the tokens after it"]
    assert loaded(cache, TOKENS)[0] == 8
    exact = opened(backend, MemoryStore(), codec="lossless")
    assert save(exact, kv).tokens == 24
    assert loaded(exact, TOKENS)[1] == expected(kv, 24)


@pytest.mark.parametrize("at", [0, 11])
def test_with_policy_raw_a_chunk_with_a_nan_is_stored_and_comes_back(backend, at):
    kv, tokens = normal(len(TOKENS)), slice(8 * (at // 8), 8 * (at // 8) + 8)
    kv[1][0][0, 2, at, 3] = np.array(0xFFA5, np.uint16).view(kv[1][0].dtype)
    cache = opened(backend, MemoryStore(), codec=get_codec("balanced", nonfinite="raw"))
    report = save(cache, kv)
    assert (report.tokens, report.chunks_refused) == (24, 0)
    hit, planes = loaded(opened(backend, store_of(cache), codec="balanced"), TOKENS)
    assert hit == 24
    shape = (24, HEADS, WIDTH)
    found = np.frombuffer(planes[1][0], kv[1][0].dtype).reshape(shape)
    assert found[at, 2].tobytes() == kv[1][0][0, 2, at].tobytes()
    others = np.delete(floats(planes).reshape(LAYERS, 2, *shape), at, axis=2)
    wanted = np.array([[part[0, :, :24].transpose(1, 0, 2) for part in layer] for layer in kv], np.float32)
    assert np.abs(others - np.delete(wanted, at, axis=2)).max() < 0.5
    other = opened(backend, MemoryStore(), codec=get_codec("balanced", nonfinite="raw"))
    save(other, normal(len(TOKENS)))
    same = [bytes(store_of(cache).get(k)) == bytes(store_of(other).get(k)) for k in chunk_keys(cache.namespace, TOKENS)]
    assert same == [i != tokens.start // 8 for i in range(3)]


def test_codecs_that_make_no_sense_are_refused_at_once(backend):
    with pytest.raises(kvcore.ConfigError, match="did you mean 'balanced'"):
        opened(backend, MemoryStore(), codec="balance")
    with pytest.raises(kvcore.ConfigError, match="no codec 'zip'"):
        opened(backend, MemoryStore(), codecs=["raw", "zip"])
    with pytest.raises(kvcore.ConfigError, match="written as small"):
        opened(backend, MemoryStore(), codec="small", codecs=["high"])


def test_a_backend_without_the_codecs_ops_misses_and_says_so_when_saving(backend, monkeypatch):
    store, kv = MemoryStore(), normal(len(TOKENS))
    save(opened(backend, store, codec="balanced"), kv)
    resolve = kvcore.Backend.resolve

    def without(self, op, *arguments, **options):
        if op in ("decode_symbols", "choose_classes"):
            raise kvcore.UnsupportedOpError(f"no {op} here")
        return resolve(self, op, *arguments, **options)

    monkeypatch.setattr(kvcore.Backend, "resolve", without)
    cache = opened(backend, store, codec="balanced")
    assert loaded(cache, TOKENS) == (0, [])
    assert cache.misses == {"codec": 1}
    assert store.stats().quarantined == 0
    with pytest.raises(kvcore.UnsupportedOpError, match="choose_classes"):
        save(opened(backend, MemoryStore(), codec="balanced"), kv)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), codec=st.sampled_from(["lossless", "small", "int4"]))
def test_no_flip_of_any_bit_of_a_coded_frame_is_ever_served(data, codec):
    backend = reference()
    cache, kv = opened(backend, MemoryStore(), codec=codec), normal(CHUNK + 1)
    tokens = TOKENS[: CHUNK + 1]
    save(cache, kv, tokens)
    (key,) = store_of(cache).list()
    frame = bytearray(store_of(cache).get(key))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    store_of(cache).put(key, bytes(frame))
    assert loaded(cache, tokens) == (0, [])
    assert sum(cache.misses.values()) == 1
