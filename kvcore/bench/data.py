"""KV to code: of a real model where there is one, else made to look like it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvcore.arrays import aligned_empty
from kvcore.codecs.frame_values import GroupInfo, PartInfo
from kvcore.codecs.kvs1 import Kvs1
from kvcore.dtypes import BFLOAT16
from kvcore.entropy import TILE_TOKENS, TileChoice
from kvcore.errors import ConfigError
from kvcore.layout import Layout
from kvcore.ops import Backend
from kvcore.rope import RopeParams
from kvcore.rows import RowLayout

__all__ = ["KV", "CodedTiles", "made_up_kv", "model_kv", "tiles_of"]

_THETA = 1e5


@dataclass(frozen=True, slots=True)
class KV:
    """KV of one sequence from position 0.

    Parameters
    ----------
    bits : int16 array ``[layers, 2, T, heads, width]``
        The bit patterns of bfloat16.
    rope : RopeParams
        How the keys were rotated.
    source : str
        What it is, for people.
    path : Path
        A ``.npy`` file of `bits`, for the peer.
    """

    bits: npt.NDArray[np.int16]
    rope: RopeParams
    source: str
    path: Path

    def chunk(self, tokens: int) -> tuple[RowLayout, GroupInfo, npt.NDArray[Any]]:
        """Return the first tokens as rows, what they are, and their array."""
        layers, _, _, heads, width = self.bits.shape
        array = aligned_empty((layers, 2, tokens, heads, width), BFLOAT16)
        array.view(np.int16)[...] = self.bits[:, :, :tokens]
        parts = (PartInfo("K", "bfloat16", width), PartInfo("V", "bfloat16", width))
        group = GroupInfo("LKTHD", tuple(range(layers)), parts, rows=tokens, head_count=heads, rope=self.rope)
        return Layout("LKTHD").bind(array), group, array


def made_up_kv(path: Path, *, layers: int = 30, heads: int = 3, tokens: int = 1024, width: int = 64) -> KV:
    """Return Gaussian KV whose channels differ in scale and mean as a model's do, and write it to `path`."""
    random = np.random.default_rng(7)
    shape = (layers, 2, tokens, heads, width)
    scale = np.exp(0.7 * random.standard_normal((layers, 2, 1, heads, width)))
    mean = 2 * scale * random.standard_normal(scale.shape) * (random.random(scale.shape) < 0.2)
    bits = (random.standard_normal(shape) * scale + mean).astype(BFLOAT16).view(np.int16)
    np.save(path, bits)
    return KV(bits, RopeParams(width, theta=_THETA), "made up: Gaussian channels", path)


@dataclass(frozen=True, slots=True)
class CodedTiles:
    """Tiles as a codec hands them to `encode_symbols`: values int16 ``[M, T, W]``, tokens left out, and the choice."""

    values: npt.NDArray[np.int16]
    skip: npt.NDArray[np.uint8] | None
    choice: TileChoice


class _Tap:
    """A backend that keeps what passes through `choose_classes`: every tile goes there."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.tiles: list[CodedTiles] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def fused(self, composite: str) -> None:
        return None

    def choose_classes(self, values: Any, tables: Any, *, use_offsets: bool = False, skip: Any = None) -> TileChoice:
        choice = self._backend.choose_classes(values, tables, use_offsets=use_offsets, skip=skip)
        self.tiles.append(CodedTiles(values, skip, choice))
        return choice


def tiles_of(backend: Backend, kv: KV, codec: str) -> dict[str, CodedTiles]:
    """Return the tiles of the first 256 tokens by part: of all layers and heads, and each head's first 64 channels."""
    rows, group, _ = kv.chunk(TILE_TOKENS)
    tap = _Tap(backend)
    Kvs1(codec).encode(cast(Backend, tap), rows, group)
    each = len(tap.tiles) // len(group.parts)
    return {part.name: tap.tiles[i * each] for i, part in enumerate(group.parts)}


def model_kv(model: Any, tokenizer: Any, name: str, tokens: int, path: Path) -> KV:
    """Prefill a model with a text that comes with Python, and return its KV; written to `path` as well.

    Parameters
    ----------
    model, tokenizer
        Of transformers.
    name : str
        The model's.
    tokens : int
        How many.
    path : Path
    """
    from pydoc_data.topics import topics

    import torch

    from kvcore.connectors.transformers_model import model_rope

    text = "\n".join(topics.values())[: 12 * tokens]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    sides = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    kv = torch.stack(sides).permute(0, 1, 3, 2, 4).to(torch.bfloat16).contiguous()  # [layers, 2, T, heads, width]
    bits = kv.view(torch.int16).numpy()
    np.save(path, bits)
    rope = model_rope(model)
    if rope is None:
        raise ConfigError(f"{name} has no rotary positions; take a model that has")
    return KV(bits, rope, f"{name}, {tokens} tokens of Python's help topics", path)
