"""The lines of the log that operators look for, and a log file that rotates."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import logging.handlers
import os
from collections.abc import Iterator
from pathlib import Path

from kvcore.engine.observer import EngineObserver
from kvcore.errors import ConfigError

__all__ = ["LogObserver", "configure_logging", "log_lookup", "log_store"]

_log = logging.getLogger("kvcore")

FORMAT = "%(asctime)s %(levelname)s %(process)d [%(name)s] %(message)s"
MAX_BYTES = 50 << 20
COUNT = 5
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def log_lookup(request: str, tokens: int, hit_tokens: int, computed: int = 0) -> None:
    """Say what a lookup found: at INFO, or at DEBUG where the request has no name that anybody could look for.

    Parameters
    ----------
    request : str
        Id of the request.
    tokens, hit_tokens : int
        Tokens of the sequence, and how many of them the cache can give.
    computed : int
        How many the inference engine has already: they need not be loaded.
    """
    level = logging.INFO if request else logging.DEBUG
    if _log.isEnabledFor(level):
        load = max(hit_tokens - computed, 0)
        message = "Reqid: %s, Total tokens %d, hit tokens: %d, need to load: %d"
        _log.log(level, message, request or "-", tokens, hit_tokens, load)


def log_store(request: str, stored_tokens: int, total_tokens: int) -> None:
    """Say what is stored: at INFO, or at DEBUG where the request has no name. Nothing, where nothing is.

    Parameters
    ----------
    request : str
        Id of the request.
    stored_tokens, total_tokens : int
        Tokens that were not stored yet, out of those of the sequence.
    """
    level = logging.INFO if request else logging.DEBUG
    if stored_tokens and _log.isEnabledFor(level):
        message = "Storing KV cache for %d out of %d tokens for request %s"
        _log.log(level, message, stored_tokens, total_tokens, request or "-")


class LogObserver(EngineObserver):
    """Writes one line for each request that is looked up, and for each that is stored, to the logger ``kvcore``."""

    def request_lookup(self, request: str, tokens: int, hit_tokens: int, seconds: float, computed: int = 0) -> None:
        """See `EngineObserver.request_lookup`."""
        log_lookup(request, tokens, hit_tokens, computed)

    def request_store(self, request: str, stored_tokens: int, total_tokens: int, nbytes: int, seconds: float) -> None:
        """See `EngineObserver.request_store`."""
        log_store(request, stored_tokens, total_tokens)


class SharedRotatingFile(logging.handlers.RotatingFileHandler):
    """A log file that rotates, and that several processes may write at the same time, forked ones too.

    A line is appended in one write, unless it is very long. Who finds the file too long takes a lock, a file next to
    it, and looks again: so it is rotated once, and the others go on in the new file.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, to the file that has the name now."""
        try:
            self._follow()
            if self.shouldRollover(record):
                with self._locked():
                    self._follow()
                    if self.shouldRollover(record):
                        self.doRollover()
            logging.FileHandler.emit(self, record)
        except Exception:  # noqa: BLE001 - as every handler of the standard library: a full disk stops no engine
            self.handleError(record)

    def doRollover(self) -> None:  # noqa: N802 - the standard library's name
        """Begin a new file; where no older ones are kept, the standard library would go on with the old one."""
        if not self.backupCount:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.baseFilename)
        super().doRollover()

    def _follow(self) -> None:
        """Open the file anew if another process has rotated it, or somebody has removed it."""
        if self.stream is None:
            return
        mine = os.fstat(self.stream.fileno())
        try:
            there = os.stat(self.baseFilename)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            self.stream.close()
            self.stream = self._open()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Opened each time: a lock of an open file is shared with forked processes.
        with open(f"{self.baseFilename}.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def configure_logging(
    level: int | str = "INFO", file: str | os.PathLike[str] = "", max_bytes: int = MAX_BYTES, count: int = COUNT
) -> None:
    """Set the level of the logger ``kvcore``, and let it write to a file that rotates.

    Nothing but this logger is touched, and its records go on to the handlers of the root logger. Where there is no
    handler at all, one is added that writes to the standard error stream: all records, or where there is a file,
    warnings. Calling it again replaces what it set before.

    Parameters
    ----------
    level : int or str
        ``"DEBUG"``, ``"INFO"``, ``"WARNING"``, ``"ERROR"`` or ``"CRITICAL"``, in any case, or a number.
    file : path
        Empty for none. Several processes may write the same one.
    max_bytes : int
        How long the file gets.
    count : int
        How many older ones are kept, as ``file.1`` and so on; 0 for none.

    Raises
    ------
    ConfigError
        An unknown level, sizes that mean nothing, or a file that cannot be opened.
    """
    number = _level(level)
    if max_bytes < 1 or count < 0:
        raise ConfigError(
            "a log file holds at least one byte, and none or more older ones are kept, got "
            f"max_bytes={max_bytes} and count={count}"
        )
    handlers: list[logging.Handler] = []
    if file:
        path = Path(file).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(SharedRotatingFile(path, maxBytes=max_bytes, backupCount=count, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"the log file {path} cannot be opened: {error}; choose another log_file") from error
    for old in [handler for handler in _log.handlers if getattr(handler, _OURS, False)]:
        _log.removeHandler(old)
        old.close()
    if not _log.hasHandlers():
        stream = logging.StreamHandler()
        stream.setLevel(logging.WARNING if file else logging.NOTSET)
        handlers.append(stream)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT))
        setattr(handler, _OURS, True)
        _log.addHandler(handler)
    _log.setLevel(number)


_OURS = "_kvcore"


def _level(given: int | str) -> int:
    if isinstance(given, int):
        return given
    name = given.strip().upper()
    if name not in _LEVELS:
        raise ConfigError(f"log_level must be one of {', '.join(_LEVELS)}, got {given!r}")
    return int(getattr(logging, name))
