"""A model of vLLM's scheduler, its blocks and its workers, small enough to see what every block holds.

A slot of a block holds a number that stands for the tokens up to it, as KV does: it is right only where all before it
was right when it was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kvcore.connectors.vllm.metadata import Load, Save
from kvcore.connectors.vllm.scheduler import SchedulerSide
from kvcore.engine.keys import ChunkKey, Namespace, chunk_keys

from .requests_made import Maker

NULL = 0


class FakeLookups:
    """What the workers' engines would answer, from a set of digests."""

    def __init__(self, block: int) -> None:
        self.stored: set[bytes] = set()
        self.block = block
        self.questions: dict[str, tuple[list[ChunkKey], int, int]] = {}
        self.slow = 0
        self.age = 0.0
        self.asks = 0
        self.steps = 0
        self.reported: dict[str, int] = {}
        self.reasons: list[str] = []
        self.prefetched: list[ChunkKey] = []
        self.closed = False

    def ask(self, request: str, keys: Sequence[ChunkKey], num_tokens: int, *, computed: int = 0) -> None:
        self.asks += 1
        self.questions[request] = (list(keys), num_tokens, computed)

    def asked(self, request: str) -> float | None:
        return self.age if request in self.questions else None

    def answer(self, request: str) -> int | None:
        if self.slow:
            self.slow -= 1
            return None
        keys, total, computed = self.questions[request]
        hit = 0
        for key in keys:
            if key.digest not in self.stored:
                break
            hit = key.stop
        hit = min(hit, total - 1) // self.block * self.block
        hit = hit if hit > computed else 0
        self.reported[request] = max(hit, self.reported.get(request, 0))
        return hit

    def next_step(self) -> None:
        self.steps += 1

    def forget(self, request: str) -> None:
        self.questions.pop(request, None)

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        self.prefetched += keys

    def uncacheable(self, reason: str) -> None:
        self.reasons.append(reason)

    def close(self) -> None:
        self.closed = True


@dataclass
class Live:
    """A request in the model."""

    request: Any
    outputs: int
    status: str = "waiting"
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    asked: set[bytes] = field(default_factory=set)
    started: bool = False


@dataclass(frozen=True)
class Setup:
    """What kind of engine."""

    chunk: int = 8
    block: int = 4
    groups: int = 1
    window: int | None = None  # of the last group
    budget: int = 10
    num_blocks: int = 24
    asynchronous: bool = True
    save_decode: bool = True
    partial: bool = False
    says_tables: bool = True
    resumed_are_new: bool = False
    loads: bool = True
    saves: bool = True


class Model:
    """Runs steps, and checks all that the connector says."""

    def __init__(self, make: Maker, setup: Setup) -> None:
        self.make, self.setup = make, setup
        self.space = Namespace("model", "1", chunk_tokens=setup.chunk)
        self.lookups = FakeLookups(setup.block)
        self.side = SchedulerSide(
            self.space,
            self.lookups,
            block_tokens=setup.block,
            groups=setup.groups,
            windowed=setup.window is not None,
            loads=setup.loads,
            saves=setup.saves,
            asynchronous=setup.asynchronous,
            save_decode=setup.save_decode,
            save_partial_chunk=setup.partial,
        )
        self.live: dict[str, Live] = {}
        self.running: list[str] = []
        self.waiting: list[str] = []
        self.refs = dict.fromkeys(range(1, setup.num_blocks + 1), 0)
        self.cached: dict[tuple[int, ...], int] = {}  # vLLM's own prefix cache, of one group
        self.slots: dict[tuple[int, int, int], int] = {}  # group, block, offset: what it holds
        self.inflight: dict[str, Load] = {}
        self.orphans: dict[str, Live] = {}  # aborted while their KV was on its way
        self.received: set[str] = set()
        self.failed: set[int] = set()  # the worker's: blocks without KV
        self.fail_sync: int | None = None
        self.count = 0

    # --- what comes from outside

    def add(self, tokens: list[int], outputs: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.live[name] = Live(self.make.request(name, tokens), outputs)
        self.waiting.append(name)
        self.side.on_new_request(self.live[name].request)

    def abort(self, name: str) -> None:
        live = self.live[name]
        if name in self.inflight:
            self.orphans[name] = live
        self.finish(name, keep_blocks=name in self.inflight)

    def receive(self, name: str, upto: int) -> None:
        """End an asynchronous load: tokens from `upto` on could not be read."""
        load = self.inflight.pop(name)
        good = self.fill(load, max(min(upto, load.stop), load.start), self.tokens_of(name))
        if name in self.orphans:
            self.release(self.orphans.pop(name))
            return
        live = self.live[name]
        self.received.add(name)
        if good < load.stop:
            self.quarantine(load, good)
            live.computed = 0 if self.setup.groups > 1 else good // self.setup.block * self.setup.block

    # --- a step

    def step(self) -> None:
        size, budget = self.setup, self.setup.budget
        scheduled: dict[str, int] = {}
        new: list[tuple[Any, tuple[list[int], ...], int]] = []
        cached: list[tuple[Any, tuple[list[int], ...] | None, int]] = []
        resumed: set[str] = set()
        preempted: set[str] = set()
        for name in list(self.running):
            if name not in self.running or not budget:
                continue
            live = self.live[name]
            count = min(live.request.num_tokens - live.computed, budget)
            while (added := self.allocate(live, live.computed + count)) is None:
                victim = self.running[-1]
                self.preempt(victim)
                preempted.add(victim)
                if victim in scheduled:
                    budget += scheduled.pop(victim)
                    cached = [entry for entry in cached if entry[0].request_id != victim]
                if victim == name:
                    break
            if name in self.running:
                scheduled[name] = count
                budget -= count
                cached.append((live.request, added if any(added or ()) else None, live.computed))
        for name in list(self.waiting) if not preempted else ():
            if not budget or not self.admit(name, budget, scheduled, new, cached, resumed):
                break
            budget -= scheduled.get(name, 0)
        tables = {n: tuple(list(t) for t in self.live[n].tables) for n in scheduled} if size.says_tables else None
        output = self.make.output(
            new=new,
            cached=cached,
            resumed=resumed,
            scheduled=scheduled,
            preempted=preempted if size.says_tables else None,
            tables=tables,
        )
        before = {name: self.live[name].computed for name in scheduled}
        meta = self.side.build_connector_meta(output)
        assert len({load.request for load in meta.loads}) == len(meta.loads)
        assert len({save.request for save in meta.saves}) == len(meta.saves)
        bad: set[int] = set()
        for load in meta.loads:
            bad |= self.begin(load, before)
        self.compute(scheduled)
        for save in meta.saves:
            self.save(save, before, scheduled)
        self.after(scheduled, before, bad)

    def admit(
        self,
        name: str,
        budget: int,
        scheduled: dict[str, int],
        new: list[Any],
        cached: list[Any],
        resumed: set[str],
    ) -> bool:
        """Try to start a waiting request; False: no other one may be tried."""
        live = self.live[name]
        if live.status == "loading":
            if name not in self.received:
                return True
            self.received.remove(name)
            live.status = "waiting"
            if live.computed == 0:
                self.release(live)
        external, asynchronous, total = 0, False, live.computed
        if live.computed == 0:
            local = self.local_hit(live)
            external_or_none, asynchronous = self.side.get_num_new_matched_tokens(
                live.request, len(local) * self.setup.block
            )
            if external_or_none is None:
                return True
            external = external_or_none
            assert asynchronous in (False, self.setup.asynchronous or self.setup.groups > 1)
            assert external or not asynchronous
            total = len(local) * self.setup.block + external
            assert external % self.setup.block == 0
            assert total < live.request.num_tokens, "the last token is always computed"
            live.tables = [list(local)] + [[] for _ in range(self.setup.groups - 1)]
            for block in local:
                self.refs[block] += 1
        if asynchronous and self.lacking(live) > sum(not n for n in self.refs.values()) - self.reserved(name):
            self.release(live)  # else loads could take all blocks, and none of the requests could go on
            return False
        count = 0 if asynchronous else min(live.request.num_tokens - total, budget)
        if self.allocate(live, total + count, computed=total) is None:
            if live.computed == 0:
                self.release(live)
            return False
        tables = tuple(list(table) for table in live.tables)
        self.side.update_state_after_alloc(live.request, self.make.blocks(tables), external)
        live.computed = total
        if asynchronous:
            live.status = "loading"
            return True
        self.waiting.remove(name)
        self.running.append(name)
        live.status = "running"
        scheduled[name] = count
        if live.started and not self.setup.resumed_are_new:
            resumed.add(name)
            cached.append((live.request, tables, total))
        else:
            new.append((live.request, tables, total))
        live.started = True
        return True

    def allocate(self, live: Live, tokens: int, computed: int | None = None) -> tuple[list[int], ...] | None:
        """Give a request blocks for its first tokens; return the new ones, None if there is no room."""
        size, window = self.setup.block, self.setup.window
        wanted = -(-tokens // size)
        skip = 0
        if window is not None:
            skip = max((live.computed if computed is None else computed) - window + 1, 0) // size
            table = live.tables[-1]
            for at in range(min(skip, len(table))):
                if table[at] != NULL:
                    self.refs[table[at]] -= 1
                    table[at] = NULL
        need = sum(wanted - len(table) for table in live.tables)
        if window is not None:
            need -= max(skip - len(live.tables[-1]), 0)
        free = [block for block, count in self.refs.items() if not count]
        if need > len(free):
            return None
        added: tuple[list[int], ...] = tuple([] for _ in live.tables)
        for number, table in enumerate(live.tables):
            while len(table) < wanted:
                null = window is not None and number == len(live.tables) - 1 and len(table) < skip
                block = NULL if null else free.pop(0)
                if not null:
                    self.refs[block] = 1
                    self.cached = {key: one for key, one in self.cached.items() if one != block}
                table.append(block)
                added[number].append(block)
        return added

    def lacking(self, live: Live) -> int:
        """How many blocks a request still needs for all of its tokens."""
        return sum(-(-live.request.num_tokens // self.setup.block) - len(table) for table in live.tables)

    def reserved(self, but: str) -> int:
        """How many blocks others need that have begun."""
        return sum(self.lacking(live) for name, live in self.live.items() if name != but and any(live.tables))

    def local_hit(self, live: Live) -> list[int]:
        """Blocks of vLLM's own prefix cache."""
        if self.setup.groups > 1:
            return []
        tokens, size, found = list(live.request.all_token_ids), self.setup.block, []
        for stop in range(size, live.request.num_tokens, size):
            block = self.cached.get(tuple(tokens[:stop]))
            if block is None:
                break
            found.append(block)
        return found

    # --- what the workers do

    def begin(self, load: Load, before: dict[str, int]) -> set[int]:
        """Check a load, and do it if it is for this step; return the blocks that could not be filled."""
        live = self.live[load.request]
        assert self.setup.loads
        assert 0 <= load.start < load.stop < live.request.num_tokens == load.num_tokens
        assert [list(table) for table in load.blocks] == live.tables, "blocks of others"
        assert all(len(table) * self.setup.block >= load.stop for table in load.blocks)
        true = self.keys(live)
        assert list(load.keys) == [key for key in true if key.start < load.stop]
        assert load.asynchronous == (load.request not in before)
        if load.asynchronous:
            self.inflight[load.request] = load
            return set()
        assert before[load.request] == load.stop
        upto = load.stop if self.fail_sync is None else max(min(self.fail_sync, load.stop), load.start)
        self.fail_sync = None
        good = self.fill(load, upto, self.tokens_of(load.request))
        if good == load.stop:
            return set()
        self.quarantine(load, good)
        return set(load.blocks[0][good // self.setup.block : -(-load.stop // self.setup.block)])

    def quarantine(self, load: Load, good: int) -> None:
        """A chunk that could not be read is stored no more, and has to be saved again."""
        self.lookups.stored -= {key.digest for key in load.keys if key.start <= good < key.stop}
        self.lookups.reported[load.request] = good
        self.live[load.request].asked -= {key.digest for key in load.keys if key.stop > good}

    def fill(self, load: Load, upto: int, tokens: list[int]) -> int:
        for number, table in enumerate(load.blocks):
            for at in range(load.start, upto):
                self.put(number, table, at, value(tokens, at))
        size = self.setup.block
        self.failed -= set(load.blocks[0][load.start // size : upto // size])
        if self.setup.groups == 1:
            self.failed |= set(load.blocks[0][upto // size : -(-load.stop // size)])
        return upto

    def put(self, group: int, table: Sequence[int], at: int, what: int) -> None:
        block = table[at // self.setup.block]
        if block != NULL:
            self.slots[group, block, at % self.setup.block] = what

    def right(self, live: Live, tokens: list[int], at: int) -> bool:
        """Whether all groups hold what they should for a token, as far as their windows reach."""
        size = self.setup.block
        return all(
            table[at // size] == NULL or self.slots.get((number, table[at // size], at % size)) == value(tokens, at)
            for number, table in enumerate(live.tables)
        )

    def compute(self, scheduled: dict[str, int]) -> None:
        """The forward pass. Requests that share blocks see what others write in it."""
        for _ in range(len(scheduled) + 1):
            for name, count in scheduled.items():
                live, tokens = self.live[name], self.tokens_of(name)
                sound = all(self.right(live, tokens, at) for at in range(live.computed))
                for at in range(live.computed, live.computed + count):
                    for number, table in enumerate(live.tables):
                        self.put(number, table, at, value(tokens, at) if sound else -1)

    def save(self, save: Save, before: dict[str, int], scheduled: dict[str, int]) -> None:
        live, tokens = self.live[save.request], self.tokens_of(save.request)
        done = before[save.request] + scheduled[save.request]
        assert self.setup.saves
        assert save.keys
        assert save.computed <= before[save.request]
        assert save.total == min(done, live.request.num_tokens)
        assert [list(table) for table in save.blocks] == live.tables
        prompt = live.request.num_prompt_tokens
        true = chunk_keys(self.space, tokens[: save.total]) + chunk_keys(self.space, tokens[:prompt], partial=True)
        for key in save.keys:
            assert key in true, "a key of other tokens"
            assert key.stop <= save.total, "a chunk that is not complete"
            assert self.setup.save_decode or key.stop <= prompt
        live.asked |= {key.digest for key in save.keys}
        size = self.setup.block
        table = live.tables[0]
        self.failed -= set(table[-(-save.computed // size) : -(-save.total // size)])
        if self.failed & set(table[: -(-save.total // size)]):
            return
        for key in save.keys:
            for at in range(key.start, key.stop):
                assert self.right(live, tokens, at), f"wrong KV of token {at} was saved"
            if all(NULL not in table[key.start // size : -(-key.stop // size)] for table in live.tables):
                self.lookups.stored.add(key.digest)

    def after(self, scheduled: dict[str, int], before: dict[str, int], bad: set[int]) -> None:
        """Take the results of a step."""
        size, marked, affected = self.setup.block, set(), set()
        for name in list(self.running) if bad else ():
            if name not in scheduled:
                continue
            live, first = self.live[name], None
            for index, block in enumerate(live.tables[0][: -(-before[name] // size)]):
                if block in bad:
                    affected.add(name)
                    if block not in marked and first is None:
                        first = index
                    marked.add(block)
            if name in affected:
                live.computed = before[name] if first is None else first * size
        for name, count in scheduled.items():
            live = self.live[name]
            if name in affected:
                continue
            live.computed += count
            tokens = self.tokens_of(name)
            if self.setup.groups == 1:
                for stop in range(size, live.computed + 1, size):
                    self.cached.setdefault(tuple(tokens[:stop]), live.tables[0][stop // size - 1])
            if live.computed == live.request.num_tokens:
                if live.request.num_tokens - live.request.num_prompt_tokens >= live.outputs:
                    self.complete(name)
                else:
                    live.request.append_output_token_ids(sum(tokens) % 5)

    def complete(self, name: str) -> None:
        """A request is done: everything of it that can be saved was asked to be, or was there."""
        live = self.live[name]
        if self.setup.saves:
            limit = live.computed if self.setup.save_decode else live.request.num_prompt_tokens
            known = self.lookups.reported.get(name, 0)
            for key in chunk_keys(self.space, self.tokens_of(name)[:limit]):
                assert key.digest in live.asked or key.stop <= known, f"tokens {key.start}:{key.stop} were never saved"
            if self.setup.partial:
                prompt = list(live.request.all_token_ids)[: live.request.num_prompt_tokens]
                tail = chunk_keys(self.space, prompt, partial=True)[-1]
                assert tail.digest in live.asked or tail.stop <= known
        self.finish(name)

    def finish(self, name: str, *, keep_blocks: bool = False) -> None:
        live = self.live.pop(name)
        self.running = [one for one in self.running if one != name]
        self.waiting = [one for one in self.waiting if one != name]
        self.received.discard(name)
        self.lookups.reported.pop(name, None)
        assert self.side.request_finished(live.request, tuple(live.tables)) == (False, None)
        if not keep_blocks:
            self.release(live)

    def preempt(self, name: str) -> None:
        live = self.live[name]
        self.running.remove(name)
        self.waiting.insert(0, name)
        self.release(live)
        live.computed, live.status = 0, "waiting"
        live.request.num_preemptions += 1

    def release(self, live: Live) -> None:
        for table in live.tables:
            for block in table:
                if block != NULL:
                    self.refs[block] -= 1
        live.tables = [[] for _ in live.tables]

    def keys(self, live: Live) -> list[ChunkKey]:
        return chunk_keys(self.space, list(live.request.all_token_ids), partial=self.setup.partial)

    def tokens_of(self, name: str) -> list[int]:
        live = self.live.get(name) or self.orphans[name]
        return list(live.request.all_token_ids)


@lru_cache(4096)
def values(tokens: tuple[int, ...]) -> list[int]:
    """What slots hold for a sequence's tokens."""
    found, link = [], 0
    for token in tokens:
        link = hash((link, token))
        found.append(link)
    return found


def value(tokens: list[int], at: int) -> int:
    return values(tuple(tokens))[at]
