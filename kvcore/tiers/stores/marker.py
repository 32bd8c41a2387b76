"""What a place says of itself: that it is a store, of which format and version."""

from __future__ import annotations

import errno
import json

from kvcore.errors import StoreError

__all__ = ["check_marker", "marker_bytes"]


def marker_bytes(format_name: str, version: int) -> bytes:
    """Return what a store writes into its place."""
    return json.dumps({"format": format_name, "version": version}).encode() + b"\n"


def check_marker(found: bytes, format_name: str, version: int, *, where: str, other: str) -> None:
    """Check that a place is a store of this version.

    Parameters
    ----------
    found : bytes
        What it says.
    format_name, version : str, int
        What it should say.
    where, other : str
        For messages: what was read, and what may be used in its stead (``"directory"``).

    Raises
    ------
    StoreError
        EEXIST: it says something else.
    """
    try:
        fields = json.loads(found)
    except ValueError as error:
        raise StoreError(
            errno.EEXIST,
            f"{where} is not JSON ({error}): not a kvcore store, or a damaged one; choose another {other}",
        ) from error
    if fields != {"format": format_name, "version": version}:
        raise StoreError(
            errno.EEXIST,
            f"{where} says {fields}, this build uses format {format_name!r} version {version}; choose another {other}, "
            "or the kvcore that wrote this one",
        )
