"""`kvcore describe`: what is stored, whose it is, and what is configured."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from kvcore.cli import app
from kvcore.keys import StoreKey
from kvcore.tiers.stores import open_store

from .stored import RAW_BYTES, fill


@pytest.fixture
def nobody() -> str:
    """The URI of a server that is not there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"resp://127.0.0.1:{taken.getsockname()[1]}"


def tiers(values) -> dict:
    return {tier["name"]: tier for tier in values["tiers"]}


def test_what_is_stored_is_told_by_namespace_with_its_codecs(run, tmp_path):
    first = fill(f"fs:{tmp_path}", chunks=5)
    second = fill(f"fs:{tmp_path}", model="other", chunks=2, serde="kvs1")
    values = run("describe", "--store", f"fs:{tmp_path}").out
    assert "7 objects" in values
    assert "5 raw, 2 balanced" in values
    done = run("describe", "--store", f"fs:{tmp_path}", "--json").json()
    assert done["config"] is None
    [disk] = done["tiers"]
    assert (disk["name"], disk["state"], disk["objects"]) == ("disk", "ok", 7)
    spaces = {space["namespace"]: space for space in disk["namespaces"]}
    assert {name: space["objects"] for name, space in spaces.items()} == {first: 5, second: 2}
    assert sum(space["bytes"] for space in spaces.values()) == disk["bytes"]
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*.kvf"))
    assert disk["bytes"] == on_disk
    assert disk["sampled"]["codecs"] == {"raw": 5, "balanced": 2}
    assert disk["sampled"]["ratio"] == pytest.approx(7 * RAW_BYTES / on_disk, abs=1e-3)


def test_few_frames_are_looked_into_and_none_if_none_is_wanted(run, tmp_path):
    fill(f"fs:{tmp_path}", chunks=5)
    for sample, frames in ((2, 2), (5, 5), (50, 5)):
        [disk] = run("describe", "--store", f"fs:{tmp_path}", "--sample", str(sample), "--json").json()["tiers"]
        assert disk["sampled"]["frames"] == frames
    [disk] = run("describe", "--store", f"fs:{tmp_path}", "--sample", "0", "--json").json()["tiers"]
    assert (disk["sampled"], disk["objects"]) == (None, 5)


def test_damaged_frames_are_counted(run, tmp_path):
    fill(f"fs:{tmp_path}", chunks=3)
    file = sorted(tmp_path.rglob("*.kvf"))[1]
    file.write_bytes(b"\0" * 200)
    [disk] = run("describe", "--store", f"fs:{tmp_path}", "--json").json()["tiers"]
    assert (disk["sampled"]["damaged"], disk["sampled"]["frames"]) == (1, 3)
    assert "1 damaged" in run("describe", "--store", f"fs:{tmp_path}").out
    assert file.exists(), "looking changes nothing"


def test_a_capacity_is_told_and_nothing_is_checked_or_evicted(run, tmp_path):
    fill(f"fs:{tmp_path}", chunks=3)
    file = sorted(tmp_path.rglob("*.kvf"))[1]
    file.write_bytes(b"\0" * 200)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    [disk] = run("describe", "--store", f"capped:1KiB,policy=lru:fs:{tmp_path}", "--json").json()["tiers"]
    assert (disk["objects"], disk["capacity_bytes"], disk["sampled"]["damaged"]) == (3, 1024, 1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_nothing_is_listed_if_it_is_to_be_quick(run, tmp_path):
    fill(f"fs:{tmp_path}")
    [disk] = run("describe", "--store", f"fs:{tmp_path}", "--quick", "--json").json()["tiers"]
    assert (disk["objects"], disk["namespaces"], disk["sampled"]) == (None, None, None)


def test_a_directory_that_does_not_exist_is_not_made(run, tmp_path):
    for uri in (f"fs:{tmp_path}/no", f"capped:1GiB:capped:2GiB:fs:{tmp_path}/no?sync=0", f"fs:{tmp_path}"):
        [disk] = run("describe", "--store", uri, "--json").json()["tiers"]
        assert (disk["state"], disk["objects"]) == ("absent", 0)
    assert list(tmp_path.iterdir()) == [], "an empty one is not made a store"


def test_a_configuration_is_told_with_where_it_comes_from(run, tmp_path, monkeypatch):
    fill(f"fs:{tmp_path}/kv", serde="kvs1")
    file = tmp_path / "kvcore.yaml"
    file.write_text(f"local_disk: {tmp_path}/kv\nmax_local_disk_size: 2 GiB\nserde: kvs1\nsalt: hush\n")
    monkeypatch.setenv("KVCORE_CHUNK_TOKENS", "512")
    values = run("describe", "--config", file, "--json").json()
    sources = {row["name"]: (row["value"], row["source"]) for row in values["config"]}
    assert sources["local_disk"] == (f"{tmp_path}/kv", f"{file}:local_disk")
    assert sources["chunk_tokens"] == ("512", "KVCORE_CHUNK_TOKENS")
    assert sources["store_policy"] == ("default", "default")
    disk = tiers(values)["disk"]
    assert (disk["serde"], disk["objects"], disk["capacity_bytes"]) == ("kvs1", 3, 2 << 30)
    assert tiers(values)["host"]["capacity_bytes"] == 5 << 30
    text = run("describe", "--config", file).out
    assert "hush" not in text
    assert re.search(r"^chunk_tokens +512 +KVCORE_CHUNK_TOKENS *$", text, re.MULTILINE)
    assert "store_policy" not in text
    assert re.search("^store_policy +default +default", run("describe", "--config", file, "--all").out, re.MULTILINE)
    monkeypatch.setenv("KVCORE_CONFIG_FILE", str(file))
    assert tiers(run("describe", "--json").json())["disk"] == disk


def test_encrypted_frames_need_no_key_to_be_described(run, tmp_path):
    fill(f"fs:{tmp_path}/kv")
    file = tmp_path / "kvcore.yaml"
    file.write_text(f'tiers: [{{store: "fs:{tmp_path}/kv", serde: {{type: aesgcm, key_file: {tmp_path}/no.key}}}}]\n')
    assert tiers(run("describe", "--config", file, "--json").json())["disk"]["objects"] == 3


def test_a_store_that_is_down_is_told_and_the_others_all_the_same(run, tmp_path, nobody):
    fill(f"fs:{tmp_path}")
    done = run("describe", "--store", nobody, "--store", f"fs:{tmp_path}")
    assert done.code == 1
    assert "state  down: cannot open" in done.out
    assert "3 objects" in done.out


def test_stores_of_one_kind_get_names_of_their_own(run, tmp_path):
    arguments = [x for name in "abc" for x in ("--store", f"fs:{tmp_path}/{name}")]
    fill(f"fs:{tmp_path}/b")
    found = tiers(run("describe", *arguments, "--json").json())
    assert {name: tier["objects"] for name, tier in found.items()} == {"disk": 0, "disk-2": 3, "disk-3": 0}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the configuration has no store"),
        (["--store", "fs:x", "--config", "y"], "two ways to say"),
        (["--store", "x"], "is not the URI of a store"),
        (["--store", "fz:x"], "fz"),
        (["--store", f"fs:/{'x' * 300}"], "File name too long"),
        (["--config", "/nonexistent.yaml"], "/nonexistent.yaml"),
    ],
)
def test_what_means_nothing_is_refused(run, arguments, complaint):
    done = run("describe", *arguments)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err


@given(spaces=st.dictionaries(st.integers(0, 255), st.lists(st.integers(0, 300), min_size=1, max_size=6), max_size=4))
@settings(max_examples=15)
def test_every_object_is_counted_once(tmp_path_factory, spaces):
    folder = tmp_path_factory.mktemp("store")
    with open_store(f"fs:{folder}?sync=0") as store:
        for space, lengths in spaces.items():
            for number, length in enumerate(lengths):
                store.put(StoreKey(bytes([space]) * 32, number.to_bytes(32, "little")), bytes(length))
    done = CliRunner().invoke(app, ["describe", "--store", f"fs:{folder}", "--json"])
    [disk] = json.loads(done.stdout)["tiers"]
    found = {s["namespace"]: (s["objects"], s["bytes"]) for s in disk["namespaces"]}
    assert found == {(bytes([s]) * 32).hex(): (len(x), sum(x)) for s, x in spaces.items()}
    frames = disk["sampled"]["frames"] if disk["sampled"] else 0
    assert frames == min(16, sum(map(len, spaces.values())))
    assert disk["sampled"] is None or disk["sampled"]["damaged"] == frames, "these are no frames"
    assert len(list(Path(folder).rglob("*.kvf"))) == sum(map(len, spaces.values()))
