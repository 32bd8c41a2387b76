"""Builds the native libraries into the wheel; what it is comes from pyproject.toml. Probes nothing of the machine."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))
from build_native import WIDTHS, build  # a frontend does not put this folder on the path


class BuildNative(build_ext):
    """A shared library for ctypes is no extension module: it has one name, whatever Python will load it."""

    def build_extension(self, ext: Extension) -> None:
        """Build the library where setuptools expects the extension."""
        build(Path(self.get_ext_fullpath(ext.name)), int(ext.name.removeprefix("kvcore_rocm._native")))

    def get_ext_filename(self, fullname: str) -> str:
        """Return the name without a tag of the Python that builds it."""
        return fullname.replace(".", "/") + ".so"


class AnyPython(bdist_wheel):
    """One wheel a platform serves every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return py3-none-PLATFORM."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(f"kvcore_rocm._native{width}", sources=[]) for width in WIDTHS],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
