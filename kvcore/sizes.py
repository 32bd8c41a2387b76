"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

from kvcore.errors import ConfigError

__all__ = ["parse_size"]

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str, label: str = "") -> int:
    """Return the bytes that a text says.

    Parameters
    ----------
    text : str
        A number, and a unit: ``4GiB``, ``500 MB``, ``1.5g``, in upper or lower case; without one it is bytes. With an
        ``i`` a unit is 1024 of the one before it, else 1000.
    label : str
        What the message begins with, up to the text: ``"capacity="``.

    Raises
    ------
    ConfigError
        It says no size.

    Examples
    --------
    >>> parse_size("1.5KiB"), parse_size("2 MB"), parse_size("4096")
    (1536, 2000000, 4096)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{label}{text!r} is not a size: write 512MiB, 4GiB or a number of bytes")
    number, unit, binary = found.groups()
    scale: int = (1024 if binary else 1000) ** (" KMGT".index(unit.upper()) if unit else 0)
    return round(Decimal(number) * scale)
