"""The store over TLS: who may connect to whom, and what is said where that fails."""

from __future__ import annotations

import datetime as dt
import errno
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import StoreKey
from kvcore.tiers.stores.resp import open_resp

x509 = pytest.importorskip("cryptography.x509", reason="certificates are made with the package cryptography")
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

KEY = StoreKey(bytes(32), bytes(32))


class Authority:
    """Signs certificates for 127.0.0.1 into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
        self.file = self._write("ca.pem", self._sign(self._name, self._key.public_key(), authority=True))

    def issue(self, name: str) -> tuple[str, str]:
        """Return the files of a certificate and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        certificate = self._sign(subject, key.public_key(), authority=False)
        return self._write(f"{name}.pem", certificate), self._write(f"{name}.key", pem)

    def options(self, name: str) -> dict[str, str]:
        """Return what a server is told of its certificate."""
        cert, key = self.issue(name)
        return {"tls-cert-file": cert, "tls-key-file": key, "tls-ca-cert-file": self.file}

    def _sign(self, subject: Any, public: Any, *, authority: bool) -> bytes:
        now = dt.datetime.now(dt.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if authority:
            usage = dict.fromkeys(
                ("content_commitment", "data_encipherment", "key_agreement", "key_encipherment"), False
            ) | {"encipher_only": False, "decipher_only": False, "digital_signature": True}
            builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        else:
            names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed: bytes = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return signed

    def _write(self, name: str, data: bytes) -> str:
        path = self._folder / name
        path.write_bytes(data)
        return str(path)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server(start_redis: Callable[..., Any], authority: Authority) -> Any:
    return start_redis("--tls-auth-clients", "optional", tls=authority.options("server"))


def refused(uri: str, code: int, words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        open_resp(uri)
    assert caught.value.errno == code, caught.value


@pytest.mark.parametrize("protocol", [2, 3])
def test_frames_go_over_tls(server: Any, authority: Authority, protocol: int) -> None:
    uri = f"resps://127.0.0.1:{server.port}?ca={authority.file}&protocol={protocol}"
    with open_resp(uri) as store:
        assert store.name == f"resps://127.0.0.1:{server.port}/0?prefix=kvcore:"
        frames = [(StoreKey(bytes(32), bytes([n]) * 32), bytes([n]) * 500_000) for n in range(6)]
        assert store.put_batch(frames) == [500_000] * 6
        assert store.get_batch([name for name, _ in frames]) == [frame for _, frame in frames]
        server.kill()
        server.start()
        assert store.get(KEY) is None


def test_a_server_has_to_prove_who_it_is(server: Any, authority: Authority, tmp_path: Path) -> None:
    refused(f"resps://127.0.0.1:{server.port}", errno.EPROTO, "check ca=")
    other = Authority(tmp_path)
    refused(f"resps://127.0.0.1:{server.port}?ca={other.file}", errno.EPROTO, "certificate")
    refused(f"resps://localhost:{server.port}?ca={authority.file}", errno.EPROTO, "(?i)hostname mismatch")
    with open_resp(f"resps://localhost:{server.port}?verify=0") as store:
        store.put(KEY, b"frame")


@pytest.mark.parametrize("option", ["ca={folder}/none.pem", "ca={key}", "cert={key}&key={key}", "cert={cert}&key={ca}"])
def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path, option: str) -> None:
    cert, key = authority.issue("some")
    chosen = option.format(folder=tmp_path, cert=cert, key=key, ca=authority.file)
    with pytest.raises(ConfigError, match="PEM files"):
        open_resp(f"resps://127.0.0.1:1?{chosen}")


def test_a_client_may_have_to_prove_who_it_is(server: Any, authority: Authority) -> None:
    server.admin.config_set("tls-auth-clients", "yes")
    uri = f"resps://127.0.0.1:{server.port}?ca={authority.file}"
    with pytest.raises(StoreError, match="cert= and key=") as caught:
        open_resp(uri)
    # The server says so, or only closes: that depends on who is faster.
    assert caught.value.errno in {errno.EPROTO, errno.ECONNRESET}
    cert, key = authority.issue("client")
    with open_resp(f"{uri}&cert={cert}&key={key}") as store:
        assert store.put(KEY, b"frame") == 5


def test_one_side_without_tls(server: Any, redis_server: Any) -> None:
    refused(f"resp://127.0.0.1:{server.port}", errno.ECONNRESET, "resps://")
    refused(f"resps://127.0.0.1:{redis_server.port}?timeout=200ms", errno.ETIMEDOUT, "speaks no TLS")


def test_a_cluster_over_tls(start_redis: Callable[..., Any], authority: Authority) -> None:
    options = ("--tls-cluster", "yes", "--cluster-enabled", "yes")
    node = start_redis(*options, tls=authority.options("node"))
    node.make_cluster()
    with open_resp(f"resps://127.0.0.1:{node.port}?ca={authority.file}&cluster=1") as store:
        assert store.put(KEY, bytes(200_000)) == 200_000
        assert store.get(KEY) == bytes(200_000)
