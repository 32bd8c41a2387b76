"""The golden vectors: how they are made, and whether the committed ones still say the same.

`python tests/golden/regenerate.py` compares; with `--write` it replaces them, which is a change of format: a key
that moves loses every stored cache, and a frame once released is read for ever. Say so in the commit.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcore.codecs import GroupInfo, PartInfo, write_frame
from kvcore.codecs.encryption import FrameCipher
from kvcore.codecs.key_ring import KeyRing
from kvcore.engine import ExtraKey, Namespace, chunk_keys
from kvcore.keys import StoreKey
from kvcore.rope import RopeParams

GOLDEN = Path(__file__).parent
MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def digest(buffers: Sequence[bytes | memoryview]) -> list[int]:
    """The `digest` op, in plain Python, as docs/frame.md defines it."""
    values = []
    for buffer in buffers:
        data = bytes(buffer)
        total = mix(len(data) ^ 0xD6E8FEB86659FD93)
        padded = data + bytes(-len(data) % 16)
        for i, (lo, hi) in enumerate(struct.iter_unpack("<QQ", padded)):
            inner = mix(lo + GAMMA * (2 * i + 1) & MASK)
            total += mix((inner ^ hi) + GAMMA * (2 * i + 2) & MASK)
        values.append(total & MASK)
    return values


def counting_bytes(nbytes: int, seed: int) -> bytes:
    return bytes((seed + 7 * i) % 251 for i in range(nbytes))


NAMESPACES: dict[str, dict[str, Any]] = {
    "plain": {"model": "tiny", "revision": "r1"},
    "sha256": {"model": "tiny", "revision": "r1", "hash": "sha256"},
    "tenant": {"model": "tiny", "revision": "r1", "salt": "tenant-a"},
    "adapter": {"model": "tiny", "revision": "r1", "adapter": "lora-7", "chunk_tokens": 64},
    "fp8": {"model": "tiny", "revision": "r1", "kv_dtype": ("fp8", "bf16"), "scales": bytes(range(32))},
    "rope": {"model": "m\u00f6del", "revision": "", "rope": RopeParams(64, theta=100000.0)},
    "table": {
        "model": "tiny",
        "revision": "r1",
        "rope": RopeParams(4, inv_freq=(1.0, 0.1), interleaved=True),
    },
    "mla": {"model": "tiny", "revision": "r1", "cache_class": "mla"},
}
TOKENS = [(i * i * 2654435761) % 2**32 for i in range(600)]
EXTRAS = [ExtraKey(200, 300, bytes(range(32))), ExtraKey(250, 256, b"ends with a chunk"), ExtraKey(510, 514, b"image")]


KEY = StoreKey(bytes(range(32)), bytes(range(32, 64)))
MASTER, OTHER = counting_bytes(32, seed=100), counting_bytes(32, seed=200)
UNNAMED = KeyRing({None: MASTER}, None)
NAMED = KeyRing({7: MASTER, 8: OTHER}, 7)


def keys() -> dict[str, Any]:
    vectors: dict[str, Any] = {}
    for name, fields in NAMESPACES.items():
        namespace = Namespace(**fields)
        links = chunk_keys(namespace, TOKENS, partial=True)
        with_extras = chunk_keys(namespace, TOKENS, extra_keys=EXTRAS)
        vectors[name] = {
            "namespace": namespace.digest.hex(),
            "chunks": [f"{key.start}-{key.stop} {key.digest.hex()}" for key in links],
            "with_extra_keys": [key.digest.hex() for key in with_extras],
        }
    return vectors


def frame() -> bytes:
    """Two interleaved groups, K and V of different width and type, padded segments, every field in use."""
    attention = GroupInfo(
        layout="LKHTD",
        layers=(4, 5, 7),
        parts=(PartInfo("K", "bfloat16", 6), PartInfo("V", "float8_e4m3fn", 5)),
        rows=3,
        head_count=2,
        head_start=2,
        base_position=256,
        rope=RopeParams(6, theta=500000.0, scaling="linear", factor=2.0, inv_freq=(1.0, 0.25, 0.0625)),
    )
    state = GroupInfo(layout="L*", layers=(6, 7), parts=(PartInfo("S", "uint8", 21),), rows=1)
    layers = [
        [counting_bytes(size, seed=10 * place + number) for number, size in enumerate(sizes)]
        for place, sizes in enumerate([(36, 36, 15, 15), (36, 36, 15, 15), (21,), (36, 36, 15, 15), (21,)])
    ]
    return bytes(
        write_frame(
            (attention, state),
            layers,
            tokens=3,
            namespace=KEY.namespace,
            key=KEY.digest,
            digest=digest,
        )
    )


def encrypted(ring: KeyRing, salt: str, bits: int) -> bytes:
    """The frame, sealed under an IV that counts: never to be used for anything but these two files."""
    cipher = FrameCipher(ring, salt=salt, bits=bits, random_bytes=lambda n: counting_bytes(n, seed=9))
    return bytes(cipher.seal(frame(), KEY))


def files() -> dict[str, bytes]:
    return {
        "keys.json": json.dumps(keys(), indent=1, sort_keys=True).encode() + b"\n",
        "raw-v1.kvf": frame(),
        "encrypted-v1.kvf": encrypted(UNNAMED, salt="", bits=128),
        "encrypted-v2.kvf": encrypted(NAMED, salt="tenant-\u00e4", bits=256),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the committed files")
    write = parser.parse_args().write
    different = 0
    for name, data in files().items():
        path = GOLDEN / name
        same = path.exists() and path.read_bytes() == data
        different += not same
        print(f"{name}: {len(data)} bytes, {'as committed' if same else 'DIFFERENT'}")
        if write and not same:
            path.write_bytes(data)
    return 1 if different and not write else 0


if __name__ == "__main__":
    sys.exit(main())
