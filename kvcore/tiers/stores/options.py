"""Options in the URI of a store: ``?name=value&...``, and the values that several stores take."""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import parse_qsl

from kvcore.errors import ConfigError
from kvcore.sizes import parse_size

__all__ = ["read_count", "read_flag", "read_size", "read_time", "split_options"]

_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)"
_TIME = re.compile(_NUMBER + r" ?(us|ms|s|min|h)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def split_options(rest: str, known: Collection[str], *, scheme: str) -> tuple[str, dict[str, str]]:
    """Split what follows the scheme of a URI at its ``?``.

    Parameters
    ----------
    rest : str
    known : collection of str
        The options that the store has.
    scheme : str
        For messages.

    Returns
    -------
    tuple of (str, dict)
        What stands before the ``?``, and the options, percent-decoded.

    Raises
    ------
    ConfigError
        An option that the store does not have, or that is given twice or without a value.
    """
    path, mark, query = rest.partition("?")
    names = ", ".join(known)
    try:
        # In the query of a form, which this is not, a plus is a space.
        pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True, strict_parsing=bool(mark and query))
    except ValueError as error:
        got = "what has an @ in it; a ? in a password is written %3F" if "@" in query else repr(query)
        raise ConfigError(f"{scheme}: options are written ?name=value&name=value, got {got}") from error
    options: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            raise ConfigError(f"a store {scheme}: has no option {name!r}; there are {names}")
        if name in options or not value:
            raise ConfigError(f"{scheme}: the option {name} is given {'twice' if value else 'without a value'}")
        options[name] = value
    return path, options


def read_size(text: str, option: str) -> int:
    """Return the bytes that a text such as ``4GiB``, ``500MB`` or ``4096`` says; `ConfigError` where it is no size."""
    return parse_size(text, f"{option}=")


def read_count(text: str, option: str) -> int:
    """Return the number that up to nine digits say; `ConfigError` where it is no such number."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise ConfigError(f"{option} is a number, got {text!r}")
    return int(text)


def read_time(text: str, option: str, *, unit: str = "") -> float:
    """Return the seconds that a text such as ``5ms``, ``30s`` or ``2h`` says; `ConfigError` where it is no time.

    A number alone is in `unit`, where that is given.
    """
    found = _TIME.fullmatch(text if text[-1:].isalpha() else f"{text}{unit}")
    if not found:
        raise ConfigError(f"{option}={text!r} is not a time: write 5ms, 30s or 2h")
    return float(found[1]) * _SECONDS[found[2]]


def read_flag(text: str, option: str) -> bool:
    """Return what ``1`` or ``0`` says; `ConfigError` for anything else."""
    if text not in {"0", "1"}:
        raise ConfigError(f"{option}={text!r}: write 1 or 0")
    return text == "1"
