"""Reading a frame: every byte is checked once, before it is believed, and nothing is copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvcore.codecs.contract import Codec, CodedSegment
from kvcore.codecs.frame_checks import check_crc, check_identity, check_lengths, check_plain, check_sizes, open_codec
from kvcore.codecs.frame_format import HEADER_BYTES, FrameHeader, parse_directory, parse_varlen
from kvcore.codecs.frame_values import (
    LAYER_ALIGN,
    Buffer,
    Digest,
    GroupInfo,
    LayerEntry,
    byte_view,
    place_layers,
)
from kvcore.errors import CorruptFrameError, LayoutError
from kvcore.ops import Backend, on_host
from kvcore.rows import RowLayout

__all__ = ["FrameReader"]

_ZEROS = bytes(LAYER_ALIGN)


class FrameReader:
    """A frame in memory, opened for reading.

    The head (header, varlen part, directory) is verified here; a layer when it is asked for. The buffer must
    not change while the reader or its views are in use.

    Of an encrypted frame the head can be read: whose it is, its codec, groups, and the sizes of layers and segments.
    The layers themselves raise, reason ``"encrypted"``; `kvcore.codecs.encryption.FrameCipher` gives the plain frame.

    Parameters
    ----------
    buffer : bytes-like
        The frame; with ``partial=True`` the first bytes of it, at least its head.
    expect_namespace, expect_key : bytes or None
        The 32-byte digests the frame must carry; None accepts any (for tools that look at frames, not for
        engines).
    expect_groups : sequence of GroupInfo, optional
        The groups the frame must have, exactly.
    digest : callable
        The backend's `digest` op: a sequence of byte views to as many 64-bit integers.
    partial : bool
        Accept a frame whose end has not arrived yet; `available_layers` says how far it goes, `extend` takes more.

    Attributes
    ----------
    header : FrameHeader
    layers : tuple of LayerEntry
        The stored layers, in ascending order of the model's layers. Of an encrypted frame with the places that they
        have in the plain one, and without digests.
    codec : Codec
        What decodes them, as the header names it.

    Raises
    ------
    CorruptFrameError
        With one of the reasons its class lists. A store quarantines the object, an engine counts a miss.
    """

    __slots__ = ("_digest", "_varlen", "_view", "codec", "header", "layers")

    def __init__(
        self,
        buffer: Buffer,
        *,
        expect_namespace: bytes | None,
        expect_key: bytes | None,
        expect_groups: Sequence[GroupInfo] | None = None,
        digest: Digest,
        partial: bool = False,
    ) -> None:
        view = byte_view(buffer).toreadonly()
        header = FrameHeader.parse(view)
        check_lengths(header, len(view), partial)
        check_crc(bytes(view[: header.head_bytes]))
        end = HEADER_BYTES + header.varlen_bytes
        varlen = parse_varlen(view[HEADER_BYTES:end], header)
        # Identity first: what the codec is asked about below is then known to be what the caller expects.
        check_identity(varlen, expect_namespace, expect_key, expect_groups)
        self.codec: Codec = open_codec(header, varlen)
        directory = parse_directory(view[end : end + header.directory_bytes], varlen.groups, header)
        if header.encrypted:
            directory = [(0, sizes) for _, sizes in directory]
        self.header: FrameHeader = header
        self.layers: tuple[LayerEntry, ...] = place_layers(varlen.groups, directory, header.plain_head_bytes)
        check_sizes(header, varlen, self.layers, self.codec)
        self._varlen, self._view, self._digest = varlen, view, digest

    @property
    def namespace(self) -> bytes:
        """The 32-byte digest of the namespace."""
        return self._varlen.namespace

    @property
    def key(self) -> bytes:
        """The 32-byte digest of the chunk."""
        return self._varlen.key

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codec chain, first applied first."""
        return self._varlen.codecs

    @property
    def groups(self) -> tuple[GroupInfo, ...]:
        """The groups of layers."""
        return self._varlen.groups

    @property
    def available_layers(self) -> int:
        """How many layers, counted from the first, are wholly in the buffer; of an encrypted frame none is."""
        return 0 if self.header.encrypted else sum(entry.stop <= len(self._view) for entry in self.layers)

    def layer(self, index: int) -> memoryview:
        """Verify a stored layer and return its bytes, a read-only view.

        Parameters
        ----------
        index : int
            Place in `layers`, which is ascending order of the model's layers.

        Raises
        ------
        CorruptFrameError
            reason ``"digest"``: its bytes, or the padding before it, are not what was written;
            ``"truncated"``: a partial frame does not reach that far; ``"encrypted"``: it needs its key first.
        IndexError
            There is no such layer.
        """
        return self.layer_views([index])[0]

    def layer_views(self, indices: Sequence[int]) -> list[memoryview]:
        """Verify stored layers in one call of `digest`, and return the bytes of each; raises as `layer` does."""
        self._verify(indices)
        return [self._view[entry.start : entry.stop] for entry in (self.layers[index] for index in indices)]

    def segments(self, index: int) -> tuple[CodedSegment, ...]:
        """Verify a stored layer and return its segments, in (part, head) order; their data are read-only views."""
        self._verify([index])
        return self._segments(self.layers[index])

    def decode_layers(self, backend: Backend, first: int, count: int, out: RowLayout) -> None:
        """Verify and decode stored layers into the rows of as many layers.

        Parameters
        ----------
        backend : Backend
            With the ops of the frame's codec.
        first, count : int
            Places in `layers`; the layers must be of one group.
        out : RowLayout
            Dense rows of `count` layers of that group's parts, heads and tokens.

        Raises
        ------
        CorruptFrameError
            As `layer` does, or with reason ``"stream"`` where the bytes are not what the codec writes. `out` is then
            unspecified.
        LayoutError
            The layers are of several groups, or `out` has another shape.
        IndexError
            There are no such layers.
        """
        if not 0 <= first < first + count <= len(self.layers):
            raise IndexError(f"layers {first}:{first + count} of a frame with {len(self.layers)}")
        self._decode(backend, range(first, first + count), out)

    def decode(self, backend: Backend, out: Sequence[RowLayout]) -> None:
        """Verify and decode the whole frame: one element of `out` for each group, with all of the group's layers.

        Raises
        ------
        CorruptFrameError, LayoutError
            As `decode_layers` does.
        """
        if len(out) != len(self.groups):
            raise LayoutError(f"the frame has {len(self.groups)} groups, rows were given for {len(out)}")
        for group, rows in enumerate(out):
            self._decode(backend, [i for i, entry in enumerate(self.layers) if entry.group == group], rows)

    def extend(self, buffer: Buffer) -> int:
        """Go on with a longer prefix of the same frame, in the same buffer or another; return `available_layers`.

        Raises
        ------
        CorruptFrameError
            The buffer is shorter than what was there, longer than the frame, or does not begin with the same head.
        """
        view = byte_view(buffer).toreadonly()
        check_lengths(self.header, len(view), partial=True)
        if len(view) < len(self._view):
            raise CorruptFrameError(
                f"{len(view)} bytes, where {len(self._view)} had arrived before", reason="truncated"
            )
        if view[: self.header.head_bytes] != self._view[: self.header.head_bytes]:
            raise CorruptFrameError("the bytes begin with the head of another frame", reason="identity")
        self._view = view
        return self.available_layers

    def verify(self) -> None:
        """Verify all layers in one call of `digest`; raises as `layer` does."""
        self._verify(range(len(self.layers)))

    def _segments(self, entry: LayerEntry) -> tuple[CodedSegment, ...]:
        return tuple(CodedSegment(self._view[s.offset : s.offset + s.nbytes], s.tiles) for s in entry.segments)

    def _decode(self, backend: Backend, indices: Sequence[int], out: RowLayout) -> None:
        entries = [self.layers[index] for index in indices]
        if len({entry.group for entry in entries}) != 1:
            raise LayoutError("the layers are of several groups; decode each group's by themselves")
        group = replace(self.groups[entries[0].group], layers=tuple(entry.layer for entry in entries))
        if (out.layers, out.tokens) != (len(entries), group.rows):
            raise LayoutError(
                f"{len(entries)} layers of {group.rows} tokens do not fit rows of {out.layers} x {out.tokens}"
            )
        out.check_writable()
        self._verify(indices)
        self.codec.decode(on_host(backend), [self._segments(entry) for entry in entries], group, out)

    def _verify(self, indices: Iterable[int]) -> None:
        check_plain(self.header)
        places = [range(len(self.layers))[index] for index in indices]
        for place in places:
            entry = self.layers[place]
            before = self.layers[place - 1].stop if place else self.header.head_bytes
            if entry.stop > len(self._view):
                raise CorruptFrameError(
                    f"layer {entry.layer} ends at byte {entry.stop}, {len(self._view)} have arrived",
                    reason="truncated",
                )
            if self._view[before : entry.start] != _ZEROS[: entry.start - before]:
                raise CorruptFrameError(f"the padding before layer {entry.layer} is not zero", reason="digest")
        entries = [self.layers[place] for place in places]
        found = self._digest([self._view[entry.start : entry.stop] for entry in entries])
        for entry, value in zip(entries, found, strict=True):
            if int(value) != entry.digest:
                raise CorruptFrameError(
                    f"layer {entry.layer} has digest {int(value):016x}, the frame says {entry.digest:016x}: "
                    "its bytes were altered after they were written",
                    reason="digest",
                )
