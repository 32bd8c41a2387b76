"""The store in a bucket, with something between it and the server that delays, refuses, drops and replaces."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import http.client
import ipaddress
import itertools
import os
import ssl
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import StoreKey, open_store
from kvcore_conformance.stores.servers import SeaweedServer, serving

MIB = 1 << 20
FRESH = itertools.count()
KEY = StoreKey(b"n" * 32, b"d" * 32)
OTHER = StoreKey(b"n" * 32, b"e" * 32)


@dataclass
class Request:
    """What the store asked, and what it is to be told instead of the server's answer."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    code: str = "Injected"
    drop: bool = False
    answer_headers: dict[str, str | None] = field(default_factory=dict)
    cut: int = 0
    sever: bool = False

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    @property
    def ranged(self) -> str:
        return self.headers.get("range", "")

    @property
    def first(self) -> bool:
        return self.ranged.startswith("bytes=0-")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def handle_all(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        request = Request(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
        between = self.server.between
        between.seen.append(request)
        between.hook(request)
        if request.drop:
            self.close_connection = True
            return
        if request.status:
            answer = f"<Error><Code>{request.code}</Code></Error>".encode()
            self.give(request.status, {"content-length": str(len(answer))}, answer)
            return
        with contextlib.closing(http.client.HTTPConnection(*between.upstream)) as upstream:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            with upstream.getresponse() as response:
                data = response.read()
                headers = {name.lower(): value for name, value in response.getheaders()}
        if self.command != "HEAD":
            headers["content-length"] = str(len(data) - request.cut)
        headers |= request.answer_headers
        if request.sever:
            self.close_connection = True
            data = data[: len(data) // 2]
        self.give(response.status, headers, data[: len(data) - request.cut])

    def give(self, status, headers, body):
        self.send_response_only(status)
        for name, value in headers.items():
            if value is not None and name not in {"connection", "transfer-encoding"}:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_all


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass  # the store closed a connection in the middle: so it may


class Between:
    """Hands requests on to the server, after `hook` had a look at each."""

    def __init__(self, upstream: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self.upstream = upstream
        self.seen: list[Request] = []
        self.hook = lambda request: None
        self._proxy = Proxy(("127.0.0.1", 0), Handler)
        self._proxy.between = self
        if tls is not None:
            self._proxy.socket = tls.wrap_socket(self._proxy.socket, server_side=True)
        self._thread = threading.Thread(target=self._proxy.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self._proxy.server_port}"

    def close(self) -> None:
        self._proxy.shutdown()
        self._thread.join()
        self._proxy.server_close()


@pytest.fixture(scope="module")
def server():
    with serving(SeaweedServer) as started:
        yield started


@pytest.fixture(autouse=True)
def credentials(server, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def between(server):
    parts = urlsplit(server.endpoint)
    with contextlib.closing(Between((parts.hostname, parts.port))) as opened:
        yield opened


@pytest.fixture
def place(server):
    return f"s3://{server.bucket}/f{next(FRESH)}"


@pytest.fixture
def store(between, place):
    """A store behind the proxy."""
    options = "allow_http=1&part_mb=5&concurrency=2&retries=2&timeout=5"
    with open_store(f"{place}?endpoint={between.endpoint}&{options}") as opened:
        between.seen.clear()
        yield opened


@pytest.fixture
def direct(server, place, store):
    """The same store, with nothing between."""
    with open_store(f"{place}?endpoint={server.endpoint}&allow_http=1&part_mb=5") as opened:
        yield opened


def test_an_upload_that_fails_is_taken_back(store, direct, between):
    direct.put(KEY, b"before")

    def refuse(request):
        if request.query.get("partNumber") == ["2"]:
            request.status = 500

    between.hook = refuse
    with pytest.raises(StoreError, match="status 500") as caught:
        store.put(KEY, os.urandom(11 * MIB))
    assert caught.value.errno == errno.EIO
    (upload,) = {request.query["uploadId"][0] for request in between.seen if "uploadId" in request.query}
    assert [request.query for request in between.seen if request.method == "DELETE"] == [{"uploadId": [upload]}]
    assert sum(request.query.get("partNumber") == ["2"] for request in between.seen) == 3  # two retries
    assert direct.get(KEY) == b"before"
    assert store.stats().puts == 0


def test_one_bad_frame_of_a_batch(store, between):
    name = KEY.digest.hex()

    def refuse(request):
        if name in request.path:
            request.status, request.code = 403, "AccessDenied"

    between.hook = refuse
    large = os.urandom(6 * MIB)
    outcomes = store.put_batch([(KEY, large), (OTHER, large), (KEY, b"")])
    assert [getattr(outcome, "errno", outcome) for outcome in outcomes] == [errno.EACCES, 6 * MIB, errno.EACCES]
    found = store.get_batch([OTHER, KEY])
    assert found[0] == large
    assert found[1].errno == errno.EACCES
    assert found[1].__traceback__ is None  # it would keep what was read alive


def test_throttling_is_waited_for(store, between):
    left = itertools.count(2, -1)

    def slow_down(request):
        if next(left) > 0:
            request.status, request.code = 503, "SlowDown"

    between.hook = slow_down
    assert store.put(KEY, b"abc") == 3
    assert len(between.seen) == 3
    assert store.get(KEY) == b"abc"


def test_throttling_without_end(store, between):
    def slow_down(request):
        request.status, request.code = 503, "SlowDown"

    between.hook = slow_down
    for call in (lambda: store.put(KEY, b"abc"), lambda: store.get(KEY), lambda: store.stat(KEY)):
        between.seen.clear()
        with pytest.raises(StoreError, match="try again later") as caught:
            call()
        assert caught.value.errno == errno.EAGAIN
        assert len(between.seen) == 3


def test_dropped_connections(store, between):
    def drop(request):
        request.drop = len(between.seen) == 1

    between.hook = drop
    assert store.put(KEY, b"abc") == 3
    between.seen.clear()
    assert store.get(KEY) == b"abc"
    assert len(between.seen) == 2

    def drop_all(request):
        request.drop = True

    between.hook = drop_all
    assert [outcome.errno for outcome in store.get_batch([KEY, OTHER])] == [errno.ECONNRESET] * 2
    with pytest.raises(StoreError, match="closed the connection"):
        store.put(KEY, b"")


def test_connections_that_break_in_the_middle_of_an_answer(store, direct, between):
    frame = os.urandom(6 * MIB)
    direct.put(KEY, frame)

    def sever(request):
        request.sever = request.method == "GET" and len(between.seen) in {1, 3}

    between.hook = sever
    assert store.get(KEY) == frame
    assert len(between.seen) > 3

    def sever_all(request):
        request.sever = request.method == "GET"

    between.hook = sever_all
    out = memoryview(bytearray(len(frame)))
    with pytest.raises(StoreError, match="closed the connection") as caught:
        store.get_into(KEY, out)
    assert caught.value.errno == errno.ECONNRESET


def test_an_answer_that_does_not_come(between, place):
    uri = f"{place}?endpoint={between.endpoint}&allow_http=1&retries=1&timeout=300ms"
    free = threading.Event()
    with open_store(uri) as store:
        between.hook = lambda request: free.wait(10)
        start = time.monotonic()
        for call in (lambda: store.get(KEY), lambda: store.put(KEY, b"abc")):
            with pytest.raises(StoreError, match="no answer in time") as caught:
                call()
            assert caught.value.errno == errno.ETIMEDOUT
        assert time.monotonic() - start < 5
        free.set()


@pytest.mark.parametrize("into", [False, True])
def test_a_frame_that_is_replaced_while_it_is_read(store, direct, between, into):
    old, new = os.urandom(6 * MIB), os.urandom(7 * MIB)
    direct.put(KEY, old)
    once = iter([new])

    def replace(request):
        if request.ranged and not request.first:
            for frame in once:
                direct.put(KEY, frame)

    between.hook = replace
    if into:
        out = memoryview(bytearray(len(new)))
        assert store.get_into(KEY, out) == len(new)
        assert out == new
    else:
        assert store.get(KEY) == new
    assert all("if-match" in request.headers for request in between.seen if request.ranged and not request.first)
    assert (store.stats().hits, store.stats().torn, store.stats().hit_bytes) == (1, 0, len(new))


def test_a_frame_that_is_replaced_again_and_again_is_a_miss(store, direct, between):
    sizes = itertools.cycle([7 * MIB, 6 * MIB])

    def replace(request):
        if request.ranged and not request.first:
            direct.put(KEY, os.urandom(next(sizes)))

    direct.put(KEY, os.urandom(6 * MIB))
    direct.put(OTHER, b"other")
    between.hook = replace
    assert store.get_batch([KEY, OTHER]) == [None, b"other"]
    assert (store.stats().hits, store.stats().misses, store.stats().torn) == (1, 1, 1)


def test_a_frame_that_vanishes_while_it_is_read(store, direct, between):
    def delete(request):
        if request.ranged and not request.first:
            direct.delete(KEY)

    direct.put(KEY, os.urandom(6 * MIB))
    between.hook = delete
    assert store.get(KEY) is None
    assert (store.stats().misses, store.stats().torn) == (1, 0)  # the second try found nothing: a plain miss


def test_a_server_that_knows_no_conditions(store, direct, between):
    """It answers with a range of another object, which its ETag gives away."""

    def another(request):
        if request.ranged and not request.first:
            request.answer_headers["etag"] = '"of-another"'

    direct.put(KEY, os.urandom(6 * MIB))
    between.hook = another
    assert store.get(KEY) is None
    assert store.stats().torn == 1


def test_a_server_that_gives_no_etags(store, direct, between):
    def none(request):
        request.answer_headers["etag"] = None

    frame = os.urandom(6 * MIB)
    direct.put(KEY, frame)
    between.hook = none
    assert store.get(KEY) == frame
    assert [request.ranged for request in between.seen] == [f"bytes=0-{5 * MIB - 1}", ""]


def test_an_answer_that_is_too_short(store, direct, between):
    def cut(request):
        request.cut = 2 if request.method == "GET" else 0

    direct.put(KEY, b"abcdef")
    between.hook = cut
    with pytest.raises(StoreError, match="4 bytes came and 6 were announced") as caught:
        store.get(KEY)
    assert caught.value.errno == errno.EIO
    assert store.stats().hits == 0


def test_a_store_is_made_by_a_conditional_request(between, place):
    uri = f"{place}?endpoint={between.endpoint}&allow_http=1&retries=0"
    with open_store(uri):
        (put,) = [request for request in between.seen if request.method == "PUT"]
        assert put.headers["if-none-match"] == "*"
    between.seen.clear()
    with open_store(uri):
        assert [request.method for request in between.seen] == ["GET"]


@pytest.mark.parametrize("version", [1, 2])
def test_two_that_make_a_store_at_once(server, between, place, version):
    marker = f'{{"format": "kvcore-s3-store", "version": {version}}}'.encode()
    path = place.removeprefix(f"s3://{server.bucket}/") + "/kvcore-store.json"

    def overtake(request):
        if request.method == "PUT":
            server.client().put(path, marker)

    between.hook = overtake
    uri = f"{place}?endpoint={between.endpoint}&allow_http=1&retries=0"
    if version == 1:
        open_store(uri).close()
    else:
        with pytest.raises(StoreError, match="version"):
            open_store(uri)
    assert bytes(server.client().get(path).bytes()) == marker


def test_a_server_without_conditional_requests(between, place):
    def refuse(request):
        if "if-none-match" in request.headers:
            request.status, request.code = 501, "NotImplemented"

    between.hook = refuse
    with open_store(f"{place}?endpoint={between.endpoint}&allow_http=1&retries=0") as store:
        assert store.put(KEY, b"abc") == 3


def test_requests_are_bounded(between, place):
    most, now, lock = 0, 0, threading.Lock()

    def count(request):
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1

    options = "allow_http=1&part_mb=5&concurrency=3"
    with open_store(f"{place}?endpoint={between.endpoint}&{options}") as store:
        between.hook = count
        keys = [StoreKey(bytes(32), bytes([n]) * 32) for n in range(8)]
        store.put_batch([(key, b"abc") for key in keys[1:]])
        store.put(keys[0], bytes(12 * MIB))
        store.put_batch([(key, bytes(6 * MIB)) for key in keys[:3]])
        assert all(store.get_batch(keys))
    assert most == 3


@pytest.fixture
def certificate(tmp_path):
    """A certificate for 127.0.0.1 that signs itself, and its key, in one file."""
    x509 = pytest.importorskip("cryptography.x509", reason="certificates are made with the package cryptography")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = dt.datetime.now(dt.timezone.utc)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = tmp_path / "server.pem"
    path.write_bytes(private + signed.public_bytes(pem))
    return str(path)


def test_tls(server, place, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    parts = urlsplit(server.endpoint)
    with contextlib.closing(Between((parts.hostname, parts.port), context)) as between:
        uri = f"{place}?endpoint={between.endpoint}&retries=0&part_mb=5"
        with pytest.raises(StoreError, match="ca= in the URI") as caught:
            open_store(uri)
        assert caught.value.errno == errno.EPROTO
        assert between.seen == []
        with pytest.raises(StoreError, match="does not speak TLS") as caught:
            open_store(f"{place}?endpoint={server.endpoint.replace('http', 'https')}&retries=0")
        assert caught.value.errno == errno.EPROTO
        with pytest.raises(ConfigError, match="cannot be read"):
            open_store(f"{uri}&ca={certificate}.gone")
        with open_store(f"{uri}&ca={certificate}") as store:
            frame = os.urandom(6 * MIB)
            assert store.put(KEY, frame) == len(frame)
            assert store.get(KEY) == frame
