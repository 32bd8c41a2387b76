"""The frozen frequency tables, as package data: integers that are part of the stream format.

One JSON file for each set, made once by `kvcore.codecs.tables.generate` and named by its SHA-256 ever after;
frames carry the first 8 bytes of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from pathlib import Path

import numpy as np

from kvcore.entropy import TableSet
from kvcore.errors import ConfigError

__all__ = ["DIGESTS", "parse_table_set", "table_set"]

DIGESTS = {
    "gauss": "e5b80cd1975644a4f528e2c4a8e590c6b2df75fc1a02cef41bad1d52dc8d0e3e",
    "exponent": "d3ff7c863129b691737442afba5a9d7bdc0376fd6c085d3906fee49f3537057f",
    "e4m3fn": "643b81d7b4af592abbbc76aac920700f7523d6ee566a46c7953d23ab62424092",
    "e5m2": "a492a725aef57f1f499d17892d1feef96d6c27431b99e062897ebe87482dd664",
}
"""SHA-256 of the file of each set, in hexadecimal."""

_LOCK = threading.Lock()


def table_set(name: str) -> TableSet:
    """Return a shipped table set; the same object every time.

    Parameters
    ----------
    name : {"gauss", "exponent", "e4m3fn", "e5m2"}
        ``gauss`` (kind integer) is the set of the lossy presets; ``exponent`` (kind exponent) codes sign and
        exponent of bfloat16, float16 and float32 without loss; ``e4m3fn`` and ``e5m2`` (kind code) code the
        bytes of 8-bit floats.

    Raises
    ------
    ConfigError
        There is no such set, or its file is missing or is not the one that was shipped.
    """
    # Without the lock, two threads could each get an object of their own.
    with _LOCK:
        return _load(name)


@functools.cache
def _load(name: str) -> TableSet:
    _digest(name)
    path = Path(__file__).with_name(f"{name}.json")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"table set {name!r}: cannot read {path} ({error}); reinstall kvcore") from error
    return parse_table_set(name, data)


def parse_table_set(name: str, data: bytes) -> TableSet:
    """Return the table set that a file holds, after checking that it is the shipped one.

    Parameters
    ----------
    name : str
        Which set the bytes must be.
    data : bytes
        The whole file.

    Raises
    ------
    ConfigError
        There is no such set, or the digest of the bytes is another one.
    """
    expected = _digest(name)
    digest = hashlib.sha256(data)
    if digest.hexdigest() != expected:
        raise ConfigError(
            f"table set {name!r}: the file has SHA-256 {digest.hexdigest()}, not {expected}; frames coded "
            f"with altered tables would be wrong, so they are not used: reinstall kvcore"
        )
    content = json.loads(data)
    return TableSet(
        name=content["name"],
        kind=content["kind"],
        bits=content["bits"],
        frequency=np.array(content["frequency"], np.uint16),
        cost=np.array(content["cost"], np.uint16),
        digest=digest.digest(),
    )


def _digest(name: str) -> str:
    if name not in DIGESTS:
        raise ConfigError(f"unknown table set {name!r}; known are {', '.join(DIGESTS)}")
    return DIGESTS[name]
