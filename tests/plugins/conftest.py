"""Plug-ins to install for the length of a test: real packages with real entry points, in a folder of their own."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from kvcore.plugins.spec import API_VERSION

_numbers = itertools.count()


class Shelf:
    """A folder on `sys.path` to which plug-ins are added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages: list[str] = []

    def add(
        self,
        name: str,
        *,
        light: str | None = None,
        entry: str | None = None,
        probe: str = "Probe(True, 'ready')",
        modules: dict[str, str] | None = None,
        distribution: str = "",
        top: str = "",
        **spec: str,
    ) -> str:
        """Install a plug-in; return its package. `spec` holds source text of arguments of `BackendSpec`."""
        package = f"kvcore_test_{name}_{next(_numbers)}"
        self.packages.append(package)
        where = self.folder / package
        where.mkdir()
        modules = modules or {}
        arguments = {
            "name": repr(name),
            "device_types": "('cpu',)",
            "priority": "10",
            "api_version": str(API_VERSION),
            "probe": "probe",
            "implementations": repr({module: f"{package}.{module}" for module in modules}),
            "distribution": repr(distribution or f"kvcore-{name}"),
            **spec,
        }
        body = ", ".join(f"{key}={value}" for key, value in arguments.items())
        text = light or (
            f"from kvcore.plugins import BackendSpec, Probe\n{top}\n"
            f"def probe():\n    return {probe}\n\n"
            f"def backend():\n    return BackendSpec({body})\n"
        )
        (where / "__init__.py").write_text(dedent(text))
        for module, source in modules.items():
            (where / f"{module}.py").write_text(dedent(source))
        dist = distribution or f"kvcore-{name}"
        info = self.folder / f"{dist.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[kvcore.backends]\n{entry or name} = {package}:backend\n")
        importlib.invalidate_caches()
        return package


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Return a shelf for plug-ins; they are gone after the test."""
    shelf = Shelf(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield shelf
    for name in [m for m in sys.modules if m.partition(".")[0] in shelf.packages]:
        del sys.modules[name]
