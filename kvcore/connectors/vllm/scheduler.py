"""The scheduler side of the vLLM connector: which KV to load, and which to save, step by step.

It has no engine and moves no KV. It computes the keys of requests, asks the workers what could be loaded
(`kvcore.connectors.vllm.lookup`), and tells them what to do in the metadata of each step. It imports nothing of vLLM:
it reads attributes of the objects that it is given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any, Protocol

from kvcore.connectors.vllm.metadata import BlockTables, Load, Save, StepMetadata
from kvcore.connectors.vllm.requests import AdapterNames, RequestIdentity, Uncacheable, identify
from kvcore.engine.keys import ChunkKey, KeyChain, Namespace, chunk_keys
from kvcore.errors import ConfigError, KVCoreError

__all__ = ["Lookups", "SchedulerSide"]

FRESH_SECONDS = 2.0
"""An answer is used for so long: a request that waits for room is looked up again then, for others store meanwhile."""

logger = logging.getLogger("kvcore")


class Lookups(Protocol):
    """What the scheduler side asks: `kvcore.connectors.vllm.lookup.LookupClient` does all of it."""

    def ask(self, request: str, keys: Sequence[ChunkKey], num_tokens: int, *, computed: int = 0) -> None:
        """Ask what could be loaded for a request."""

    def asked(self, request: str) -> float | None:
        """Return how many seconds ago that was."""

    def answer(self, request: str) -> int | None:
        """Return how many leading tokens, None if nobody knows yet."""

    def next_step(self) -> None:
        """Hear that a step ends: however many requests wait for answers, a step waits once."""

    def forget(self, request: str) -> None:
        """Drop the question."""

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Tell which chunks will be asked for."""

    def uncacheable(self, reason: str) -> None:
        """Count a request that is not cached."""

    def close(self) -> None:
        """Ask nobody any more."""


@dataclass(slots=True)
class _Offer:
    """What was offered to the scheduler: tokens ``[start, stop)``, out of `num_tokens`."""

    start: int
    stop: int
    num_tokens: int
    asynchronous: bool


@dataclass(slots=True)
class _State:
    """What is remembered of a request until it is finished."""

    request: Any
    identity: RequestIdentity | None = None
    """None: it is not cached."""
    chain: KeyChain | None = None
    media: int = 0
    """Images, sounds, ... that the identity knows of: a session may bring more."""
    question: tuple[int, int] = (-1, -1)
    """Tokens, and tokens computed, of the last lookup."""
    offer: _Offer | None = None
    loading: int = -1
    """How often the request had been preempted when it was last given KV to load; -1: never, or preempted since."""
    failed: bool = False
    """A load failed. There is no other one: a store that cannot be read would be asked again for ever."""
    saved: int = 0
    """Chunks that end at or before this token are stored, as far as is known, or have been asked to be."""
    tail_saved: bool = False
    reached: int = 0
    """Tokens that should have their KV by now. Fewer: some of it was lost."""
    since: int | None = None
    """Tokens from here on have got their KV from the model since the last `Save`."""
    tables: list[list[int]] = field(default_factory=list)


class SchedulerSide:
    """What vLLM's scheduler calls, except that it is no class of vLLM's.

    Parameters
    ----------
    namespace : Namespace
        Whose KV the engine makes.
    lookups : Lookups
        Closed with this one.
    block_tokens : int
        Hits are multiples of it: the least common multiple of the block sizes of all cache groups.
    groups : int
        Cache groups. Of several, KV is always loaded asynchronously: vLLM can be told of a failed load only then.
    windowed : bool
        A group gives blocks back before the request is finished (sliding windows, recurrent states).
    loads, saves : bool
        Whether this engine takes KV from the cache, and gives KV to it.
    asynchronous : bool
        A request waits for its KV outside of the batch; else in the step that needs it.
    save_decode : bool
        Also save chunks that hold generated tokens.
    save_partial_chunk : bool
        Also save the end of a prompt that fills no chunk, and look for it.
    min_retrieve_tokens : int
        What would load fewer tokens than this is computed instead.
    prefetch : bool
        Tell the workers at a request's arrival which chunks it will need.
    trust_media_ids : bool
        See `kvcore.connectors.vllm.requests.identify`.

    Attributes
    ----------
    uncacheable : dict of str to int
        Requests that were not cached, by reason.
    """

    def __init__(
        self,
        namespace: Namespace,
        lookups: Lookups,
        *,
        block_tokens: int,
        groups: int = 1,
        windowed: bool = False,
        loads: bool = True,
        saves: bool = True,
        asynchronous: bool = True,
        save_decode: bool = True,
        save_partial_chunk: bool = False,
        min_retrieve_tokens: int = 0,
        prefetch: bool = False,
        trust_media_ids: bool = False,
    ) -> None:
        if block_tokens < 1 or groups < 1:
            raise ConfigError(f"there is at least one group and one token in a block, got {groups} and {block_tokens}")
        self.namespace = namespace
        self.uncacheable: dict[str, int] = {}
        self._lookups = lookups
        self._block, self._chunk = block_tokens, namespace.chunk_tokens
        self._windowed, self._asynchronous = windowed, asynchronous or groups > 1
        self._loads, self._saves = loads, saves
        self._save_decode, self._partial = save_decode, save_partial_chunk
        self._least = max(min_retrieve_tokens, 1)
        self._prefetch, self._trust_media_ids = prefetch, trust_media_ids
        self._adapters = AdapterNames()
        self._states: dict[str, _State] = {}
        self._pending: dict[str, Load] = {}

    def __len__(self) -> int:
        """Return how many requests it remembers."""
        return len(self._states)

    def on_new_request(self, request: Any) -> None:
        """Note a request that has arrived."""
        state = self._state(request)
        if self._prefetch and self._loads and state.identity is not None and not _reads_nothing(request):
            keys = self._keys(state, request.num_tokens)
            if keys:
                self._lookups.prefetch(keys)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond those that vLLM has itself.

        Parameters
        ----------
        request : vllm.v1.request.Request
        num_computed_tokens : int
            Leading tokens that vLLM's own prefix cache has.

        Returns
        -------
        tokens : int or None
            None: it is not known yet; vLLM asks again in a later step.
        asynchronous : bool
            Whether they are loaded between steps.
        """
        state = self._state(request)
        state.offer = None
        state.since = None  # the request has no blocks: it is new, or has lost them
        if state.loading == _preemptions(request):  # it was given KV and has none, and was not preempted
            state.failed, state.saved = True, 0  # which chunks are stored is not known: workers skip those
        state.loading = -1
        if not self._loads or state.identity is None or state.failed or _reads_nothing(request):
            return 0, False
        total = int(request.num_tokens)
        hit = self._hit(state, total, num_computed_tokens)
        if hit is None:
            return None, False
        state.saved = max(state.saved, min(hit, total) // self._chunk * self._chunk)
        stop = min(hit, total - 1) // self._block * self._block
        if stop - num_computed_tokens < self._least:
            return 0, False
        state.offer = _Offer(num_computed_tokens, stop, total, self._asynchronous)
        return stop - num_computed_tokens, self._asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take up the blocks that vLLM has set apart for tokens that were offered.

        Raises
        ------
        KVCoreError
            vLLM expects tokens that were not offered: it would use blocks that nobody fills.
        """
        state = self._states.get(request.request_id)
        offer = None if state is None else state.offer
        if state is not None:
            state.offer = None
            if getattr(request, "resumable", False):
                state.chain = None  # the next input of a session takes the place of what was sampled last
        if num_external_tokens <= 0:
            return
        if state is None or offer is None or offer.start + num_external_tokens > offer.stop:
            raise KVCoreError(
                f"vLLM wants {num_external_tokens} tokens of request {request.request_id} loaded that were not "
                "offered; this version of it does what this connector does not know: see the compatibility table"
            )
        stop = offer.start + num_external_tokens
        keys = self._keys(state, offer.num_tokens)
        wanted = tuple(key for key in keys if key.start < stop)
        tables = tuple(list(group) for group in blocks.get_block_ids())
        self._pending[request.request_id] = Load(
            request.request_id, wanted, offer.start, stop, tables, offer.num_tokens, offer.asynchronous
        )
        self._lookups.forget(request.request_id)
        state.loading, state.reached = _preemptions(request), stop

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return what the workers do in this step."""
        self._lookups.next_step()
        loads = tuple(self._pending.values())
        self._pending.clear()
        cached = scheduler_output.scheduled_cached_reqs
        resumed = set(getattr(cached, "resumed_req_ids", None) or ())
        self._preempted(getattr(scheduler_output, "preempted_req_ids", None) or ())
        own_tables = getattr(scheduler_output, "kv_connector_block_state", None) is None
        if own_tables:
            self._preempted(resumed)  # an engine that does not say who was preempted
        saves = []
        for new in scheduler_output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                state.tables = [list(group) for group in new.block_ids] if own_tables else []
                saves.append(self._save(scheduler_output, state, int(new.num_computed_tokens)))
        for index, name in enumerate(cached.req_ids):
            state = self._states.get(name)
            if state is not None:
                if own_tables:
                    _grow(state.tables, cached.new_block_ids[index], name in resumed)
                saves.append(self._save(scheduler_output, state, int(cached.num_computed_tokens[index])))
        return StepMetadata(loads, tuple(save for save in saves if save is not None))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take note of loads that failed as a whole."""
        for name in getattr(connector_output, "failed_recving", None) or ():
            if name in self._states:
                self._states[name].failed = True

    def request_finished(self, request: Any, block_ids: object = None) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks may be freed at once: what was to be saved of it has been copied."""
        self._states.pop(request.request_id, None)
        self._lookups.forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Find nothing any more of what is stored: its weights may have been replaced.

        What is stored stays where it is, for other engines; what this one stores from now on is of use to it alone,
        until it is started anew.
        """
        self.namespace = replace(self.namespace, revision=f"{self.namespace.revision} reset:{token_hex(8)}")
        for state in self._states.values():  # their KV may be of both
            state.identity = state.chain = None
        logger.info("the KV cache was reset: nothing that was stored before is used by this engine any more")
        return True

    def close(self) -> None:
        """Ask nobody any more; calling it again does nothing."""
        self._lookups.close()

    def _hit(self, state: _State, total: int, computed: int) -> int | None:
        """How many leading tokens the workers could load; None if it is not known yet."""
        name = state.request.request_id
        age = self._lookups.asked(name)
        if age is not None and state.question == (total, computed):
            hit = self._lookups.answer(name)
            if hit is None or age <= FRESH_SECONDS:
                return hit
        keys = self._keys(state, total)
        state.question = (total, computed)
        self._lookups.ask(name, keys, total, computed=computed)
        return self._lookups.answer(name)

    def _state(self, request: Any) -> _State:
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            state = self._states[request.request_id] = _State(request)
            self._identify(state)
        return state

    def _identify(self, state: _State) -> None:
        request = state.request
        state.chain, state.media = None, len(getattr(request, "mm_features", None) or ())
        found = identify(request, self.namespace, self._adapters, trust_media_ids=self._trust_media_ids)
        if isinstance(found, Uncacheable):
            self._refuse(state, found)
        else:
            state.identity = found

    def _refuse(self, state: _State, why: Uncacheable) -> None:
        state.identity = state.chain = None
        if why.reason not in self.uncacheable:
            logger.warning("a request is not cached (%s): %s; such requests are counted from now on", *_words(why))
        self.uncacheable[why.reason] = self.uncacheable.get(why.reason, 0) + 1
        self._lookups.uncacheable(why.reason)

    def _chain(self, state: _State, tokens: int) -> KeyChain | None:
        """The chain of a request, over its first tokens at least; None if it is not cached."""
        request = state.request
        media = len(getattr(request, "mm_features", None) or ())
        if state.identity is not None and (
            media != state.media or (state.chain is not None and state.chain.num_tokens > request.num_tokens)
        ):
            self._identify(state)
        if state.identity is None:
            return None
        if state.chain is None:
            state.chain = KeyChain(state.identity.namespace, extra_keys=state.identity.extra_keys)
        if state.chain.num_tokens < tokens:
            try:
                state.chain.extend(list(request.all_token_ids[state.chain.num_tokens : tokens]))
            except ConfigError as error:
                self._refuse(state, Uncacheable("tokens", str(error)))
                return None
        return state.chain

    def _keys(self, state: _State, tokens: int) -> list[ChunkKey]:
        """Return the keys of the first tokens: of whole chunks, and of what is left where such are saved."""
        chain = self._chain(state, tokens)
        if chain is None:
            return []
        keys = chain.keys[: tokens // self._chunk]
        if self._partial and tokens % self._chunk:
            keys.append(self._tail(state, chain, tokens))
        return keys

    def _tail(self, state: _State, chain: KeyChain, tokens: int) -> ChunkKey:
        """Return the key of the last, partial chunk of the first tokens."""
        tail = chain.tail() if chain.num_tokens == tokens else None
        if tail is None:  # the chain is longer by now
            ids = list(state.request.all_token_ids[:tokens])
            tail = chunk_keys(chain.namespace, ids, extra_keys=_extras(state), partial=True)[-1]
        return tail

    def _save(self, output: Any, state: _State, computed: int) -> Save | None:
        """Say what of a request is complete when the step is, and not yet saved."""
        request, name = state.request, state.request.request_id
        # Drafts may be rejected, and of a token that is not sampled yet nobody knows which one it will be.
        complete = min(computed + int(output.num_scheduled_tokens[name]), int(request.num_tokens))
        if computed < state.reached:  # a load failed, or the request was preempted: it is computed anew
            state.saved = min(state.saved, computed // self._chunk * self._chunk)
            state.tail_saved = state.tail_saved and computed >= request.num_prompt_tokens
        state.reached = complete
        state.since = computed if state.since is None else min(state.since, computed)
        if not self._saves or state.identity is None:
            return None
        limit = complete if self._save_decode else min(complete, int(request.num_prompt_tokens))
        keys = self._complete_keys(state, limit)
        if not keys:
            return None
        tables = self._tables(output, state)
        if tables is None:
            return None
        save = Save(name, tuple(keys), tables, state.since, complete)
        state.since = None
        return save

    def _complete_keys(self, state: _State, limit: int) -> list[ChunkKey]:
        """Return the keys of the chunks that end at or before a token, and were not returned yet."""
        first, last = state.saved // self._chunk, limit // self._chunk
        keys: list[ChunkKey] = []
        if last > first:
            chain = self._chain(state, last * self._chunk)
            if chain is None:
                return []
            keys = chain.keys[first:last]
            state.saved = last * self._chunk
        prompt = int(state.request.num_prompt_tokens)
        if self._partial and not state.tail_saved and limit >= prompt and prompt % self._chunk:
            chain = self._chain(state, prompt)
            if chain is None:
                return []
            state.tail_saved = True
            tail = self._tail(state, chain, prompt)
            keys = sorted([*keys, tail], key=lambda key: (key.start, key.stop))
        return keys

    def _tables(self, output: Any, state: _State) -> BlockTables | None:
        """Return copies of the request's block tables."""
        known = getattr(output, "kv_connector_block_state", None)
        found = None if known is None else known.get_block_ids(state.request.request_id)
        if found is None and self._windowed:
            # A table that only grows still names blocks that others have by now.
            self._refuse(state, Uncacheable("blocks", "this version of vLLM does not say which blocks were given back"))
            return None
        return tuple(list(group) for group in (state.tables if found is None else found))

    def _preempted(self, names: Iterable[str]) -> None:
        for name in names:
            state = self._states.get(name)
            if state is not None:
                state.since, state.loading = None, -1


def _extras(state: _State) -> tuple[Any, ...]:
    return () if state.identity is None else state.identity.extra_keys


def _words(why: Uncacheable) -> tuple[str, str]:
    return why.reason, why.detail


def _preemptions(request: Any) -> int:
    return int(getattr(request, "num_preemptions", 0))


def _reads_nothing(request: Any) -> bool:
    """Whether a request wants all of its tokens computed: for the logprobs of its prompt, say."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def _grow(tables: list[list[int]], new: Sequence[Sequence[int]] | None, anew: bool) -> None:
    """Add new blocks to block tables; or begin them anew, after a preemption."""
    if anew:
        tables[:] = [list(group) for group in new or ()]
    else:
        for table, more in zip(tables, new or (), strict=bool(new)):
            table.extend(more)
