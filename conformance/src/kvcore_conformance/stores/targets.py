"""What the suite is run against: a store that can be opened again and again."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

from kvcore.tiers.stores import Store, open_store
from kvcore_conformance.stores.servers import RedisServer, SeaweedServer, Server, serving

__all__ = ["NAMED", "Target", "masked", "target_of"]

# Anywhere in it: a URI may stand within the URI of a store that wraps another.
_PASSWORD = re.compile(r"(?<=://)([^/?#@:]*):([^/?#]*)@")


@dataclass(frozen=True, slots=True)
class Target:
    """A store under test.

    Parameters
    ----------
    name : str
        In the names of tests.
    open : callable
        Opens it, each time on the same data. The data may hold anything: the suite uses namespaces of its own, and
        removes what it put there, but for what the store keeps in quarantine.
    uri : str, optional
        With which `kvcore.tiers.stores.open_store` opens it in another process, for the crash test.
    persistent : bool
        Whether frames outlive `close`, and the process.
    server : Server, optional
        Where the frames are, if the suite may kill it and start it again.
    secrets : tuple of str
        Words that no name and no message may hold.
    """

    name: str
    open: Callable[[], Store]
    uri: str | None = field(default=None, repr=False)
    persistent: bool = True
    server: Server | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def at(cls, uri: str, *, name: str = "", persistent: bool = True, server: Server | None = None) -> Target:
        """Return the store of a URI, and of the server that serves it, if that is ours."""
        return cls(
            name or masked(uri),
            lambda: open_store(uri),
            uri,
            persistent,
            server,
            (*_passwords(uri), *(server.secrets if server else ())),
        )


def masked(uri: str) -> str:
    """Return a URI for people: without its passwords."""
    return _PASSWORD.sub(r"\1:***@", uri)


def _passwords(uri: str) -> tuple[str, ...]:
    found = [password for _, password in _PASSWORD.findall(uri) if password]
    return (*found, *(unquote(password) for password in found if "%" in password))


def _volatile(name: str, uri: str) -> contextlib.AbstractContextManager[Target]:
    return contextlib.nullcontext(Target.at(uri, name=name, persistent=False))


@contextlib.contextmanager
def _in_folder(name: str, before: str, after: str = "") -> Iterator[Target]:
    with tempfile.TemporaryDirectory(prefix="kvcore-") as folder:
        yield Target.at(f"{before}{Path(folder) / 'store'}{after}", name=name)


@contextlib.contextmanager
def _on_server(name: str, kind: type[Server]) -> Iterator[Target]:
    with serving(kind) as server, mock.patch.dict(os.environ, server.environment):
        yield Target.at(server.uri, name=name, server=server)


NAMED: dict[str, Callable[[], contextlib.AbstractContextManager[Target]]] = {
    "memory": lambda: _volatile("memory", "memory:"),
    "fs": lambda: _in_folder("fs", "fs:"),
    "fs-direct": lambda: _in_folder("fs-direct", "fs:", "?direct=1"),
    "fault": lambda: _volatile("fault", "fault::memory:"),
    "capped": lambda: _in_folder("capped", "capped:10GiB,check=0:fs:"),
    "resp": lambda: _on_server("resp", RedisServer),
    "s3": lambda: _on_server("s3", SeaweedServer),
}
"""Stores that need nothing from whoever runs the suite: folders and servers are made and removed."""


def target_of(word: str, *, volatile: bool = False) -> contextlib.AbstractContextManager[Target]:
    """Return a store by one of the names of `NAMED`, or by a URI.

    Parameters
    ----------
    word : str
    volatile : bool
        Of a URI: its frames do not outlive the store.
    """
    if word in NAMED:
        return NAMED[word]()
    return contextlib.nullcontext(Target.at(word, persistent=not volatile))
