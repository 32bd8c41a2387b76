"""What the tests of codecs share: small chunks of KV, through a codec and back, and bytes nobody should trust."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.codecs.contract import Codec, CodedSegment, Layers
from kvcore.codecs.frame_values import GroupInfo, PartInfo
from kvcore.dtypes import dtype_name
from kvcore.errors import CorruptFrameError


@dataclass(frozen=True)
class Chunk:
    """Parts of some layers, each ``[layers, heads, T, width]``; parts C and R are MLA's and have one head."""

    parts: dict[str, np.ndarray]
    first_layer: int = 0

    @property
    def group(self) -> GroupInfo:
        layers, heads, rows, _ = next(iter(self.parts.values())).shape
        infos = tuple(PartInfo(name, dtype_name(x.dtype), x.shape[3]) for name, x in self.parts.items())
        layout = "LTC" if self.mla else "LKHTD"
        return GroupInfo(layout, range(self.first_layer, self.first_layer + layers), infos, rows, heads)

    @property
    def mla(self) -> bool:
        return list(self.parts) == ["C", "R"]

    def rows(self) -> kvcore.RowLayout:
        """Bind the arrays where they lie; MLA's are joined into new rows."""
        if self.mla:
            joined = np.concatenate([x[:, 0] for x in self.parts.values()], axis=-1)
            return kvcore.Layout("LTC").bind(joined)
        assert list(self.parts) == ["K", "V"]
        return kvcore.Layout("LK|HTD").bind([list(kv) for kv in zip(*self.parts.values(), strict=True)])

    def layer(self, index: int) -> Chunk:
        return Chunk({n: x[index : index + 1] for n, x in self.parts.items()}, self.first_layer + index)


@dataclass(frozen=True)
class Coding:
    """A codec's two ways, in the reference backend."""

    backend: kvcore.Backend

    def chunk(self, x: np.ndarray, *, mla: bool = False, first_layer: int = 0) -> Chunk:
        """Cut ``[layers, 2, heads, T, width]`` into K and V, or ``[layers, T, width]`` into MLA's C and R."""
        if mla:
            cut = max(x.shape[2] * 3 // 4, 1)
            return Chunk({"C": x[:, None, :, :cut], "R": x[:, None, :, cut:]}, first_layer)
        return Chunk({"K": np.ascontiguousarray(x[:, 0]), "V": np.ascontiguousarray(x[:, 1])}, first_layer)

    def encode(self, codec: Codec, chunk: Chunk) -> Layers:
        return codec.encode(self.backend, chunk.rows(), chunk.group)

    def decode(self, codec: Codec, layers: Any, like: Chunk) -> dict[str, np.ndarray]:
        """Decode into memory that holds the bytes 0xA5."""
        out = {n: np.full(x.nbytes, 0xA5, np.uint8).view(x.dtype).reshape(x.shape) for n, x in like.parts.items()}
        target = Chunk(out, like.first_layer)
        rows = target.rows()
        codec.decode(self.backend, layers, target.group, rows)
        if not like.mla:
            return out
        joined = np.stack([rows.array("C", layer)[0, :, 0] for layer in range(rows.layers)])
        cut = like.parts["C"].shape[3]
        return {"C": joined[:, None, :, :cut], "R": joined[:, None, :, cut:]}

    def try_decode(self, codec: Codec, layers: Any, like: Chunk) -> dict[str, np.ndarray] | None:
        """Decode; None where the bytes are refused, as they have to be."""
        try:
            return self.decode(codec, layers, like)
        except CorruptFrameError as error:
            reason = error.reason
        assert reason in {"stream", "length"}
        return None

    def check_contract(self, codec: Codec, chunk: Chunk) -> dict[str, np.ndarray]:
        """Check what holds for every codec; return what was decoded."""
        layers = self.encode(codec, chunk)
        assert layers == self.encode(codec, chunk), "the same bytes twice"
        one_by_one = [chunk.layer(i) for i in range(len(layers))]
        assert [self.encode(codec, layer)[0] for layer in one_by_one] == layers, "layers do not depend on one another"
        assert all(len(layer) == chunk.group.segment_count for layer in layers)
        decoded = self.decode(codec, layers, chunk)
        for i, layer in enumerate(one_by_one):
            for name, x in self.decode(codec, layers[i : i + 1], layer).items():
                assert x.tobytes() == decoded[name][i : i + 1].tobytes()
        return decoded

    def check_hostile(self, codec: Codec, chunk: Chunk) -> int:
        """Decode every altered form of a chunk's segments; return how many were not noticed."""
        layers = self.encode(codec, chunk)
        unnoticed = 0
        for which, segment in enumerate(layers[0]):
            for altered in _altered(segment):
                broken = [[*layers[0][:which], altered, *layers[0][which + 1 :]], *layers[1:]]
                if self.try_decode(codec, broken, chunk) is not None:
                    assert len(altered.data) == len(segment.data), "a longer or shorter segment is always noticed"
                    unnoticed += 1
        for broken in ([layers[0][:-1]], [[*layers[0], layers[0][0]]]):
            with pytest.raises(CorruptFrameError):
                self.decode(codec, broken, Chunk({n: x[:1] for n, x in chunk.parts.items()}))
        return unnoticed


def _altered(segment: CodedSegment) -> Iterator[CodedSegment]:
    """A segment cut at every byte, too long by one, with every bit flipped, and with other tiles in the directory."""
    data = bytes(segment.data)
    for length in range(len(data)):
        yield replace(segment, data=data[:length])
    yield replace(segment, data=data + b"\0")
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield replace(segment, data=bytes(flipped))
    for tile in [*((mode, words) for mode in (0, 1, 2, 3, 255) for words in (0, 1, 7, 65535)), *segment.tiles]:
        if (tile,) != segment.tiles:
            yield replace(segment, tiles=(tile,) * max(1, len(segment.tiles)))
    yield replace(segment, tiles=(*segment.tiles, (1, 0)))


@pytest.fixture(scope="session")
def coding() -> Coding:
    return Coding(kvcore.open_backend("cpu_ref", fallback="error"))
