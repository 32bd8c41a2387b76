"""What is checked of a frame's head before anything in it is believed, step by step.

`FrameReader` takes every step, and the first failure is the end. `kvcore inspect` takes them one by one and goes on
where it can. All raise `CorruptFrameError`; none allocates more than the bytes at hand ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from kvcore.codecs import raw
from kvcore.codecs.contract import Codec, omitted_parts
from kvcore.codecs.frame_format import (
    CRC_BYTES,
    ENCRYPTION_STEP,
    ENVELOPE_BYTES,
    MINOR,
    FrameHeader,
    Varlen,
    crc32c,
)
from kvcore.codecs.frame_values import ELEMENTS_OF_A_BYTE, Flags, GroupInfo, LayerEntry, SegmentSize
from kvcore.codecs.registry import codec_of, get_codec
from kvcore.entropy import MODE_RANS, TILE_CHANNELS, TILE_TOKENS
from kvcore.errors import CorruptFrameError

__all__ = ["check_crc", "check_identity", "check_lengths", "check_plain", "check_sizes", "open_codec"]

# Plain integers: the complement of an IntFlag knows only the bits that have names.
_READABLE = int(Flags.UNROPED | Flags.OFFSET | Flags.LEVELS | Flags.ENCRYPTED)
_TILE_VALUES = TILE_TOKENS * TILE_CHANNELS


def check_lengths(header: FrameHeader, at_hand: int, partial: bool) -> None:
    """Compare the header's sizes with one another and with the bytes at hand."""
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


def check_crc(head: bytes) -> None:
    """Check the CRC32C that a head ends with."""
    stored, found = int.from_bytes(head[-CRC_BYTES:], "little"), crc32c(head[:-CRC_BYTES])
    if stored != found:
        raise CorruptFrameError(f"the head has CRC32C {found:08x}, the frame says {stored:08x}", reason="crc")


def check_plain(header: FrameHeader) -> None:
    """Refuse to take the layers of an encrypted frame for what they were before."""
    if header.encrypted:
        raise CorruptFrameError(
            "the frame is encrypted: open it with its keys first (FrameCipher.open), its layers mean nothing without",
            reason="encrypted",
        )


def open_codec(header: FrameHeader, varlen: Varlen) -> Codec:
    """Return the codec that reads the frame: known, with the same tables and profile, and meant by the flags."""
    if unknown := header.flags & ~_READABLE:
        raise _unsupported(f"the frame has flags {unknown:#x}, which this build cannot read")
    if header.minor <= MINOR and any(header.unused):
        raise _unsupported("reserved bytes of the header are not zero")
    codec = codec_of(header.codec_id, header.preset)
    chain = (*codec.chain, ENCRYPTION_STEP) if header.encrypted else codec.chain
    if varlen.codecs != chain:
        raise _unsupported(f"codec {codec.name} comes as chain {list(chain)}, the frame has {list(varlen.codecs)}")
    if header.profile != bytes(8):
        raise _unsupported(f"the frame needs profile {header.profile.hex()}, and this build reads none")
    if (header.tables, header.precision) != (codec.tables, codec.precision):
        raise _unsupported(
            f"the frame was coded with tables {header.tables.hex()}, n = {header.precision}; codec {codec.name} has "
            f"{codec.tables.hex()}, n = {codec.precision}"
        )
    if header.levels is not None:
        if not hasattr(codec, "levels"):
            raise _unsupported(f"codec {codec.name} has no level constants")
        codec = get_codec(codec.name, levels=header.levels)
    possible = 0
    for group in varlen.groups:
        possible |= int(codec.flags(group))
    # Keys may come with their RoPE on, from a writer that did not know how to take it off.
    flags = header.flags & ~int(Flags.ENCRYPTED)
    if flags & ~possible or possible & ~flags & ~int(Flags.UNROPED):
        raise _unsupported(f"the frame has flags {header.flags:#x}, codec {codec.name} sets {possible:#x} here")
    return codec


def check_identity(
    varlen: Varlen, namespace: bytes | None, key: bytes | None, groups: Sequence[GroupInfo] | None
) -> None:
    """Compare whose frame it is, and of what shape, with what was asked for; None accepts any."""
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


def check_sizes(header: FrameHeader, varlen: Varlen, layers: Sequence[LayerEntry], codec: Codec) -> None:
    """Compare the header's raw and stored length and the groups' shapes with the directory.

    After this a frame's values are known to be no more than its bytes can hold, so a reader may allocate them.
    """
    if not header.tokens:
        raise CorruptFrameError("the frame has no tokens", reason="length")
    raw_bytes = sum(group.raw_bytes for group in varlen.groups)
    if raw_bytes != header.raw_bytes:
        raise CorruptFrameError(
            f"the groups have {raw_bytes} bytes, the header says {header.raw_bytes}", reason="length"
        )
    # Of an encrypted frame the layers are placed as they were before; its body is longer by the envelope.
    added = header.head_bytes - header.plain_head_bytes
    stops = [layers[-1].stop + added + more for more in (ENVELOPE_BYTES.values() if header.encrypted else (0,))]
    if header.stored_bytes not in stops:
        raise CorruptFrameError(
            f"the last segment ends at {' or '.join(map(str, stops))}, the header says {header.stored_bytes}",
            reason="length",
        )
    for entry in layers:
        group = varlen.groups[entry.group]
        sizes = [(segment.nbytes, segment.tiles) for segment in entry.segments]
        if not (_raw_sizes(group, sizes) if codec.codec_id == 0 else _coded_sizes(group, sizes, codec)):
            raise CorruptFrameError(
                f"the segments of layer {entry.layer} have not the size of their rows", reason="length"
            )


def _raw_sizes(group: GroupInfo, sizes: Sequence[SegmentSize]) -> bool:
    return sizes == raw.segment_sizes(group)


def _coded_sizes(group: GroupInfo, sizes: Sequence[SegmentSize], codec: Codec) -> bool:
    """Whether segments of these sizes may hold a layer's rows; what exactly they hold, their codec checks."""
    parts, omitted = [part for part in group.parts for _ in range(group.head_count)], omitted_parts(codec, group)
    if omitted and not _room_of_omitted(group, sizes, omitted):
        return False
    for part, (nbytes, tiles) in zip(parts, sizes, strict=True):
        if part.name in omitted:
            if nbytes or tiles:
                return False
            continue
        width = part.width
        most = -(-group.rows // TILE_TOKENS) * -(-width // TILE_CHANNELS)
        if len(tiles) > most or any(mode > MODE_RANS for mode, _ in tiles):
            return False
        if sum(2 * words for _, words in tiles) > nbytes:
            return False
        # Values outside tiles take a bit at least; a tile may be constant.
        if group.rows * width > ELEMENTS_OF_A_BYTE * nbytes + _TILE_VALUES * len(tiles):
            return False
    return True


def _room_of_omitted(group: GroupInfo, sizes: Sequence[SegmentSize], omitted: Sequence[str]) -> bool:
    """Whether all rows of a layer, those that it does not hold too, take no more room than its bytes vouch for."""
    elements = group.rows * group.head_count * sum(part.width for part in group.parts)
    return elements <= ELEMENTS_OF_A_BYTE * sum(nbytes for nbytes, _ in sizes)


def _unsupported(message: str) -> CorruptFrameError:
    return CorruptFrameError(message, reason="unsupported")
