"""Serde ``aesgcm``: frames are encrypted, a later step of a chain. docs/encryption.md has keys, rotation and bounds."""

from __future__ import annotations

from kvcore.codecs.encryption import FrameCipher
from kvcore.codecs.key_ring import KeyRing
from kvcore.errors import ConfigError, LayoutError
from kvcore.keys import Key
from kvcore.memory import MemoryObj, MemoryPlan
from kvcore.ops import Backend
from kvcore.serde.contract import BytesDeserializer, BytesSerializer, Serde

__all__ = ["OpeningDeserializer", "SealingSerializer", "aesgcm"]


def aesgcm(
    backend: Backend,
    *,
    key_file: str | None = None,
    salt: str = "",
    tenant: str | None = None,
    bits: int = 256,
) -> Serde:
    """AES-GCM with a key for each tenant.

    Parameters
    ----------
    backend : Backend
        Not used: the cipher's library does the work.
    key_file : str
        See `KeyRing.from_file`.
    salt, tenant : str
        Two names of one thing, the tenant's salt; give one.
    bits : int
        128 or 256.

    Raises
    ------
    ConfigError
        No key file, or one that does not hold keys; both names of the salt; another number of bits; the library
        `cryptography` is not installed.
    """
    if not isinstance(key_file, str):
        raise ConfigError('serde aesgcm needs the path of a key file: {"type": "aesgcm", "key_file": "/path/to/keys"}')
    if tenant is not None and salt:
        raise ConfigError("serde aesgcm takes salt or tenant, which are two names of one thing, not both")
    cipher = FrameCipher(KeyRing.from_file(key_file), salt=salt if tenant is None else tenant, bits=bits)
    return Serde(SealingSerializer(cipher), OpeningDeserializer(cipher))


class SealingSerializer(BytesSerializer):
    """Seals frames. Not deterministic: each frame gets a nonce of its own.

    Parameters
    ----------
    cipher : FrameCipher
    """

    deterministic = False

    def __init__(self, cipher: FrameCipher) -> None:
        self._cipher = cipher

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> int:
        """See `Serializer.serialize`."""
        return len(self._cipher.seal(_bytes(src), key, _bytes(dst)))

    def estimate_serialized_size(self, layout: MemoryPlan) -> int:
        """See `Serializer.estimate_serialized_size`; exact."""
        return self._cipher.sealed_size(layout.nbytes)


class OpeningDeserializer(BytesDeserializer):
    """Opens sealed frames.

    Parameters
    ----------
    cipher : FrameCipher
    """

    def __init__(self, cipher: FrameCipher) -> None:
        self._cipher = cipher

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> None:
        """See `Deserializer.deserialize`."""
        dst.set_used_size(len(self._cipher.open(_bytes(src), key, _bytes(dst))))

    def estimate_deserialized_size(self, src: MemoryObj) -> int:
        """See `BytesDeserializer.estimate_deserialized_size`."""
        return self._cipher.opened_size(src.used_size)


def _bytes(obj: MemoryObj) -> memoryview:
    if obj.descs:
        raise LayoutError(f"frames are encrypted, not chunks of {obj.descs[0].layout}: let a codec come first")
    return obj.view()
