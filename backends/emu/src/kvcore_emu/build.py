"""Compiling the kernels on first use: one shared library for each text of the sources, kept in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvcore.errors import BackendLoadError
from kvcore.kernels import get_include
from kvcore_emu.probe import COMPILER

__all__ = ["cache_folder", "keep_last", "library"]

_KEPT = 8  # libraries of a warp width, the last ones used

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")


def library(warp_width: int, flags: tuple[str, ...] = (), cache: Path | None = None) -> Path:
    """Return the library for a warp width, compiled if these sources have not been compiled before.

    Parameters
    ----------
    warp_width : {16, 32, 64}
    flags : tuple of str
        More options for the compiler. A folder of headers among them must have a name that changes with its content.
    cache : Path, optional
        Folder to keep it in, with the last few others; default ``$XDG_CACHE_HOME/kvcore`` or ``~/.cache/kvcore``.

    Raises
    ------
    BackendLoadError
        The compiler refused, and the message has its first lines; or the folder cannot be written.
    """
    folder = cache_folder() if cache is None else cache
    command = [COMPILER, *_FLAGS, *flags, f"-DKVCORE_EMU_WARP={warp_width}", "-I", get_include()]
    path = folder / f"emu-{warp_width}-{_key(command)}.so"
    try:
        if path.exists():
            with contextlib.suppress(OSError):  # a folder that others fill, and that is read only, serves as well
                os.utime(path)
            return path
        folder.mkdir(parents=True, exist_ok=True)
        # Compiled beside its place and moved there, so that processes that start at once never see half of it.
        with tempfile.TemporaryDirectory(prefix="emu-", dir=folder) as scratch:
            made = Path(scratch) / path.name
            _run([*command, str(_SOURCES / "emu.cpp"), "-o", str(made)])
            made.replace(path)
        keep_last(folder, f"emu-{warp_width}-*.so", _KEPT)
    except OSError as error:
        raise BackendLoadError(
            f"compiled kernels cannot be kept in {folder}: {error}; let XDG_CACHE_HOME name a folder that is writable"
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
    """Return where libraries are kept unless a caller says another place."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvcore"


def _key(command: list[str]) -> str:
    """Hash all that the library depends on: sources, flags and the compiler."""
    digest = hashlib.sha256(repr(command).encode())
    digest.update(_run([COMPILER, "--version"]))
    headers = sorted(p for p in Path(get_include()).rglob("*") if p.suffix in {".h", ".hpp"})
    for path in (*sorted(_SOURCES.iterdir()), *headers):
        text = path.read_bytes()
        digest.update(path.name.encode() + len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:20]


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True).stdout
    except OSError as error:
        raise BackendLoadError(f"{command[0]} cannot be run: {error}; install a C++17 compiler") from error
    except subprocess.CalledProcessError as error:
        first = "\n".join(error.stderr.decode("utf-8", "replace").splitlines()[:20])
        raise BackendLoadError(f"{' '.join(command)} failed:\n{first}") from error
