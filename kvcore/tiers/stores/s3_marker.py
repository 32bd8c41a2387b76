"""The object by which the prefix of a bucket is known to be a store, and of which version."""

from __future__ import annotations

import errno

from kvcore.errors import StoreError
from kvcore.tiers.stores.marker import check_marker, marker_bytes
from kvcore.tiers.stores.s3_client import S3Client

__all__ = ["FORMAT", "MARKER", "VERSION", "claim"]

MARKER = "kvcore-store.json"
FORMAT, VERSION = "kvcore-s3-store", 1


def claim(client: S3Client, name: str) -> None:
    """Make sure that what is below the prefix is a store of this version; make it one if nothing is.

    Of several processes that do so at once one writes the marker, by a conditional request; where the server has none,
    all write the same.

    Raises
    ------
    StoreError
        EEXIST where there is something else, and nothing was written; else what the server said.
    """
    found = _read(client)
    if found is None:
        foreign = next((page[0] for page in client.names() if page), None)
        if foreign is not None:
            found = _read(client)  # another process may have made a store meanwhile
        if foreign is not None and found is None:
            raise StoreError(
                errno.EEXIST,
                f"{name} is not a kvcore store: there is {foreign[:100]!r} and no {MARKER}; choose another prefix",
            )
    data = marker_bytes(FORMAT, VERSION)
    if found is None:
        found = data if client.create(MARKER, data) else _read(client) or data
    check_marker(found, FORMAT, VERSION, where=f"{MARKER} in {name}", other="prefix")


def _read(client: S3Client) -> bytes | None:
    piece = client.read_whole(MARKER, "open a store")
    return None if piece is None else bytes(piece.data)
