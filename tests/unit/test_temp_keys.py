"""Keys of temporary objects: never the same, and always of the key and the tenant that they serve."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvcore.errors import ConfigError
from kvcore.keys import StoreKey, make_temp_key

KEY = StoreKey(b"n" * 32, b"d" * 32)


@dataclass(frozen=True)
class TenantKey:
    namespace: bytes = b"n" * 32
    digest: bytes = b"d" * 32
    tenant: str = "acme"


def test_a_temporary_key_is_that_of_its_object_and_16_random_bytes():
    temp = make_temp_key(KEY)
    assert (temp.namespace, temp.digest, temp.tenant) == (KEY.namespace, KEY.digest, "")
    assert len(temp.nonce) == 16
    assert StoreKey.of(temp) == KEY


def test_no_two_are_alike():
    temps = {make_temp_key(KEY) for _ in range(1000)}
    assert len(temps) == 1000
    assert len({temp.nonce for temp in temps}) == 1000


def test_the_tenant_is_kept_so_that_quotas_still_count():
    assert make_temp_key(TenantKey()).tenant == "acme"
    assert make_temp_key(make_temp_key(TenantKey())).tenant == "acme"


def test_store_keys_are_compared_by_their_digests_and_checked():
    assert StoreKey.of(TenantKey()) == KEY
    assert StoreKey.of(KEY) is KEY
    for digests in ((b"n" * 31, b"d" * 32), (b"n" * 32, b"")):
        with pytest.raises(ConfigError, match="has 32 bytes, got"):
            StoreKey(*digests)
