"""Stores by their URI: kvcore's, registered ones, those of packages; and what is no store."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.registry import Registry
from kvcore.tiers.stores import FsStore, MemoryStore, open_store, register_store, store_schemes
from kvcore.tiers.stores.fault import FaultStore
from kvcore.tiers.stores.options import read_flag, read_size, read_time, split_options


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make an installed package that brings a kind of store."""

    def install(scheme, value, source=""):
        module = value.partition(":")[0]
        folder = tmp_path / f"{module}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[kvcore.stores]\n{scheme} = {value}\n")
        (tmp_path / f"{module}.py").write_text(source)

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for module in ("store_one", "store_two"):
        sys.modules.pop(module, None)


SOURCE = "from kvcore.tiers.stores import MemoryStore\nGIVEN = []\ndef make(rest):\n    GIVEN.append(rest)\n"


def test_stores_of_kvcore(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_store("memory:") as memory, open_store(f"fs:{tmp_path}/a") as files, open_store("fs:a") as same:
        assert (type(memory), type(files)) == (MemoryStore, FsStore)
        assert files.name == same.name == f"fs:{tmp_path}/a"
    with open_store("fault:put.eio=@1:memory:") as fault:
        assert type(fault) is FaultStore
    assert set(store_schemes()) >= {"memory", "fs", "resp", "resps", "resp+unix", "s3", "capped", "fault"}


@pytest.mark.parametrize(
    ("uri", "match"),
    [
        ("fss:/a", r"no kind of store 'fss'; did you mean 'fs'\? there are memory, fs, "),
        ("memroy:", "did you mean 'memory'"),
        ("FS:/a", "did you mean 'fs'"),
        ("xyz://x", r"no kind of store 'xyz'; .*there are memory, fs, resp, resps, resp\+unix, s3"),
        ("/var/cache", "write 'fs:/var/cache'"),
        ("", "not the URI"),
        ("fs:", "needs a directory"),
        ("memory:5GB", "no path"),
        ("fault:memory", "fault:PLAN:INNER"),
        ("fault::nothing:", "no kind of store 'nothing'"),
    ],
)
def test_uris_that_open_nothing(uri, match):
    with pytest.raises(ConfigError, match=match):
        open_store(uri)


def test_a_store_that_was_registered_is_given_the_rest_of_the_uri():
    given = []

    def make(rest):
        given.append(rest)
        return MemoryStore()

    register_store("registered-test", make)
    assert "registered-test" in store_schemes()
    open_store("registered-test://user@host:1/path?a=b:c").close()
    assert given == ["//user@host:1/path?a=b:c"]
    with pytest.raises(ConfigError, match="'registered-test' already"):
        register_store("registered-test", make)


@pytest.mark.parametrize(("scheme", "match"), [("fs", "'fs' already"), ("a:b", "before the colon"), ("", "such as")])
def test_a_scheme_that_cannot_be_registered(scheme, match):
    with pytest.raises(ConfigError, match=match):
        register_store(scheme, lambda rest: MemoryStore())


def test_a_package_brings_a_store(package):
    package("one-test", "store_one:make", SOURCE + "    return MemoryStore()\n")
    assert "one-test" in store_schemes()
    assert "store_one" not in sys.modules
    with open_store("one-test:rest") as store:
        assert type(store) is MemoryStore
    assert sys.modules["store_one"].GIVEN == ["rest"]


@pytest.mark.parametrize(
    ("value", "source", "match"),
    [
        ("store_one:absent", SOURCE, "kind of store one-test cannot be loaded from store_one:absent"),
        ("store_one:make", "import no_such_module_of_tests\n", "cannot be loaded .*no_such_module_of_tests"),
    ],
)
def test_a_package_that_cannot_be_loaded(package, value, source, match):
    package("one-test", value, source)
    with pytest.raises(ConfigError, match=match):
        open_store("one-test:")


def test_two_packages_of_one_scheme(package):
    package("one-test", "store_one:make", SOURCE)
    package("one-test", "store_two:make", SOURCE)
    with pytest.raises(ConfigError, match="several packages bring a kind of store 'one-test'"):
        open_store("one-test:")


@pytest.mark.parametrize(("uri", "module", "extra"), [("resp://h", "redis", "redis"), ("s3://bucket", "obstore", "s3")])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(uri, module, extra):
    # In a process of its own: here the library may have been imported by another test.
    code = f"""
import sys
sys.modules[{module!r}] = None
from kvcore.errors import ConfigError
from kvcore.tiers.stores import open_store
try:
    open_store({uri!r})
except ConfigError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert f'pip install "kvcore[{extra}]"' in said


def test_importing_stores_imports_no_library_of_one():
    code = "import sys, kvcore.tiers.stores; print([m for m in ('redis', 'obstore', 'ssl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_registry_loads_what_it_is_told_by_name_once():
    registry = Registry("sort of thing", "kvcore.nothing", {"path": "pathlib:Path", "none": "pathlib:Nothing"})
    found = registry.find("path")
    assert found is registry.find("path")
    assert found("a").name == "a"
    with pytest.raises(ConfigError, match="sort of thing none cannot be loaded from pathlib:Nothing"):
        registry.find("none")
    with pytest.raises(ValueError, match=r"no sort of thing 'paht'; did you mean 'path'\? there are path, none"):
        registry.find("paht")


def test_options_of_uris():
    assert split_options("/a/b?x=1&y=%2F2", ("x", "y"), scheme="t") == ("/a/b", {"x": "1", "y": "/2"})
    assert split_options("/a", ("x",), scheme="t") == ("/a", {})
    assert split_options("?", ("x",), scheme="t") == ("", {})
    assert split_options("?x=a+b%20c", ("x",), scheme="t") == ("", {"x": "a+b c"})
    for rest, match in (
        ("?z=1", "no option 'z'; there are x"),
        ("?x=1&x=2", "twice"),
        ("?x=", "value"),
        ("?x", "name="),
    ):
        with pytest.raises(ConfigError, match=match):
            split_options(rest, ("x",), scheme="t")


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (read_size, "4096", 4096),
        (read_size, "0", 0),
        (read_size, "1B", 1),
        (read_size, "1.5KiB", 1536),
        (read_size, "2 MB", 2_000_000),
        (read_size, "3GiB", 3 << 30),
        (read_size, "1TB", 10**12),
        (read_time, "5ms", 0.005),
        (read_time, "250us", 0.00025),
        (read_time, "2h", 7200.0),
        (read_flag, "1", True),
        (read_flag, "0", False),
    ],
)
def test_values_of_options(read, text, value):
    assert read(text, "option") == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "text"),
    [(read_size, t) for t in ("", "-1", "1iB", "1XB", "1e9", "GiB", "0x10", "nan")]
    + [(read_time, t) for t in ("", "5", "-1s", "1d", "infs")]
    + [(read_flag, t) for t in ("", "yes", "2")],
)
def test_values_that_mean_nothing(read, text):
    with pytest.raises(ConfigError, match=r"option='.*': write|option=.* is not a"):
        read(text, "option")


def test_what_cannot_be_opened_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StoreError):
        open_store(f"fs:{tmp_path}/file")
