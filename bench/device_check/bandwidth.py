"""Gather and scatter against a copy within the device, and batched copies over the link against one large copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.device_check.child import Given
from bench.device_check.recorder import Recorder
from bench.device_check.timing import Call, Clock, rate
from kvcore import ArrayRef, Backend, Layout
from kvcore.dtypes import BFLOAT16
from kvcore.ops import send

MOVED, LINK = "gather and scatter", "copies over the link"
_AIM = 0.95
_AIMED_ROW = 512
_BLOCK, _WIDTH, _ITEM = 16, 64, 2
_UINT8 = np.dtype(np.uint8)


def run(given: Given, recorder: Recorder) -> None:
    """Measure both tables, as far as there are kernels of the implementation asked for."""
    backend = given.open()
    # Torch's copy comes last: when torch has woken the device, ops that name no stream are on its null stream, which
    # the driver takes no batches of copies on.
    if given.measures(backend, "copy_batch"):
        recorder.check("copies over the link", partial(_linked, given, backend, recorder))
    if given.measures(backend, "gather_paged"):
        recorder.check("gather and scatter", partial(_moved, given, backend, recorder))


def _moved(given: Given, backend: Backend, recorder: Recorder) -> str:
    layers, total = (2, 1 << 17) if given.small else (32, 1 << 29)
    heads = (1, 4) if given.small else (1, 2, 4, 8, 16, 32, 64, 128)
    source, target = _random(backend, total), backend.runtime.empty((total,), _UINT8)
    copy = partial(backend.copy_batch, [source], out=[target])
    clock = Clock(backend, given, 2 * len(heads) + 12)
    alone = clock.time(copy)
    bound = {verb: backend.bindings[f"{verb}_paged"].implementation for verb in ("gather", "scatter")}
    recorder.figure(MOVED, "copy within the device", **rate(total, alone))
    for count in heads:
        tokens = total // (2 * layers * count * _WIDTH * _ITEM)
        for name, call in _movers(backend, source, layers, count, tokens, every=count in (heads[0], 8)):
            if clock.out_of_time:
                return "stopped: out of time"
            timing = clock.time(call, copy)
            row = count * _WIDTH * _ITEM
            how = {"implementation": bound[name.partition(",")[0]]}
            aim = {"aim": _AIM} if row >= _AIMED_ROW and "duplicates" not in name else {}
            recorder.figure(MOVED, name, row_bytes=row, **how, **rate(total, timing), **aim)
    theirs = None if clock.out_of_time else _torch_copy(backend, total)
    if theirs is not None:
        recorder.figure(MOVED, "the same copy by torch", **rate(total, clock.time(theirs)))
    return f"{total / 2**20:.0f} MiB a call"


def _random(backend: Backend, nbytes: int) -> ArrayRef:
    """Return memory of the device that is filled, a MiB of random bytes over and over."""
    seed = np.random.default_rng(3).integers(0, 256, min(nbytes, 1 << 20), np.uint8)
    memory = ArrayRef.of(backend.runtime.empty((nbytes,), _UINT8))
    filled = len(seed)
    backend.copy_batch([seed], out=[memory[:filled]])
    while filled < nbytes:
        more = min(filled, nbytes - filled)
        backend.copy_batch([memory[:more]], out=[memory[filled : filled + more]])
        filled += more
    return memory


def _movers(
    backend: Backend, source: ArrayRef, layers: int, heads: int, tokens: int, *, every: bool
) -> Iterator[tuple[str, Call]]:
    blocks = -(-tokens // _BLOCK) + 1
    tensors = [backend.runtime.empty((2, blocks, _BLOCK, heads, _WIDTH), BFLOAT16) for _ in range(layers)]
    cache = Layout("L|KBNHD").bind(tensors)
    shape = (layers, 2, tokens, heads, _WIDTH)
    chunk = Layout("LKTHD").bind(source.view(BFLOAT16).reshape(*shape))
    order = np.random.default_rng(1).permutation(blocks)[: -(-tokens // _BLOCK)].astype(np.int64)
    slots = (order[:, None] * _BLOCK + np.arange(_BLOCK)).reshape(-1)[:tokens]
    scattered = np.random.default_rng(2).permutation(slots)
    index = {name: send(backend, np.ascontiguousarray(at)) for name, at in (("slots", slots), ("anywhere", scattered))}
    scatter = partial(backend.scatter_paged, check_duplicates=False)
    scatter(chunk, index["slots"], out=cache)  # before it is read: memory that was never written may read faster
    backend.runtime.check()
    yield "gather, slots of whole blocks", partial(backend.gather_paged, cache, index["slots"], out=chunk)
    yield "scatter, slots of whole blocks", partial(scatter, chunk, index["slots"], out=cache)
    if every:
        at = send(backend, order)
        yield "gather, blocks", partial(backend.gather_paged, cache, at, unit="block", out=chunk)
        yield "scatter, blocks", partial(scatter, chunk, at, unit="block", out=cache)
        yield "gather, slots anywhere", partial(backend.gather_paged, cache, index["anywhere"], out=chunk)
        yield "scatter, slots anywhere", partial(scatter, chunk, index["anywhere"], out=cache)
        yield (
            "scatter, duplicates looked for",
            partial(backend.scatter_paged, chunk, index["slots"], check_duplicates=True, out=cache),
        )


def _linked(given: Given, backend: Backend, recorder: Recorder) -> str:
    chunk, count, pieces = (1 << 14, 4, 16) if given.small else (32 << 20, 16, 8192)
    total = chunk * count
    runtime = backend.runtime
    buffer = runtime.alloc_host(total, pinned=True)
    host, there = buffer.array, ArrayRef.of(runtime.empty((total,), _UINT8))
    host[:] = 1
    clock = Clock(backend, given, 6)
    for name, to_device in (("host to device", True), ("device to host", False)):
        one = _copies(backend, host, there, total, 1, to_device)
        alone = clock.time(one)
        recorder.figure(LINK, f"{name}, one copy", **rate(total, alone))
        for parts, aimed in ((count, True), (pieces, False)):
            if clock.out_of_time:
                break
            timing = clock.time(_copies(backend, host, there, total, parts, to_device), one)
            case = f"{name}, {parts} of {total // parts / 1024:.0f} KiB"
            recorder.figure(LINK, case, **rate(total, timing), **({"aim": _AIM} if aimed else {}))
    runtime.check()
    del host, there, one
    return f"pinned: {buffer.granted['pinned']}; {total / 2**20:.0f} MiB a call"


def _copies(backend: Backend, host: Any, there: Any, total: int, parts: int, to_device: bool) -> Call:
    step = total // parts
    near = [host[i : i + step] for i in range(0, total, step)]
    far = [there[i : i + step] for i in range(0, total, step)]
    sources, targets = (near, far) if to_device else (far, near)
    return partial(backend.copy_batch, sources, out=targets)


def _torch_copy(backend: Backend, nbytes: int) -> Call | None:
    """Return the same copy by torch, which is another's measure of the device, or None where it has no such device."""
    kind = backend.spec.device_types[0]
    if kind not in ("cuda", "xpu") or importlib.util.find_spec("torch") is None:
        return None
    import torch

    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return None
    one, other = (torch.empty(nbytes, dtype=torch.uint8, device=kind) for _ in range(2))
    return partial(other.copy_, one)
