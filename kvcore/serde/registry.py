"""Serdes by name: those of kvcore, those a program registers, and those that packages bring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kvcore.errors import ConfigError
from kvcore.ops import Backend, open_backend
from kvcore.registry import Registry
from kvcore.serde.config import SerdeConfig
from kvcore.serde.contract import BytesSerializer, Serde, SerdeProcessor
from kvcore.serde.processor import AsyncSerdeProcessor

__all__ = [
    "ENTRY_POINT_GROUP",
    "create_serde",
    "create_serde_processor",
    "create_step",
    "get_registered_serde_types",
    "register_serde_factory",
]

ENTRY_POINT_GROUP = "kvcore.serdes"
"""Group of the entry points by which a package brings serdes: the name, and the factory."""

_BUILTIN = "kvcore.serde.builtin"

_SERDES: Registry[Callable[..., Serde]] = Registry(
    "serde",
    ENTRY_POINT_GROUP,
    {
        "raw": f"{_BUILTIN}:raw",
        "naive": f"{_BUILTIN}:raw",
        "lossless": f"{_BUILTIN}:lossless",
        "kvs1": f"{_BUILTIN}:kvs1",
        "fp8": f"{_BUILTIN}:fp8",
        "int8": f"{_BUILTIN}:int8",
        "int4": f"{_BUILTIN}:int4",
        "int2": f"{_BUILTIN}:int2",
        "kivi": f"{_BUILTIN}:kivi",
        "cachegen": f"{_BUILTIN}:cachegen",
        "turboquant": f"{_BUILTIN}:turboquant",
        "asym_k16_v8": "kvcore.serde.asym:asym_k16_v8",
        "aesgcm": "kvcore.serde.aesgcm:aesgcm",
        "chain": "kvcore.serde.chain:chain",
    },
)


def register_serde_factory(name: str, factory: Callable[..., Serde]) -> None:
    """Make a serde known in this process.

    Parameters
    ----------
    name : str
    factory : callable
        Called with the backend of the memory that objects are in, and with the options of the configuration as keyword
        arguments; returns a `Serde`. Called once for each store that is wrapped.

    Raises
    ------
    ConfigError
        There is a serde of that name.
    """
    _SERDES.register(name, factory)


def get_registered_serde_types() -> tuple[str, ...]:
    """Return the names that `create_serde` knows, of installed packages too. Imports none of those."""
    return _SERDES.names()


def create_serde(config: SerdeConfig | Mapping[str, Any] | str, backend: Backend | None = None) -> Serde:
    """Return the two directions of a serde. One that takes bytes, such as encryption, gets ``raw`` before it.

    Parameters
    ----------
    config : SerdeConfig, mapping or str
        As `SerdeConfig.of` takes it.
    backend : Backend, optional
        Of the memory that objects are in; without it the one that `kvcore.open_backend` chooses for host memory.

    Raises
    ------
    ConfigError
        There is no such serde (the message lists all), or an option that it does not have (the message lists those), or
        its value means nothing.
    """
    config = SerdeConfig.of(config)
    backend = open_backend() if backend is None else backend
    step = create_step(config, backend)
    if isinstance(step.serializer, BytesSerializer):
        from kvcore.serde.chain import chained

        return chained([step], [config.type], backend)
    return step


def create_step(config: SerdeConfig, backend: Backend) -> Serde:
    """Return what a factory makes, to be a step of a chain: a serde of KV, or of bytes. Raises as `create_serde`."""
    factory = _SERDES.find(config.type)
    _check_options(config, factory)
    try:
        serde = factory(backend, **config.kwargs)
    except (TypeError, AttributeError) as error:  # of a value that is a number where a text is wanted, say
        raise ConfigError(f"serde {config.type} cannot be made with options {config.kwargs!r}: {error}") from error
    if not isinstance(serde, Serde):
        raise ConfigError(f"the factory of serde {config.type} returned {type(serde).__name__}, not a Serde")
    return serde


def create_serde_processor(
    config: SerdeConfig | Mapping[str, Any] | str, backend: Backend | None = None, max_workers: int = 1
) -> SerdeProcessor:
    """Return an `AsyncSerdeProcessor` of the serde that `create_serde` returns.

    Raises
    ------
    ConfigError
        As `create_serde` does, or `max_workers` is below 1.
    """
    serde = create_serde(config, backend)
    return AsyncSerdeProcessor(serde.serializer, serde.deserializer, max_workers)


def _check_options(config: SerdeConfig, factory: Callable[..., Serde]) -> None:
    """Refuse options that a factory does not take, or lacks, before it is called; and ``"false"``, which is true."""
    options = list(inspect.signature(factory).parameters.values())[1:]
    if any(option.kind is option.VAR_KEYWORD for option in options):
        return
    named = {option.name: option for option in options}
    takes = f"serde {config.type} takes {', '.join(named) or 'no options'}"
    for name, value in config.kwargs.items():
        if name not in named:
            raise ConfigError(f"{takes}, not {name!r}")
        if isinstance(named[name].default, bool) and not isinstance(value, bool):
            raise ConfigError(f"option {name} of serde {config.type} is true or false, not {value!r}")
    for name, option in named.items():
        if option.default is option.empty and name not in config.kwargs:
            raise ConfigError(f"{takes}, and needs {name!r}")
