"""Kernels that are compiled on first use: for which architectures, by whom, and without contracted multiply-adds."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest

from kvcore.errors import BackendLoadError
from kvcore.kernels.images import device_source
from kvcore.kernels.rtc import STANDARD_HEADERS
from kvcore_rocm import images, installed
from kvcore_rocm.installed import Compiler

AMDGPU = 224  # of ELF


@pytest.fixture(scope="module")
def clang():
    """Return a clang that compiles for AMD's devices."""
    found = [compiler for compiler in installed.compilers() if compiler.kind == "clang"]
    if not found:
        pytest.skip("no clang++ from 16 on, and no hipcc")
    return found[0]


def kernels(width=64):
    library = ctypes.CDLL(str(installed.native_path(width)))
    library.kvcore_kernel_list.restype = ctypes.c_char_p
    return library.kvcore_kernel_list().decode()


def test_both_libraries_launch_the_same_kernels():
    assert kernels(64) == kernels(32)


@pytest.mark.parametrize("arch", ["gfx942", *(pytest.param(a, marks=pytest.mark.slow) for a in ("gfx90a", "gfx1100"))])
def test_an_image_has_every_kernel(clang, arch, tmp_path):
    made = images.image(kernels(), arch, tmp_path)
    assert (made[:4], int.from_bytes(made[18:20], "little")) == (b"\x7fELF", AMDGPU)
    missing = [line for line in kernels().splitlines() if line.split("\t")[0].encode() + b".kd\0" not in made]
    assert missing == []
    assert [path.suffix for path in tmp_path.iterdir()] == [".hsaco"]


def test_an_image_is_compiled_once_and_a_remark_is_not_the_compilers(tmp_path, monkeypatch):
    program = tmp_path / "hipcc"
    program.write_text('#!/bin/sh\nfor last; do :; done\nprintf "\\177ELF%s" "$*" > "$last"\necho >> "$0.count"\n')
    program.chmod(0o755)
    monkeypatch.setattr(installed, "compilers", lambda: [Compiler("clang", str(program))])
    first = images.image("", "gfx90a-simulated", tmp_path / "kept")
    assert b"--offload-arch=gfx90a " in first
    assert images.image("", "gfx90a:xnack-", tmp_path / "kept") == first
    assert (tmp_path / "hipcc.count").read_text() == "\n"
    program.write_text(program.read_text() + "# another version\n")
    images.image("", "gfx90a", tmp_path / "kept")
    assert (tmp_path / "hipcc.count").read_text() == "\n\n"


def test_without_a_compiler_it_is_said_what_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(installed, "compilers", list)
    with pytest.raises(BackendLoadError, match=r"no compiler for the kernels of gfx942: looked for hipRTC.*hipcc"):
        images.image(kernels(), "gfx942", tmp_path)


def test_each_compiler_is_asked_and_says_why_not(clang, monkeypatch, tmp_path):
    monkeypatch.setattr(installed, "compilers", lambda: [Compiler("hiprtc", "libhiprtc.so.0"), clang])
    with pytest.raises(
        BackendLoadError, match=r"(?s)not compiled for gfx1.*libhiprtc\.so\.0: .*invalid target ID 'gfx1'"
    ):
        images.image(kernels(), "gfx1", tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BackendLoadError, match="sm_90 is no architecture of an AMD device"):
        images.image(kernels(), "sm_90", tmp_path)


def test_headers_for_hiprtc_do_not_mind_those_it_has(clang, tmp_path):
    """Some versions of hipRTC define the same names, in other types."""
    for name, text in STANDARD_HEADERS.items():
        (tmp_path / name).write_text(images._renamed(text))
    before = "typedef unsigned long long uint64_t; typedef long long int64_t; namespace std { enum { is_same_v }; }\n"
    command = [*images.program_command(clang.path, "gfx942"), "-nostdinc", "-I", str(tmp_path), "-fsyntax-only"]
    source = tmp_path / "kernels.hip"
    source.write_text(before + device_source(kernels()))
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- rounding


def compiled_text(clang, folder, names, *options):
    """Return what the compiler makes of some kernels, or of all, as text."""
    source, made = folder / "kernels.hip", folder / "kernels.txt"
    lines = [line for line in kernels().splitlines() if not names or line.split("\t")[0] in names]
    source.write_text(device_source("\n".join(lines)))
    command = [*images.program_command(clang.path, "gfx942"), *options, "-S", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return made.read_text()


CONTRACTED = re.compile(r"@llvm\.(?:fma|fmuladd)\.|\bf(?:mul|add|sub)\b[^\n]*\b(?:contract|fast)\b")
FUSED = re.compile(r"\bv_(?:pk_)?(?:fma|fmac|fmamk|fmaak|mad|mac)_(?:mix_|legacy_)?f32.*")
TWO_TO_THE_32 = ("0x4f800000", "0xcf800000")
"""Positive and negative: multiplied and added where 64-bit integers are divided, and nowhere else."""
# None of them divides floats or takes square roots, which machine code does by fused ops.
WITHOUT_DIVISION = ("dequantize", "rotate", "shift_rope", "reduce_absmax_parts", "reduce_minmax_parts")


@pytest.mark.parametrize(("contract", "names"), [("off", ()), ("fast", ("shift_rope",))])
def test_nothing_that_is_computed_may_be_contracted(clang, tmp_path, contract, names):
    """In the compiler's own language divisions are still divisions, and need no fused ops."""
    text = compiled_text(clang, tmp_path, names, "-emit-llvm", f"-ffp-contract={contract}")
    assert "fmul" in text
    assert bool(CONTRACTED.search(text)) is (contract == "fast")


@pytest.mark.parametrize(("contract", "names"), [("off", WITHOUT_DIVISION), ("fast", ("shift_rope",))])
def test_the_machine_code_has_no_fused_multiply_add_of_ours(clang, tmp_path, contract, names):
    text = compiled_text(clang, tmp_path, names, f"-ffp-contract={contract}")
    ours = [line for line in FUSED.findall(text) if not any(number in line for number in TWO_TO_THE_32)]
    assert "v_mul_f32" in text
    assert "v_div_fixup" not in text
    assert (ours != []) is (contract == "fast"), ours


@pytest.mark.parametrize(("option", "is_exact"), [("", True), ("-fno-hip-fp32-correctly-rounded-divide-sqrt", False)])
def test_divisions_are_rounded_correctly(clang, tmp_path, option, is_exact):
    """One of full precision ends with v_div_fixup; one of 2.5 ulp is a reciprocal and a product."""
    text = compiled_text(clang, tmp_path, ("quantize_groups",), *filter(None, [option]))
    assert ("v_div_fixup_f32" in text) is is_exact


# --- the library's devices


def reason(in_a_process, prelude="", **environ):
    code = f"""
{prelude}
try:
    kvcore.open_backend("rocm", fallback="error")
except kvcore.BackendLoadError as error:
    print(error)
"""
    return in_a_process(code, **environ)


@pytest.mark.parametrize(("warp", "library"), [("64", "_native64.so"), ("32", "_native32.so")])
def test_the_library_is_for_the_warps_of_the_device(in_a_process, warp, library):
    code = 'print(device.device().path.name, kvcore.open_backend("rocm").runtime.library.info(0).warp_width)'
    assert in_a_process(code, SIMULATED_HIP_WARP=warp).split() == [library, warp]


def test_a_device_that_there_is_no_compiler_for(in_a_process):
    prelude = "device.image = compiled; images.installed = type('none', (), {'compilers': list, 'COMPILERS': 'hipcc'})"
    said = reason(in_a_process, prelude)
    assert "there is no compiler for the kernels of gfx90a: looked for hipcc" in said


def test_kernels_that_the_runtime_refuses(in_a_process):
    said = reason(in_a_process, "device.image = lambda kernels, arch, folder: b'no code object'")
    assert "cuda:0 (simulated device, gfx90a-simulated) does not take the kernels: " in said
    assert "hipModuleLoadData: hipErrorInvalidImage" in said


def test_a_library_of_other_headers_is_not_used(in_a_process):
    said = reason(in_a_process, "device.headers_hash = lambda: 'other'")
    assert "are not those that kvcore-rocm was built from; install both of one release" in said


def open_directly(in_a_process, driver, **environ):
    code = f"""
try:
    device.open_library({driver})
except kvcore.BackendLoadError as error:
    print(error)
"""
    return in_a_process(code, **environ)


def test_a_runtime_without_a_device(in_a_process):
    said = open_directly(in_a_process, "installed.driver_path()", SIMULATED_HIP_DEVICES="0")
    assert "shows no device; see that HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES name one" in said


def test_a_library_that_is_no_runtime(in_a_process):
    assert "has no hipInit; ROCm 5.2 and later have it" in open_directly(in_a_process, "str(installed.native_path(64))")
    assert "no HIP runtime: nowhere.so" in open_directly(in_a_process, "'nowhere.so'")
