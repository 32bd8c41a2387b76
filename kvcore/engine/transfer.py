"""Chunks of a request between an engine's memory and the tiers: what `CacheEngine` does object by object."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from kvcore.completion import TaskId
from kvcore.engine.keys import ChunkKey, Namespace
from kvcore.engine.kv import KVMemory
from kvcore.engine.parts import Shard
from kvcore.engine.presence import StoredPart
from kvcore.errors import (
    CorruptFrameError,
    KVCoreError,
    LayoutError,
    LeaseError,
    OutOfMemoryError,
    QuantizationError,
    StoreError,
    UnsupportedOpError,
)
from kvcore.keys import StoreKey
from kvcore.memory import MemoryPlan
from kvcore.tiers.host_tier import HostKey
from kvcore.tiers.l1 import WriteLease
from kvcore.tiers.prefetch_controller import Found
from kvcore.tiers.store_controller import StoredIn
from kvcore.tiers.tiered import TieredCache

__all__ = ["Misses", "Retriever", "StoreReport", "Storer", "Wanted"]

WINDOW = 4
"""Chunks that are loaded at a time; as many more are on their way meanwhile."""
ROOM_SECONDS = 1.0
"""How long a retrieve waits for room in host memory, in all."""
STORE_WINDOW = 8
"""Objects that are reserved at a time, and go to the stores together."""

logger = logging.getLogger("kvcore")


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What a store did.

    Parameters
    ----------
    tokens : int
        Tokens that the tiers now cover, as far as is known: where nobody waits, chunks may fail later.
    chunks_written, chunks_present : int
        Chunks stored by this call, and chunks that were there already.
    raw_bytes, stored_bytes : int
        Bytes of these chunks' KV; and of the frames that hold them, where somebody waited for them.
    chunks_refused : int
        Chunks that were left out: the first has values that the codec does not take, the others come after it.
    chunks_dropped : int
        Chunks that were left out because host memory had no room for them.
    tokens_written : int
        Tokens of the chunks stored by this call.
    """

    tokens: int
    chunks_written: int
    chunks_present: int
    raw_bytes: int
    stored_bytes: int
    chunks_refused: int = 0
    chunks_dropped: int = 0
    tokens_written: int = 0


class Misses:
    """Counts chunks that were looked for in vain, by reason; says each reason once, loudly."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counter[str]:
        """How many, by reason, as it is now."""
        with self._lock:
            return self._counts.copy()

    def add(self, key: ChunkKey, why: Exception | None) -> None:
        """Count a chunk that was there by `lookup` and could not be had."""
        said = "is gone since it was looked up" if why is None else str(why)
        self.count(_reason(why), f"chunk {key.start}:{key.stop}: {said}")

    def count(self, reason: str, said: str) -> None:
        """Count something by reason."""
        with self._lock:
            self._counts[reason] += 1
            first = self._counts[reason] == 1
        logger.log(logging.WARNING if first else logging.INFO, "cache miss (%s): %s", reason, said)


def _reason(why: Exception | None) -> str:
    if why is None:
        return "absent"
    if isinstance(why, CorruptFrameError):
        return why.reason
    kinds = {
        UnsupportedOpError: "codec",
        StoreError: "store",
        OutOfMemoryError: "memory",
        LayoutError: "layout",
        LeaseError: "lease",
    }
    return next((name for kind, name in kinds.items() if isinstance(why, kind)), "error")


class Storer:
    """Puts chunks into the tiers."""

    def __init__(self, tiers: TieredCache, parts: Sequence[StoredPart], namespace: Namespace) -> None:
        self._tiers, self._parts, self._namespace = tiers, parts, namespace
        self._refused = False

    def objects(self, keys: Sequence[ChunkKey]) -> list[tuple[int, ChunkKey, ChunkKey]]:
        """Return part, chunk and key of the objects of chunks, chunk by chunk."""
        return [(number, key, part.key(key)) for key in keys for number, part in enumerate(self._parts)]

    def plan(self, part: int, key: ChunkKey) -> MemoryPlan:
        """Return what the object of a part of a chunk looks like."""
        return self._parts[part].part.plan(key, self._namespace, part)

    def run(self, keys: Sequence[ChunkKey], kv: KVMemory) -> StoreReport:
        """Copy chunks that are nowhere into host memory, and let them go to the stores in the background."""
        missing = self.missing(keys)
        written: set[ChunkKey] = set()
        nbytes, at, window = 0, 0, STORE_WINDOW
        while at < len(missing):
            some = missing[at : at + window]
            try:
                leases = self._filled(some, kv)
            except OutOfMemoryError as error:
                if len(some) > 1:  # all or none are reserved: there may be room for fewer
                    window = len(some) // 2
                    continue
                logger.info("not cached: %s", error)
                break
            at += len(some)
            if leases:
                self._tiers.forget_stored(self._tiers.commit([lease for _, lease in leases]))
            written.update(key for key, _ in leases)
            nbytes += sum(lease.memory.nbytes for _, lease in leases)
        return self.report(keys, written, {key for _, key, _ in missing[at:]}, nbytes)

    def missing(self, keys: Sequence[ChunkKey]) -> list[tuple[int, ChunkKey, ChunkKey]]:
        """Return those of the `objects` of chunks that are nowhere."""
        objects = self.objects(keys)
        return [objects[i] for i in self._tiers.missing([name for _, _, name in objects])]

    @staticmethod
    def report(keys: Sequence[ChunkKey], written: set[ChunkKey], dropped: set[ChunkKey], nbytes: int) -> StoreReport:
        """Say what became of chunks of which some went to the tiers, and some found no room."""
        present = sum(key not in written and key not in dropped for key in keys)
        covered = next((key.start for key in keys if key in dropped), keys[-1].stop if keys else 0)
        tokens = sum(key.stop - key.start for key in written)
        return StoreReport(covered, len(written), present, nbytes, 0, 0, len(dropped), tokens)

    def run_and_wait(
        self, keys: Sequence[ChunkKey], kv: KVMemory, progress: Callable[[int], None] | None = None
    ) -> StoreReport:
        """Store chunks one by one, and see each of them arrive.

        Raises
        ------
        StoreError
            No store takes them. The chunks stored before stay, and are of use.
        OutOfMemoryError, UnsupportedOpError
            As `CacheEngine.store` says.
        """
        written = present = raw = stored = new = 0
        objects = self.objects(keys)
        stats = iter(self._tiers.stat([name for _, _, name in objects]))
        width = len(self._parts)
        for at, key in enumerate(keys):
            some = [(one, next(stats)) for one in objects[at * width : (at + 1) * width]]
            for _, known in some:
                if isinstance(known, Exception):
                    raise known
            absent = [one for one, known in some if known is None]
            nbytes = self._store(absent, kv) if absent else 0
            if nbytes is None:
                break
            stored += nbytes + sum(known[1] for _, known in some if isinstance(known, tuple))
            raw += sum(self.plan(part, chunk).nbytes for (part, chunk, _), _ in some)
            written, present = written + bool(absent), present + (not absent)
            new += key.stop - key.start if absent else 0
            if progress is not None:
                progress(key.stop)
        covered = written + present
        tokens = keys[covered - 1].stop if covered else 0
        return StoreReport(tokens, written, present, raw, stored, len(keys) - covered, 0, new)

    def _filled(
        self, objects: Sequence[tuple[int, ChunkKey, ChunkKey]], kv: KVMemory
    ) -> list[tuple[ChunkKey, WriteLease[HostKey]]]:
        """Reserve objects, and copy what the engine has; those that somebody else is writing are left out."""
        leases = self._tiers.reserve({name: self.plan(part, key) for part, key, name in objects})
        by_name = {StoreKey.of(name): (part, key) for part, key, name in objects}
        filled: list[tuple[ChunkKey, WriteLease[HostKey]]] = []
        try:
            for name, lease in leases.items():
                part, key = by_name[cast(StoreKey, name)]
                if kv.read(part, key.start, key.stop, lease.memory.rows()):
                    filled.append((key, lease))
                else:
                    self._tiers.cancel([lease])
        except BaseException:
            self._tiers.cancel(leases.values())
            raise
        return filled

    def _store(self, objects: Sequence[tuple[int, ChunkKey, ChunkKey]], kv: KVMemory) -> int | None:
        """Store the objects of a chunk; return their stored bytes, or None where the codec does not take a value."""
        leases = [lease for _, lease in self._filled(objects, kv)]
        if not leases:  # somebody else is at it, or was just now
            return sum(self.plan(part, key).nbytes for part, key, _ in objects)
        nbytes = [lease.memory.nbytes for lease in leases]
        outcomes = self._tiers.stored(self._tiers.commit(leases)) or ()
        del leases  # an error that is raised keeps this frame, and must not keep their memory
        stored = 0
        for size, outcome in zip(nbytes, outcomes, strict=True):
            error = outcome if isinstance(outcome, Exception) else outcome.error
            if isinstance(error, QuantizationError):
                level = logging.INFO if self._refused else logging.WARNING  # a server is not to fill its log with it
                self._refused = True
                logger.log(level, "not cached, nor are the tokens after it: chunk %s: %s", objects[0][1].start, error)
                return None
            if error is not None or not isinstance(outcome, StoredIn):
                raise error or KVCoreError("not stored")
            stored += next((n for n in outcome.tiers.values() if isinstance(n, int)), size)
        return stored


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object that is to be loaded: a part of a chunk, in the shard that holds it."""

    part: int
    chunk: ChunkKey
    shard: Shard
    name: ChunkKey
    plan: MemoryPlan


class Retriever:
    """Brings chunks from the tiers into an engine's memory."""

    def __init__(self, tiers: TieredCache, parts: Sequence[StoredPart], namespace: Namespace, misses: Misses) -> None:
        self._tiers, self._parts, self._namespace, self._misses = tiers, parts, namespace, misses
        self._all_prefix = all(one.part.prefix for one in parts)
        # Two windows are on their way at a time; half of host memory is left to others.
        chunk_bytes = sum(MemoryPlan.of([one.part.desc]).size for one in parts)
        self._window = max(min(WINDOW, tiers.host.arena.capacity_bytes // (4 * chunk_bytes)), 1)

    def wanted(self, keys: Sequence[ChunkKey], start: int, stop: int) -> list[tuple[int, ChunkKey]]:
        """Return which parts of which chunks hold tokens ``[start, stop)`` and what goes on from there, in order.

        Raises
        ------
        LayoutError
            The keys do not cover them.
        """
        if not 0 <= start <= stop or (start < stop and (not keys or keys[0].start > start or keys[-1].stop < stop)):
            held = f"{keys[0].start}:{keys[-1].stop}" if keys else "no tokens"
            raise LayoutError(
                f"tokens {start}:{stop} are wanted, and the keys are those of {held}; give the keys from token 0 on, "
                "as far as what lookup returned"
            )
        size = self._namespace.chunk_tokens
        needed = [one.part.needed(stop, size) for one in self._parts]
        return [
            (number, key)
            for key in keys
            if key.stop > start and key.start < stop
            for number in range(len(self._parts))
            if key.start // size in needed[number]
        ]

    def run(self, keys: Sequence[ChunkKey], kv: KVMemory, start: int, stop: int) -> tuple[int, int]:
        """Load tokens ``[start, stop)``; return up to which token the KV is right, and the bytes that were copied."""
        wanted, at, nbytes, tries, waited = self.wanted(keys, start, stop), 0, 0, 0, 0.0
        while at < len(wanted):
            done, copied, failed = self._run(wanted[at:], kv, start, stop)
            at, nbytes, tries = at + done, nbytes + copied, 1 if done else tries + 1
            if at == len(wanted):
                break
            if isinstance(failed, OutOfMemoryError) and (done or waited < ROOM_SECONDS):
                # A chunk that is being read keeps those before it in host memory: now that it is not, they can go. Or
                # what is being stored, or read by others, gives room any moment.
                pause = 0.0 if done else ROOM_SECONDS / 100
                time.sleep(pause)
                tries, waited = 0, waited + pause
                continue
            # Each way once: two that are there by their stores' word, and cannot be had, would take turns for ever.
            ways = len(self._parts[wanted[at][0]].ways)
            if failed is not None or tries >= ways or not self._another_way(*wanted[at]):
                self._misses.add(wanted[at][1], failed)
                return self.right_until(wanted[at][1], start), nbytes
        return stop, nbytes

    def right_until(self, missing: ChunkKey, start: int) -> int:
        """Return up to which token KV is right where a chunk is missing: with windows or states, only all is right."""
        return max(start, missing.start) if self._all_prefix else start

    def objects(self, wanted: Sequence[tuple[int, ChunkKey]]) -> list[list[Wanted]]:
        """Return for each part of a chunk the objects that hold it, in the way that was right last."""
        units = []
        for number, chunk in wanted:
            part = self._parts[number]
            units.append(
                [
                    Wanted(number, chunk, shard, name, shard.part.plan(name, self._namespace, number))
                    for shard, name in part.objects(part.order()[0], chunk)
                ]
            )
        return units

    def write(
        self, one: Wanted, found: Found, kv: KVMemory, start: int, stop: int, layers: tuple[int, int] | None = None
    ) -> int:
        """Copy a loaded object to where it belongs; return its bytes, 0 where its lock has ended: see `late`."""
        if found.lease is None:
            raise KVCoreError("the object was not locked")
        try:
            rows = found.lease.memory.rows()
        except LeaseError:  # the lock outlived its time, and the memory was freed
            return 0
        low, high = one.chunk.start, one.chunk.stop
        tokens = None
        if not one.shard.part.recurrent:
            low, high = max(low, start), min(high, stop)
            tokens = low - one.chunk.start, high - one.chunk.start
        rows = rows.select(layers=layers, heads=one.shard.theirs, tokens=tokens)
        kv.write(one.part, low, high, rows, layers=layers, heads=one.shard.mine)
        return rows.nbytes

    def prefetch(self, keys: Sequence[ChunkKey], stop: int, chunks: int | None) -> int:
        """Begin to bring what tokens ``[0, stop)`` need, of the first chunks, into host memory; return how many."""
        few = set(keys[:chunks])
        units = self.objects([one for one in self.wanted(keys, 0, stop) if one[1] in few])
        cold = [one for unit in units for one in unit if one.name not in self._tiers.host]
        if cold:
            self._tiers.forget_load(self._tiers.prefetch([one.name for one in cold], [one.plan for one in cold]))
        return len(cold)

    def begin(self, units: Sequence[Sequence[Wanted]]) -> TaskId:
        """Begin to load objects."""
        objects = [one for unit in units for one in unit]
        return self._tiers.begin_load([one.name for one in objects], [one.plan for one in objects])

    def loaded(self, task: TaskId) -> list[Found | Exception | None]:
        """Wait for a load. See `TieredCache.loaded`."""
        return self._tiers.loaded(task)

    def forget(self, task: TaskId) -> None:
        """Give a load up."""
        self._tiers.forget_load(task)

    def sort(
        self, units: Sequence[Sequence[Wanted]], found: Sequence[Found | Exception | None]
    ) -> tuple[list[tuple[Wanted, Found]], ChunkKey | None]:
        """Return loaded objects with what they are, and the first chunk that is missing, which is counted."""
        objects = [one for unit in units for one in unit]
        held = [(one, there) for one, there in zip(objects, found, strict=False) if isinstance(there, Found)]
        if len(held) == len(objects):
            return held, None
        missing = objects[len(held)].chunk
        why = found[-1] if found else None
        self._misses.add(missing, why if isinstance(why, Exception) else None)
        return held, missing

    def _run(
        self, wanted: Sequence[tuple[int, ChunkKey]], kv: KVMemory, start: int, stop: int
    ) -> tuple[int, int, Exception | None]:
        """Load parts of chunks in the ways that were right last.

        Returns
        -------
        int, int, Exception or None
            How many were had, their bytes, and why not the next: None where it is nowhere.
        """
        units, size = self.objects(wanted), self._window * len(self._parts)
        windows = [units[at : at + size] for at in range(0, len(units), size)]
        coming = [self.begin(windows[0])]
        done = nbytes = 0
        try:
            for number, window in enumerate(windows):
                found = self._tiers.loaded(coming[-1])
                try:
                    if all(isinstance(one, Found) for one in found) and number + 1 < len(windows):
                        coming.append(self.begin(windows[number + 1]))
                    for unit in window:
                        copied = self._written(unit, found, kv, start, stop)
                        if not isinstance(copied, int):
                            return done, nbytes, copied
                        done, nbytes = done + 1, nbytes + copied
                finally:
                    self.release(found)
        finally:
            for task in coming:
                self._tiers.forget_load(task)
        return done, nbytes, None

    def _written(
        self, unit: Sequence[Wanted], found: list[Found | Exception | None], kv: KVMemory, start: int, stop: int
    ) -> int | Exception | None:
        """Copy the objects of a part of a chunk, which are taken off `found`; return their bytes, or what is wrong."""
        nbytes = 0
        for one in unit:
            held = found.pop(0) if found else None
            if not isinstance(held, Found):
                return held
            try:
                nbytes += self.write(one, held, kv, start, stop)
            finally:
                late = self.late(held)
            if late is not None:
                return late
        return nbytes

    def late(self, held: Found) -> LeaseError | None:
        """End a lock; a lock that had ended already is an error: the bytes may have been somebody else's."""
        try:
            self._tiers.release(held)
        except LeaseError as error:
            return LeaseError(str(error))
        return None

    def end(self, held: Sequence[tuple[Wanted, Found]]) -> ChunkKey | None:
        """End locks; return the first chunk whose lock had ended already, which is counted."""
        late = [(one.chunk, error) for one, found in held if (error := self.late(found)) is not None]
        if not late:
            return None
        chunk, error = min(late, key=lambda one: one[0].start)
        self._misses.add(chunk, error)
        return chunk

    def release(self, found: Sequence[Found | Exception | None]) -> None:
        """End the locks of objects that nobody has read."""
        for one in found:
            if isinstance(one, Found):
                with contextlib.suppress(LeaseError):
                    self._tiers.release(one)

    def _another_way(self, number: int, chunk: ChunkKey) -> bool:
        """Look for a part of a chunk as another tensor-parallel degree would have stored it."""
        part = self._parts[number]
        for way in part.order()[1:]:
            if not self._tiers.missing([name for _, name in part.objects(way, chunk)]):
                part.prefer(way)
                return True
        return False
