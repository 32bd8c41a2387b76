"""What a serde is: a memory object of KV in, a memory object of bytes out, and back.

A serde knows no store and no controller. The pair `Serializer` and `Deserializer` is what the author of one writes; the
`SerdeProcessor` around it is what stores and controllers drive.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kvcore.completion import TaskId
from kvcore.keys import Key
from kvcore.memory import MemoryObj, MemoryPlan

__all__ = [
    "BytesDeserializer",
    "BytesSerializer",
    "Deserializer",
    "LayoutDescGroup",
    "MemoryObjGroup",
    "MultiDeserializer",
    "MultiSerializer",
    "Serde",
    "SerdeProcessor",
    "Serializer",
    "serialized_layout_desc",
]

MemoryObjGroup: TypeAlias = tuple[MemoryObj | None, ...]
"""Objects that are serialised together, one for each slot; None for a slot that is absent."""
LayoutDescGroup: TypeAlias = tuple[MemoryPlan | None, ...]
"""What the objects of a group hold, slot by slot."""


class Serializer(abc.ABC):
    """Turns a memory object into bytes. Called from any thread, several at a time.

    Attributes
    ----------
    deterministic : bool
        Whether the same object under the same key gives the same bytes; encryption, which draws a nonce, does not.
    """

    deterministic: bool = True

    @abc.abstractmethod
    def serialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> int:
        """Write the bytes of an object; return how many.

        Parameters
        ----------
        src : MemoryObj
            Read-locked: dense chunks, or plain bytes for a step that is not the first of a chain. Its `KVMeta` say
            what the KV is.
        dst : MemoryObj
            Write-locked: plain bytes, at least as many as the estimate. ``dst.view()`` is a plain memoryview. It is
            not narrowed; who called does that.
        key : Key
            What the bytes will be filed under.

        Raises
        ------
        QuantizationError
            A value that the serde cannot hold.
        LayoutError, UnsupportedOpError
            It does not do objects of this layout or dtype.
        """

    @abc.abstractmethod
    def estimate_serialized_size(self, layout: MemoryPlan) -> int:
        """Return an upper bound on what `serialize` writes for any object of a layout.

        From extents, dtypes and rope parameters alone, whatever the values are and wherever in a sequence they stand;
        called once for a batch.

        Raises
        ------
        LayoutError, UnsupportedOpError
            As `serialize` does.
        """


class Deserializer(abc.ABC):
    """Turns bytes back into a memory object. Called from any thread, several at a time.

    Attributes
    ----------
    partial : bool
        Whether it may leave parts of an object as they are, because its frames do not hold them.
    """

    partial: bool = False

    @abc.abstractmethod
    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: Key) -> None:
        """Fill an object.

        Parameters
        ----------
        src : MemoryObj
            Read-locked plain bytes: what `serialize` wrote, in its used size.
        dst : MemoryObj
            Write-locked: laid out as the object that was serialised. Unspecified after an error.
        key : Key
            What the bytes are filed under.

        Raises
        ------
        CorruptFrameError
            The bytes are short, altered, foreign, or of another object: a miss.
        UnsupportedOpError
            They are right, but this deserialiser does not read them.
        """


class BytesSerializer(Serializer):
    """A serialiser of bytes, frames mostly: a step of a chain that is not the first one. Its `src` is plain bytes."""


class BytesDeserializer(Deserializer):
    """The way back of a `BytesSerializer`. Its `dst` is plain bytes too, which it narrows to those that it wrote."""

    @abc.abstractmethod
    def estimate_deserialized_size(self, src: MemoryObj) -> int:
        """Return an upper bound on the bytes that `deserialize` makes of these; from no more than a look at them.

        Raises
        ------
        CorruptFrameError
            They are not what the serialiser writes.
        """


class MultiSerializer(abc.ABC):
    """Turns the objects of a group into bytes, as one.

    Attributes
    ----------
    group_size : int
        Slots of a group.
    deterministic : bool
        As that of `Serializer`.
    """

    group_size: int
    deterministic: bool = True

    @abc.abstractmethod
    def serialize(self, src: MemoryObjGroup, dst: MemoryObj, key: Key) -> int:
        """Write the bytes of a group; return how many. As `Serializer.serialize`.

        Raises
        ------
        ValueError
            A slot that is needed is None, or the group has not `group_size` slots. Nothing was written.
        """

    @abc.abstractmethod
    def estimate_serialized_size(self, layout: LayoutDescGroup) -> int:
        """Return an upper bound on what `serialize` writes; a slot of None counts nothing."""


class MultiDeserializer(abc.ABC):
    """Turns bytes back into the objects of a group.

    Attributes
    ----------
    group_size : int
        Slots of a group.
    partial : bool
        As that of `Deserializer`; a slot of None does not count.
    """

    group_size: int
    partial: bool = False

    @abc.abstractmethod
    def deserialize(self, src: MemoryObj, dst: MemoryObjGroup, key: Key) -> None:
        """Fill the objects of a group; a slot of None is left alone. As `Deserializer.deserialize`.

        Raises
        ------
        ValueError
            The group has not `group_size` slots.
        """


class Serde(NamedTuple):
    """The two directions of one serde."""

    serializer: Serializer | MultiSerializer
    deserializer: Deserializer | MultiDeserializer


class SerdeProcessor(abc.ABC):
    """Serialises and deserialises batches, without making the caller wait.

    Sources stay read-locked and destinations write-locked until the task's answer was taken. Objects are `MemoryObj`,
    or `MemoryObjGroup` where the serde takes groups.

    Attributes
    ----------
    group_size : int or None
        Slots of a group; None where objects come singly.
    partial : bool
        That of the deserialiser: objects that are to be filled must hold something already.
    """

    group_size: int | None = None
    partial: bool = False

    @abc.abstractmethod
    def estimate_serialized_size(self, layout: MemoryPlan | LayoutDescGroup) -> int:
        """Return an upper bound on the bytes of an object of this layout. See `Serializer`."""

    @abc.abstractmethod
    def submit_serialize(
        self, srcs: Sequence[MemoryObj | MemoryObjGroup], dsts: Sequence[MemoryObj], keys: Sequence[Key]
    ) -> TaskId:
        """Begin to serialise objects, and return at once. Each `dst` is narrowed to the bytes written.

        Raises
        ------
        ValueError
            There are not as many sources, destinations and keys, or groups where objects are wanted, or the other way.
        """

    @abc.abstractmethod
    def submit_deserialize(
        self, srcs: Sequence[MemoryObj], dsts: Sequence[MemoryObj | MemoryObjGroup], keys: Sequence[Key]
    ) -> TaskId:
        """Begin to deserialise objects, and return at once. Raises as `submit_serialize` does."""

    @abc.abstractmethod
    def query_serialize_result(self, task_id: TaskId) -> bool | None:
        """Return whether all objects of a task were serialised; None while it is under way.

        The final answer is given exactly once.

        Raises
        ------
        TaskError
            The id is unknown, or its answer was given.
        """

    @abc.abstractmethod
    def query_deserialize_result(self, task_id: TaskId) -> bool | None:
        """Return whether all objects of a task were deserialised; as `query_serialize_result`."""

    @abc.abstractmethod
    def take_serialize_results(
        self, task_id: TaskId, *, timeout: float | None = 0.0
    ) -> tuple[int | Exception, ...] | None:
        """Return for each object its bytes or its error; None while the task is under way after `timeout` seconds.

        Given exactly once, and instead of `query_serialize_result`. A `timeout` of None waits for as long as it takes.
        """

    @abc.abstractmethod
    def take_deserialize_results(
        self, task_id: TaskId, *, timeout: float | None = 0.0
    ) -> tuple[Exception | None, ...] | None:
        """Return for each object None or its error; as `take_serialize_results`."""

    @abc.abstractmethod
    def get_serialize_event_fd(self) -> int:
        """Return a descriptor that is readable while finished serialise tasks wait.

        It is signalled once for each task, after its result is visible.
        """

    @abc.abstractmethod
    def get_deserialize_event_fd(self) -> int:
        """Return the one for deserialise tasks: another one."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for the tasks under way, and free threads and descriptors; calling it again does nothing."""


def serialized_layout_desc(layout: MemoryPlan | LayoutDescGroup, serde: SerdeProcessor) -> MemoryPlan:
    """Return the layout of a buffer for what a serde writes: flat bytes, as many as its estimate."""
    return MemoryPlan.of_bytes(serde.estimate_serialized_size(layout))
