"""KVS1 on the device: symbols a second of its ops alone, of the chains that codecs make of them, and of whole calls.

One chain decodes, dequantises and scatters into a paged cache, the other quantises, chooses classes and encodes. Whole
calls (`gather_encode`, `decode_scatter`) include what the host does between, and the coded bytes on the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.device_check.child import Given
from bench.device_check.recorder import Recorder, same
from bench.device_check.timing import Call, Clock, rate
from kvcore import Backend, Layout, Quantized, QuantSpec, RopeParams
from kvcore.codecs import GroupInfo, PartInfo, get_codec
from kvcore.codecs.composites import decode_scatter, gather_encode
from kvcore.codecs.tables import table_set
from kvcore.dtypes import BFLOAT16
from kvcore.entropy import EncodedTiles, TileChoice, tile_bytes, tile_capacity
from kvcore.ops import fetch, send

CODED, WHOLE = "KVS1", "whole calls"
_AIM_DECODE, _AIM_ENCODE, _AIM_DECODE_TRITON = 300.0, 150.0, 120.0
_WIDTH, _BLOCK = 64, 16
_SPEC = QuantSpec.symmetric(16, (2,))


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Everything that the chains use, on the device: M tiles ``[T, 64]``, a layer's, side's and head's each."""

    x: Any
    scale: Any
    values: Any
    choice: TileChoice
    coded: EncodedTiles
    out: Any
    cache: Any
    chunks: list[Any]
    slots: Any

    @property
    def symbols(self) -> int:
        count: int = self.values.shape[0] * self.values.shape[1] * self.values.shape[2]
        return count


def run(given: Given, recorder: Recorder) -> None:
    """Measure ops, chains and whole calls."""
    backend = given.open()
    recorder.check("symbols a second", partial(_coded, given, backend, recorder))
    if not given.implementation:
        recorder.check("whole calls", partial(_whole, given, backend, recorder))


def _coded(given: Given, backend: Backend, recorder: Recorder) -> str:
    tiles = _prepared(backend, given.small)
    tables = table_set("gauss")
    choose = partial(backend.choose_classes, tiles.values, tables, use_offsets=True, out=tiles.choice)
    encode = partial(backend.encode_symbols, tiles.values, tiles.choice, tables, use_offsets=True, out=tiles.coded)
    decode = partial(backend.decode_symbols, tiles.coded, tables, use_offsets=True, out=tiles.out)
    used = backend.runtime.empty(tiles.scale.shape, np.dtype(np.float32))
    quantise = partial(backend.quantize, tiles.x, _SPEC, scale=tiles.scale, out=Quantized(tiles.values, used))
    back = partial(backend.dequantize, Quantized(tiles.out, tiles.scale), _SPEC, out=tiles.x)
    scatter = partial(backend.scatter_paged, tiles.chunks, tiles.slots, check_duplicates=False, out=tiles.cache)
    decode()
    backend.runtime.check()
    found, wanted = fetch(backend, tiles.out), fetch(backend, tiles.values)
    same(bool(np.array_equal(found, wanted)), True, "symbols decode to what was encoded")
    aim = _AIM_DECODE_TRITON if given.implementation == "triton" else _AIM_DECODE
    chain = ("decode_symbols", "dequantize", "scatter_paged")
    cases: list[tuple[str, Call, tuple[str, ...], float | None]] = [
        ("decode", decode, ("decode_symbols",), aim if given.implementation else None),
        ("decode, dequantise, scatter", _chain(decode, back, scatter), chain, aim),
        ("encode", encode, ("encode_symbols",), _AIM_ENCODE),
        ("quantise, choose, encode", _chain(quantise, choose, encode), ("encode_symbols", "quantize"), None),
        ("choose classes", choose, ("choose_classes",), None),
        ("quantise", quantise, ("quantize",), None),
        ("dequantise", back, ("dequantize",), None),
    ]
    cases = [case for case in cases if all(given.measures(backend, op) for op in case[2])]
    clock = Clock(backend, given, len(cases) + 4)
    for name, call, ops, wanted_rate in cases:
        if clock.out_of_time:
            return "stopped: out of time"
        how = {"implementation": backend.bindings[ops[0]].implementation}
        aimed = {} if wanted_rate is None else {"aim": wanted_rate}
        recorder.figure(CODED, name, **how, **rate(tiles.symbols, clock.time(call), "Gsym/s"), **aimed)
    modes, words = fetch(backend, tiles.coded.modes), fetch(backend, tiles.coded.words)
    sizes = [tile_bytes(m, w, _WIDTH, tables, True) or 0 for m, w in zip(modes.tolist(), words.tolist(), strict=True)]
    return f"{len(sizes)} tiles, {tiles.symbols / 1e6:.1f} M symbols of {8 * sum(sizes) / tiles.symbols:.2f} bits"


def _chain(*calls: Call) -> Call:
    def run_all() -> None:
        for call in calls:
            call()

    return run_all


def _prepared(backend: Backend, small: bool) -> _Tiles:
    layers, heads, tokens, chunks = (1, 2, 64, 2) if small else (32, 8, 256, 32)
    each, runtime = layers * 2 * heads, backend.runtime
    count = each * chunks
    shape = (count, tokens, _WIDTH)
    distinct = _values(min(count, 64), tokens)
    values = send(backend, np.concatenate([distinct] * -(-count // len(distinct)))[:count])
    scale = send(backend, np.full((count, tokens, 1), 2.0**-6, np.float32))
    tables = table_set("gauss")
    choice = backend.choose_classes(values, tables, use_offsets=True)
    coded = EncodedTiles(
        runtime.empty((count, tile_capacity(tokens, _WIDTH)), np.dtype(np.uint8)),
        runtime.empty((count,), np.dtype(np.uint8)),
        runtime.empty((count,), np.dtype(np.uint16)),
    )
    backend.encode_symbols(values, choice, tables, use_offsets=True, out=coded)
    x = backend.dequantize(Quantized(values, scale), _SPEC, out=runtime.empty(shape, BFLOAT16))
    whole = x.reshape(chunks, layers, 2, heads, tokens, _WIDTH)
    blocks = chunks * tokens // _BLOCK
    cache = [runtime.empty((2, blocks, _BLOCK, heads, _WIDTH), BFLOAT16) for _ in range(layers)]
    order = np.random.default_rng(3).permutation(blocks)
    slots = (order[:, None] * _BLOCK + np.arange(_BLOCK)).reshape(-1).astype(np.int64)
    index = send(backend, slots)
    runtime.check()
    return _Tiles(
        x,
        scale,
        values,
        choice,
        coded,
        runtime.empty(shape, np.dtype(np.int16)),
        Layout("L|KBNHD").bind(cache),
        [Layout("LKHTD").bind(whole[chunk]) for chunk in range(chunks)],
        index,
    )


def _values(count: int, tokens: int) -> Any:
    """Return integers such as KVS1 codes: bells of about 3.5 bits, whose scale and mean differ by channel."""
    random = np.random.default_rng(7)
    scale = 2.8 * np.exp(0.5 * random.standard_normal((count, 1, _WIDTH)))
    mean = 6 * random.standard_normal(scale.shape) * (random.random(scale.shape) < 0.2)
    return np.rint(random.standard_normal((count, tokens, _WIDTH)) * scale + mean).astype(np.int16)


def _whole(given: Given, backend: Backend, recorder: Recorder) -> str:
    layers, heads, tokens = (1, 2, 64) if given.small else (32, 8, 256)
    width = 2 * _WIDTH
    sides = (PartInfo("K", "bfloat16", width), PartInfo("V", "bfloat16", width))
    rope = RopeParams(width, theta=5e5)
    group = GroupInfo("LKTHD", tuple(range(layers)), sides, rows=tokens, head_count=heads, rope=rope)
    random = np.random.default_rng(5)
    shape = (2, tokens // _BLOCK, _BLOCK, heads, width)
    filled = [send(backend, random.standard_normal(shape, np.float32).astype(BFLOAT16)) for _ in range(layers)]
    cache = Layout("L|KBNHD").bind(filled)
    index = send(backend, random.permutation(tokens).astype(np.int64))
    backend.runtime.check()
    names = ("balanced", "raw") if given.small else ("balanced", "lossless", "fp8", "raw")
    clock = Clock(backend, given, 2 * len(names))
    for name in names:
        codec = get_codec(name)
        coded = gather_encode(backend, codec, cache, index, group)
        nbytes = sum(len(segment.data) for layer in coded for segment in layer)
        for verb, call in (
            ("gather_encode", partial(gather_encode, backend, codec, cache, index, group)),
            ("decode_scatter", partial(decode_scatter, backend, codec, coded, index, group, cache)),
        ):
            if clock.out_of_time:
                return "stopped: out of time"
            recorder.figure(WHOLE, f"{verb} {name}", coded_bytes=nbytes, **rate(group.raw_bytes, clock.time(call)))
    return f"a chunk of {tokens} tokens, {group.raw_bytes / 2**20:.1f} MiB"
