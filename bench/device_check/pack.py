"""Fetches what a bare machine lacks into build/device-site, to be carried there: ``python -m bench.device_check.pack``.

For CPython 3.12 on x86-64 Linux unless told otherwise (``--python 3.11``). Each distribution gets a folder of its own:
on the machine only those are used that it does not have.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

from bench.device_check.places import PACKED, ROOT, SITE

_MOST_BYTES = 40 << 20
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.device_check.pack", description=__doc__.split("\n")[0])
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="Python of the machine (default: 3.12)")
    chosen = parser.parse_args().python
    shutil.rmtree(SITE, ignore_errors=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--no-compile"]
    options += [f"--platform={platform}" for platform in _PLATFORMS]
    options += [f"--python-version={chosen}", "--implementation=cp"]
    for name in PACKED:
        subprocess.run([sys.executable, "-m", "pip", "install", *options, f"--target={SITE / name}", name], check=True)
    nbytes = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file())
    print(f"{SITE.relative_to(ROOT)}: {', '.join(PACKED)} for Python {chosen}, {nbytes / 2**20:.1f} MiB")
    if nbytes > _MOST_BYTES:
        print(f"more than {_MOST_BYTES >> 20} MiB: too much to carry", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
