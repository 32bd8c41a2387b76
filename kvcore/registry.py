"""Things by name: those of kvcore, those a program registers, and those that packages bring as entry points."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from kvcore.errors import ConfigError

__all__ = ["Registry"]

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Factories by name. A name of kvcore or a registered one comes before an entry point of that name.

    Parameters
    ----------
    kind : str
        What is made, for messages: ``"policy"``.
    group : str
        Of the entry points by which packages bring factories: the name, and the factory.
    own : mapping of str to (factory or str)
        Those of kvcore. A string is ``"module:attribute"``, imported when the name is first asked for.
    """

    def __init__(self, kind: str, group: str, own: Mapping[str, F | str]) -> None:
        self.kind = kind
        self.group = group
        self._factories: dict[str, F | str] = dict(own)

    def register(self, name: str, factory: F) -> None:
        """Make a factory known in this process.

        Raises
        ------
        ConfigError
            The name is taken.
        """
        names = self.names()
        if name in names:
            raise ConfigError(f"there is a {self.kind} {name!r} already; choose a name other than {', '.join(names)}")
        self._factories[name] = factory

    def names(self) -> tuple[str, ...]:
        """Return the names that `find` knows, of installed packages too. Imports none of those."""
        return tuple(dict.fromkeys([*self._factories, *sorted(point.name for point in self._points())]))

    def find(self, name: str) -> F:
        """Return the factory of a name.

        Raises
        ------
        ConfigError
            There is no such name (the message lists all, the nearest first), or several packages bring it, or it
            cannot be imported. Where a module is missing, `ModuleNotFoundError` is the cause.
        """
        factory = self._factories.get(name)
        if factory is None:
            return self._bring(name)
        if isinstance(factory, str):
            point = importlib.metadata.EntryPoint(name, factory, self.group)
            loaded: F = self._load(point)
            self._factories[name] = loaded
            return loaded
        return factory

    def _points(self) -> list[importlib.metadata.EntryPoint]:
        return list(importlib.metadata.entry_points(group=self.group))

    def _bring(self, name: str) -> F:
        found = {point.value: point for point in self._points() if point.name == name}
        if not found:
            names = self.names()
            near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.3)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"there is no {self.kind} {name!r}; {hint}there are {', '.join(names)}")
        if len(found) > 1:
            raise ConfigError(
                f"several packages bring a {self.kind} {name!r}: {', '.join(sorted(found))}; uninstall all but one"
            )
        return self._load(found.popitem()[1])

    def _load(self, point: importlib.metadata.EntryPoint) -> F:
        try:
            factory: F = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.kind} {point.name} cannot be loaded from {point.value}: {error}") from error
        return factory
