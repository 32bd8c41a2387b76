"""Serde ``asym_k16_v8``: keys bit for bit, values as scaled 8-bit floats, together or apart."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.codecs.registry import get_codec
from kvcore.errors import ConfigError
from kvcore.ops import Backend
from kvcore.serde.builtin import accepted_codecs, codec_serde
from kvcore.serde.contract import Serde
from kvcore.serde.frames import FrameDeserializer, FrameSerializer
from kvcore.serde.slots import SLOTS, SlotsDeserializer, SlotsSerializer

__all__ = ["asym_k16_v8"]

_MODES = {"kv": "asym_k16_v8", "v_only": "asym_k16_v8", "k_elsewhere": "asym_k_elsewhere_v8"}


def asym_k16_v8(
    backend: Backend,
    *,
    mode: str = "kv",
    scope: str = "head",
    page_tokens: int | None = None,
    slots: bool = False,
    nonfinite: str = "error",
    accept: Sequence[str] | None = None,
) -> Serde:
    """Keys as they are, values as e4m3fn with scales.

    Parameters
    ----------
    backend : Backend
    mode : {"kv", "v_only", "k_elsewhere"}
        Store both; or values alone, of objects (or slots) that hold nothing else; or values alone of objects that hold
        both, whose keys are left as they are when values come back.
    scope : {"tensor", "head", "page"}
        What shares a scale, see `kvcore.codecs.asym.Asym`. Frames of every scope are read, whichever is written.
    page_tokens : int, optional
        With scope ``"page"``.
    slots : bool
        Take groups ``(K, V)`` of one object for each part, in place of objects with both. In mode ``v_only`` K may be
        None, and is not touched.
    nonfinite : {"error", "saturate"}
        Of values.
    accept : sequence of str, optional
        As for every serde of a codec. What omits keys is read in mode ``k_elsewhere`` alone, unless named here.

    Raises
    ------
    ConfigError
        A value that an option does not have.
    """
    if mode not in _MODES:
        raise ConfigError(f"serde asym_k16_v8 has no mode {mode!r}; it has {', '.join(_MODES)}")
    codec = get_codec(_MODES[mode], scope=scope, page_tokens=page_tokens, nonfinite=nonfinite)
    if not slots:
        return codec_serde(backend, codec, accept)
    stored = ("V",) if mode == "v_only" else SLOTS
    reader = FrameDeserializer(backend, accepted_codecs(codec, accept))
    return Serde(SlotsSerializer(FrameSerializer(codec, backend), stored), SlotsDeserializer(reader, stored))
