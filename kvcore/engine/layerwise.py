"""Storing and retrieving layer by layer, while the engine computes the other layers.

What goes layer by layer are the copies between the engine's memory and host memory. Frames hold whole chunks: they are
decoded before the first layer is wanted, and coded after the last one came.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType

from kvcore.engine.keys import ChunkKey
from kvcore.engine.kv import KVMemory
from kvcore.engine.transfer import Retriever, Storer, StoreReport, Wanted
from kvcore.errors import KVCoreError, OutOfMemoryError
from kvcore.tiers.host_tier import HostKey
from kvcore.tiers.l1 import WriteLease
from kvcore.tiers.prefetch_controller import Found
from kvcore.tiers.tiered import TieredCache

__all__ = ["LayerwiseRetrieve", "LayerwiseStore"]

logger = logging.getLogger("kvcore")


class LayerwiseStore:
    """Chunks on their way into the tiers. Get one from `CacheEngine.begin_store`.

    Call `layer` for each layer of each part, and `finish`; or `cancel`. As a context manager it is cancelled unless it
    was finished.
    """

    def __init__(
        self,
        tiers: TieredCache,
        storer: Storer,
        keys: Sequence[ChunkKey],
        kv: KVMemory,
        layers: Sequence[int],
        told: Callable[[StoreReport], None],
    ) -> None:
        self._tiers, self._storer, self._kv, self._keys, self._told = tiers, storer, kv, list(keys), told
        self._layers = [set(range(count)) for count in layers]
        self._open: list[tuple[int, ChunkKey, WriteLease[HostKey]]] = []
        self._dropped: set[ChunkKey] = set()
        missing = storer.missing(keys)
        for at, (part, key, name) in enumerate(missing):
            try:
                for lease in tiers.reserve({name: storer.plan(part, key)}).values():
                    self._open.append((part, key, lease))
            except OutOfMemoryError as error:
                logger.info("not cached: %s", error)
                self._dropped = {key for _, key, _ in missing[at:]}
                break
            except BaseException:
                self.cancel()
                raise

    def layer(self, part: int, index: int) -> None:
        """Copy a layer of a part out of the engine's memory; `index` counts within the part."""
        kept = []
        for one in self._open:
            number, key, lease = one
            if number == part:
                rows = lease.memory.rows().select(layers=(index, index + 1))
                if not self._kv.read(part, key.start, key.stop, rows, layers=(index, index + 1)):
                    self._tiers.cancel([lease])
                    continue
            kept.append(one)
        self._open = kept
        self._layers[part].discard(index)

    def finish(self) -> StoreReport:
        """Let the chunks go to the tiers.

        Raises
        ------
        KVCoreError
            A layer was left out: nothing is stored.
        """
        left = {part: layers for part, layers in enumerate(self._layers) if layers}
        if left and self._open:
            self.cancel()
            missing = "; ".join(f"part {part}: {sorted(layers)}" for part, layers in left.items())
            raise KVCoreError(f"not stored: layers were not given ({missing}); call layer() for each of them")
        leases, self._open = self._open, []
        if leases:
            self._tiers.forget_stored(self._tiers.commit([lease for _, _, lease in leases]))
        nbytes = sum(lease.memory.nbytes for _, _, lease in leases)
        report = self._storer.report(self._keys, {key for _, key, _ in leases}, self._dropped, nbytes)
        self._told(report)
        return report

    def cancel(self) -> None:
        """Give it up."""
        leases, self._open = self._open, []
        self._tiers.cancel([lease for _, _, lease in leases])

    def __enter__(self) -> LayerwiseStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class LayerwiseRetrieve:
    """Chunks on their way into an engine's memory. Get one from `CacheEngine.begin_retrieve`.

    All chunks are in host memory until `finish`, which must be called.
    """

    def __init__(
        self,
        retriever: Retriever,
        keys: Sequence[ChunkKey],
        kv: KVMemory,
        start: int,
        stop: int,
        told: Callable[[int, int], None],
    ) -> None:
        self._retriever, self._kv, self._start, self._stop, self._told = retriever, kv, start, stop, told
        self._wanted = retriever.wanted(keys, start, stop)
        self._units = retriever.objects(self._wanted)
        self._task = retriever.begin(self._units) if self._units else None
        self._held: list[tuple[Wanted, Found]] = []
        self._upto = stop
        self._nbytes = 0

    def wait(self) -> int:
        """Wait until the chunks are in host memory; return up to which token they are there."""
        if self._task is not None:
            task, self._task = self._task, None
            found = self._retriever.loaded(task)
            self._held, failed = self._retriever.sort(self._units, found)
            if failed is not None:
                self._upto = self._retriever.right_until(failed, self._start)
                self._held = [(one, held) for one, held in self._held if self._keep(one, held)]
        return self._upto

    def layer(self, part: int, index: int) -> None:
        """Copy a layer of a part into the engine's memory; `index` counts within the part."""
        self.wait()
        for one, held in self._held:
            if one.part == part:
                layers = index, index + 1
                self._nbytes += self._retriever.write(one, held, self._kv, self._start, self._stop, layers)

    def finish(self) -> int:
        """End it; return up to which token the KV is right, given that all layers were copied."""
        self.wait()
        held, self._held = self._held, []
        late = self._retriever.end(held)
        if late is not None:
            self._upto = min(self._upto, self._retriever.right_until(late, self._start))
        self._told(self._upto, self._nbytes)
        return self._upto

    def _keep(self, one: Wanted, held: Found) -> bool:
        """Let go of chunks behind the one that is missing."""
        if one.chunk.start < self._upto:
            return True
        self._retriever.release([held])
        return False

    def __enter__(self) -> LayerwiseRetrieve:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held, []
        self._retriever.release([found for _, found in held])
        if self._task is not None:
            self._retriever.forget(self._task)
