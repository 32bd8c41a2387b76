"""The pluggy markers, and how an implementation declares what it can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pluggy

__all__ = ["Capabilities", "capabilities", "hookimpl", "hookspec", "supports"]

F = TypeVar("F", bound=Callable[..., Any])

hookspec = pluggy.HookspecMarker("kvcore")
hookimpl = pluggy.HookimplMarker("kvcore")
"""Marks a function of a backend as the implementation of the op it is named after."""

_ATTRIBUTE = "_kvcore_capabilities"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an implementation declares; None means no limit.

    Parameters
    ----------
    dtypes : frozenset of str, optional
        Canonical names of the element types of the op's first array or layout.
    layouts : frozenset of str, optional
        Layout strings of paged caches that gather and scatter take.
    arch : frozenset of str, optional
        Device architectures (``"sm_90"``, ``"gfx942"``); compared with ``Runtime.arch``.
    workspace_bytes : callable, optional
        From the static arguments of a plan to the scratch memory one launch needs, in bytes.
    """

    dtypes: frozenset[str] | None = None
    layouts: frozenset[str] | None = None
    arch: frozenset[str] | None = None
    workspace_bytes: Callable[[Mapping[str, Any]], int] | None = None

    def refusal(self, *, dtypes: Sequence[str] = (), layout: str | None = None, arch: str | None = None) -> str | None:
        """Return why a request is not supported, or None if it is. What the request leaves open is not judged."""
        for what, asked, known in (
            *(("dtype", dtype, self.dtypes) for dtype in dtypes),
            ("layout", layout, self.layouts),
            ("architecture", arch, self.arch),
        ):
            if asked is not None and known is not None and asked not in known:
                return f"{what} {asked} is not among those it supports: {', '.join(sorted(known))}"
        return None


_UNLIMITED = Capabilities()


def supports(
    *,
    dtypes: tuple[str, ...] | None = None,
    layouts: tuple[str, ...] | None = None,
    arch: tuple[str, ...] | None = None,
    workspace_bytes: Callable[[Mapping[str, Any]], int] | None = None,
) -> Callable[[F], F]:
    """Declare on an implementation what it takes, so that queries are answered before a call (see `Capabilities`)."""

    def frozen(values: tuple[str, ...] | None) -> frozenset[str] | None:
        return None if values is None else frozenset(values)

    declared = Capabilities(frozen(dtypes), frozen(layouts), frozen(arch), workspace_bytes)

    def mark(function: F) -> F:
        setattr(function, _ATTRIBUTE, declared)
        return function

    return mark


def capabilities(function: Callable[..., Any]) -> Capabilities:
    """Return what an implementation declared with `supports`; without a declaration, no limits."""
    declared = getattr(function, _ATTRIBUTE, _UNLIMITED)
    return declared if isinstance(declared, Capabilities) else _UNLIMITED
