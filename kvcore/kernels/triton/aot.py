"""Compile every twin for GPUs, without one: ``python -m kvcore.kernels.triton.aot``; exit status 1 where one fails.

The ops are called with a queue that runs nothing and notes what it was to launch, so that no kernel is listed by hand.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcore.arrays import ArrayRef, row_major
from kvcore.dtypes import to_dtype
from kvcore.entropy import EncodedTiles, TableSet
from kvcore.kernels.triton import TWINS
from kvcore.kernels.triton.ops import TritonOps
from kvcore.kernels.triton.queue import Owner, Queue
from kvcore.layout import Layout
from kvcore.quant import Quantized, QuantSpec
from kvcore.rows import RowLayout

__all__ = ["TARGETS", "Compiled", "Launch", "Target", "compile_for", "launches"]

_FLOATS = ("float16", "bfloat16", "float32")
_ADDRESS = 1 << 32
_OUTPUTS = {"cuda": "ptx", "hip": "amdgcn"}


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture, as `triton.compile` takes it."""

    name: str
    backend: str
    arch: int | str
    warp: int


TARGETS = (
    *(Target(f"sm_{arch}", "cuda", arch, 32) for arch in (80, 90, 100)),
    *(Target(arch, "hip", arch, warp) for arch, warp in (("gfx90a", 64), ("gfx942", 64), ("gfx1100", 32))),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, and the constants that it was launched with."""

    kernel: Any
    op: str
    warps: int
    constants: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)

    def source(self) -> ASTSource:
        """Return what Triton compiles: arguments are int64, all other parameters constants."""
        constants = dict(self.constants)
        parameters = list(inspect.signature(self.kernel.fn).parameters)
        signature = {name: "constexpr" if name in constants else "i64" for name in parameters}
        constexprs = {(parameters.index(name),): value for name, value in constants.items()}
        return ASTSource(self.kernel, signature, constexprs)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a launch for a target: its assembly, or why there is none."""

    launch: Launch
    target: Target
    text: str = ""
    error: str = ""


class _Notes(Queue):
    """Notes launches; its memory is nowhere."""

    status = _ADDRESS

    def __init__(self, found: dict[Launch, None], op: str, tiles: int) -> None:
        self._found, self._op = found, op
        self.tiles = tiles

    def launch(self, kernel: Any, programs: int, *args: int, warps: int = 4, **constants: Any) -> None:
        self._found[Launch(kernel, self._op, warps, tuple(sorted(constants.items())))] = None

    def upload(self, *tables: npt.NDArray[Any]) -> tuple[int, ...]:
        return (_ADDRESS,) * len(tables)

    def resident(self, key: object, make: Callable[[], tuple[npt.NDArray[Any], ...]]) -> tuple[int, ...]:
        return (_ADDRESS, _ADDRESS)

    def scratch(self, nbytes: int) -> int:
        return _ADDRESS

    def close(self, op: str, keep: Any, subject: Any = None) -> None:
        pass


class _Notebook(Owner):
    def __init__(self, tiles: int) -> None:
        self.found: dict[Launch, None] = {}
        self._tiles = tiles

    def open(self, op: str, stream: Any) -> _Notes:
        return _Notes(self.found, op, self._tiles)


def launches(warp: int) -> list[Launch]:
    """Return what the ops launch for arrays as engines have them, on a GPU with warps of so many threads."""
    notebook = _Notebook(4 * warp // 32)
    ops = TritonOps(notebook)
    x_shape, kept = (256, 8, 128), (256, 8, 1)
    index = _array((512,), "int64")
    for spread in (1, 2):  # whole rows, and elements one by one
        cache = _bind("L|KBNHD", (2, 64, 16, 8, 128), spread, L=2)
        chunk = _bind("LKTHD", (2, 2, 256, 8, 128), 1)
        ops.kvcore_op_gather_paged(cache, index, out=[chunk, chunk])
        ops.kvcore_op_scatter_paged([chunk, chunk], index, out=cache)
    for name in _FLOATS:
        x = _array(x_shape, name)
        ops.kvcore_op_reduce_absmax(x, axes=(2,), out=_array(kept, "float32"))
        ops.kvcore_op_reduce_absmax(x, axes=(0,), nonfinite="saturate", out=_array((1, 8, 128), "float32"))
        for spec in _specs():
            coded = Quantized(
                _array(x_shape, spec.code_dtype),
                _array(kept, "float32"),
                _array(kept, "int32") if spec.kind == "affine" else None,
            )
            ops.kvcore_op_quantize(x, spec=spec, out=coded)
            ops.kvcore_op_dequantize(coded, spec=spec, out=x)
            if spec.kind == "int":
                ops.kvcore_op_quantize(x, spec=spec, scale=_array(kept, "float32"), nonfinite="saturate", out=coded)
    for name, bits in (("uint8", 4), ("int8", 3), ("uint8", 1)):
        ops.kvcore_op_pack_bits(_array((256, 128), name), bits=bits, out=_array((256, 16 * bits), "uint8"))
    tiles = EncodedTiles(_array((64, 32772), "uint8"), _array((64,), "uint8"), _array((64,), "uint16"))
    for kind in ("integer", "exponent", "code"):
        for width in (64, 32):
            values = _array((64, 256, width), "int16")
            ops.kvcore_op_decode_symbols(tiles, tables=_tables(kind), use_offsets=kind == "integer", out=values)
    return list(notebook.found)


def _specs() -> Iterator[QuantSpec]:
    yield QuantSpec.symmetric(8, (2,))
    yield QuantSpec.symmetric(16, (2,))
    yield QuantSpec.affine(4, (2,))
    yield QuantSpec.fp8("float8_e4m3fn", (2,))
    yield QuantSpec.fp8("float8_e5m2", (2,))
    yield QuantSpec.codebook((-1.5, -0.5, 0.5, 1.5), (2,))


def _array(shape: tuple[int, ...], dtype: object, spread: int = 1) -> ArrayRef:
    """Return an array that is nowhere; its elements are `spread` times as far apart as they could be."""
    element = to_dtype(dtype)
    return ArrayRef(_ADDRESS, shape, row_major(shape, spread * element.itemsize), element, "cuda:0")


def _bind(text: str, shape: tuple[int, ...], spread: int, **levels: int) -> RowLayout:
    tensor = _array(shape, "bfloat16", spread)
    return Layout(text, **levels).bind([tensor] * levels["L"] if levels else tensor)


def _tables(kind: str) -> TableSet:
    frequency = np.full((32, 256), 8, np.uint16)
    return TableSet(kind, kind, 11, frequency, frequency, bytes(32))


def compile_for(launch: Launch, target: Target, *, fusion: bool = False) -> Compiled:
    """Compile a launch; `fusion` lets products and sums be contracted, which no twin is launched with."""
    options = {"num_warps": launch.warps, "enable_fp_fusion": fusion}
    try:
        made = triton.compile(
            launch.source(), target=GPUTarget(target.backend, target.arch, target.warp), options=options
        )
    except Exception as error:  # noqa: BLE001  # compilers raise anything; it is the outcome that is reported
        return Compiled(launch, target, error=f"{type(error).__name__}: {error}")
    return Compiled(launch, target, text=str(made.asm[_OUTPUTS[target.backend]]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(prog="python -m kvcore.kernels.triton.aot", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON: each kernel, target, and outcome")
    parser.add_argument("--arch", action="append", choices=[t.name for t in TARGETS], help="only this one (repeatable)")
    parser.add_argument("--op", action="append", choices=TWINS, help="only the kernels of this op (repeatable)")
    parser.add_argument("--fusion", action="store_true", help="allow contraction, to see what it changes")
    parser.add_argument("--emit", type=Path, metavar="DIR", help="write the assembly there")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: nothing would be compiled; unset it")

    began = time.monotonic()
    work = [
        (launch, target)
        for target in TARGETS
        if not options.arch or target.name in options.arch
        for launch in launches(target.warp)
        if not options.op or launch.op in options.op
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda pair: compile_for(*pair, fusion=options.fusion), work))
    if options.emit is not None:
        _emit(outcomes, options.emit)
    if options.json:
        sys.stdout.write(json.dumps(_rows_of(outcomes), indent=1) + "\n")
    else:
        _show(outcomes, time.monotonic() - began)
    return int(any(outcome.error for outcome in outcomes))


def _emit(outcomes: Sequence[Compiled], folder: Path) -> None:
    for number, outcome in enumerate(outcomes):
        where = folder / outcome.target.name
        where.mkdir(parents=True, exist_ok=True)
        suffix = _OUTPUTS[outcome.target.backend]
        (where / f"{outcome.launch.op}-{outcome.launch.name}-{number}.{suffix}").write_text(outcome.text, "utf-8")


def _rows_of(outcomes: Sequence[Compiled]) -> list[dict[str, object]]:
    return [
        {
            "kernel": o.launch.name,
            "op": o.launch.op,
            "arch": o.target.name,
            "ok": not o.error,
            "reason": o.error,
            "constants": dict(o.launch.constants),
        }
        for o in outcomes
    ]


def _show(outcomes: Sequence[Compiled], seconds: float) -> None:
    console = Console()
    console.width = max(console.width, 100)
    table = Table(title="variants of each kernel that compile")
    table.add_column("kernel", no_wrap=True)
    arches = list(dict.fromkeys(o.target.name for o in outcomes))
    for arch in arches:
        table.add_column(arch, justify="right")
    for name in dict.fromkeys(o.launch.name for o in outcomes):
        cells = []
        for arch in arches:
            mine = [o for o in outcomes if (o.launch.name, o.target.name) == (name, arch)]
            failed = sum(1 for o in mine if o.error)
            cells.append(f"{failed} of {len(mine)} failed" if failed else str(len(mine)))
        table.add_row(name, *cells)
    console.print(table)
    for o in outcomes:
        if o.error:
            console.print(f"{o.launch.name} for {o.target.name}: {o.error}", markup=False, highlight=False)
    console.print(f"{seconds:.0f} s; compiled only, nothing ran", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
