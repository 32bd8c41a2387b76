"""Work that is broken off by an interrupt at any moment: what was published is whole, and the device works on."""

from __future__ import annotations

import random
import signal
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.device_check.recorder import pattern, same
from kvcore import Backend
from kvcore.codecs import FrameReader, GroupInfo, PartInfo, encode_frame
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.ops import fetch, on_host, send
from kvcore.tiers.stores.contract import StoreKey
from kvcore.tiers.stores.fs import FsStore

__all__ = ["copies", "stores"]

_UINT8 = np.dtype(np.uint8)
_NAMESPACE = bytes(32)


def stores(backend: Backend, small: bool) -> str:
    """Store frames, broken off at random moments; what is in the store must be whole, and right."""
    tokens, count, times = (40, 3, 10) if small else (256, 16, 200)
    host = on_host(backend)
    sides = (PartInfo("K", "bfloat16", 64), PartInfo("V", "bfloat16", 64))
    group = GroupInfo("LKTHD", (0, 1), sides, rows=tokens, head_count=2)
    chunks = []
    for seed in range(count):
        rows = allocate_rows(group)
        for part, layer in rows.planes():
            array = rows.array(part, layer)[0]
            array[...] = np.random.default_rng(seed).standard_normal(array.shape, np.float32).astype(array.dtype)
        chunks.append(rows)

    def frame(seed: int) -> bytes:
        key = StoreKey(_NAMESPACE, seed.to_bytes(32, "little"))
        names = {"namespace": key.namespace, "key": key.digest}
        return bytes(encode_frame(host, [group], [chunks[seed]], tokens=tokens, codec="balanced", **names))

    wanted = [frame(seed) for seed in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        store = FsStore(Path(folder) / "store")

        def publish(i: int) -> None:
            seed = i % count
            store.put(StoreKey(_NAMESPACE, seed.to_bytes(32, "little")), frame(seed))

        broken = _broken_off(publish, times)
        found = list(store.list())
        for key in found:
            held, seed = store.get(key) or b"", int.from_bytes(key.digest, "little")
            same(bytes(held) == wanted[seed], True, f"frame {seed} is whole and right")
            reader = FrameReader(held, expect_namespace=_NAMESPACE, expect_key=key.digest, digest=host.digest)
            out = allocate_rows(group)
            reader.decode(host, [out])
        store.close()
    return f"{broken} of {times} were broken off, {len(found)} of {count} frames are there"


def copies(backend: Backend, nbytes: int, small: bool) -> str:
    """Copy batches, broken off at random moments; those that are not are right, and so is what lies beside them."""
    size, times = max(4096, nbytes // 8), 12 if small else 200
    sources = [pattern(size, seed) for seed in range(8)]
    placed = [send(backend, source) for source in sources]
    guard = send(backend, pattern(size, 99))
    backend.runtime.check()

    def copy(_: int) -> None:
        middles = [backend.runtime.empty((size,), _UINT8) for _ in placed]
        backend.copy_batch(placed, out=middles)
        backs = [np.zeros(size, np.uint8) for _ in placed]
        backend.copy_batch(middles, out=backs)
        backend.runtime.synchronize()
        for back, source in zip(backs, sources, strict=True):
            same(back.tobytes() == source.tobytes(), True, "a batch that was not broken off is right")

    broken = _broken_off(copy, times)
    backend.runtime.check()
    copy(0)
    same(fetch(backend, guard).tobytes() == pattern(size, 99).tobytes(), True, "what is beside it is as it was")
    return f"{broken} of {times} were broken off"


def _broken_off(work: Callable[[int], None], times: int) -> int:
    """Call some work, each time broken off by a KeyboardInterrupt at a random moment if it is not done by then."""
    drawn, broken = random.Random(1), 0

    def interrupt(_number: int, _frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    work(0)
    start = time.perf_counter()
    work(0)
    usual = time.perf_counter() - start
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(times):
            try:
                signal.setitimer(signal.ITIMER_REAL, drawn.uniform(0.02, 1.2) * usual)
                work(i)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                broken += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    return broken
