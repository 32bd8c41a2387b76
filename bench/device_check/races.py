"""What goes wrong only now and then: streams side by side, memory used again at once, work that is broken off."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.device_check.child import Given
from bench.device_check.interrupts import copies, stores
from bench.device_check.recorder import Forbidden, Recorder, pattern, same
from kvcore import Backend, Layout, RowLayout
from kvcore.errors import OutOfMemoryError, SlotError
from kvcore.ops import fetch, send

_UINT8 = np.dtype(np.uint8)
_NAMESPACE = bytes(32)
_TORCH = ("cuda", "xpu")


def run(given: Given, recorder: Recorder) -> None:
    """Run all checks."""
    backend = given.open()
    nbytes, rounds = (50_000, 10) if given.small else (32 << 20, 100)
    recorder.check("two streams in turn, ordered by events", partial(_turns, backend, nbytes, rounds))
    recorder.check("two streams at once, without events", partial(_apart, backend, nbytes, rounds))
    recorder.check("pinned memory is written again when its copy is done", partial(_reused, backend, nbytes, rounds))
    recorder.check("arrays are dropped while queued work uses them", partial(_dropped, backend, nbytes, rounds))
    recorder.check("two host threads, a stream each", partial(_threads, backend, rounds))
    recorder.check("an error in the middle of a batch", partial(_error, backend))
    recorder.check("more memory than there is", partial(_memory, backend))
    recorder.check("stores that are interrupted publish nothing half", partial(stores, backend, given.small))
    recorder.check("copies that are interrupted", partial(copies, backend, nbytes, given.small))
    recorder.check("torch's current stream", partial(_torch, backend, nbytes))


def _turns(backend: Backend, nbytes: int, rounds: int) -> str:
    runtime = backend.runtime
    streams = runtime.stream(), runtime.stream()
    links = [runtime.empty((nbytes,), _UINT8) for _ in range(3)]
    wanted = pattern(nbytes, 1)
    for turn in range(4):
        wanted[:8] = turn  # so that what an earlier turn left is not right by chance
        backend.copy_batch([wanted.copy()], out=[links[0]], stream=streams[0])
        for i in range(rounds):
            here, there = streams[i % 2], streams[(i + 1) % 2]
            runtime.wait(runtime.record(here), there)
            backend.copy_batch([links[i % 3]], out=[links[(i + 1) % 3]], stream=there)
        runtime.wait(runtime.record(streams[rounds % 2]))
        same(fetch(backend, links[rounds % 3]).tobytes() == wanted.tobytes(), True, f"turn {turn} brings what was sent")
    for stream in streams:
        runtime.check(stream)
    return f"4 x {rounds} copies of {nbytes} B"


def _apart(backend: Backend, nbytes: int, rounds: int) -> str:
    runtime = backend.runtime
    streams = [runtime.stream(), runtime.stream()]
    patterns = [pattern(nbytes, seed) for seed in (2, 3)]
    links = [[runtime.empty((nbytes,), _UINT8) for _ in range(2)] for _ in streams]
    for stream, sent, (first, _) in zip(streams, patterns, links, strict=True):
        backend.copy_batch([sent], out=[first], stream=stream)
    for i in range(rounds):
        for stream, pair in zip(streams, links, strict=True):
            backend.copy_batch([pair[i % 2]], out=[pair[(i + 1) % 2]], stream=stream)
    for stream, sent, pair in zip(streams, patterns, links, strict=True):
        back = np.zeros(nbytes, np.uint8)
        backend.copy_batch([pair[rounds % 2]], out=[back], stream=stream)
        runtime.check(stream)
        same(back.tobytes() == sent.tobytes(), True, "a stream brings what was sent on it")
    return f"2 x {rounds} copies of {nbytes} B"


def _reused(backend: Backend, nbytes: int, rounds: int) -> str:
    runtime, stream = backend.runtime, backend.runtime.stream()
    buffer = runtime.alloc_host(nbytes, pinned=True)
    there = [runtime.empty((nbytes,), _UINT8) for _ in range(4)]
    for i in range(min(rounds, 40)):
        sent = pattern(nbytes, i)
        buffer.array[:] = sent
        backend.copy_batch([buffer.array], out=[there[i % 4]], stream=stream)
        runtime.synchronize(stream)
        buffer.array[:] = 0
        backend.copy_batch([there[i % 4]], out=[buffer.array], stream=stream)
        runtime.synchronize(stream)
        same(buffer.array.tobytes() == sent.tobytes(), True, f"round {i} brings what was sent")
    granted = buffer.granted["pinned"]
    buffer.free()
    return f"pinned: {granted}"


def _dropped(backend: Backend, nbytes: int, rounds: int) -> str:
    runtime, stream, targets = backend.runtime, backend.runtime.stream(), []
    size, count = max(4096, nbytes // 8), min(rounds, 50)
    for i in range(count):
        source, middle = pattern(size, i), runtime.empty((size,), _UINT8)
        targets.append(runtime.empty((size,), _UINT8))
        backend.copy_batch([source], out=[middle], stream=stream)
        backend.copy_batch([middle], out=[targets[-1]], stream=stream)
        del source, middle
        runtime.empty((size,), _UINT8)  # takes the place of what was freed too early
    runtime.check(stream)
    for i, target in enumerate(targets):
        same(fetch(backend, target).tobytes() == pattern(size, i).tobytes(), True, f"array {i} is what was sent")
    return f"{count} arrays of {size} B"


def _threads(backend: Backend, rounds: int) -> str:
    problems: list[str] = []

    def work(seed: int) -> None:
        try:
            stream = backend.runtime.stream()
            asked = _request(backend, seed)
            for _ in range(rounds):
                backend.scatter_paged(asked.chunk, asked.slots, out=asked.cache, stream=stream)
                backend.gather_paged(asked.cache, asked.slots, out=asked.empty, stream=stream)
            backend.runtime.check(stream)
            found = fetch(backend, asked.memory).tobytes()
            same(found == asked.values, True, f"thread {seed} gathers what it scattered")
        except Exception as error:  # noqa: BLE001  # a thread's error is the check's
            problems.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(problems, [], "problems of the threads")
    return f"2 x {rounds} scatters and gathers"


def _error(backend: Backend) -> str:
    runtime, stream, asked = backend.runtime, backend.runtime.stream(), _request(backend, 5)
    backend.scatter_paged(asked.chunk, asked.slots, out=asked.cache, stream=stream)
    runtime.check(stream)
    wrong = fetch(backend, asked.slots)
    wrong[len(wrong) // 2] = 10**9
    bad = send(backend, wrong)
    runtime.check()
    try:
        backend.gather_paged(asked.cache, bad, out=asked.empty, stream=stream)
        backend.gather_paged(asked.cache, asked.slots, out=asked.empty, stream=stream)
        runtime.check(stream)
    except SlotError as error:
        said = str(error)
    else:
        raise ValueError("a slot that does not exist was taken")
    same(any(fetch(backend, asked.memory).tobytes()), False, "the failed op, or one behind it, has written")
    backend.gather_paged(asked.cache, asked.slots, out=asked.empty, stream=stream)
    runtime.check(stream)
    same(fetch(backend, asked.memory).tobytes() == asked.values, True, "the stream works again")
    return said


def _memory(backend: Backend) -> str:
    try:
        backend.runtime.empty((1 << 46,), _UINT8)
    except OutOfMemoryError as error:
        said = str(error)
    else:
        raise ValueError("64 TiB were granted")
    there = send(backend, pattern(1000, 1))
    same(fetch(backend, there).tobytes() == pattern(1000, 1).tobytes(), True, "the device works on")
    return said


def _torch(backend: Backend, nbytes: int) -> str:
    kind = backend.spec.device_types[0]
    if kind not in _TORCH:
        raise Forbidden(f"torch knows no {kind} devices")
    try:
        import torch
    except ImportError as error:
        raise Forbidden(f"torch is not installed: {error}") from error
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        raise Forbidden(f"this torch ({torch.__version__}) has no {kind} device")
    host = torch.from_numpy(pattern(nbytes, 4))
    stream = module.Stream()
    for i in range(20):
        with module.stream(stream):  # ops that name no stream go to torch's current one
            source = (host.to(kind, non_blocking=False) + i).contiguous()
            middle, target = torch.empty_like(source), torch.empty_like(source)
            backend.copy_batch([source], out=[middle])
            middle += 1  # torch's own, behind it
            backend.copy_batch([middle], out=[target])
            result = target - 1
            found = result.cpu()
        same(bool(torch.equal(found, host + i)), True, f"round {i}: torch and kvcore in turn on one stream")
    backend.runtime.check()
    return f"torch {torch.__version__}"


@dataclass(frozen=True, slots=True)
class _Request:
    """A paged cache, a chunk of values, an empty chunk with its memory, and distinct slots, all on the device."""

    cache: RowLayout
    chunk: RowLayout
    empty: RowLayout
    memory: Any
    slots: Any
    values: bytes


def _request(backend: Backend, seed: int) -> _Request:
    layers, blocks, block, heads, width, tokens = 2, 20, 16, 2, 64, 200
    tensors = [send(backend, np.zeros((2, blocks, block, heads, width), np.float16)) for _ in range(layers)]
    shape = (layers, 2, tokens, heads, width)
    values = pattern(2 * math.prod(shape), seed).view(np.float16).reshape(shape)
    full, memory = send(backend, values), send(backend, np.zeros(shape, np.float16))
    slots = send(backend, np.random.default_rng(seed).permutation(blocks * block)[:tokens].astype(np.int64))
    backend.runtime.check()
    dense = Layout("LKTHD")
    cache = Layout("L|KBNHD").bind(tensors)
    return _Request(cache, dense.bind(full), dense.bind(memory), memory, slots, values.tobytes())
