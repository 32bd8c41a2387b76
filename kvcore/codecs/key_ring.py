"""Master keys, and the message keys that are derived from them: what `kvcore.codecs.encryption` seals frames with.

No message, `repr` or exception of this module holds key material.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

from kvcore.codecs.key_file import KEY_BYTES, format_keys, parse_keys, read_private, write_private
from kvcore.errors import ConfigError

__all__ = ["MESSAGES", "KeyRing", "MessageKey", "require_cryptography"]

MESSAGES = 2**32
"""Messages that one key may seal with random 96-bit IVs (NIST SP 800-38D, section 8.3)."""

_INFOS = "kvcore aesgcm v1 {bits}\n", "kvcore aesgcm v1 {bits} digests\n"
"""With the tenant's salt after it: what HKDF tells the key of messages by, and that of digests."""
_WARN_AT = MESSAGES // 2

logger = logging.getLogger(__name__)


class MessageKey:
    """The key that messages are encrypted with: one master key, one tenant. Counts what it seals.

    Parameters
    ----------
    key_id : int or None
        Of the master key.
    key, mask_key : bytes
        16 or 32 bytes each.

    Attributes
    ----------
    gcm : AESGCM
        The library's cipher of the key.
    seals : int
        Messages that this process has sealed with it.
    """

    __slots__ = ("_lock", "_mask", "gcm", "key_id", "seals")

    def __init__(self, key_id: int | None, key: bytes, mask_key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.ciphers.algorithms import AES

        self.key_id = key_id
        self.gcm = AESGCM(key)
        self.seals = 0
        self._mask = AES(mask_key)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MessageKey(key_id={self.key_id}, bits={self._mask.key_size}, seals={self.seals})"

    def masked(self, iv: bytes, data: bytes) -> bytes:
        """Return `data` in AES counter mode under the mask key, from the block `iv` and zeros: its own inverse."""
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        return Cipher(self._mask, CTR(iv + bytes(4))).encryptor().update(data)

    def count(self) -> None:
        """Count a message before it is sealed: warn at half of `MESSAGES`, once.

        Raises
        ------
        ConfigError
            The key has sealed all the messages that it may.
        """
        with self._lock:
            if self.seals >= MESSAGES:
                raise ConfigError(f"{self._name} has sealed {MESSAGES} frames, and may seal no more; rotate it")
            self.seals += 1
            warn = self.seals == _WARN_AT
        if warn:
            logger.warning(
                "%s has sealed %d frames in this process, of the %d that it may in all processes together; rotate it",
                self._name, _WARN_AT, MESSAGES,
            )  # fmt: skip

    @property
    def _name(self) -> str:
        return "the master key without id" if self.key_id is None else f"master key {self.key_id}"


class KeyRing:
    """Master keys by id: the current one seals, all of them open.

    Parameters
    ----------
    masters : mapping of int or None to bytes
        32-byte keys. None is the one key without an id, of envelopes of version 1.
    current : int or None
        Which of them seals.

    Raises
    ------
    ConfigError
        A key of another length, an id that is no u32, no current key, or the same key under two ids.
    """

    __slots__ = ("_current", "_derived", "_lock", "_masters")

    def __init__(self, masters: Mapping[int | None, bytes], current: int | None) -> None:
        for key_id, key in masters.items():
            if key_id is not None and not 0 <= key_id < 2**32:
                raise ConfigError(f"the id of a master key is in 0..2**32 - 1, got {key_id}")
            if len(key) != KEY_BYTES:
                raise ConfigError(f"master key {key_id} has {len(key)} bytes, and must have {KEY_BYTES}")
        if current not in masters:
            raise ConfigError(f"the current master key is {current}, and the ring has {_listed(masters)}")
        if len({bytes(key) for key in masters.values()}) != len(masters):
            raise ConfigError(f"two of the master keys {_listed(masters)} are the same: a new id needs a new key")
        self._masters = {key_id: bytes(key) for key_id, key in masters.items()}
        self._current = current
        self._derived: dict[tuple[int | None, str, int], MessageKey] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"KeyRing(current={self._current}, ids=[{_listed(self._masters)}])"

    def __contains__(self, key_id: int | None) -> bool:
        """Whether the ring has the master key of an id."""
        return key_id in self._masters

    @property
    def current(self) -> int | None:
        """Id of the key that seals; None for the key without one."""
        return self._current

    def message_key(self, key_id: int | None, *, salt: str, bits: int) -> MessageKey:
        """Return the message key of a master key and a tenant: ``HKDF-SHA256`` (RFC 5869), derived once.

        The number of bits goes into the derivation: HKDF alone would make the shorter key the front of the longer one.

        Parameters
        ----------
        key_id : int or None
            Of a key that the ring has; `KeyError` otherwise.
        salt : str
            The tenant's.
        bits : int
            128 or 256.
        """
        wanted = (key_id, salt, bits)
        with self._lock:
            if wanted not in self._derived:
                master = self._masters[key_id]
                keys = (_derive(master, (info.format(bits=bits) + salt).encode(), bits // 8) for info in _INFOS)
                self._derived[wanted] = MessageKey(key_id, *keys)
            return self._derived[wanted]

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> KeyRing:
        """Read master keys from a file that only its owner may read.

        Parameters
        ----------
        path : str or Path
            32 raw bytes or 64 hexadecimal digits: one key without id. Or JSON: keys with ids.

        Raises
        ------
        ConfigError
            The file is missing, others may read or write it, or it is no file of keys.
        """
        data = read_private(path)
        try:
            return cls(*parse_keys(data))
        except ConfigError as error:
            raise ConfigError(f"{path} is no file of master keys: {error}") from None

    @classmethod
    def generate(cls, path: str | os.PathLike[str], key_id: int | None = 1) -> KeyRing:
        """Make a new master key in a new file, mode 0600.

        Parameters
        ----------
        path : str or Path
            Must not exist.
        key_id : int or None
            Its id; None makes a key without one.

        Raises
        ------
        ConfigError
            The file exists or cannot be written, or the id is no u32.
        """
        ring = cls({key_id: secrets.token_bytes(KEY_BYTES)}, key_id)
        write_private(path, format_keys(ring._masters, key_id))
        return ring

    @classmethod
    def rotate(cls, path: str | os.PathLike[str]) -> KeyRing:
        """Add a new master key to a file and make it the current one; those that were there go on opening frames.

        The file is replaced in one step. Processes that share a store must all have read it before the first frame is
        sealed with the new key, or they count misses until they do.

        Raises
        ------
        ConfigError
            As `from_file` and `generate` do.
        """
        path = Path(path).resolve()  # of a link, what it leads to is replaced
        old = cls.from_file(path)
        new_id = 1 + max((key_id for key_id in old._masters if key_id is not None), default=0)
        ring = cls({**old._masters, new_id: secrets.token_bytes(KEY_BYTES)}, new_id)
        write_private(path, format_keys(ring._masters, new_id), replace=True)
        return ring


def require_cryptography() -> None:
    """Raise `ConfigError`, naming the extra, unless the library is installed, and new enough to write in place."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError('encryption needs the package cryptography: pip install "kvcore[crypto]"') from error
    if not hasattr(AESGCM, "encrypt_into"):
        raise ConfigError('encryption needs cryptography 47 or later: pip install --upgrade "kvcore[crypto]"')


def _derive(master: bytes, info: bytes, nbytes: int) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=nbytes, salt=None, info=info).derive(master)


def _listed(masters: Mapping[int | None, bytes]) -> str:
    return ", ".join("one without id" if key_id is None else str(key_id) for key_id in masters) or "none"
