"""The cases of each suite: arrays of the sizes that serving moves, and the calls on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from kvcore.arrays import aligned_empty
from kvcore.bench.cases import Case, copy_roofline
from kvcore.bench.data import KV, tiles_of
from kvcore.codecs.frame import encode_frame
from kvcore.codecs.frame_reader import FrameReader
from kvcore.codecs.tables import table_set
from kvcore.dtypes import BFLOAT16
from kvcore.entropy import EncodedTiles
from kvcore.layout import Layout
from kvcore.ops import Backend
from kvcore.quant import QuantSpec
from kvcore.rope import RopeParams, rope_table
from kvcore.rows import RowLayout

__all__ = ["SUITES"]

_LAYERS, _TOKENS, _HEADS, _WIDTH = 16, 256, 8, 128
_BLOCKS, _BLOCK = 256, 16
_MLA = 576
_ID = bytes(32)


def copy(backend: Backend, kv: KV) -> Iterator[Case]:
    """Gather and scatter between a paged cache and a chunk: 16 layers x 256 tokens x 1024 bf16, or MLA rows of 576."""
    random = np.random.default_rng(1)
    ids = random.permutation(_BLOCKS)[: _TOKENS // _BLOCK].astype(np.int64)
    slots = random.permutation(_BLOCKS * _BLOCK)[:_TOKENS].astype(np.int64)
    for name, text, shape in (
        ("NHD", "L|KBNHD", (2, _BLOCKS, _BLOCK, _HEADS, _WIDTH)),
        ("HND", "L|KBHND", (2, _BLOCKS, _HEADS, _BLOCK, _WIDTH)),
        ("MLA", "L|BNC", (_BLOCKS, _BLOCK, _MLA)),
    ):
        cache = Layout(text).bind([_noise(shape, seed) for seed in range(_LAYERS)])
        dense = (_LAYERS, _TOKENS, _MLA) if name == "MLA" else (_LAYERS, 2, _TOKENS, _HEADS, _WIDTH)
        memory = aligned_empty(dense, BFLOAT16)
        memory[...] = 0
        chunk = Layout("LTC" if name == "MLA" else "LKTHD").bind(memory)
        roofline = copy_roofline(memory.nbytes)
        for unit, index in (("block", ids), ("slot", slots)):
            for scatter in (False, True):
                call = _mover(backend, cache, chunk, index, unit, scatter)
                peer: dict[str, Any] | None = {
                    "what": f"{unit}s", "layers": _LAYERS, "tokens": _TOKENS, "layout": name, "scatter": scatter,
                }  # fmt: skip
                if name == "HND" and unit == "slot":
                    peer = None  # the peer has no such path on the CPU
                verb = "scatter" if scatter else "gather"
                yield Case(f"{verb} {unit}s {name}", memory.nbytes, call, roofline, peer)
    source, target = np.ones(1 << 25, np.uint8), np.zeros(1 << 25, np.uint8)
    digests, roofline = np.zeros(1, np.uint64), copy_roofline(source.nbytes)
    yield Case("copy_batch", source.nbytes, lambda: backend.copy_batch([source], out=[target]), roofline)
    both = partial(backend.copy_batch, [source], digests=digests, out=[target])
    yield Case("copy_batch with digest", source.nbytes, both, roofline)
    yield Case("digest", source.nbytes, lambda: backend.digest([source], out=digests), roofline)


def _mover(backend: Backend, cache: Any, chunk: Any, index: Any, unit: str, scatter: bool) -> Callable[[], Any]:
    if scatter:
        return partial(backend.scatter_paged, chunk, index, unit=unit, check_duplicates=False, out=cache)
    return partial(backend.gather_paged, cache, index, unit=unit, out=chunk)


def quant(backend: Backend, kv: KV) -> Iterator[Case]:
    """Reductions, quantisers, rotation, re-positioning. Bytes are those of the bfloat16 side."""
    shape = (2, _LAYERS, _TOKENS, _HEADS * _WIDTH)
    x = _noise(shape, 1)
    roofline = copy_roofline(x.nbytes)
    row = (*shape[:-1], 1)
    largest, back = np.empty(row, np.float32), np.empty(shape, BFLOAT16)
    yield Case("reduce_absmax by token", x.nbytes, lambda: backend.reduce_absmax(x, (3,), out=largest), roofline)
    exponent, moments = np.zeros((1, 1, 1, 1), np.int32), np.empty((2, *row), np.int64)
    yield Case(
        "reduce_moments by token", x.nbytes, lambda: backend.reduce_moments(x, exponent, (3,), out=moments), roofline
    )
    ones, each = np.ones((1, 1, 1, 1), np.float32), np.full(row, 0.02, np.float32)
    peers = ({"what": "fp8", "shape": shape, "back": False}, {"what": "fp8", "shape": shape, "back": True})
    for name, spec, scale, peer in (
        ("fp8 e4m3, one scale", QuantSpec.fp8("float8_e4m3fn", (0, 1, 2, 3)), ones, peers),
        ("fp8 e4m3, scale by token", QuantSpec.fp8("float8_e4m3fn", (3,)), None, (None, None)),
        ("int16, given scales", QuantSpec.symmetric(16, (3,)), each, (None, None)),
        ("int8 by token", QuantSpec.symmetric(8, (3,)), None, (None, None)),
    ):
        coded = backend.quantize(x, spec, scale=scale)
        forth = partial(backend.quantize, x, spec, scale=scale, out=coded)
        yield Case(f"quantize {name}", x.nbytes, forth, roofline, peer[0])
        yield Case(
            f"dequantize {name}", x.nbytes, partial(backend.dequantize, coded, spec, out=back), roofline, peer[1]
        )
    small = np.random.default_rng(2).integers(0, 16, (_LAYERS * _TOKENS, 2048)).astype(np.uint8)
    packed = backend.pack_bits(small, 4)
    line = copy_roofline(small.nbytes)
    yield Case("pack_bits 4", small.nbytes, lambda: backend.pack_bits(small, 4, out=packed), line)
    yield Case("unpack_bits 4", small.nbytes, lambda: backend.unpack_bits(packed, 4, 2048, out=small), line)
    tokens = 4096
    cos, sin = rope_table(RopeParams(_WIDTH), np.full(tokens, 5000, np.int64))
    for dtype in (BFLOAT16, np.dtype(np.float32)):
        keys = _noise((tokens, _HEADS, _WIDTH), 3).astype(dtype)
        request = {"what": "rope", "tokens": tokens, "dtype": "float32" if dtype == np.float32 else "bfloat16"}
        call = partial(backend.shift_rope, keys, cos, sin, out=keys)
        yield Case(f"shift_rope {request['dtype']}", keys.nbytes, call, copy_roofline(keys.nbytes), request)
    yield Case("rotate 128", x.nbytes, lambda: backend.rotate(x, seed=1, block=128, out=back), roofline)


def entropy(backend: Backend, kv: KV) -> Iterator[Case]:
    """KVS1 tiles of `balanced`: the choice of classes, symbols to bytes and back. Figures are symbols."""
    tables = table_set("gauss")
    for part, coded in tiles_of(backend, kv, "balanced").items():
        values, skip, choice = coded.values, coded.skip, coded.choice
        tiles = EncodedTiles(*backend.encode_symbols(values, choice, tables, use_offsets=True))
        out = np.empty_like(values)
        calls: dict[str, Callable[[], Any]] = {
            "choose_classes": partial(backend.choose_classes, values, tables, use_offsets=True, skip=skip, out=choice),
            "encode_symbols": partial(backend.encode_symbols, values, choice, tables, use_offsets=True, out=tiles),
            "decode_symbols": partial(backend.decode_symbols, tiles, tables, use_offsets=True, out=out),
        }
        for name, call in calls.items():
            yield Case(f"{name} {part}", values.size, call, unit="Gsym/s")


def codec(backend: Backend, kv: KV) -> Iterator[Case]:
    """Whole frames, digests included, of the same KV as the peer's CacheGen; by tokens in a chunk."""
    for name in ("balanced", "high", "small", "lossless", "cachegen", "fp8"):
        for tokens in (64, 128, 256, 768) if name == "balanced" else (256,):
            rows, group, array = kv.chunk(tokens)
            encode = partial(encode_frame, backend, [group], [rows], tokens=tokens, namespace=_ID, key=_ID, codec=name)
            frame, target = encode(), Layout("LKTHD").bind(aligned_empty(array.shape, array.dtype))
            peer = {"what": "cachegen", "path": str(kv.path), "tokens": tokens} if name == "balanced" else None
            for back, call in ((False, encode), (True, partial(_decode, backend, frame, target))):
                label = f"{name} {tokens} {'decode' if back else 'encode'} ({array.nbytes / len(frame):.2f}x)"
                asked = None if peer is None else {**peer, "back": back}
                yield Case(label, array.nbytes, call, copy_roofline(array.nbytes), asked)


def _decode(backend: Backend, frame: bytes | bytearray | memoryview, target: RowLayout) -> None:
    FrameReader(frame, expect_namespace=_ID, expect_key=_ID, digest=backend.digest).decode(backend, [target])


def _noise(shape: tuple[int, ...], seed: int) -> Any:
    array = aligned_empty(shape, BFLOAT16)
    array[...] = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return array


SUITES: dict[str, Callable[[Backend, KV], Iterator[Case]]] = {
    "copy": copy,
    "quant": quant,
    "entropy": entropy,
    "codec": codec,
}
"""Suite by name; ``dispatch`` (`kvcore.bench.dispatch`) times calls rather than bytes and stands apart."""
