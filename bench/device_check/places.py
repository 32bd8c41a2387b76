"""Where things are: the sources as an installation would show them, and the packages that a bare machine lacks.

The machine with the device may have no network, and nothing of kvcore installed. Children of the check get the sources
on PYTHONPATH, and beside them the metadata that an installation writes, so that entry points are found.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

__all__ = ["MERGED", "PACKED", "ROOT", "SITE", "child_environment", "missing"]

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "device-site"
"""A folder for each distribution that `make device-pack` has fetched."""

MERGED = "merged.json"
"""In the scratch folder: the suite's report, of all its processes, which the step `record` reads."""

PACKED = {
    "google-crc32c": "google_crc32c",
    "iniconfig": "iniconfig",
    "packaging": "packaging",
    "pluggy": "pluggy",
    "pygments": "pygments",
    "pytest": "pytest",
    "sortedcontainers": "sortedcontainers",
}
"""What the check needs beside numpy, ml_dtypes and hypothesis: distribution -> its module."""

_NEEDED = {**PACKED, "hypothesis": "hypothesis", "ml_dtypes": "ml_dtypes", "numpy": "numpy"}


def child_environment(scratch: Path) -> dict[str, str]:
    """Return the environment of the check's children, whose sources are this checkout's.

    Parameters
    ----------
    scratch : Path
        Where to write metadata of what is not installed.
    """
    folders = [ROOT, *sorted(ROOT.glob("backends/*/src")), ROOT / "conformance" / "src"]
    metadata = scratch / "metadata"
    for project in [ROOT, *sorted(ROOT.glob("backends/*")), ROOT / "conformance"]:
        if (project / "pyproject.toml").is_file():
            _describe(project, metadata)
    folders += [metadata, *(SITE / name for name in _absent() if (SITE / name).is_dir())]
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, folders), *([given] if given else [])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def missing() -> list[str]:
    """Return the distributions that are neither installed here nor packed."""
    return [name for name in _absent() if not (SITE / name).is_dir()]


def _absent() -> list[str]:
    return [name for name, module in _NEEDED.items() if importlib.util.find_spec(module) is None]


def _describe(project: Path, folder: Path) -> None:
    """Write what an installation would say of a distribution, unless it is installed."""
    about = _read_toml(project / "pyproject.toml")["project"]
    name = str(about["name"])
    try:
        distribution(name)
        return
    except PackageNotFoundError:
        pass
    version = about.get("version") or _core_version()
    home = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    home.mkdir(parents=True, exist_ok=True)
    (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    lines = [
        line
        for group, points in about.get("entry-points", {}).items()
        for line in (f"[{group}]", *(f"{point} = {target}" for point, target in points.items()))
    ]
    (home / "entry_points.txt").write_text("\n".join([*lines, ""]), "utf-8")


def _core_version() -> str:
    text = (ROOT / "kvcore" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit('kvcore/__init__.py has no line of the form __version__ = "X.Y.Z"')
    return found[1]


def _read_toml(path: Path) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_text("utf-8"))
