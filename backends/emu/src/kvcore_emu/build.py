"""Compiling the kernels on first use: one shared library for each text of the sources, kept in the user's cache."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvcore.errors import BackendLoadError
from kvcore.kernels import get_include
from kvcore.kernels.images import kept
from kvcore_emu.probe import COMPILER

__all__ = ["library"]

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
    command = [COMPILER, *_FLAGS, *flags, f"-DKVCORE_EMU_WARP={warp_width}", "-I", get_include()]
    own = [part for path in sorted(_SOURCES.iterdir()) for part in (path.name, path.read_bytes())]
    return kept(
        f"emu-{warp_width}.so",
        [*command, _run([COMPILER, "--version"]), *own],
        lambda path: _make(path, command),
        cache,
    )


def _make(path: Path, command: list[str]) -> None:
    _run([*command, str(_SOURCES / "emu.cpp"), "-o", str(path)])


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True).stdout
    except OSError as error:
        raise BackendLoadError(f"{command[0]} cannot be run: {error}; install a C++17 compiler") from error
    except subprocess.CalledProcessError as error:
        first = "\n".join(error.stderr.decode("utf-8", "replace").splitlines()[:20])
        raise BackendLoadError(f"{' '.join(command)} failed:\n{first}") from error
