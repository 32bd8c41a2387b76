"""Prometheus sees what happened: counts, times, states and sizes, of all engines of a process and of all processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from kvcore.engine.observer import TierSize
from kvcore.errors import ConfigError, StoreError
from kvcore.telemetry.definitions import METRICS
from kvcore.telemetry.prometheus import REGISTRY, PrometheusObserver, metrics_text, serve_metrics


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def observer(registry):
    return PrometheusObserver(model="m", engine="e", rank=1, registry=registry)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Series -> value; a series is its name and the values of its labels, without model, engine and rank."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in {"model", "engine", "rank"}]
            if not sample.name.endswith("_created"):
                found[(sample.name, *sorted(labels))] = sample.value
    return found


def test_hit_rate_bytes_and_times_of_requests(observer, registry):
    observer.request_lookup("a", 1000, 512, 0.002)
    observer.request_lookup("b", 1000, 0, 0.5)
    observer.request_retrieve("a", 512, 256, 9000, 0.02)
    observer.request_store("b", 768, 1000, 27000, 0.3)
    got = samples(metrics_text(registry))
    assert got["kvcore_lookup_tokens_total",] == 2000
    assert got["kvcore_hit_tokens_total",] == 512
    assert got["kvcore_missed_tokens_total", "not_found"] == 1488
    assert got["kvcore_missed_tokens_total", "not_loaded"] == 256
    assert got["kvcore_retrieved_tokens_total",] == 256
    assert got["kvcore_retrieved_bytes_total",] == 9000
    assert got["kvcore_stored_tokens_total",] == 768
    assert got["kvcore_stored_bytes_total",] == 27000
    assert got["kvcore_requests_total", "lookup"] == 2
    assert got["kvcore_request_seconds_count", "lookup"] == 2
    assert got["kvcore_request_seconds_sum", "lookup"] == pytest.approx(0.502)
    assert got["kvcore_request_seconds_bucket", "0.003", "lookup"] == 1
    assert got["kvcore_request_seconds_bucket", "1.0", "lookup"] == 2


def test_what_tiers_and_serdes_do(observer, registry):
    observer.lookup("disk", 3, 1, 0.001)
    observer.retrieve("disk", 3, 300, 0.01)
    observer.miss("disk", 1)
    observer.store("disk", 2, 50, 0.1)
    observer.failure("disk", "store", StoreError("no space"))
    observer.evict("host", 4, 400)
    observer.serde("kvs1", "serialize", 25, 0.004)
    got = samples(metrics_text(registry))
    assert got["kvcore_tier_lookup_chunks_total", "disk", "hit"] == 3
    assert got["kvcore_tier_lookup_chunks_total", "disk", "miss"] == 1
    assert got["kvcore_tier_hit_chunks_total", "disk"] == 3
    assert got["kvcore_tier_hit_bytes_total", "disk"] == 300
    assert got["kvcore_tier_missed_chunks_total", "disk"] == 1
    assert got["kvcore_tier_stored_chunks_total", "disk"] == 2
    assert got["kvcore_tier_stored_bytes_total", "disk"] == 50
    assert got["kvcore_tier_failures_total", "disk", "store"] == 1
    assert got["kvcore_tier_evicted_chunks_total", "host"] == 4
    assert got["kvcore_tier_evicted_bytes_total", "host"] == 400
    assert got["kvcore_tier_seconds_count", "disk", "retrieve"] == 1
    assert got["kvcore_serde_seconds_sum", "kvs1", "serialize"] == pytest.approx(0.004)
    assert got["kvcore_serde_bytes_total", "kvs1", "serialize"] == 25


def test_an_outage_shows_while_it_lasts(observer, registry):
    observer.degraded("remote", "connection refused")
    assert samples(metrics_text(registry))["kvcore_tier_degraded", "remote"] == 1
    observer.recovered("remote", 2.5)
    got = samples(metrics_text(registry))
    assert got["kvcore_tier_degraded", "remote"] == 0
    assert got["kvcore_tier_outages_total", "remote"] == 1
    assert got["kvcore_tier_outage_seconds_total", "remote"] == 2.5


@pytest.mark.parametrize("more", [1, 2])
def test_an_engine_that_closes_during_an_outage_leaves_no_alarm(observer, registry, more):
    observer.degraded("remote", "connection refused")
    observer.close()
    for _ in range(more):
        observer.degraded("disk", "tiers that close may still fail")
        assert samples(metrics_text(registry))["kvcore_tier_degraded", "remote"] == 0
        assert samples(metrics_text(registry)).get(("kvcore_tier_degraded", "disk"), 0) == 0
        observer.close()


def test_all_metrics_are_announced_and_no_other(registry, observer):
    text = metrics_text(registry)
    announced = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert announced == {metric.name for metric in METRICS}


def test_engines_of_a_process_count_side_by_side(registry):
    first = PrometheusObserver(model="m", engine="1", registry=registry)
    second = PrometheusObserver(model="m", engine="2", registry=registry)
    again = PrometheusObserver(model="m", engine="1", registry=registry)
    for observer, tokens in ((first, 1), (second, 10), (again, 100)):
        observer.request_lookup("", tokens, 0, 0.0)
    value = registry.get_sample_value
    assert value("kvcore_lookup_tokens_total", {"model": "m", "engine": "1", "rank": "0"}) == 101
    assert value("kvcore_lookup_tokens_total", {"model": "m", "engine": "2", "rank": "0"}) == 10


def test_without_a_registry_all_go_to_that_of_the_process():
    PrometheusObserver(model="m", engine="default").request_lookup("", 7, 0, 0.0)
    assert 'kvcore_lookup_tokens_total{engine="default",model="m",rank="0"} 7.0' in metrics_text()


def test_a_name_that_somebody_else_took_is_refused_and_nothing_stays():
    registry = CollectorRegistry()
    other = Counter("kvcore_stored_bytes", "Somebody else's.", registry=registry)
    with pytest.raises(ConfigError, match="registry of its own"):
        PrometheusObserver(registry=registry)
    registry.unregister(other)
    PrometheusObserver(registry=registry).request_lookup("", 7, 0, 0.0)


def test_sizes_are_asked_at_each_scrape_until_the_engine_closes(registry, observer):
    nbytes = [100]
    observer.watch(lambda: [TierSize("host", nbytes[0], 2, 1000), TierSize("remote")])
    assert samples(metrics_text(registry))["kvcore_tier_bytes", "host"] == 100
    nbytes[0] = 200
    got = samples(metrics_text(registry))
    assert got["kvcore_tier_bytes", "host"] == 200
    assert got["kvcore_tier_objects", "host"] == 2
    assert got["kvcore_tier_capacity_bytes", "host"] == 1000
    assert ("kvcore_tier_bytes", "remote") not in got
    observer.close()
    assert ("kvcore_tier_bytes", "host") not in samples(metrics_text(registry))


def test_one_engine_that_cannot_tell_its_sizes_hides_no_others(registry, observer, caplog):
    def broken():
        raise StoreError("gone")

    other = PrometheusObserver(engine="other", registry=registry)
    other.watch(broken)
    observer.watch(lambda: [TierSize("host", 1, 1, 1)])
    assert samples(metrics_text(registry))["kvcore_tier_bytes", "host"] == 1
    assert "StoreError: gone" in caplog.text


def test_counts_of_many_threads_are_all_there(registry, observer):
    def work():
        for _ in range(500):
            observer.lookup("host", 1, 1, 0.001)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = samples(metrics_text(registry))
    assert got["kvcore_tier_lookup_chunks_total", "hit", "host"] == 4000
    assert got["kvcore_tier_seconds_count", "host", "lookup"] == 4000


# --- over HTTP


def fetched(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_a_port_is_shared_until_the_last_one_closes(registry, observer):
    observer.request_lookup("", 7, 0, 0.0)
    first = serve_metrics(0, registry=registry)
    second = serve_metrics(first.port, registry=registry)
    assert second is first
    first.close()
    assert samples(fetched(first.port))["kvcore_lookup_tokens_total",] == 7
    second.close()
    with pytest.raises(urllib.error.URLError):
        fetched(first.port)
    third = serve_metrics(first.port, registry=registry)
    assert samples(fetched(third.port))["kvcore_lookup_tokens_total",] == 7
    third.close()
    third.close()


def test_the_registry_of_the_process_is_the_same_by_its_name():
    first = serve_metrics(0)
    second = serve_metrics(first.port, registry=REGISTRY)
    assert second is first
    first.close()
    second.close()


def test_a_port_that_serves_another_registry_is_refused(registry):
    server = serve_metrics(0, registry=registry)
    with pytest.raises(ConfigError, match="another registry"):
        serve_metrics(server.port, registry=CollectorRegistry())
    server.close()


@pytest.mark.parametrize(("port", "host"), [(70000, "127.0.0.1"), (0, "no.such.host.invalid")])
def test_an_address_that_cannot_be_had_is_refused(port, host, registry):
    with pytest.raises(ConfigError, match="choose another metrics_port"):
        serve_metrics(port, host=host, registry=registry)


# --- in other processes

COUNTING = """
import os, sys
from kvcore.engine.observer import TierSize
from kvcore.telemetry.prometheus import PrometheusObserver, metrics_text
observer = PrometheusObserver(model="m", engine="e", registry=None)
observer.request_lookup("", 100, 40, 0.5)
observer.degraded("remote", "gone")
child = os.fork()
if not child:
    PrometheusObserver(model="m", engine="e").request_lookup("", 10, 4, 0.5)
    observer.request_lookup("", 1000, 400, 0.5)
    observer.recovered("remote", 1.0)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
observer.watch(lambda: [TierSize("host", 3, 2, 1)])
print(metrics_text())
"""


def run(code: str, **environ: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_processes_count_together_in_multi_process_mode(tmp_path):
    got = samples(run(COUNTING, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)))
    assert got["kvcore_lookup_tokens_total",] == 1110
    assert got["kvcore_request_seconds_count", "lookup"] == 3
    assert got["kvcore_tier_degraded", "remote"] == 0
    assert got["kvcore_tier_bytes", "host"] == 3


def test_otherwise_a_forked_process_counts_for_itself():
    got = samples(run(COUNTING))
    assert got["kvcore_lookup_tokens_total",] == 100
    assert got["kvcore_tier_degraded", "remote"] == 1


def test_without_the_client_library_the_rest_works_and_the_message_says_what_to_install():
    said = run(
        "import sys, json\n"
        "sys.modules['prometheus_client'] = None\n"
        "import kvcore.telemetry\n"
        "from kvcore.errors import ConfigError\n"
        "try: import kvcore.telemetry.prometheus\n"
        "except ConfigError as error: print(json.dumps(str(error)))\n"
    )
    assert "pip install 'kvcore[metrics]'" in json.loads(said)
