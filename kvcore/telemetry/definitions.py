"""The metrics: names, labels, meaning. The exporters and the page of the documentation are made of this table."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMMON_LABELS", "METRICS", "SECONDS", "Metric", "by_name"]

COMMON_LABELS = ("model", "engine", "rank")
"""Labels of every metric: the model's name, the engine's id in this process, and the tensor-parallel rank."""

SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the buckets of times: from a lookup in host memory to a load that somebody should look at."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One family of series.

    Parameters
    ----------
    name : str
        As Prometheus shows it; that of a counter ends in ``_total``.
    kind : {"counter", "gauge", "histogram"}
    unit : str
        What is counted or measured.
    help : str
        One sentence.
    labels : tuple of str
        Its own labels, which come after `COMMON_LABELS`.
    """

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds of a histogram's buckets, without the infinite one; none for the other kinds."""
        return SECONDS if self.kind == "histogram" else ()


# --- requests

REQUESTS = Metric(
    "kvcore_requests_total", "counter", "calls", "Calls of the engine: lookup, store, retrieve.", ("operation",)
)
REQUEST_SECONDS = Metric(
    "kvcore_request_seconds", "histogram", "seconds", "What callers of the engine waited for a call.", ("operation",)
)
LOOKUP_TOKENS = Metric("kvcore_lookup_tokens_total", "counter", "tokens", "Tokens of the sequences looked up.")
HIT_TOKENS = Metric("kvcore_hit_tokens_total", "counter", "tokens", "Tokens of them whose KV the cache can give.")
MISSED_TOKENS = Metric(
    "kvcore_missed_tokens_total",
    "counter",
    "tokens",
    "Tokens without KV from the cache: `not_found` by a lookup, or found, asked for and `not_loaded`.",
    ("reason",),
)
STORED_TOKENS = Metric("kvcore_stored_tokens_total", "counter", "tokens", "Tokens whose KV was given to the tiers.")
STORED_BYTES = Metric("kvcore_stored_bytes_total", "counter", "bytes", "Bytes of that KV, as the engine has it.")
RETRIEVED_TOKENS = Metric("kvcore_retrieved_tokens_total", "counter", "tokens", "Tokens whose KV the engine was given.")
RETRIEVED_BYTES = Metric("kvcore_retrieved_bytes_total", "counter", "bytes", "Bytes of that KV, as the engine has it.")
UNCACHEABLE = Metric(
    "kvcore_uncacheable_requests_total", "counter", "requests", "Requests that cannot be cached, and why.", ("reason",)
)

# --- tiers

TIER_SECONDS = Metric(
    "kvcore_tier_seconds",
    "histogram",
    "seconds",
    "Work of a tier: to look up some chunks, to retrieve some, to store some.",
    ("tier", "operation"),
)
TIER_LOOKUPS = Metric(
    "kvcore_tier_lookup_chunks_total",
    "counter",
    "chunks",
    "Chunks that a tier was asked about, and whether it has them: `hit` or `miss`.",
    ("tier", "result"),
)
TIER_HITS = Metric("kvcore_tier_hit_chunks_total", "counter", "chunks", "Chunks had from a tier by loads.", ("tier",))
TIER_HIT_BYTES = Metric("kvcore_tier_hit_bytes_total", "counter", "bytes", "Bytes of the KV of these.", ("tier",))
TIER_MISSES = Metric(
    "kvcore_tier_missed_chunks_total", "counter", "chunks", "Chunks that loads looked for in vain.", ("tier",)
)
TIER_STORED = Metric("kvcore_tier_stored_chunks_total", "counter", "chunks", "Chunks put into a tier.", ("tier",))
TIER_STORED_BYTES = Metric(
    "kvcore_tier_stored_bytes_total", "counter", "bytes", "Bytes that they take there, coded.", ("tier",)
)
TIER_FAILURES = Metric(
    "kvcore_tier_failures_total",
    "counter",
    "failures",
    "Chunks that could not be stored, used or removed, and lookups that failed.",
    ("tier", "operation"),
)
TIER_EVICTED = Metric(
    "kvcore_tier_evicted_chunks_total", "counter", "chunks", "Chunks that left to make room, or expired.", ("tier",)
)
TIER_EVICTED_BYTES = Metric("kvcore_tier_evicted_bytes_total", "counter", "bytes", "Bytes of these.", ("tier",))
TIER_DEGRADED = Metric(
    "kvcore_tier_degraded", "gauge", "0 or 1", "1 while a tier does not answer and is left out.", ("tier",)
)
TIER_OUTAGES = Metric("kvcore_tier_outages_total", "counter", "outages", "How often a tier was left out.", ("tier",))
TIER_OUTAGE_SECONDS = Metric(
    "kvcore_tier_outage_seconds_total", "counter", "seconds", "How long outages lasted that are over.", ("tier",)
)
TIER_BYTES = Metric("kvcore_tier_bytes", "gauge", "bytes", "Bytes in a tier, where it knows.", ("tier",))
TIER_OBJECTS = Metric("kvcore_tier_objects", "gauge", "objects", "Objects in a tier, where it knows.", ("tier",))
TIER_CAPACITY = Metric(
    "kvcore_tier_capacity_bytes",
    "gauge",
    "bytes",
    "Most bytes that a tier may hold, where there is a bound.",
    ("tier",),
)

# --- serdes

SERDE_SECONDS = Metric(
    "kvcore_serde_seconds",
    "histogram",
    "seconds",
    "Work of a serde on one chunk, without waiting for a thread: `serialize` or `deserialize`.",
    ("serde", "operation"),
)
SERDE_BYTES = Metric(
    "kvcore_serde_bytes_total", "counter", "bytes", "Bytes that a serde wrote or read, coded.", ("serde", "operation")
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def by_name(name: str) -> Metric | None:
    """Return the metric of a name; None where there is none."""
    return _BY_NAME.get(name)
