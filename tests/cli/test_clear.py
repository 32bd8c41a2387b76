"""`kvcore clear`: what goes, what stays, and what is asked."""

from __future__ import annotations

import json
import socket

import pytest

from kvcore.keys import StoreKey
from kvcore.tiers.stores import open_store

from .stored import fill


def stored(folder) -> set[tuple[str, str]]:
    with open_store(f"fs:{folder}") as store:
        return {(key.namespace.hex(), key.digest.hex()) for key in store.list()}


@pytest.mark.parametrize(("typed", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 3), ("", 1, 3), ("\n", 1, 3)])
def test_it_asks_and_does_as_it_is_told(run, tmp_path, typed, code, left):
    fill(f"fs:{tmp_path}")
    done = run("clear", "--store", f"fs:{tmp_path}", typed=typed)
    assert done.code == code
    assert f"disk (fs:{tmp_path}): 3 objects" in done.err
    assert len(stored(tmp_path)) == left
    assert ("removed 3 objects" in done.out) == (left == 0)
    assert ("nothing was removed" in done.err) == (left == 3)


def test_yes_asks_nothing_and_json_is_one_object(run, tmp_path):
    fill(f"fs:{tmp_path}")
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.kvf"))
    done = run("clear", "--store", f"fs:{tmp_path}", "--yes", "--json")
    assert done.json() == {"namespace": None, "removed": {"disk": 3}, "bytes": {"disk": size}, "failed": {}}
    assert done.err == ""
    assert stored(tmp_path) == set()
    assert run("clear", "--store", f"fs:{tmp_path}").out == "disk: removed 0 objects\n", "there is nothing to ask"


@pytest.mark.parametrize("digits", [8, 64])
def test_only_a_namespace_goes_if_one_is_named(run, tmp_path, digits):
    first, second = fill(f"fs:{tmp_path}"), fill(f"fs:{tmp_path}", model="other", chunks=2)
    done = run("clear", "--store", f"fs:{tmp_path}", "--namespace", first[:digits].upper(), "--yes", "--json").json()
    assert (done["namespace"], done["removed"]) == (first, {"disk": 3})
    assert {namespace for namespace, _ in stored(tmp_path)} == {second}


def test_a_namespace_has_to_be_the_only_one_that_begins_so(run, tmp_path):
    with open_store(f"fs:{tmp_path}") as store:
        for last in (b"\1", b"\2"):
            store.put(StoreKey(b"\xab" * 31 + last, bytes(32)), b"frame")
    done = run("clear", "--store", f"fs:{tmp_path}", "--namespace", "abababab", "--yes")
    assert (done.code, "2 namespaces begin so" in done.err) == (2, True)
    done = run("clear", "--store", f"fs:{tmp_path}", "--namespace", "cdcdcdcd", "--yes")
    assert (done.code, "no stored namespace begins so" in done.err) == (2, True)
    assert len(stored(tmp_path)) == 2


def test_only_the_tiers_that_are_named(run, tmp_path):
    for name in "ab":
        fill(f"fs:{tmp_path}/{name}")
    stores = ("--store", f"fs:{tmp_path}/a", "--store", f"fs:{tmp_path}/b")
    assert run("clear", *stores, "--tier", "disk-2", "--yes", "--json").json()["removed"] == {"disk-2": 3}
    assert (len(stored(tmp_path / "a")), len(stored(tmp_path / "b"))) == (3, 0)
    assert run("clear", *stores, "--yes", "--json").json()["removed"] == {"disk": 3, "disk-2": 0}


def test_read_only_tiers_are_left_alone_and_refused_if_named(run, tmp_path):
    for name in "ab":
        fill(f"fs:{tmp_path}/{name}")
    file = tmp_path / "kvcore.yaml"
    both = f'- {{store: "fs:{tmp_path}/a", name: a}}\n- {{store: "fs:{tmp_path}/b", name: b, read_only: true}}\n'
    file.write_text(f"tiers:\n{both}")
    done = run("clear", "--config", file, "--tier", "b", "--yes")
    assert (done.code, "tier b is read-only" in done.err) == (2, True)
    assert run("clear", "--config", file, "--yes", "--json").json()["removed"] == {"a": 3}
    assert len(stored(tmp_path / "b")) == 3
    file.write_text(f"tiers:\n{both.splitlines()[1]}\n")
    done = run("clear", "--config", file, "--yes")
    assert (done.code, "nothing may be removed: b is read-only" in done.err) == (2, True)


def test_nothing_goes_while_a_tier_is_down_unless_the_others_are_named(run, tmp_path):
    fill(f"fs:{tmp_path}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"resp://127.0.0.1:{taken.getsockname()[1]}"
    stores = ("--store", f"fs:{tmp_path}", "--store", nobody)
    done = run("clear", *stores, "--yes")
    assert (done.code, "remote: cannot open" in done.err) == (2, True)
    assert len(stored(tmp_path)) == 3
    assert run("clear", *stores, "--tier", "disk", "--yes", "--json").json()["removed"] == {"disk": 3}


def test_a_directory_that_does_not_exist_is_not_made(run, tmp_path):
    done = run("clear", "--store", f"fs:{tmp_path}/no", "--json")
    assert done.json()["removed"] == {"disk": 0}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tier", "attic"], "there is no tier 'attic'; there are disk"),
        (["--tier", "host"], "belongs to the engine's process"),
        (["--namespace", "abc"], "8 to 64 hex digits"),
        (["--namespace", "xyzxyzxyz"], "8 to 64 hex digits"),
    ],
)
def test_what_means_nothing_is_refused(run, tmp_path, arguments, complaint):
    fill(f"fs:{tmp_path}")
    done = run("clear", "--store", f"fs:{tmp_path}", "--yes", *arguments)
    assert (done.code, complaint in done.err) == (2, True)
    assert len(stored(tmp_path)) == 3


def test_where_one_tier_fails_the_others_are_emptied_and_counted(run, tmp_path):
    for name in "ab":
        fill(f"fs:{tmp_path}/{name}")
    stores = ("--store", f"fault:delete.eio=1:fs:{tmp_path}/a", "--store", f"fs:{tmp_path}/b")
    done = run("clear", *stores, "--yes", "--json")
    values = json.loads(done.out)
    assert done.code == 1
    assert (values["removed"], values["bytes"]["disk"]) == ({"disk": None, "disk-2": 3}, None)
    assert list(values["failed"]) == ["disk"]
    assert (len(stored(tmp_path / "a")), len(stored(tmp_path / "b"))) == (3, 0)
    done = run("clear", *stores, "--yes")
    assert (done.code, "disk: not all could be removed" in done.err, "disk-2: removed 0" in done.out) == (1, True, True)
