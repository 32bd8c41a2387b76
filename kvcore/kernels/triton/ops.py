"""The hooks of the twins: each opens a queue, launches kernels, and closes the queue.

A backend's module of implementations makes one `TritonOps` and names the ops of `kvcore.kernels.triton.TWINS`::

    _ops = TritonOps(owner)
    kvcore_op_gather_paged = _ops.kvcore_op_gather_paged
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore.dtypes import DTYPES
from kvcore.entropy import EncodedTiles, TableSet
from kvcore.hookspecs.markers import hookimpl
from kvcore.kernels.library import Indexed
from kvcore.kernels.triton import bits as bits_kernels
from kvcore.kernels.triton import lang, paged, quantize, reduce, tiles
from kvcore.kernels.triton.queue import Owner, Queue
from kvcore.quant import NONFINITE, Quantized, QuantSpec
from kvcore.rows import RowLayout

__all__ = ["TritonOps"]

_CODES = {
    DTYPES[name]: code
    for name, code in (
        *(("int8", 1), ("uint8", 0), ("int16", 3), ("float16", 8), ("bfloat16", 9), ("float32", 10)),
        *(("float8_e4m3fn", 11), ("float8_e5m2", 12)),
    )
}
"""As ``kv_dtype`` in abi.h."""


class TritonOps:
    """Implementations of the ops that have a twin. Docstrings are the hookspecs' (`kvcore.hookspecs`).

    Parameters
    ----------
    owner : Owner
        The device, or the interpreter.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    @hookimpl
    def kvcore_op_gather_paged(
        self,
        src: RowLayout,
        index: Any,
        *,
        unit: str = "slot",
        skip_tokens: int = 0,
        out: Sequence[RowLayout],
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        q = self.owner.open("gather_paged", stream)
        paged.move_paged(q, src, out, index, unit=unit, skip_tokens=skip_tokens, gather=True)
        self._close(q, "gather_paged", (index, src, out), Indexed(index, src, unit))
        return out

    @hookimpl
    def kvcore_op_scatter_paged(
        self,
        src: Sequence[RowLayout],
        index: Any,
        *,
        unit: str = "slot",
        skip_tokens: int = 0,
        check_duplicates: bool = True,
        out: RowLayout,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        q = self.owner.open("scatter_paged", stream)
        paged.move_paged(q, out, src, index, unit=unit, skip_tokens=skip_tokens, gather=False, check=check_duplicates)
        self._close(q, "scatter_paged", (index, src, out), Indexed(index, out, unit))
        return out

    @hookimpl
    def kvcore_op_reduce_absmax(
        self,
        x: Any,
        *,
        axes: tuple[int, ...],
        nonfinite: str = "error",
        out: Any,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        q = self.owner.open("reduce_absmax", stream)
        if _filled(x):
            reduce.reduce_absmax(q, x, axes, _CODES[x.dtype], NONFINITE.index(nonfinite), out)
        self._close(q, "reduce_absmax", (x, out), x)
        return out

    @hookimpl
    def kvcore_op_quantize(
        self,
        x: Any,
        *,
        spec: QuantSpec,
        scale: Any = None,
        nonfinite: str = "error",
        out: Quantized,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        q = self.owner.open("quantize", stream)
        if _filled(x):
            codes = _CODES[x.dtype], _CODES[out.codes.dtype]
            quantize.quantize(q, x, out, scale, spec, NONFINITE.index(nonfinite), codes)
        self._close(q, "quantize", (x, scale, out), x)
        return out

    @hookimpl
    def kvcore_op_dequantize(
        self, q: Quantized, *, spec: QuantSpec, out: Any, stream: Any = None, workspace: Any = None
    ) -> Any:
        queue = self.owner.open("dequantize", stream)
        if _filled(out):
            quantize.dequantize(queue, q, spec, out, (_CODES[out.dtype], _CODES[q.codes.dtype]))
        self._close(queue, "dequantize", (q, out), q.codes)
        return out

    @hookimpl
    def kvcore_op_pack_bits(self, x: Any, *, bits: int, out: Any, stream: Any = None, workspace: Any = None) -> Any:
        q = self.owner.open("pack_bits", stream)
        if _filled(x):
            bits_kernels.pack_bits(q, x, bits, out, signed=bool(x.dtype == np.int8))
        self._close(q, "pack_bits", (x, out), x)
        return out

    @hookimpl
    def kvcore_op_decode_symbols(
        self,
        tiles: EncodedTiles,
        *,
        tables: TableSet,
        use_offsets: bool,
        out: Any,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        q = self.owner.open("decode_symbols", stream)
        if _filled(out):
            _decode(q, tiles, tables, use_offsets, out)
        self._close(q, "decode_symbols", (tiles, tables, out))
        return out

    def _close(self, q: Queue, op: str, keep: Any, subject: Any = None) -> None:
        q.launch(lang.settle_status, 1, q.status, warps=1)
        q.close(op, keep, subject)


_decode = tiles.decode_symbols  # its argument's name hides the module


def _filled(array: Any) -> bool:
    return 0 not in array.shape
