"""The list of known failures: a test or a pattern, and why it fails, one a line."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvcore.errors import ConfigError

__all__ = ["KnownFailure", "read_xfails", "stale"]

_LINE = re.compile(r"(?P<pattern>[^#]*?)\s*(?:#\s*(?P<reason>.*?))?\s*")


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """One line: a test's name within the suite (``test_bits.py::test_pack[uint8]``) or a pattern of names, and why."""

    pattern: str
    reason: str
    line: int

    def matches(self, name: str) -> bool:
        """Tell whether a test is meant. ``*`` and ``?`` are wildcards; brackets, which test names have, are literal."""
        return fnmatch.fnmatchcase(name, self.pattern.replace("[", "[[]"))


def read_xfails(path: Path) -> list[KnownFailure]:
    """Read the list. Empty lines, and lines that begin with ``#``, are left out.

    Raises
    ------
    ConfigError
        The file cannot be read, or a line gives no reason.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"known failures in {path} cannot be read: {error}") from error
    known = []
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line.strip())
        pattern, reason = (match["pattern"], match["reason"]) if match else ("", None)
        if not pattern:
            continue
        if not reason:
            raise ConfigError(f"{path}:{number}: {pattern!r} has no reason; write '{pattern}  # why it fails'")
        known.append(KnownFailure(pattern, reason, number))
    return known


def stale(known: Iterable[KnownFailure], names: Iterable[str]) -> list[KnownFailure]:
    """Return the lines that mean no test at all."""
    everything = list(names)
    return [k for k in known if not any(map(k.matches, everything))]
