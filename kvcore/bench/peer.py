"""The peer of a benchmark: another program's Python environment, asked to time the same work.

It runs `peer_lmcache.py` as a child process, pinned to the same core, and waits while kvcore is timed: one of the two
works at a time. A request is one line of JSON, ``{"what": ..., "loops": n, ...}``; so is the answer, ``{"seconds": s}``
for one loop, or ``{"error": why}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from kvcore.errors import KVCoreError

__all__ = ["Peer"]

_QUIET = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONWARNINGS": "ignore",
}


class Peer:
    """A running peer; a context manager.

    Parameters
    ----------
    python : str
        The interpreter of an environment in which LMCache is installed.

    Raises
    ------
    KVCoreError
        It does not start, or there is no LMCache in it.
    """

    def __init__(self, python: str) -> None:
        worker = Path(__file__).with_name("peer_lmcache.py")
        try:
            self._process = subprocess.Popen(
                [python, str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **_QUIET, "PYTHONPATH": ""},
            )
        except OSError as error:
            raise KVCoreError(f"the peer {python} does not start: {error}") from error
        try:
            self.name = str(self._ask({"what": "hello"})["name"])
        except KVCoreError as error:
            self.close()
            raise KVCoreError(
                f"{python} has no LMCache that works: {error}; name the Python of an environment that has"
            ) from error

    def seconds(self, request: dict[str, Any], loops: int) -> float:
        """Return how long one loop of a request took.

        Raises
        ------
        KVCoreError
            The peer cannot do it, or has died.
        """
        return float(self._ask({**request, "loops": loops})["seconds"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise KVCoreError("the peer has no pipes")
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise KVCoreError("the peer has died; its own messages are above") from error
        for line in stdout:
            if line.startswith("{"):  # anything else is chatter of the peer's libraries
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise KVCoreError(f"the peer cannot do {request['what']}: {answer['error']}")
                return answer
        raise KVCoreError("the peer has died; its own messages are above")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the peer, and wait for it."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it died with a request unread, and said so
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
