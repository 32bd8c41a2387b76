"""A process that stores frames until it is killed; `test_crash` reads what it said.

It says ``begin KEY VERSION`` before each put and ``done KEY VERSION`` after it. The URI comes by its standard input: a
command line is for every user of the machine to see, and a URI may hold a password.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

from kvcore.tiers.stores import StoreKey, open_store

__all__ = ["KEYS", "frame_of", "key_of", "main", "version_of"]

KEYS = 6
BATCH = 3
_HEAD = 8


def key_of(namespace: bytes, n: int) -> StoreKey:
    """Return the key of a number."""
    return StoreKey(namespace, hashlib.sha256(b"crash %d" % n).digest())


def frame_of(n: int, version: int) -> bytes:
    """Return the frame of a key and version, of a size that depends on both: the version, and what looks random."""
    seed = hashlib.sha256(b"%d/%d" % (n, version)).digest()
    nbytes = int.from_bytes(seed[:3], "little") % 400_000
    return version.to_bytes(_HEAD, "little") + hashlib.shake_128(seed).digest(nbytes)


def version_of(n: int, frame: memoryview) -> int | None:
    """Return the version that a frame of a key is, or None if it is no frame that was ever put there."""
    version = int.from_bytes(frame[:_HEAD], "little")
    return version if frame == frame_of(n, version) else None


def _puts(first: int) -> Iterator[tuple[int, int]]:
    version = first
    while True:
        for n in range(KEYS):
            yield n, version
        version += 1


def main(uri: str, namespace: bytes, first: int) -> None:
    """Put frames, one by one and in batches in turn, for ever."""
    puts = _puts(first)
    with open_store(uri) as store:
        while True:
            for count in (1, BATCH):
                turn = [next(puts) for _ in range(count)]
                _say("begin", turn)
                if count == 1:
                    ((n, version),) = turn
                    store.put(key_of(namespace, n), frame_of(n, version))
                    _say("done", turn)
                else:
                    outcomes = store.put_batch([(key_of(namespace, n), frame_of(n, version)) for n, version in turn])
                    _say("done", [one for one, outcome in zip(turn, outcomes, strict=True) if type(outcome) is int])


def _say(what: str, turn: list[tuple[int, int]]) -> None:
    sys.stdout.write("".join(f"{what} {n} {version}\n" for n, version in turn))
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.stdin.readline().rstrip("\n"), bytes.fromhex(sys.argv[1]), int(sys.argv[2]))
