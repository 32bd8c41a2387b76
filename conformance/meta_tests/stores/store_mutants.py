"""Stores that are wrong on purpose, each in one way. An entry point opens each by the name of its class."""

from __future__ import annotations

import os
import threading
import time

from kvcore.errors import StoreError
from kvcore.tiers.stores import FsStore, MemoryStore, StoreKey, StoreStat


class Unchanged(MemoryStore):
    """Right."""


class UnchangedFiles(FsStore):
    """Right, and persistent."""


class ServesStale(MemoryStore):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def get(self, key):
        found = super().get(key)
        return found if found is None else self.cache.setdefault(StoreKey.of(key), found)


class PutKeepsTheFirst(MemoryStore):
    def put(self, key, frame):
        return memoryview(frame).nbytes if self.exists(key) else super().put(key, frame)


class PutCountsItems(MemoryStore):
    def put(self, key, frame):
        super().put(key, frame)
        return len(frame)


class KeepsTheBuffer(MemoryStore):
    def put(self, key, frame):
        nbytes = super().put(key, frame)
        if isinstance(frame, bytearray):
            self._frames[StoreKey.of(key)] = frame
        return nbytes


class MixesTwoFrames(MemoryStore):
    def put(self, key, frame):
        old, new = self._frames.get(StoreKey.of(key), b""), bytes(memoryview(frame))
        if len(old) > 1000:
            super().put(key, new[:500] + old[500:])
            time.sleep(0.002)
        return super().put(key, frame)


class ViewsChange(MemoryStore):
    """Reads share one buffer, which the next read of as many bytes fills again."""

    def __init__(self):
        super().__init__()
        self.buffers = {}

    def get(self, key):
        found = super().get(key)
        if found is None:
            return None
        buffer = self.buffers.setdefault(StoreKey.of(key), bytearray(len(found)))
        if len(buffer) == len(found):
            buffer[:] = found
            return memoryview(buffer).toreadonly()
        return found

    def put(self, key, frame):
        nbytes = super().put(key, frame)
        buffer = self.buffers.get(StoreKey.of(key))
        if buffer is not None and len(buffer) == nbytes:
            buffer[:] = self._frames[StoreKey.of(key)]
        return nbytes


class ViewsAreWritable(MemoryStore):
    def get(self, key):
        found = super().get(key)
        return None if found is None else memoryview(bytearray(found))


class EmptyIsMiss(MemoryStore):
    def get(self, key):
        return super().get(key) or None


class StatRoundsUp(MemoryStore):
    def stat(self, key):
        found = super().stat(key)
        return None if found is None else StoreStat(-(-found.nbytes // 512) * 512)


class LooksAreCounted(MemoryStore):
    def exists(self, key):
        found = super().exists(key)
        self._ledger.add(misses=not found)
        return found


class ReadsAreCountedTwice(MemoryStore):
    def get_batch(self, keys):
        found = super().get_batch(keys)
        self._ledger.add(hits=1)
        return found


class DeleteLies(MemoryStore):
    def delete(self, key):
        super().delete(key)
        return True


class DeleteOnlyHides(MemoryStore):
    """What was deleted is listed still."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def put(self, key, frame):
        self.seen[StoreKey.of(key)] = None
        return super().put(key, frame)

    def list(self, namespace=None):
        super().list(namespace)
        return iter([key for key in self.seen if namespace in (None, key.namespace)])


class ListMissesOne(MemoryStore):
    def list(self, namespace=None):
        return iter(list(super().list(namespace))[:36])


class ListRepeats(MemoryStore):
    def list(self, namespace=None):
        found = list(super().list(namespace))
        return iter(found + found[:1])


class ListIgnoresTheNamespace(MemoryStore):
    def list(self, namespace=None):
        return super().list()


class KeysAreTruncated(MemoryStore):
    def _name(self, key):
        name = super()._name(key)
        return StoreKey(name.namespace, name.digest[:31] + b"\0")


class NamespacesMeet(MemoryStore):
    def _name(self, key):
        return StoreKey(bytes(32), super()._name(key).digest)


class QuarantineLeavesIt(MemoryStore):
    def quarantine(self, key, reason):
        found = self._frames.get(StoreKey.of(key))
        moved = super().quarantine(key, reason)
        if found is not None:
            super().put(key, found)
        return moved


class QuarantineTakesAnyReason(MemoryStore):
    def quarantine(self, key, reason):
        return super().quarantine(key, "any")


class BatchLosesOne(MemoryStore):
    def put_batch(self, items):
        outcomes = super().put_batch(items[:16])
        return [*outcomes, *(len(frame) for _, frame in items[16:])]


class BatchSortsItsKeys(MemoryStore):
    def get_batch(self, keys):
        return super().get_batch(sorted(keys))


class BatchKeepsTheFirst(MemoryStore):
    def put_batch(self, items):
        return super().put_batch(items[::-1])[::-1]


class GetIntoSaysTheRoom(MemoryStore):
    def get_into(self, key, out):
        return None if super().get_into(key, out) is None else len(out)


class GetIntoCutsOff(MemoryStore):
    def get_into(self, key, out):
        found = self.get(key)
        if found is None:
            return None
        out[:] = bytes(found[: len(out)]).ljust(len(out), b"\0")
        return min(len(found), len(out))


class ServesWhenClosed(MemoryStore):
    def close(self):
        pass


class RaisesOtherErrors(MemoryStore):
    def get(self, key):
        try:
            return super().get(key)
        except StoreError as error:
            raise RuntimeError("closed") from error


class NameTellsThePassword(MemoryStore):
    name = "mutant://user:correct-horse@host"


class LeaksFiles(MemoryStore):
    def put(self, key, frame):
        os.open(os.devnull, os.O_RDONLY)
        return super().put(key, frame)


class LeaksMemory(MemoryStore):
    def put(self, key, frame):
        self.kept = (getattr(self, "kept", None), bytes(200_000))
        return super().put(key, frame)


class LeaksThreads(MemoryStore):
    def __init__(self):
        super().__init__()
        threading.Thread(target=threading.Event().wait, args=(600,), daemon=True).start()


class ForgetsOnClose(FsStore):
    def close(self):
        for key in list(self.list()) if self._ledger._open else ():
            self.delete(key)
        super().close()


class WritesInPlace(FsStore):
    """No temporary name: others see a frame grow."""

    def put(self, key, frame):
        path, data = self._path(key), memoryview(frame).cast("B")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb", buffering=0) as file:
            for at in range(0, len(data), 60_000):
                file.write(data[at : at + 60_000])
                time.sleep(0.002)
        return super().put(key, frame) if not len(data) else self._told(len(data))

    def _told(self, nbytes):
        self._ledger.add(puts=1, put_bytes=nbytes)
        return nbytes


class WritesLater(FsStore):
    """It says done, serves the frame from memory, and writes one put behind."""

    behind = None

    def put(self, key, frame):
        self._write_behind()
        self.behind = (StoreKey.of(key), bytes(frame))
        return len(frame)

    def get(self, key):
        if self.behind is not None and self.behind[0] == StoreKey.of(key):
            return memoryview(self.behind[1])
        return super().get(key)

    def list(self, namespace=None):
        self._write_behind()
        return super().list(namespace)

    def close(self):
        if self._ledger._open:
            self._write_behind()
        super().close()

    def _write_behind(self):
        if self.behind is not None:
            super().put(*self.behind)
        self.behind = None


CAUGHT_BY = {
    ServesStale: "test_a_put_replaces_the_frame",
    PutKeepsTheFirst: "test_a_put_replaces_the_frame",
    PutCountsItems: "test_any_contiguous_buffer_is_a_frame",
    KeepsTheBuffer: "test_the_buffer_is_the_callers_again",
    MixesTwoFrames: "test_readers_see_the_old_frame_or_the_new_one",
    ViewsChange: "test_what_was_read_stays_as_it_is",
    ViewsAreWritable: "test_any_size",
    EmptyIsMiss: "test_an_empty_frame_is_not_a_miss",
    StatRoundsUp: "test_any_size",
    LooksAreCounted: "test_looking_has_no_effect_and_is_not_counted",
    ReadsAreCountedTwice: "test_a_batch_gives_for_each_key_what_the_call_gives",
    DeleteLies: "test_what_was_put_is_there_until_it_is_deleted",
    DeleteOnlyHides: "test_what_was_put_is_there_until_it_is_deleted",
    ListMissesOne: "test_a_list_gives_each_key_once_and_as_store_keys",
    ListRepeats: "test_a_list_gives_each_key_once_and_as_store_keys",
    ListIgnoresTheNamespace: "test_namespaces_do_not_meet",
    KeysAreTruncated: "test_keys_hold_all_byte_values_and_differ_in_every_byte",
    NamespacesMeet: "test_namespaces_do_not_meet",
    QuarantineLeavesIt: "test_quarantine_makes_the_key_a_miss_that_can_be_stored_again",
    QuarantineTakesAnyReason: "test_a_quarantine_reason_is_one_word",
    BatchLosesOne: "test_a_batch_gives_for_each_key_what_the_call_gives",
    BatchSortsItsKeys: "test_hits_and_misses_stand_where_their_keys_do",
    BatchKeepsTheFirst: "test_a_key_may_stand_in_a_batch_twice",
    GetIntoSaysTheRoom: "test_get_into_fills_the_callers_memory",
    GetIntoCutsOff: "test_a_frame_that_is_longer_than_the_memory_is_a_miss",
    ServesWhenClosed: "test_a_closed_store_refuses_every_call",
    RaisesOtherErrors: "test_a_closed_store_refuses_every_call",
    NameTellsThePassword: "test_the_name_says_what_it_is_and_no_secret",
    LeaksFiles: "test_calls_leave_nothing_behind",
    LeaksMemory: "test_calls_leave_nothing_behind",
    LeaksThreads: "test_opening_and_closing_leaves_nothing_behind",
    ForgetsOnClose: "test_closing_keeps_what_is_persistent",
    WritesInPlace: "test_a_killed_writer_leaves_whole_frames",
    WritesLater: "test_a_killed_writer_leaves_whole_frames",
}
"""The mutants, and the test whose business each is."""


def scheme(kind):
    """Return the scheme of a mutant's URI."""
    return f"mutant-{kind.__name__.lower()}"


def entry_points():
    """Return the text of the entry points that bring all of them."""
    kinds = [Unchanged, UnchangedFiles, *CAUGHT_BY]
    return "[kvcore.stores]\n" + "".join(f"{scheme(kind)} = store_mutants:open_{kind.__name__}\n" for kind in kinds)


def __getattr__(name):
    """Return the factory ``open_NAME``."""
    kind = globals().get(name.removeprefix("open_"))
    if not name.startswith("open_") or kind is None:
        raise AttributeError(name)
    return (lambda rest: kind(rest)) if issubclass(kind, FsStore) else (lambda rest: kind())
