"""Run-time compilers: a stand-in for hipRTC, and NVRTC itself where it is installed."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from kvcore.errors import BackendLoadError
from kvcore.kernels.rtc import STANDARD_HEADERS, RuntimeCompiler

# Gives back what it was given, one a line; a source that begins with "bad" does not compile.
HIPRTC = r"""
#include <string.h>
#include <string>
#define RTC extern "C" int
struct Program { std::string code, log; bool is_bad; };
static int programs = 0;
RTC hiprtcVersion(int *major, int *minor) { *major = 6, *minor = 4; return 0; }
extern "C" const char *hiprtcGetErrorString(int status) { return status == 6 ? "HIPRTC_ERROR_COMPILATION" : "other"; }
RTC hiprtcCreateProgram(Program **made, const char *source, const char *name, int count, const char **texts,
                        const char **names) {
    *made = new Program{std::string(source) + "\n" + name + "\n", "", strncmp(source, "bad", 3) == 0};
    for (int i = 0; i < count; ++i) (*made)->code += std::string(names[i]) + "=" + texts[i] + "\n";
    ++programs;
    return 0;
}
RTC hiprtcCompileProgram(Program *program, int count, const char **options) {
    for (int i = 0; i < count; ++i) program->code += std::string(options[i]) + "\n";
    for (int line = 1; program->is_bad && line <= 50; ++line) program->log += "line " + std::to_string(line) + "\n";
    return program->is_bad ? 6 : 0;
}
RTC hiprtcGetProgramLogSize(Program *program, size_t *size) { *size = program->log.size() + 1; return 0; }
RTC hiprtcGetProgramLog(Program *program, char *text) { strcpy(text, program->log.c_str()); return 0; }
RTC hiprtcGetCodeSize(Program *program, size_t *size) { *size = program->code.size(); return 0; }
RTC hiprtcGetCode(Program *program, char *code) { memcpy(code, program->code.data(), program->code.size()); return 0; }
RTC hiprtcDestroyProgram(Program **program) { delete *program; *program = nullptr; --programs; return 0; }
RTC count_programs() { return programs; }
"""


@pytest.fixture(scope="module")
def hiprtc(tmp_path_factory):
    """Return the path of a library with the functions of hipRTC."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build a stand-in for hipRTC")
    folder = tmp_path_factory.mktemp("hiprtc")
    (folder / "rtc.cpp").write_text(HIPRTC)
    library = folder / "libhiprtc.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(folder / "rtc.cpp")], check=True)
    return str(library)


def nvrtc():
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in spec.submodule_search_locations] if spec is not None else []
    found = [path for place in places for path in place.glob("*/lib/libnvrtc.so.*")]
    if not found:
        pytest.skip("NVRTC is not installed")
    return RuntimeCompiler(str(found[0]), "nvrtc")


def test_sources_headers_and_options_reach_the_compiler(hiprtc):
    compiler = RuntimeCompiler(hiprtc, "hiprtc")
    made = compiler.compile("source", ["-O3", "--offload-arch=gfx942"], {"a.h": "A", "b/c.h": "C"}, "kernels.hip")
    assert made.decode().splitlines() == ["source", "kernels.hip", "a.h=A", "b/c.h=C", "-O3", "--offload-arch=gfx942"]
    assert compiler.version == (6, 4)


def test_a_refusal_has_the_options_and_the_first_lines_of_the_log_and_leaks_nothing(hiprtc):
    compiler = RuntimeCompiler(hiprtc, "hiprtc")
    with pytest.raises(BackendLoadError) as caught:
        compiler.compile("bad", ["--offload-arch=gfx1"])
    said = str(caught.value)
    assert "6.4 did not compile kvcore.cu with --offload-arch=gfx1: HIPRTC_ERROR_COMPILATION\nline 1\n" in said
    assert "line 20" in said
    assert "line 21" not in said
    assert ctypes.CDLL(hiprtc).count_programs() == 0


def test_a_library_that_is_no_compiler_is_refused(hiprtc, tmp_path):
    with pytest.raises(BackendLoadError, match=r"no nvrtc that can be used: .*nvrtcGetErrorString"):
        RuntimeCompiler(hiprtc, "nvrtc")
    with pytest.raises(BackendLoadError, match=r"libnone\.so is no hiprtc that can be used"):
        RuntimeCompiler(str(tmp_path / "libnone.so"), "hiprtc")


def test_nvrtc_gives_machine_code_for_an_architecture_and_a_text_for_a_virtual_one():
    compiler, source = nvrtc(), '#include <stdint.h>\nextern "C" __global__ void one(uint64_t *p) { *p = UINT64_MAX; }'
    assert compiler.compile(source, ["--gpu-architecture=sm_90"], STANDARD_HEADERS)[:4] == b"\x7fELF"
    text = compiler.compile(source, ["--gpu-architecture=compute_90"], STANDARD_HEADERS)
    assert b".entry one(" in text
    assert text.endswith(b"\0")  # as drivers take it


def test_what_nvrtc_says_of_an_error_is_shown():
    with pytest.raises(BackendLoadError, match=r'kvcore\.cu\(1\): error: identifier "missing" is undefined'):
        nvrtc().compile("__device__ int f() { return missing; }", ["--gpu-architecture=sm_90"])
