"""An open store with namespaces that nobody else uses: what each test gets."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from types import TracebackType

import pytest

from kvcore.errors import StoreError
from kvcore.tiers.stores import Store, StoreKey
from kvcore_conformance.stores.targets import Target

__all__ = ["Space", "content", "errors_of", "refused"]


class Space:
    """A store, opened, and keys that are this object's alone. Use it in a ``with``: what is under its keys is removed.

    Parameters
    ----------
    target : Target
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.store: Store = target.open()
        self._salt = secrets.token_bytes(16)
        self._keys: dict[StoreKey, None] = {}

    def __enter__(self) -> Space:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.store.close()
        if self.target.persistent:
            with self.target.open() as store:
                store.delete_batch(tuple(self._keys))

    def namespace(self, n: int = 0) -> bytes:
        """Return the digest of one of its namespaces."""
        return hashlib.sha256(self._salt + n.to_bytes(4, "little")).digest()

    def key(self, n: int | bytes = 0, namespace: int = 0) -> StoreKey:
        """Return a key by a number, or by its digest."""
        digest = n if isinstance(n, bytes) else hashlib.sha256(b"%d" % n).digest()
        key = StoreKey(self.namespace(namespace), digest)
        self._keys[key] = None
        return key

    def keys(self, count: int, namespace: int = 0) -> list[StoreKey]:
        """Return the keys of the first numbers."""
        return [self.key(n, namespace) for n in range(count)]

    def listed(self) -> list[StoreKey]:
        """Return, sorted, those keys of the whole store that are in namespaces of this object."""
        mine = {key.namespace for key in self._keys}
        return sorted(key for key in self.store.list() if key.namespace in mine)

    def reopen(self) -> Store:
        """Close the store and open it again."""
        self.store.close()
        self.store = self.target.open()
        return self.store


def content(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that look random, the same for the same arguments, and different for others."""
    return hashlib.shake_128(b"%d/%d" % (seed, nbytes)).digest(nbytes)


def errors_of(outcome: object) -> Iterator[StoreError]:
    """Give the errors in what a call returned: of a batch those of its keys."""
    for item in outcome if isinstance(outcome, list) else [outcome]:
        if isinstance(item, StoreError):
            yield item


def refused(call: Callable[[], object]) -> list[StoreError]:
    """Call, and return the errors that it raised or, for each key, returned; fail where there are none."""
    try:
        outcome = call()
    except StoreError as error:
        return [error]
    errors = list(errors_of(outcome))
    if not errors or len(errors) != len(outcome if isinstance(outcome, list) else [outcome]):
        pytest.fail(f"it should have raised or returned a StoreError for each key, and gave {outcome!r:.200}")
    return errors
