"""Objects from one tier to another: frames are copied as they are, KV in host memory is coded, frames are loaded there.

Lossy KV is never coded a second time: where that would be needed, an object stays where it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TypeAlias

from kvcore.codecs.contract import omitted_parts
from kvcore.codecs.frame import FrameReader
from kvcore.completion import attempt, drop_traceback
from kvcore.errors import ConfigError, KVCoreError, LayoutError, LeaseError, UnsupportedOpError
from kvcore.keys import Key, StoreKey
from kvcore.memory import MemoryPlan
from kvcore.serde.contract import SerdeProcessor
from kvcore.serde.frames import EXACT_CODECS, FrameDeserializer
from kvcore.tiers.host_tier import HostTier
from kvcore.tiers.lookup import HOST
from kvcore.tiers.observer import TierObserver
from kvcore.tiers.serde_store import layout_shape
from kvcore.tiers.store_tier import Origins, StoreTier, Unusable
from kvcore.tiers.stores.contract import StoreStat
from kvcore.tiers.stores.fs_scan import check_frame_head

__all__ = ["Mover", "Moves"]

Moves: TypeAlias = "list[int | Exception | None]"
"""For each key the bytes that the object takes where it went, why it stayed, or None if it was not there."""
_BATCH = 8


class Mover:
    """Moves objects between the tiers of one cache.

    Parameters
    ----------
    host : HostTier
    tiers : sequence of StoreTier
    observer : TierObserver
        Told of what was stored, and of failures.
    unusable : Unusable
    origins : Origins
    """

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[StoreTier],
        observer: TierObserver,
        unusable: Unusable,
        origins: Origins,
    ) -> None:
        self._host, self._observer = host, observer
        self._unusable, self._origins = unusable, origins
        self._tiers = {tier.name: tier for tier in tiers}

    def move(
        self, keys: Sequence[Key], source: str, target: str, *, keep: bool, plans: Sequence[MemoryPlan] | None
    ) -> Moves:
        """Move objects; see `TieredCache.move`."""
        self._check(keys, source, target, keep, plans)
        moved: Moves = []
        for start in range(0, len(keys), _BATCH):
            some = keys[start : start + _BATCH]
            if target == HOST:
                outcomes = self._load(some, (plans or ())[start : start + _BATCH], self._tiers[source])
            elif source == HOST:
                outcomes = self._encode(some, self._tiers[target])
            else:
                outcomes = self._copy(some, self._tiers[source], self._tiers[target])
            if not keep:
                self._remove([key for key, one in zip(some, outcomes, strict=True) if isinstance(one, int)], source)
            moved += map(drop_traceback, outcomes)
        return moved

    def _check(
        self, keys: Sequence[Key], source: str, target: str, keep: bool, plans: Sequence[MemoryPlan] | None
    ) -> None:
        names = (HOST, *self._tiers)
        for name in (source, target):
            if name not in names:
                raise ConfigError(f"there is no tier {name!r}; there are {', '.join(names)}")
        if source == target:
            raise ConfigError(f"objects are moved from one tier to another, got {source} twice")
        if target != HOST and self._tiers[target].read_only:
            raise ConfigError(f"tier {target} is read-only: nothing is stored there")
        if source != HOST and self._tiers[source].read_only and not keep:
            raise ConfigError(f"tier {source} is read-only: nothing is removed there; use keep to copy")
        if target == HOST and (plans is None or len(plans) != len(keys)):
            raise ConfigError("host memory holds KV, not frames: give a plan for each key that is moved there")

    # --- store to store

    def _copy(self, keys: Sequence[Key], source: StoreTier, target: StoreTier) -> Moves:
        got = attempt(source.store.store.get_batch, keys)
        frames = [got] * len(keys) if isinstance(got, Exception) else got
        outcomes: Moves = [None] * len(keys)
        good: list[tuple[int, memoryview]] = []
        for i, (key, frame) in enumerate(zip(keys, frames, strict=True)):
            if isinstance(frame, memoryview):
                refused = attempt(_check_frame, frame, key, source.store.serde, target.store.serde)
                if refused is None:
                    good.append((i, frame))
                    continue
                frame = refused
            if isinstance(frame, Exception):
                outcomes[i] = frame
                self._observer.failure(source.name, "retrieve", frame)
        for (i, _), outcome in zip(good, self._put(keys, good, target), strict=True):
            outcomes[i] = outcome
        return outcomes

    def _put(self, keys: Sequence[Key], frames: Sequence[tuple[int, memoryview]], target: StoreTier) -> Moves:
        """Put frames, and look whether they are there; the source's are removed on this word."""
        began = time.perf_counter()
        some = [keys[i] for i, _ in frames]
        store = target.store.store
        put = attempt(store.put_batch, [(keys[i], frame) for i, frame in frames])
        asked = attempt(store.stat_batch, some)
        stats = [asked] * len(some) if isinstance(asked, Exception) else asked
        outcomes: Moves = []
        for n, stat in zip([put] * len(some) if isinstance(put, Exception) else put, stats, strict=True):
            if isinstance(n, int) and stat != StoreStat(n):
                there = stat if isinstance(stat, Exception) else None
                n = there or KVCoreError(f"tier {target.name} took a frame of {n} bytes, and has {stat}; it stays")
            outcomes.append(n)
        self._stored(target, some, outcomes, began)
        return outcomes

    def _stored(self, target: StoreTier, keys: Sequence[Key], outcomes: Moves, began: float) -> None:
        sizes = [one for one in outcomes if isinstance(one, int)]
        self._unusable.discard(target.name, [k for k, one in zip(keys, outcomes, strict=True) if isinstance(one, int)])
        if sizes:
            self._observer.store(target.name, len(sizes), sum(sizes), time.perf_counter() - began)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                self._observer.failure(target.name, "store", outcome)

    # --- host memory to a store

    def _encode(self, keys: Sequence[Key], target: StoreTier) -> Moves:
        """Code what an engine wrote; copy the frame of what came from one."""
        outcomes: Moves = [None] * len(keys)
        reading = self._host.reserve_read(keys)
        try:
            by_layout: dict[object, list[int]] = {}
            for i, key in enumerate(keys):
                lease = reading.get(StoreKey.of(key))
                if lease is None:
                    continue
                origin = self._tiers.get(self._origins.of(key) or "")
                exact = origin is None or _is_exact(origin.store.serde)
                if origin is target:
                    outcomes[i] = self._there(key, target)
                elif origin is not None and not exact:
                    outcomes[i] = self._copy([key], origin, target)[0]
                if outcomes[i] is None and exact:
                    by_layout.setdefault(layout_shape(lease.memory.plan), []).append(i)
                elif outcomes[i] is None and origin is not None:
                    outcomes[i] = UnsupportedOpError(
                        f"this KV came from tier {origin.name}, where its frame is gone; coded anew for tier "
                        f"{target.name} it would lose twice. It stays in host memory; store it when it is computed"
                    )
            for some in by_layout.values():
                began = time.perf_counter()
                objs = [reading[StoreKey.of(keys[i])].memory for i in some]
                put = attempt(target.store.put, [keys[i] for i in some], objs)
                stored: Moves = [put] * len(some) if isinstance(put, Exception) else list(put)
                self._stored(target, [keys[i] for i in some], stored, began)
                for i, one in zip(some, stored, strict=True):
                    outcomes[i] = one
        finally:
            for key in keys:
                lease = reading.get(StoreKey.of(key))
                if lease is not None:
                    # One that ran out of time was coded from memory that may be another's: `SerdeStore` has seen to it.
                    with contextlib.suppress(LeaseError):
                        self._host.finish_read(lease)
        return outcomes

    def _there(self, key: Key, tier: StoreTier) -> int | Exception | None:
        stat = attempt(tier.store.store.stat, key)
        return stat.nbytes if isinstance(stat, StoreStat) else stat

    # --- a store to host memory

    def _load(self, keys: Sequence[Key], plans: Sequence[MemoryPlan], source: StoreTier) -> Moves:
        outcomes: Moves = [None] * len(keys)
        asked = attempt(source.store.store.stat_batch, keys)
        stats = [asked] * len(keys) if isinstance(asked, Exception) else asked
        by_layout: dict[object, list[int]] = {}
        for i, stat in enumerate(stats):
            if isinstance(stat, StoreStat):
                by_layout.setdefault(layout_shape(plans[i]), []).append(i)
            else:
                outcomes[i] = stat
        for some in by_layout.values():
            for i, outcome in zip(some, self._load_alike(keys, plans, some, stats, source), strict=True):
                outcomes[i] = outcome
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                self._observer.failure(source.name, "retrieve", outcome)
        return outcomes

    def _load_alike(
        self,
        keys: Sequence[Key],
        plans: Sequence[MemoryPlan],
        some: Sequence[int],
        stats: Sequence[StoreStat | Exception | None],
        source: StoreTier,
    ) -> Moves:
        """Load objects of one layout that are not in host memory yet; what is there already stays."""
        outcomes: dict[int, int | Exception | None] = {}
        taken = attempt(self._host.reserve_write, {keys[i]: plans[i] for i in some})
        if isinstance(taken, Exception):
            return [taken] * len(some)
        leases = {i: taken[StoreKey.of(keys[i])] for i in some if StoreKey.of(keys[i]) in taken}
        for i in some:
            if i not in leases:
                outcomes[i] = self._in_host(keys[i], plans[i])
        wanted = list(leases)
        got = attempt(
            lambda: source.store.get(
                [keys[i] for i in wanted], [leases[i].memory for i in wanted], stats=[stats[i] for i in wanted]
            )
        )
        for i, one in zip(wanted, [got] * len(wanted) if isinstance(got, Exception) else got, strict=True):
            if one is not True:
                self._host.cancel_write(leases[i])
                outcomes[i] = one or None
                continue
            self._origins.coming(leases[i].key, source.name)
            published = attempt(self._host.finish_write, leases[i])
            if published is not None:
                self._origins.forget(leases[i].key)
            outcomes[i] = published if published is not None else self._host.nbytes(keys[i])
        return [outcomes[i] for i in some]

    def _in_host(self, key: Key, plan: MemoryPlan) -> int | Exception | None:
        """Return what host memory has under a key; an error if it is another layout, or not ready yet."""
        lease = self._host.reserve_read([key]).get(StoreKey.of(key))
        if lease is None:
            return LeaseError("somebody else is writing this object to host memory; it stays where it is, too")
        try:
            if layout_shape(lease.memory.plan) == layout_shape(plan):
                return self._host.nbytes(key)
            return LayoutError("host memory has another layout under this key; it stays where it is, too")
        finally:
            with contextlib.suppress(LeaseError):
                self._host.finish_read(lease)

    # --- the rest

    def _remove(self, keys: Sequence[Key], source: str) -> None:
        """Remove what is somewhere else by now; what follows in a prefix goes first."""
        back = list(reversed(keys))
        if source == HOST:
            self._host.delete(back)  # who reads just now may go on
            return
        outcomes = attempt(self._tiers[source].store.store.delete_batch, back)
        for outcome in [outcomes] if isinstance(outcomes, Exception) else outcomes:
            if isinstance(outcome, Exception):
                self._observer.failure(source, "delete", outcome)


def _is_exact(serde: SerdeProcessor) -> bool:
    """Whether all frames that a serde reads hold every bit."""
    reads = getattr(serde, "deserializer", None)
    return isinstance(reads, FrameDeserializer) and reads.codecs.issubset(EXACT_CODECS)


def _check_frame(frame: memoryview, key: Key, source: SerdeProcessor, target: SerdeProcessor) -> None:
    """Raise unless a frame is whole, as far as one can see, and the serde of the tier that it goes to reads it.

    Raises
    ------
    CorruptFrameError
        It is not the frame of this key, or was altered.
    UnsupportedOpError
        The other tier takes no frames of this codec, or one of the two tiers is encrypted.
    """
    name = StoreKey.of(key)
    check_frame_head(name, len(frame), lambda count: bytes(frame[:count]))
    reads = getattr(target, "deserializer", None)
    if not isinstance(reads, FrameDeserializer):
        if source is not target:
            raise UnsupportedOpError(
                "codec: frames go to a tier that encrypts, or whose serde is not kvcore's, only from one of an equal "
                "serde; give both tiers the same one"
            )
        return
    reader = FrameReader(frame, expect_namespace=name.namespace, expect_key=name.digest, digest=reads.backend.digest)
    if source is not target:
        if reader.header.encrypted:
            raise UnsupportedOpError("codec: the frame is encrypted, and the other tier has no key; it stays")
        if reader.codec.name not in reads.codecs or any(omitted_parts(reader.codec, g) for g in reader.groups):
            raise UnsupportedOpError(
                f"codec: the frame is stored as {reader.codec.name}, and the other tier takes only "
                f"{', '.join(sorted(reads.codecs))}; coded again it would lose twice. Name the codec in the accept= of "
                "its serde, or move it to another tier"
            )
    if not reader.header.encrypted:
        reader.verify()
