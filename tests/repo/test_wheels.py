"""The built wheels, alone, in a clean environment. Needs dist/: `make test-wheels` builds it first."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import kvcore

pytestmark = pytest.mark.wheels

BACKENDS = {"cpu_ref", "cpu", "cuda", "rocm", "xpu"}
HOSTS = ("cpu", "cpu_ref")
CUDA_ARCHS = os.environ.get("KVCORE_CUDA_ARCHS", "").replace(" ", "")
"""What the wheels were built for, where `make` was told; read before the tests take variables away."""
NATIVE = {
    "kvcore_cpu": {"_native.so"},
    "kvcore_cuda": {"_native.so"},
    "kvcore_rocm": {"_native32.so", "_native64.so"},
}
"""Distribution -> the shared libraries in its wheel."""
COMPILED_HERE = {"kvcore_emu": "emu.cpp", "kvcore_xpu": "native.cpp"}
"""Distribution -> what its users compile on first use, of its csrc."""
LINKED = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1"}
"""What a library of a wheel may need: every Linux has it. No vendor's driver or runtime is among it."""
LOADER = re.compile(r"ld-linux-[\w-]+\.so\.\d")
# Without a GPU: what is missing, in the probe's own words, and what to do about it.
LACKS = {
    "cuda": r"libcuda\.so\.1, was not found; install it",
    "rocm": r"libamdhip64\.so, was not found; install ROCm",
    "xpu": r"no Intel GPU",
}
OTHER_TORCH = {"cuda": ("rocm", "torch is built for ROCm"), "rocm": ("cuda", "torch is built for CUDA")}
TORCH_VERSIONS = {"cuda": "2.9.0+cu130", "rocm": "2.9.0+rocm6.4"}
DISTRIBUTIONS = {"kvcore", "kvcore_conformance", "kvcore_emu"} | {f"kvcore_{name}" for name in BACKENDS}


@pytest.fixture(scope="module")
def wheels(root):
    """Return distribution -> its wheel."""
    found = {path.name.split("-")[0]: path for path in (root / "dist").glob(f"*-{kvcore.__version__}-*.whl")}
    assert set(found) == DISTRIBUTIONS
    return found


class Environment:
    """A virtual environment of which the checkout knows nothing, nor it of the checkout.

    With `base`, it sees what is installed there and has no pip of its own: it is made in a second.
    """

    def __init__(self, folder, base=None):
        self.folder, self.base = folder, base
        venv.create(folder / "venv", with_pip=base is None)
        self.bin = folder / "venv" / "bin"
        dropped = ("PYTHON", "KVCORE_", "VIRTUAL_ENV")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        if base is not None:
            (self.packages / "base.pth").write_text(f"{base.packages}\n", "utf-8")

    @property
    def packages(self):
        (found,) = self.folder.glob("venv/lib/python*/site-packages")
        return found

    def run(self, program, *arguments, check=True):
        command = [str(self.bin / program), *map(str, arguments)]
        where = {"cwd": self.folder, "env": self.environ, "timeout": 170}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **where)
        assert done.returncode == 0 or not check, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def pip(self, *arguments):
        command = ("python", "-m", "pip", "--disable-pip-version-check")
        if self.base is None:
            return self.run(*command, *arguments)
        return self.base.run(*command, "--python", self.bin / "python", *arguments)

    def install(self, *arguments):
        self.pip("install", "--quiet", *arguments)

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
    done = environment.run("python", "-m", "kvcore", "doctor", "--json", check=False)
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
    heavy = {"torch", "triton", "transformers", "pydantic", "rich", "typer", "yaml"}
    assert core_alone.modules("import kvcore") & heavy == set()


def test_with_all_wheels_each_backend_answers_for_itself(everything):
    rows = backends(everything, status=0)
    assert [rows[name]["status"] for name in HOSTS] == ["usable"] * len(HOSTS)
    for name, lacks in LACKS.items():
        assert rows[name]["status"] == "unusable"
        assert re.search(lacks, rows[name]["reason"])


@pytest.fixture(scope="module", params=sorted(LACKS))
def vendor(request, wheels, core_alone, tmp_path_factory):
    """A vendor's name, and an environment with what its extra brings, less torch: on a machine without a GPU."""
    environment = Environment(tmp_path_factory.mktemp(request.param), core_alone)
    environment.install("--no-deps", *(wheels[name] for name in ("kvcore_cpu_ref", f"kvcore_{request.param}")))
    return request.param, environment


def test_a_vendors_backend_alone_imports_without_a_gpu_and_says_no_with_the_fix(vendor):
    name, environment = vendor
    code = f"import kvcore, kvcore_{name}; print(kvcore_{name}.backend().probe().usable)"
    assert environment.run("python", "-c", code).stdout.split() == ["False"]
    assert environment.modules(f"import kvcore_{name}; kvcore_{name}.backend().probe()") & {"torch", "triton"} == set()
    report = json.loads(environment.run("python", "-m", "kvcore", "doctor", "--json", check=False).stdout)
    rows = {row["name"]: row for row in report["backends"]}
    assert (rows[name]["status"], rows["cpu_ref"]["status"]) == ("unusable", "usable")
    assert re.search(LACKS[name], rows[name]["reason"])
    if report["gpus"] is not None:  # the bus says what there is, and so which package belongs here
        advice = [line for line in report["advice"] if f"kvcore-{name}" in line]
        assert any("wrong package for this machine" in line and "pip install" in line for line in advice)
    opened = environment.run("python", "-c", f"import kvcore; kvcore.open_backend({name!r})", check=False)
    assert opened.returncode != 0
    assert "NoBackendError" in opened.stderr
    assert re.search(LACKS[name], opened.stderr)


def test_torch_of_another_vendor_is_named_as_the_reason(vendor, tmp_path):
    name, environment = vendor
    if name not in OTHER_TORCH:
        pytest.skip("torch's builds for other vendors do not stand in its way")
    other, said = OTHER_TORCH[name]
    environment.install("--no-deps", torch_wheel(tmp_path, TORCH_VERSIONS[other]))
    try:
        reason = backends(environment, status=0)[name]["reason"]
        assert said in reason
        assert "install" in reason
        assert f"backend {other}" in reason
    finally:
        environment.pip("uninstall", "--yes", "torch")
    assert said not in backends(environment, status=0)[name]["reason"]


def test_extras_bring_the_backend_and_the_reference_and_keep_the_torch_that_is_there(root, core_alone, tmp_path):
    environment = Environment(tmp_path, core_alone)
    environment.install("--no-deps", torch_wheel(tmp_path, "1.0+cu130"))
    # No index: what an extra brings beside these wheels would not be found.
    environment.install("--no-index", "--find-links", root / "dist", f"kvcore[cpu,cuda,rocm]=={kvcore.__version__}")
    listed = json.loads(environment.pip("list", "--format=json").stdout)
    versions = {row["name"].lower().replace("_", "-"): row["version"] for row in listed}
    ours = {"kvcore", *(f"kvcore-{name}" for name in ("cpu", "cpu-ref", "cuda", "rocm"))}
    assert {name: versions.get(name) for name in ours} == dict.fromkeys(ours, kvcore.__version__)
    assert versions["torch"] == "1.0+cu130"
    environment.pip("check")


def test_extras_of_backends_name_no_torch(wheels):
    extras = {}
    for requirement in metadata(wheels["kvcore"]).get_all("Requires-Dist"):
        what, _, marker = requirement.partition(";")
        for extra in re.findall(r"extra == ['\"](\w+)['\"]", marker):
            extras.setdefault(extra, set()).add(what.strip())
    named = {extra: {r for r in group if re.match(r"torch\b", r)} for extra, group in extras.items()}
    assert {extra: named[extra] for extra in ("cpu", "cuda", "rocm", "xpu", "conformance", "transformers")} == {
        "cpu": set(),
        "cuda": set(),
        "rocm": set(),
        "xpu": set(),
        "conformance": set(),
        "transformers": {"torch"},
    }
    assert "intel-sycl-rt" in extras["xpu"]


def test_the_native_cpu_backend_is_the_default_of_its_extra(wheels, core_alone, tmp_path):
    environment = Environment(tmp_path, core_alone)
    environment.install("--no-deps", *(wheels[name] for name in ("kvcore_cpu", "kvcore_cpu_ref")))
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
    for name in NATIVE:
        assert tags.pop(name).startswith(("py3-none-linux_", "py3-none-manylinux_"))
    assert set(tags.values()) == {"py3-none-any"}


def test_wheels_hold_the_libraries_and_sources_that_they_need(wheels):
    for distribution, path in wheels.items():
        names = {name.partition("/")[2] for name in zipfile.ZipFile(path).namelist()}
        assert {name for name in names if name.endswith(".so")} == NATIVE.get(distribution, set())
        if distribution in COMPILED_HERE:
            assert f"csrc/{COMPILED_HERE[distribution]}" in names
    core = {name for name in zipfile.ZipFile(wheels["kvcore"]).namelist() if name.endswith((".h", ".hpp"))}
    here = {f"kvcore/kernels/include/kvcore/{path.name}" for path in Path(kvcore.get_include(), "kvcore").iterdir()}
    assert here <= core


def test_the_cuda_wheel_holds_kernels_for_what_the_compiler_here_knows(wheels):
    nvcc, archive = shutil.which("nvcc"), zipfile.ZipFile(wheels["kvcore_cuda"])
    held = {name: archive.getinfo(name).file_size for name in archive.namelist()}
    if nvcc is None or CUDA_ARCHS == "none":
        assert "kvcore_cuda/kernels.fatbin" not in held
        return
    assert held["kvcore_cuda/kernels.fatbin"] > 0
    archs = json.loads(archive.read("kvcore_cuda/kernels.json"))["archs"]
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    wanted = [f"sm_{arch}" for arch in (CUDA_ARCHS or "75,80,86,89,90,100,120").split(",")]
    assert sorted(arch for arch in archs if arch.startswith("sm_")) == sorted(set(wanted) & set(known))
    assert [arch.partition("_")[0] for arch in archs].count("compute") == 1, "PTX for what comes later"


def test_no_library_is_linked_with_a_vendors_or_needs_a_symbol_of_one(wheels, tmp_path):
    for distribution, libraries in NATIVE.items():
        zipfile.ZipFile(wheels[distribution]).extractall(tmp_path)
        for name in libraries:
            path = tmp_path / distribution / name
            dynamic = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True, check=True).stdout
            needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
            assert needed, "readelf shows what a library needs"
            assert {n for n in needed - LINKED if not LOADER.fullmatch(n)} == set(), f"{distribution}: {name}"
            assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)
            symbols = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True)
            vendors = re.findall(r"\bU ((?:cu|hip|nvrtc|nvml|ze|cl)[A-Z]\w*)", symbols.stdout)
            assert vendors == [], f"{distribution}: {name}"


# --- helpers


def metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(archive.read(name))


def torch_wheel(folder, version):
    """Make a wheel that is torch only by name: its version, and the file that says what it was built for."""
    home = f"torch-{version}.dist-info"
    built = {"cuda": "13.0" if "+cu" in version else None, "hip": "6.4" if "+rocm" in version else None}
    files = {
        "torch/__init__.py": "raise ImportError('no torch: a stand-in that nobody may import')\n",
        "torch/version.py": "".join(f"{name} = {value!r}\n" for name, value in built.items()),
        f"{home}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{home}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{home}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{home}/RECORD"])
    path = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path
