"""The worker side of the vLLM connector: brings KV into vLLM's blocks, and takes KV out of them.

It does what a step's `StepMetadata` says. Loads that fail are reported, so that vLLM computes what is missing; saves
are copied to host memory before the step ends, because vLLM may use the blocks again at once. Nothing is saved that
was computed from a load that failed.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvcore.completion import attempt
from kvcore.connectors.vllm.blocks import SavedKV, request_kv
from kvcore.connectors.vllm.failures import FailedBlocks
from kvcore.connectors.vllm.layouts import BoundPart
from kvcore.connectors.vllm.metadata import Load, Save, StepMetadata
from kvcore.connectors.vllm.options import LoadMode
from kvcore.engine.engine import CacheEngine
from kvcore.engine.layerwise import LayerwiseRetrieve
from kvcore.errors import ConfigError
from kvcore.workers import Priority, Workers

__all__ = ["Received", "WorkerSide"]

R = TypeVar("R")

logger = logging.getLogger("kvcore")


@dataclass(frozen=True, slots=True)
class Received:
    """Asynchronous loads that have ended.

    Parameters
    ----------
    requests : frozenset of str
        All of them.
    failed : frozenset of str
        Those of them that brought less than was asked for and that cannot be told by block.
    """

    requests: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Layerwise:
    """A load that goes on while the model runs."""

    load: Load
    retrieve: LayerwiseRetrieve | None
    left: set[str]  # names of layers that are not there yet


class WorkerSide:
    """Loads and saves for one rank.

    Parameters
    ----------
    engine : CacheEngine
        Of the parts of `bound`, in order. Stays the caller's until `close`, which closes it.
    bound : sequence of BoundPart
    groups : int
        Cache groups of the model. With several, vLLM takes failures only of asynchronous loads, and by request.
    load : {"async", "sync", "layerwise"}
        Loads that are not asynchronous: all at once, or layer by layer.
    load_threads : int
        Asynchronous loads at a time.
    saves : bool
        Whether anything is saved.
    flush_seconds : float
        How long `close` waits for what is on its way to the stores.

    Raises
    ------
    ConfigError
        Loads within a step, of a model with several cache groups or with recurrent states only.
    """

    def __init__(
        self,
        engine: CacheEngine,
        bound: Sequence[BoundPart],
        *,
        groups: int = 1,
        load: LoadMode = "async",
        load_threads: int = 2,
        saves: bool = True,
        flush_seconds: float = 30.0,
    ) -> None:
        self._by_block = groups == 1 and not any(one.part.recurrent for one in bound)
        if not self._by_block and load != "async":
            raise ConfigError(
                f"load={load!r} is for models with one cache group of attention, and this has {groups} groups: vLLM "
                "could not be told of a load that fails; use load='async'"
            )
        self.engine = engine
        self._bound, self._mode, self._saves = tuple(bound), load, saves
        self._flush_seconds = flush_seconds
        self._failed = FailedBlocks(bound[0].block_tokens)
        self._places: dict[str, tuple[int, int]] = {
            name: (number, index) for number, one in enumerate(bound) for index, name in enumerate(one.layer_names)
        }
        self._layerwise: list[_Layerwise] = []
        self._workers = Workers(load_threads, name="kvcore-load")
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._failed_requests: set[str] = set()
        self._complained = False
        self._closed = False
        self.on_close: list[Callable[[], None]] = []
        """Called by `close` before anything else, in order."""

    # --- loads

    def start_loads(self, metadata: StepMetadata) -> None:
        """Begin the loads of a step: those within the step are done, or begun layer by layer; others go to threads."""
        for load in metadata.loads:
            if load.asynchronous:
                aside = functools.partial(self._load_aside, load, self._fence())
                refused = attempt(self._workers.submit, Priority.LOAD, aside)
                if refused is not None:
                    self._ended_aside(load, refused)
            elif self._mode == "layerwise":
                self._begin_layerwise(load)
            else:
                self._fence()()
                self._ended(load, self._load(load))

    def wait_for_layer(self, name: str) -> None:
        """Bring a layer of all loads that go layer by layer; returns when it is there."""
        place = self._places.get(name)
        if place is None:
            return
        for one in self._layerwise:
            if one.retrieve is not None and name in one.left:
                copied = attempt(one.retrieve.layer, *place)
                if isinstance(copied, Exception):
                    self._complain("a layer could not be loaded", copied)
                    self._give_up(one)
                else:
                    one.left.discard(name)

    def received(self) -> Received:
        """Return the asynchronous loads that have ended since it was last called, with and without success."""
        with self._lock:
            done = Received(frozenset(self._received), frozenset(self._failed_requests))
            self._received, self._failed_requests = set(), set()
        return done

    def failed_blocks(self) -> set[int]:
        """Return the blocks that have not been filled, of loads that ended since it was last called.

        Call it after `received`: a load that ends in between is then told of here first. Loads that went layer by layer
        have ended when the model has run; with a draft model, vLLM asks for the blocks before it has the step saved.
        """
        self._end_layerwise()
        return self._failed.take()

    # --- saves

    def written(self, slots: Iterable[npt.NDArray[np.int64]]) -> None:
        """Note which slots the model fills in this step; only asked where a load has failed (`watches`)."""
        for one in slots:
            self._failed.written(one)

    @property
    def watches(self) -> bool:
        """Whether `written` is of use."""
        return bool(self._failed)

    def save(self, metadata: StepMetadata) -> None:
        """Copy what a step has completed to host memory; coding and writing go on in the background."""
        self._end_layerwise()
        if not self._saves or not metadata.saves:
            return
        for save in metadata.saves:
            self._failed.computed(save.blocks[self._bound[0].group], save.computed, save.total)
        self._fence()()
        for save in metadata.saves:
            if self._failed.touch(save.blocks[self._bound[0].group], save.total):
                logger.info("not cached: request %s was computed from a load that failed", save.request)
                continue
            self._save(save)

    # --- the end

    def close(self) -> None:
        """End the threads, wait for the stores, and close the engine; calling it again does nothing.

        Loads that are on their way go on to their end; those that wait for a thread are given up.
        """
        if self._closed:
            return
        self._closed = True
        for call in self.on_close:
            attempt(call)
        self._end_layerwise()
        self._workers.close()
        flushed = attempt(self.engine.flush, self._flush_seconds)
        if flushed is not True:
            logger.warning(
                "after %g s some KV was still on its way to the stores, and is not cached; raise flush_seconds",
                self._flush_seconds,
            )
        self.engine.close()

    # --- inside

    def _load_aside(self, load: Load, fence: Callable[[], None]) -> None:
        """On a thread: load, and see to it that the request goes on whatever happens."""
        if self._closed:  # nobody is there any more who would use it
            self._ended_aside(load, load.start)
            return
        waited = attempt(fence)
        self._ended_aside(load, self._load(load) if waited is None else waited)

    def _load(self, load: Load) -> int | Exception:
        return attempt(self._retrieve, self.engine.retrieve_keys, load)

    def _retrieve(self, call: Callable[..., R], load: Load) -> R:
        kv = request_kv(self.engine.backend, self._bound, load.blocks)
        return call(load.keys, kv, start=load.start, stop=load.stop, request=load.request)

    def _ended_aside(self, load: Load, upto: int | Exception) -> None:
        """Note that an asynchronous load has ended, and what it did not bring."""
        failed = not self._ended(load, upto)
        with self._lock:
            self._received.add(load.request)
            if failed and not self._by_block:
                self._failed_requests.add(load.request)

    def _ended(self, load: Load, upto: int | Exception) -> bool:
        """Note which blocks a load did not fill; return whether it brought all."""
        if isinstance(upto, Exception):
            self._complain("KV could not be loaded", upto)
            upto = load.start
        if self._by_block:
            self._failed.computed(load.blocks[self._bound[0].group], load.start, upto)
        if upto >= load.stop:
            return True
        logger.info(
            "request %s: %d of %d tokens could not be loaded, and are computed",
            load.request,
            load.stop - upto,
            load.stop - load.start,
        )
        if self._by_block:
            one = self._bound[0]
            first, last = upto // one.block_tokens, -(-load.stop // one.block_tokens)
            self._failed.add(load.blocks[one.group][first:last])
        return False

    def _begin_layerwise(self, load: Load) -> None:
        self._fence()()
        begun = attempt(self._retrieve, self.engine.begin_retrieve, load)
        if isinstance(begun, Exception):
            self._ended(load, begun)
        else:
            self._layerwise.append(_Layerwise(load, begun, set(self._places)))

    def _give_up(self, one: _Layerwise) -> None:
        if one.retrieve is not None:
            attempt(one.retrieve.__exit__, None, None, None)
            one.retrieve = None

    def _end_layerwise(self) -> None:
        """End the loads that went layer by layer; a layer that nobody waited for was computed without its KV."""
        ended, self._layerwise = self._layerwise, []
        for one in ended:
            upto: int | Exception = one.load.start
            if one.retrieve is not None and not one.left:
                upto = attempt(one.retrieve.finish)
            elif one.retrieve is not None:
                logger.warning(
                    "request %s: vLLM did not wait for %d layers, such as %s; load='layerwise' does not work here",
                    *(one.load.request, len(one.left), min(one.left)),
                )
            self._give_up(one)
            self._ended(one.load, upto)

    def _save(self, save: Save) -> None:
        stored = attempt(self._store, save)
        if isinstance(stored, Exception):
            self._complain("KV could not be saved", stored)

    def _store(self, save: Save) -> None:
        kv = SavedKV(request_kv(self.engine.backend, self._bound, save.blocks), self._bound, save.total)
        self.engine.store_keys(save.keys, kv, total=save.total, request=save.request)

    def _complain(self, what: str, why: Exception) -> None:
        """Say it, loudly the first time."""
        level = logging.INFO if self._complained else logging.WARNING
        self._complained = True
        logger.log(level, "%s: %s: %s", what, type(why).__name__, why)

    def _fence(self) -> Callable[[], None]:
        """Return what waits until the device has done all that was queued so far; on a CPU it has."""
        if self._bound[0].rows.device == "cpu":
            return _nothing
        import torch

        event = torch.accelerator.current_stream().record_event()
        wait: Callable[[], None] = event.synchronize
        return wait


def _nothing() -> None:
    """There is nothing to wait for."""
