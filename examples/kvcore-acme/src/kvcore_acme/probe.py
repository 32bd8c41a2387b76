"""Says whether ACME's ops can run on this machine. Cheap, and changes nothing."""

import sys

from kvcore import Probe


def probe() -> Probe:
    return Probe(sys.byteorder == "little", f"works on little-endian machines; this one is {sys.byteorder}-endian")
