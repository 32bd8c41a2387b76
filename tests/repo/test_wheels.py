"""The built wheels, alone, in a clean environment. Needs dist/: `make test-wheels` builds it first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile

import pytest

import kvcore

pytestmark = pytest.mark.wheels

BACKENDS = {"cpu_ref", "cpu", "cuda", "rocm", "xpu"}
HOSTS = ("cpu", "cpu_ref")
DISTRIBUTIONS = {"kvcore", "kvcore_conformance", "kvcore_emu"} | {f"kvcore_{name}" for name in BACKENDS}


@pytest.fixture(scope="module")
def wheels(root):
    """Return distribution -> its wheel."""
    found = {path.name.split("-")[0]: path for path in (root / "dist").glob(f"*-{kvcore.__version__}-*.whl")}
    assert set(found) == DISTRIBUTIONS
    return found


class Environment:
    """A virtual environment of which the checkout knows nothing, nor it of the checkout."""

    def __init__(self, folder):
        self.folder = folder
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / "bin"
        dropped = ("PYTHON", "KVCORE_", "VIRTUAL_ENV")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}

    def run(self, program, *arguments, check=True):
        command = [str(self.bin / program), *map(str, arguments)]
        where = {"cwd": self.folder, "env": self.environ, "timeout": 170}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **where)
        assert done.returncode == 0 or not check, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def install(self, *arguments):
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def modules(self, code):
        done = self.run("python", "-c", f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))")
        return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.fixture(scope="module")
def core_alone(wheels, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("core"))
    environment.install(wheels["kvcore"])
    return environment


@pytest.fixture(scope="module")
def everything(wheels, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("everything"))
    environment.install(*wheels.values())
    return environment


def backends(environment, *, status):
    """Return backend -> what `kvcore doctor --json` says about it; its exit status says whether any can be used."""
    done = environment.run("kvcore", "doctor", "--json", check=False)
    assert done.returncode == status
    return {row["name"]: row for row in json.loads(done.stdout)["backends"]}


def test_doctor_lists_all_backends_with_their_reasons_from_the_core_alone(core_alone):
    rows = backends(core_alone, status=1)
    assert set(rows) >= BACKENDS
    for name in BACKENDS:
        assert rows[name]["status"] == "missing"
        package, extra = f"kvcore-{name.replace('_', '-')}", f"kvcore[{name}]"
        assert package in rows[name]["reason"] or extra in rows[name]["reason"]


def test_every_command_works_or_names_what_it_lacks_from_the_core_alone(core_alone):
    assert core_alone.run("kvcore", "--help").stdout
    ops = json.loads(core_alone.run("kvcore", "ops", "--json").stdout)
    assert {row["status"] for row in ops} <= {"executed", "compiled", "not-run", "missing"}
    demo = core_alone.run("kvcore", "demo", "--json", check=False)
    assert demo.returncode != 0
    assert "kvcore[demo]" in demo.stdout + demo.stderr
    assert "Traceback" not in demo.stdout + demo.stderr


def test_the_module_runs_like_the_command(core_alone):
    as_module = core_alone.run("python", "-m", "kvcore", "doctor", "--json", check=False).stdout
    assert {row["name"] for row in json.loads(as_module)["backends"]} >= BACKENDS


def test_the_core_imports_nothing_heavy(core_alone):
    heavy = {"torch", "triton", "transformers", "pydantic", "rich", "typer"}
    assert core_alone.modules("import kvcore") & heavy == set()


def test_with_all_wheels_each_backend_answers_for_itself(everything):
    rows = backends(everything, status=0)
    assert [rows[name]["status"] for name in HOSTS] == ["usable"] * len(HOSTS)
    for name in BACKENDS - set(HOSTS):
        assert rows[name]["status"] == "unusable"
        assert "kernels" in rows[name]["reason"]


def test_the_native_cpu_backend_is_the_default_of_its_extra(wheels, tmp_path):
    environment = Environment(tmp_path)
    environment.install(*(wheels[name] for name in ("kvcore", "kvcore_cpu", "kvcore_cpu_ref")))
    code = (
        "import kvcore, numpy as np; backend = kvcore.open_backend(); "
        "digest = backend.digest([np.arange(100, dtype=np.uint8)])[0]; "
        "print(backend.name, digest == kvcore.open_backend('cpu_ref').digest([np.arange(100, dtype=np.uint8)])[0])"
    )
    assert environment.run("python", "-c", code).stdout.split() == ["cpu", "True"]


def test_the_suite_runs_from_its_wheel(everything):
    arguments = ["-q", "-p", "no:cacheprovider", "--pyargs", "kvcore_conformance"]
    options = ["--kvcore-backend", "cpu_ref", "--kvcore-ops", "pack_bits,encode_symbols"]
    done = everything.run("python", "-m", "pytest", *arguments, *options)
    assert "passed" in done.stdout


def test_wheels_hold_the_package_and_nothing_else(wheels):
    for distribution, path in wheels.items():
        names = zipfile.ZipFile(path).namelist()
        tops = {name.split("/")[0] for name in names}
        assert {top for top in tops if not top.endswith(".dist-info")} == {distribution}
        assert f"{distribution}/py.typed" in names
        assert [name for name in names if "/tests/" in name or name.endswith((".pyc", ".orig"))] == []


def test_wheels_are_for_any_python_that_runs_this(wheels):
    assert sys.version_info >= (3, 10)
    tags = {name: path.stem.split("-", 2)[2] for name, path in wheels.items()}
    assert tags.pop("kvcore_cpu").startswith(("py3-none-linux_", "py3-none-manylinux_"))
    assert set(tags.values()) == {"py3-none-any"}
