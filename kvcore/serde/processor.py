"""`AsyncSerdeProcessor`: any serde, run by a few threads, with answers to poll or wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from kvcore.completion import CompletionQueue, TaskId, attempt
from kvcore.errors import ConfigError
from kvcore.keys import Key
from kvcore.memory import MemoryObj, MemoryPlan
from kvcore.serde.contract import (
    Deserializer,
    LayoutDescGroup,
    MemoryObjGroup,
    MultiDeserializer,
    MultiSerializer,
    SerdeProcessor,
    Serializer,
)
from kvcore.workers import Priority, Workers

__all__ = ["AsyncSerdeProcessor"]

R = TypeVar("R")
S = TypeVar("S")
D = TypeVar("D")


class AsyncSerdeProcessor(SerdeProcessor):
    """Runs a serde on threads of its own. Use as a context manager, or call `close`.

    Loads go before stores, object by object: a load that is submitted while a large batch is serialised waits for the
    objects that are being worked on, not for the batch. What goes wrong with one object does not keep the others of its
    batch from being done.

    Parameters
    ----------
    serializer : Serializer or MultiSerializer
    deserializer : Deserializer or MultiDeserializer
        Both for single objects, or both for groups of one size.
    max_workers : int
        Threads for both directions together; they are started when there is work.

    Attributes
    ----------
    on_step : callable, optional
        Called, on a worker, with ``"serialize"`` or ``"deserialize"``, the bytes of the stored form and the seconds
        that it took, for each object that was done. It must not raise.

    Raises
    ------
    ConfigError
        The two do not go together, or `max_workers` is below 1.
    """

    def __init__(
        self,
        serializer: Serializer | MultiSerializer,
        deserializer: Deserializer | MultiDeserializer,
        max_workers: int = 1,
    ) -> None:
        sizes = [getattr(side, "group_size", None) for side in (serializer, deserializer)]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"a serialiser of groups of {sizes[0]} and a deserialiser of {sizes[1]} are no serde")
        self.group_size = sizes[0]
        self.partial = deserializer.partial
        self.serializer = serializer
        self.deserializer = deserializer
        self.on_step: Callable[[str, int, float], None] | None = None
        name = type(serializer).__name__
        self._workers = Workers(max_workers, name=f"kvcore serde {name}")
        self._serialized: CompletionQueue[int] = CompletionQueue(f"serialize by {name}")
        self._deserialized: CompletionQueue[None] = CompletionQueue(f"deserialize by {type(deserializer).__name__}")

    def estimate_serialized_size(self, layout: MemoryPlan | LayoutDescGroup) -> int:
        """See `SerdeProcessor.estimate_serialized_size`."""
        return self.serializer.estimate_serialized_size(layout)  # type: ignore[arg-type] # the caller knows which

    def submit_serialize(
        self, srcs: Sequence[MemoryObj | MemoryObjGroup], dsts: Sequence[MemoryObj], keys: Sequence[Key]
    ) -> TaskId:
        """See `SerdeProcessor.submit_serialize`."""
        self._check(srcs, dsts, keys, grouped=srcs, single=dsts)
        return _submit(self._workers, Priority.STORE, self._serialized, self._serialize, srcs, dsts, keys)

    def submit_deserialize(
        self, srcs: Sequence[MemoryObj], dsts: Sequence[MemoryObj | MemoryObjGroup], keys: Sequence[Key]
    ) -> TaskId:
        """See `SerdeProcessor.submit_deserialize`."""
        self._check(srcs, dsts, keys, grouped=dsts, single=srcs)
        return _submit(self._workers, Priority.LOAD, self._deserialized, self._deserialize, srcs, dsts, keys)

    def query_serialize_result(self, task_id: TaskId) -> bool | None:
        """See `SerdeProcessor.query_serialize_result`."""
        return _all_good(self._serialized.take(task_id))

    def query_deserialize_result(self, task_id: TaskId) -> bool | None:
        """See `SerdeProcessor.query_deserialize_result`."""
        return _all_good(self._deserialized.take(task_id))

    def take_serialize_results(
        self, task_id: TaskId, *, timeout: float | None = 0.0
    ) -> tuple[int | Exception, ...] | None:
        """See `SerdeProcessor.take_serialize_results`."""
        return self._serialized.wait(task_id, timeout)

    def take_deserialize_results(
        self, task_id: TaskId, *, timeout: float | None = 0.0
    ) -> tuple[Exception | None, ...] | None:
        """See `SerdeProcessor.take_deserialize_results`."""
        return self._deserialized.wait(task_id, timeout)

    def get_serialize_event_fd(self) -> int:
        """See `SerdeProcessor.get_serialize_event_fd`; -1 once it is closed."""
        return self._serialized.event_fd

    def get_deserialize_event_fd(self) -> int:
        """See `SerdeProcessor.get_deserialize_event_fd`; -1 once it is closed."""
        return self._deserialized.event_fd

    def close(self) -> None:
        """See `SerdeProcessor.close`. Answers can still be taken; nothing more can be submitted."""
        self._workers.close()
        self._serialized.close()
        self._deserialized.close()

    def __enter__(self) -> AsyncSerdeProcessor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serialize(self, src: MemoryObj | MemoryObjGroup, dst: MemoryObj, key: Key) -> int:
        began = time.perf_counter()
        nbytes = self.serializer.serialize(src, dst, key)  # type: ignore[arg-type] # `_check` has seen to it
        dst.set_used_size(nbytes)
        if self.on_step is not None:
            self.on_step("serialize", nbytes, time.perf_counter() - began)
        return nbytes

    def _deserialize(self, src: MemoryObj, dst: MemoryObj | MemoryObjGroup, key: Key) -> None:
        began = time.perf_counter()
        self.deserializer.deserialize(src, dst, key)  # type: ignore[arg-type] # as above
        if self.on_step is not None:
            self.on_step("deserialize", src.used_size, time.perf_counter() - began)

    def _check(
        self,
        srcs: Sequence[object],
        dsts: Sequence[object],
        keys: Sequence[Key],
        *,
        grouped: Sequence[object],
        single: Sequence[object],
    ) -> None:
        """Refuse a batch that does not fit together, before anything of it is begun."""
        if not len(srcs) == len(dsts) == len(keys):
            raise ConfigError(
                f"a batch has as many sources, destinations and keys, got {len(srcs)}, {len(dsts)} and {len(keys)}"
            )
        for i, (many, one) in enumerate(zip(grouped, single, strict=True)):
            if not isinstance(one, MemoryObj):
                raise ConfigError(f"object {i}: the bytes are one memory object, not {type(one).__name__}")
            if self.group_size is None:
                if not isinstance(many, MemoryObj):
                    raise ConfigError(f"object {i}: this serde takes single objects, not {type(many).__name__}")
            elif not isinstance(many, tuple) or len(many) != self.group_size:
                what = f"a group of {len(many)}" if isinstance(many, tuple) else type(many).__name__
                raise ConfigError(f"object {i}: this serde takes groups of {self.group_size}, not {what}")


def _submit(
    workers: Workers,
    priority: Priority,
    queue: CompletionQueue[R],
    call: Callable[[S, D, Key], R],
    srcs: Sequence[S],
    dsts: Sequence[D],
    keys: Sequence[Key],
) -> TaskId:
    task_id = queue.open(len(keys))

    def one(index: int, src: S, dst: D, key: Key) -> Callable[[], None]:
        def run() -> None:
            queue.set(task_id, index, attempt(call, src, dst, key))

        return run

    calls = [one(i, *parts) for i, parts in enumerate(zip(srcs, dsts, keys, strict=True))]
    try:
        workers.submit(priority, *calls)
    except BaseException:
        queue.discard(task_id)
        raise
    return task_id


def _all_good(results: tuple[object, ...] | None) -> bool | None:
    return None if results is None else not any(isinstance(result, Exception) for result in results)
