"""A configuration's fields turn on what they name, and what is off costs nothing and imports nothing."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from kvcore.engine.observer import EngineObserver, EngineObservers
from kvcore.errors import ConfigError
from kvcore.telemetry import observers
from kvcore.telemetry.tracing import disable_tracing

OFF = {
    "log_level": "",
    "log_file": "",
    "log_file_bytes": 1000,
    "log_file_count": 2,
    "metrics": False,
    "metrics_port": 0,
    "metrics_host": "127.0.0.1",
    "tracing": False,
}


def config(**fields):
    return SimpleNamespace(**{**OFF, **fields})


def bound(port=0):
    """A socket that does not listen: the kernel gives its port to nobody else, and who names it may listen there."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("", port))  # of all addresses
    return taken


@pytest.fixture
def free_port():
    with bound() as held:
        yield held.getsockname()[1]


def page(port, host="127.0.0.1"):
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_all_on(tmp_path, free_port):
    registry = CollectorRegistry()
    asked = config(
        log_level="INFO",
        log_file=str(tmp_path / "a.log"),
        metrics=True,
        metrics_port=free_port,
        tracing=True,
    )
    observer = observers(asked, model="m", engine="e", rank=0, registry=registry)
    try:
        observer.request_lookup("req", 100, 50, 0.1)
        assert "Reqid: req, Total tokens 100" in (tmp_path / "a.log").read_text()
        assert 'kvcore_hit_tokens_total{engine="e",model="m",rank="0"} 50.0' in page(free_port)
    finally:
        observer.close()
        disable_tracing()
    with bound(free_port) as again:
        again.listen()  # nobody else does any more


def test_ranks_serve_on_ports_of_their_own(free_port):
    observer = observers(config(metrics=True, metrics_port=free_port - 1), rank=1, registry=CollectorRegistry())
    assert "kvcore_hit_tokens_total" in page(free_port)
    observer.close()


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0"])
def test_the_address_is_that_of_the_configuration(free_port, host):
    asked = config(metrics=True, metrics_port=free_port, metrics_host=host)
    observer = observers(asked, registry=CollectorRegistry())
    assert "kvcore_hit_tokens_total" in page(free_port, "127.0.0.2")
    observer.close()
    with pytest.raises(urllib.error.URLError):
        page(free_port, "127.0.0.2")


def test_two_engines_of_a_process_share_a_port(free_port):
    registry = CollectorRegistry()
    first, second = (
        observers(config(metrics=True, metrics_port=free_port), engine=name, registry=registry) for name in "ab"
    )
    first.close()
    first.close()  # twice is once: the other one is served on
    second.request_lookup("", 10, 0, 0.1)
    assert 'engine="b"' in page(free_port)
    second.close()
    with pytest.raises(urllib.error.URLError):
        page(free_port)


def test_a_port_in_use_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="metrics_port"):
            observers(config(metrics=True, metrics_port=taken.getsockname()[1]), registry=CollectorRegistry())


def test_off_leaves_logging_as_it_is_and_still_tells_others(logger):
    class Mine(EngineObserver):
        def __init__(self):
            self.reasons = []

        def uncacheable(self, reason):
            self.reasons.append(reason)

    before, mine = (logger.level, list(logger.handlers)), Mine()
    observers(config(), more=[mine]).uncacheable("prompt embeddings")
    assert (logger.level, list(logger.handlers)) == before
    assert mine.reasons == ["prompt embeddings"]


def test_off_no_library_is_imported():
    code = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from kvcore.telemetry import observers\n"
        f"observers(SimpleNamespace(**{OFF!r})).request_lookup('r', 1, 1, 0.0)\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_observer_that_fails_keeps_nothing_from_the_others(caplog):
    class Broken(EngineObserver):
        def failure(self, tier, operation, error):
            raise RuntimeError("broken")

    class Counting(EngineObserver):
        told = 0

        def failure(self, tier, operation, error):
            self.told += 1

    caplog.set_level(logging.ERROR, "kvcore")
    counting = Counting()
    EngineObservers([Broken(), counting]).failure("disk", "store", OSError("secret frame"))
    assert counting.told == 1
    assert "RuntimeError: broken" in caplog.text
    assert all(record.args and all(isinstance(arg, str) for arg in record.args) for record in caplog.records)
