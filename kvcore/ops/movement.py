"""Checked movement ops: the arguments are held to the hookspec before an implementation sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore.arrays import ArrayRef
from kvcore.errors import ConfigError, LayoutError
from kvcore.memory import chunk_desc
from kvcore.ops.base import OpsBase, read_only
from kvcore.ops.checks import check_unit
from kvcore.rows import RowLayout

__all__ = ["MovementOps"]

_INT64 = np.dtype(np.int64)
_UINT8 = np.dtype(np.uint8)


class MovementOps(OpsBase):
    """Gather, scatter, convert, copy and digest."""

    def gather_paged(
        self,
        src: RowLayout,
        index: Any,
        *,
        unit: str = "slot",
        skip_tokens: int = 0,
        out: RowLayout | Sequence[RowLayout] | None = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Copy tokens out of a paged cache into dense chunks; see `kvcore.hookspecs.movement`.

        `out` may be one chunk, several that share the request's tokens in order, or None for a new chunk.

        Raises
        ------
        LayoutError, SlotError, UnsupportedOpError
        """
        function = self.resolve("gather_paged", src.dtypes, src.text)
        positions = self._index(index)
        if out is None:
            out = self._new_chunk(src, positions.shape[0] * (src.block_tokens if unit == "block" else 1))
        chunks = (out,) if isinstance(out, RowLayout) else out
        for chunk in chunks:
            chunk.check_writable()
        _check_paged(src, chunks, positions, unit, skip_tokens)
        function(src, positions, unit=unit, skip_tokens=skip_tokens, out=chunks, stream=stream, workspace=workspace)
        return out

    def scatter_paged(
        self,
        src: RowLayout | Sequence[RowLayout],
        index: Any,
        *,
        unit: str = "slot",
        skip_tokens: int = 0,
        check_duplicates: bool = True,
        out: RowLayout,
        stream: Any = None,
        workspace: Any = None,
    ) -> RowLayout:
        """Copy tokens of dense chunks into a paged cache; see `kvcore.hookspecs.movement`.

        Raises
        ------
        LayoutError, SlotError, UnsupportedOpError
        """
        function = self.resolve("scatter_paged", out.dtypes, out.text)
        positions = self._index(index)
        chunks = (src,) if isinstance(src, RowLayout) else src
        out.check_writable()
        _check_paged(out, chunks, positions, unit, skip_tokens)
        function(
            chunks,
            positions,
            unit=unit,
            skip_tokens=skip_tokens,
            check_duplicates=check_duplicates,
            out=out,
            stream=stream,
            workspace=workspace,
        )
        return out

    def convert_layout(self, src: RowLayout, *, out: RowLayout, stream: Any = None, workspace: Any = None) -> RowLayout:
        """Copy a dense chunk into another dense layout; see `kvcore.hookspecs.movement`.

        Raises
        ------
        LayoutError, UnsupportedOpError
        """
        function = self.resolve("convert_layout", src.dtypes, None)
        for what, rows in (("source", src), ("target", out)):
            if rows.paged:
                raise LayoutError(f"the {what} {rows!r} is paged; convert_layout takes dense chunks on both sides")
        _check_same(src, out)
        if src.block_tokens != out.block_tokens:
            raise LayoutError(f"axis T: the source has {src.block_tokens} tokens, the target {out.block_tokens}")
        out.check_writable()
        function(src, out=out, stream=stream, workspace=workspace)
        return out

    def copy_batch(
        self,
        src: Sequence[Any],
        *,
        digests: Any = None,
        out: Sequence[Any],
        stream: Any = None,
        workspace: Any = None,
    ) -> Sequence[Any]:
        """Copy byte buffers pairwise; see `kvcore.hookspecs.movement`.

        Raises
        ------
        LayoutError
            Counts or sizes differ, a buffer is not contiguous bytes, or a destination overlaps something.
        UnsupportedOpError
        """
        function = self.resolve("copy_batch")
        sources = [self._bytes(x, f"src[{i}]", or_host=True) for i, x in enumerate(src)]
        targets = [self._bytes(x, f"out[{i}]", or_host=True, write=True) for i, x in enumerate(out)]
        if [x.shape for x in sources] != [x.shape for x in targets]:
            raise LayoutError(
                f"copy_batch needs out[i] as large as src[i], got {[x.shape[0] for x in targets]} B "
                f"for {[x.shape[0] for x in sources]} B"
            )
        _check_disjoint(sources, targets)
        if digests is not None:
            form = type(self.runtime.array(digests))  # what is on the other side of the link shares no memory with them
            near = [x for x in (*sources, *targets) if isinstance(x, form)]
            digests, _ = self._out(digests, "digests", (len(sources),), np.uint64, *near)
        function(sources, digests=digests, out=targets, stream=stream, workspace=workspace)
        return out

    def digest(self, src: Sequence[Any], *, out: Any = None, stream: Any = None, workspace: Any = None) -> Any:
        """Digest byte buffers, uint64 ``[len(src)]``; see `kvcore.hookspecs.digest`.

        Raises
        ------
        LayoutError
            A buffer is not contiguous bytes.
        UnsupportedOpError
        """
        function = self.resolve("digest")
        buffers = [self._bytes(x, f"src[{i}]") for i, x in enumerate(src)]
        native, out = self._out(out, "out", (len(buffers),), np.uint64, *buffers)
        function(buffers, out=native, stream=stream, workspace=workspace)
        return out

    def _index(self, index: Any) -> Any:
        positions = self.runtime.array(index)
        if positions.dtype != _INT64 or len(positions.shape) != 1:
            raise LayoutError(f"slots and block ids are int64 [n], got {positions.dtype} {list(positions.shape)}")
        if positions.shape[0] > 1 and positions.strides[0] != 8:
            raise LayoutError("slots and block ids must be contiguous")
        return positions

    def _bytes(self, buffer: Any, what: str, *, or_host: bool = False, write: bool = False) -> Any:
        if isinstance(buffer, (bytes, bytearray, memoryview)):
            buffer = np.frombuffer(buffer, np.uint8)
        if or_host and not isinstance(buffer, np.ndarray):
            ref = ArrayRef.of(buffer)
            buffer = ref.numpy() if ref.device_type == "cpu" else ref
        array = buffer if or_host and isinstance(buffer, np.ndarray) else self.runtime.array(buffer)
        if array.dtype.itemsize != 1 or len(array.shape) != 1 or (array.shape[0] > 1 and array.strides[0] != 1):
            raise LayoutError(f"{what} must be contiguous bytes, uint8 [n], got {array.dtype} {list(array.shape)}")
        if write and read_only(array):
            raise LayoutError(f"{what} is read-only")
        return array.view(_UINT8) if isinstance(array, np.ndarray) and array.dtype != _UINT8 else array

    def _new_chunk(self, src: RowLayout, tokens: int) -> RowLayout:
        desc = chunk_desc(src, tokens)
        return desc.bind(self.runtime.empty((desc.nbytes,), _UINT8))


def _check_same(a: RowLayout, b: RowLayout) -> None:
    if a.signature != b.signature:
        raise LayoutError(
            f"{a!r} and {b!r} do not hold the same: layers, and by part the dtype, heads and width, must be equal "
            f"({a.signature} against {b.signature})"
        )
    if a.device != b.device:
        raise LayoutError(f"one layout is on {a.device}, the other on {b.device}; move one with copy_batch")


def _check_paged(paged: RowLayout, chunks: Sequence[RowLayout], index: Any, unit: str, skip_tokens: int) -> None:
    if not paged.paged:
        raise LayoutError(f"{paged!r} is dense; gather and scatter move between a paged cache (B and N) and chunks (T)")
    tokens = 0
    for chunk in chunks:
        if chunk.paged:
            raise LayoutError(f"{chunk!r} is paged where a dense chunk (T) is expected")
        if chunk.signature != paged.signature or chunk.device != paged.device:
            _check_same(paged, chunk)
        tokens += chunk.block_tokens
    check_unit(unit)
    wanted = tokens if unit == "slot" else -(-tokens // paged.block_tokens)
    if index.shape[0] != wanted:
        raise LayoutError(
            f"the chunks have {tokens} tokens, so {wanted} {unit}s are needed; {index.shape[0]} were given"
        )
    if not 0 <= skip_tokens <= tokens:
        raise ConfigError(f"skip_tokens={skip_tokens} of a request of {tokens} tokens")


def _check_disjoint(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Raise if a target shares bytes with a source or with another target."""
    if len(targets) == 1 and isinstance(sources[0], np.ndarray) and isinstance(targets[0], np.ndarray):
        if np.may_share_memory(sources[0], targets[0]):  # compares bounds, which is exact for contiguous bytes
            raise LayoutError("out[0] overlaps src[0]; copies must not overlap")
        return  # reading two addresses would take twice as long as the rest of the call
    spans = [(*_span(x), True, i) for i, x in enumerate(targets)]
    spans += [(*_span(x), False, i) for i, x in enumerate(sources)]
    spans.sort()
    reach, owner = -1, (False, 0)
    last_write, last_owner = -1, (True, 0)
    for start, stop, write, i in spans:
        if start == stop:
            continue
        if start < last_write or (write and start < reach):
            pair = (write, i), last_owner if start < last_write else owner
            one, other = (f"{'out' if is_out else 'src'}[{n}]" for is_out, n in pair)
            raise LayoutError(f"{one} overlaps {other}; copies must not overlap")
        if stop > reach:
            reach, owner = stop, (write, i)
        if write and stop > last_write:
            last_write, last_owner = stop, (write, i)


def _span(array: Any) -> tuple[int, int]:
    if isinstance(array, np.ndarray):  # what is on the host is spared the way through ArrayRef
        start: int = array.__array_interface__["data"][0]
        return start, start + array.size
    ref = ArrayRef.of(array)
    return ref.address, ref.address + ref.shape[0]
