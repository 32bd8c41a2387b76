"""Serdes as subjects: a chunk through `kvcore.serde`, as a tier stores it, and the bytes of the frame in between."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvcore.codecs.frame_reader import FrameReader
from kvcore.errors import ConfigError, CorruptFrameError
from kvcore.eval.subjects import Chunk, Stored, bind_layers, bytes_of
from kvcore.keys import StoreKey
from kvcore.layout import Layout
from kvcore.memory import BufferPool, KVMeta, LayoutDesc, MemoryObj
from kvcore.ops import Backend
from kvcore.serde.config import SerdeConfig
from kvcore.serde.contract import Deserializer, Serializer
from kvcore.serde.registry import create_serde

__all__ = ["SerdeSubject", "serde_name", "serde_subjects"]

_PREFIX = "serde "
_NAMESPACE = b"kvcore eval".ljust(32, b"\0")
_UNSAID = ("key_file", "salt", "tenant", "accept")  # options that change no value, and are nobody's business
_POOL_BYTES = 1 << 40  # as much as it takes: a chunk, its estimate and its copy are there at a time


class SerdeSubject:
    """A serde. Bytes are those that a store would keep: the whole frame, with its head, and an envelope if it has one.

    Parameters
    ----------
    config : SerdeConfig
    backend : Backend

    Attributes
    ----------
    name : str
        ``"serde "`` and what `serde_name` makes of its configuration.

    Raises
    ------
    ConfigError
        There is no such serde, an option means nothing to it, or it gives no whole chunks of keys and values back.
    """

    def __init__(self, config: SerdeConfig, backend: Backend) -> None:
        self.name = _PREFIX + serde_name(config)
        serializer, deserializer = create_serde(config, backend)
        if not (isinstance(serializer, Serializer) and isinstance(deserializer, Deserializer)):
            raise ConfigError(
                f"{self.name} takes keys and values in objects of their own; leave out the option that says so: chunks "
                "of both are measured"
            )
        if deserializer.partial:
            raise ConfigError(
                f"{self.name} stores no whole chunks: what it leaves out would be measured as lossless; give a serde "
                "that stores keys and values"
            )
        self._serializer, self._deserializer = serializer, deserializer
        self._pool = BufferPool(_POOL_BYTES)

    def store(self, backend: Backend, chunk: Chunk) -> Stored:
        """See `Subject.store`."""
        layers, heads, tokens, width = chunk.k.shape
        layout = Layout("LKTHD", L=layers, T=tokens, H=heads, D=width)
        desc = LayoutDesc(layout, {part: x.dtype for part, x in (("K", chunk.k), ("V", chunk.v))})
        meta = KVMeta(base_position=chunk.position, rope=chunk.rope)
        key = StoreKey(_NAMESPACE, chunk.position.to_bytes(32, "little"))
        k, v = np.empty_like(chunk.k), np.empty_like(chunk.v)
        with self._pool.allocate([desc], meta) as kv:
            backend.convert_layout(bind_layers(chunk.k, chunk.v), out=kv.rows())
            with self._pool.allocate_bytes(self._serializer.estimate_serialized_size(kv.plan)) as frame:
                frame.set_used_size(self._serializer.serialize(kv, frame, key))
                kv.bytes()[:] = 0  # what comes back is the frame's, and not what was there before
                self._deserializer.deserialize(frame, kv, key)
                backend.convert_layout(kv.rows(), out=bind_layers(k, v))
                k_bytes, v_bytes, apart = _shares(frame, key, backend)
        return Stored(k, v, k_bytes, v_bytes, apart)


def serde_subjects(given: Sequence[str | Mapping[str, Any]], backend: Backend) -> list[SerdeSubject]:
    """Return the subjects of serdes: names, or objects with a ``type``, as JSON or as mappings.

    Raises
    ------
    ConfigError
        As `SerdeSubject` does, or two of them have one name.
    """
    found = [SerdeSubject(SerdeConfig.of(one), backend) for one in given]
    names = [subject.name for subject in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--serde: {twice.removeprefix(_PREFIX)} is given twice; name each serde once")
    return found


def serde_name(config: SerdeConfig) -> str:
    """Return what people call a serde: ``kvs1 balanced``, ``fp8 fp8_dtype=e5m2``, ``kvs1 high + aesgcm``.

    Keys, salts and what is accepted are left out.
    """
    if config.type == "chain" and isinstance(config.kwargs.get("steps"), (list, tuple)):
        return " + ".join(serde_name(SerdeConfig.of(step)) for step in config.kwargs["steps"])
    words = [config.type]
    for option, value in config.kwargs.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str, separators=(",", ":"))
        if option not in _UNSAID:
            words.append(text if option == "preset" else f"{option}={text}")
    return " ".join(words)


def _shares(frame: MemoryObj, key: StoreKey, backend: Backend) -> tuple[float, float, bool]:
    """The bytes of keys and of values, and whether they can be told apart.

    What belongs to both they share: the head, alignment, an envelope. Of bytes that are no frame each has half.
    """
    nbytes = frame.used_size
    try:
        reader = FrameReader(frame.view(), expect_namespace=key.namespace, expect_key=key.digest, digest=backend.digest)
    except CorruptFrameError:  # a serde of somebody else need not write frames
        return nbytes / 2, nbytes / 2, False
    own = {"K": 0.0, "V": 0.0}
    for entry in reader.layers:
        group = reader.groups[entry.group]
        for index, part in enumerate(group.parts):
            segments = entry.segments[index * group.head_count : (index + 1) * group.head_count]
            if part.name not in own:
                return nbytes / 2, nbytes / 2, False
            own[part.name] += bytes_of([(segment.nbytes, segment.tiles) for segment in segments])
    shared = nbytes - sum(own.values())
    return own["K"] + shared / 2, own["V"] + shared / 2, True
