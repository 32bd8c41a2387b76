"""The hooks of a native backend: each packs its arguments for the C ABI and runs the library's function.

A backend's ``ops.py`` makes one `NativeOps` and names the ops that its library has::

    _ops = NativeOps(HostLibrary(path))
    kvcore_op_gather_paged = _ops.kvcore_op_gather_paged
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore.entropy import EncodedTiles, TableSet, TileChoice
from kvcore.hookspecs.markers import hookimpl
from kvcore.kernels.abi import (
    ABSENT,
    address,
    axes_mask,
    pack_array,
    pack_bytes_args,
    pack_convert_args,
    pack_paged_args,
)
from kvcore.kernels.library import Indexed, Library
from kvcore.quant import NONFINITE, Quantized, QuantSpec
from kvcore.rows import RowLayout

__all__ = ["NativeOps"]

_QUANT = struct.Struct("<QiiiIif")
_PAIR_IN = struct.Struct("<Ii")
_PAIR = struct.Struct("<ii")
_ROTATE = struct.Struct("<Qii")
_TILES = struct.Struct("<Qii")
_KINDS = ("int", "affine", "fp8", "codebook")


class NativeOps:
    """Implementations of all ops over a library. Docstrings are the hookspecs' (`kvcore.hookspecs`).

    Parameters
    ----------
    library : Library
    """

    def __init__(self, library: Library) -> None:
        self.library = library

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
        args, keep = pack_paged_args(src, out, index, unit=unit, skip_tokens=skip_tokens)
        self.library.run("gather_paged", args, stream, (keep, index, src, out), Indexed(index, src, unit))
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
        args, keep = pack_paged_args(
            out, src, index, unit=unit, skip_tokens=skip_tokens, check_duplicates=check_duplicates
        )
        self.library.run("scatter_paged", args, stream, (keep, index, src, out), Indexed(index, out, unit))
        return out

    @hookimpl
    def kvcore_op_convert_layout(
        self, src: RowLayout, *, out: RowLayout, stream: Any = None, workspace: Any = None
    ) -> Any:
        args, keep = pack_convert_args(src, out)
        self.library.run("convert_layout", args, stream, (keep, src, out))
        return out

    @hookimpl
    def kvcore_op_copy_batch(
        self,
        src: Sequence[Any],
        *,
        digests: Any = None,
        out: Sequence[Any],
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        args, keep = pack_bytes_args(src, out, digests)
        self.library.run("copy_batch", args, stream, (keep, src, out, digests))
        return out

    @hookimpl
    def kvcore_op_digest(self, src: Sequence[Any], *, out: Any, stream: Any = None, workspace: Any = None) -> Any:
        args, keep = pack_bytes_args(src, None, out)
        self.library.run("digest", args, stream, (keep, src, out))
        return out

    # --- reductions

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
        return self._reduce("reduce_absmax", x, None, axes, nonfinite, out, stream)

    @hookimpl
    def kvcore_op_reduce_minmax(
        self,
        x: Any,
        *,
        axes: tuple[int, ...],
        nonfinite: str = "error",
        out: Any,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        return self._reduce("reduce_minmax", x, None, axes, nonfinite, out, stream)

    @hookimpl
    def kvcore_op_reduce_norm(
        self,
        x: Any,
        *,
        axes: tuple[int, ...],
        nonfinite: str = "error",
        out: Any,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        return self._reduce("reduce_norm", x, None, axes, nonfinite, out, stream)

    @hookimpl
    def kvcore_op_reduce_moments(
        self,
        x: Any,
        exponent: Any,
        *,
        axes: tuple[int, ...],
        out: Any,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        return self._reduce("reduce_moments", x, exponent, axes, "error", out, stream)

    def _reduce(
        self, op: str, x: Any, exponent: Any, axes: tuple[int, ...], nonfinite: str, out: Any, stream: Any
    ) -> Any:
        tail = _PAIR_IN.pack(axes_mask(axes), NONFINITE.index(nonfinite))
        args = pack_array(x) + pack_array(exponent) + pack_array(out) + tail
        self.library.run(op, args, stream, (x, exponent, out), x)
        return out

    # --- quantisation

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
        self._quant("quantize", x, out, scale, spec, nonfinite, stream)
        return out

    @hookimpl
    def kvcore_op_dequantize(
        self, q: Quantized, *, spec: QuantSpec, out: Any, stream: Any = None, workspace: Any = None
    ) -> Any:
        self._quant("dequantize", out, q, None, spec, "error", stream)
        return out

    def _quant(self, op: str, x: Any, q: Quantized, given: Any, spec: QuantSpec, nonfinite: str, stream: Any) -> None:
        levels = np.array(spec.levels, np.float32)
        tail = _QUANT.pack(
            address(levels), len(spec.levels), _KINDS.index(spec.kind), spec.bits, axes_mask(spec.axes),
            NONFINITE.index(nonfinite), spec.code_max,
        )  # fmt: skip
        arrays = b"".join(map(pack_array, (x, q.codes, q.scale, q.zero, given)))
        subject = x if op == "quantize" else q.codes
        self.library.run(op, arrays + tail, stream, (x, q, given, levels), subject)

    @hookimpl
    def kvcore_op_rotate(
        self,
        x: Any,
        *,
        seed: int,
        block: int,
        inverse: bool = False,
        out: Any,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        args = pack_array(x) + pack_array(out) + _ROTATE.pack(seed, block, inverse)
        self.library.run("rotate", args, stream, (x, out), x)
        return out

    # --- bits

    @hookimpl
    def kvcore_op_pack_bits(self, x: Any, *, bits: int, out: Any, stream: Any = None, workspace: Any = None) -> Any:
        return self._bits("pack_bits", x, bits, out, stream)

    @hookimpl
    def kvcore_op_unpack_bits(self, x: Any, *, bits: int, out: Any, stream: Any = None, workspace: Any = None) -> Any:
        return self._bits("unpack_bits", x, bits, out, stream)

    @hookimpl
    def kvcore_op_count_symbols(self, x: Any, *, out: Any, stream: Any = None, workspace: Any = None) -> Any:
        return self._bits("count_symbols", x, 8, out, stream)

    def _bits(self, op: str, x: Any, bits: int, out: Any, stream: Any) -> Any:
        self.library.run(op, pack_array(x) + pack_array(out) + _PAIR.pack(bits, 0), stream, (x, out), x)
        return out

    # --- positions

    @hookimpl
    def kvcore_op_shift_rope(
        self,
        x: Any,
        cos: Any,
        sin: Any,
        *,
        interleaved: bool = False,
        out: Any,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        args = b"".join(map(pack_array, (x, cos, sin, out))) + _PAIR.pack(interleaved, 0)
        self.library.run("shift_rope", args, stream, (x, cos, sin, out))
        return out

    # --- entropy coding

    @hookimpl
    def kvcore_op_choose_classes(
        self,
        values: Any,
        *,
        tables: TableSet,
        use_offsets: bool,
        skip: Any = None,
        out: TileChoice,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        self._tiles("choose_classes", values, skip, out, None, tables, use_offsets, stream)
        return out

    @hookimpl
    def kvcore_op_encode_symbols(
        self,
        values: Any,
        choice: TileChoice,
        *,
        tables: TableSet,
        use_offsets: bool,
        out: EncodedTiles,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        self._tiles("encode_symbols", values, None, choice, out, tables, use_offsets, stream)
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
        self._tiles("decode_symbols", out, None, None, tiles, tables, use_offsets, stream)
        return out

    def _tiles(
        self,
        op: str,
        values: Any,
        skip: Any,
        choice: TileChoice | None,
        coded: EncodedTiles | None,
        tables: TableSet,
        use_offsets: bool,
        stream: Any,
    ) -> None:
        held = self.library.tables(tables, stream)
        args = b"".join(
            (
                pack_array(values),
                pack_array(skip),
                3 * ABSENT if choice is None else b"".join(map(pack_array, choice)),
                3 * ABSENT if coded is None else b"".join(map(pack_array, coded)),
                _TILES.pack(held.handle, use_offsets, 0),
            )
        )
        self.library.run(op, args, stream, (values, skip, choice, coded, held))
