"""A failing call as Python source: it needs kvcore and the backend, and nothing of the suite."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from kvcore import Quantized, QuantSpec
from kvcore.codecs.tables import DIGESTS, table_set
from kvcore.dtypes import dtype_name
from kvcore.entropy import EncodedTiles, TableSet, TileChoice
from kvcore.errors import CorruptFrameError
from kvcore_conformance.arena import Bound, offset_in, root
from kvcore_conformance.call import Call

__all__ = ["snippet"]

_LONG = 2048
_TILE_OPS = ("choose_classes", "encode_symbols", "decode_symbols")
_TILE_IMPORTS = (
    "from kvcore.codecs.tables import table_set",
    "from kvcore.entropy import EncodedTiles, TableSet, TileChoice",
)


class _Writer:
    """Renders values; remembers which names of kvcore they need."""

    def __init__(self, memory: list[Any]) -> None:
        self.numbers = {id(m): i for i, m in enumerate(memory)}
        self.imports: set[str] = set()

    def value(self, value: Any) -> str:
        if isinstance(value, np.ndarray):
            base = root(value)
            dtype = f"to_dtype({dtype_name(value.dtype)!r})"
            offset = offset_in(value, base)
            text = f"array({self.numbers[id(base)]}, {offset}, {value.shape}, {dtype}, {value.strides})"
            return text if value.flags.writeable else f"read_only({text})"
        if isinstance(value, Bound):
            self.imports.add("Layout")
            declared = "".join(f", {axis}={value.extents[axis]}" for axis in value.declared)
            dtypes = {part: dtype_name(d) for part, d in value.dtypes.items()} if value.typed else None
            return f"Layout({value.text!r}{declared}).bind({self.value(value.tensors)}, dtypes={dtypes})"
        if isinstance(value, Quantized):
            self.imports.add("Quantized")
            return f"Quantized({', '.join(map(self.value, value))})"
        if isinstance(value, QuantSpec):
            self.imports.add("QuantSpec")
            return self.spec(value)
        if isinstance(value, (TileChoice, EncodedTiles)):
            return f"{type(value).__name__}({', '.join(map(self.value, value))})"
        if isinstance(value, TableSet):
            return self.tables(value)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(self.value, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
        return repr(value)

    def tables(self, tables: TableSet) -> str:
        if tables.name in DIGESTS and tables is table_set(tables.name):
            return f"table_set({tables.name!r})"
        parts = (f"np.frombuffer({_bytes(t.tobytes())}, np.uint16)" for t in (tables.frequency, tables.cost))
        frequency, cost = (f"{part}.reshape({tables.cost.shape})" for part in parts)
        return f"TableSet({tables.name!r}, {tables.kind!r}, {tables.bits}, {frequency}, {cost}, {tables.digest!r})"

    def spec(self, spec: QuantSpec) -> str:
        if spec.kind == "int":
            return f"QuantSpec.symmetric({spec.bits}, {spec.axes})"
        if spec.kind == "affine":
            return f"QuantSpec.affine({spec.bits}, {spec.axes})"
        if spec.kind == "fp8":
            return f"QuantSpec.fp8({dtype_name(spec.code_dtype)!r}, {spec.axes})"
        return f"QuantSpec.codebook({spec.levels}, {spec.axes})"


def _bytes(data: bytes) -> str:
    if len(data) <= _LONG:
        return f"bytes.fromhex({data.hex()!r})"
    return f"zlib.decompress(base64.b85decode({base64.b85encode(zlib.compress(data, 9)).decode()!r}))"


def _expectation(number: int, before: bytes, expected: bytes) -> str:
    if expected == before:
        return f"assert after[{number}] == before[{number}], 'memory {number} must stay as it was'"
    return f"assert after[{number}] == {_bytes(expected)}, 'memory {number} differs from what is specified'"


# Definitions of array, read_only, contents and home. `memory` is a list of uint8 arrays of the host.
_ON_HOST = """\
def array(i, offset, shape, dtype, strides): return np.ndarray(shape, dtype, memory[i], offset, strides)
def read_only(x): x.flags.writeable = False; return x
def contents(): return [bytes(m) for m in memory]
def home(result): return np.asarray(result)"""
_ON_DEVICE = """\
from dataclasses import replace
from kvcore.arrays import ArrayRef
from kvcore.ops import fetch
there = [ArrayRef.of(backend.runtime.empty(m.shape, m.dtype)) for m in memory]
backend.copy_batch(memory, out=there)
def array(i, offset, shape, dtype, strides):
    return ArrayRef.at(there[i].address + offset, shape, dtype, strides=strides, device=there[i].device, owner=there[i])
def read_only(x): return replace(x, readonly=True)
def contents(): return [bytes(fetch(backend, m)) for m in there]
def home(result): return fetch(backend, result)"""


def _opening(name: str) -> list[str]:
    """Open the backend as it was named on the command line: by name, or as ``module:factory``."""
    module, colon, factory = name.partition(":")
    if not colon:
        return [f"backend = kvcore.open_backend({name!r}, fallback='error')"]
    return [
        f"from {module} import {factory}",
        "from kvcore.plugins.discover import Candidate",
        "from kvcore.plugins.probe import probe",
        f"spec = {factory}()",
        "found = [probe(Candidate(spec.name, 'found', 'given', spec))]",
        "backend = kvcore.open_backend(spec.name, fallback='error', found=found)",
    ]


def _planned(writer: _Writer, call: Call) -> tuple[list[str], str]:
    how = call.launch()
    static = [f"{k}={writer.value(v)}" for k, v in how.static.items()]
    if how.layout is not None:
        static.append(f"layout={writer.value(how.layout)}")
    if how.dtype is not None:
        static.append(f"dtype={how.dtype!r}")
    plan = f"plan = backend.plan({', '.join([repr(call.op), *static])})"
    arguments = [writer.value(v) for v in how.positional]
    arguments += [f"{k}={writer.value(v)}" for k, v in how.arrays.items() if k != "out"]
    scratch = "workspace = backend.runtime.empty((plan.workspace_bytes,), np.dtype(np.uint8))"
    out = f"out = {writer.value(how.arrays['out'])}"
    return [plan, scratch, out], f"plan({', '.join([*arguments, 'out=out, workspace=workspace'])})"


def snippet(name: str, call: Call, expected: Any, *, how: str = "checked", on_host: bool = True) -> str:
    """Return source that fails as long as the backend does.

    Parameters
    ----------
    name : str
        The backend, as ``--kvcore-backend`` takes it.
    call : Call
        Before it ran.
    expected : type of exception, list of bytes, or dict
        The error it must raise, with all memory unchanged; or what its arenas must hold afterwards. As a dict
        ``{"result": bytes, "shape": tuple, "dtype": str}``: what it must return, for calls without `out`.
    how : {"checked", "plan"}
        Whether the op was planned first.
    on_host : bool
        Whether the backend takes arrays in host memory.
    """
    memory = call.memory()
    writer = _Writer(memory)
    given_out = call.out is not None
    if how == "plan":
        prepare, invoke = _planned(writer, call)
    else:
        arguments = [writer.value(a) for a in call.args]
        arguments += [f"{k}={writer.value(v)}" for k, v in call.kwargs.items() if k != "out"]
        arguments += ["out=out"] * given_out
        prepare = [f"out = {writer.value(call.out)}"] if given_out else []
        invoke = f"backend.{call.op}({', '.join(arguments)})"
    imports = ", ".join(sorted(writer.imports))
    lines = [
        "import base64, zlib",
        "import numpy as np",
        "import kvcore",
        *([f"from kvcore import {imports}"] if imports else []),
        "from kvcore import errors",
        "from kvcore.dtypes import to_dtype",
        *(_TILE_IMPORTS if call.op in _TILE_OPS else ()),
        *_opening(name),
        "memory = []",
        *(f"memory.append(np.frombuffer(bytearray({_bytes(m.tobytes())}), np.uint8))" for m in memory),
        _ON_HOST if on_host else _ON_DEVICE,
        *prepare,
    ]
    if isinstance(expected, type):
        kept = "assert contents() == before, 'it wrote before it raised'"
        lines += [
            "before = contents()",
            "try:",
            f"    {invoke}",
            "    backend.runtime.check()",
            f"except errors.{expected.__name__}:",
            f"    {'pass' if expected is CorruptFrameError else kept}",
            "else:",
            f"    raise AssertionError('{call.op} must raise {expected.__name__}')",
        ]
    elif isinstance(expected, dict):
        lines += [
            f"result = {invoke}",
            "result = home(result)",
            f"assert (result.shape, result.dtype) == ({expected['shape']}, to_dtype({expected['dtype']!r}))",
            f"assert result.tobytes() == {_bytes(expected['result'])}, result",
        ]
    else:
        lines += [
            "before = contents()",
            f"result = {invoke}",
            "backend.runtime.check()",
            "after = contents()",
            *(["assert result is out, 'the op must return its out'"] if given_out else []),
            *(_expectation(i, m.tobytes(), data) for i, (m, data) in enumerate(zip(memory, expected, strict=True))),
        ]
    return "\n".join(lines) + "\n"
