"""Golden frames: each decodes to what is recorded, and its input encodes to the same bytes; in a paged cache too.

A codec is composed from many ops; a failure here says that one of them is wrong, the tests of the ops say which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcore import Layout, RowLayout
from kvcore.codecs import GroupInfo
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.composites import decode_scatter, gather_encode
from kvcore.codecs.kvs1 import PRESETS
from kvcore.dtypes import to_dtype
from kvcore.errors import CorruptFrameError
from kvcore_conformance import golden
from kvcore_conformance.checks import Subject

_BLOCK = 4
_COMMON = ("convert_layout", "digest")
_TILES = ("choose_classes", "encode_symbols"), ("decode_symbols",)
_KVS1 = ("reduce_absmax", "reduce_moments", "quantize", *_TILES[0]), ("dequantize", "shift_rope", *_TILES[1])
# Ops by codec: of encoding, and of decoding.
_OPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(PRESETS, _KVS1),
    "raw": ((), ()),
    "lossless": ((*_TILES[0], "pack_bits"), (*_TILES[1], "unpack_bits")),
    **dict.fromkeys(
        ("int8", "int4", "int2"), (("reduce_minmax", "quantize", "pack_bits"), ("unpack_bits", "dequantize"))
    ),
    **dict.fromkeys(("fp8", "fp8_e5m2"), (("quantize",), ("dequantize",))),
    "cachegen": (("reduce_absmax", "quantize", *_TILES[0]), ("dequantize", *_TILES[1])),
    **dict.fromkeys(
        ("turboquant_k8v4", "turboquant_4bit", "turboquant_k3v4", "turboquant_3bit"),
        (
            ("rotate", "reduce_absmax", "reduce_norm", "quantize", "pack_bits"),
            ("unpack_bits", "dequantize", "rotate"),
        ),
    ),
    **dict.fromkeys(("asym_k16_v8", "asym_k_elsewhere_v8"), (("reduce_absmax", "quantize"), ("dequantize",))),
}


def _every_frame(way: int, *more: str) -> pytest.MarkDecorator:
    params = []
    for name, case in golden.CASES.items():
        turned = case.codec in PRESETS and any(group.rope is not None for group in case.groups)
        ops = (*_COMMON, *more, *_OPS[case.codec][way], *(("shift_rope",) if turned else ()))
        params.append(pytest.param(name, marks=[pytest.mark.kvcore_op(op) for op in ops]))
    return pytest.mark.parametrize("name", params)


def _frame(name: str) -> bytes:
    return (golden.FOLDER / f"{name}.kvf").read_bytes()


@_every_frame(0)
def test_golden_input_encodes_to_the_same_bytes(subject: Subject, name: str) -> None:
    case, known = golden.CASES[name], golden.manifest()[name]
    rows = golden.inputs(case)
    assert golden.fingerprint(rows) == known["input"], "the generator makes other values here than it did"
    frame = golden.encode(subject.ops, case, rows)
    assert golden.fingerprint(rows) == known["input"], f"encoding {name} changed what was encoded"
    wanted = _frame(name)
    assert hashlib.sha256(wanted).hexdigest() == known["frame"], f"{name}.kvf is not the file that was released"
    if frame != wanted:
        at = next(i for i, (a, b) in enumerate(zip(frame, wanted, strict=False)) if a != b)
        raise AssertionError(f"{name}: {len(frame)} bytes, not {len(wanted)}, or other ones; first at byte {at}")


@_every_frame(1)
def test_golden_frame_decodes_to_the_same_values(subject: Subject, name: str) -> None:
    known = golden.manifest()[name]
    reader = golden.open_frame(subject.ops, _frame(name))
    rows = golden.decode(subject.ops, reader)
    assert golden.fingerprint(rows) == known["output"], f"{name} decodes to other values"
    if golden.codec_of_case(golden.CASES[name]).lossless:
        assert known["output"] == known["input"], f"{name} is lossless, and lost something"


@_every_frame(1)
def test_golden_layers_decode_one_by_one(subject: Subject, name: str) -> None:
    reader = golden.open_frame(subject.ops, _frame(name))
    whole = golden.decode(subject.ops, reader)
    done = [0] * len(reader.groups)
    for index, entry in enumerate(reader.layers):
        group = reader.groups[entry.group]
        alone = golden.zero_rows(golden.one_layer(group, entry.layer))
        reader.decode_layers(subject.ops, index, 1, alone)
        for part, _ in alone.planes():
            same = alone.array(part, 0).tobytes() == whole[entry.group].array(part, done[entry.group]).tobytes()
            assert same, f"{name}: layer {entry.layer} differs when it is decoded alone"
        done[entry.group] += 1


@_every_frame(0, "gather_paged", "scatter_paged")
def test_golden_rows_in_a_paged_cache_encode_to_the_same_bytes(subject: Subject, name: str) -> None:
    case, backend = golden.CASES[name], subject.backend
    reader = golden.open_frame(subject.ops, _frame(name))
    for g, (group, rows) in enumerate(zip(case.groups, golden.inputs(case), strict=True)):
        tensors, slots, bind = _paged(group)
        subject.ops.scatter_paged(rows, slots, out=bind(tensors))
        cache, index = bind(list(map(subject.put, tensors))), subject.put(slots)
        layers = gather_encode(backend, golden.codec_of_case(case), cache, index, group)
        wanted = [reader.segments(i) for i, entry in enumerate(reader.layers) if entry.group == g]
        for layer, found, stored in zip(group.layers, layers, wanted, strict=True):
            same = [(bytes(f.data), f.tiles) == (bytes(s.data), s.tiles) for f, s in zip(found, stored, strict=True)]
            assert all(same), f"{name}: segments {[i for i, s in enumerate(same) if not s]} of layer {layer} differ"


@_every_frame(1, "gather_paged", "scatter_paged")
def test_golden_frame_decodes_into_a_paged_cache(subject: Subject, name: str) -> None:
    case, found = golden.CASES[name], []
    reader = golden.open_frame(subject.ops, _frame(name))
    for g, group in enumerate(reader.groups):
        tensors, slots, bind = _paged(group)
        placed = list(map(subject.put, tensors))
        segments = [reader.segments(i) for i, entry in enumerate(reader.layers) if entry.group == g]
        decode_scatter(subject.backend, golden.codec_of_case(case), segments, subject.put(slots), group, bind(placed))
        found.append(allocate_rows(group))
        subject.ops.gather_paged(bind(list(map(subject.get, placed))), slots, out=found[-1])
    assert golden.fingerprint(found) == golden.manifest()[name]["output"], f"{name} decodes to other values"


def _paged(group: GroupInfo) -> tuple[list[Any], npt.NDArray[np.int64], Callable[[list[Any]], RowLayout]]:
    """Return an empty paged cache for a group's rows: its tensors, the rows' slots, and what binds tensors.

    The last token comes first in memory.
    """
    blocks, token_bytes = -(-group.rows // _BLOCK) + 1, sum(part.row_bytes for part in group.parts) * group.head_count
    tensors = [np.zeros((blocks, _BLOCK * token_bytes), np.uint8) for _ in group.layers]
    parts = {part.name: part for part in group.parts}
    dtypes = {name: to_dtype(part.dtype) for name, part in parts.items()}
    extents = {axis: part.width for axis, part in zip("DE", group.parts, strict=False)}
    if "C" in parts:
        dtypes, extents = {"C": dtypes["C"]}, {"D": sum(part.width for part in group.parts)}
        layout = Layout("L|B[C:ND]", N=_BLOCK, **extents)
    else:
        regions = ",".join(f"{name}:NH{axis}" for name, axis in zip(parts, extents, strict=True))
        layout = Layout(f"L|B[{regions}]", N=_BLOCK, H=group.head_count, **extents)
    slots = np.arange(group.rows, dtype=np.int64)[::-1] + _BLOCK // 2
    return tensors, np.ascontiguousarray(slots), lambda memory: layout.bind(memory, dtypes=dtypes)


@pytest.mark.kvcore_op("digest")
@pytest.mark.parametrize("name", ["tail-5", "lossless-zeros", "raw-fp8", "int2", "levels"])
def test_golden_frame_that_was_altered_is_refused(subject: Subject, name: str) -> None:
    frame = _frame(name)
    golden.open_frame(subject.ops, frame).verify()
    for at in range(len(frame)):
        altered = bytearray(frame)
        altered[at] ^= 1 << at % 8
        with pytest.raises(CorruptFrameError):
            golden.open_frame(subject.ops, bytes(altered)).verify()
        if at % 7 == 0:
            with pytest.raises(CorruptFrameError):
                golden.open_frame(subject.ops, frame[:at]).verify()
    with pytest.raises(CorruptFrameError):
        golden.open_frame(subject.ops, frame + b"\0").verify()
