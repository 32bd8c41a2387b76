"""What tiers hold and how they are, for people and dashboards; and emptying them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvcore.completion import drop_traceback
from kvcore.errors import StoreError
from kvcore.keys import StoreKey
from kvcore.tiers.host_tier import HostTier
from kvcore.tiers.lookup import HOST
from kvcore.tiers.store_tier import StoreTier, Unusable
from kvcore.tiers.stores.contract import Store, StoreStat, StoreUsage

__all__ = ["TierHealth", "TierInfo", "clear_host", "clear_tier", "describe_host", "describe_tier", "health_of"]

_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class TierHealth:
    """How a tier is.

    Parameters
    ----------
    state : {"ok", "down"}
        Whether it is asked. One that is down counts as empty.
    seconds : float
        Since how many seconds it is down.
    reason : str
        What went wrong first; empty while all is well.
    """

    state: str = "ok"
    seconds: float = 0.0
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is asked."""
        return self.state == "ok"


@dataclass(frozen=True, slots=True)
class TierInfo:
    """What a tier is, and what it holds now.

    Parameters
    ----------
    name : str
    store : str
        Its store's name: the URI without secrets; ``"host memory"``.
    serde : str
        What its serde is called; empty for host memory, which holds KV as it is.
    read_only : bool
    objects, nbytes : int or None
        Objects and their bytes (frames', in a store); None where it would take a listing to know.
    capacity_bytes : int or None
        Most bytes that it holds; None where there is no bound, or none is known.
    health : TierHealth
    """

    name: str
    store: str
    serde: str
    read_only: bool
    objects: int | None
    nbytes: int | None
    capacity_bytes: int | None
    health: TierHealth


def health_of(tier: StoreTier) -> TierHealth:
    """Return how a tier is; nothing is asked that takes time."""
    outage = tier.outage()
    return TierHealth() if outage is None else TierHealth("down", outage.seconds, outage.reason)


def describe_host(host: HostTier) -> TierInfo:
    """Describe host memory. Bytes are those that are taken, what is being written or read among them."""
    return TierInfo(
        HOST, "host memory", "", False, len(host), host.arena.live_bytes, host.arena.capacity_bytes, TierHealth()
    )


def describe_tier(tier: StoreTier, *, count: bool) -> TierInfo:
    """Describe a tier behind the host tier.

    Parameters
    ----------
    tier : StoreTier
    count : bool
        List the store where it does not know what it holds; not while it is down.

    Raises
    ------
    StoreError
        It cannot be listed.
    """
    store, health = tier.store.store, health_of(tier)
    usage = store.usage()
    if count and health.ok and (usage.objects is None or usage.nbytes is None):
        usage = _counted(store, usage.capacity_bytes)
    return TierInfo(
        tier.name,
        store.name,
        tier.serde_name,
        tier.read_only,
        usage.objects,
        usage.nbytes,
        usage.capacity_bytes,
        health,
    )


def clear_host(host: HostTier, namespace: bytes | None) -> int:
    """Remove all objects from host memory, or those of a namespace that nobody uses; return how many."""
    if namespace is None:
        return host.clear()
    return len(host.delete([key for key in host if bytes(key.namespace) == namespace]))


def clear_tier(tier: StoreTier, namespace: bytes | None, unusable: Unusable) -> tuple[int, StoreError | None]:
    """Remove all objects from a store, or those of a namespace.

    Returns
    -------
    (int, StoreError or None)
        How many went, and the first thing that went wrong. The others were removed all the same.
    """
    store, gone = tier.store.store, 0
    failed: StoreError | None = None
    try:
        for keys in _batches(store.list(namespace)):
            outcomes = store.delete_batch(keys)
            gone += sum(outcome is True for outcome in outcomes)
            unusable.discard(tier.name, keys)
            failed = failed or next((one for one in outcomes if isinstance(one, StoreError)), None)
            if all(isinstance(one, StoreError) for one in outcomes):
                break  # it went down meanwhile, or forbids it
    except StoreError as error:
        failed = failed or error
    return gone, failed if failed is None else drop_traceback(failed)


def _counted(store: Store, capacity_bytes: int | None) -> StoreUsage:
    objects = nbytes = 0
    for keys in _batches(store.list()):
        for stat in store.stat_batch(keys):
            if isinstance(stat, StoreError):
                raise stat
            if isinstance(stat, StoreStat):
                objects, nbytes = objects + 1, nbytes + stat.nbytes
    return StoreUsage(objects, nbytes, capacity_bytes)


def _batches(keys: Iterator[StoreKey]) -> Iterator[Sequence[StoreKey]]:
    while batch := list(islice(keys, _AT_A_TIME)):
        yield batch
