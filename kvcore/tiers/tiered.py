"""`TieredCache`: host memory in front of stores, behind one interface: reserve, commit, lookup, load, release."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

from kvcore.completion import TaskId, attempt
from kvcore.errors import ConfigError, LeaseError, StoreError
from kvcore.keys import Key
from kvcore.memory import MemoryPlan
from kvcore.tiers.host_tier import HostKey, HostTier
from kvcore.tiers.l1 import WriteLease
from kvcore.tiers.lookup import HOST, TierLookup
from kvcore.tiers.moves import Mover
from kvcore.tiers.observer import TierCounters, TierObserver, TierStats
from kvcore.tiers.overview import TierHealth, TierInfo, clear_host, clear_tier, describe_host, describe_tier, health_of
from kvcore.tiers.prefetch_controller import MAX_IN_FLIGHT, Found, PrefetchController
from kvcore.tiers.store_controller import StoreController, StoredIn, check_store_policy
from kvcore.tiers.store_tier import Origins, StoreTier, Unusable
from kvcore.workers import Priority

__all__ = ["TieredCache"]


class TieredCache:
    """Memory objects in several tiers.

    Parameters
    ----------
    host : HostTier
    tiers : sequence of StoreTier, optional
        The fastest first; none for host memory alone.
    store_policy : {"default", "write_through", "buffer_only"}
        ``"default"``: what is committed stays in host memory, and goes to all stores in the background.
        ``"write_through"``: `commit` waits until it is there. ``"buffer_only"``: host memory is a staging buffer, and
        objects leave it once they are stored, or read.
    max_in_flight : int
        Loads at a time.
    observer : TierObserver, optional
        Told what happens, after the counters of `stats`; a `TierCounters` is these counters.

    Raises
    ------
    ConfigError
        No such policy; two tiers of one name, or one called ``"host"``; a serde of groups of objects, where tiers hold
        single ones, or one that does not store all of an object; or ``"buffer_only"`` without a store.

    Notes
    -----
    Thread-safe. `close` stores what was committed. The host tier's arena, the stores and serdes are the caller's, who
    closes them afterwards; those of `open_tiers` are closed with the cache.
    """

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[StoreTier] = (),
        *,
        store_policy: str = "default",
        max_in_flight: int = MAX_IN_FLIGHT,
        observer: TierObserver | None = None,
    ) -> None:
        names = [HOST, *(tier.name for tier in tiers)]
        if len(set(names)) != len(names):
            raise ConfigError(f"tiers need names of their own, got {', '.join(names)}; give each one a name")
        for tier in tiers:
            group = tier.store.serde.group_size
            if group is not None:
                raise ConfigError(
                    f"the serde of tier {tier.name} takes groups of {group} objects, and tiers hold single ones; give "
                    "it a serde of single objects"
                )
            if tier.store.serde.partial:
                raise ConfigError(
                    f"the serde of tier {tier.name} leaves parts of an object as they are, and there is nothing in the "
                    "host memory that it would fill; give it a serde that stores whole objects"
                )
        self._policy = check_store_policy(store_policy)
        self._temporary = self._policy == "buffer_only"
        if self._temporary and all(tier.read_only for tier in tiers):
            raise ConfigError("store policy buffer_only needs a store to put things into, and there is none")
        self.host, self.tiers = host, tuple(tiers)
        self.on_close: Callable[[], None] | None = None
        """Called at the end of each `close`, to close what was made for this cache."""
        self._counters = observer if isinstance(observer, TierCounters) else TierCounters(observer)
        self._unusable = unusable = Unusable()
        origins = Origins(host)
        self._moves = Mover(host, tiers, self._counters, unusable, origins)
        self._stores = StoreController(host, tiers, self._counters, unusable)
        self._lookup = TierLookup(host, tiers, self._counters, unusable)
        self._loads = PrefetchController(
            host,
            self._lookup,
            tiers,
            self._counters,
            unusable,
            copy=self._stores.copy,
            origins=origins,
            max_in_flight=max_in_flight,
            retention="temporary" if self._temporary else "keep",
        )
        host.on_evict = lambda chunks, nbytes: self._counters.evict(HOST, chunks, nbytes)

    # --- storing

    def reserve(self, plans: Mapping[Key, MemoryPlan], *, timeout: float = 0.0) -> dict[HostKey, WriteLease[HostKey]]:
        """Reserve host memory for objects that are to be stored; fill it, and `commit` or `cancel`.

        Returns
        -------
        dict of key to WriteLease
            What is in host memory already, or is being written by somebody else, is left out.

        Raises
        ------
        OutOfMemoryError
            There is no room for all of them, after eviction and `timeout` seconds; none is reserved.
        """
        return self.host.reserve_write(plans, temporary=self._temporary, timeout=timeout)

    def commit(self, leases: Sequence[WriteLease[HostKey]]) -> TaskId:
        """Make objects visible, and store them as the policy says.

        Returns
        -------
        TaskId
            For `stored`, or `forget_stored`.
        """
        task_id = self._stores.submit(leases)
        if self._policy == "write_through":
            self._stores.wait(task_id)
        return task_id

    def cancel(self, leases: Iterable[WriteLease[HostKey]]) -> None:
        """Give reservations up."""
        for lease in leases:
            self.host.cancel_write(lease)

    def stored(self, task_id: TaskId, *, timeout: float | None = None) -> tuple[StoredIn | Exception, ...] | None:
        """Return for each object of a commit where it went, exactly once; None if it is under way after `timeout` s."""
        return self._stores.query(task_id, timeout=timeout)

    def forget_stored(self, task_id: TaskId) -> None:
        """Say that nobody will ask for a commit; failures are counted all the same."""
        self._stores.forget(task_id)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was committed or promoted is in the stores; return whether it is."""
        return self._stores.flush(timeout)

    # --- loading

    def lookup(self, keys: Sequence[Key]) -> list[str]:
        """Return the tiers of the leading objects that are somewhere, up to the first that is nowhere."""
        return self._lookup.lookup(keys)

    def missing(self, keys: Sequence[Key]) -> list[int]:
        """Return the places in `keys` of objects that are in no tier."""
        return [i for i, tier in enumerate(self._lookup.locate(keys)) if tier is None]

    def stat(self, keys: Sequence[Key]) -> list[tuple[str, int] | Exception | None]:
        """Return for each object the fastest store that has it, and the bytes of its frame there.

        An object that is in host memory alone has the bytes that it takes there. Where no store could be asked, the
        answer is the first one's error; where one could, and none has it, None.
        """
        return self._lookup.stat(keys)

    def load(
        self, keys: Sequence[Key], plans: Sequence[MemoryPlan], *, timeout: float | None = None
    ) -> list[Found | Exception | None]:
        """Bring a prefix into host memory and lock it for reading.

        Returns
        -------
        list of Found or Exception
            Those of the leading objects that could be had; behind them, if it was not all, what went wrong with the
            next one, or None if it is nowhere. Give each lease back with `release`.
        """
        return self.loaded(self.begin_load(keys, plans, timeout=timeout))

    def begin_load(self, keys: Sequence[Key], plans: Sequence[MemoryPlan], *, timeout: float | None = None) -> TaskId:
        """Begin what `load` does; ask `loaded`, or `forget_load`."""
        return self._loads.submit(keys, plans, hold=True, priority=Priority.LOAD, timeout=timeout)

    def loaded(self, task_id: TaskId) -> list[Found | Exception | None]:
        """Wait for a load; return what `load` does, exactly once."""
        return self._leading(self._loads.query(task_id, timeout=None) or ())

    def forget_load(self, task_id: TaskId) -> None:
        """Say that nobody will ask for a load, or for a prefetch."""
        self._loads.forget(task_id)

    def release(self, found: Found) -> None:
        """End a read.

        Raises
        ------
        LeaseError
            It took longer than a read may: what was read must not be used.
        """
        if found.lease is not None:
            self.host.finish_read(found.lease)

    def prefetch(self, keys: Sequence[Key], plans: Sequence[MemoryPlan], *, timeout: float | None = None) -> TaskId:
        """Begin to bring a prefix into host memory, for a `load` to come; ask `prefetched`, or `forget_load`."""
        return self._loads.submit(keys, plans, timeout=timeout)

    def prefetched(
        self, task_id: TaskId, *, timeout: float | None = 0.0
    ) -> tuple[Found | Exception | None, ...] | None:
        """Return where each object was, exactly once; None while it is under way after `timeout` seconds."""
        return self._loads.query(task_id, timeout=timeout)

    @property
    def prefetch_event_fd(self) -> int:
        """The descriptor that is readable while finished prefetches wait."""
        return self._loads.event_fd

    # --- the rest

    def delete(self, keys: Sequence[Key]) -> dict[str, Exception]:
        """Remove objects from all tiers that are not read-only.

        Those that are in use stay in host memory, and what is on its way to a store arrives there.

        Returns
        -------
        dict of str to Exception
            What went wrong, by tier; empty if all is well.
        """
        self.host.delete(keys)
        failed: dict[str, Exception] = {}
        for tier in (tier for tier in self.tiers if not tier.read_only):
            outcomes = attempt(tier.store.store.delete_batch, keys)
            for outcome in [outcomes] if isinstance(outcomes, Exception) else outcomes:
                if isinstance(outcome, Exception):
                    failed.setdefault(tier.name, outcome)
                    self._counters.failure(tier.name, "delete", outcome)
        return failed

    def move(
        self,
        keys: Sequence[Key],
        source: str,
        target: str,
        *,
        keep: bool = False,
        plans: Sequence[MemoryPlan] | None = None,
    ) -> list[int | Exception | None]:
        """Move objects from one tier to another, and wait until that is done.

        Frames go from store to store as they are, if the other tier's serde takes their codec; KV in host memory is
        coded for a store; frames are decoded into host memory, where eviction may make them go. An object leaves its
        tier only when it is in the other one: where both have it for a moment, or for good because it could not be
        removed, it is found all the same.

        Parameters
        ----------
        keys : sequence of Key
            Of a prefix, in its order.
        source, target : str
            Names of tiers, ``"host"`` among them.
        keep : bool
            Copy: leave the objects where they are, too.
        plans : sequence of MemoryPlan, optional
            What each object looks like, needed for host memory as the target.

        Returns
        -------
        list of int or Exception or None
            For each object the bytes that it takes in its new place (of its frame, in a store), or why it stays:
            `UnsupportedOpError` where it would have to be coded a second time, a `CorruptFrameError`, the store's
            error, no room; or None if the source does not have it.

        Raises
        ------
        ConfigError
            There is no such tier, both are one, nothing may be stored or removed there, or plans are missing.
        """
        return self._moves.move(keys, source, target, keep=keep, plans=plans)

    def clear(self, tiers: Sequence[str] | None = None, *, namespace: bytes | None = None) -> dict[str, int]:
        """Remove all objects, or those of a namespace.

        In host memory, those of a namespace that are in use stay; all of them go with the rest. What is on its way to
        a store arrives after it: `flush` first.

        Parameters
        ----------
        tiers : sequence of str, optional
            Names; all tiers that are not read-only if not given.
        namespace : bytes, optional
            Its 32-byte digest.

        Returns
        -------
        dict of str to int
            How many objects went, by tier.

        Raises
        ------
        ConfigError
            There is no such tier, or a read-only one was named.
        StoreError
            A tier is down, or did not remove everything. What could be removed anywhere was.
        """
        by_name = {tier.name: tier for tier in self.tiers}
        chosen = [HOST, *(t.name for t in self.tiers if not t.read_only)] if tiers is None else dict.fromkeys(tiers)
        for name in chosen:
            if name != HOST and name not in by_name:
                raise ConfigError(f"there is no tier {name!r}; there are {', '.join((HOST, *by_name))}")
            if name != HOST and by_name[name].read_only:
                raise ConfigError(f"tier {name} is read-only: nothing is removed there")
        gone: dict[str, int] = {}
        failed: StoreError | None = None
        for name in chosen:
            if name == HOST:
                gone[name] = clear_host(self.host, namespace)
                continue
            gone[name], error = clear_tier(by_name[name], namespace, self._unusable)
            if error is not None:
                self._counters.failure(name, "delete", error)
                failed = failed or error
        if failed is not None:
            raise failed
        return gone

    def describe(self, *, count: bool = False) -> dict[str, TierInfo]:
        """Return by name what each tier is, how it is, and what it holds as far as that is known at once.

        Parameters
        ----------
        count : bool
            List stores that do not know what they hold, which may take long.

        Raises
        ------
        StoreError
            A store cannot be listed.
        """
        return {HOST: describe_host(self.host), **{t.name: describe_tier(t, count=count) for t in self.tiers}}

    def health(self) -> dict[str, TierHealth]:
        """Return by name how each tier is. Asks no store, and lets those be tried again for which it is time."""
        return {HOST: TierHealth(), **{tier.name: health_of(tier) for tier in self.tiers}}

    def stats(self) -> dict[str, TierStats]:
        """Return the counters of each tier, by name."""
        stats = self._counters.stats()
        return {name: stats.get(name, TierStats()) for name in (HOST, *(tier.name for tier in self.tiers))}

    def close(self) -> None:
        """Store what was committed, finish what is being loaded, and free threads and descriptors.

        Raises
        ------
        LeaseError
            The host memory was made for this cache, and somebody is still reading there. All else is closed; call
            this again when they have finished.
        """
        self._loads.close()
        self._stores.close()
        if self.on_close is not None:
            self.on_close()

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _leading(self, outcomes: Sequence[Found | Exception | None]) -> list[Found | Exception | None]:
        """Keep the leading objects and the first outcome that is none; let go of what lies behind."""
        end = next((i for i, outcome in enumerate(outcomes) if not isinstance(outcome, Found)), len(outcomes))
        for outcome in outcomes[end:]:
            if isinstance(outcome, Found):
                with contextlib.suppress(LeaseError):
                    self.release(outcome)
        return list(outcomes[: end + 1])
