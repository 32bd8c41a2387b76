"""Chains: the bytes of one serde are the next one's source. The first step takes KV, all later ones bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias, cast

from kvcore.errors import ConfigError
from kvcore.keys import Key
from kvcore.memory import MemoryObj, MemoryPlan
from kvcore.ops import Backend
from kvcore.serde.builtin import raw
from kvcore.serde.config import SerdeConfig
from kvcore.serde.contract import (
    BytesDeserializer,
    BytesSerializer,
    Deserializer,
    LayoutDescGroup,
    MemoryObjGroup,
    MultiDeserializer,
    MultiSerializer,
    Serde,
    Serializer,
)
from kvcore.serde.scratch import Scratch

__all__ = [
    "ChainDeserializer",
    "ChainSerializer",
    "MultiChainDeserializer",
    "MultiChainSerializer",
    "chain",
    "chained",
]

Object: TypeAlias = MemoryObj | MemoryObjGroup
LaterSteps: TypeAlias = Sequence[tuple[BytesSerializer, BytesDeserializer]]


def chain(backend: Backend, *, steps: Sequence[SerdeConfig | Mapping[str, Any] | str]) -> Serde:
    """Several serdes, one after the other: the factory of type ``chain``.

    Parameters
    ----------
    backend : Backend
    steps : sequence of SerdeConfig, mapping or str
        At least one. Chains among them count as their steps. Where the first one takes bytes, ``raw`` goes before it.

    Raises
    ------
    ConfigError
        There is no step, a later one takes KV, or one cannot be made.
    """
    from kvcore.serde.registry import create_step

    configs = _flattened(steps)
    if not configs:
        raise ConfigError('a chain has at least one step, as in {"type": "chain", "steps": ["kvs1", ...]}')
    return chained([create_step(config, backend) for config in configs], [config.type for config in configs], backend)


def chained(serdes: Sequence[Serde], names: Sequence[str], backend: Backend) -> Serde:
    """Return the chain of serdes that are there already; `names` are theirs, for errors. Raises as `chain` does."""
    serdes, names = list(serdes), list(names)
    if isinstance(serdes[0].serializer, BytesSerializer):
        serdes.insert(0, raw(backend))
        names.insert(0, "raw")
    later: list[tuple[BytesSerializer, BytesDeserializer]] = []
    for name, (forth, back) in zip(names[1:], serdes[1:], strict=True):
        if not (isinstance(forth, BytesSerializer) and isinstance(back, BytesDeserializer)):
            raise ConfigError(
                f"step {name} of the chain {', '.join(names)} takes KV, and what comes before it makes bytes of KV; "
                "let it be the first step"
            )
        later.append((forth, back))
    first = serdes[0]
    if not later:
        return first
    if isinstance(first.serializer, MultiSerializer):
        return Serde(MultiChainSerializer(first, later), MultiChainDeserializer(first, later))
    return Serde(ChainSerializer(first, later), ChainDeserializer(first, later))


def _flattened(steps: Sequence[SerdeConfig | Mapping[str, Any] | str]) -> list[SerdeConfig]:
    if isinstance(steps, (str, Mapping)) or not isinstance(steps, Sequence):
        raise ConfigError(f"the steps of a chain are a list of serdes, got {steps!r}")
    configs: list[SerdeConfig] = []
    for config in map(SerdeConfig.of, steps):
        if config.type != "chain":
            configs.append(config)
        elif set(config.kwargs) == {"steps"}:
            configs += _flattened(config.kwargs["steps"])
        else:
            raise ConfigError(
                f"a chain takes steps, and nothing else: {', '.join(config.kwargs) or 'no options'} given"
            )
    return configs


class _Forth:
    """What the two serialisers share: `first` makes a frame, the later steps go on from it."""

    def __init__(self, first: Serde, later: LaterSteps) -> None:
        self._first = cast(Any, first.serializer)
        self._later = [forth for forth, _ in later]
        self._scratch = Scratch()
        self.deterministic = all(step.deterministic for step in (self._first, *self._later))

    def _bounds(self, layout: MemoryPlan | LayoutDescGroup) -> list[int]:
        """The most bytes that each step writes."""
        bounds = [int(self._first.estimate_serialized_size(layout))]
        for step in self._later:
            bounds.append(step.estimate_serialized_size(MemoryPlan.of_bytes(bounds[-1])))
        return bounds

    def _run(self, src: Object, layout: MemoryPlan | LayoutDescGroup, dst: MemoryObj, key: Key) -> int:
        with ExitStack() as lent:
            step, source = self._first, src
            for next_step, bound in zip(self._later, self._bounds(layout), strict=False):
                target = lent.enter_context(self._scratch.bytes(bound))
                target.set_used_size(step.serialize(source, target, key))
                step, source = next_step, target
            return int(step.serialize(source, dst, key))


class _Back:
    """What the two deserialisers share."""

    def __init__(self, first: Serde, later: LaterSteps) -> None:
        self._first = cast(Any, first.deserializer)
        self._later = [back for _, back in reversed(later)]
        self._scratch = Scratch()
        self.partial = bool(self._first.partial)

    def _run(self, src: MemoryObj, dst: Object, key: Key) -> None:
        with ExitStack() as lent:
            source = src
            for step in self._later:
                target = lent.enter_context(self._scratch.bytes(step.estimate_deserialized_size(source)))
                step.deserialize(source, target, key)
                source = target
            self._first.deserialize(source, dst, key)


class ChainSerializer(_Forth, Serializer):
    """Serialises by several steps; estimates compose, and it is deterministic if all steps are."""

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> int:
        """See `Serializer.serialize`."""
        return self._run(src, src.plan, dst, key)

    def estimate_serialized_size(self, layout: MemoryPlan) -> int:
        """See `Serializer.estimate_serialized_size`."""
        return self._bounds(layout)[-1]


class ChainDeserializer(_Back, Deserializer):
    """Undoes the steps of a `ChainSerializer`, the last one first."""

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> None:
        """See `Deserializer.deserialize`."""
        self._run(src, dst, key)


class MultiChainSerializer(_Forth, MultiSerializer):
    """A `ChainSerializer` whose first step takes groups."""

    def __init__(self, first: Serde, later: LaterSteps) -> None:
        super().__init__(first, later)
        self.group_size = self._first.group_size

    def serialize(self, src: MemoryObjGroup, dst: MemoryObj, key: Key) -> int:
        """See `MultiSerializer.serialize`."""
        return self._run(src, tuple(None if one is None else one.plan for one in src), dst, key)

    def estimate_serialized_size(self, layout: LayoutDescGroup) -> int:
        """See `MultiSerializer.estimate_serialized_size`."""
        return self._bounds(layout)[-1]


class MultiChainDeserializer(_Back, MultiDeserializer):
    """A `ChainDeserializer` whose first step gives groups."""

    def __init__(self, first: Serde, later: LaterSteps) -> None:
        super().__init__(first, later)
        self.group_size = self._first.group_size

    def deserialize(self, src: MemoryObj, dst: MemoryObjGroup, key: Key) -> None:
        """See `MultiDeserializer.deserialize`."""
        self._run(src, dst, key)
