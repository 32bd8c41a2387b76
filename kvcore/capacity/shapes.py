"""The KV of a model: what each layer keeps for a token, and for a request."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from kvcore.dtypes import to_dtype
from kvcore.errors import ConfigError

__all__ = ["LayerShape", "ModelShape"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer keeps.

    Parameters
    ----------
    kind : {"attention", "latent", "index", "recurrent"}
        Keys and values by head; one row of latent and rotated keys (MLA), the same for all query heads; the keys of a
        sparse attention's indexer; or a state that does not grow with the sequence.
    heads : int
        KV heads; 1 where all query heads share a row, 0 for a state.
    widths : tuple of int
        Elements of a token by part, for one head: K and V, or latent and rotated keys. Bytes of an indexer.
    window : int, optional
        Tokens that attention looks back; None for all.
    state : int
        Elements of a request's state.
    """

    kind: str
    heads: int = 0
    widths: tuple[int, ...] = ()
    window: int | None = None
    state: int = 0

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of one token."""
        # An indexer keeps 8-bit keys and their scales, whatever the element type of the KV.
        return self.heads * sum(self.widths) * (1 if self.kind == "index" else itemsize)

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of one request's state."""
        return self.state * max(itemsize, 2)  # KV in 8 bits leaves states in the type that the model computes in

    def on_one_of(self, ranks: int) -> LayerShape:
        """Return what one of some tensor-parallel ranks keeps of it.

        Raises
        ------
        ConfigError
            The heads cannot be shared out evenly.
        """
        if self.kind in ("latent", "index") or ranks == 1:
            return self  # every rank has the rows of all its query heads' keys: the whole
        if self.kind == "recurrent":
            return LayerShape(self.kind, state=-(-self.state // ranks))
        more, fewer = max(self.heads, ranks), min(self.heads, ranks)
        if more % fewer:
            raise ConfigError(
                f"{self.heads} KV heads cannot be shared out to {ranks} ranks: give --tp a divisor or a multiple of "
                f"{self.heads}"
            )
        return LayerShape(self.kind, max(1, self.heads // ranks), self.widths, self.window)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model keeps.

    Parameters
    ----------
    name : str
    layers : tuple of tuple of LayerShape
        For each of the model's layers, what it keeps: nothing, one thing, or several (attention beside a state).
    dtype : str
        Element type of the KV, by the model's configuration; empty if that does not say.
    source : str
        Where the figures are from.
    """

    name: str
    layers: tuple[tuple[LayerShape, ...], ...]
    dtype: str
    source: str

    def groups(self) -> dict[LayerShape, list[int]]:
        """Return the layers of each kind, in the order of their first."""
        groups: dict[LayerShape, list[int]] = {}
        for number, layer in enumerate(self.layers):
            for shape in layer:
                groups.setdefault(shape, []).append(number)
        return groups

    def of_rank(self, ranks: int) -> ModelShape:
        """Return what one of some tensor-parallel ranks keeps; `ConfigError` where heads cannot be shared out."""
        layers = tuple(tuple(shape.on_one_of(ranks) for shape in layer) for layer in self.layers)
        return ModelShape(self.name, layers, self.dtype, self.source)

    def token_bytes(self, dtype: str, *, kinds: Collection[str] = ("attention", "latent", "index")) -> int:
        """Return the bytes of one token in all layers, whatever their windows: what a chunk holds of it."""
        return sum(shape.token_bytes(_itemsize(dtype)) for shape in self._shapes() if shape.kind in kinds)

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of one request's recurrent states."""
        return sum(shape.state_bytes(_itemsize(dtype)) for shape in self._shapes())

    def held_bytes(self, dtype: str, tokens: int) -> int:
        """Return what an engine keeps for a request of some tokens: of layers with a window, no more than that."""
        size = _itemsize(dtype)
        return self.state_bytes(dtype) + sum(
            shape.token_bytes(size) * min(tokens, shape.window or tokens) for shape in self._shapes()
        )

    def _shapes(self) -> Iterator[LayerShape]:
        return (shape for layer in self.layers for shape in layer)


def _itemsize(dtype: str) -> int:
    return int(np.dtype(to_dtype(dtype)).itemsize)
