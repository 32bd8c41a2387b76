"""Looking into a frame without trust: everything that can be told of it, and everything that is wrong with it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.contract import Codec, CodedSegment
from kvcore.codecs.envelope import Envelope
from kvcore.codecs.frame_checks import check_crc, check_lengths, check_sizes, open_codec
from kvcore.codecs.frame_format import CRC_BYTES, HEADER_BYTES, FrameHeader, Varlen, parse_directory, parse_varlen
from kvcore.codecs.frame_values import Buffer, GroupInfo, LayerEntry, byte_view, place_layers
from kvcore.codecs.kvs1 import Kvs1
from kvcore.codecs.segments import raw_rows_of
from kvcore.codecs.tables import table_set
from kvcore.dtypes import to_dtype
from kvcore.entropy import CLASSES, ESC, MODE_CONSTANT, MODE_PACKED, MODE_RANS, EncodedTiles, TableSet
from kvcore.errors import CorruptFrameError, LayoutError, UnsupportedOpError
from kvcore.ops import Backend, on_host

__all__ = ["FrameReport", "LayerReport", "Problem", "TileCounts", "inspect_frame"]

MODES = {MODE_CONSTANT: "constant", MODE_PACKED: "packed", MODE_RANS: "rans"}

_FLAGS_OFFSET = 8  # of the header's fields that say what the codec is


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong: `CorruptFrameError`'s reason and message, where in the file, and in which layer."""

    reason: str
    message: str
    offset: int
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A stored layer.

    Parameters
    ----------
    layer, group, start, nbytes : int
        `start` of an encrypted layer is its place in the plain frame.
    parts : dict of str to int
        Stored bytes by part, all heads together.
    digest : str
        ``"ok"``, ``"bad"``, ``"missing"`` (the file ends before the layer does), ``"unchecked"`` (no backend) or
        ``"encrypted"``.
    decoded : str
        ``"ok"``, ``"bad"``, ``"missing"``, ``"damaged"`` (its digest is bad), ``"encrypted"``, or why it was not tried.
    raw_rows : dict of str to list of list of int
        By part and head, the rows that KVS1 stored as they are; empty if it was not decoded, and for other codecs.
    """

    layer: int
    group: int
    start: int
    nbytes: int
    parts: dict[str, int]
    digest: str = "unchecked"
    decoded: str = "no backend"
    raw_rows: dict[str, list[list[int]]] = field(default_factory=dict)


@dataclass(slots=True)
class TileCounts:
    """What decoding shows of the coder's work.

    Parameters
    ----------
    modes : Counter
        Tiles by mode, from the directory.
    classes : Counter of int
        Channels of rANS tiles by their table.
    symbols, escapes : int
        Symbols of rANS tiles, and how many of them were escaped values.
    """

    modes: Counter[str] = field(default_factory=Counter)
    classes: Counter[int] = field(default_factory=Counter)
    symbols: int = 0
    escapes: int = 0


@dataclass(slots=True)
class FrameReport:
    """All of it; what could not be read is None or empty."""

    nbytes: int
    header: FrameHeader | None = None
    varlen: Varlen | None = None
    codec: Codec | None = None
    envelope: Envelope | None = None
    layers: list[LayerReport] = field(default_factory=list)
    tiles: TileCounts = field(default_factory=TileCounts)
    problems: list[Problem] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing was found to be wrong."""
        return not self.problems


def inspect_frame(buffer: Buffer, backend: Backend | None) -> FrameReport:
    """Read as much of a frame as there is; never raises for what the bytes are.

    Parameters
    ----------
    buffer : bytes-like
    backend : Backend, optional
        Checks digests and decodes the layers. Without one, what the head says is all there is to tell.
    """
    inspection = _Inspection(byte_view(buffer).toreadonly(), backend)
    entries = inspection.read_head()
    inspection.read_layers(entries)
    return inspection.report


class _Inspection:
    def __init__(self, view: memoryview, backend: Backend | None) -> None:
        self.view = view
        self.backend = None if backend is None else on_host(backend)
        self.report = FrameReport(len(view))
        self.sound = False  # whether the shapes are what the bytes can hold, so that decoding may allocate them

    @contextlib.contextmanager
    def noting(self, offset: int, layer: int | None = None) -> Iterator[None]:
        """Take down what is wrong with the bytes at an offset, and go on."""
        try:
            yield
        except CorruptFrameError as error:
            where = len(self.view) if error.reason == "truncated" else offset
            self.report.problems.append(Problem(error.reason, str(error), where, layer))

    def read_head(self) -> tuple[LayerEntry, ...]:
        """Read as far as possible; return where the layers are, nothing if that cannot be told."""
        view, report = self.view, self.report
        with self.noting(0):
            report.header = FrameHeader.parse(view)
        header = report.header
        if header is None:
            return ()
        with self.noting(min(len(view), header.stored_bytes)):
            check_lengths(header, len(view), partial=False)
        if len(view) >= header.head_bytes:
            with self.noting(header.head_bytes - CRC_BYTES):
                check_crc(bytes(view[: header.head_bytes]))
        end = HEADER_BYTES + header.varlen_bytes
        if len(view) < end:
            return ()
        with self.noting(HEADER_BYTES):
            report.varlen = parse_varlen(view[HEADER_BYTES:end], header)
        varlen = report.varlen
        if varlen is None:
            return ()
        with self.noting(_FLAGS_OFFSET):
            report.codec = open_codec(header, varlen)
        if len(view) < header.head_bytes:
            return ()
        entries: tuple[LayerEntry, ...] = ()
        with self.noting(end):
            directory = parse_directory(view[end : end + header.directory_bytes], varlen.groups, header)
            entries = place_layers(varlen.groups, directory, header.plain_head_bytes)
            if report.codec is not None:
                check_sizes(header, varlen, entries, report.codec)
                self.sound = True
        if header.encrypted:
            with self.noting(header.head_bytes):
                report.envelope = Envelope.parse(view[header.head_bytes :])
        return entries

    def read_layers(self, entries: Sequence[LayerEntry]) -> None:
        """Check the layers' digests and decode them."""
        before = self.report.header.head_bytes if self.report.header else 0
        for entry in entries:
            report = self._describe(entry)
            if self.report.header is not None and self.report.header.encrypted:
                report = replace(report, digest="encrypted", decoded="encrypted")
            elif entry.stop > len(self.view):
                report = replace(report, digest="missing", decoded="missing")
                self._blame(entry)
            elif self.backend is not None:
                found = len(self.report.problems)
                with self.noting(entry.start, entry.layer):
                    self._check_digest(before, entry, self.backend)
                intact = len(self.report.problems) == found
                decoded = self._decode(entry, self.backend) if intact else "damaged"
                rows = self._raw_rows(entry) if decoded == "ok" else {}
                report = replace(report, digest="ok" if intact else "bad", decoded=decoded, raw_rows=rows)
            self.report.layers.append(report)
            before = entry.stop

    def _describe(self, entry: LayerEntry) -> LayerReport:
        parts: Counter[str] = Counter()
        names = [p.name for p in self._group(entry).parts for _ in range(self._group(entry).head_count)]
        for name, segment in zip(names, entry.segments, strict=True):
            parts[name] += segment.nbytes
            self.report.tiles.modes.update(MODES.get(mode, f"unknown {mode}") for mode, _ in segment.tiles)
        return LayerReport(entry.layer, entry.group, entry.start, entry.stop - entry.start, dict(parts))

    def _group(self, entry: LayerEntry) -> GroupInfo:
        if self.report.varlen is None:
            raise IndexError("no groups have been read")
        return self.report.varlen.groups[entry.group]

    def _blame(self, entry: LayerEntry) -> None:
        """Name the first layer that is missing where the end of the file is noted."""
        for i, problem in enumerate(self.report.problems):
            if problem.reason == "truncated" and problem.layer is None:
                self.report.problems[i] = replace(problem, layer=entry.layer)

    def _check_digest(self, before: int, entry: LayerEntry, backend: Backend) -> None:
        if any(self.view[before : entry.start]):
            raise CorruptFrameError(f"the padding before layer {entry.layer} is not zero", reason="digest")
        found = int(backend.digest([self.view[entry.start : entry.stop]])[0])
        if found != entry.digest:
            raise CorruptFrameError(
                f"layer {entry.layer} has digest {found:016x}, the frame says {entry.digest:016x}: its bytes were "
                "altered after they were written",
                reason="digest",
            )

    def _decode(self, entry: LayerEntry, backend: Backend) -> str:
        codec = self.report.codec
        if codec is None or not self.sound:
            return "not known how"
        if codec.codec_id == 0:
            return "ok"  # rows as they are
        group = replace(self._group(entry), layers=(entry.layer,))
        segments = self._segments(entry)
        tap = cast(Backend, _Tap(backend, self.report.tiles))
        decoded = "bad"
        with self.noting(entry.start, entry.layer):
            try:
                codec.decode(tap, [segments], group, allocate_rows(group))
                decoded = "ok"
            except (LayoutError, UnsupportedOpError) as error:
                decoded = f"not decoded: {error}"
        return decoded

    def _segments(self, entry: LayerEntry) -> list[CodedSegment]:
        return [CodedSegment(self.view[s.offset : s.offset + s.nbytes], s.tiles) for s in entry.segments]

    def _raw_rows(self, entry: LayerEntry) -> dict[str, list[list[int]]]:
        """Return the raw rows of a layer that has been decoded."""
        if not isinstance(self.report.codec, Kvs1):
            return {}
        group, segments = self._group(entry), iter(self._segments(entry))
        return {
            part.name: [
                raw_rows_of(
                    next(segments),
                    tables=table_set("gauss"),
                    tokens=group.rows,
                    channels=part.width,
                    dtype=to_dtype(part.dtype),
                )
                for _ in range(group.head_count)
            ]
            for part in group.parts
        }


class _Tap:
    """A backend that counts what passes through `decode_symbols`: every codec with tiles decodes them there."""

    def __init__(self, backend: Backend, counts: TileCounts) -> None:
        self._backend, self._counts = backend, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decode_symbols(self, tiles: EncodedTiles, tables: TableSet, *, use_offsets: bool = False, out: Any) -> Any:
        self._backend.decode_symbols(tiles, tables, use_offsets=use_offsets, out=out)
        rans = np.flatnonzero(tiles.modes == MODE_RANS)
        width = out.shape[2]
        classes, offsets = tiles.payload[rans, :width], np.zeros((len(rans), width), np.uint8)
        if use_offsets or tables.kind == "exponent":
            offsets = tiles.payload[rans, width : 2 * width]
        used = classes & (CLASSES - 1)  # the bits above are a sign, in exponent tables
        self._counts.classes.update(map(int, used.ravel()))
        self._counts.symbols += out[rans].size
        self._counts.escapes += _escapes(out[rans], classes, offsets, tables)
        return out


def _escapes(
    values: npt.NDArray[np.int16], classes: npt.NDArray[np.uint8], offsets: npt.NDArray[np.uint8], tables: TableSet
) -> int:
    """Count the values ``[M, T, W]`` that have no symbol, or none in their channel's table."""
    wide, side = values.astype(np.int64), offsets[:, None, :]
    if tables.kind == "integer":
        k = wide - side.view(np.int8)
        symbols = np.where(np.abs(k) <= 127, k + 128, ESC)
    elif tables.kind == "exponent":
        z = side - (wide & 0xFF)
        symbols = np.where((z >= 0) & (z <= 62), 1 + 2 * z + (wide >> 8 ^ classes[:, None, :] >> 7), ESC)
    else:
        magnitude, negative = wide & 0x7F, wide & 0x80 != 0
        symbols = np.where(negative, 128 - magnitude, 128 + magnitude)
        symbols[negative & (magnitude == 0)] = 1
        symbols[negative & (magnitude == 127)] = ESC
    frequency = tables.frequency[classes[:, None, :] & (CLASSES - 1), symbols]
    return int(((symbols == ESC) | (frequency == 0)).sum())
