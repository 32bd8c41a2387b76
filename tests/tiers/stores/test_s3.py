"""The store in a bucket, on a real server: SeaweedFS."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.tiers.stores import StoreKey, StoreStat, open_store
from kvcore.tiers.stores.s3 import S3Store, open_s3
from kvcore_conformance.stores.servers import SeaweedServer, serving

MIB = 1 << 20
FRESH = itertools.count()


class Seaweed(SeaweedServer):
    """With a second identity, that may only read."""

    def _command(self):
        command = super()._command()
        config = self.folder / "identities.json"
        identities = json.loads(config.read_text())
        reader = {"name": "r", "credentials": [{"accessKey": "reader", "secretKey": "of-the-reader"}]}
        identities["identities"].append({**reader, "actions": ["Read", "List"]})
        config.write_text(json.dumps(identities))
        return command


@pytest.fixture(scope="module")
def server():
    with serving(Seaweed) as started:
        yield started


@pytest.fixture(autouse=True)
def credentials(server, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def as_reader(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-reader")


@pytest.fixture
def uri(server):
    """A place of its own in the bucket."""
    return f"s3://{server.bucket}/p{next(FRESH)}?endpoint={server.endpoint}&allow_http=1&part_mb=5&retries=1"


@pytest.fixture
def store(uri):
    with open_store(uri) as opened:
        yield opened


def key(number: int = 0) -> StoreKey:
    return StoreKey(bytes([number % 256]) * 32, number.to_bytes(32, "big"))


def below(server, uri: str) -> dict[str, int]:
    """What the bucket has at the place of a URI: names and sizes."""
    prefix = uri.removeprefix(f"s3://{server.bucket}/").partition("?")[0]
    entries = itertools.chain.from_iterable(server.client().list(prefix))
    return {entry["path"].removeprefix(f"{prefix}/"): entry["size"] for entry in entries}


def test_objects_have_bounded_names_of_digests(server, uri, store):
    digest = (7).to_bytes(32, "big").hex()
    assert store.put(key(7), b"abc") == 3
    assert store.quarantine(key(7), "crc") is True
    assert store.put(key(7), b"abcd") == 4
    assert below(server, uri) == {
        "kvcore-store.json": 44,
        f"{'07' * 32}/00/{digest}.kvf": 4,
        f"quarantine/{'07' * 32}.{digest}.crc.kvf": 3,
    }
    assert list(store.list()) == [key(7)]
    assert store.quarantine(key(8), "crc") is False
    assert isinstance(store, S3Store)
    assert store.name == uri.partition("&")[0]


@pytest.mark.parametrize("nbytes", [0, 5 * MIB, 5 * MIB + 1, 20 * MIB])
def test_large_frames_go_in_parts(server, uri, store, nbytes):
    frame = os.urandom(nbytes)
    assert store.put(key(), frame) == nbytes
    etag = server.client().head(f"{uri.split('/')[3].partition('?')[0]}/{'00' * 32}/00/{'00' * 32}.kvf")["e_tag"]
    assert ("-" in etag) == (nbytes > 5 * MIB)  # the digest of a multipart object ends in its number of parts
    found = store.get(key())
    assert found == frame
    assert found.readonly
    assert found.nbytes == nbytes
    out = memoryview(bytearray(nbytes + 1))
    assert store.get_into(key(), out) == nbytes
    assert out[:nbytes] == frame
    assert store.stats().torn == 0
    if nbytes:
        assert store.get_into(key(), out[: nbytes - 1]) is None  # replaced since its size was told
        assert store.stats().torn == 1
    assert store.stat(key()) == StoreStat(nbytes)


def test_batches_tell_of_each_key(store):
    frames = [os.urandom(n) for n in (10, 6 * MIB, 0, 11 * MIB, 70_000)]
    items = [(key(n), frame) for n, frame in enumerate(frames)]
    assert store.put_batch(items) == [len(frame) for frame in frames]
    wanted = [key(n) for n in (3, 9, 0, 1, 2, 4, 3)]
    assert store.get_batch(wanted) == [frames[3], None, frames[0], frames[1], frames[2], frames[4], frames[3]]
    assert store.stat_batch([key(1), key(9)]) == [StoreStat(6 * MIB), None]
    outs = [memoryview(bytearray(6 * MIB)) for _ in range(3)]
    assert store.get_batch_into(list(zip([key(1), key(9), key(0)], outs, strict=True))) == [6 * MIB, None, 10]
    assert outs[0] == frames[1]
    assert store.delete_batch([key(0), key(9), key(0)]) == [True, False, False]
    stats = store.stats()
    assert (stats.puts, stats.hits, stats.misses, stats.deletes) == (5, 8, 2, 1)


def test_of_two_frames_for_a_key_the_later_stays(store):
    frames = [bytes([n]) * (6 * MIB if n % 2 else 3) for n in range(6)]
    assert store.put_batch([(key(), frame) for frame in frames]) == [len(frame) for frame in frames]
    assert store.get(key()) == frames[-1]


def test_bad_input_is_refused_before_anything_is_sent(server, uri, store):
    with pytest.raises(ConfigError, match="32 bytes"):
        store.put_batch([(key(), b"good"), (StoreKeyLike(b"short", bytes(32)), b"")])
    with pytest.raises(ConfigError, match="contiguous"):
        store.put_batch([(key(), b"good"), (key(1), memoryview(b"abcd")[::2])])
    with pytest.raises(ConfigError, match="reason"):
        store.quarantine(key(), "../up")
    assert list(below(server, uri)) == ["kvcore-store.json"]


class StoreKeyLike:
    def __init__(self, namespace: bytes, digest: bytes) -> None:
        self.namespace, self.digest = namespace, digest


def test_a_frame_beyond_the_limit_of_parts(store, tmp_path):
    most = store.max_frame_bytes
    with (tmp_path / "holes").open("w+b") as file:
        file.truncate(most + 1)
        frame = mmap.mmap(file.fileno(), most + 1, access=mmap.ACCESS_READ)
    with pytest.raises(StoreError, match=rf"{most + 1} bytes is larger than the {most} bytes") as caught:
        store.put(key(), frame)
    assert caught.value.errno == errno.EFBIG
    assert "part_mb=" in str(caught.value)


def test_names_that_are_not_frames_are_passed_over(server, uri, store):
    store.put(key(1), b"1")
    place = uri.split("/")[3].partition("?")[0]
    space, digest = "01" * 32, (1).to_bytes(32, "big").hex()
    for name in (
        f"{space}/01/{digest}.kvf",  # not its folder
        f"{space}/00/{digest.upper().replace('0', 'A')}.kvf",
        f"{space}/00/{digest}.tmp",
        f"{space[:-1]}/00/{digest}.kvf",
        f"deeper/{space}/00/{digest}.kvf",
        "notes.txt",
    ):
        server.client().put(f"{place}/{name}", b"x")
    assert list(store.list()) == [key(1)]
    assert list(store.list(key(1).namespace)) == [key(1)]
    assert list(store.list(bytes(32))) == []


def test_more_names_than_a_page_has(store):
    names = [StoreKey(bytes(32), n.to_bytes(2, "big") * 16) for n in range(1100)]
    assert store.put_batch([(name, b"") for name in names]) == [0] * len(names)
    listed = store.list()
    first = next(listed)
    store.delete(first)
    assert sorted([first, *listed]) == names
    again = store.list()
    next(again)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        list(again)


@pytest.mark.parametrize("marker", [b'{"format": "kvcore-s3-store", "version": 2}', b"[]", b"not JSON", b""])
def test_another_version_is_refused(server, uri, marker):
    place = uri.split("/")[3].partition("?")[0]
    server.client().put(f"{place}/kvcore-store.json", marker)
    with pytest.raises(StoreError, match="another prefix") as caught:
        open_store(uri)
    assert caught.value.errno == errno.EEXIST
    assert below(server, uri) == {"kvcore-store.json": len(marker)}


def test_a_place_with_something_else_is_refused(server, uri):
    place = uri.split("/")[3].partition("?")[0]
    server.client().put(f"{place}/thesis.tex", b"42")
    with pytest.raises(StoreError, match=r"'thesis.tex' and no kvcore-store.json") as caught:
        open_store(uri)
    assert caught.value.errno == errno.EEXIST
    assert below(server, uri) == {"thesis.tex": 2}


def test_who_may_only_read(server, uri, store, as_reader):
    store.put(key(1), b"there")
    with open_store(uri) as reader:
        assert reader.get(key(1)) == b"there"
        calls = [
            lambda: reader.put(key(2), b""),
            lambda: reader.put(key(2), bytes(6 * MIB)),
            lambda: reader.delete(key(1)),
            lambda: reader.quarantine(key(1), "crc"),
        ]
        for call in calls:
            with pytest.raises(StoreError, match="AccessDenied") as caught:
                call()
            assert caught.value.errno == errno.EACCES
            assert f"s3://{server.bucket}/" in str(caught.value)
            assert "01" * 32 not in str(caught.value)
        outcomes = reader.put_batch([(key(2), b""), (key(3), b"")])
        assert [outcome.errno for outcome in outcomes] == [errno.EACCES] * 2
        assert (reader.stats().puts, reader.stats().deletes, reader.stats().quarantined) == (0, 0, 0)
    assert store.get_batch([key(1), key(2), key(3)]) == [b"there", None, None]
    fresh = uri.replace("?", "-fresh?")
    with pytest.raises(StoreError, match="cannot create a store"):
        open_store(fresh)
    assert below(server, fresh) == {}


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials(uri, monkeypatch, wrong):
    monkeypatch.setenv(wrong, "nobody-knows-this")
    with pytest.raises(StoreError, match=r"profile=NAME") as caught:
        open_store(uri)
    assert caught.value.errno == errno.EACCES
    assert "nobody-knows-this" not in str(caught.value)


def test_no_such_bucket(server, uri, as_reader):
    with pytest.raises(StoreError, match="create the bucket") as caught:
        open_store(uri.replace(f"//{server.bucket}/", "//no-such-bucket/"))
    assert caught.value.errno == errno.ENOENT


def test_a_profile_of_the_aws_files(uri, server, monkeypatch, tmp_path):
    pytest.importorskip("boto3")
    for name in server.environment:
        monkeypatch.delenv(name)
    files = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(files))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    files.write_text(f"[cache]\naws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n")
    with open_store(f"{uri}&profile=cache") as store:
        assert store.put(key(), b"abc") == 3
        assert store.get(key()) == b"abc"
    with pytest.raises(ConfigError, match="profile='other'"):
        open_store(f"{uri}&profile=other")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match="pip install boto3"):
        open_store(f"{uri}&profile=cache")


def test_settings_of_the_environment(uri, server, monkeypatch):
    place = uri.partition("?")[0]
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    with pytest.raises(StoreError, match="allow_http=1") as caught:
        open_store(place)
    assert caught.value.errno == errno.EINVAL
    with open_store(f"{place}?allow_http=1") as store:
        assert store.name == place
        assert store.put(key(), b"abc") == 3
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "sometimes")
    with pytest.raises(ConfigError, match=r"AWS_\* variables"):
        open_store(uri)


def test_without_the_library(uri, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r'pip install "kvcore\[s3\]"'):
        open_s3(uri)


def test_nobody_listens(uri):
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        port = unused.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(StoreError, match="is it running") as caught:
            open_store(f"s3://bucket?endpoint=http://127.0.0.1:{port}&allow_http=1&retries=2&timeout=1")
        assert caught.value.errno == errno.ECONNREFUSED
        assert time.monotonic() - start < 5


def test_nobody_answers():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(StoreError, match="timeout=") as caught:
            open_store(f"s3://bucket?endpoint={endpoint}&allow_http=1&retries=20&timeout=500ms")
        assert caught.value.errno == errno.ETIMEDOUT
        assert time.monotonic() - start < 5


def test_the_example_of_the_page(uri):
    page = (Path(__file__).parents[3] / "docs" / "store-s3.md").read_text("utf-8")
    example = page.partition("```python\n")[2].partition("```")[0]
    assert example.count("s3://bucket/llama?region=eu-west-3") == 1
    names = {"key": key(1), "other": key(2), "frame": b"abc"}
    exec(example.replace("s3://bucket/llama?region=eu-west-3", uri), names)
    with open_store(uri) as store:
        assert store.get_batch([key(1), key(2)]) == [b"abc", None]


def test_closing_waits_and_ends_its_threads(uri):
    threads = threads_of_the_store()
    with open_store(uri) as store:
        store.put_batch([(key(n), b"") for n in range(8)])
        assert threads_of_the_store() - threads
    assert threads_of_the_store() == threads
    store.close()
    for call in (lambda: store.get(key()), store.list):
        with pytest.raises(StoreError, match="closed"):
            call()
    for outcomes in (store.put_batch([(key(), b"")] * 2), store.get_batch([key()] * 2)):
        assert ["closed" in str(outcome) for outcome in outcomes] == [True] * 2


def threads_of_the_store() -> set[int]:
    return {thread.ident for thread in threading.enumerate() if thread.name.startswith("kvcore-s3")}
