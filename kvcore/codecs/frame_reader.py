"""Reading a frame: every byte is checked once, before it is believed, and nothing is copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from kvcore.codecs import raw
from kvcore.codecs.frame_format import (
    CRC_BYTES,
    HEADER_BYTES,
    MINOR,
    FrameHeader,
    Varlen,
    crc32c,
    parse_directory,
    parse_varlen,
)
from kvcore.codecs.frame_values import (
    CODECS,
    LAYER_ALIGN,
    Buffer,
    Digest,
    GroupInfo,
    LayerEntry,
    SegmentSize,
    byte_view,
    place_layers,
)
from kvcore.errors import CorruptFrameError

__all__ = ["FrameReader"]

_ZEROS = bytes(LAYER_ALIGN)


class FrameReader:
    """A frame in memory, opened for reading.

    The head (header, varlen part, directory) is verified here; a layer when it is asked for. The buffer must
    not change while the reader or its views are in use.

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
        Accept a frame whose end has not arrived yet; `available_layers` says how far it goes.

    Raises
    ------
    CorruptFrameError
        With one of the reasons its class lists. A store quarantines the object, an engine counts a miss.
    """

    __slots__ = ("_digest", "_varlen", "_view", "header", "layers")

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
        _check_lengths(header, len(view), partial)
        head = bytes(view[: header.head_bytes])
        _check_head(header, head)
        end = HEADER_BYTES + header.varlen_bytes
        varlen = parse_varlen(view[HEADER_BYTES:end], header)
        _check_codecs(header, varlen)
        _check_identity(varlen, expect_namespace, expect_key, expect_groups)
        directory = parse_directory(view[end : end + header.directory_bytes], varlen.groups, header)
        self.header: FrameHeader = header
        self.layers: tuple[LayerEntry, ...] = place_layers(varlen.groups, directory, header.head_bytes)
        _check_sizes(header, varlen, self.layers)
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
        """How many layers, counted from the first, are wholly in the buffer."""
        return sum(entry.stop <= len(self._view) for entry in self.layers)

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
            ``"truncated"``: a partial frame does not reach that far.
        IndexError
            There is no such layer.
        """
        self._verify([index])
        entry = self.layers[index]
        return self._view[entry.start : entry.stop]

    def segments(self, index: int) -> tuple[memoryview, ...]:
        """Verify a stored layer and return its segments, in (part, head) order, as read-only views."""
        self._verify([index])
        return tuple(self._view[s.offset : s.offset + s.nbytes] for s in self.layers[index].segments)

    def verify(self) -> None:
        """Verify all layers in one call of `digest`; raises as `layer` does."""
        self._verify(range(len(self.layers)))

    def _verify(self, indices: Iterable[int]) -> None:
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


def _check_lengths(header: FrameHeader, at_hand: int, partial: bool) -> None:
    if header.stored_bytes < header.head_bytes:
        raise CorruptFrameError(
            f"the header gives the frame {header.stored_bytes} bytes and its head alone {header.head_bytes}",
            reason="length",
        )
    needed = header.head_bytes if partial else header.stored_bytes
    if at_hand < needed:
        raise CorruptFrameError(f"the frame ends after {at_hand} of {needed} bytes", reason="truncated")
    if at_hand > header.stored_bytes:
        raise CorruptFrameError(f"{at_hand} bytes for a frame of {header.stored_bytes}", reason="length")


def _check_head(header: FrameHeader, head: bytes) -> None:
    stored, found = int.from_bytes(head[-CRC_BYTES:], "little"), crc32c(head[:-CRC_BYTES])
    if stored != found:
        raise CorruptFrameError(f"the head has CRC32C {found:08x}, the frame says {stored:08x}", reason="crc")
    if header.flags:
        # No codec of this build sets a flag, and each changes what the segments mean.
        raise CorruptFrameError(
            f"the frame has flags {header.flags:#x}, which this build cannot read", reason="unsupported"
        )
    if header.minor <= MINOR and any(header.reserved):
        raise CorruptFrameError("reserved bytes of the header are not zero", reason="unsupported")


def _check_codecs(header: FrameHeader, varlen: Varlen) -> None:
    chains = {number: (name,) for name, number in CODECS.items()}
    if varlen.codecs != chains.get(header.codec_id):
        raise CorruptFrameError(
            f"codec {header.codec_id}, chain {list(varlen.codecs)}; this build reads {', '.join(CODECS)}",
            reason="unsupported",
        )
    if header.preset or header.precision or any(header.tables) or any(header.profile):
        raise CorruptFrameError("a raw frame names a preset, tables or a profile", reason="unsupported")


def _check_identity(
    varlen: Varlen, namespace: bytes | None, key: bytes | None, groups: Sequence[GroupInfo] | None
) -> None:
    for what, found, expected in (("namespace", varlen.namespace, namespace), ("chunk", varlen.key, key)):
        if expected is not None and found != expected:
            raise CorruptFrameError(
                f"the frame is of {what} {found.hex()[:16]}..., asked was {expected.hex()[:16]}...",
                reason="identity",
            )
    if groups is None:
        return
    if len(groups) != len(varlen.groups):
        raise CorruptFrameError(f"the frame has {len(varlen.groups)} groups, expected {len(groups)}", reason="layout")
    for index, (found_group, wanted) in enumerate(zip(varlen.groups, groups, strict=True)):
        for name in (field.name for field in fields(wanted)):
            has, needs = getattr(found_group, name), getattr(wanted, name)
            if has != needs:
                raise CorruptFrameError(f"group {index} has {name} {has!r}, expected {needs!r}", reason="layout")


def _check_sizes(header: FrameHeader, varlen: Varlen, layers: Sequence[LayerEntry]) -> None:
    if not header.tokens:
        raise CorruptFrameError("the frame has no tokens", reason="length")
    raw_bytes = sum(group.raw_bytes for group in varlen.groups)
    if raw_bytes != header.raw_bytes:
        raise CorruptFrameError(
            f"the groups have {raw_bytes} bytes, the header says {header.raw_bytes}", reason="length"
        )
    if layers[-1].stop != header.stored_bytes:
        raise CorruptFrameError(
            f"the last segment ends at {layers[-1].stop}, the header says {header.stored_bytes}",
            reason="length",
        )
    expected: list[list[SegmentSize]] = [raw.segment_sizes(group) for group in varlen.groups]
    for entry in layers:
        if [(s.nbytes, s.tiles) for s in entry.segments] != expected[entry.group]:
            raise CorruptFrameError(
                f"the segments of layer {entry.layer} have not the size of their rows", reason="length"
            )
