"""Compile the kernels now, for the devices that are here: ``python -m kvcore_xpu`` (``cpu``: for the processor).

The first op on a device does the same. Here it is done where time does not matter, as when an image is built.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvcore.errors import KVCoreError
from kvcore_xpu.device import device


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, and print the devices."""
    parser = argparse.ArgumentParser(prog="python -m kvcore_xpu", description=__doc__)
    parser.add_argument("kind", nargs="?", choices=["gpu", "cpu"], default="gpu", help="of devices; default: gpu")
    kind = parser.parse_args(arguments).kind
    try:
        library = device(kind)
        for ordinal in range(library.count()):
            library.load(ordinal)
            info = library.info(ordinal)
            sys.stdout.write(f"{info.name} ({info.arch}), sub-groups of {info.warp_width}\n")
    except KVCoreError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
