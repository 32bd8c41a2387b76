"""The requests that an S3 store makes, one method each, through the library `obstore`.

obstore rather than boto3: its requests run outside the interpreter's lock, it takes and gives buffers without copies,
it aborts a multipart upload that fails, and it repeats requests with exponential back-off itself. What it lacks, the
credentials in the files of AWS's own tools, comes from boto3 where a profile is asked for.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores.s3_errors import explain, server_code
from kvcore.tiers.stores.s3_uri import S3Address

if TYPE_CHECKING:
    from collections.abc import Callable

    from obstore.store import S3Store as Bucket

__all__ = ["Piece", "ReplacedError", "S3Client"]

_PAGE = 1000
_CONNECT_SECONDS = 5.0


class ReplacedError(StoreError):
    """An object is no longer the one of which a part has been read, or does not fit where it is to go any more."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "the object was replaced while it was read; read it again")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of an object.

    Parameters
    ----------
    data : memoryview
        Read-only.
    size : int
        Bytes of the object as a whole.
    etag : str, optional
        Which object it was, if the server says so.
    """

    data: memoryview
    size: int
    etag: str | None


class S3Client:
    """What is below the prefix of a bucket. Names are without the prefix. All methods may be called from any thread.

    Whatever goes wrong raises `StoreError`, after the retries that the address allows.

    Raises
    ------
    ConfigError
        A package is missing, there is no such profile, or a variable ``AWS_*`` has a value that means nothing.
    """

    def __init__(self, address: S3Address) -> None:
        self._obs = _library()
        self._name = address.name
        self._part = address.part_bytes
        self._bucket: Any = _connect(address)

    def close(self) -> None:
        """Let go of the connections; nothing can be asked for any more."""
        self._bucket = None

    def put(self, name: str, data: memoryview, *, width: int) -> None:
        """Write an object: at once, or in parts of which `width` are under way at a time.

        Either way it has its name when it is whole; parts of an upload that fails are removed.
        """
        with self._explained("store a frame"):
            self._obs.put(self._bucket, name, data, chunk_size=self._part, max_concurrency=width)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; tell whether it was written.

        A server without conditional requests writes it in any case.
        """
        with self._explained("create a store"):
            try:
                self._obs.put(self._bucket, name, data, mode="create")
            except self._obs.exceptions.AlreadyExistsError:
                return False
            except (self._obs.exceptions.NotSupportedError, self._obs.exceptions.GenericError) as error:
                if server_code(error) != "NotImplemented" and "not implemented" not in str(error).lower():
                    raise
                self._obs.put(self._bucket, name, data)
        return True

    def read(self, name: str, start: int, stop: int, *, etag: str | None = None) -> Piece | None:
        """Read bytes `start` to `stop` of an object, or fewer where it ends before; None if there is none.

        Parameters
        ----------
        name : str
        start, stop : int
        etag : str, optional
            Raise `ReplacedError` unless the object is still this one.
        """
        options: dict[str, Any] = {"range": (start, stop)}
        if etag is not None:
            options["if_match"] = etag
        with self._explained("read a frame"):
            try:
                result = self._obs.get(self._bucket, name, options=options)
                data = memoryview(result.buffer())
                return self._piece(result, data, min(stop, result.meta["size"]) - start)
            except FileNotFoundError as error:
                self._require_bucket(error)
                return None
            except self._obs.exceptions.PreconditionError as error:
                raise ReplacedError from error
            except self._obs.exceptions.GenericError as error:
                if server_code(error) != "InvalidRange" and "status code: 416" not in str(error):
                    raise
        if start:
            raise ReplacedError  # it is shorter now
        return self.read_whole(name)  # it is empty, and no range of it has a meaning

    def read_whole(self, name: str, doing: str = "read a frame") -> Piece | None:
        """Read an object in one answer; None if there is none."""
        with self._explained(doing):
            try:
                result = self._obs.get(self._bucket, name)
                return self._piece(result, memoryview(result.buffer()), result.meta["size"])
            except FileNotFoundError as error:
                self._require_bucket(error)
                return None

    def size(self, name: str) -> int | None:
        """Return the bytes of an object; None if there is none."""
        with self._explained("look up a frame"):
            try:
                return int(self._obs.head(self._bucket, name)["size"])
            except FileNotFoundError as error:
                self._require_bucket(error)
                return None

    def delete(self, name: str) -> None:
        """Remove an object, if there is one: the server does not tell."""
        with self._explained("delete a frame"):
            self._obs.delete(self._bucket, name)

    def copy(self, name: str, to: str) -> bool:
        """Copy an object within the bucket, at the server; tell whether there was one."""
        with self._explained("quarantine a frame"):
            try:
                self._obs.copy(self._bucket, name, to)
            except FileNotFoundError as error:
                self._require_bucket(error)
                return False
        return True

    def names(self, folder: str | None = None) -> Iterator[list[str]]:
        """Iterate over the names below a folder, or all, by pages of the server's; each is asked for when it is due."""
        with self._explained("list"):
            stream = self._obs.list(self._bucket, folder, chunk_size=_PAGE)
        while True:
            with self._explained("list"):
                try:
                    page = next(stream)
                except StopIteration:
                    return
            yield [entry["path"] for entry in page]

    def _piece(self, result: Any, data: memoryview, expected: int) -> Piece:
        if len(data) != expected:
            raise StoreError(
                errno.EIO,
                f"cannot read a frame in {self._name}: {len(data)} bytes came and {expected} were announced; look at "
                "the server's log, and at what stands between",
            )
        return Piece(data.toreadonly(), int(result.meta["size"]), result.meta["e_tag"])

    def _require_bucket(self, error: FileNotFoundError) -> None:
        """Raise what says that an object is missing if the bucket is. An answer without a body cannot say."""
        if server_code(error) == "NoSuchBucket":
            raise error

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (self._obs.exceptions.BaseError, OSError) as error:
            raise explain(error, doing, self._name) from error


def _library() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "obstore":
            raise
        raise ConfigError(
            'a store s3: needs the package obstore, which is not installed; pip install "kvcore[s3]"'
        ) from error
    return obstore


def _connect(address: S3Address) -> Bucket:
    """Return the library's idea of the bucket. Sends nothing."""
    obs = _library()
    seconds = timedelta(seconds=address.timeout)
    client: dict[str, Any] = {
        "timeout": seconds,
        "connect_timeout": min(seconds, timedelta(seconds=_CONNECT_SECONDS)),
    }
    if address.allow_http:
        client["allow_http"] = True
    if address.ca:
        client["root_certificate"] = _certificates(address.ca)
    config: dict[str, Any] = {"disable_bulk_delete": True}  # one request an object: its refusals are typed
    if address.endpoint:
        config["endpoint"] = address.endpoint
    if address.region:
        config["region"] = address.region
    try:
        bucket: Bucket = obs.store.S3Store(
            address.bucket,
            prefix=address.prefix or None,
            config=config,
            client_options=client,
            retry_config={
                "max_retries": address.retries,
                "retry_timeout": seconds,
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=5),
                    "base": 2,
                },
            },
            credential_provider=_profile(address.profile) if address.profile else None,
        )
    except (obs.exceptions.BaseError, ValueError) as error:
        raise ConfigError(
            f"the client library refuses the settings of {address.name}, those of the AWS_* variables among them: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return bucket


def _certificates(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"ca={path!r} cannot be read: {error.strerror}") from error


def _profile(name: str) -> Callable[[], Any]:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"boto3", "botocore"}:
            raise
        raise ConfigError(
            f"profile={name!r} needs the package boto3, which is not installed; pip install boto3, or give the "
            "credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    try:
        provider: Callable[[], Any] = Boto3CredentialProvider(boto3.session.Session(profile_name=name))
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"profile={name!r} gives no credentials ({error}); look at the files of AWS") from error
    return provider
