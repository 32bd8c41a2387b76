"""convert_layout, copy_batch and digest: bytes from one place to another, and their digest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kvcore import Backend
from kvcore.errors import LayoutError
from kvcore_conformance.arena import arenas, clone, pattern, place
from kvcore_conformance.checks import Subject
from kvcore_conformance.layouts import DENSE, LayoutCase, bound
from kvcore_conformance.oracle import ORACLE
from kvcore_conformance.placement import Placement
from kvcore_conformance.profiles import explore
from kvcore_conformance.strategies import byte_buffers

CONVERT = pytest.mark.kvcore_op("convert_layout")
COPY = pytest.mark.kvcore_op("copy_batch")
DIGEST = pytest.mark.kvcore_op("digest")
TYPES = st.sampled_from(("bfloat16", "float32", "uint8", "float16", "float8_e5m2"))
PADS = st.lists(st.integers(0, 2), max_size=5)
EXTENTS = st.fixed_dictionaries(
    {
        "L": st.integers(1, 3),
        "T": st.sampled_from((2, 1, 3, 0, 5)),
        "H": st.integers(1, 3),
        "D": st.sampled_from((3, 1, 4, 8)),
    }
)


def _outs(buffers: list[Any]) -> list[Any]:
    return [place(np.full(b.shape, 0xEE, np.uint8), seed=20 + i) for i, b in enumerate(buffers)]


def _digests(count: int) -> Any:
    return place(np.full(count, 0x1111, np.uint64))


# --- convert_layout


@CONVERT
@pytest.mark.parametrize("source", DENSE, ids=lambda case: case.name)
@explore(extents=EXTENTS, dtype=TYPES, pads=st.tuples(PADS, PADS), target=st.sampled_from(DENSE))
def test_convert(
    subject: Subject, source: LayoutCase, target: LayoutCase, extents: dict[str, int], dtype: str, pads: Any
) -> None:
    subject.require("convert_layout", dtype=dtype)
    src = bound(source.text, extents, {"": dtype}, pads=tuple(pads[0]))
    out = bound(target.text, extents, {"": dtype}, pads=tuple(pads[1]), seed=5)
    subject.check("convert_layout", src, out=out)


@CONVERT
@explore(0.5, extents=EXTENTS, pads=PADS)
def test_convert_planned(subject: Subject, extents: dict[str, int], pads: list[int]) -> None:
    subject.require("convert_layout", dtype="float16")
    src = bound("LKTHD", extents, {"": "float16"}, pads=tuple(pads))
    subject.check_plan("convert_layout", src, out=bound("KLHTD", extents, {"": "float16"}, seed=5))


@CONVERT
@explore(0.5, tokens=st.integers(1, 4), widths=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_convert_sides_of_different_width_and_type(subject: Subject, tokens: int, widths: tuple[int, int]) -> None:
    dtypes = {"K": "bfloat16", "V": "float8_e4m3fn"}
    subject.require("convert_layout", dtype="bfloat16/float8_e4m3fn")
    extents = {"L": 2, "T": tokens, "H": 2, "D": widths[0], "E": widths[1]}
    src = bound("L[K:THD,V:THE]", extents, dtypes)
    subject.check("convert_layout", src, out=bound("L|[K:HTD,V:THE]", extents, dtypes, seed=5))


@CONVERT
@pytest.mark.parametrize("tokens", [255, 256, 257])
@pytest.mark.parametrize("width", [96, 128])
def test_convert_larger_as_the_reference(subject: Subject, reference: Backend, tokens: int, width: int) -> None:
    subject.require("convert_layout", dtype="bfloat16")
    extents = {"L": 2, "T": tokens, "H": 3, "D": width}
    src = bound("LK|1HTD", extents, {"": "bfloat16"})
    subject.check("convert_layout", src, out=bound("LKTHD", extents, {"": "bfloat16"}, seed=5), reference=reference)


@CONVERT
def test_convert_refuses_sides_that_do_not_fit(subject: Subject) -> None:
    extents = {"L": 1, "T": 3, "H": 2, "D": 4}
    src = bound("LKTHD", extents, {"": "float16"})
    for other in (
        bound("LKTHD", {**extents, "T": 4}, {"": "float16"}),
        bound("LKTHD", {**extents, "D": 3}, {"": "float16"}),
        bound("LKTHD", {**extents, "L": 2}, {"": "float16"}),
        bound("LKTHD", extents, {"": "bfloat16"}),
        bound("LTHD", extents, {"": "float16"}),
        bound("L|KBNHD", {"L": 1, "B": 1, "N": 3, "H": 2, "D": 4}, {"": "float16"}),
    ):
        subject.check_raises(LayoutError, "convert_layout", src, out=other)
    frozen = clone(src)
    frozen.tensors.flags.writeable = False
    subject.check_raises(LayoutError, "convert_layout", src, out=frozen)


# --- copy_batch


@COPY
@explore(buffers=byte_buffers(), wanted=st.booleans())
def test_copy(subject: Subject, buffers: list[Any], wanted: bool) -> None:
    subject.check("copy_batch", buffers, digests=_digests(len(buffers)) if wanted else None, out=_outs(buffers))


@COPY
@explore(0.5, buffers=byte_buffers(), wanted=st.booleans())
def test_copy_planned(subject: Subject, buffers: list[Any], wanted: bool) -> None:
    digests = {"digests": _digests(len(buffers))} if wanted else {}
    subject.check_plan("copy_batch", buffers, **digests, out=_outs(buffers))


# By entry: whether its source and its target are where the backend computes. On the host all of these are the same.
DIRECTIONS: dict[str, Callable[[int], tuple[bool, bool]]] = {
    "in": lambda i: (False, True),
    "out": lambda i: (True, False),
    "within": lambda i: (True, True),
    "host": lambda i: (False, False),
    "mixed": lambda i: (i % 2 == 0, i // 2 % 2 == 0),
}


@COPY
@pytest.mark.parametrize("direction", DIRECTIONS)
@explore(buffers=byte_buffers(6), wanted=st.booleans())
def test_copy_between_memories(subject: Subject, direction: str, buffers: list[Any], wanted: bool) -> None:
    outs, digests = _outs(buffers), _digests(len(buffers)) if wanted else None
    known = clone({"src": buffers, "digests": digests, "out": outs})
    ORACLE["copy_batch"](known["src"], digests=known["digests"], out=known["out"])
    sides = [DIRECTIONS[direction](i) for i in range(len(buffers))]
    device = [a for a, (there, _) in zip(buffers, sides, strict=True) if there]
    device += [a for a, (_, there) in zip(outs, sides, strict=True) if there]
    where = Placement(subject.backend, arenas([device, digests]))
    subject.backend.copy_batch(
        [where.over(a) if there else a for a, (there, _) in zip(buffers, sides, strict=True)],
        digests=where.over(digests),
        out=[where.over(a) if there else a for a, (_, there) in zip(outs, sides, strict=True)],
    )
    subject.backend.runtime.check()
    where.back()
    for name, got in (("src", buffers), ("digests", digests), ("out", outs)):
        same = [m.tobytes() for m in arenas(got)] == [m.tobytes() for m in arenas(known[name])]
        assert same, f"copy_batch: {direction}: {name} differs"


@COPY
def test_copy_of_one_source_to_many(subject: Subject) -> None:
    source = place(pattern(100))
    outs = _outs([source, source])
    subject.check("copy_batch", [source, source], digests=_digests(2), out=outs)


@COPY
def test_copy_between_odd_addresses(subject: Subject) -> None:
    memory, target = place(pattern(300)), place(pattern(300, 1))
    sources = [memory[1:18], memory[18:35], memory[35:163]]
    subject.check("copy_batch", sources, digests=_digests(3), out=[target[3:20], target[20:37], target[101:229]])


@COPY
def test_copy_larger_as_the_reference(subject: Subject, reference: Backend) -> None:
    buffers = [place(pattern(n, i)) for i, n in enumerate((65536, 65537, 1, 0, 300001))]
    subject.check("copy_batch", buffers, digests=_digests(5), out=_outs(buffers), reference=reference)


@COPY
def test_copy_refuses_what_overlaps_or_does_not_fit(subject: Subject) -> None:
    memory, a, b = place(pattern(64)), place(pattern(16, 1)), place(pattern(16, 2))
    subject.check_raises(LayoutError, "copy_batch", [memory[:32]], out=[memory[16:48]])
    subject.check_raises(LayoutError, "copy_batch", [a, b], out=[memory[:16], memory[15:31]])
    subject.check_raises(LayoutError, "copy_batch", [a], out=[memory[:15]])
    subject.check_raises(LayoutError, "copy_batch", [a, b], out=[memory[:16]])
    subject.check_raises(LayoutError, "copy_batch", [a], digests=_digests(2), out=[memory[:16]])
    subject.check_raises(LayoutError, "copy_batch", [place(np.zeros(4, np.float32))], out=[memory[:16]])
    subject.check_raises(LayoutError, "copy_batch", [memory[:32:2]], out=[a])
    frozen = clone(b)
    frozen.flags.writeable = False
    subject.check_raises(LayoutError, "copy_batch", [a], out=[frozen])


# --- digest


@DIGEST
@explore(2.0, buffers=byte_buffers())
def test_digest(subject: Subject, buffers: list[Any]) -> None:
    subject.check("digest", buffers, out=_digests(len(buffers)))


@DIGEST
@explore(0.5, buffers=byte_buffers())
def test_digest_without_out_and_planned(subject: Subject, buffers: list[Any]) -> None:
    subject.check_fresh("digest", buffers, out=_digests(len(buffers)))
    subject.check_plan("digest", buffers, out=_digests(len(buffers)))


@DIGEST
def test_digest_of_every_small_size(subject: Subject) -> None:
    data = pattern(70)
    buffers = [place(data[:n]) for n in range(70)]
    subject.check("digest", buffers, out=_digests(70))


@DIGEST
def test_digest_at_any_address(subject: Subject) -> None:
    memory = place(pattern(1000))
    buffers = [memory[start : start + size] for start in range(17) for size in (1, 15, 16, 17, 40)]
    subject.check("digest", buffers, out=_digests(len(buffers)))


@DIGEST
def test_digest_tells_zeros_from_no_bytes_and_blocks_from_each_other(subject: Subject) -> None:
    data = pattern(48)
    swapped = np.concatenate([data[16:32], data[:16], data[32:]])
    buffers = [place(np.zeros(n, np.uint8)) for n in (0, 1, 15, 16, 17, 32)] + [place(data), place(swapped)]
    subject.check("digest", buffers, out=_digests(8))
    found = np.asarray(subject.ops.digest(buffers))
    subject.backend.runtime.check()
    assert len(set(found.tolist())) == 8, "digest: buffers that differ have one digest"


@DIGEST
@pytest.mark.parametrize("nbytes", [4096, 40000, 65537])
def test_digest_of_larger_buffers(subject: Subject, nbytes: int) -> None:
    subject.check("digest", [place(pattern(nbytes))], out=_digests(1))


@DIGEST
def test_digest_refuses_what_is_not_contiguous_bytes(subject: Subject) -> None:
    memory = place(pattern(64))
    subject.check_raises(LayoutError, "digest", [memory[::2]], out=_digests(1))
    subject.check_raises(LayoutError, "digest", [place(np.zeros(4, np.float32))], out=_digests(1))
    subject.check_raises(LayoutError, "digest", [memory], out=_digests(2))
    subject.check_raises(LayoutError, "digest", [memory], out=place(np.zeros(1, np.int64)))
