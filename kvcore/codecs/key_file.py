"""Files of master keys: three forms, and who may read them. docs/encryption.md describes them.

No message or exception of this module holds key material.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError

__all__ = ["KEY_BYTES", "format_keys", "parse_keys", "read_private", "write_private"]

KEY_BYTES = 32

FORMAT, VERSION = "kvcore-keys", 1
_FILE_BYTES = 1 << 20  # of a key file at most: room for ten thousand keys
_HEX = re.compile(rb"[0-9A-Fa-f]{64}\s*")
_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_FIELDS = {"format", "version", "current", "keys", "unnamed"}
_FORMS = (
    "32 raw bytes, a line of 64 hexadecimal digits, or JSON as docs/encryption.md has it; KeyRing.generate makes one"
)


def read_private(path: str | os.PathLike[str]) -> bytes:
    """Read a file of keys.

    Raises
    ------
    ConfigError
        It cannot be read, is no regular file, or others than its owner have access to it.
    """
    with _as_config_error("read", path):
        # Not blocking: opening a named pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"the key file {path} is no regular file")
            if mode & 0o077:
                raise ConfigError(
                    f"the key file {path} has mode {stat.S_IMODE(mode):04o}, so others than its owner have access; "
                    f"chmod 600 {path}, and take new keys if somebody may have read these"
                )
            with os.fdopen(fd, "rb", closefd=False) as stream:
                return stream.read(_FILE_BYTES + 1)
        finally:
            os.close(fd)


def write_private(path: str | os.PathLike[str], data: bytes, *, replace: bool = False) -> None:
    """Write a file, mode 0600: a new one, or with `replace` in one step in place of what is there.

    Raises
    ------
    ConfigError
        It is there already and must not be, or cannot be written.
    """
    path = Path(path)
    target = path.with_name(f".{path.name}.{secrets.token_hex(8)}") if replace else path
    with _as_config_error("write", path):
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(fd)
            if replace:
                target.replace(path)
        except OSError:
            target.unlink()
            raise


def format_keys(masters: Mapping[int | None, bytes], current: int | None) -> bytes:
    """Return the bytes of a file that `parse_keys` reads as the same keys: a line for one key without id, else JSON."""
    named = {str(key_id): key.hex() for key_id, key in masters.items() if key_id is not None}
    if not named:
        return masters[None].hex().encode() + b"\n"
    values: dict[str, Any] = {"format": FORMAT, "version": VERSION, "current": current, "keys": named}
    if None in masters:
        values["unnamed"] = masters[None].hex()
    return json.dumps(values, indent=1).encode() + b"\n"


def parse_keys(data: bytes) -> tuple[dict[int | None, bytes], int | None]:
    """Return the master keys of a file by id, None for a key without one, and the id of the current key.

    Raises
    ------
    ConfigError
        The bytes are none of the three forms. What is in them stays out of every message.
    """
    if len(data) > _FILE_BYTES:
        raise ConfigError(f"it has more than {_FILE_BYTES} bytes")
    if len(data) == KEY_BYTES:
        if re.fullmatch(rb"[0-9A-Fa-f]+", data):
            raise ConfigError("it has 32 hexadecimal digits, which are 16 bytes; a key has 64")
        return {None: data}, None
    if _HEX.fullmatch(data):
        return {None: bytes.fromhex(data.decode())}, None
    if not data.lstrip().startswith(b"{"):
        raise ConfigError(f"it has {len(data)} bytes, and is none of {_FORMS}")
    try:
        values = json.loads(data, object_pairs_hook=_unique)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        # Not chained: a JSONDecodeError carries the whole file.
        raise ConfigError("it begins as JSON, but is none that can be read") from None
    return _parse_json(values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ConfigError("a field or an id is there twice")
    return values


def _parse_json(values: dict[str, Any]) -> tuple[dict[int | None, bytes], int | None]:
    if (values.get("format"), values.get("version")) != (FORMAT, VERSION):
        raise ConfigError(f'it does not say "format": "{FORMAT}", "version": {VERSION}')
    if unknown := len(values.keys() - _FIELDS):
        raise ConfigError(f"{unknown} of its fields are none of {', '.join(sorted(_FIELDS))}")
    keys, current = values.get("keys"), values.get("current")
    if not isinstance(keys, dict) or not all(_ID.fullmatch(key_id) for key_id in keys):
        raise ConfigError('"keys" is an object from ids (decimal, 0 to 2**32 - 1) to keys')
    if not isinstance(current, int) or isinstance(current, bool):
        raise ConfigError('"current" is the id of one of the keys, a number')
    masters: dict[int | None, bytes] = {int(key_id): _from_hex(f"key {key_id}", key) for key_id, key in keys.items()}
    if "unnamed" in values:
        masters[None] = _from_hex('"unnamed"', values["unnamed"])
    return masters, current


def _from_hex(name: str, text: Any) -> bytes:
    if not isinstance(text, str) or not re.fullmatch(r"[0-9A-Fa-f]{64}", text):
        raise ConfigError(f"{name} is not a text of 64 hexadecimal digits")
    return bytes.fromhex(text)


@contextlib.contextmanager
def _as_config_error(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise ConfigError(f"{path} exists, and may hold keys that frames need; name another file") from None
    except OSError as error:
        raise ConfigError(f"cannot {what} the key file {path}: {error.strerror}") from error
