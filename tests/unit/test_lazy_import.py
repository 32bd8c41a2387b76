"""`import kvcore` costs next to nothing: no torch, no vendor library, no command line, nothing probed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kvcore

HEAVY = {"torch", "triton", "transformers", "pydantic", "yaml", "rich", "typer", "jax", "cupy"}
VENDORS = {"kvcore_cpu", "kvcore_cpu_ref", "kvcore_cuda", "kvcore_rocm", "kvcore_xpu"}


def modules_after(code: str) -> set[str]:
    """Run code in a new interpreter; return the names of all modules that it ended up with."""
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def tops(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_importing_the_package_imports_nothing_of_it():
    modules = modules_after("import kvcore")
    assert tops(modules) & (HEAVY | VENDORS | {"numpy", "ml_dtypes", "pluggy"}) == set()
    assert {name for name in modules if name.startswith("kvcore.")} == set()


def test_binding_a_layout_needs_numpy_at_most():
    modules = modules_after(
        "import kvcore, numpy as np\n"
        "rows = kvcore.Layout('L|KBNHD').bind([np.zeros((2, 1, 4, 1, 8), np.float16)])\n"
        "assert rows.blocks == 1"
    )
    assert tops(modules) & (HEAVY | VENDORS | {"pluggy"}) == set()


def test_every_public_name_can_be_had_without_anything_heavy():
    modules = modules_after("import kvcore\nfor name in kvcore.__all__: getattr(kvcore, name)")
    assert tops(modules) & (HEAVY | VENDORS) == set()


def test_opening_the_reference_imports_the_reference_and_no_vendor():
    modules = modules_after(
        "import kvcore, numpy as np\n"
        "backend = kvcore.open_backend('cpu_ref')\n"
        "assert backend.reduce_absmax(np.float32([1, -3]), 0)[0] == 3"
    )
    assert "kvcore_cpu_ref.ops" in modules
    assert tops(modules) & HEAVY == set()
    # The light modules of installed vendors are loaded and probed; what they load in turn stays out.
    assert {name for name in modules if name.endswith(".ops") and tops({name}) & VENDORS} == {"kvcore_cpu_ref.ops"}


def test_the_lazy_table_is_the_public_interface():
    assert set(kvcore._MODULE_OF) | {"__version__"} == set(kvcore.__all__)
    assert list(kvcore.__all__) == sorted(kvcore.__all__)
    assert set(kvcore.__all__) <= set(dir(kvcore))


@pytest.mark.parametrize("name", sorted(kvcore._MODULE_OF))
def test_each_public_name_is_the_one_of_its_module(name):
    module = __import__(kvcore._MODULE_OF[name], fromlist=[name])
    assert getattr(kvcore, name) is getattr(module, name)
    assert name in module.__all__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'kvcore' has no attribute 'Manager'"):
        kvcore.Manager  # noqa: B018 - looking it up is the test
    assert not hasattr(kvcore, "layouts")
