"""Every error kvcore raises on purpose.

A message says what happened, why, and what to do about it. All types derive from `KVCoreError`; where Python has a
type that callers already catch (`ValueError`, `IndexError`, `MemoryError`, ...) the error is that one too.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BackendLoadError",
    "ConfigError",
    "CorruptFrameError",
    "DeviceError",
    "KVCoreError",
    "LayoutError",
    "LeaseError",
    "NoBackendError",
    "OutOfMemoryError",
    "QuantizationError",
    "SlotError",
    "StoreError",
    "UnsupportedOpError",
]


class KVCoreError(Exception):
    """Base of all errors raised by kvcore."""


class ConfigError(KVCoreError, ValueError):
    """A setting, variable or argument has a value that means nothing."""


class NoBackendError(KVCoreError, LookupError):
    """No backend can serve the request; the message carries the whole candidate table."""


class BackendLoadError(KVCoreError, ImportError):
    """A backend was chosen and its code could not be loaded, or breaks the contract of a hook."""


class UnsupportedOpError(KVCoreError, NotImplementedError):
    """The backend does not do this op for this dtype, layout or architecture. Raised before anything is launched."""


class LayoutError(KVCoreError, ValueError):
    """A layout string means nothing, does not fit its tensors, or leaves an extent open. Names the axis at fault."""


class SlotError(KVCoreError, IndexError):
    """A slot or block index points outside the cache, or two tokens of one scatter share a target."""


class QuantizationError(KVCoreError, ValueError):
    """A value cannot be quantised under the policy in force (for example NaN under ``nonfinite="error"``)."""


class LeaseError(KVCoreError, RuntimeError):
    """A memory object was used after it was freed, freed twice, or narrowed to a size that does not fit."""


class OutOfMemoryError(KVCoreError, MemoryError):
    """An allocation was refused; the message says how much was asked for and how much there is."""


class DeviceError(KVCoreError, RuntimeError):
    """A device or its driver failed; the message names the ops that were queued, and so may have failed."""


class StoreError(KVCoreError, OSError):
    """A store could not do what was asked (disk full, path not writable, foreign directory); it stays consistent."""


class CorruptFrameError(KVCoreError, ValueError):
    """Bytes that were read are not the frame that was asked for.

    Parameters
    ----------
    message : str
        What is wrong, for people.
    reason : str
        What is wrong, for counters: ``"truncated"``, ``"foreign"`` (not a frame at all), ``"version"`` (a newer
        major), ``"crc"``, ``"digest"``, ``"length"`` (sizes that contradict each other), ``"identity"`` (another
        namespace or key), ``"layout"`` (well formed, but not the shape or dtype the reader expects),
        ``"unsupported"`` (a codec, table set, profile or envelope this build does not have), ``"encrypted"`` (its
        layers were asked for without its key), ``"key"`` (encrypted with a key that the ring does not hold),
        ``"authentication"`` (altered after it was encrypted, or encrypted with another key or for another chunk).
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        # The keyword-only argument would be lost on the way out of a worker process otherwise.
        return (_corrupt_frame_error, (self.args[0], self.reason))


def _corrupt_frame_error(message: str, reason: str) -> CorruptFrameError:
    return CorruptFrameError(message, reason=reason)
