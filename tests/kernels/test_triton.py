"""The twins in Triton's language: that they compile, contract nothing, and run under the conformance suite."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETER = "kvcore.kernels.triton.interpreter:backend"
NUMERIC = ("fold", "write_absmax", "check_scales", "quantize_groups", "quantize_elements", "dequantize_elements")
BFLOAT16, AFFINE, FP8 = 9, 1, 2
ARCHES = ("sm_90", "gfx942", "gfx1100")

# Products and sums in one rounding. What AMD's compiler makes of an integer division has two of them, with a power of
# two that no datum is multiplied by as a literal: 2**32, -2**32.
CONTRACTED = re.compile(
    r"\b(?:fma|mad)\.\S*f(?:16|32|64)\S*.*|\bv_(?:pk_)?(?:dual_)?(?:fma|fmac|mad|mac)\w*f(?:16|32|64).*"
)
DIVISION = re.compile(r"v_fmam?a?k_f32\S* .*0x[4c]f800000\b")


def python(*arguments, **variables):
    """Run Python with other variables, of which None is one that is not set."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def aot(tmp_path_factory):
    """Return the module that compiles, with a cache of its own."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        from kvcore.kernels.triton import aot

        yield aot


def compiled(aot, arch, names, *, fusion=False, **constants):
    """Return the assembly of the launches of some kernels that have some constants."""
    target = next(target for target in aot.TARGETS if target.name == arch)
    chosen = [
        launch
        for launch in aot.launches(target.warp)
        if launch.name in names and constants.items() <= {**constants, **dict(launch.constants)}.items()
    ]
    outcomes = [aot.compile_for(launch, target, fusion=fusion) for launch in chosen]
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert outcomes
    return [outcome.text for outcome in outcomes]


def contracted(text):
    return [found for found in CONTRACTED.findall(text) if not DIVISION.search(found)]


@pytest.mark.parametrize("arch", ARCHES)
def test_nothing_numeric_is_contracted(aot, arch):
    texts = compiled(aot, arch, NUMERIC, dtype=BFLOAT16, kind=AFFINE)
    texts += compiled(aot, arch, NUMERIC, dtype=BFLOAT16, kind=FP8)
    for text in texts:
        assert contracted(text) == []
        assert ".ftz" not in text
        assert not re.search(r"\bdiv\.\S*f32|\bv_div_\w+_f32", text)


@pytest.mark.parametrize("arch", ARCHES)
def test_with_fusion_the_same_look_finds_contractions(aot, arch):
    # The scale of kind affine is a difference of two products.
    assert any(contracted(text) for text in compiled(aot, arch, ["quantize_groups"], fusion=True, kind=AFFINE))


def test_rows_are_moved_and_quantised_in_vectors(aot):
    assert any("ld.global.v2.b64" in text for text in compiled(aot, "sm_90", ["move_rows"], gather=True))
    for name in ("quantize_elements", "dequantize_elements", "fold"):
        for text in compiled(aot, "sm_90", [name], dtype=BFLOAT16, kind=AFFINE):
            assert re.search(r"ld\.global\.v[24]\.b32", text), name


def test_status_and_ranges_are_compared_as_unsigned(aot):
    text = "".join(compiled(aot, "sm_90", ["fold", "find_first"], dtype=BFLOAT16))
    kinds = set(re.findall(r"\b(?:atom|red)\.global\S*\.((?:min|max)\.\w+)", text))
    assert "min.u64" in kinds
    assert kinds <= {"min.u64", "max.u32"}


def test_a_kernel_that_does_not_compile_is_told_with_the_reason(aot):
    launch = next(launch for launch in aot.launches(32) if launch.name == "clear_words" or launch.constants)
    broken = aot.Launch(launch.kernel, launch.op, 4, tuple((name, "nothing") for name, _ in launch.constants))
    outcome = aot.compile_for(broken, aot.TARGETS[0])
    assert outcome.text == ""
    assert "Error" in outcome.error


@pytest.mark.slow
def test_every_twin_compiles_for_every_gpu():
    done = python("-m", "kvcore.kernels.triton.aot", "--json", "--jobs", "2", TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert {row["arch"] for row in rows} == {"sm_80", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx1100"}
    from kvcore.kernels.triton import TWINS

    assert {row["op"] for row in rows} == set(TWINS)


def test_nothing_is_compiled_where_triton_interprets():
    done = python("-m", "kvcore.kernels.triton.aot", TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "TRITON_INTERPRET is set" in done.stderr


# --- the interpreter


def test_naming_the_twins_imports_no_triton():
    program = (
        "import sys, kvcore.kernels.triton, kvcore.kernels.triton.interpreter as i; "
        "assert i.backend().probe().usable; sys.exit('triton' in sys.modules)"
    )
    assert python("-c", program).returncode == 0


def test_the_interpreter_is_refused_where_triton_compiles():
    program = "import triton, kvcore.kernels.triton.interpreted"
    done = python("-c", program, TRITON_INTERPRET=None)
    assert done.returncode != 0
    assert "BackendLoadError: Triton was imported without TRITON_INTERPRET=1" in done.stderr


def test_the_suite_runs_on_interpreted_twins():
    # Some of it: all of it takes minutes (`make conformance-triton`).
    names = "gather_allocates or scatter_unchecked or codebook_ties or every_integer_code or tiles_of_all_modes"
    done = python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "kvcore_conformance", "-k", names),
        *("--kvcore-backend", INTERPRETER, "--kvcore-profile", "tiny", "--kvcore-no-shrink"),
        TRITON_INTERPRET=None,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    for op in ("gather_paged", "scatter_paged", "quantize", "dequantize", "decode_symbols"):
        assert re.search(rf"{op}\s+triton: [1-9]\d* passed", done.stdout), done.stdout[-3000:]


# --- devices


@pytest.mark.parametrize("handle", [99, 0])
def test_kernels_are_launched_when_their_stream_keeps_what_they_use(monkeypatch, handle):
    torch = pytest.importorskip("torch")
    from kvcore.kernels.device import DeviceStream
    from kvcore.kernels.triton.device import TorchOwner

    events = []

    class Stream(DeviceStream):
        ordinal = 0
        native = handle
        mark = finish = lambda self: None
        passed = lambda self, mark: False  # noqa: E731
        take_status = lambda self: 2**64 - 1  # noqa: E731

        def let_go(self, until=0):
            events.append("looked")

    class Library:
        def resolve(self, stream):
            return stream

        def info(self, ordinal):
            return type("Info", (), {"warp_width": 64})

        def name(self, ordinal):
            return "cuda:0"

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: events.append((grid, args, options))

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    # As torch: a null handle makes a new stream, and not the null stream.
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: ("external", handle or "new"))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", 0))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: events.append(stream) or contextlib.nullcontext())
    stream = Stream(7, 4096)
    queue = TorchOwner(Library()).open("pack_bits", stream)
    assert (queue.status, queue.tiles) == (4096, 8)
    queue.launch(Kernel(), 3, 5, 6, warps=2, bits=4)
    queue.launch(Kernel(), 0)
    assert events == []
    queue.close("pack_bits", ())
    options = {"num_warps": 2, "enable_fp_fusion": False, "bits": 4}
    assert events == [("external" if handle else "default", handle), ((3,), (5, 6), options), "looked"]


def test_twins_do_not_load_where_torch_has_no_such_device(monkeypatch):
    torch = pytest.importorskip("torch")
    from kvcore.errors import BackendLoadError
    from kvcore.kernels.triton.device import TorchOwner

    def refuse():
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(BackendLoadError, match="shows no device: Torch not compiled"):
        TorchOwner(object())
