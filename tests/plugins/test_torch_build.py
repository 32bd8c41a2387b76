"""What torch was built for, told from its files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

import pytest

from kvcore.plugins.torch_build import torch_build


@pytest.fixture
def torch(tmp_path, monkeypatch):
    """Return a function that installs a torch that cannot be imported, with a version and a text of versions."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(version, text):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": version}[name])
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
        if text is not None:
            (tmp_path / "torch" / "version.py").write_text("debug = False\n" + text)

    return install


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\nxpu: Optional[str] = None\n", "CUDA build 2.13.0"),
        ("cuda = None\nhip = '6.4.43484'\n", "ROCm build 2.13.0"),
        (
            "cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = '20250101'\n",
            "XPU build 2.13.0",
        ),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "2.13.0 for processors"),
    ],
)
def test_its_file_of_versions_says_it(torch, text, shown):
    torch("2.13.0", text)
    assert str(torch_build()) == shown


@pytest.mark.parametrize(
    ("version", "kind"),
    [("2.13.0+rocm7.0", "rocm"), ("2.13.0+cu130", "cuda"), ("2.13.0+xpu", "xpu"), ("2.13.0", "cpu")],
)
def test_without_that_file_its_version_does(torch, version, kind):
    torch(version, None)
    assert torch_build() == (kind, version)


def test_there_may_be_none(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_build() is None
