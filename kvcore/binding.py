"""Binding a layout to tensors: extents and strides are read, compared with what was declared, and never guessed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore.arrays import ArrayRef
from kvcore.dtypes import dtype_name, to_dtype
from kvcore.errors import LayoutError
from kvcore.layout import AXES, Layout, Region, width_of
from kvcore.rows import RowLayout, Segment

__all__ = ["bind"]

_BYTES = np.dtype(np.uint8)


@dataclass(slots=True)
class _Plane:
    """One part of one layer: where it starts and how its axes step."""

    dtype: np.dtype[Any]
    base: int
    strides: dict[str, int]
    extents: dict[str, int]


@dataclass(slots=True)
class _Binder:
    layout: Layout
    dtypes: Mapping[str, object]
    extents: dict[str, int]  # of axes outside regions, filled as tensors are read
    sources: dict[str, str] = field(default_factory=dict)  # axis -> where its extent was read, for messages

    def fail(self, why: str) -> LayoutError:
        return LayoutError(f"layout {self.layout.text!r}: {why}")

    def learn(self, axis: str, extent: int, where: str) -> None:
        """Record an extent, or complain that it contradicts what is known."""
        known = 2 if axis == "K" else self.extents.get(axis)
        if known is not None and known != extent:
            source = self.sources.get(axis, "the pair K, V" if axis == "K" else "declared")
            raise self.fail(
                f"axis {axis} ({AXES[axis]}) has extent {extent} in {where}, but {known} would fit ({source})"
            )
        self.extents[axis] = extent
        self.sources.setdefault(axis, where)

    def walk(self, node: Any, depth: int, index: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ArrayRef]]:
        """Yield every tensor with its index in the list levels."""
        if depth == len(self.layout.list_axes):
            if isinstance(node, (list, tuple)):
                levels = f"{depth} list level{'s' * (depth != 1)}" if depth else "no list level"
                raise self.fail(f"it has {levels}, but a {type(node).__name__} was given where a tensor would fit")
            yield index, ArrayRef.of(node)
            return
        axis = self.layout.list_axes[depth]
        if not isinstance(node, (list, tuple)):
            raise self.fail(
                f"axis {axis} ({AXES[axis]}) is a list level, but a {type(node).__qualname__} was given; "
                f"pass a list of tensors, or write {axis} behind '|' if it is a dim"
            )
        if not node:
            raise self.fail(f"axis {axis} ({AXES[axis]}) is an empty list; at least one tensor is needed")
        self.learn(axis, len(node), f"list level {depth}")
        for i, child in enumerate(node):
            yield from self.walk(child, depth + 1, (*index, i))

    def read_dims(self, ref: ArrayRef, where: str) -> tuple[dict[str, int], int]:
        """Read the dims before any region; return strides by axis and the bytes of the remaining dims."""
        dims = [d for d in self.layout.dims if d not in "[*"]
        open_ended = len(dims) < len(self.layout.dims)
        if len(ref.shape) < len(dims) + open_ended or (len(ref.shape) > len(dims) and not open_ended):
            wanted = f"{len(dims)}{' and more' if open_ended else ''}"
            raise self.fail(f"{where} has {len(ref.shape)} dims {ref.shape}, but {wanted} would fit ({' '.join(dims)})")
        strides: dict[str, int] = {}
        for dim, extent, stride in zip(dims, ref.shape, ref.strides, strict=False):
            if dim == "1":
                if extent != 1:
                    raise self.fail(f"a unit dim has extent {extent} in {where} of shape {ref.shape}; 1 would fit")
            elif dim.startswith("("):
                strides.update(self.split(dim[1:-1], extent, stride, where))
            else:
                self.learn(dim, extent, f"{where} of shape {ref.shape}")
                strides[dim] = stride
        rest, step = 1, ref.dtype.itemsize
        for extent, stride in zip(reversed(ref.shape[len(dims) :]), reversed(ref.strides[len(dims) :]), strict=True):
            if extent > 1 and stride != step:
                raise self.fail(
                    f"the dims {ref.shape[len(dims) :]} of {where} that regions share must be contiguous, "
                    f"but have strides {ref.strides[len(dims) :]} B"
                )
            rest, step = rest * extent, step * extent
        return strides, rest * ref.dtype.itemsize if open_ended else 0

    def split(self, axes: str, extent: int, stride: int, where: str) -> Iterator[tuple[str, int]]:
        """Take a fused dim apart; at most one of its extents may be left open."""
        known = {a: 2 if a == "K" else self.extents.get(a) for a in axes}
        missing = [a for a in axes if known[a] is None]
        if len(missing) > 1:
            names = " and ".join(f"{a} ({AXES[a]})" for a in missing)
            raise self.fail(
                f"({axes}) of extent {extent} in {where} leaves {names} open; declare one, as in {missing[-1]}=16"
            )
        product = math.prod(n for n in known.values() if n is not None)
        if product == 0 or extent % product or (not missing and extent != product):
            parts = " x ".join(f"{a}={known[a] if known[a] is not None else '?'}" for a in axes)
            raise self.fail(f"({axes}) has extent {extent} in {where}, which is not {parts}")
        for axis in missing:
            self.learn(axis, extent // product, f"({axes}) of {where}")
        for axis in reversed(axes):
            yield axis, stride
            stride *= 2 if axis == "K" else self.extents[axis]

    def part_dtype(self, part: str, stored: np.dtype[Any], *, sized: bool) -> np.dtype[Any]:
        if sized:
            return _BYTES
        if part not in self.dtypes:
            return stored
        return to_dtype(self.dtypes[part])

    def region_plane(self, region: Region, ref: ArrayRef, base: int, left: int, where: str) -> tuple[_Plane, int]:
        """Lay a region out at `base`, row-major over its axes; return it and the bytes it takes."""
        dtype = self.part_dtype(region.label, ref.dtype, sized=region.nbytes is not None)
        extents, strides = {}, {}
        step = region.nbytes or dtype.itemsize
        for axis in reversed(region.axes):
            extent = self.extents.get(axis)
            if extent is None:
                raise self.fail(f"region {region.label} leaves {axis} ({AXES[axis]}) open; declare it, as in {axis}=16")
            extents[axis], strides[axis] = extent, step
            step *= extent
        if step > left:
            raise self.fail(f"region {region.label} takes {step} B, but {left} B are left for it in {where}")
        return _Plane(dtype, base, strides, extents), step

    def planes_of(self, index: tuple[int, ...], ref: ArrayRef) -> Iterator[tuple[str, int, _Plane]]:
        """Yield (part, layer, plane) for every part and layer that one tensor holds."""
        layout = self.layout
        where = f"tensor {list(index)}" if index else "the tensor"
        strides, rest = self.read_dims(ref, where)
        at = dict(zip(layout.list_axes, index, strict=True))
        layers = [at["L"]] if "L" in at else list(range(self.extents.get("L", 1)))
        for layer in layers:
            base = ref.address + (0 if "L" in at else layer * strides.get("L", 0))
            for side, part in enumerate(layout.parts):
                if at.get("K", side) != side and "K" in layout.axes:
                    continue
                side_base = base + (side * strides["K"] if "K" in strides else 0)
                if layout.regions:
                    region = layout.regions[side]
                    plane, size = self.region_plane(region, ref, side_base, rest, where)
                    if "K" not in layout.axes:  # regions follow one another; under K each has a side to itself
                        base, rest = base + size, rest - size
                    plane.strides = {**strides, **plane.strides}
                elif layout.opaque:
                    plane = _Plane(_BYTES, side_base, {**strides, "D": 1}, {"D": rest})
                else:
                    plane = _Plane(self.part_dtype(part, ref.dtype, sized=False), side_base, strides, {})
                    if plane.dtype.itemsize != ref.dtype.itemsize:
                        raise self.fail(
                            f"part {part} is declared {dtype_name(plane.dtype)} ({plane.dtype.itemsize} B), {where} "
                            f"holds {dtype_name(ref.dtype)} ({ref.dtype.itemsize} B) elements"
                        )
                yield part, layer, plane
            if layout.regions and "K" not in layout.axes:
                if rest:
                    raise self.fail(f"the regions leave {rest} B of {where} undescribed; its dims or extents are wrong")
                rest = math.prod(ref.shape[len(layout.dims) - 1 :]) * ref.dtype.itemsize


def bind(layout: Layout, tensors: Any, dtypes: Mapping[str, object]) -> RowLayout:
    """Implement `Layout.bind`."""
    unknown = set(dtypes) - set(layout.parts)
    binder = _Binder(layout, dtypes, dict(layout.extents))
    if unknown:
        raise binder.fail(f"dtypes name {', '.join(sorted(unknown))}, but its parts are {', '.join(layout.parts)}")
    found = list(binder.walk(tensors, 0, ()))
    devices = sorted({ref.device for _, ref in found})
    if len(devices) > 1:
        raise binder.fail(
            f"its tensors lie on several devices: {', '.join(devices)}; bind each device's share by itself"
        )
    planes: dict[str, dict[int, _Plane]] = {part: {} for part in layout.parts}
    for index, ref in found:
        for part, layer, plane in binder.planes_of(index, ref):
            planes[part][layer] = plane
    segments = _merge(layout, binder, planes)
    token, block = ("N", "B") if layout.paged else ("T", "")
    return RowLayout(
        layout.text,
        segments,
        binder.extents[block] if block else 1,
        1 if layout.opaque and layout.paged else binder.extents[token],
        binder.extents.get("L", 1),
        devices[0],
        any(ref.readonly for _, ref in found),
        tuple(ref.owner for _, ref in found),
        layout.paged,
    )


def _merge(layout: Layout, binder: _Binder, planes: dict[str, dict[int, _Plane]]) -> tuple[Segment, ...]:
    """Put parts with the same strides and extents into one segment."""
    segments: list[Segment] = []
    for part, by_layer in planes.items():
        steps = {layer: _steps(layout, binder, part, plane) for layer, plane in by_layer.items()}
        first = steps[0]
        for layer, step in steps.items():
            if step != first:
                raise binder.fail(
                    f"part {part} of layer {layer} has strides, width or dtype {step[:6]}, layer 0 has {first[:6]} "
                    "(block, token, head, dim strides in B, heads, width); describe them as groups of a KVCacheSpec"
                )
        bases = tuple(by_layer[layer].base for layer in range(len(by_layer)))
        block, token, head, dim, heads, width, name = first
        last = segments[-1] if segments else None
        if last is not None and (
            (last.block_stride, last.token_stride, last.head_stride, last.dim_stride, last.heads, last.width)
            == first[:6]
            and dtype_name(last.dtype) == name
        ):
            segments[-1] = Segment((*last.parts, part), last.dtype, (*last.bases, bases), *first[:6])
        else:
            segments.append(Segment((part,), to_dtype(name), (bases,), block, token, head, dim, heads, width))
    return tuple(segments)


def _steps(layout: Layout, binder: _Binder, part: str, plane: _Plane) -> tuple[int, int, int, int, int, int, str]:
    extents = {**binder.extents, **plane.extents}
    axis = width_of(layout.part_axes(part))
    region = next((r for r in layout.regions if r.label == part), None)
    if layout.opaque:
        width, dim = plane.extents["D"], 1
    elif axis:
        width, dim = extents[axis], plane.strides[axis]
    else:
        width, dim = (region.nbytes or 0) if region else 0, 1
    strides = plane.strides
    return (
        strides.get("B", 0),
        strides.get("N", strides.get("T", 0)),
        strides.get("H", 0),
        dim,
        extents.get("H", 1) if "H" in layout.part_axes(part) else 1,
        width,
        dtype_name(plane.dtype),
    )
