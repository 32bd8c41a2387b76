"""The servers that the suite of stores starts, and what it says where it cannot; and its options."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from kvcore_conformance.stores.servers import RedisServer, SeaweedServer, need, serving
from kvcore_conformance.stores.targets import Target


def ask(server, command):
    """Send a command to a Redis server and return its first answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(command + b"\r\n")
        return client.recv(100)


def test_a_server_keeps_data_and_port_over_a_restart_and_is_gone_in_the_end():
    with serving(RedisServer) as server:
        assert ask(server, b"SET key value") == b"+OK\r\n"
        before = server.uri
        server.restart()
        assert server.uri == before
        assert ask(server, b"GET key") == b"$5\r\nvalue\r\n"
        assert server.running
    assert not server.running
    assert not server.folder.exists()
    with pytest.raises(OSError):
        ask(server, b"PING")


def test_options_come_before_defaults():
    with serving(RedisServer, "--maxmemory", "3mb", "--appendonly", "no") as server:
        assert b"3145728" in ask(server, b"CONFIG GET maxmemory")
        assert b"no" in ask(server, b"CONFIG GET appendonly")


def test_a_server_that_ends_at_once_shows_its_log():
    serve = serving(RedisServer, "--no-such-option", "1")
    with pytest.raises(RuntimeError, match=r"(?s)redis-server ended before it answered:.*no-such-option"), serve:
        pytest.fail("it started")


@pytest.mark.parametrize("kind", [RedisServer, SeaweedServer])
def test_where_a_server_is_not_installed(kind, monkeypatch):
    monkeypatch.setattr(kind, "program", staticmethod(lambda: None))
    monkeypatch.delenv("KVCORE_REQUIRE_SERVERS", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{kind.title} cannot be started: .*install"):
        need(kind)
    monkeypatch.setenv("KVCORE_REQUIRE_SERVERS", "1")
    with pytest.raises(pytest.fail.Exception, match=f"{kind.title} is required here .*install"):
        need(kind)


def test_a_target_shows_no_secret():
    for uri in ("resp://user:correct-horse%21@host:1", "capped:1GiB:resp://:correct-horse%21@host:1"):
        target = Target.at(uri)
        assert target.secrets == ("correct-horse%21", "correct-horse!")
        assert "correct-horse" not in repr(target)
        assert "correct-horse" not in target.name
        assert target.uri == uri
    plain = "s3://bucket/tests?endpoint=http://127.0.0.1:8333"
    assert (Target.at(plain).name, Target.at(plain).secrets) == (plain, ())


def collect(*options):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout + done.stderr


def test_a_run_on_a_backend_leaves_stores_out():
    said = collect("--pyargs", "kvcore_conformance", "--kvcore-backend", "cpu_ref")
    assert "test_movement.py" in said
    assert "stores/" not in said


def test_a_run_without_a_store_says_what_is_missing():
    said = collect("--pyargs", "kvcore_conformance.stores", "-k", "any_size")
    assert said.count("needs --kvcore-store URI") == 1
    assert "Traceback" not in said
    assert "needs --kvcore-store" not in collect("--pyargs", "kvcore_conformance")


def test_tests_are_named_after_stores_and_not_after_passwords():
    stores = ("--kvcore-store", "memory:", "--kvcore-store", "resp://user:correct-horse@host")
    said = collect("--pyargs", "kvcore_conformance.stores", *stores)
    assert "test_any_size[memory:-0]" in said
    assert "test_any_size[resp://user:***@host-0]" in said
    assert "correct-horse" not in said
