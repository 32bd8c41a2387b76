"""Rules that every shipped source keeps; each violation is listed with its place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvcore import settings
from kvcore.engine.config import setting_names

MAX_LINES = 600
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "__import__"}
BLIND = {"Exception", "BaseException"}
VARIABLE = re.compile(r"\bKVCORE_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
MACRO = re.compile(r"^#(?:define|ifn?def) (KVCORE_[A-Z0-9_]+)", re.MULTILINE)
# Folders of somebody's machine. What the system itself publishes (/dev, /proc, /sys) is fine.
# ROCm's and CUDA's own folders are the same on every machine that has them.
MACHINE_PATH = re.compile(r"(?<![\w.}/:>)-])/(tmp|work|home|root|opt(?!/rocm)|Users|mnt|usr/local(?!/cuda))/\w")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def findings(module: ast.Module) -> list[tuple[int, str]]:
    """Return (line, what) for each construct that shipped code must not have."""
    found = []
    for node in ast.walk(module):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found += [(line, f"imports {name}") for name in names if name.split(".")[0] in BANNED_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BANNED_MODULES:
            found.append((line, f"imports from {node.module}"))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                found.append((line, f"calls {node.func.id}"))
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in {"os.system", "os.popen"}:
                found.append((line, f"calls {ast.unparse(node.func)}"))
            keywords = {k.arg: k.value for k in node.keywords}
            shell = keywords.get("shell")
            if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
                found.append((line, "passes shell="))
            if "allow_pickle" in keywords and getattr(keywords["allow_pickle"], "value", True) is not False:
                found.append((line, "passes allow_pickle="))
        elif isinstance(node, ast.ExceptHandler):
            if node.type is None:
                found.append((line, "bare except"))
            caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else set()
            if caught & BLIND and all(isinstance(s, (ast.Pass, ast.Continue)) for s in node.body):
                found.append((line, "swallows every exception"))
    return sorted(found)


def reads_a_variable(node: ast.AST) -> bool:
    """Tell whether a node reads a KVCORE_ variable out of the environment."""
    if isinstance(node, ast.Call) and re.search(r"(environ\.get|getenv)$", ast.unparse(node.func)):
        name = node.args[0] if node.args else None
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        name = node.slice if ast.unparse(node.value).endswith("environ") else None
    else:
        return False
    return isinstance(name, ast.Constant) and str(name.value).startswith("KVCORE_")


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "import os; os.system('true')",
        "run('x', shell=True)",
        "np.load(f, allow_pickle=True)",
        "try: pass\nexcept: raise",
        "try: pass\nexcept Exception: pass",
        "for x in y:\n try: pass\n except (ValueError, BaseException): continue",
    ],
)
def test_each_banned_construct_is_found(text):
    assert len(findings(ast.parse(text))) == 1


def test_shipped_sources_have_none_of_the_banned_constructs(root, shipped_files):
    found = {
        f"{path.relative_to(root)}:{line}: {what}" for path in shipped_files for line, what in findings(tree(path))
    }
    assert found == set()


def test_only_the_suite_asserts(root, shipped_files):
    # `python -O` removes asserts: shipped code never validates with them. In a test suite they are the verb.
    found = {
        f"{path.relative_to(root)}:{node.lineno}"
        for path in shipped_files
        if "kvcore_conformance" not in path.parts
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assert)
    }
    assert found == set()


def test_modules_stay_short(root, text_files):
    lengths = {
        str(path.relative_to(root)): len(path.read_text("utf-8").splitlines())
        for path in text_files
        if path.suffix in {".py", ".hpp", ".cpp", ".cu"}
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_nothing_names_a_path_of_somebodys_machine(root, text_files):
    found = {
        f"{path.relative_to(root)}:{number}: {line.strip()[:80]}"
        for path in text_files
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    }
    assert found == set()


def test_every_variable_that_is_named_is_declared(root, shipped_files, text_files):
    documents = [path for path in text_files if path.suffix == ".md" or path.name == "Makefile"]
    named = {
        (name, str(path.relative_to(root)))
        for path in (*shipped_files, *documents)
        for name in VARIABLE.findall(path.read_text("utf-8"))
    }
    declared = {variable.name for variable in settings.VARIABLES}
    of_settings = {f"KVCORE_{name.upper()}" for name in setting_names()}  # of the engine: one for each
    headers = [path.read_text("utf-8") for path in text_files if path.suffix == ".hpp"]
    macros = {name for text in headers for name in MACRO.findall(text)}  # of the kernels; they share the prefix
    assert {(name, path) for name, path in named if name not in declared | of_settings | macros} == set()
    assert declared <= {name for name, _ in named}


def test_only_the_settings_read_variables(root, shipped_files):
    found = {
        f"{path.relative_to(root)}:{node.lineno}"
        for path in shipped_files
        if path != root / "kvcore" / "settings.py"
        for node in ast.walk(tree(path))
        if reads_a_variable(node)
    }
    assert found == set()
