"""What the repository's own tests share: the checkout, its distributions, and which sources ship."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("cpu_ref", "cpu", "cuda", "emu", "rocm", "xpu")
SIBLINGS = (*(f"backends/{name}" for name in BACKENDS), "conformance")


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def siblings() -> dict[str, dict[str, Any]]:
    """Return folder -> parsed pyproject.toml of every distribution but the core."""
    return {name: tomllib.loads((ROOT / name / "pyproject.toml").read_text("utf-8")) for name in SIBLINGS}


@pytest.fixture(scope="session")
def core() -> dict[str, Any]:
    """Return the parsed pyproject.toml of the core."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="session")
def shipped_files() -> list[Path]:
    """Return every Python file that ends up in a wheel."""
    folders = [ROOT / "kvcore", *(ROOT / name / "src" for name in SIBLINGS)]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    assert len(files) > 20, "the shipped sources have moved: the tests of this folder would check nothing"
    return files


@pytest.fixture(scope="session")
def text_files() -> list[Path]:
    """Return every text file of the checkout, without environments, builds and caches."""
    suffixes = {"", ".py", ".pyi", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".hpp", ".cpp", ".cu"}
    skipped = {"build", "dist", "site", "__pycache__", "LICENSE"}

    def wanted(path: Path) -> bool:
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        generated = any(part in skipped or part.endswith(".egg-info") for part in parts)
        return path.is_file() and path.suffix in suffixes and not hidden and not generated

    tops = [path for path in ROOT.iterdir() if not path.name.startswith(".") or path.name == ".ci"]
    inside = [path for top in tops if top.is_dir() for path in top.rglob("*")]
    return sorted(path for path in (*tops, *inside) if wanted(path))
