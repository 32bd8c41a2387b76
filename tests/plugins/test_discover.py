"""Discovery: every plug-in is listed, and one that is broken is seen with its reason and hides nobody."""

from __future__ import annotations

import sys

import pytest

import kvcore
from kvcore import settings
from kvcore.plugins import API_VERSION
from kvcore.plugins.discover import KNOWN_BACKENDS, discover


def found(**environ):
    return {c.name: c for c in discover(settings.current(environ))}


def test_an_installed_plugin_is_found_with_its_distribution(shelf):
    package = shelf.add("fast")
    candidate = found()["fast"]
    assert (candidate.status, candidate.distribution) == ("found", "kvcore-fast 1.2")
    assert candidate.spec.name == "fast"
    assert candidate.probe is None
    assert package in sys.modules


def test_discovery_neither_probes_nor_imports_the_implementations(shelf):
    package = shelf.add("fast", probe="1 / 0", modules={"ops": "raise RuntimeError('imported too early')"})
    assert found()["fast"].status == "found"
    assert f"{package}.ops" not in sys.modules


@pytest.mark.parametrize(
    ("light", "reason"),
    [
        ("import libnothing", "failed to load: ModuleNotFoundError: No module named 'libnothing'"),
        ("raise OSError('libfast.so.3: cannot open shared object file')", "OSError: libfast.so.3: cannot open"),
        ("def backend(): raise ValueError('bad\\n  firmware')", "failed to load: ValueError: bad firmware"),
        ("def backend(: pass", "failed to load: SyntaxError"),
        ("x = 1", "failed to load: AttributeError"),
        ("import sys; sys.exit(3)", "failed to load: SystemExit: 3"),
        ("backend = 7", "failed to load: TypeError: 'int' object is not callable"),
        ("def backend(): return {'name': 'bad'}", "returned a dict, not a kvcore.BackendSpec"),
        ("def backend(): return None", "returned a NoneType, not a kvcore.BackendSpec"),
    ],
)
def test_a_broken_plugin_is_listed_with_its_reason_and_hides_nobody(shelf, light, reason):
    shelf.add("bad", light=light)
    shelf.add("good")
    candidates = found()
    assert candidates["bad"].status == "broken"
    assert reason in candidates["bad"].reason
    assert "\n" not in candidates["bad"].reason
    assert candidates["bad"].spec is None
    assert candidates["bad"].distribution == "kvcore-bad 1.2"
    assert candidates["good"].status == "found"
    assert set(KNOWN_BACKENDS) <= set(candidates)


@pytest.mark.parametrize("version", [API_VERSION - 1, API_VERSION + 1])
def test_another_api_version_is_refused_with_both_numbers(shelf, version):
    shelf.add("old", api_version=str(version), distribution="acme-kv")
    candidate = found()["old"]
    assert candidate.status == "broken"
    assert f"plug-in API {version}, this kvcore speaks {API_VERSION}" in candidate.reason
    assert "acme-kv" in candidate.reason


def test_a_name_that_two_distributions_claim_is_taken_from_neither(shelf):
    shelf.add("fast", distribution="one")
    shelf.add("fast", distribution="two")
    candidate = found()["fast"]
    assert (candidate.status, candidate.spec) == ("broken", None)
    assert "one 1.2" in candidate.reason
    assert "two 1.2" in candidate.reason
    assert "uninstall one" in candidate.reason
    with pytest.raises(kvcore.NoBackendError, match="claimed by"):
        kvcore.open_backend("fast")


def test_the_entry_point_and_the_backend_must_agree_on_the_name(shelf):
    shelf.add("fast", entry="quick")
    candidate = found()["quick"]
    assert candidate.status == "broken"
    assert "'quick' yields a backend named 'fast'" in candidate.reason


def test_the_allowlist_keeps_others_from_being_imported(shelf):
    allowed = shelf.add("wanted")
    blocked = shelf.add("unwanted", light="raise RuntimeError('must not be imported')")
    candidates = found(KVCORE_PLUGINS="wanted,cpu_ref")
    assert candidates["wanted"].status == "found"
    assert candidates["unwanted"].status == "blocked"
    assert "KVCORE_PLUGINS=wanted, cpu_ref" in candidates["unwanted"].reason
    assert allowed in sys.modules
    assert blocked not in sys.modules


def test_a_blocked_backend_cannot_be_opened(shelf, monkeypatch):
    package = shelf.add("unwanted")
    monkeypatch.setenv("KVCORE_PLUGINS", "cpu_ref")
    with pytest.raises(kvcore.NoBackendError, match="'unwanted' cannot be used: not in KVCORE_PLUGINS=cpu_ref"):
        kvcore.open_backend("unwanted")
    assert package not in sys.modules


def test_known_backends_are_listed_with_how_to_install_them():
    candidates = {c.name: c for c in discover(settings.current({}), points=[])}
    assert list(candidates) == list(KNOWN_BACKENDS)
    assert {c.status for c in candidates.values()} == {"missing"}
    assert 'pip install "kvcore[rocm]"' in candidates["rocm"].reason
    assert "pip install kvcore-cpu-ref" in candidates["cpu_ref"].reason


def test_the_order_is_known_backends_first_then_by_name(shelf):
    for name in ("zeta", "alpha"):
        shelf.add(name)
    names = [c.name for c in discover(settings.current({}))]
    assert names[: len(KNOWN_BACKENDS)] == list(KNOWN_BACKENDS)
    others = names[len(KNOWN_BACKENDS) :]
    assert others == sorted(others)
    assert {"alpha", "zeta"} <= set(others)
