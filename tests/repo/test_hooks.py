"""Docs, hooks and tests belong together: a hook without its page or without its test is not done."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import kvcore.hookspecs
from kvcore.hookspecs import FUSED_PREFIX, OP_PREFIX, SPEC_MODULES, composite, composite_specs, op_names, op_specs

HOOK = re.compile(rf"\b{OP_PREFIX}(\w+)")


def words(text: str) -> set[str]:
    """Return every identifier, and every word of every string, of a module; comments left out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"\w+", node.value))
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found


@pytest.fixture(scope="module")
def suite(root) -> dict[str, str]:
    """Return name -> text of the suite's test modules."""
    folder = root / "conformance" / "src" / "kvcore_conformance"
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("test_*.py"))}


@pytest.fixture(scope="module")
def reference(root) -> str:
    return (root / "docs" / "ops-reference.md").read_text("utf-8")


def test_every_module_of_specs_is_enumerated():
    folder = Path(kvcore.hookspecs.__path__[0])
    listed = {module.__name__.rpartition(".")[2] for module in SPEC_MODULES}
    assert listed == {path.stem for path in folder.glob("*.py")} - {"__init__", "composite", "markers"}


@pytest.mark.parametrize("op", op_names())
def test_a_spec_describes_every_parameter_and_its_exactness(op):
    spec = op_specs()[op]
    text = inspect.getdoc(spec) or ""
    # What `stream` and `workspace` are is the same for all ops, and is said once, in the package.
    parameters = [name for name in inspect.signature(spec).parameters if name not in {"stream", "workspace"}]
    table = text.partition("Parameters\n----------\n")[2]
    headings = re.findall(r"^([\w, ]+?)(?: : .*)?$", table, re.MULTILINE)
    described = {name.strip() for heading in headings for name in heading.split(",")}
    assert [name for name in parameters if name not in described] == []
    assert re.search(r"\bExactness: \S", text)


@pytest.mark.parametrize("op", op_names())
def test_a_spec_has_the_parameters_that_every_op_takes(op):
    parameters = inspect.signature(op_specs()[op]).parameters
    common = [parameters.get(name) for name in ("out", "stream", "workspace")]
    assert all(parameter is not None and parameter.kind is parameter.KEYWORD_ONLY for parameter in common)


def test_every_spec_is_in_the_reference_and_the_reference_has_no_others(reference):
    pages = set(re.findall(r"^::: (kvcore\.hookspecs\.\w+)$", reference, re.MULTILINE))
    assert pages == {module.__name__ for module in (*SPEC_MODULES, composite)}
    # mkdocstrings shows what a module exports: an op that is not in __all__ would be missing from the page.
    for module in SPEC_MODULES:
        assert set(module.__all__) == {name for name in vars(module) if name.startswith(OP_PREFIX)}
    assert set(composite.__all__) == {FUSED_PREFIX + name for name in composite_specs()}


@pytest.mark.parametrize("name", composite_specs())
def test_every_composite_is_composed_in_the_codecs_and_tested(root, name):
    composed = "".join(path.read_text("utf-8") for path in (root / "kvcore" / "codecs").glob("*.py"))
    assert f'fused("{name}")' in composed
    assert name in (root / "tests" / "unit" / "test_composites.py").read_text("utf-8")


@pytest.mark.parametrize("op", op_names())
def test_every_op_is_tested_by_the_suite(op, suite):
    assert suite, "the conformance suite has no test modules where they are expected"
    assert [name for name, text in suite.items() if {op, OP_PREFIX + op} & words(text)] != []


def test_nobody_speaks_of_hooks_that_do_not_exist(root, text_files):
    places = ("docs", "conformance", "backends", "examples", "kvcore")
    named = {
        (op, str(path.relative_to(root)))
        for path in text_files
        if path.relative_to(root).parts[0] in places
        for op in HOOK.findall(path.read_text("utf-8"))
    }
    assert {(op, path) for op, path in named if op not in op_names()} == set()
