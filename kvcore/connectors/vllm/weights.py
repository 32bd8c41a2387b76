"""Which weights are these? A name for the content of files, found without reading all of it.

A file's size, its header and samples of its content are digested: of each tensor of a safetensors file the first,
middle and last 4 KiB, of other files pieces at even distances. Where the files lie and what their folder is called
does not matter.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kvcore.errors import ConfigError, StoreError

__all__ = ["SAMPLE_BYTES", "content_digest", "file_signature", "snapshot_commit"]

SAMPLE_BYTES = 4096
"""Bytes of a sample."""
_EVEN_SAMPLES = 1024  # of a file that is no safetensors: 4 MiB, or all of a smaller one
_MAX_HEADER = 256 << 20
_TAG = b"kvcore content 1\n"
_U64 = struct.Struct("<Q")
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
# What weights are kept in, best first: of several, engines read the first that is there.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def snapshot_commit(path: str | os.PathLike[str]) -> str | None:
    """Return the commit of a folder in a Hugging Face cache (``.../snapshots/COMMIT``); None for any other."""
    place = Path(path)
    known = place.parent.name == "snapshots" and _COMMIT.fullmatch(place.name) is not None
    return place.name if known else None


def file_signature(path: str | os.PathLike[str]) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of change of a file, or of a folder's files, to see whether they have changed.

    Raises
    ------
    StoreError
        There is no such file or folder, or it cannot be read.
    """
    try:
        return tuple((file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in _files(Path(path)))
    except OSError as error:
        raise _unreadable(path, error) from error


def content_digest(path: str | os.PathLike[str]) -> bytes:
    """Return a digest of what weights are in a file, or in a folder: 32 bytes.

    Parameters
    ----------
    path : path
        Of a folder, the weights in the format that engines prefer, and ``adapter_config.json`` if it has one. Folders
        in it are not looked at.

    Raises
    ------
    StoreError
        There is no such file or folder, or it cannot be read.
    ConfigError
        It holds no weights, or a safetensors file that is malformed.
    """
    from blake3 import blake3

    digest = blake3(_TAG)
    try:
        files = _files(Path(path))
        if not any(file.suffix in _WEIGHTS for file in files) and Path(path).is_dir():
            raise ConfigError(f"{path} holds no weights ({', '.join(_WEIGHTS)}); give model_revision a value")
        for file in files:
            # Of a shard its name is part of the content, of a single file it is not.
            name = file.name.encode() if len(files) > 1 else file.suffix.encode()
            digest.update(_U64.pack(len(name)) + name)
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                digest.update(_U64.pack(size))
                for offset, count in _samples(stream, size, file):
                    stream.seek(offset)
                    data = stream.read(count)
                    digest.update(_U64.pack(offset) + _U64.pack(len(data)) + data)
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.digest()


def _files(path: Path) -> list[Path]:
    """The files that decide: in the order of their names."""
    if not path.is_dir():
        path.stat()
        return [path]
    every = sorted(entry for entry in path.iterdir() if entry.is_file())
    best = next((suffix for suffix in _WEIGHTS if any(file.suffix == suffix for file in every)), None)
    return [file for file in every if file.suffix == best or file.name == "adapter_config.json"]


def _samples(stream: BinaryIO, size: int, file: Path) -> Iterator[tuple[int, int]]:
    """Offsets and sizes of what is read of a file."""
    if file.suffix != ".safetensors":
        yield from _even(size)
        return
    data_start, tensors = _header(stream, size, file)
    yield 0, data_start
    for start, stop in tensors:
        count = min(SAMPLE_BYTES, stop - start)
        for offset in sorted({start, start + (stop - start - count) // 2, stop - count}):
            yield data_start + offset, count


def _even(size: int) -> Iterator[tuple[int, int]]:
    if size <= _EVEN_SAMPLES * SAMPLE_BYTES:
        yield 0, size
        return
    for number in range(_EVEN_SAMPLES):
        yield (size - SAMPLE_BYTES) * number // (_EVEN_SAMPLES - 1), SAMPLE_BYTES


def _header(stream: BinaryIO, size: int, file: Path) -> tuple[int, list[tuple[int, int]]]:
    """Where the data of a safetensors file begins, and the ranges of its tensors in it."""
    head = stream.read(8)
    length = _U64.unpack(head)[0] if len(head) == 8 else 0
    if not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise ConfigError(f"{file} is no safetensors file: it has no header; fetch it again")
    try:
        header: dict[str, Any] = json.loads(stream.read(length))
        ranges = [
            (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is no safetensors file: its header is malformed; fetch it again") from error
    if any(not 0 <= start <= stop <= size - 8 - length for start, stop in ranges):
        raise ConfigError(f"{file} is cut short: its header names tensors that it does not hold; fetch it again")
    return 8 + length, ranges


def _unreadable(path: str | os.PathLike[str], error: OSError) -> StoreError:
    return StoreError(f"{path} cannot be read: {error.strerror or error}; give model_revision a value, or fetch it")
