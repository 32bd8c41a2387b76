"""The golden frames: what they hold, how they are made, and whether the committed ones still say the same.

``python -m kvcore_conformance.golden`` compares; with ``--write`` it replaces the files, which is a change of format: a
frame, once released, is read for ever. golden/PROVENANCE.md has the rules.

The values come from counting, so that the same bytes can be made anywhere, for ever. With all arithmetic modulo 2^64
and ``mix`` as in docs/frame.md, draw i of stream s is ``mix((s << 32) + i * 0x9E3779B97F4A7C15)``. The four 16-bit
quarters of a draw, added up, less 131070, divided by 2^15: that is a *bell*, about normal with deviation 1.15, and
exact in float32. See `values` for what is made of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import Backend, RowLayout, open_backend
from kvcore.codecs import Codec, FrameReader, GroupInfo, PartInfo, encode_frame, get_codec
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.dtypes import to_dtype
from kvcore.rope import RopeParams

__all__ = [
    "CASES",
    "FOLDER",
    "KEY",
    "MANIFEST",
    "NAMESPACE",
    "GoldenCase",
    "codec_of_case",
    "decode",
    "encode",
    "fingerprint",
    "inputs",
    "manifest",
    "one_layer",
    "open_frame",
    "values",
    "zero_rows",
]

Array = npt.NDArray[Any]

FOLDER = Path(__file__).with_name("golden")
MANIFEST = FOLDER / "manifest.json"
NAMESPACE, KEY = bytes(range(32)), bytes(range(32, 64))

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """One golden frame.

    Parameters
    ----------
    name : str
        Of the file; its CRC-32 is the first stream of draws.
    codec : str
        The preset.
    groups : tuple of GroupInfo
    recipe : str
        What the values look like; see `values`.
    options : dict
        Of the codec.
    """

    name: str
    codec: str
    groups: tuple[GroupInfo, ...]
    recipe: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return max(group.rows for group in self.groups)


def _kv(
    rows: int,
    width: int = 32,
    *,
    heads: int = 1,
    layers: tuple[int, ...] = (0,),
    dtype: str = "bfloat16",
    parts: str = "KV",
    **more: Any,
) -> GroupInfo:
    return GroupInfo("LKHTD", layers, tuple(PartInfo(p, dtype, width) for p in parts), rows, heads, **more)


def _mla(rows: int, *, rope: RopeParams | None = None) -> GroupInfo:
    return GroupInfo("LTC", (0, 1), (PartInfo("C", "bfloat16", 72), PartInfo("R", "bfloat16", 16)), rows, rope=rope)


_NONFINITE: tuple[str, dict[str, Any]] = ("nonfinite", {"nonfinite": "raw"})


def _cases() -> list[GoldenCase]:
    half = RopeParams(16, theta=100000.0)
    table = RopeParams(8, inv_freq=(1.0, 0.25, 0.0625, 2.0**-10), scaling="llama3", factor=8.0)
    cases = [
        GoldenCase(f"{preset}-256", preset, (_kv(256, 64, rope=RopeParams(64, theta=100000.0)),))
        for preset in ("high", "balanced", "small")
    ]
    cases += [GoldenCase(f"tail-{rows}", "balanced", (_kv(rows, rope=half),)) for rows in (1, 4, 5, 31, 255, 256, 257)]
    cases += [GoldenCase(f"width-{width}", "small", (_kv(20, width),)) for width in (1, 3, 96)]
    cases += [
        GoldenCase("float16", "high", (_kv(20, 40, dtype="float16", rope=half),)),
        GoldenCase("float16-largest", "small", (_kv(20, 8, dtype="float16"),), "largest"),
        GoldenCase("float32", "high", (_kv(20, 40, dtype="float32", rope=half),)),
        GoldenCase("zeros", "balanced", (_kv(40),), "zeros"),
        GoldenCase("constant", "balanced", (_kv(40),), "constant"),
        GoldenCase("two-values", "small", (_kv(40, 5),), "two"),
        GoldenCase("constant-tile", "small", (_kv(40, 72),), "beyond-64"),
        GoldenCase("escapes", "high", (_kv(256, 33),), options={"levels": (-50, -50)}),
        GoldenCase("levels", "balanced", (_kv(40, rope=half),), options={"levels": (8, -4)}),
        GoldenCase("keys-only", "small", (_kv(40, parts="K", rope=half),)),
        GoldenCase("values-only", "small", (_kv(40, parts="V"),)),
        GoldenCase("mla", "balanced", (_mla(40, rope=half),)),
        GoldenCase("mla-257", "small", (_mla(257, rope=half),)),
        GoldenCase("hybrid", "balanced", _hybrid()),
        GoldenCase("rope-interleaved", "balanced", (_kv(20, rope=RopeParams(16, interleaved=True)),)),
        GoldenCase("rope-linear", "balanced", (_kv(20, rope=RopeParams(32, scaling="linear", factor=4.0)),)),
        GoldenCase("rope-table", "balanced", (_kv(20, rope=table),)),
        GoldenCase("rope-unknown", "balanced", (_kv(20, rope=RopeParams(32, scaling="yarn", factor=4.0)),)),
        *(
            GoldenCase(f"rope-{rope.scaling}", "balanced", (_kv(40, rope=rope, base_position=256),))
            for rope in _scaled()
        ),
        GoldenCase("position-256", "balanced", (_kv(20, rope=half, base_position=256),)),
        GoldenCase("position-100000", "balanced", (_kv(20, rope=half, base_position=100000),)),
    ]
    for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"):
        cases += [
            GoldenCase(f"lossless-{dtype}", "lossless", (_kv(40, 72, dtype=dtype),)),
            GoldenCase(f"lossless-{dtype}-any-bits", "lossless", (_kv(20, 33, dtype=dtype),), "bits"),
        ]
    cases += [
        GoldenCase("lossless-257", "lossless", (_kv(257, 16),)),
        GoldenCase("lossless-escapes", "lossless", (_kv(256, 16),), "tiny"),
        GoldenCase("lossless-constant", "lossless", (_kv(40),), "constant"),
        GoldenCase("lossless-zeros", "lossless", (_kv(40, 3),), "zeros"),
        GoldenCase("lossless-two-values", "lossless", (_kv(40, 5),), "two"),
        GoldenCase("lossless-mla", "lossless", (_mla(40, rope=half),)),
        GoldenCase("lossless-hybrid", "lossless", _hybrid()),
        GoldenCase("nonfinite-raw", "balanced", (_kv(20, heads=3, layers=(0, 1), rope=half),), *_NONFINITE),
        GoldenCase("nonfinite-raw-5", "small", (_kv(5, 8, heads=3, dtype="float32"),), *_NONFINITE),
        GoldenCase("nonfinite-raw-300", "small", (_kv(300, 8, heads=2, dtype="float16"),), *_NONFINITE),
        GoldenCase("nonfinite-raw-mla", "high", (replace(_mla(20, rope=half), base_position=256),), *_NONFINITE),
        GoldenCase(
            "nonfinite-saturate",
            "balanced",
            (_kv(20, heads=3, dtype="float16", rope=half),),
            "nonfinite",
            {"nonfinite": "saturate"},
        ),
        GoldenCase("raw", "raw", _hybrid()),
        GoldenCase("raw-fp8", "raw", (_kv(5, 7, heads=2, dtype="float8_e4m3fn"),)),
        GoldenCase("fp8-unscaled", "fp8", (_kv(20),), options={"scaled": False}),
        GoldenCase("cachegen-per-head", "cachegen", (_kv(40, heads=2, layers=(0, 1)),), options={"per_head": True}),
        GoldenCase("cachegen", "cachegen", (_kv(40, heads=2, layers=(0, 1)),)),
    ]
    cases += _turboquant() + _asym()
    cases += [GoldenCase(name, name, (_kv(37, 40),)) for name in ("int8", "int4", "int2", "fp8", "fp8_e5m2")]
    return cases


def _turboquant() -> list[GoldenCase]:
    """Rows that one rotation turns, and rows that three do; both kinds of keys; rows of zeros."""
    presets = ("turboquant_k8v4", "turboquant_4bit", "turboquant_k3v4", "turboquant_3bit")
    two: dict[str, Any] = {"heads": 2, "layers": (0, 1)}
    held = {"nonfinite": "saturate"}
    return [
        *(GoldenCase(name, name, (_kv(21, 40),)) for name in presets),
        GoldenCase("turboquant-64", "turboquant_3bit", (_kv(9, 64, dtype="float16", **two),)),
        GoldenCase("turboquant-96", "turboquant_k8v4", (_kv(5, 96, dtype="float32"),)),
        GoldenCase("turboquant-1", "turboquant_k3v4", (_kv(5, 1),)),
        GoldenCase("turboquant-mla", "turboquant_k8v4", (_mla(20),)),
        GoldenCase("turboquant-zeros", "turboquant_k8v4", (_kv(5, 24),), "zeros"),
        GoldenCase("turboquant-tiny", "turboquant_4bit", (_kv(50, 1),), "tiny"),
        GoldenCase("turboquant-saturate", "turboquant_4bit", (_kv(20, 24, dtype="float16"),), "nonfinite", held),
    ]


def _asym() -> list[GoldenCase]:
    """Every scope of scales, keys alone, values alone, keys elsewhere, and keys of any bits."""
    two: dict[str, Any] = {"heads": 2, "layers": (0, 1)}
    sides = (PartInfo("K", "float8_e5m2", 24), PartInfo("V", "float32", 16))
    pages = {"scope": "page", "page_tokens": 16}
    return [
        GoldenCase("asym_k16_v8", "asym_k16_v8", (_kv(37, 24, **two),)),
        GoldenCase("asym_k_elsewhere_v8", "asym_k_elsewhere_v8", (_kv(37, 24, **two),)),
        GoldenCase("asym-tensor", "asym_k16_v8", (_kv(20, 16, dtype="float16", **two),), options={"scope": "tensor"}),
        GoldenCase("asym-page", "asym_k16_v8", (_kv(37, 16, **two),), options=pages),
        GoldenCase("asym-page-elsewhere", "asym_k_elsewhere_v8", (_kv(37, 16),), options={**pages, "page_tokens": 64}),
        GoldenCase("asym-keys-only", "asym_k16_v8", (_kv(9, 16, parts="K"),)),
        GoldenCase("asym-values-only", "asym_k16_v8", (_kv(37, 16, parts="V"),)),
        GoldenCase("asym-sides", "asym_k16_v8", (GroupInfo("LKHTD", (0,), sides, 9),)),
        GoldenCase(
            "asym-saturate",
            "asym_k16_v8",
            (_kv(20, 16, heads=3, dtype="float16"),),
            "nonfinite",
            {"scope": "page", "page_tokens": 7, "nonfinite": "saturate"},
        ),
    ]


def _scaled() -> list[RopeParams]:
    """Each scaling that is no plain division, with channels that it keeps, that it divides, and that lie between."""
    return [
        RopeParams(32, scaling="ntk", factor=8.0),
        RopeParams(32, scaling="yarn", factor=4.0, original_tokens=1024),
        RopeParams(
            32, 5e5, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=256
        ),
    ]


def _hybrid() -> tuple[GroupInfo, ...]:
    """Layers of two kinds, interleaved: the second with other rows, heads, widths, types, and in a sliding window."""
    parts = (PartInfo("K", "float16", 24), PartInfo("V", "bfloat16", 8))
    window = GroupInfo("LKHTD", (1, 4), parts, 24, 1, head_start=3, base_position=16, rope=RopeParams(8))
    return _kv(40, 16, heads=2, layers=(0, 2, 3), rope=RopeParams(16, theta=100000.0)), window


CASES: dict[str, GoldenCase] = {case.name: case for case in _cases()}


def _draws(stream: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """Return draws 0, 1, ... of a stream, in C order."""
    z = np.arange(np.prod(shape), dtype=np.uint64) * _GAMMA + np.uint64(stream << 32)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (z ^ z >> np.uint64(31)).reshape(shape)


def _bell(draws: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    quarters = (draws[..., None] >> np.array([0, 16, 32, 48], np.uint64)).astype(np.uint16).astype(np.int64)
    bells: npt.NDArray[np.float64] = (quarters.sum(axis=-1) - 131070) / 32768
    return bells


def values(recipe: str, shape: tuple[int, int, int], dtype: object, stream: int) -> Array:
    """Make the rows of a layer and part, ``[T, H, width]``.

    Parameters
    ----------
    recipe : str
        ``plain``: bells, in each channel with a factor of 2^-3 .. 2^1 and a bell times 4 added. ``constant``: only what
        is added. ``beyond-64``: the same from channel 64 on, plain before. ``two``: what is added or its negative.
        ``zeros``. ``largest``: plain, and two tokens of 65504 and -65504. ``tiny``: plain, and every 41st element times
        2^-100. ``bits``: plain, and every 5th element any bit pattern at all. ``nonfinite``: plain, and in head h three
        tokens, ``(h + i * (T // 2 - 1)) % T``, with a signalling NaN in channel 0, an infinity in the last channel, and
        a negative infinity and a NaN in these.
    shape : tuple of int
    dtype : dtype or name
    stream : int
        Below 2^32 - 2: the next two are used as well.
    """
    resolved = to_dtype(dtype)
    channels = _draws(stream, shape[1:])
    added = 4 * _bell(channels)
    factor = 2.0 ** ((channels >> np.uint64(7)).astype(np.int64) % 5 - 3)
    draws = _draws(stream + 1, shape)
    x = factor * _bell(draws) + added
    if recipe == "zeros":
        x = np.zeros(shape)
    elif recipe == "constant":
        x = np.broadcast_to(added, shape)
    elif recipe == "two":
        x = np.where(draws >> np.uint64(63) == 0, added, -added)
    elif recipe == "largest":
        x[1], x[2] = 65504, -65504
    elif recipe == "tiny":
        x = np.where(np.arange(x.size).reshape(shape) % 41 == 0, x * 2.0**-100, x)
    elif recipe == "beyond-64":
        x = np.where(np.arange(shape[2]) < 64, x, added)
    made: Array = np.ascontiguousarray(x).astype(np.float32).astype(resolved)
    if recipe == "bits":
        odd = np.arange(made.size).reshape(shape) % 5 == 0
        bits = _draws(stream + 2, shape).astype(_UINT[resolved.itemsize])
        made = np.where(odd, bits, made.view(bits.dtype)).view(resolved)
    elif recipe == "nonfinite":
        _spoil(made)
    return made


def _spoil(x: Array) -> None:
    """Put NaNs with payloads and infinities into ``[T, H, width]``."""
    bits = x.view(_UINT[x.itemsize])
    infinity = int(np.array(np.inf, x.dtype).view(bits.dtype))
    sign = 1 << (8 * x.itemsize - 1)
    for h in range(x.shape[1]):
        first, second, third = ((h + i * (len(x) // 2 - 1)) % len(x) for i in range(3))
        bits[first, h, 0] = sign | infinity | 0x25
        bits[second, h, -1] = infinity
        bits[third, h, 0], bits[third, h, -1] = sign | infinity, sign - 1


def inputs(case: GoldenCase) -> list[RowLayout]:
    """Return the rows of each group of a case."""
    stream, result = zlib.crc32(case.name.encode()), []
    for group in case.groups:
        rows = allocate_rows(group)
        for part, layer in rows.planes():
            array = rows.array(part, layer)[0]
            array[...] = values(case.recipe, array.shape, array.dtype, stream)
            stream = (stream + 3) % 2**31
        result.append(rows)
    return result


def fingerprint(rows: list[RowLayout]) -> str:
    """Return the SHA-256 of rows: by group, layer, part, token, head, channel."""
    hashed = hashlib.sha256()
    for one in rows:
        for part, layer in one.planes():
            hashed.update(np.ascontiguousarray(one.array(part, layer)).tobytes())
    return hashed.hexdigest()


def codec_of_case(case: GoldenCase) -> Codec:
    """Return the codec that a case is encoded with."""
    return get_codec(case.codec, **case.options)


def encode(backend: Backend, case: GoldenCase, rows: list[RowLayout]) -> bytes:
    """Return the frame of a case."""
    codec = codec_of_case(case)
    frame = encode_frame(backend, case.groups, rows, tokens=case.tokens, namespace=NAMESPACE, key=KEY, codec=codec)
    return bytes(frame)


def open_frame(backend: Backend, frame: bytes) -> FrameReader:
    """Open a golden frame, or an altered one."""
    return FrameReader(frame, expect_namespace=NAMESPACE, expect_key=KEY, digest=backend.digest)


def decode(backend: Backend, reader: FrameReader) -> list[RowLayout]:
    """Return the rows of each group of a frame; parts that it does not hold are zero."""
    rows = [zero_rows(group) for group in reader.groups]
    reader.decode(backend, rows)
    return rows


def zero_rows(group: GroupInfo) -> RowLayout:
    """Allocate rows that are zero: a frame may leave parts as they are."""
    rows = allocate_rows(group)
    for part, layer in rows.planes():
        rows.array(part, layer)[...] = np.zeros((), rows.array(part, layer).dtype)
    return rows


def one_layer(group: GroupInfo, layer: int) -> GroupInfo:
    """Return the group of one of a group's layers."""
    return replace(group, layers=(layer,))


def manifest() -> dict[str, dict[str, Any]]:
    """Read what the golden frames are known to be, by name."""
    known: dict[str, dict[str, Any]] = json.loads(MANIFEST.read_text("utf-8"))
    return known


def _make(backend: Backend, case: GoldenCase) -> tuple[bytes, dict[str, Any]]:
    rows = inputs(case)
    frame = encode(backend, case, rows)
    reader = open_frame(backend, frame)
    tiles = [mode for entry in reader.layers for segment in entry.segments for mode, _ in segment.tiles]
    return frame, {
        "codec": case.codec,
        "options": case.options,
        "recipe": case.recipe,
        "tokens": case.tokens,
        "bytes": len(frame),
        "tiles": {name: tiles.count(mode) for mode, name in enumerate(("constant", "packed", "rans"))},
        "frame": hashlib.sha256(frame).hexdigest(),
        "input": fingerprint(rows),
        "output": fingerprint(decode(backend, reader)),
    }


def main(arguments: list[str] | None = None) -> int:
    """Compare the committed files with what the reference makes, or replace them."""
    parser = argparse.ArgumentParser(prog="python -m kvcore_conformance.golden", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the committed files")
    write = parser.parse_args(arguments).write
    backend = open_backend("cpu_ref", fallback="error")
    files, facts = {}, {}
    for case in CASES.values():
        files[f"{case.name}.kvf"], facts[case.name] = _make(backend, case)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(facts[name], sort_keys=True)}" for name in sorted(facts))
    files[MANIFEST.name] = f"{{\n{lines}\n}}\n".encode()
    there = {path.name for path in FOLDER.glob("*") if path.suffix in (".kvf", ".json")}
    different = sorted(n for n, data in files.items() if n not in there or (FOLDER / n).read_bytes() != data)
    gone = sorted(there - set(files))
    if write:
        FOLDER.mkdir(exist_ok=True)
        for name in different:
            (FOLDER / name).write_bytes(files[name])
        for name in gone:
            (FOLDER / name).unlink()
    verb = "replaced" if write else "DIFFERENT"
    for name in different:
        print(f"{name}: {verb}, {len(files[name])} bytes")  # noqa: T201
    for name in gone:
        print(f"{name}: {'removed' if write else 'NOT MADE BY ANY CASE'}")  # noqa: T201
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes")  # noqa: T201
    return 1 if (different or gone) and not write else 0


if __name__ == "__main__":
    sys.exit(main())
