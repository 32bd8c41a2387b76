"""`AsyncStore`: any store, without making the caller wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvcore.completion import CompletionQueue, TaskId, attempt
from kvcore.keys import Key
from kvcore.tiers.stores.contract import Buffer, Outcomes, Store, StoreStat
from kvcore.workers import Priority, Workers

__all__ = ["AsyncStore"]

T = TypeVar("T")


class AsyncStore:
    """A store driven by threads: batches in, answers through a `CompletionQueue`.

    Parameters
    ----------
    store : Store
        Stays the caller's, who closes it after this.
    max_workers : int
        Batches under way at a time.

    Notes
    -----
    Loads go before stores. Frames and buffers that were submitted stay as they are until the answer was taken.
    """

    def __init__(self, store: Store, *, max_workers: int = 2) -> None:
        self.store = store
        self._workers = Workers(max_workers, name=f"kvcore {store.name}")
        self._puts: CompletionQueue[int] = CompletionQueue(f"put to {store.name}")
        self._gets: CompletionQueue[memoryview | None] = CompletionQueue(f"get from {store.name}")
        self._stats: CompletionQueue[StoreStat | None] = CompletionQueue(f"stat of {store.name}")

    def submit_put(self, items: Sequence[tuple[Key, Buffer]], *, timeout: float | None = None) -> TaskId:
        """Begin to store frames. After `timeout` seconds what is not done is a `DeadlineError`."""
        return self._submit(self._puts, Priority.STORE, len(items), lambda: self.store.put_batch(items), timeout)

    def submit_get(self, keys: Sequence[Key], *, timeout: float | None = None) -> TaskId:
        """Begin to read frames."""
        return self._submit(self._gets, Priority.LOAD, len(keys), lambda: self.store.get_batch(keys), timeout)

    def submit_stat(self, keys: Sequence[Key], *, timeout: float | None = None) -> TaskId:
        """Begin to ask for the sizes of frames."""
        return self._submit(self._stats, Priority.LOAD, len(keys), lambda: self.store.stat_batch(keys), timeout)

    def query_put(self, task_id: TaskId, *, timeout: float | None = 0.0) -> tuple[int | Exception, ...] | None:
        """Return for each frame its bytes or its error, exactly once; None while under way after `timeout` seconds."""
        return self._puts.wait(task_id, timeout)

    def query_get(
        self, task_id: TaskId, *, timeout: float | None = 0.0
    ) -> tuple[memoryview | Exception | None, ...] | None:
        """Return for each key its frame, None for a miss, or its error; as `query_put`."""
        return self._gets.wait(task_id, timeout)

    def query_stat(
        self, task_id: TaskId, *, timeout: float | None = 0.0
    ) -> tuple[StoreStat | Exception | None, ...] | None:
        """Return for each key what `Store.stat` does, or its error; as `query_put`."""
        return self._stats.wait(task_id, timeout)

    def event_fds(self) -> tuple[int, int, int]:
        """Return the descriptors that become readable when puts, gets and stats finish; `os.read` takes the signals."""
        return self._puts.event_fd, self._gets.event_fd, self._stats.event_fd

    def close(self) -> None:
        """Wait for what is under way, and free threads and descriptors; calling it again does nothing."""
        self._workers.close()
        for queue in (self._puts, self._gets, self._stats):
            queue.close()

    def _submit(
        self,
        queue: CompletionQueue[T],
        priority: Priority,
        count: int,
        call: Callable[[], Outcomes[T]],
        timeout: float | None,
    ) -> TaskId:
        task_id = queue.open(count, timeout=timeout)

        def run() -> None:
            # A store of others may give too few outcomes: an error for each key, or nobody would ever have an answer.
            error = attempt(lambda: queue.set_all(task_id, call()))
            if error is not None:
                queue.fail(task_id, error)

        try:
            self._workers.submit(priority, run)
        except BaseException:
            queue.discard(task_id)
            raise
        return task_id
