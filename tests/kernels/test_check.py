"""The check that kernels compile for GPUs: what it reads of compilers, and what it says where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.hookspecs import op_names
from kvcore.kernels import get_include
from kvcore.kernels.check import TARGETS, Kernel, Target, compile_for, compiled_ops
from kvcore.kernels.check.reports import read_clang, read_nvcc, read_ocloc, read_ptx

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'move_paged' for 'sm_80'
ptxas info    : Function properties for move_paged
    24 bytes stack frame, 36 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 536 bytes cmem[0]
ptxas info    : Compiling entry function 'reduce_absmax_parts' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 368 bytes cmem[0]
"""
REMARKS = """\
ctx_gpu.hpp:1:1: remark: Function Name: move_paged [-Rpass-analysis=x]
ctx_gpu.hpp:1:1: remark:     SGPRs: 68 [-Rpass-analysis=x]
ctx_gpu.hpp:1:1: remark:     VGPRs: 67 [-Rpass-analysis=x]
ctx_gpu.hpp:1:1: remark:     AGPRs: 0 [-Rpass-analysis=x]
ctx_gpu.hpp:1:1: remark:     SGPRs Spill: 5 [-Rpass-analysis=x]
ctx_gpu.hpp:1:1: remark:     VGPRs Spill: 3 [-Rpass-analysis=x]
ctx_gpu.hpp:1:1: remark:     LDS Size [bytes/block]: 0 [-Rpass-analysis=x]
"""
PTX = """\
.visible .entry move_paged(
        .param .align 8 .b8 move_paged_param_0[144]
)
"""
OCLOC = """\
warning: kernel __sycl_kernel_quantize_elements  compiled SIMD32 allocated 128 regs and spilled around 36

Build succeeded.
"""


def test_what_compilers_report_is_read():
    assert list(read_nvcc(PTXAS.splitlines())) == [Kernel("move_paged", 64, 36), Kernel("reduce_absmax_parts", 8, 0)]
    assert list(read_clang(REMARKS.splitlines())) == [Kernel("move_paged", 67, 3)]
    assert list(read_ptx(PTX.splitlines())) == [Kernel("move_paged", None, None)]
    assert list(read_ocloc(OCLOC.splitlines(), ["rotate", "quantize_elements"])) == [
        Kernel("rotate", None, 0),
        Kernel("quantize_elements", None, 36),
    ]


def test_the_targets_are_those_that_wheels_are_promised_for():
    archs = {}
    for target in TARGETS:
        archs.setdefault(target.backend, []).append(target.arch)
    assert archs == {
        "cuda": [*(f"sm_{n}" for n in (75, 80, 86, 89, 90, 100, 120)), "compute_120"],
        "rocm": ["gfx90a", "gfx942", "gfx1100"],
        "xpu": ["sycl32", "sycl64", "pvc", "dg2"],
    }


def test_every_op_has_a_launcher_and_so_is_compiled():
    assert compiled_ops() == tuple(op_names())


def test_a_compiler_that_is_not_there_is_named():
    outcome = compile_for(Target("sm_1", ("no-such-compiler",), ()))
    assert outcome.status == "skipped"
    assert "no-such-compiler" in outcome.reason


def test_a_kernel_that_does_not_compile_is_told_with_the_compilers_words(tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\necho "x.hpp(1): error: no such thing" >&2\nexit 1\n')
    compiler.chmod(0o755)
    outcome = compile_for(Target("sm_1", (str(compiler),), ()))
    assert outcome.status == "failed"
    assert "error: no such thing" in outcome.reason


def test_a_kernel_that_is_in_no_image_is_missed(tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.write_text(f"#!/bin/sh\ncat <<'END'\n{PTXAS}END\n")
    compiler.chmod(0o755)
    outcome = compile_for(Target("sm_1", (str(compiler),), ()))
    assert outcome.status == "failed"
    assert "sm_1 compiled, but these kernels are not in it: check_" in outcome.reason
    assert "move_paged" not in outcome.reason


@pytest.mark.parametrize(("require", "status"), [(False, 0), (True, 1)])
def test_a_missing_compiler_fails_only_where_it_is_required(require, status):
    arguments = ["--json", "--arch", "sm_80", "--arch", "gfx942", *(["--require"] if require else [])]
    command = [sys.executable, "-m", "kvcore.kernels.check", *arguments]
    done = subprocess.run(command, env={"PATH": "", "PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    report = json.loads(done.stdout)
    assert [(t["arch"], t["status"]) for t in report["targets"]] == [("sm_80", "skipped"), ("gfx942", "skipped")]
    assert report["kernels"] == []


@pytest.mark.parametrize("vendor", ["sm_90", "gfx942"])
def test_a_broken_header_is_seen(vendor, tmp_path, monkeypatch):
    target = next(t for t in TARGETS if t.arch == vendor)
    if target.compiler() is None:
        pytest.skip(f"none of {', '.join(target.compilers)} is installed")
    headers = tmp_path / "kvcore"
    headers.mkdir()
    for header in (Path(get_include()) / "kvcore").iterdir():
        (headers / header.name).write_text(header.read_text())
    broken = "#if defined(__CUDACC__) || defined(__HIP__)\nthis is no C++\n#endif\n"
    with (headers / "digest.hpp").open("a") as file:
        file.write(broken)
    monkeypatch.setattr("kvcore.kernels.check.get_include", lambda: str(tmp_path))
    outcome = compile_for(target)
    assert outcome.status == "failed"
    assert "digest.hpp" in outcome.reason


def test_the_include_folder_has_a_header_for_every_op():
    folder = Path(get_include()) / "kvcore"
    assert (folder / "abi.h").is_file()
    assert [op for op in op_names() if not (folder / f"{op}.hpp").is_file()] == []


def test_every_header_stands_alone(tmp_path):
    source, refused = tmp_path / "all.cpp", {}
    vendors = {"ctx_gpu.hpp", "ctx_sycl.hpp"}  # for other compilers
    for header in sorted((Path(get_include()) / "kvcore").iterdir()):
        if header.name in vendors:
            continue
        source.write_text(f"#include <kvcore/{header.name}>\n#include <kvcore/{header.name}>\n")
        command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I", get_include(), source]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            refused[header.name] = done.stderr.splitlines()[:4]
    assert refused == {}
