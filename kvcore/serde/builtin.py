"""The serdes of one codec each: what a configuration's options mean. Nothing is implemented here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.codecs.contract import Codec
from kvcore.codecs.registry import get_codec
from kvcore.errors import ConfigError
from kvcore.ops import Backend
from kvcore.serde.contract import Serde
from kvcore.serde.frames import EXACT_CODECS, FrameDeserializer, FrameSerializer

__all__ = [
    "accepted_codecs",
    "cachegen",
    "codec_serde",
    "fp8",
    "int2",
    "int4",
    "int8",
    "kivi",
    "kvs1",
    "lossless",
    "raw",
    "turboquant",
]


def accepted_codecs(codec: Codec, accept: Sequence[str] | None) -> tuple[str, ...]:
    """Return the codecs whose frames a serde reads that writes those of `codec`; see `codec_serde`."""
    if isinstance(accept, str):
        raise ConfigError(f"accept is a list of codecs, as in [{accept!r}], got {accept!r}")
    accepted = tuple(dict.fromkeys([codec.name, *EXACT_CODECS])) if accept is None else tuple(accept)
    if codec.name not in accepted:
        raise ConfigError(
            f"the serde writes {codec.name} and would accept {', '.join(accepted)} only: add {codec.name!r} to accept"
        )
    return accepted


def codec_serde(backend: Backend, codec: Codec, accept: Sequence[str] | None = None) -> Serde:
    """Return the serde of a codec.

    Parameters
    ----------
    backend : Backend
    codec : Codec
    accept : sequence of str, optional
        The codecs whose frames it reads: its own, ``raw`` and ``lossless`` if not given.

    Raises
    ------
    ConfigError
        `accept` leaves out the codec that is written, or names one that there is not.
    """
    return Serde(FrameSerializer(codec, backend), FrameDeserializer(backend, accepted_codecs(codec, accept)))


def raw(backend: Backend, *, accept: Sequence[str] | None = None) -> Serde:
    """Bytes as they are."""
    return codec_serde(backend, get_codec("raw"), accept)


def lossless(backend: Backend, *, accept: Sequence[str] | None = None) -> Serde:
    """Every bit comes back, in fewer bytes."""
    return codec_serde(backend, get_codec("lossless"), accept)


def kvs1(
    backend: Backend,
    *,
    preset: str = "balanced",
    levels: Sequence[int] | None = None,
    nonfinite: str = "error",
    accept: Sequence[str] | None = None,
) -> Serde:
    """KVS1 at a preset: ``high``, ``balanced``, ``small``, or ``lossless``, which is its lossless point.

    `levels` are the model's two level constants, see `kvcore.codecs.kvs1.Kvs1`.
    """
    presets = ("high", "balanced", "small", "lossless")
    if preset not in presets:
        raise ConfigError(f"serde kvs1 has no preset {preset!r}; it has {', '.join(presets)}")
    if preset == "lossless":
        if levels is not None or nonfinite != "error":
            raise ConfigError("preset lossless holds every value as it is: it takes neither levels nor nonfinite")
        return lossless(backend, accept=accept)
    constants = None if levels is None else tuple(levels)
    return codec_serde(backend, get_codec(preset, levels=constants, nonfinite=nonfinite), accept)


def fp8(
    backend: Backend,
    *,
    fp8_dtype: str = "e4m3fn",
    scaled: bool = True,
    nonfinite: str = "error",
    accept: Sequence[str] | None = None,
) -> Serde:
    """8-bit floats with a scale for each layer, part and head; saturating. `fp8_dtype` is ``e4m3fn`` or ``e5m2``."""
    names = {"e4m3fn": "fp8", "e5m2": "fp8_e5m2"}
    name = names.get(fp8_dtype.removeprefix("float8_"))
    if name is None:
        raise ConfigError(f"serde fp8 has no fp8_dtype {fp8_dtype!r}; it has {', '.join(names)}")
    return codec_serde(backend, get_codec(name, scaled=scaled, nonfinite=nonfinite), accept)


def int8(backend: Backend, *, nonfinite: str = "error", accept: Sequence[str] | None = None) -> Serde:
    """Grouped integers of 8 bits, KIVI's way: keys by channel, values by token."""
    return codec_serde(backend, get_codec("int8", nonfinite=nonfinite), accept)


def int4(backend: Backend, *, nonfinite: str = "error", accept: Sequence[str] | None = None) -> Serde:
    """Grouped integers of 4 bits; see `int8`."""
    return codec_serde(backend, get_codec("int4", nonfinite=nonfinite), accept)


def int2(backend: Backend, *, nonfinite: str = "error", accept: Sequence[str] | None = None) -> Serde:
    """Grouped integers of 2 bits; see `int8`."""
    return codec_serde(backend, get_codec("int2", nonfinite=nonfinite), accept)


def kivi(backend: Backend, *, bits: int = 4, nonfinite: str = "error", accept: Sequence[str] | None = None) -> Serde:
    """Grouped integers by another name: of 8, 4 (unless given) or 2 bits; see `int8`."""
    if bits not in (8, 4, 2):
        raise ConfigError(f"serde kivi has 8, 4 or 2 bits, not {bits!r}")
    return codec_serde(backend, get_codec(f"int{bits}", nonfinite=nonfinite), accept)


def cachegen(
    backend: Backend,
    *,
    model: str = "",
    nlayers: int | None = None,
    config: Mapping[str, Any] | None = None,
    per_head: bool = False,
    nonfinite: str = "error",
    accept: Sequence[str] | None = None,
) -> Serde:
    """CacheGen's bins: of a known `model`, of any with `nlayers` layers, or as `config` says.

    `config` has the fields of `kvcore.codecs.cachegen.CacheGenConfig`; ``kspecs`` and ``vspecs`` are lists of
    ``[start_layer, end_layer, bins]``, or of objects with these names. With none of the three there are 32 bins for
    keys of the first 10 layers and values of the first 2, and 16 for all others.
    """
    from kvcore.codecs.cachegen import CacheGenConfig, QuantizationSpec

    bins: CacheGenConfig | None = None
    if config is not None:
        if model or nlayers is not None:
            raise ConfigError("serde cachegen takes its bins from config, or from model and nlayers, not from both")
        try:
            specs = {
                side: tuple(
                    QuantizationSpec(**spec) if isinstance(spec, Mapping) else QuantizationSpec(*spec)
                    for spec in config[side]
                )
                for side in ("kspecs", "vspecs")
            }
            bins = CacheGenConfig(**{**config, **specs})
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"config of serde cachegen has nlayers, kspecs and vspecs of [first, end, bins]: {error}"
            ) from error
    elif model or nlayers is not None:
        bins = CacheGenConfig.for_model(model, nlayers)
    codec = get_codec("cachegen", config=bins, per_head=per_head, nonfinite=nonfinite)
    return codec_serde(backend, codec, accept)


def turboquant(
    backend: Backend, *, preset: str = "4bit", nonfinite: str = "error", accept: Sequence[str] | None = None
) -> Serde:
    """Rotation and codebook: presets ``k8v4``, ``4bit``, ``k3v4``, ``3bit``."""
    presets = ("k8v4", "4bit", "k3v4", "3bit")
    if preset not in presets:
        raise ConfigError(f"serde turboquant has no preset {preset!r}; it has {', '.join(presets)}")
    return codec_serde(backend, get_codec(f"turboquant_{preset}", nonfinite=nonfinite), accept)
