"""The kernels of Intel's GPUs, executed on the processor; all in child processes, see device_tests.py."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore_xpu.probe import probe_cpu

pytestmark = pytest.mark.skipif(not probe_cpu().usable, reason=probe_cpu().reason)


def run(*command, cwd=None, **variables):
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False,
        timeout=900,
    )  # fmt: skip


def conform(ops, **variables):
    options = ("-q", "-p", "no:cacheprovider", "--kvcore-profile", "quick", "--kvcore-ops", ops)
    suite = ("--pyargs", "kvcore_conformance", "--kvcore-backend", "kvcore_xpu:cpu_device")
    return run("-m", "pytest", *options, *suite, **variables)


def test_streams_events_and_memory():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / "device_tests.py"))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_some_ops_conform():
    done = conform("reduce_norm,runtime")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "xpu_cpu" in done.stdout or "cpu_device" in done.stdout


def test_narrow_sub_groups_have_no_coding_of_32_lanes():
    code = (
        "from kvcore_conformance.run import open_named; b = open_named('kvcore_xpu:cpu_device'); "
        "print(*sorted(op for op in ('encode_symbols', 'decode_symbols', 'gather_paged') if b.supports(op)))"
    )
    done = run("-c", code, KVCORE_XPU_SUB_GROUP="16")
    assert done.stdout.split() == ["gather_paged"], done.stderr


def test_kernels_that_do_not_compile_are_told_with_the_compilers_first_error():
    code = (
        "import kvcore_xpu.build as build\n"
        "whole = build.image\n"
        "build.image = lambda *of: whole(*of) + b'#error is no kernel\\n'\n"
        "from kvcore_xpu.device import device\n"
        "device('cpu').load(0)\n"
    )
    done = run("-c", code, SYCL_CACHE_PERSISTENT="0")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvcore.errors.BackendLoadError")
    assert "is no kernel" in last


def test_a_machine_without_a_gpu_has_none_for_the_library():
    if any(Path("/dev/dri").glob("renderD*")):
        pytest.skip("this machine may have one")
    done = run("-m", "kvcore_xpu")
    assert done.returncode == 1
    assert done.stderr.startswith("Level Zero shows no Intel GPU")


def test_no_kernel_may_be_contracted(tmp_path):
    """What a GPU's compiler may fuse is said in SPIR-V, by kernel: one that adds floats must forbid it."""
    done = run(
        "-m", "kvcore_xpu", "cpu", cwd=tmp_path, SYCL_DUMP_IMAGES="1", SYCL_CACHE_PERSISTENT="0",
        SYCL_PROGRAM_COMPILE_OPTIONS="-cl-opt-disable",  # of what comes after SPIR-V, and takes long
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [kernel for image in sorted(tmp_path.glob("*.spv")) for kernel in float_adds(image.read_bytes())]
    assert {"rotate", "shift_rope", "reduce_norm_tree"} <= {name for name, _ in found}, "nothing adds floats"
    assert [name for name, forbids in found if not forbids] == []


def float_adds(image):
    """Return the kernels of a SPIR-V module that add floats, and whether each has the mode ContractionOff."""
    words = struct.unpack(f"<{len(image) // 4}I", image)
    names, off, adds, calls, function, at = {}, set(), set(), {}, 0, 5
    while at < len(words):
        code, length = words[at] & 0xFFFF, words[at] >> 16
        operands = words[at + 1 : at + length]
        if code == 15:  # OpEntryPoint
            names[operands[1]] = struct.pack(f"<{len(operands) - 2}I", *operands[2:]).split(b"\0")[0].decode()
        elif code == 16 and operands[1] == 31:  # OpExecutionMode ContractionOff
            off.add(operands[0])
        elif code == 54:  # OpFunction
            function = operands[1]
        elif code == 57:  # OpFunctionCall
            calls.setdefault(function, set()).add(operands[2])
        elif code in (129, 131):  # OpFAdd, OpFSub
            adds.add(function)
        elif code == 12:  # OpExtInst of OpenCL: fma, mad
            assert operands[3] not in (26, 42), "a fused operation was written as one"
        at += length

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            if (one := todo.pop()) not in seen:
                seen.add(one)
                todo += calls.get(one, ())
        return seen

    return [(n.removeprefix("__sycl_kernel_"), e in off) for e, n in names.items() if reached(e) & adds]
