"""`FrameSerializer` and `FrameDeserializer`: the KV of a memory object to one frame, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.codecs import raw
from kvcore.codecs.contract import Codec, omitted_parts
from kvcore.codecs.frame import (
    FramePlan,
    FrameReader,
    FrameWriter,
    GroupInfo,
    LayerEntry,
    encode_frame,
    frame_bound,
    plan_frame,
)
from kvcore.codecs.registry import PRESETS, get_codec
from kvcore.errors import CorruptFrameError, LayoutError, UnsupportedOpError
from kvcore.keys import Key
from kvcore.memory import MemoryObj, MemoryPlan
from kvcore.ops import Backend, on_host, open_backend
from kvcore.rows import RowLayout
from kvcore.serde.contract import Deserializer, Serializer
from kvcore.serde.groups import check_namespace, groups_of, rows_by_group_part, tokens_of

__all__ = ["EXACT_CODECS", "FrameDeserializer", "FrameSerializer"]

EXACT_CODECS = ("raw", "lossless")
"""Codecs whose frames everybody can take: they hold every bit."""


class FrameSerializer(Serializer):
    """Writes the KV of a memory object as a frame of one codec.

    Parameters
    ----------
    codec : Codec or str
        Or its preset's name.
    backend : Backend, optional
        Of the memory that objects are in; without it the one that `kvcore.open_backend` chooses for host memory.

    Raises
    ------
    ConfigError
        There is no such codec.
    UnsupportedOpError
        The backend lacks an op that every frame takes.
    """

    def __init__(self, codec: Codec | str, backend: Backend | None = None) -> None:
        self.codec = get_codec(codec) if isinstance(codec, str) else codec
        self.backend = _opened(backend)

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> int:
        """See `Serializer.serialize`.

        Raises
        ------
        LayoutError
            `dst` is no buffer of plain bytes or too small for the frame, or the KV is of another namespace than the
            key. Nothing has been written.
        """
        check_namespace(src.metas, key)
        plan = src.plan
        rows = [src.rows(group) for group in range(len(plan.descs))]
        return self.serialize_rows(groups_of(plan), rows, tokens_of(plan), dst, key)

    def serialize_rows(
        self, groups: Sequence[GroupInfo], rows: Sequence[RowLayout], tokens: int, dst: MemoryObj, key: Key
    ) -> int:
        """Write a frame of groups whose rows are bound already, for each the dense rows of all its layers."""
        out = _plain(dst, "destination")
        if self.codec.codec_id == 0:
            plan = plan_frame(groups, tokens=tokens, namespace=key.namespace, key=key.digest, codec=self.codec)
            return self._gather(FrameWriter(plan, out), plan, rows)
        frame = encode_frame(
            self.backend,
            groups,
            rows,
            tokens=tokens,
            namespace=key.namespace,
            key=key.digest,
            codec=self.codec,
            out=out,
        )
        return len(frame)

    def estimate_serialized_size(self, layout: MemoryPlan) -> int:
        """See `Serializer.estimate_serialized_size`: exact where sizes do not depend on values."""
        return self.estimate_groups(groups_of(layout), tokens_of(layout))

    def estimate_groups(self, groups: Sequence[GroupInfo], tokens: int) -> int:
        """Return the same of the groups that `serialize_rows` takes."""
        return frame_bound(groups, tokens=tokens, codec=self.codec)

    def _gather(self, writer: FrameWriter, plan: FramePlan, rows: Sequence[RowLayout]) -> int:
        """Copy rows straight into their frame."""
        views = [writer.layer_view(index) for index in range(len(plan.layers))]
        for source, target in _pairs(plan.groups, plan.layers, rows, views):
            self.backend.convert_layout(source, out=target)
        return len(writer.finish(self.backend.digest))


class FrameDeserializer(Deserializer):
    """Reads frames into memory objects.

    Parameters
    ----------
    backend : Backend, optional
        As in `FrameSerializer`.
    codecs : sequence of str, optional
        The codecs whose frames it takes: who stored a chunk first decided how, and a coarser frame than wanted is no
        use. All that there are if not given, but for those that omit parts of a chunk: they must be named.

    Raises
    ------
    ConfigError
        There is no such codec.
    """

    def __init__(self, backend: Backend | None = None, codecs: Sequence[str] | None = None) -> None:
        self.backend = _opened(backend)
        self._any_whole = codecs is None
        self.codecs = frozenset(PRESETS if codecs is None else codecs)
        for name in sorted(self.codecs - PRESETS.keys()):
            get_codec(name)  # which says what there is
        named = () if codecs is None else self.codecs
        self.partial = any(getattr(get_codec(name), "omits", ()) for name in named)

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> None:
        """See `Deserializer.deserialize`. A part that the frame's codec omits is left as it is in `dst`.

        Raises
        ------
        UnsupportedOpError
            The frame's codec is not accepted, or the backend lacks its ops.
        """
        check_namespace(dst.metas, key)
        plan = dst.plan
        rows = [dst.rows(group) for group in range(len(plan.descs))]
        self.deserialize_rows(src, groups_of(plan), rows, tokens_of(plan), key)

    def deserialize_rows(
        self, src: MemoryObj, groups: Sequence[GroupInfo], rows: Sequence[RowLayout], tokens: int, key: Key
    ) -> None:
        """Fill the rows of groups that a frame must have; otherwise as `deserialize`."""
        reader = self._reader(src, key, groups)
        if reader.header.tokens != tokens:
            raise CorruptFrameError(
                f"the frame holds {reader.header.tokens} tokens, the object has {tokens}", reason="layout"
            )
        if self._any_whole and any(omitted_parts(reader.codec, group) for group in groups):
            raise UnsupportedOpError(
                f"codec: frames of {reader.codec.name} do not hold all parts; name it among codecs to fill the others"
            )
        if reader.codec.name not in self.codecs:
            raise UnsupportedOpError(
                f"codec: the frame is stored as {reader.codec.name}, and only {', '.join(sorted(self.codecs))} "
                "are accepted here"
            )
        if reader.codec.codec_id == 0:
            self._scatter(reader, rows)
        else:
            reader.decode(self.backend, rows)

    def groups(self, src: MemoryObj, key: Key) -> tuple[GroupInfo, ...]:
        """Return the groups of the frame of a key, from its head alone; raises as `deserialize` does."""
        return self._reader(src, key, None).groups

    def _reader(self, src: MemoryObj, key: Key, groups: Sequence[GroupInfo] | None) -> FrameReader:
        return FrameReader(
            _plain(src, "source"),
            expect_namespace=key.namespace,
            expect_key=key.digest,
            expect_groups=groups,
            digest=self.backend.digest,
        )

    def _scatter(self, reader: FrameReader, rows: Sequence[RowLayout]) -> None:
        """Copy rows straight out of their frame, once all of it is verified."""
        views = reader.layer_views(range(len(reader.layers)))
        for target, source in _pairs(reader.groups, reader.layers, rows, views):
            self.backend.convert_layout(source, out=target)


def _opened(backend: Backend | None) -> Backend:
    found = open_backend() if backend is None else backend
    for op in ("convert_layout", "digest"):
        found.resolve(op)
    return on_host(found)


def _plain(obj: MemoryObj, what: str) -> memoryview:
    if obj.descs:
        raise LayoutError(f"the {what} of a frame is a buffer of plain bytes, not chunks of {obj.descs[0].layout}")
    return obj.view()


def _pairs(
    groups: Sequence[GroupInfo], layers: Sequence[LayerEntry], rows: Sequence[RowLayout], views: Sequence[memoryview]
) -> Iterator[tuple[RowLayout, RowLayout]]:
    """Yield each group's chunk in memory, and the same in a raw frame whose stored layers have these bytes."""
    for number, group in enumerate(groups):
        framed = raw.bind_layers(
            group, [view for entry, view in zip(layers, views, strict=True) if entry.group == number]
        )
        yield rows_by_group_part(rows[number], group), framed
