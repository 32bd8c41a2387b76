"""Frames across backends: what the device encodes the reference decodes, and the other way round, to the same bytes.

The caches are of the shapes that engines have: paged, with the layers, heads and widths of models in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.device_check.child import Given
from bench.device_check.recorder import Recorder, same
from kvcore import Backend, Layout, RopeParams, RowLayout, open_backend
from kvcore.codecs import GroupInfo, PartInfo, get_codec
from kvcore.codecs.composites import decode_scatter, gather_encode
from kvcore.codecs.contract import CodedSegment
from kvcore.codecs.registry import PRESETS
from kvcore.dtypes import BFLOAT16
from kvcore.ops import fetch, send

_BLOCK = 16


@dataclass(frozen=True, slots=True)
class _Cache:
    """A paged cache of some engine, by the shape of one of its tensors."""

    name: str
    layout: str
    shape: tuple[int, ...]
    layers: int
    tokens: int
    group: GroupInfo

    @property
    def blocks(self) -> int:
        return self.shape[self.layout.split("|")[1].index("B")]

    def bind(self, tensors: Sequence[Any]) -> RowLayout:
        return Layout(self.layout).bind(list(tensors))


def run(given: Given, recorder: Recorder) -> None:
    """Exchange every codec's bytes with the reference, over caches of several engines."""
    device, reference = given.open(), open_backend("cpu_ref", fallback="error")
    for cache in _caches(given.small):
        random = np.random.default_rng(len(cache.name))
        tensors = [_values(random, cache.shape) for _ in range(cache.layers)]
        count = cache.blocks * _BLOCK
        slots = random.permutation(count)[: cache.tokens].astype(np.int64)
        latent = cache.group.parts[0].name == "C"
        for codec in ("balanced", "lossless", "int4", "raw") if given.small else PRESETS:
            if latent and codec.startswith("asym"):
                continue  # latent rows are no values apart from keys
            if given.left_s < 0:
                recorder.check(f"{cache.name} {codec}", _late)
                continue
            job = partial(_exchange, device, reference, cache, tensors, slots, codec)
            recorder.check(f"{cache.name} {codec}", job)


def _exchange(
    device: Backend, reference: Backend, cache: _Cache, tensors: list[Any], slots: Any, codec_name: str
) -> str:
    codec, group = get_codec(codec_name), cache.group
    there, index = [send(device, t) for t in tensors], send(device, slots)
    ours = gather_encode(device, codec, cache.bind(there), index, group)
    theirs = gather_encode(reference, codec, cache.bind(tensors), slots, group)
    same(_bytes(ours), _bytes(theirs), "segments that the device encodes")
    back = [send(device, np.full_like(t, 7)) for t in tensors]
    decode_scatter(device, codec, theirs, index, group, cache.bind(back))
    wanted = [np.full_like(t, 7) for t in tensors]
    decode_scatter(reference, codec, ours, slots, group, cache.bind(wanted))
    for layer, (found, right) in enumerate(zip(back, wanted, strict=True)):
        if fetch(device, found).tobytes() != right.tobytes():
            raise ValueError(f"layer {layer} of the cache that the device decodes into differs from the reference's")
    coded, raw = sum(len(s.data) for layer in ours for s in layer), group.raw_bytes
    return f"{raw / 2**20:.1f} MiB to {coded} bytes, {raw / coded:.2f} to 1"


def _bytes(layers: Sequence[Sequence[CodedSegment]]) -> list[list[tuple[bytes, Any]]]:
    return [[(bytes(s.data), s.tiles) for s in layer] for layer in layers]


def _late() -> str:
    raise TimeoutError("no time was left for it")


def _values(random: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Return bell-shaped values whose scale and mean differ by channel, as a model's do."""
    scale = np.exp(0.7 * random.standard_normal(shape[-1]))
    mean = 2 * scale * random.standard_normal(shape[-1]) * (random.random(shape[-1]) < 0.2)
    return (random.standard_normal(shape, np.float32) * scale + mean).astype(BFLOAT16)


def _caches(small: bool) -> list[_Cache]:
    heads, width, layers, tokens = (2, 64, 1, 40) if small else (8, 128, 2, 256)
    tail = 44 if small else 300
    rope = RopeParams(width, theta=5e5)
    sides = (PartInfo("K", "bfloat16", width), PartInfo("V", "bfloat16", width))
    blocks = tail // _BLOCK + 4

    def grouped(rows: int) -> GroupInfo:
        return GroupInfo("LKTHD", tuple(range(layers)), sides, rows=rows, head_count=heads, rope=rope)

    latent, turned = (64, 16) if small else (512, 64)
    mla = GroupInfo(
        "LTC",
        tuple(range(layers)),
        (PartInfo("C", "bfloat16", latent), PartInfo("R", "bfloat16", turned)),
        rows=tokens,
        rope=RopeParams(turned, theta=1e4, interleaved=True),
    )
    nhd, hnd = (2, blocks, _BLOCK, heads, width), (2, blocks, heads, _BLOCK, width)
    return [
        _Cache("NHD", "L|KBNHD", nhd, layers, tokens, grouped(tokens)),
        _Cache("HND, with a tail", "L|KBHND", hnd, layers, tail, grouped(tail)),
        _Cache("MLA", "L|BNC", (blocks, _BLOCK, latent + turned), layers, tokens, mla),
    ]
