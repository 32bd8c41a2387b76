"""Encryption of whole frames, the last step of the codec chain: docs/encryption.md; its bytes: docs/frame.md.

An encrypted frame is again a frame: its head can be read by everybody, its layers by those who have the key. AES in
Galois/Counter Mode (NIST SP 800-38D) encrypts all that follows the head, and authenticates that, the head itself and
the key that the frame is stored under. The digests of the layers are in the head, and would tell who has the same KV:
they are masked, in counter mode with a key of their own, before the head is authenticated.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from kvcore.codecs.envelope import IV_BYTES, STEP_BYTES, Envelope, HeadBytes
from kvcore.codecs.frame_format import CRC_BYTES, ENVELOPE_BYTES, crc32c
from kvcore.codecs.frame_values import Buffer, byte_view
from kvcore.codecs.key_ring import KeyRing, MessageKey, require_cryptography
from kvcore.errors import ConfigError, CorruptFrameError, LayoutError
from kvcore.keys import Key

__all__ = ["FrameCipher"]

MAX_BYTES = 2**31 - 1  # of a message, as the library has it; NIST SP 800-38D allows 2**36 - 32


class FrameCipher:
    """Seals frames with the current key of a ring, and opens frames that any of its keys has sealed.

    May be used from any thread. One that seals for a tenant cannot open the frames of another one.

    Parameters
    ----------
    ring : KeyRing
    salt : str
        The tenant's: every salt has keys of its own.
    bits : int
        128 or 256, the length of the AES key.
    random_bytes : callable
        ``random_bytes(n)`` gives the 12 bytes of an IV. Two frames under one IV give both away: only tests, which want
        the same bytes at each run, replace the system's generator.

    Raises
    ------
    ConfigError
        Another length of key, a salt that is no text, or the library `cryptography` is not installed.
    """

    __slots__ = ("_bits", "_random_bytes", "_ring", "_salt")

    def __init__(
        self,
        ring: KeyRing,
        *,
        salt: str = "",
        bits: int = 256,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        require_cryptography()
        if bits not in (128, 256):
            raise ConfigError(f"an AES key has 128 or 256 bits here, not {bits}")
        try:
            salt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the salt {salt!r} is not a text that UTF-8 can hold") from error
        self._ring, self._salt, self._bits, self._random_bytes = ring, salt, bits, random_bytes

    def __repr__(self) -> str:
        return f"FrameCipher({self._ring!r}, bits={self._bits})"

    def sealed_size(self, nbytes: int) -> int:
        """Return the size that a plain frame of `nbytes` has once it is sealed: exact.

        Raises
        ------
        LayoutError
            It is longer than a message of the library may be, 2 GiB.
        """
        if nbytes > MAX_BYTES:
            raise LayoutError(
                f"a frame of {nbytes} bytes cannot be encrypted, only one of {MAX_BYTES}: use shorter chunks"
            )
        return nbytes + STEP_BYTES + ENVELOPE_BYTES[1 if self._ring.current is None else 2]

    @staticmethod
    def opened_size(nbytes: int) -> int:
        """Return how many bytes suffice to open a sealed frame of `nbytes`: with a key id, 4 more than it takes."""
        return max(0, nbytes - STEP_BYTES - min(ENVELOPE_BYTES.values()))

    def seal(self, frame: Buffer, key: Key, out: Buffer | None = None) -> memoryview:
        """Encrypt a frame.

        Parameters
        ----------
        frame : bytes-like
            A whole plain frame, of any codec.
        key : Key
            What it will be stored under. It opens only for who asks with the same key.
        out : writable bytes-like, optional
            At least `sealed_size` bytes, apart from `frame`; by default they are allocated.

        Returns
        -------
        memoryview
            The sealed frame: the front of `out`.

        Raises
        ------
        CorruptFrameError
            `frame` is not a frame.
        ConfigError
            It is encrypted already, a digest of the key has not 32 bytes, or the master key has sealed all that it may.
        LayoutError
            `out` is too short, read-only or lies over `frame`; or the frame is too long for the cipher. In all these
            cases nothing has been written.
        """
        view = byte_view(frame).toreadonly()
        head = HeadBytes.read(view)
        if head.header.encrypted:
            raise ConfigError("the frame is encrypted already; encryption is the last step of a chain")
        size = self.sealed_size(len(view))
        target = _target(out, size, view)
        identity = _identity(key)
        message_key = self._ring.message_key(self._ring.current, salt=self._salt, bits=self._bits)
        message_key.count()
        envelope = Envelope(self._random_bytes(IV_BYTES), message_key.key_id)
        sealed = head.encrypted(size)
        authenticated = sealed.with_digests(message_key.masked(envelope.iv, head.digests()))
        front = _with_crc(authenticated) + envelope.pack()
        message_key.gcm.encrypt_into(
            envelope.iv, view[head.header.head_bytes :], authenticated + identity, target[len(front) :]
        )
        target[: len(front)] = front
        return target

    def open(self, frame: Buffer, key: Key, out: Buffer | None = None) -> memoryview:
        """Decrypt a frame: what comes back is, byte for byte, what was sealed.

        Parameters
        ----------
        frame : bytes-like
            A whole encrypted frame.
        key : Key
            What it was asked for by.
        out : writable bytes-like, optional
            As many bytes as the plain frame has (`opened_size`), apart from `frame`; by default they are allocated.

        Returns
        -------
        memoryview
            The plain frame: the front of `out`.

        Raises
        ------
        CorruptFrameError
            As `FrameReader` for a bad head; reason ``"key"``: the ring has not the key; ``"unsupported"``: an
            envelope of another version; ``"authentication"``: it was altered, sealed for another key or tenant or with
            another master key, or never sealed at all. Nothing of it is then left in `out`.
        ConfigError
            A digest of the key has not 32 bytes.
        LayoutError
            `out` is too short, read-only or lies over `frame`.
        """
        from cryptography.exceptions import InvalidTag

        view = byte_view(frame).toreadonly()
        head = HeadBytes.read(view)
        if not head.header.encrypted:
            raise CorruptFrameError(
                "the frame is not encrypted, so nothing vouches for it; empty a store when you turn encryption on",
                reason="authentication",
            )
        envelope = Envelope.parse(view[head.header.head_bytes :])
        message_key, identity = self._key_of(envelope), _identity(key)
        size = len(view) - STEP_BYTES - ENVELOPE_BYTES[envelope.version]
        if size > MAX_BYTES:
            raise CorruptFrameError(
                f"the frame would have {size} bytes, and of more than {MAX_BYTES} none is sealed", reason="length"
            )
        opened = head.decrypted(size)
        target = _target(out, size, view)
        front = _with_crc(opened.with_digests(message_key.masked(envelope.iv, head.digests())))
        body = target[len(front) :]
        start = head.header.head_bytes + len(envelope.pack())
        try:
            message_key.gcm.decrypt_into(envelope.iv, view[start:], head.data + identity, body)
        except InvalidTag:
            # The library has decrypted before it knew.
            np.frombuffer(body, np.uint8)[:] = 0
            raise CorruptFrameError(
                "the frame does not authenticate: it was altered, or sealed for another chunk, for another tenant or "
                "with another key",
                reason="authentication",
            ) from None
        target[: len(front)] = front
        return target

    def _key_of(self, envelope: Envelope) -> MessageKey:
        if envelope.key_id not in self._ring:
            wanted = "the key without id" if envelope.key_id is None else f"key {envelope.key_id}"
            raise CorruptFrameError(
                f"the frame was sealed with {wanted}, and the ring is {self._ring!r}; keep old keys in the key file",
                reason="key",
            )
        return self._ring.message_key(envelope.key_id, salt=self._salt, bits=self._bits)


def _target(out: Buffer | None, size: int, frame: memoryview) -> memoryview:
    """Return `size` writable bytes."""
    if out is None:
        return np.empty(size, np.uint8).data
    view = byte_view(out)
    if view.readonly or len(view) < size:
        raise LayoutError(f"out needs {size} writable bytes, got {len(view)}{' that are read-only' * view.readonly}")
    if np.may_share_memory(np.frombuffer(view, np.uint8), np.frombuffer(frame, np.uint8)):
        raise LayoutError("out lies over the frame; encryption is not done in place, give other memory")
    return view[:size]


def _identity(key: Key) -> bytes:
    """The two digests of a key, which are authenticated with the head."""
    namespace, digest = bytes(key.namespace), bytes(key.digest)
    if (len(namespace), len(digest)) != (32, 32):
        raise ConfigError(f"the digests of a key have 32 bytes each, got {len(namespace)} and {len(digest)}")
    return namespace + digest


def _with_crc(head: bytes) -> bytes:
    return head + crc32c(head).to_bytes(CRC_BYTES, "little")
