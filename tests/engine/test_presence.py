"""`longest` against its definition: try every length."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine.keys import Namespace, chunk_keys
from kvcore.engine.parts import CachePart
from kvcore.engine.presence import Presence, StoredPart, longest
from kvcore.layout import Layout
from kvcore.memory import LayoutDesc

CHUNK = 4
NAMESPACE = Namespace("m", "1", chunk_tokens=CHUNK)


def part(number: int, kind: str) -> CachePart:
    """A part of one layer: of all tokens, of a window, or of states."""
    if kind == "state":
        desc = LayoutDesc(Layout("L[page:T8]", L=1, T=1), {"page": np.dtype(np.uint8)})
        return CachePart(desc, (number,), kind="recurrent")
    desc = LayoutDesc(Layout("LTHD", L=1, T=CHUNK, H=1, D=1), {"X": np.dtype(np.uint8)})
    return CachePart(desc, (number,), window=None if kind == "all" else int(kind))


def needs(one: CachePart, stop: int) -> set[int]:
    """The chunks that hold what the next token looks at, token by token."""
    if one.recurrent:
        return {(stop - 1) // CHUNK}
    first = 0 if one.window is None else stop - one.window + 1
    return {t // CHUNK for t in range(max(first, 0), stop)}


@given(data=st.data())
def test_the_longest_prefix_that_can_be_gone_on_from(data):
    kinds = data.draw(st.lists(st.sampled_from(["all", "1", "3", "9", "state"]), min_size=1, max_size=3))
    parts = [part(i, kind) for i, kind in enumerate(kinds)]
    num_tokens = data.draw(st.integers(1, 22))
    block = data.draw(st.sampled_from([1, 2, 4]))
    keys = chunk_keys(NAMESPACE, list(range(num_tokens)), partial=data.draw(st.booleans()))
    full = num_tokens // CHUNK
    tail = num_tokens % CHUNK if len(keys) > full else 0
    stored = [StoredPart(one, parts, model_layers=9, hash="blake3") for one in parts]
    have = [data.draw(st.sets(st.sampled_from(range(len(keys))))) if keys else set() for _ in parts]
    names = {one.key(keys[i]).digest for one, there in zip(stored, have, strict=True) for i in there}
    presence = Presence(stored, keys, lambda asked: [True if key.digest in names else None for key in asked])
    found = longest(
        parts,
        presence,
        chunks=full,
        chunk_tokens=CHUNK,
        tail=tail,
        num_tokens=num_tokens,
        block_tokens=block,
    )
    ends = {key.stop: min(key.stop, num_tokens - 1) // block * block for key in keys}
    right = {
        usable
        for stop, usable in ends.items()
        if usable > 0
        and all(needs(one, usable) <= there for one, there in zip(parts, have, strict=True))
        and all(stop == usable for one in parts if one.recurrent)
    }
    assert found == max(right, default=0)
