"""What the installed torch was built for, told without importing it: that takes seconds, and may wake a driver."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["TorchBuild", "torch_build"]

_NAMES = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU"}
_FIELDS = (("hip", "rocm"), ("cuda", "cuda"), ("xpu", "xpu"))
_TAGS = (("rocm", "rocm"), ("cu", "cuda"), ("xpu", "xpu"))


class TorchBuild(NamedTuple):
    """A build of torch.

    Parameters
    ----------
    kind : {"cuda", "rocm", "xpu", "cpu"}
        The backend whose devices it has; ``"cpu"``: none.
    version : str
    """

    kind: str
    version: str

    def __str__(self) -> str:
        return f"{_NAMES[self.kind]} build {self.version}" if self.kind in _NAMES else f"{self.version} for processors"


def torch_build() -> TorchBuild | None:
    """Return what torch was built for, None where it is not installed.

    Its file of versions says so, which is read as text; where there is none, the local part of its version does.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    text = _version_file()
    if text is None:
        if not version:
            return None
        local = version.partition("+")[2]
        kind = next((kind for tag, kind in _TAGS if local.startswith(tag)), "cpu")
        return TorchBuild(kind, version)
    values = dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*=\s*(.*)$", text, re.MULTILINE))
    built = (kind for field, kind in _FIELDS if values.get(field, "None").strip() not in ("None", "''", '""'))
    return TorchBuild(next(built, "cpu"), version or "of no known version")


def _version_file() -> str | None:
    try:
        found = importlib.util.find_spec("torch")
    except ValueError:  # a module without a spec stands in for it
        return None
    if found is None or not found.submodule_search_locations:
        return None
    try:
        return (Path(next(iter(found.submodule_search_locations))) / "version.py").read_text("utf-8")
    except OSError:
        return None
