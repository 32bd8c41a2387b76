"""The lookup channel: the scheduler asks the workers' engines what they could load.

The scheduler has no engine of its own: what can be loaded, only those know who load. `LookupServer` answers in each
worker, `LookupClient` asks all of them and takes the least, over a Unix socket in a directory that only this user may
enter. The scheduler never waits for longer than it was told to; an answer that is late is "ask again", and a worker
that gives none is a cache without hits, until it answers again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from kvcore.connectors.vllm.lookup_client import LookupClient
from kvcore.connectors.vllm.lookup_server import LookupEngine, LookupServer
from kvcore.errors import ConfigError, StoreError

__all__ = ["LookupClient", "LookupEngine", "LookupServer", "lookup_address"]

_PATH_MAX = 100  # of a Unix socket; the systems' limits are 104 and 108


def lookup_address(engine_id: str, rank: int, directory: str | os.PathLike[str] | None = None) -> str:
    """Return the address of a worker's server, and make the directory that it is in.

    Parameters
    ----------
    engine_id : str
        Tells engines of one machine apart; the same in the scheduler and in its workers.
    rank : int
    directory : path, optional
        A directory of this user's, closed to all others; made if it is not there. By default one in the system's
        directory for temporary files.

    Raises
    ------
    ConfigError
        The path is too long for a socket.
    StoreError
        The directory cannot be made, is not this user's, or is open to others.
    """
    place = Path(tempfile.gettempdir()) / f"kvcore-{os.getuid()}" if directory is None else Path(directory)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.lstat()
    except OSError as error:
        raise StoreError(
            f"no directory {place} for the lookup sockets: {error.strerror}; give another one as lookup_directory"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StoreError(
            f"{place} is no directory that only this user may enter, and the lookup sockets need one; run chmod 700 "
            "on it, or give another one as lookup_directory"
        )
    name = f"{hashlib.sha256(engine_id.encode()).hexdigest()[:16]}-{rank}"
    path = str(place / name)
    if len(os.fsencode(path)) > _PATH_MAX:
        raise ConfigError(
            f"{path} is longer than the {_PATH_MAX} bytes that a socket's path may have; give a shorter one as "
            "lookup_directory"
        )
    return f"ipc://{path}"
