"""All distributions are released together: one version, one range, one way to name things."""

from __future__ import annotations

import importlib
import re
import runpy

import pytest
import setuptools

import kvcore
from kvcore.plugins import API_VERSION, BackendSpec
from kvcore.plugins.spec import ENTRY_POINT_GROUP

VENDORS = ("cpu", "cuda", "rocm", "xpu")
BACKENDS = ("cpu_ref", "emu", *VENDORS)
TEST_DEVICES = {
    "emu": {"triton_interpreter": "kvcore.kernels.triton.interpreter:backend"},
    "xpu": {"xpu_cpu": "kvcore_xpu:cpu_device"},
}


@pytest.fixture
def computed(root, monkeypatch):
    """What setup.py passes to setuptools."""
    arguments = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: arguments.update(given))
    runpy.run_path(str(root / "setup.py"))
    return arguments


def siblings_range() -> str:
    major, minor = kvcore.__version__.split(".")[:2]
    return f">={major}.{minor}.0.dev0,<{major}.{int(minor) + 1}"


def test_every_distribution_has_the_version_of_the_core(computed, siblings):
    versions = {name: project["project"]["version"] for name, project in siblings.items()}
    assert versions == dict.fromkeys(versions, kvcore.__version__)
    assert computed["version"] == kvcore.__version__


def test_requirements_on_one_another_have_the_one_range(computed, siblings):
    requirements = [r for group in computed["extras_require"].values() for r in group]
    for project in siblings.values():
        requirements += [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    ours = [r for r in requirements if r.startswith("kvcore")]
    assert ours
    assert [r for r in ours if not r.endswith(siblings_range())] == []
    names = {"kvcore", *(project["project"]["name"] for project in siblings.values())}
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in ours} <= names


def test_the_example_admits_the_version_of_the_core(root):
    text = (root / "examples" / "kvcore-acme" / "pyproject.toml").read_text("utf-8")
    assert f'"kvcore{siblings_range()}"' in text


def test_every_extra_brings_the_reference(computed):
    reference = f"kvcore-cpu-ref{siblings_range()}"
    assert {name for name, group in computed["extras_require"].items() if reference not in group} == set()
    assert set(computed["extras_require"]) >= {*VENDORS, "conformance", "transformers", "demo"}


def test_the_core_needs_no_sibling_and_nobody_caps_or_builds_with_torch(core, siblings, computed):
    assert [d for d in core["project"]["dependencies"] if d.startswith("kvcore")] == []
    everything = [*core["project"]["dependencies"], *core["build-system"]["requires"]]
    everything += [r for group in computed["extras_require"].values() for r in group]
    for project in siblings.values():
        everything += [*project["project"]["dependencies"], *project["build-system"]["requires"]]
        assert "torch" not in " ".join(project["build-system"]["requires"])
    assert [r for r in everything if re.match(r"torch\b", r) and ("<" in r or "==" in r)] == []


def test_all_support_the_same_pythons(core, siblings):
    wanted = {p["project"]["requires-python"] for p in (core, *siblings.values())}
    assert wanted == {core["project"]["requires-python"]}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_named_the_same_everywhere(name, siblings):
    project = siblings[f"backends/{name}"]["project"]
    assert project["entry-points"][ENTRY_POINT_GROUP] == {name: f"kvcore_{name}:backend", **TEST_DEVICES.get(name, {})}
    spec = importlib.import_module(f"kvcore_{name}").backend()
    assert isinstance(spec, BackendSpec)
    assert (spec.name, spec.distribution) == (name, project["name"])
    assert project["name"] == "kvcore-" + name.replace("_", "-")
    assert spec.api_version == API_VERSION, "an in-tree backend moves together with the contract"


def test_vendor_folders_hold_the_same_files(root):
    def files(name):
        folder = root / "backends" / name
        paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        own = ("csrc", "simulated")  # each vendor's interface has its own pieces
        generated = ("__pycache__", "build", ".egg-info", ".pytest_cache", ".so", ".json", ".fatbin")
        kept = [path for path in paths if not any(part.endswith((*own, *generated)) for part in path.parts)]
        return sorted(str(path).replace(f"kvcore_{name}", "kvcore_NAME") for path in kept)

    assert files("cuda") == files("rocm")
    modules = {path for path in files("cuda") if path.startswith("src/")}
    for name in ("cuda", "rocm", "xpu"):
        found = {path for path in files(name) if path.startswith("src/")}
        assert found >= modules - {f"src/kvcore_NAME/{own}.py" for own in ("images", "installed", "twins")}
        assert (root / "backends" / name / "src" / f"kvcore_{name}" / "csrc" / "driver.hpp").is_file()


def test_every_package_says_that_it_is_typed(root):
    packages = [root / "kvcore", *(root / "backends" / n / "src" / f"kvcore_{n}" for n in BACKENDS)]
    packages.append(root / "conformance" / "src" / "kvcore_conformance")
    assert [str(package) for package in packages if not (package / "py.typed").is_file()] == []
