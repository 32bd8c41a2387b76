"""Stores with something in them, for the tests of commands that look at stores."""

from __future__ import annotations

import numpy as np

import kvcore
from kvcore.dtypes import to_dtype
from kvcore.engine.engine import CacheEngine
from kvcore.engine.keys import Namespace
from kvcore.engine.parts import CachePart
from kvcore.layout import Layout
from kvcore.memory import LayoutDesc
from kvcore.tiers.config import open_tiers

CHUNK = 16
EXTENTS = {"L": 2, "H": 2, "D": 8}
BFLOAT16 = to_dtype("bfloat16")
RAW_BYTES = 2 * CHUNK * 2 * 2 * 8 * 2


def fill(uri: str, *, model: str = "m", chunks: int = 3, serde: str = "raw") -> str:
    """Store one sequence; return its namespace, in hex."""
    namespace = Namespace(model, "1", chunk_tokens=CHUNK)
    desc = LayoutDesc(Layout("LKTHD", T=CHUNK, **EXTENTS), dict.fromkeys("KV", BFLOAT16))
    with open_tiers(
        {"host_bytes": 4 << 20, "pinned": False, "tiers": [{"store": uri, "serde": serde}]},
        kvcore.open_backend("cpu_ref"),
    ) as tiers:
        part = CachePart(desc, (0, 1), (0, 2), 2)
        engine = CacheEngine(namespace, [part], tiers, backend=kvcore.open_backend("cpu_ref"))
        tokens = chunks * CHUNK
        kv = np.random.default_rng(0).standard_normal((2, 2, tokens, 2, 8)).astype(BFLOAT16)
        engine.store(range(tokens), Layout("LKTHD").bind(kv), wait=True)
        engine.close()
    return namespace.digest.hex()
