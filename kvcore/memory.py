"""Memory objects: typed host buffers that know their layout, their position in the sequence, and their lease.

A `MemoryObj` is a lease on a buffer of a `MemoryPool`: a `BufferPool`, or the host arena of the tiers. The buffer holds
one dense chunk for each KV cache group of the model, or plain bytes. Freeing ends the lease: any later use through any
copy of the handle raises `LeaseError`, because the pool has moved on to another generation.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from kvcore.arrays import ArrayRef, row_major
from kvcore.dtypes import dtype_name, to_dtype
from kvcore.errors import ConfigError, LayoutError, LeaseError, OutOfMemoryError
from kvcore.layout import Layout, RowLayout
from kvcore.rope import RopeParams

__all__ = [
    "ALIGNMENT",
    "BufferPool",
    "KVMeta",
    "LayoutDesc",
    "MemoryObj",
    "MemoryPlan",
    "MemoryPool",
    "align_up",
    "chunk_desc",
]

ALIGNMENT = 256
"""Byte alignment of every buffer and of every group within it: what the widest vector and DMA paths want."""


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Round a size up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class KVMeta:
    """What a piece of KV is: how codecs and serdes know what they are coding.

    Parameters
    ----------
    base_position : int, optional
        Position in the sequence of the first token; None if unknown (then no row is treated as position 0).
    layers, heads : tuple of int, optional
        Half-open ranges of the model's layers and KV heads that are held; None means all.
    rope : RopeParams, optional
        How the keys were rotated; None keeps RoPE where it is.
    group : int
        Index of the KV cache group.
    namespace : bytes
        Digest of the namespace the KV belongs to (`kvcore.engine.keys`).
    """

    base_position: int | None = None
    layers: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None
    rope: RopeParams | None = None
    group: int = 0
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class LayoutDesc:
    """A dense layout with all extents: enough to size a buffer, and to bind it.

    Parameters
    ----------
    layout : Layout
        Dense (``T``), one tensor, every extent declared: ``Layout("LKTHD", L=30, T=256, H=3, D=64)``.
    dtypes : mapping of str to numpy.dtype
        Element type of each part.

    Raises
    ------
    LayoutError
        An extent is left open, the layout is paged or a list, or a part has no dtype.
    """

    layout: Layout
    dtypes: Mapping[str, np.dtype[Any]] = field(hash=False)
    _template: RowLayout | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.paged or layout.list_axes:
            raise LayoutError(f"{layout} describes no dense chunk: those are one tensor, with T instead of B and N")
        if layout.opaque:
            raise LayoutError(f"{layout}: a chunk of opaque pages names their size, as in 'L[page:T4096]'")
        missing = sorted({a for p in layout.parts for a in layout.part_axes(p)} - set(layout.extents) - {"K"})
        if missing:
            raise LayoutError(f"{layout}: a chunk needs every extent; {', '.join(missing)} not declared")
        if set(self.dtypes) != set(layout.parts):
            raise LayoutError(f"{layout}: dtypes for {sorted(self.dtypes)}, but its parts are {list(layout.parts)}")
        object.__setattr__(self, "dtypes", {p: to_dtype(d) for p, d in self.dtypes.items()})
        if len(set(self.dtypes.values())) > 1 and not layout.regions:
            raise LayoutError(f"{layout}: parts of different dtypes need regions, as in 'L[K:THD,V:THE]'")

    def part_nbytes(self, part: str) -> int:
        """Bytes of one part of one layer."""
        extents, size = self.layout.extents, self.dtypes[part].itemsize
        region = next((r for r in self.layout.regions if r.label == part), None)
        if region is not None and region.nbytes is not None:
            size = region.nbytes
        for axis in self.layout.part_axes(part):
            size *= 1 if axis in "LK" else extents[axis]
        return size

    @property
    def nbytes(self) -> int:
        """Bytes the chunk takes."""
        return sum(map(self.part_nbytes, self.layout.parts)) * self.layout.extents.get("L", 1)

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self.layout.extents["T"]

    def bind(self, buffer: Any, *, offset: int = 0) -> RowLayout:
        """Bind to contiguous bytes (NumPy uint8, memoryview, bytearray, or `ArrayRef` on any device) at an offset.

        Raises
        ------
        LayoutError
            The buffer ends before the chunk does.
        """
        ref = ArrayRef.of(buffer if isinstance(buffer, (ArrayRef, np.ndarray)) else np.frombuffer(buffer, np.uint8))
        if len(ref.shape) != 1 or ref.dtype.itemsize != 1 or (ref.shape[0] > 1 and ref.strides != (1,)):
            raise LayoutError(f"{self.layout}: a chunk binds to contiguous bytes, got {ref.dtype} of shape {ref.shape}")
        if offset < 0 or offset + self.nbytes > ref.shape[0]:
            raise LayoutError(
                f"{self.layout}: the chunk takes {self.nbytes} B at offset {offset}, the buffer has {ref.shape[0]} B"
            )
        if self._template is None:  # laid out once, from address 0: chunks of one shape are bound by the thousand
            shape, dtype = self._shape()
            regions = {r.label: r for r in self.layout.regions}
            dtypes = {p: d for p, d in self.dtypes.items() if p in regions and regions[p].nbytes is None}
            zero = ArrayRef(0, shape, row_major(shape, dtype.itemsize), dtype)
            object.__setattr__(self, "_template", self.layout.bind(zero, dtypes=dtypes))
        return cast(RowLayout, self._template).moved(
            ref.address + offset, device=ref.device, readonly=ref.readonly, owner=(ref.owner,)
        )

    def _shape(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """The shape of the one tensor, in elements; where regions share it, its last dim is their bytes."""
        layout = self.layout
        shape = [2 if d == "K" else 1 if d == "1" else layout.extents[d] for d in layout.dims if d not in "[*"]
        if not layout.regions:
            return tuple(shape), next(iter(self.dtypes.values()))
        inner = [
            math.prod((r.nbytes or self.dtypes[r.label].itemsize, *(layout.extents[a] for a in r.axes)))
            for r in layout.regions
        ]
        return (*shape, sum(inner)), np.dtype(np.uint8)


def chunk_desc(rows: RowLayout, tokens: int) -> LayoutDesc:
    """Return the canonical dense chunk for `tokens` tokens of a cache: the form that is stored.

    ``LKTHD`` for K and V of one shape and dtype, ``LTC`` for packed rows, ``L[K:THD,V:THE]`` for K and V that differ,
    regions of bytes for value/scale and opaque pages: one layer's parts lie together, so layers can be loaded in order.
    """
    parts = {p: rows.segment(p)[0] for p in rows.parts}
    dtypes = {p: s.dtype for p, s in parts.items()}
    first = next(iter(parts.values()))
    extents = {"L": rows.layers, "T": tokens}
    if rows.parts == ("C",):
        return LayoutDesc(Layout("LTC", **extents, C=first.width), dtypes)
    if rows.parts == ("X",):
        return LayoutDesc(Layout("LTHD", **extents, H=first.heads, D=first.width), dtypes)
    if rows.parts == ("K", "V"):
        last = parts["V"]
        if (first.heads, first.width, first.dtype) == (last.heads, last.width, last.dtype):
            return LayoutDesc(Layout("LKTHD", **extents, H=first.heads, D=first.width), dtypes)
        if first.heads == last.heads:
            wide = {"D": first.width, **({"E": last.width} if last.width != first.width else {})}
            v_axis = "E" if "E" in wide else "D"
            return LayoutDesc(Layout(f"L[K:THD,V:TH{v_axis}]", **extents, H=first.heads, **wide), dtypes)
    if any(s.heads > 1 or s.dtype.itemsize > 1 for s in parts.values()):
        raise LayoutError(f"{rows!r} has no canonical chunk; give the dense layout yourself as a LayoutDesc")
    sized = ",".join(f"{p}:T{s.width}" for p, s in parts.items())
    return LayoutDesc(Layout(f"L[{sized}]", **extents), dtypes)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a memory object shall hold: bytes, and where the chunks of its groups lie in them.

    Made by `of` and `of_bytes`.
    """

    nbytes: int
    descs: tuple[LayoutDesc, ...]
    offsets: tuple[int, ...]
    metas: tuple[KVMeta, ...]

    @classmethod
    def of(cls, descs: Sequence[LayoutDesc], meta: KVMeta | Sequence[KVMeta] = ()) -> MemoryPlan:
        """Lay out one dense chunk per group, each at a multiple of `ALIGNMENT`.

        Parameters
        ----------
        descs : sequence of LayoutDesc
            One per group.
        meta : KVMeta or sequence of KVMeta
            One per group, or one for all.

        Raises
        ------
        LayoutError
            There are not as many `KVMeta` as groups.
        """
        offsets, end = [], 0
        for desc in descs:
            offsets.append(align_up(end))
            end = offsets[-1] + desc.nbytes
        metas = (meta,) * len(descs) if isinstance(meta, KVMeta) else tuple(meta) or (KVMeta(),) * len(descs)
        if len(metas) != len(descs):
            raise LayoutError(f"{len(descs)} groups need as many KVMeta, got {len(metas)}")
        return cls(end, tuple(descs), tuple(offsets), metas)

    @classmethod
    def of_bytes(cls, nbytes: int, meta: KVMeta | None = None) -> MemoryPlan:
        """Plan plain bytes.

        Raises
        ------
        ConfigError
            The size is negative.
        """
        if nbytes < 0:
            raise ConfigError(f"a memory object has 0 bytes or more, got {nbytes}")
        return cls(nbytes, (), (), (meta or KVMeta(),))

    @property
    def size(self) -> int:
        """Bytes that are taken from a pool: whole multiples of `ALIGNMENT`, at least one."""
        return max(align_up(self.nbytes), ALIGNMENT)


class MemoryPool(Protocol):
    """What gives memory objects, and watches over their leases: `BufferPool`, or the host arena of the tiers."""

    @property
    def capacity_bytes(self) -> int:
        """Upper bound on the bytes under lease."""

    @property
    def live_bytes(self) -> int:
        """Bytes under lease now."""

    @property
    def live_leases(self) -> int:
        """Leases not yet freed."""

    def allocate(self, descs: Sequence[LayoutDesc], meta: KVMeta | Sequence[KVMeta] = ()) -> MemoryObj:
        """Lease a buffer for one dense chunk per group; raises `OutOfMemoryError`."""

    def allocate_bytes(self, nbytes: int, meta: KVMeta | None = None) -> MemoryObj:
        """Lease plain bytes; raises `OutOfMemoryError`."""

    def _check(self, generation: int) -> None:
        """Raise `LeaseError` if a lease has ended."""

    def _free(self, generation: int, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """End a lease, or raise `LeaseError` if it has ended."""


class BufferPool:
    """Host buffers by lease: allocation, reuse and the generations that expose stale handles.

    Parameters
    ----------
    capacity_bytes : int
        Upper bound on the bytes held by live and idle buffers.
    allocate : callable, optional
        From a size to a writable uint8 array, 256-byte aligned; a backend's ``Runtime.alloc_host`` for pinned memory.

    Notes
    -----
    Thread-safe. Idle buffers are kept by size for reuse, and let go when room is needed.
    """

    def __init__(
        self, capacity_bytes: int, allocate: Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]] | None = None
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._allocate = allocate or aligned_bytes
        self._lock = threading.Lock()
        self._idle: dict[int, list[np.ndarray[Any, np.dtype[np.uint8]]]] = {}
        self._idle_bytes = 0
        self._live: dict[int, int] = {}  # generation -> bytes
        self._generation = 0

    @property
    def live_bytes(self) -> int:
        """Bytes under lease now."""
        with self._lock:
            return sum(self._live.values())

    @property
    def live_leases(self) -> int:
        """Leases not yet freed; 0 at the end of a program that leaks nothing."""
        with self._lock:
            return len(self._live)

    def allocate(self, descs: Sequence[LayoutDesc], meta: KVMeta | Sequence[KVMeta] = ()) -> MemoryObj:
        """Lease a buffer for one dense chunk per group.

        Parameters
        ----------
        descs : sequence of LayoutDesc
            One per group; each starts on a multiple of `ALIGNMENT`.
        meta : KVMeta or sequence of KVMeta
            One per group, or one for all.

        Raises
        ------
        OutOfMemoryError
            The pool has no room for it.
        """
        return self._lease(MemoryPlan.of(descs, meta))

    def allocate_bytes(self, nbytes: int, meta: KVMeta | None = None) -> MemoryObj:
        """Lease plain bytes, for encoded data whose size is known only as an upper bound."""
        return self._lease(MemoryPlan.of_bytes(nbytes, meta))

    def _lease(self, plan: MemoryPlan) -> MemoryObj:
        size = plan.size
        with self._lock:
            idle = self._idle.get(size)
            buffer = idle.pop() if idle else None
            if buffer is not None:
                self._idle_bytes -= size
            elif sum(self._live.values()) + self._idle_bytes + size > self.capacity_bytes:
                self._idle.clear()
                self._idle_bytes = 0
            live = sum(self._live.values())
            if live + self._idle_bytes + size > self.capacity_bytes:
                raise OutOfMemoryError(
                    f"{plan.nbytes} B asked of a pool of {self.capacity_bytes} B that has {live} B under lease; "
                    "free memory objects or raise the capacity"
                )
            self._generation += 1
            generation = self._generation
            self._live[generation] = size
        if buffer is None:
            try:
                buffer = self._allocate(size)
            except BaseException:
                with self._lock:
                    del self._live[generation]
                raise
        return MemoryObj(self, generation, buffer, plan.nbytes, plan.descs, plan.offsets, plan.metas)

    def _check(self, generation: int) -> None:
        if generation not in self._live:
            raise LeaseError(
                f"memory object of generation {generation} was freed; its bytes may belong to somebody else by now"
            )

    def _free(self, generation: int, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        with self._lock:
            if generation not in self._live:
                raise LeaseError(f"memory object of generation {generation} is freed twice; free each lease once")
            size = self._live.pop(generation)
            self._idle.setdefault(size, []).append(buffer)
            self._idle_bytes += size


@dataclass(frozen=True, slots=True, eq=False)
class MemoryObj:
    """A lease on a buffer: one dense chunk per group, or plain bytes.

    Use as a context manager, or call `free` once. The handle may be copied; the lease is one.
    """

    _pool: MemoryPool
    generation: int
    _buffer: np.ndarray[Any, np.dtype[np.uint8]]
    nbytes: int
    descs: tuple[LayoutDesc, ...]
    offsets: tuple[int, ...]
    metas: tuple[KVMeta, ...]
    _used: list[int] = field(default_factory=list)

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the used bytes as a writable uint8 array ``[used_size]``."""
        self._pool._check(self.generation)
        return self._buffer[: self.used_size]

    def view(self) -> memoryview:
        """Return the used bytes as a plain memoryview of format ``B``."""
        return self.bytes().data

    def rows(self, group: int = 0) -> RowLayout:
        """Return the chunk of a group as a `RowLayout`, for gather, scatter and convert.

        Raises
        ------
        LeaseError
            The lease has ended.
        LayoutError
            No such group (objects of plain bytes have none).
        """
        self._pool._check(self.generation)
        if not 0 <= group < len(self.descs):
            raise LayoutError(f"group {group} of a memory object with {len(self.descs)} groups")
        return self.descs[group].bind(self._buffer, offset=self.offsets[group])

    @property
    def plan(self) -> MemoryPlan:
        """What it holds, as a plan for another such object."""
        return MemoryPlan(self.nbytes, self.descs, self.offsets, self.metas)

    @property
    def used_size(self) -> int:
        """Bytes that count: all of them, until `set_used_size` narrows the object."""
        return self._used[-1] if self._used else self.nbytes

    def set_used_size(self, nbytes: int) -> None:
        """Narrow the object to the bytes really written.

        Raises
        ------
        LeaseError
            The lease has ended; the size is negative or beyond the bytes in use; or the object holds typed chunks,
            whose size is that of their layout.
        """
        self._pool._check(self.generation)
        if self.descs and nbytes != self.nbytes:
            held = ", ".join(f"{d.layout} {'/'.join(map(dtype_name, set(d.dtypes.values())))}" for d in self.descs)
            raise LeaseError(
                f"an object of typed chunks ({held}) has {self.nbytes} B and cannot be narrowed to {nbytes} B"
            )
        if not 0 <= nbytes <= self.used_size:
            raise LeaseError(f"cannot narrow an object of {self.used_size} used bytes to {nbytes} B")
        self._used.append(nbytes)

    def reset_used_size(self) -> None:
        """Widen the object to all of its bytes again, for another use; raises `LeaseError` once the lease has ended."""
        self._pool._check(self.generation)
        self._used.clear()

    def free(self) -> None:
        """End the lease. Freeing twice raises `LeaseError`."""
        self._pool._free(self.generation, self._buffer)

    def __enter__(self) -> MemoryObj:
        self._pool._check(self.generation)
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()


def aligned_bytes(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocate pageable host memory, uint8 ``[nbytes]``, on a multiple of `ALIGNMENT`."""
    try:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    except MemoryError as error:
        raise OutOfMemoryError(f"the host refused {nbytes} B; lower the pool's capacity") from error
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + nbytes]
