"""Serde ``drop_tokens``: an example of a serde that gives up tokens. Off until a program calls `register`.

It keeps the first and the last tokens of each chunk, as attention sinks and recent tokens are what many methods keep
(Xiao, Tian, Chen, Han and Lewis, "Efficient Streaming Language Models with Attention Sinks", 2023, arXiv 2309.17453),
and drops those between. Dropped tokens come back as zeros. **A zero key is not an absent token**: its score is 0, and
it takes its share of the softmax. Whoever loads such a chunk must mask the dropped tokens; `kept_ranges` says which
ones are there.

Its frames do not pass for whole chunks: each run of kept tokens is a group of its own, with its true position, so a
reader of whole chunks, or of other options, refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvcore.codecs.frame import GroupInfo
from kvcore.codecs.registry import get_codec
from kvcore.errors import ConfigError
from kvcore.keys import Key
from kvcore.memory import MemoryObj, MemoryPlan
from kvcore.ops import Backend
from kvcore.serde.builtin import accepted_codecs
from kvcore.serde.contract import Deserializer, Serde, Serializer
from kvcore.serde.frames import FrameDeserializer, FrameSerializer
from kvcore.serde.groups import UNKNOWN_POSITION, check_namespace, groups_of, tokens_of
from kvcore.serde.registry import get_registered_serde_types, register_serde_factory

__all__ = ["DroppingDeserializer", "DroppingSerializer", "drop_tokens", "kept_ranges", "register"]


def register() -> None:
    """Make ``drop_tokens`` known to `create_serde` in this process; calling it again does nothing."""
    if "drop_tokens" not in get_registered_serde_types():
        register_serde_factory("drop_tokens", drop_tokens)


def drop_tokens(
    backend: Backend, *, first: int = 4, last: int = 124, codec: str = "raw", accept: Sequence[str] | None = None
) -> Serde:
    """Keep the first and the last tokens of each chunk.

    Parameters
    ----------
    backend : Backend
    first, last : int
        How many; 0 or more, together at least 1. A chunk of no more tokens is kept whole.
    codec : str
        Of the frame that holds them.
    accept : sequence of str, optional
        As for every serde of a codec.

    Raises
    ------
    ConfigError
        The numbers keep nothing, or there is no such codec.
    """
    if not (isinstance(first, int) and isinstance(last, int)) or min(first, last) < 0 or first + last < 1:
        raise ConfigError(f"drop_tokens keeps the first and last tokens of a chunk, got {first=}, {last=}")
    used = get_codec(codec)
    reader = FrameDeserializer(backend, accepted_codecs(used, accept))
    return Serde(
        DroppingSerializer(FrameSerializer(used, backend), first, last), DroppingDeserializer(reader, first, last)
    )


def kept_ranges(tokens: int, first: int, last: int) -> list[tuple[int, int]]:
    """Return the half-open ranges of a chunk's tokens that are kept."""
    if first + last >= tokens:
        return [(0, tokens)]
    return [span for span in ((0, first), (tokens - last, tokens)) if span[0] < span[1]]


def _kept(plan: MemoryPlan, first: int, last: int) -> Iterator[tuple[int, tuple[int, int], GroupInfo]]:
    """Yield the number of a chunk, the tokens that are kept, and their group, for each run of such tokens."""
    for number, group in enumerate(groups_of(plan)):
        for start, stop in kept_ranges(group.rows, first, last):
            known = group.base_position != UNKNOWN_POSITION
            position = group.base_position + start if known else UNKNOWN_POSITION
            yield number, (start, stop), replace(group, rows=stop - start, base_position=position)


class DroppingSerializer(Serializer):
    """Writes frames of the tokens that are kept; see `drop_tokens`."""

    def __init__(self, serializer: FrameSerializer, first: int, last: int) -> None:
        self._serializer = serializer
        self._options = first, last

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> int:
        """See `Serializer.serialize`."""
        check_namespace(src.metas, key)
        kept = list(_kept(src.plan, *self._options))
        rows = [src.rows(number).select(tokens=span) for number, span, _ in kept]
        return self._serializer.serialize_rows([group for _, _, group in kept], rows, tokens_of(src.plan), dst, key)

    def estimate_serialized_size(self, layout: MemoryPlan) -> int:
        """See `Serializer.estimate_serialized_size`."""
        groups = [group for _, _, group in _kept(layout, *self._options)]
        return self._serializer.estimate_groups(groups, tokens_of(layout))


class DroppingDeserializer(Deserializer):
    """Reads the frames of a `DroppingSerializer` of the same options; dropped tokens become zeros."""

    def __init__(self, deserializer: FrameDeserializer, first: int, last: int) -> None:
        self._deserializer = deserializer
        self._options = first, last

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> None:
        """See `Deserializer.deserialize`."""
        check_namespace(dst.metas, key)
        kept = list(_kept(dst.plan, *self._options))
        rows = [dst.rows(number).select(tokens=span) for number, span, _ in kept]
        groups = [group for _, _, group in kept]
        self._deserializer.deserialize_rows(src, groups, rows, tokens_of(dst.plan), key)
        first, last = self._options
        for number, desc in enumerate(dst.plan.descs):
            if first + last < desc.tokens:
                dropped = dst.rows(number).select(tokens=(first, desc.tokens - last))
                for part, layer in dropped.planes():
                    dropped.bytes_view(part, layer)[...] = 0
