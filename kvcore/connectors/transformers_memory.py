"""`TensorKV`: the tensors of a `DynamicCache` as an engine's memory, in place or by way of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from kvcore.errors import QuantizationError
from kvcore.layout import Layout
from kvcore.ops import Backend
from kvcore.rows import RowLayout

__all__ = ["Pairs", "TensorKV", "allocate"]

Pairs: TypeAlias = Sequence[tuple[Any, Any]]
"""Keys and values of each layer, tensors ``[1, heads, tokens, width]``."""

_DYNAMIC_CACHE = Layout("LK|1HTD")


class TensorKV:
    """The keys and values of one sequence: a `KVMemory` of one part.

    Where tensors hold what is stored, in host memory, bytes just move. Others are cast, or copied from their device and
    to it, chunk by chunk.

    Parameters
    ----------
    backend : Backend
        Works on the host's memory.
    pairs : sequence of (tensor, tensor)
        Keys and values of each layer, ``[1, heads, tokens, width]``, of one type on one device.
    stored : torch.dtype
        What is stored.
    """

    def __init__(self, backend: Backend, pairs: Pairs, stored: Any) -> None:
        self._backend, self._pairs, self._stored = backend, list(pairs), stored
        direct = all(t.dtype == stored and t.device.type == "cpu" for pair in pairs for t in pair)
        self._rows = _DYNAMIC_CACHE.bind(self._pairs) if direct else None
        self._staged: list[tuple[Any, Any]] = []

    def read(self, part: int, start: int, stop: int, out: RowLayout, *, layers: tuple[int, int] | None = None) -> bool:
        """See `KVMemory.read`.

        Raises
        ------
        QuantizationError
            A value is too large for the type that is stored.
        """
        if self._rows is not None:
            rows = self._rows.select(layers=layers, tokens=(start, stop))
        else:
            first, last = layers or (0, len(self._pairs))
            rows = _DYNAMIC_CACHE.bind(
                [[self._cast(t[:, :, start:stop], i) for t in self._pairs[i]] for i in range(first, last)]
            )
        self._backend.convert_layout(rows, out=out)
        return True

    def write(
        self,
        part: int,
        start: int,
        stop: int,
        chunk: RowLayout,
        *,
        layers: tuple[int, int] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """See `KVMemory.write`."""
        if self._rows is not None:
            target = self._rows.select(layers=layers, heads=heads, tokens=(start, stop))
            self._backend.convert_layout(chunk, out=target)
            return
        first, last = layers or (0, len(self._pairs))
        held = slice(*(heads or (0, self._pairs[0][0].shape[1])))
        staged = self._stage(last - first, held.stop - held.start, stop - start)
        self._backend.convert_layout(chunk, out=_DYNAMIC_CACHE.bind(staged))
        for pair, pieces in zip(self._pairs[first:last], staged, strict=True):
            for tensor, piece in zip(pair, pieces, strict=True):
                tensor[:, held, start:stop].copy_(piece)

    def _stage(self, layers: int, heads: int, tokens: int) -> list[tuple[Any, Any]]:
        """Host memory for a chunk: that of the chunk before if it was as large, as all but the last one are."""
        width = self._pairs[0][0].shape[3]
        shape = (1, heads, tokens, width)
        if len(self._staged) != layers or tuple(self._staged[0][0].shape) != shape:
            self._staged = allocate(layers, shape, self._stored, "cpu")
        return self._staged

    def _cast(self, piece: Any, layer: int) -> Any:
        """One chunk of a tensor in the type that is stored, on the host."""
        host = piece.detach().to("cpu")
        cast = host.to(self._stored).contiguous()
        if not bool((cast.isfinite() | ~host.isfinite()).all()):
            raise QuantizationError(
                f"layer {layer} has values that {self._stored} cannot hold (up to {float(host.abs().max())}); store a "
                "wider kv_dtype"
            )
        return cast


def allocate(layers: int, shape: tuple[int, int, int, int], dtype: Any, device: Any) -> list[tuple[Any, Any]]:
    """Return tensors of any content: keys and values of each layer."""
    import torch

    return [
        (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for _ in range(layers)
    ]
