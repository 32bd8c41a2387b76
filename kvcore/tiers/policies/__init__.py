"""Eviction policies: which chunks of a tier go when room is needed. docs/eviction.md says which to choose."""

from __future__ import annotations

from kvcore.tiers.policies.arc import Arc
from kvcore.tiers.policies.contract import EvictionPolicy
from kvcore.tiers.policies.quotas import TenantQuotas
from kvcore.tiers.policies.ranked import Entry, Fifo, Lfu, Lru, Mru, RankedPolicy, Ttl
from kvcore.tiers.policies.registry import ENTRY_POINT_GROUP, create_policy, policy_names, register_policy

__all__ = [
    "ENTRY_POINT_GROUP",
    "Arc",
    "Entry",
    "EvictionPolicy",
    "Fifo",
    "Lfu",
    "Lru",
    "Mru",
    "RankedPolicy",
    "TenantQuotas",
    "Ttl",
    "create_policy",
    "policy_names",
    "register_policy",
]
