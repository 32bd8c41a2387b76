"""All `KVCORE_*` environment variables: their names, meaning, defaults and parsers.

Nothing else in kvcore reads the environment. The documentation page and the header of the conformance suite are made
from `VARIABLES`, so a variable that is not here does not exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcore.errors import ConfigError

__all__ = ["VARIABLES", "Settings", "Variable", "current"]


def _text(value: str) -> str:
    return value.strip()


def _flag(value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"", "0", "false", "no", "off"}:
        return False
    raise ValueError("expected 1 or 0")


def _names(value: str) -> tuple[str, ...] | None:
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    return names or None


def _kernels(value: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in filter(None, (p.strip() for p in value.split(","))):
        op, sep, implementation = part.partition("=")
        if not sep or not op.strip() or not implementation.strip():
            raise ValueError(f"{part!r} is not of the form op=implementation")
        pairs.append((op.strip(), implementation.strip()))
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, what it does, its default (as text) and how it is parsed."""

    name: str
    help: str
    default: str
    parse: Callable[[str], Any]
    example: str

    def read(self, environ: Mapping[str, str]) -> Any:
        """Return the parsed value; a value that means nothing raises `ConfigError` naming the variable."""
        raw = environ.get(self.name, self.default)
        try:
            return self.parse(raw)
        except ValueError as error:
            raise ConfigError(f"{self.name}={raw!r}: {error}; for example {self.name}={self.example}") from error


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "KVCORE_BACKEND",
        "Name of the backend to use. It is obeyed, or opening a backend fails; it never falls back to another one.",
        "",
        _text,
        "cpu_ref",
    ),
    Variable(
        "KVCORE_KERNELS",
        "Which implementation of an op to bind where a backend has several: `op=implementation` pairs separated by "
        "commas, `*` for every op not named.",
        "",
        _kernels,
        "digest=native,*=triton",
    ),
    Variable(
        "KVCORE_PLUGINS",
        "Allowlist of backend plug-ins (entry point names, separated by commas). Others are listed but never imported. "
        "Empty: all that are installed.",
        "",
        _names,
        "cpu,cpu_ref",
    ),
    Variable(
        "KVCORE_STRICT",
        "1 forbids every fallback: an op that the chosen backend lacks raises instead of running on cpu_ref.",
        "0",
        _flag,
        "1",
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of all variables at one moment."""

    backend: str
    kernels: tuple[tuple[str, str], ...]
    plugins: tuple[str, ...] | None
    strict: bool


def current(environ: Mapping[str, str] | None = None) -> Settings:
    """Read all variables now (nothing is cached, so tests and notebooks may change them).

    Raises
    ------
    ConfigError
        A variable has a value that means nothing; the message names it and gives an example.
    """
    env = os.environ if environ is None else environ
    return Settings(**{v.name.removeprefix("KVCORE_").lower(): v.read(env) for v in VARIABLES})
