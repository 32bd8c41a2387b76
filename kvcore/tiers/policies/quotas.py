"""Quotas of tenants, over any policy."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from kvcore.errors import ConfigError
from kvcore.tiers.policies.contract import EvictionPolicy

__all__ = ["TenantQuotas"]


class TenantQuotas(EvictionPolicy):
    """Tenants that use more than their quota give first, those furthest above it foremost.

    A quota is a share that is safe, not a limit: while there is room, a tenant may use it. Which of its chunks go, the
    inner policy says. A chunk counts on the tenant that inserted it, and by the prefix closure it stays as long as a
    chunk of any tenant follows it. An eviction looks at all tenants that have resident chunks.

    Parameters
    ----------
    inner : EvictionPolicy
    quotas : mapping of str to int
        Bytes by tenant.
    default : int, optional
        Bytes of each tenant that `quotas` does not name; without it they have no quota, and are never above it.

    Raises
    ------
    ConfigError
        A quota is negative.
    """

    def __init__(self, inner: EvictionPolicy, quotas: Mapping[str, int], *, default: int | None = None) -> None:
        super().__init__(inner.capacity_bytes)
        for tenant, quota in [*quotas.items(), ("(default)", default or 0)]:
            if quota < 0:
                raise ConfigError(f"the quota of tenant {tenant!r} is {quota:,} bytes: the least is 0")
        self._inner, self._quotas, self._default = inner, dict(quotas), default

    @property
    def used_bytes(self) -> int:
        """Bytes of all resident chunks."""
        return self._inner.used_bytes

    def __len__(self) -> int:
        return len(self._inner)

    def __contains__(self, key: object) -> bool:
        return key in self._inner

    def tenants(self) -> Mapping[str, int]:  # noqa: D102
        return self._inner.tenants()

    def insert(  # noqa: D102
        self, key: Hashable, nbytes: int, *, parent: Hashable | None = None, tenant: str = "", now: float
    ) -> None:
        self._inner.insert(key, nbytes, parent=parent, tenant=tenant, now=now)

    def touch(self, key: Hashable, *, now: float) -> bool:  # noqa: D102
        return self._inner.touch(key, now=now)

    def remove(self, key: Hashable) -> bool:  # noqa: D102
        return self._inner.remove(key)

    def pin(self, key: Hashable) -> bool:  # noqa: D102
        return self._inner.pin(key)

    def unpin(self, key: Hashable) -> bool:  # noqa: D102
        return self._inner.unpin(key)

    def evict(self, nbytes: int, *, now: float, tenant: str | None = None) -> list[Any]:  # noqa: D102
        if tenant is not None:
            return self._inner.evict(nbytes, now=now, tenant=tenant)
        before = self.used_bytes
        evicted: list[Any] = []
        for excess, name in self._over():
            missing = nbytes - (before - self.used_bytes)
            if missing <= 0:
                return evicted
            evicted += self._inner.evict(min(missing, excess), now=now, tenant=name)
        return evicted + self._inner.evict(nbytes - (before - self.used_bytes), now=now)

    def expire(self, *, now: float) -> list[Any]:  # noqa: D102
        return self._inner.expire(now=now)

    def _over(self) -> list[tuple[int, str]]:
        """Return the tenants above their quota and by how many bytes, the furthest first."""
        over = []
        for tenant, used in self.tenants().items():
            quota = self._quotas.get(tenant, self._default)
            if quota is not None and used > quota:
                over.append((used - quota, tenant))
        return sorted(over, key=lambda pair: (-pair[0], pair[1]))
