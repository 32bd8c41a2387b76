"""The bytes of an encrypted frame that are not ciphertext: its head, and the front of its body. See docs/frame.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from kvcore.codecs.frame_checks import check_crc, check_lengths
from kvcore.codecs.frame_format import (
    CRC_BYTES,
    ENCRYPTION_STEP,
    ENVELOPE_BYTES,
    HEADER_BYTES,
    FrameHeader,
    digest_places,
    parse_varlen,
)
from kvcore.codecs.frame_values import Flags
from kvcore.errors import CorruptFrameError, LayoutError

__all__ = ["IV_BYTES", "STEP_BYTES", "TAG_BYTES", "Envelope", "HeadBytes"]

IV_BYTES, TAG_BYTES = 12, 16
_STEP = bytes([len(ENCRYPTION_STEP)]) + ENCRYPTION_STEP.encode()
STEP_BYTES = len(_STEP)
"""What the step adds to the chain in the head."""
_CHAIN_AT = HEADER_BYTES + 64  # after the two digests of the varlen part
_DIGEST_BYTES = 8
_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands before the ciphertext in the body of an encrypted frame.

    Parameters
    ----------
    iv : bytes
        12 bytes.
    key_id : int or None
        Of the master key; None in version 1.
    """

    iv: bytes
    key_id: int | None = None

    @property
    def version(self) -> int:
        """1, or 2 with a key id."""
        return 1 if self.key_id is None else 2

    def pack(self) -> bytes:
        """Return the bytes."""
        return bytes([self.version]) + self.iv + (b"" if self.key_id is None else _U32.pack(self.key_id))

    @classmethod
    def parse(cls, body: memoryview) -> Envelope:
        """Read the front of a body: everything after the head.

        Raises
        ------
        CorruptFrameError
            reason ``"truncated"``, or ``"unsupported"`` for a version that this build does not know.
        """
        version = body[0] if len(body) else 0
        if len(body) and version not in ENVELOPE_BYTES:
            raise CorruptFrameError(
                f"the frame has an envelope of version {version}, and this build reads {sorted(ENVELOPE_BYTES)}; "
                "upgrade kvcore",
                reason="unsupported",
            )
        if len(body) < ENVELOPE_BYTES.get(version, 1):
            raise CorruptFrameError(f"the frame ends after {len(body)} bytes of its envelope", reason="truncated")
        iv, rest = bytes(body[1 : 1 + IV_BYTES]), body[1 + IV_BYTES :]
        return cls(iv, _U32.unpack_from(rest)[0] if version == 2 else None)


@dataclass(frozen=True, slots=True)
class HeadBytes:
    """A head as bytes, which encryption changes in four fields and leaves alone otherwise, whatever they mean.

    Parameters
    ----------
    header : FrameHeader
    data : bytes
        Header, varlen part and directory: the head without its CRC.
    chain : bytes
        The texts of the codec chain, without their number.
    places : tuple of int
        Where in `data` the digests of the layers stand.
    """

    header: FrameHeader
    data: bytes
    chain: bytes
    places: tuple[int, ...]

    @classmethod
    def read(cls, view: memoryview) -> HeadBytes:
        """Read the head of a whole frame.

        Raises
        ------
        CorruptFrameError
            As `FrameReader` does for what is no frame; reason ``"unsupported"`` where flag and chain disagree.
        """
        header = FrameHeader.parse(view)
        check_lengths(header, len(view), partial=False)
        head = bytes(view[: header.head_bytes])
        check_crc(head)
        end = HEADER_BYTES + header.varlen_bytes
        varlen = parse_varlen(memoryview(head)[HEADER_BYTES:end], header)
        if header.encrypted is not (varlen.codecs[-1:] == (ENCRYPTION_STEP,)):
            raise CorruptFrameError(
                f"the chain {list(varlen.codecs)} and flags {header.flags:#x} disagree on encryption",
                reason="unsupported",
            )
        size = sum(1 + len(text) for text in varlen.codecs)
        places = digest_places(memoryview(head)[end:-CRC_BYTES], varlen.groups)
        return cls(header, head[:-CRC_BYTES], head[_CHAIN_AT + 1 :][:size], tuple(end + place for place in places))

    def digests(self) -> bytes:
        """Return what stands in the digest fields of the layers, 8 bytes each."""
        return b"".join(self.data[at : at + _DIGEST_BYTES] for at in self.places)

    def with_digests(self, digests: bytes) -> bytes:
        """Return the head, without its CRC, with something else in these fields."""
        data = bytearray(self.data)
        for index, at in enumerate(self.places):
            data[at : at + _DIGEST_BYTES] = digests[index * _DIGEST_BYTES :][:_DIGEST_BYTES]
        return bytes(data)

    def encrypted(self, stored_bytes: int) -> HeadBytes:
        """Return the head of the encrypted frame, which will have so many bytes.

        Raises
        ------
        LayoutError
            The chain is full.
        """
        if self.data[_CHAIN_AT] == 0xFF:
            raise LayoutError("the frame has a chain of 255 codecs, and no room for encryption")
        return self._changed(self.chain + _STEP, 1, stored_bytes)

    def decrypted(self, stored_bytes: int) -> HeadBytes:
        """Return the head of the plain frame, which will have so many bytes."""
        return self._changed(self.chain[:-STEP_BYTES], -1, stored_bytes)

    def _changed(self, chain: bytes, sign: int, stored_bytes: int) -> HeadBytes:
        moved = sign * STEP_BYTES
        header = replace(
            self.header,
            flags=self.header.flags ^ int(Flags.ENCRYPTED),
            varlen_bytes=self.header.varlen_bytes + moved,
            stored_bytes=stored_bytes,
        )
        count = bytes([self.data[_CHAIN_AT] + sign])
        after = self.data[_CHAIN_AT + 1 + len(self.chain) :]
        data = header.pack() + self.data[HEADER_BYTES:_CHAIN_AT] + count + chain + after
        return HeadBytes(header, data, chain, tuple(at + moved for at in self.places))
