"""Bits that a serde takes for an element of KV, as they were measured."""

from __future__ import annotations

from kvcore.dtypes import dtype_name, is_float, to_dtype
from kvcore.errors import ConfigError
from kvcore.serde import SerdeConfig

__all__ = ["BITS", "LOSSLESS_BITS", "MEASURED_ON", "bits_of", "codec_of"]

MEASURED_ON = "SmolLM2-135M (30 layers, 3 KV heads of 64 channels), one document in chunks of 256 tokens"
"""What the figures were measured on: docs/codecs.md has the table, and a test holds the two together."""

BITS = {
    "asym_k16_v8": 12.03,
    "lossless": 10.41,
    "int8": 9.00,
    "fp8": 8.03,
    "fp8_e5m2": 8.03,
    "turboquant_k8v4": 6.25,
    "int4": 5.00,
    "high": 4.61,
    "turboquant_4bit": 4.25,
    "turboquant_k3v4": 3.75,
    "balanced": 3.51,
    "turboquant_3bit": 3.25,
    "cachegen per_head": 3.10,
    "int2": 3.00,
    "small": 2.80,
    "cachegen": 2.63,
}
"""Bits of an element of bfloat16 by codec, directory and alignment included."""

LOSSLESS_BITS = {"bfloat16": BITS["lossless"], "float16": 13.4, "float8_e4m3fn": 6.4, "float8_e5m2": 5.5}
"""Bits of `lossless` by element type."""

_ANY_FLOAT = frozenset(BITS) - {"asym_k16_v8", "lossless"}
"""Codecs whose integers do not depend on the type that an element had."""


def codec_of(serde: SerdeConfig) -> str:
    """Return what codes the KV in a serde, by the names of `BITS` and ``"raw"``.

    A serde may also be given by the name of its codec, ``balanced`` say. Of a chain the first step counts: those behind
    it, such as encryption, take bytes as they are.

    Raises
    ------
    ConfigError
        The serde is not one whose bits are known here.
    """
    options = serde.kwargs
    if serde.type == "chain":
        steps = options.get("steps") or ()
        if not steps:
            raise ConfigError("a chain has steps, at least one: there is nothing to size in an empty one")
        return codec_of(SerdeConfig.of(steps[0]))
    name = {
        "naive": "raw",
        "aesgcm": "raw",
        "kvs1": str(options.get("preset", "balanced")),
        "kivi": f"int{options.get('bits', 4)}",
        "fp8": "fp8_e5m2" if str(options.get("fp8_dtype", "")).endswith("e5m2") else "fp8",
        "turboquant": f"turboquant_{options.get('preset', '4bit')}",
        "cachegen": "cachegen per_head" if options.get("per_head") else "cachegen",
    }.get(serde.type, serde.type)
    if name != "raw" and name not in BITS:
        given = " ".join([serde.type, *map(str, options.values())])
        raise ConfigError(
            f"how much serde {given} takes has not been measured; there are figures of raw, {', '.join(BITS)}"
        )
    return name


def bits_of(serde: SerdeConfig, dtype: str) -> float:
    """Return the bits that a serde takes for an element of a type.

    Raises
    ------
    ConfigError
        The serde does not take elements of the type, or it has not been measured.
    """
    codec, element = codec_of(serde), to_dtype(dtype)
    name = dtype_name(element)
    if codec == "raw":
        return 8.0 * element.itemsize
    if codec == "lossless" and name in LOSSLESS_BITS:
        return LOSSLESS_BITS[name]
    if codec in BITS and name == "bfloat16":
        return BITS[codec]
    if codec in _ANY_FLOAT and is_float(element) and name in ("float16", "float32"):
        return BITS[codec]
    if codec == "asym_k16_v8" and name == "float16":
        return BITS[codec]
    raise ConfigError(
        f"serde {serde.type} on {name}: not measured, or the codec does not take it; see the element types in "
        "docs/codecs.md"
    )
