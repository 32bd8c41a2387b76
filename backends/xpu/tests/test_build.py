"""What is compiled on first use: what is missing or refused is told with what to do. Nothing of SYCL is loaded here."""

from __future__ import annotations

import os

import pytest

from kvcore.errors import BackendLoadError
from kvcore.kernels import get_include
from kvcore_xpu import build, probe

needs_packages = pytest.mark.skipif(not probe.probe_cpu().usable, reason=probe.probe_cpu().reason)


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A stand-in for the compiler; returns what gives it a text of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(text):
        (folder / probe.COMPILER).write_text(f"#!/bin/sh\n{text}\n")
        (folder / probe.COMPILER).chmod(0o755)

    return write


@needs_packages
def test_what_the_compiler_refuses_is_told(tmp_path, compiler):
    compiler("case $1 in --version) echo one; exit 0;; esac; echo 'driver.hpp:1: error: no such thing' >&2; exit 1")
    with pytest.raises(BackendLoadError, match=r"g\+\+ .* failed:\n.*error: no such thing"):
        build.library("cpu", 32, tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []


@needs_packages
def test_a_library_is_compiled_once_for_each_width_kind_and_compiler(tmp_path, compiler):
    script = "case $1 in --version) echo {}; exit 0;; esac; echo made >> {};\n"
    script += 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done'
    log = tmp_path / "log"
    compiler(script.format("one", log))
    made = {build.library(kind, width, tmp_path / "kept") for kind in ("gpu", "cpu") for width in (16, 32, 32)}
    assert len(made) == len(log.read_text().split()) == 4
    compiler(script.format("two", log))
    assert build.library("cpu", 32, tmp_path / "kept") not in made


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(build, "SYCL", "intel-sycl-rt-of-nobody")
    with pytest.raises(BackendLoadError, match="pip install intel-sycl-rt-of-nobody"):
        build.library("cpu", 32)


def test_the_image_begins_with_the_options_of_its_compiler():
    first, text = build.image("one\tkvcore::One\ntwo\tkvcore::Two<1, 2>\n", 16, "gpu").decode().split("\n", 1)
    assert first.split("\t")[0] == "//"
    assert {f"-I{get_include()}", "-DKVCORE_WARP_WIDTH=16", "-ffp-contract=off"} <= set(first.split("\t"))
    assert "KVCORE_SYCL_KERNEL(two, kvcore::Two<1, 2>)" in text


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("SYCL_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("OCL_ICD_FILENAMES", "/elsewhere")
    monkeypatch.delenv("SYCL_CACHE_PERSISTENT", raising=False)
    build.prepare("cpu")
    assert (os.environ["SYCL_CACHE_DIR"], os.environ["OCL_ICD_FILENAMES"]) == ("/somewhere", "/elsewhere")
    assert "SYCL_CACHE_PERSISTENT" not in os.environ


@needs_packages
def test_what_sycl_reads_is_set_and_for_gpus_opencl_is_left_alone(monkeypatch, tmp_path):
    for name in ("SYCL_CACHE_DIR", "SYCL_CACHE_PERSISTENT", "OCL_ICD_FILENAMES"):
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.prepare("gpu")
    assert os.environ["SYCL_CACHE_PERSISTENT"] == "1"
    assert os.environ["SYCL_CACHE_DIR"] == str(tmp_path / "kvcore" / "sycl")
    assert "OCL_ICD_FILENAMES" not in os.environ
    build.prepare("cpu")
    assert os.environ["OCL_ICD_FILENAMES"].endswith("/libintelocl.so")
