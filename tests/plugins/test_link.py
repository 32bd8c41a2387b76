"""Linking: implementations are held to the hookspecs, and one of them is bound for each op."""

from __future__ import annotations

import ast
import inspect
import logging
import sys

import pytest
from typer.testing import CliRunner

import kvcore
from kvcore import BackendLoadError, ConfigError
from kvcore.cli import app
from kvcore.hookspecs import OP_PREFIX, composite_specs, op_specs

DIGEST = """
from kvcore import hookimpl

@hookimpl
def kvcore_op_digest(src, *, out, stream=None, workspace=None):
    out[...] = {value}
    return out
"""
PACK = """
@hookimpl
def kvcore_op_pack_bits(x, *, bits, out, stream=None, workspace=None):
    out[...] = {value}
    return out
"""


def bound(name="fast"):
    backend = kvcore.open_backend(name)
    return {op: (b.implementation, b.reason) for op, b in backend.bindings.items()}


def digest(name="fast"):
    return int(kvcore.open_backend(name).digest([b"x"])[0])


def test_the_only_implementation_is_bound(shelf):
    shelf.add("fast", modules={"native": DIGEST.format(value=7)})
    assert bound() == {"digest": ("native", "the only implementation")}
    assert digest() == 7


def test_the_bound_function_is_the_implementation_itself(shelf):
    package = shelf.add("fast", modules={"native": DIGEST.format(value=7)})
    function = kvcore.open_backend("fast").bindings["digest"].function
    assert function is sys.modules[f"{package}.native"].kvcore_op_digest


def test_the_first_of_several_is_bound_unless_the_variable_chooses(shelf, monkeypatch):
    shelf.add(
        "fast", modules={"native": DIGEST.format(value=1), "triton": DIGEST.format(value=2) + PACK.format(value=3)}
    )
    assert bound() == {
        "digest": ("native", "first of native, triton"),
        "pack_bits": ("triton", "the only implementation"),
    }
    assert digest() == 1
    monkeypatch.setenv("KVCORE_KERNELS", "digest=triton")
    assert bound()["digest"] == ("triton", "chosen by KVCORE_KERNELS")
    assert digest() == 2
    monkeypatch.setenv("KVCORE_KERNELS", "*=triton")
    assert digest() == 2
    monkeypatch.setenv("KVCORE_KERNELS", "*=triton,digest=native")
    assert digest() == 1


def test_a_star_that_an_op_does_not_have_is_told_in_its_reason(shelf, monkeypatch):
    shelf.add("fast", modules={"native": DIGEST.format(value=1)})
    monkeypatch.setenv("KVCORE_KERNELS", "*=triton")
    implementation, reason = bound()["digest"]
    assert implementation == "native"
    assert "no triton implementation" in reason


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("digets=native", r"names 'digets', which is no op; ops are .*digest"),
        ("digest=nativ", "has no implementation 'nativ'; it has native, triton"),
        ("pack_bits=native", "asks for pack_bits=native, but backend fast has pack_bits only as triton"),
    ],
)
def test_wrong_names_in_the_variable_are_errors(shelf, monkeypatch, kernels, message):
    shelf.add(
        "fast", modules={"native": DIGEST.format(value=1), "triton": DIGEST.format(value=2) + PACK.format(value=3)}
    )
    monkeypatch.setenv("KVCORE_KERNELS", kernels)
    with pytest.raises(ConfigError, match=message):
        kvcore.open_backend("fast")


def implementation(signature, name="kvcore_op_digest"):
    return f"from kvcore import hookimpl\n@hookimpl\ndef {name}({signature}):\n    return out\n"


@pytest.mark.parametrize(
    "signature",
    [
        "src, *, out, stream=0, workspace=None",  # another default
        "src, *, out, stream=None",  # a keyword is missing
        "src, *, out, strm=None, workspace=None",  # a keyword is misnamed
        "source, *, out, stream=None, workspace=None",  # a positional is misnamed
        "src, out, stream=None, workspace=None",  # not keyword-only
        "src, *, out=None, stream=None, workspace=None",  # a default where the core always gives a value
        "src, *, out, workspace=None, stream=None",  # another order
        "src, *, out, stream=None, workspace=None, extra=1",
        "src, *, out, **rest",
        "*args, out, stream=None, workspace=None",
    ],
)
def test_a_signature_that_differs_from_the_hookspec_is_refused(shelf, signature):
    shelf.add("fast", modules={"native": implementation(signature)})
    with pytest.raises(BackendLoadError, match="does not follow its hookspec kvcore_op_digest") as caught:
        kvcore.open_backend("fast")
    assert "backend fast, implementation native" in str(caught.value)
    assert str(inspect.signature(op_specs()["digest"])) in str(caught.value)


def test_annotations_are_free(shelf):
    shelf.add("fast", modules={"native": implementation("src: list, *, out: 'x', stream: int = None, workspace=None")})
    assert set(bound()) == {"digest"}


@pytest.mark.parametrize("name", ["kvcore_op_digset", "digest"])
def test_an_op_that_does_not_exist_is_refused(shelf, name):
    shelf.add("fast", modules={"native": implementation("src, *, out, stream=None, workspace=None", name)})
    with pytest.raises(BackendLoadError, match=rf"{name} implements no op of this kvcore; ops are gather_paged"):
        kvcore.open_backend("fast")


def test_functions_without_the_marker_are_not_implementations(shelf):
    shelf.add("fast", modules={"native": "def kvcore_op_digest(whatever): pass\n" + DIGEST.format(value=4)})
    assert digest() == 4
    shelf.add("empty", modules={"native": "def kvcore_op_digest(whatever): pass"})
    assert bound("empty") == {}


def test_implementations_that_do_not_import_say_why(shelf):
    shelf.add("fast", modules={"native": "import libfast_missing"})
    with pytest.raises(
        BackendLoadError, match=r"backend fast: .*native failed to import: ModuleNotFoundError: .*libfast"
    ):
        kvcore.open_backend("fast")


def test_implementations_that_exit_do_not_end_the_program(shelf):
    shelf.add("fast", modules={"native": "raise SystemExit('no device')"})
    with pytest.raises(BackendLoadError, match="SystemExit: no device"):
        kvcore.open_backend("fast")


# --- implementations that do not fit the machine

NO_IMAGE = "from kvcore import BackendLoadError\nraise BackendLoadError('sm_70 is in no image')"


def fused_hook(name, body="    return None\n"):
    parameters = str(inspect.signature(composite_specs()[name])).partition(" ->")[0]
    return f"@hookimpl\ndef kvcore_fused_{name}{_plain(parameters)}:\n{body}"


def _plain(parameters):
    """A signature without annotations, whose names a module of a test does not have."""
    tree = ast.parse(f"def f{parameters}: pass")
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"({ast.unparse(tree.body[0].args)})"


@pytest.mark.parametrize(
    ("native", "reason"),
    [
        (NO_IMAGE, "native does not load: sm_70 is in no image"),
        ("import libfast_missing", "native does not load: ModuleNotFoundError: No module named 'libfast_missing'"),
    ],
)
def test_the_next_implementation_serves_where_one_does_not_fit(shelf, monkeypatch, caplog, native, reason):
    shelf.add("fast", modules={"native": native, "triton": DIGEST.format(value=2)})
    with caplog.at_level(logging.INFO, "kvcore"):
        assert bound()["digest"] == ("triton", f"{reason}; the only implementation that loads")
        assert digest() == 2
    (logged,) = [r for r in caplog.records if "does not load" in r.getMessage()]  # once, however often it is opened
    assert logged.levelno == logging.WARNING
    assert logged.getMessage() == f"backend fast: {reason}; triton is bound instead"


def test_composites_of_the_next_implementation_serve_too(shelf):
    shelf.add("fast", modules={"native": NO_IMAGE, "triton": DIGEST.format(value=2) + fused_hook("gather_encode")})
    fused = kvcore.open_backend("fast").fused("gather_encode")
    assert fused.__module__.endswith(".triton")


def test_what_did_not_load_is_explained(shelf):
    shelf.add("fast", modules={"native": NO_IMAGE, "triton": DIGEST.format(value=2)})
    remark = "native does not load: sm_70 is in no image; triton is bound instead"
    assert remark in str(kvcore.open_backend("fast").explain())
    for arguments in (["ops", "--backend", "fast", "--json"], ["doctor", "--json"]):
        done = CliRunner().invoke(app, arguments, env={"KVCORE_BACKEND": "fast"})
        assert remark in done.stdout


def test_what_would_not_have_been_bound_is_not_missed(shelf, caplog):
    shelf.add("fast", modules={"native": DIGEST.format(value=1), "triton": "import triton_missing"})
    with caplog.at_level(logging.WARNING, "kvcore"):
        assert bound() == {"digest": ("native", "the only implementation")}
    assert caplog.records == []
    assert "triton does not load: ModuleNotFoundError" in str(kvcore.open_backend("fast").explain())


def test_what_has_nothing_to_add_is_not_imported(shelf, monkeypatch):
    signatures = {op: str(inspect.signature(spec)).partition(" ->")[0] for op, spec in op_specs().items()}
    ops = [f"@hookimpl\ndef kvcore_op_{op}{_plain(text)}:\n    return out\n" for op, text in signatures.items()]
    fast = "from kvcore import hookimpl\n" + "\n".join(ops)
    shelf.add("twice", modules={"fast": fast, "slow": "raise RuntimeError('it was imported')"})
    backend = kvcore.open_backend("twice", fallback="error")
    assert {binding.implementation for binding in backend.bindings.values()} == {"fast"}
    monkeypatch.setenv("KVCORE_KERNELS", "digest=slow")
    with pytest.raises(BackendLoadError, match="it was imported"):
        kvcore.open_backend("twice")


@pytest.mark.parametrize("kernels", ["digest=native", "*=native"])
def test_one_that_was_asked_for_is_not_replaced(shelf, monkeypatch, kernels):
    shelf.add("fast", modules={"native": NO_IMAGE, "triton": DIGEST.format(value=2)})
    monkeypatch.setenv("KVCORE_KERNELS", kernels)
    with pytest.raises(BackendLoadError, match=r"asks for .*=native, which backend fast cannot load: sm_70 is in no"):
        kvcore.open_backend("fast")
    monkeypatch.setenv("KVCORE_KERNELS", kernels.replace("native", "triton"))
    assert digest() == 2


def test_where_none_loads_all_reasons_are_told(shelf):
    shelf.add("fast", modules={"native": NO_IMAGE, "triton": "import triton_missing"})
    with pytest.raises(BackendLoadError, match=r"no implementation loads: native: sm_70 .*; triton: ModuleNotFound"):
        kvcore.open_backend("fast")


@pytest.mark.parametrize("fault", ["1 / 0", "def f(:", implementation("src, *, out")])
def test_faulty_code_is_not_passed_over(shelf, fault):
    shelf.add("fast", modules={"native": fault, "triton": DIGEST.format(value=2)})
    with pytest.raises(BackendLoadError, match=r"ZeroDivisionError|SyntaxError|does not follow its hookspec"):
        kvcore.open_backend("fast")


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ("no.such.module:Runtime", "no.such.module failed to import: ModuleNotFoundError"),
        ("kvcore.runtime:NoRuntime", "runtime kvcore.runtime:NoRuntime failed: AttributeError"),
        ("math:sqrt", "runtime math:sqrt failed: TypeError"),
    ],
)
def test_a_runtime_that_does_not_come_up_says_why(shelf, runtime, message):
    shelf.add("fast", runtime=repr(runtime))
    with pytest.raises(BackendLoadError, match=message):
        kvcore.open_backend("fast")


def test_the_reference_implements_every_op_and_binds_plain_functions():
    bindings = kvcore.open_backend("cpu_ref").bindings
    assert list(bindings) == list(op_specs())
    for op, binding in bindings.items():
        assert inspect.isfunction(binding.function)
        assert binding.function.__name__ == OP_PREFIX + op
        assert (binding.implementation, binding.reason) == ("numpy", "the only implementation")
