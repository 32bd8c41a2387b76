"""`TierLookup`: which tier has an object, the fastest first; nothing is read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from kvcore.completion import attempt, drop_traceback
from kvcore.keys import Key
from kvcore.tiers.host_tier import HostTier
from kvcore.tiers.observer import TierObserver
from kvcore.tiers.store_tier import StoreTier, Unusable
from kvcore.tiers.stores.contract import StoreStat, StoreUnavailableError

__all__ = ["HOST", "TierLookup"]

HOST = "host"
"""What the host tier is called."""
_AT_A_TIME = 32


class TierLookup:
    """Asks tiers what they have.

    Parameters
    ----------
    host : HostTier
    tiers : sequence of StoreTier
        The fastest first. One that fails is passed over.
    observer : TierObserver
    unusable : Unusable
        Frames that this process cannot read: they are not there.
    """

    def __init__(self, host: HostTier, tiers: Sequence[StoreTier], observer: TierObserver, unusable: Unusable) -> None:
        self._host, self._tiers = host, list(tiers)
        self._observer, self._unusable = observer, unusable

    def lookup(self, keys: Sequence[Key]) -> list[str]:
        """Return the tiers of the leading objects that are somewhere, up to the first that is nowhere."""
        return [tier for tier in self.locate(keys, prefix=True) if tier is not None]

    def stat(self, keys: Sequence[Key]) -> list[tuple[str, int] | Exception | None]:
        """Return for each object the fastest store that has it, and the bytes of its frame there.

        An object that is in host memory alone has the bytes that it takes there. Where no store could be asked, the
        answer is the first one's error; where one could, and none has it, None.
        """
        answers: list[tuple[str, int] | Exception | None] = [None] * len(keys)
        absent: set[int] = set()
        for tier in self._tiers:
            missing = [i for i, answer in enumerate(answers) if not isinstance(answer, tuple)]
            for i, stat in zip(missing, self.ask(tier, [keys[i] for i in missing], "lookup"), strict=True):
                if isinstance(stat, StoreStat):
                    answers[i] = tier.name, stat.nbytes
                elif stat is None:
                    absent.add(i)
                elif answers[i] is None:
                    answers[i] = stat
        for i in (i for i, answer in enumerate(answers) if not isinstance(answer, tuple)):
            nbytes = self._host.nbytes(keys[i])
            if nbytes:
                answers[i] = HOST, nbytes
            elif i in absent:
                answers[i] = None
        return answers

    def locate(self, keys: Sequence[Key], *, prefix: bool = False) -> list[str | None]:
        """Return for each object the fastest tier that has it, or None.

        Parameters
        ----------
        keys : sequence of Key
        prefix : bool
            End with the first object that is nowhere, which is left out.
        """
        places: list[str | None] = []
        for start in range(0, len(keys), _AT_A_TIME):
            some = keys[start : start + _AT_A_TIME]
            found = self._locate(some)
            if prefix and None in found:
                return places + found[: found.index(None)]
            places += found
        return places

    def ask(self, tier: StoreTier, keys: Sequence[Key], operation: str) -> list[StoreStat | Exception | None]:
        """Return the sizes of frames in a tier.

        Parameters
        ----------
        tier : StoreTier
        keys : sequence of Key
        operation : str
            ``"lookup"``, or ``"retrieve"``: what it is asked for, which the observer is told.

        Returns
        -------
        list of StoreStat or Exception or None
            A tier that fails gives its error for each key; it is told once.
        """
        began = time.perf_counter()
        asked = attempt(tier.store.store.stat_batch, keys)
        answers = [asked] * len(keys) if isinstance(asked, Exception) else [drop_traceback(one) for one in asked]
        stats: list[StoreStat | Exception | None] = []
        for key, answer in zip(keys, answers, strict=True):
            stats.append(None if self._unusable.has(tier.name, key) else answer)
        for failed in _failures(answers):
            self._observer.failure(tier.name, operation, failed)
        hits = sum(isinstance(stat, StoreStat) for stat in stats)
        if operation == "lookup":
            self._observer.lookup(tier.name, hits, len(stats) - hits, time.perf_counter() - began)
        elif hits < len(stats):
            self._observer.miss(tier.name, len(stats) - hits)
        return stats

    def _locate(self, keys: Sequence[Key]) -> list[str | None]:
        began = time.perf_counter()
        places: list[str | None] = [HOST if key in self._host else None for key in keys]
        hits = len(keys) - places.count(None)
        self._observer.lookup(HOST, hits, len(keys) - hits, time.perf_counter() - began)
        for tier in self._tiers:
            missing = [i for i, place in enumerate(places) if place is None]
            if not missing:
                break
            for i, stat in zip(missing, self.ask(tier, [keys[i] for i in missing], "lookup"), strict=True):
                if isinstance(stat, StoreStat):
                    places[i] = tier.name
        return places


def _failures(answers: Sequence[StoreStat | Exception | None]) -> Iterable[Exception]:
    """Return the different errors; that a tier was not asked, because it is down, is none."""
    errors = {id(one): one for one in answers if isinstance(one, Exception)}
    return {str(one): one for one in errors.values() if not isinstance(one, StoreUnavailableError)}.values()
