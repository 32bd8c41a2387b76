"""Device code that is compiled on first use: the text of it, and the folder where what was made of it is kept."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcore.errors import BackendLoadError
from kvcore.kernels import get_include

__all__ = ["cache_folder", "device_source", "headers_hash", "keep_last", "kept"]

_HASH_DIGITS = 20


def device_source(kernels: str, *, context: str = "ctx_gpu.hpp", macro: str = "KVCORE_GPU_KERNEL") -> str:
    """Return the text of an image: every kernel that a host library launches, to be found by name.

    It is compiled with `get_include()` on the include path and ``KVCORE_DEVICE_ONLY`` defined.

    Parameters
    ----------
    kernels : str
        What ``kvcore_kernel_list()`` of the library returns: lines "name<TAB>type".
    context : str
        The core header of the compiler's execution context.
    macro : str
        What defines a kernel in that header, called with its name and type.
    """
    entries = [line.split("\t", 1) for line in kernels.splitlines()]
    lines = [f"#include <kvcore/{context}>", "#include <kvcore/kernels.hpp>"]
    return "\n".join([*lines, *(f"{macro}({name}, {kind})" for name, kind in entries), ""])


def kept(
    name: str,
    key: Sequence[str | bytes],
    make: Callable[[Path], None],
    folder: Path | None = None,
    count: int = 8,
) -> Path:
    """Return a file that is made once for each key and content of the core's headers, and kept.

    Parameters
    ----------
    name : str
        ``"cuda-sm_90.cubin"`` is kept as ``cuda-sm_90-<hash>.cubin``.
    key : sequence of str or bytes
        All that the file depends on beside the headers: sources, options, the compiler and its version.
    make : callable
        Writes the file to the path that it is given, in a folder of its own that ends with the call.
    folder : Path, optional
        Where to keep it; default `cache_folder`.
    count : int
        How many files of this name are kept: those used last.

    Raises
    ------
    BackendLoadError
        The folder cannot be written. What `make` raises passes through, and leaves nothing behind.
    """
    place = cache_folder() if folder is None else folder
    stem, dot, suffix = name.partition(".")
    path = place / f"{stem}-{_hash(key)}{dot}{suffix}"
    try:
        if path.exists() and path.stat().st_size > 0:  # a machine that lost power may leave a name without content
            with contextlib.suppress(OSError):  # a folder that others fill, and that is read only, serves as well
                os.utime(path)
            return path
        place.mkdir(parents=True, exist_ok=True)
        # Made beside its place and moved there, so that processes that start at once never see half of it.
        with tempfile.TemporaryDirectory(prefix=f"{stem}-", dir=place) as scratch:
            made = Path(scratch) / path.name
            make(made)
            made.replace(path)
        keep_last(place, f"{glob.escape(stem)}-{'[0-9a-f]' * _HASH_DIGITS}{glob.escape(dot + suffix)}", count)
    except OSError as error:
        raise BackendLoadError(
            f"compiled kernels cannot be kept in {place}: {error}; let XDG_CACHE_HOME name a folder that is writable"
        ) from error
    return path


def keep_last(folder: Path, pattern: str, count: int) -> None:
    """Remove the files and folders of a pattern except for those used last, by the time they have."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process may be at the same
            found.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(found, reverse=True)[count:]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Return where compiled kernels are kept: ``$XDG_CACHE_HOME/kvcore`` or ``~/.cache/kvcore``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvcore"


def headers_hash() -> str:
    """Return the hash of the core's headers: libraries and images of other headers do not fit together."""
    return _hash(())


def _hash(key: Sequence[str | bytes]) -> str:
    digest = hashlib.sha256()
    parts = [part.encode() if isinstance(part, str) else part for part in key]
    include = Path(get_include())
    for path in sorted(p for p in include.rglob("*") if p.suffix in {".h", ".hpp"}):
        parts += [path.relative_to(include).as_posix().encode(), path.read_bytes()]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:_HASH_DIGITS]
