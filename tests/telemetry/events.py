"""Events of an engine as data, for whatever takes them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvcore.engine.observer import EngineObserver
from kvcore.errors import StoreError

TIERS = ("host", "disk")
COUNT = st.integers(0, 5000)
# Exact in binary, and their sums too: what is summed in another order is the same.
SECONDS = st.integers(0, 1 << 16).map(lambda n: n / 1024)
TIER = st.sampled_from(TIERS)

EVENTS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("lookup"), TIER, COUNT, COUNT, SECONDS),
    st.tuples(st.just("retrieve"), TIER, COUNT, COUNT, SECONDS),
    st.tuples(st.just("miss"), TIER, COUNT),
    st.tuples(st.just("store"), TIER, COUNT, COUNT, SECONDS),
    st.tuples(st.just("failure"), TIER, st.sampled_from(["store", "lookup"]), st.just(StoreError("gone"))),
    st.tuples(st.just("evict"), TIER, COUNT, COUNT),
    st.tuples(st.just("serde"), st.just("kvs1"), st.sampled_from(["serialize", "deserialize"]), COUNT, SECONDS),
    st.tuples(st.just("request_lookup"), st.just("r"), COUNT, COUNT, SECONDS, COUNT),
    st.tuples(st.just("request_store"), st.just("r"), COUNT, COUNT, COUNT, SECONDS),
    st.tuples(st.just("request_retrieve"), st.just("r"), COUNT, COUNT, COUNT, SECONDS),
    st.tuples(st.just("uncacheable"), st.sampled_from(["no content hash", "prompt embeddings"])),
    st.tuples(st.just("degraded"), TIER, st.just("connection refused")),
    st.tuples(st.just("recovered"), TIER, SECONDS),
)


def tell(observer: EngineObserver, event: tuple[Any, ...]) -> None:
    """Call what the event says."""
    getattr(observer, event[0])(*event[1:])
