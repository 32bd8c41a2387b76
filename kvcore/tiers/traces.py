"""Traces: which chunks requests asked for, as a file of JSON lines. docs/eviction.md has the format."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvcore.errors import ConfigError

__all__ = ["BYTES_PER_TOKEN", "TRACE_VERSION", "Request", "Trace", "read_trace", "write_trace"]

TRACE_VERSION = 1
"""The version of the format that is written, and the only one that is read."""

BYTES_PER_TOKEN = 131_072
"""K and V of one token where a trace does not say it: 32 layers, 8 heads of 128, two bytes an element."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Parameters
    ----------
    time : float
        Seconds from the start of the trace.
    tokens : int
        Of the whole prompt: those of its chunks, and fewer than one chunk's behind them.
    chunks : tuple of str
        Keys of the prompt's full chunks in prefix order. A key names the whole prefix that it ends.
    tenant : str
    nbytes : tuple of int, optional
        Stored bytes of each chunk, where they were recorded.
    """

    time: float
    tokens: int
    chunks: tuple[str, ...]
    tenant: str = ""
    nbytes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of time.

    Parameters
    ----------
    chunk_tokens : int
        Tokens of a chunk.
    requests : tuple of Request
    bytes_per_token : int
        Bytes of K and V of one token, for chunks without recorded sizes.
    """

    chunk_tokens: int
    requests: tuple[Request, ...]
    bytes_per_token: int = BYTES_PER_TOKEN


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace; a file of that name is replaced.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """
    header = {
        "kvcore_trace": TRACE_VERSION,
        "chunk_tokens": trace.chunk_tokens,
        "bytes_per_token": trace.bytes_per_token,
    }
    try:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(header) + "\n")
            file.writelines(json.dumps(_as_json(request)) + "\n" for request in trace.requests)
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be written: {error.strerror}") from error


def read_trace(path: Path) -> Trace:
    """Read a trace, and check it.

    Raises
    ------
    ConfigError
        The file cannot be read, or is no trace of this version; the message names the line and the field. Besides
        types and ranges it is checked that times do not go back, that the tokens fit the number of chunks, and that a
        chunk always follows the same chunk: a key names its whole prefix.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return _Reader(path).read(file)
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not UTF-8 text, and so no trace: {error.reason}") from error


def _as_json(request: Request) -> dict[str, Any]:
    line: dict[str, Any] = {"time": request.time, "tokens": request.tokens, "chunks": list(request.chunks)}
    if request.tenant:
        line["tenant"] = request.tenant
    if request.nbytes is not None:
        line["bytes"] = list(request.nbytes)
    return line


class _Reader:
    """Reads one file, and knows where it is in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line = 0
        self._fields: dict[str, Any] = {}
        self._before: dict[str, tuple[str | None, int]] = {}  # chunk -> the one before it, and the line that said so

    def read(self, lines: Iterable[str]) -> Trace:
        requests: list[Request] = []
        header: tuple[int, int] | None = None
        for number, text in enumerate(lines, 1):
            self._line = number
            if header is None:
                header = self._header(text)
            elif text.strip():
                requests.append(self._request(text, header[0], requests[-1].time if requests else 0.0))
        if header is None:
            raise ConfigError(f"trace {self._path} is empty; its first line is its header")
        return Trace(header[0], tuple(requests), header[1])

    def _header(self, text: str) -> tuple[int, int]:
        self._load(text, ("kvcore_trace", "chunk_tokens"), ("bytes_per_token",), versioned=True)
        return self._count("chunk_tokens", 1), self._count("bytes_per_token", 1, BYTES_PER_TOKEN)

    def _request(self, text: str, chunk_tokens: int, earliest: float) -> Request:
        self._load(text, ("time", "tokens", "chunks"), ("tenant", "bytes"))
        time = self._time(earliest)
        chunks = self._list("chunks", lambda key: isinstance(key, str) and key != "", "a key, which is a string")
        self._check_chain(chunks)
        tokens = self._count("tokens", 1)
        if not 0 <= tokens - len(chunks) * chunk_tokens < chunk_tokens:
            self._fail("tokens", f"has not {len(chunks)} full chunks of {chunk_tokens}, as the field chunks has")
        tenant = self._fields.get("tenant", "")
        if not isinstance(tenant, str):
            self._fail("tenant", "is not a string")
        nbytes = None
        if "bytes" in self._fields:
            nbytes = self._list("bytes", lambda n: type(n) is int and n > 0, "an integer above 0")
            if len(nbytes) != len(chunks):
                self._fail("bytes", f"has {len(nbytes)} numbers for {len(chunks)} chunks")
        return Request(time, tokens, tuple(chunks), tenant, None if nbytes is None else tuple(nbytes))

    def _time(self, earliest: float) -> float:
        value = self._fields["time"]
        # A list of types, as True is an int, and an integer may be beyond what a float holds.
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
            self._fail("time", "is not a number of seconds")
        if value < earliest:
            self._fail("time", f"is before the {earliest:g} of the request before")
        return float(value)

    def _check_chain(self, chunks: Sequence[str]) -> None:
        previous = None
        for place, key in enumerate(chunks):
            parent, line = self._before.setdefault(key, (previous, self._line))
            if parent != previous:
                this = "is the first" if previous is None else f"follows {previous!r}"
                other = "is the first" if parent is None else f"follows {parent!r}"
                self._fail(
                    "chunks", f"is no chain: [{place}], {key!r}, {this}, but {other} on line {line}", value=False
                )
            previous = key

    def _load(self, text: str, needed: Sequence[str], optional: Sequence[str], *, versioned: bool = False) -> None:
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"trace {self._path}, line {self._line} is not JSON: {error}") from error
        if not isinstance(fields, Mapping):
            raise ConfigError(f"trace {self._path}, line {self._line} is not a JSON object")
        self._fields = dict(fields)
        version = fields.get("kvcore_trace")
        if versioned and version is not None and (type(version) is not int or version != TRACE_VERSION):
            self._fail("kvcore_trace", f"is a version that this build does not read; it reads {TRACE_VERSION}")
        for name in needed:
            if name not in fields:
                raise ConfigError(
                    f"trace {self._path}, line {self._line}: there is no field {name}; needed are {', '.join(needed)}"
                )
        for name in fields:
            if name not in (*needed, *optional):
                raise ConfigError(
                    f"trace {self._path}, line {self._line}: unknown field {name}; "
                    f"there are {', '.join((*needed, *optional))}"
                )

    def _count(self, name: str, least: int, default: int | None = None) -> int:
        value = self._fields.get(name, default)
        if type(value) is not int or value < least:
            self._fail(name, f"is not an integer of at least {least}")
        return value

    def _list(self, name: str, good: Callable[[Any], bool], wanted: str) -> list[Any]:
        values = self._fields[name]
        if not isinstance(values, list):
            self._fail(name, "is not a list")
        for place, value in enumerate(values):
            if not good(value):
                self._fail(name, f"is wrong: [{place}], {value!r}, is not {wanted}", value=False)
        return list(values)

    def _fail(self, name: str, what: str, *, value: bool = True) -> NoReturn:
        shown = f" {self._fields[name]!r}" if value else ""
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        raise ConfigError(f"trace {self._path}, line {self._line}, field {name}:{shown} {what}")
