"""The cases of the suite `store`: stores by themselves, serdes by themselves, and both together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.bench.cases import copy_roofline
from kvcore.bench.data import KV
from kvcore.bench.store import BATCH, StoreCase
from kvcore.bench.store_limits import NO_LIMIT, limits_of
from kvcore.codecs.key_ring import KeyRing
from kvcore.dtypes import BFLOAT16
from kvcore.errors import KVCoreError
from kvcore.keys import StoreKey
from kvcore.layout import Layout
from kvcore.memory import BufferPool, KVMeta, LayoutDesc, MemoryObj
from kvcore.ops import Backend
from kvcore.serde import AsyncSerdeProcessor, SerdeConfig, create_serde
from kvcore.tiers.serde_store import SerdeStore
from kvcore.tiers.stores import FsStore, MemoryStore, Store, open_store

__all__ = ["RAW_AIM", "STORE_AIM", "Bench", "store_cases"]

STORE_AIM = 0.8
"""Least share of a memory copy, or of a plain read of a file, at which a store moves bytes that nobody verifies."""
RAW_AIM = 0.6
"""The same with serde `raw` around it, which verifies every byte."""
AESGCM_AIM = 0.9
"""Least share of the library's own encryption of the same bytes."""

_TOKENS = 256
_BITS = 256
_PEER_NOTES = {
    "raw": "the peer has no frames",
    "fp8": "the peer scales nothing, and digests nothing",
    "kvs1": "the peer's nearest is CacheGen, in suite codec",
    "int4": "the peer has no such serde",
}


class Bench:
    """What all cases share: objects of KV, keys, a pool, a directory for files. A context manager.

    Parameters
    ----------
    backend : Backend
    kv : KV
        Of 256 tokens or more.
    folder : Path
        For stores of files, those of the peer, and a key.
    """

    def __init__(self, backend: Backend, kv: KV, folder: Path) -> None:
        self.backend, self.folder = backend, folder
        bits = kv.bits[:, :, :_TOKENS]
        layers, _, tokens, heads, width = bits.shape
        self.layers, self.tokens, self.row = layers, tokens, heads * width
        layout = Layout("LKTHD", L=layers, T=tokens, H=heads, D=width)
        desc = LayoutDesc(layout, {"K": BFLOAT16, "V": BFLOAT16})
        self.nbytes = desc.nbytes
        self.pool = BufferPool(8 * (BATCH + 1) * desc.nbytes)
        namespace = os.urandom(32)  # a store of the user's may hold frames: ours are told apart, and removed
        self.keys = [StoreKey(namespace, bytes([number]) * 32) for number in range(BATCH)]
        meta = KVMeta(base_position=0, rope=kv.rope)
        self.sources = [self.pool.allocate([desc], meta) for _ in self.keys]
        self.targets = [self.pool.allocate([desc], meta) for _ in self.keys]
        for obj in (*self.sources, *self.targets):
            obj.bytes().view(np.int16)[...] = bits.reshape(-1)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        for obj in (*self.sources, *self.targets):
            obj.free()

    @property
    def peer_shape(self) -> tuple[int, ...]:
        """The same KV as the peer lays it out."""
        return 2, self.layers, self.tokens, self.row

    @property
    def left_out(self) -> list[str]:
        """What is not measured for want of a library, and how to get it."""
        if importlib.util.find_spec("cryptography") is not None:
            return []
        return ['aesgcm: needs cryptography: pip install "kvcore[crypto]"']

    def serdes(self) -> dict[str, dict[str, Any]]:
        """Return the serdes by the names that they have in tables; encryption where its library is installed."""
        found: dict[str, dict[str, Any]] = {
            "raw": {"type": "raw"},
            "fp8": {"type": "fp8"},
            "kvs1": {"type": "kvs1", "preset": "balanced"},
            "int4": {"type": "int4"},
        }
        if not self.left_out:
            path = self.folder / "key.json"
            if not path.exists():
                KeyRing.generate(path)
            step = {"type": "aesgcm", "key_file": str(path), "bits": _BITS}
            found["aesgcm"] = {"type": "chain", "steps": [{"type": "raw"}, step]}
        return found


def store_cases(bench: Bench, uris: Sequence[str]) -> Generator[StoreCase, None, None]:
    """Yield the cases: of serdes, then of each store, alone and with each serde.

    Parameters
    ----------
    bench : Bench
    uris : sequence of str
        Of stores; what is stored there is removed again. None: memory, and files in the directory of `bench`.

    Raises
    ------
    ConfigError, StoreError
        A store cannot be opened.
    KVCoreError
        It did not do what it was asked to.
    """
    yield from _serde_cases(bench)
    for label, uri in _labels(uris or ("memory:", f"fs:{bench.folder / 'store'}")):
        with open_store(uri) as store:
            yield from _store_alone(bench, label, store)
            for name, config in bench.serdes().items():
                yield from _store_with(bench, label, store, name, config)
    if not uris:
        with open_store(f"fs:{bench.folder / 'unsynced'}?sync=0") as store:
            yield from _store_with(bench, "fs sync=0", store, "raw", bench.serdes()["raw"])


def _labels(uris: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield a short name for each URI: its scheme, numbered from the second one on."""
    seen: dict[str, int] = {}
    for uri in uris:
        scheme = uri.partition(":")[0]
        seen[scheme] = seen.get(scheme, 0) + 1
        yield (scheme if seen[scheme] == 1 else f"{scheme} {seen[scheme]}"), uri


# --- serdes


def _serde_cases(bench: Bench) -> Generator[StoreCase, None, None]:
    """Objects to bytes and back, on the calling thread."""
    source, target, key = bench.sources[0], bench.targets[0], bench.keys[0]
    for name, config in bench.serdes().items():
        serde = create_serde(config, bench.backend)
        forth: Any = serde.serializer
        back: Any = serde.deserializer
        with bench.pool.allocate_bytes(forth.estimate_serialized_size(source.plan)) as coded:
            serialize = partial(_serialize, forth, source, coded, key)
            ratio = bench.nbytes / serialize()
            peer = {"what": name, "shape": bench.peer_shape, **({"bits": _BITS} if name == "aesgcm" else {})}
            for verb, call in (
                ("serialize", serialize),
                ("deserialize", partial(back.deserialize, coded, target, key)),
            ):
                request = {**peer, "back": verb == "deserialize"} if name in ("fp8", "aesgcm") else None
                roofline = None if name == "aesgcm" else copy_roofline(bench.nbytes)
                yield StoreCase(
                    f"{name} {verb}", bench.nbytes, call, roofline, request, size_ratio=ratio,
                    limit="" if roofline is None else "memcpy", note=_PEER_NOTES.get(name, ""),
                )  # fmt: skip
        if name == "aesgcm":
            yield from _encryption(bench, config["steps"][1])


def _serialize(serializer: Any, source: MemoryObj, coded: MemoryObj, key: StoreKey) -> int:
    coded.reset_used_size()
    written = int(serializer.serialize(source, coded, key))
    coded.set_used_size(written)
    return written


def _encryption(bench: Bench, config: dict[str, Any]) -> Generator[StoreCase, None, None]:
    """The step by itself, of a frame that is there, beside the library's own encryption of as many bytes."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from kvcore.serde.registry import create_step

    step = create_step(SerdeConfig.of(config), bench.backend)
    first: Any = create_serde("raw", bench.backend).serializer
    forth: Any = step.serializer
    back: Any = step.deserializer
    source, key = bench.sources[0], bench.keys[0]
    with ExitStack() as leases:
        plain = leases.enter_context(bench.pool.allocate_bytes(first.estimate_serialized_size(source.plan)))
        _serialize(first, source, plain, key)
        coded = leases.enter_context(bench.pool.allocate_bytes(forth.estimate_serialized_size(plain.plan)))
        opened = leases.enter_context(bench.pool.allocate_bytes(plain.nbytes + 64))
        cipher, iv, body = AESGCM(os.urandom(_BITS // 8)), os.urandom(12), plain.view()
        sealed = cipher.encrypt(iv, body, None)
        seal = partial(_serialize, forth, plain, coded, key)
        seal()

        def open_() -> None:
            opened.reset_used_size()
            back.deserialize(coded, opened, key)

        for verb, call, primitive in (
            ("encrypt", seal, lambda: cipher.encrypt(os.urandom(12), body, None)),
            ("decrypt", open_, lambda: cipher.decrypt(iv, sealed, None)),
        ):
            yield StoreCase(
                f"aesgcm step {verb}", plain.nbytes, call, primitive, size_ratio=plain.nbytes / coded.used_size,
                limit="AESGCM", aim=AESGCM_AIM,
            )  # fmt: skip


# --- stores


def _store_alone(bench: Bench, label: str, store: Store) -> Generator[StoreCase, None, None]:
    """Frames of serde raw as bytes that nobody looks into."""
    serializer: Any = create_serde("raw", bench.backend).serializer
    nbytes = serializer.estimate_serialized_size(bench.sources[0].plan)
    with ExitStack() as leases:
        frames = [leases.enter_context(bench.pool.allocate_bytes(nbytes)) for _ in bench.keys]
        rooms = [leases.enter_context(bench.pool.allocate_bytes(nbytes)) for _ in bench.keys]
        leases.callback(_remove, store, bench.keys)
        for source, frame, room, key in zip(bench.sources, frames, rooms, bench.keys, strict=True):
            _serialize(serializer, source, frame, key)
            room.bytes()[:] = 0  # touched: pages that are there
        puts = [(key, frame.view()) for key, frame in zip(bench.keys, frames, strict=True)]
        gets = [(key, room.view()) for key, room in zip(bench.keys, rooms, strict=True)]
        put_all = partial(_checked, lambda: store.put_batch(puts))
        put_all()
        writing, reading = limits_of(store, nbytes, leases)
        memory = isinstance(store, MemoryStore)
        yield StoreCase(
            f"{label} put", nbytes, partial(_checked, lambda: store.put_batch(puts[:1])), writing.call,
            before=partial(_remove, store, bench.keys), roofline_before=writing.before, batch=put_all,
            limit=writing.name, aim=STORE_AIM if memory else None,
        )  # fmt: skip
        put_all()
        yield StoreCase(
            f"{label} get", nbytes, partial(_checked, lambda: store.get_batch_into(gets[:1])), reading.call,
            batch=partial(_checked, lambda: store.get_batch_into(gets)), limit=reading.name,
            aim=STORE_AIM if reading.call is not None else None,
        )  # fmt: skip


def _store_with(
    bench: Bench, label: str, store: Store, name: str, config: dict[str, Any]
) -> Generator[StoreCase, None, None]:
    """Objects through a serde, whose frames are verified on the way back."""
    serde = create_serde(config, bench.backend)
    keys, sources, targets = bench.keys, bench.sources, bench.targets
    with ExitStack() as opened:
        processor = opened.enter_context(AsyncSerdeProcessor(*serde))
        both = SerdeStore(store, processor, bench.pool)
        opened.callback(both.close)
        opened.callback(_remove, store, keys)
        put_all = partial(_checked, lambda: both.put(keys, sources))
        ratio = bench.nbytes / put_all()[0]
        aim = RAW_AIM if isinstance(store, MemoryStore) and name == "raw" else None
        peer = {"what": "fs", "shape": bench.peer_shape, "folder": str(bench.folder / "peer")}
        asked = isinstance(store, FsStore) and name == "raw"
        writing, reading = limits_of(store, bench.nbytes, opened) if name == "raw" else (NO_LIMIT, NO_LIMIT)
        yield StoreCase(
            f"{label} put {name}",
            bench.nbytes,
            partial(_checked, lambda: both.put(keys[:1], sources[:1])),
            writing.call,
            {**peer, "back": False} if asked else None,
            before=partial(_remove, store, keys),
            roofline_before=writing.before,
            batch=put_all,
            size_ratio=ratio,
            limit=writing.name,
            aim=aim,
            note="the peer does not wait for the medium" if asked and "sync=0" not in label else "",
        )
        put_all()
        yield StoreCase(
            f"{label} get {name}",
            bench.nbytes,
            partial(_checked, lambda: both.get(keys[:1], targets[:1])),
            reading.call,
            {**peer, "back": True} if asked else None,
            batch=partial(_checked, lambda: both.get(keys, targets)),
            size_ratio=ratio,
            limit=reading.name,
            aim=aim,
            note="the peer verifies nothing" if asked else "",
        )


def _checked(call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Make a call on a batch; raise what went wrong with a key, or for a miss: no figure of what was not done."""
    outcomes = call()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None or outcome is False:
            raise KVCoreError("an object that was stored is not there: does something else empty the store meanwhile?")
    return outcomes


def _remove(store: Store, keys: Sequence[StoreKey]) -> None:
    """Take the bench's frames out of a store; raise what went wrong with one."""
    for outcome in store.delete_batch(keys):
        if isinstance(outcome, Exception):
            raise outcome
