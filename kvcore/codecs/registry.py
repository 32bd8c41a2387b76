"""Codecs by name: the presets that users type, and the numbers that frames record.

A codec's module is imported when it is first asked for.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from kvcore.codecs.contract import Codec
from kvcore.errors import ConfigError, CorruptFrameError

__all__ = ["PRESETS", "codec_of", "get_codec"]

PRESETS: dict[str, tuple[int, int, str]] = {
    "raw": (0, 0, "kvcore.codecs.raw:Raw"),
    "high": (1, 1, "kvcore.codecs.kvs1:Kvs1"),
    "balanced": (1, 2, "kvcore.codecs.kvs1:Kvs1"),
    "small": (1, 3, "kvcore.codecs.kvs1:Kvs1"),
    "lossless": (2, 0, "kvcore.codecs.lossless:Lossless"),
    "int8": (3, 8, "kvcore.codecs.grouped:Grouped"),
    "int4": (3, 4, "kvcore.codecs.grouped:Grouped"),
    "int2": (3, 2, "kvcore.codecs.grouped:Grouped"),
    "fp8": (4, 0, "kvcore.codecs.fp8:Fp8"),
    "fp8_e5m2": (4, 1, "kvcore.codecs.fp8:Fp8"),
    "cachegen": (5, 0, "kvcore.codecs.cachegen:CacheGen"),
    "turboquant_k8v4": (6, 0x84, "kvcore.codecs.turboquant:TurboQuant"),
    "turboquant_4bit": (6, 0x44, "kvcore.codecs.turboquant:TurboQuant"),
    "turboquant_k3v4": (6, 0x34, "kvcore.codecs.turboquant:TurboQuant"),
    "turboquant_3bit": (6, 0x33, "kvcore.codecs.turboquant:TurboQuant"),
    "asym_k16_v8": (7, 0, "kvcore.codecs.asym:Asym"),
    "asym_k_elsewhere_v8": (7, 1, "kvcore.codecs.asym:Asym"),
}
"""Preset -> codec id, preset number, and the class that is called with the preset's name. Numbers are for ever."""

_EXACT = ("raw", "lossless")


def get_codec(name: str, **options: Any) -> Codec:
    """Return the codec of a preset.

    Parameters
    ----------
    name : str
        Of `PRESETS`.
    **options
        Of the codec: ``levels=(c_K, c_V)`` for KVS1's presets, say. All lossy ones take ``nonfinite``, the policy for
        NaN and infinities: ``"error"`` (the default) or ``"saturate"``, those of KVS1 ``"raw"`` too.

    Raises
    ------
    ConfigError
        There is no such preset, or an option that the codec does not have.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"there is no codec {name!r}; {hint}there are {', '.join(PRESETS)}")
    if "nonfinite" in options and name in _EXACT:
        raise ConfigError(f"codec {name} holds every value as it is, NaN too: it takes no policy nonfinite")
    module, _, factory = PRESETS[name][2].partition(":")
    try:
        codec: Codec = getattr(importlib.import_module(module), factory)(name, **options)
    except TypeError as error:
        raise ConfigError(f"codec {name}: {error}") from error
    return codec


def codec_of(codec_id: int, preset: int) -> Codec:
    """Return the codec that a frame's header names.

    Raises
    ------
    CorruptFrameError
        With reason ``"unsupported"``: this build has no such codec.
    """
    for name, (number, point, _) in PRESETS.items():
        if (number, point) == (codec_id, preset):
            return get_codec(name)
    raise CorruptFrameError(
        f"the frame has codec {codec_id}, preset {preset}, which this build does not know", reason="unsupported"
    )
