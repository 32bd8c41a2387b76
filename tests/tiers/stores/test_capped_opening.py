"""`CappedStore`: the books that it makes when it is opened, and its URIs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kvcore.codecs import GroupInfo, PartInfo, write_frame
from kvcore.errors import ConfigError, StoreError
from kvcore.keys import StoreKey
from kvcore.tiers.stores import FsStore, MemoryStore, open_store
from kvcore.tiers.stores.capped import CappedStore, open_capped

from .capped_store import NAMESPACE, capped, key, there


def small_frame(name: StoreKey, position: int) -> bytes:
    group = GroupInfo("LTC", range(1), (PartInfo("C", "uint8", 8),), rows=4, base_position=position)
    return bytes(
        write_frame(
            [group], [[bytes(32)]], tokens=4, namespace=name.namespace, key=name.digest, digest=lambda views: [0]
        )
    )


def test_the_books_are_made_again_from_heads_and_times(tmp_path: Path) -> None:
    inner = FsStore(tmp_path)
    # Two chains written at two times, from the first chunk to the last; 9 is no frame, 8 was cut.
    for n, (position, written) in enumerate([(0, 5000), (4, 5001), (8, 5002), (0, 900), (4, 901)], 1):
        inner.put(key(n), small_frame(key(n), position))
        path = tmp_path / NAMESPACE.hex() / f"{n:02x}" / f"{key(n).digest.hex()}.kvf"
        os.utime(path, (written, written))
    inner.put(key(9), b"something else")
    inner.put(key(8), small_frame(key(8), 0)[:-1])
    nbytes = inner.stat(key(1)).nbytes
    store = CappedStore(inner, 5 * nbytes)
    assert there(store) == {1, 2, 3, 4, 5}
    assert inner.stats().quarantined == 2
    order = []
    for n in range(20, 25):
        before = there(store)
        store.put(key(n), bytes(nbytes))
        order += sorted(before - there(store))
    assert order == [5, 4, 3, 2, 1], "the older chain first, and of each the end first"


def test_a_directory_with_more_than_fits_is_brought_to_the_capacity(tmp_path: Path) -> None:
    inner = FsStore(tmp_path)
    for n in range(10):
        inner.put(key(n), bytes(10))
        os.utime(tmp_path / NAMESPACE.hex() / f"{n:02x}" / f"{key(n).digest.hex()}.kvf", (100 * n, 100 * n))
    assert there(capped(35, inner)) == {7, 8, 9}


def test_a_store_that_cannot_scan_is_listed() -> None:
    inner = MemoryStore()
    for n in range(200):
        inner.put(key(n), bytes(3))
    store = capped(1000, inner)
    assert len(there(store)) == 200
    assert store.used_bytes == 600


def test_a_store_that_cannot_be_listed_is_not_opened() -> None:
    class Unreadable(MemoryStore):
        def stat(self, key: Any) -> Any:
            raise StoreError(errno.EIO, "cannot look up")

    inner = Unreadable()
    inner.put(key(1), b"x")
    with pytest.raises(StoreError, match="cannot look up"):
        capped(10, inner)


def test_uris(tmp_path: Path) -> None:
    store = open_store(f"capped:1KiB:fs:{tmp_path}/kv?sync=0")
    assert isinstance(store, CappedStore)
    assert store.capacity_bytes == 1024
    assert store.name == f"capped:1024,policy=lru:fs:{tmp_path}/kv"
    store.put(key(1), b"no frame")
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get(key(1))
    with open_store(f"capped:2000,check=0:fs:{tmp_path}/kv") as opaque:
        assert opaque.get(key(1)) == b"no frame"
    with open_store(f"capped:2000,policy=ttl,ttl=1h:fs:{tmp_path}/kv") as checked:
        assert checked.get(key(1)) is None
        assert checked.stats().quarantined == 1


@pytest.mark.parametrize(
    ("rest", "match"),
    [
        ("", "written capped:SIZE:INNER"),
        ("10GiB", "written capped:SIZE:INNER"),
        ("10GiB:", "written capped:SIZE:INNER"),
        ("tall:fs:{}", "not a size"),
        ("0:fs:{}", "holds nothing"),
        ("1KiB,lru:fs:{}", "'lru' is unknown"),
        ("1KiB,policy=lru,policy=lfu:fs:{}", "given twice"),
        ("1KiB,policy=lur:fs:{}", "did you mean 'lru'"),
        ("1KiB,ttl=5s:fs:{}", "ttl_s"),
        ("1KiB,policy=ttl,ttl=5:fs:{}", "not a time"),
        ("1KiB:ffs:{}", "did you mean"),
    ],
)
def test_uris_that_mean_nothing_open_nothing(tmp_path: Path, rest: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        open_capped(rest.format(tmp_path / "kv"))
    assert not (tmp_path / "kv").exists()
