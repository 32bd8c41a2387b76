"""What of a model's KV is stored by itself: cache groups, and the layers and heads of a rank.

A chunk of tokens is one object for each `CachePart`. A part that is all of a model's KV has the chunk's own key, so
that engines share it whatever their memory looks like; others derive theirs from the layers and heads that they hold,
never from a rank's number, so that another tensor-parallel degree finds them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvcore.cachespec import KINDS
from kvcore.engine.keys import HASHES, ChunkKey, Namespace
from kvcore.errors import ConfigError, LayoutError
from kvcore.layout import Layout
from kvcore.memory import KVMeta, LayoutDesc, MemoryPlan

__all__ = ["CachePart", "PartKeys", "Shard", "check_parts", "shardings", "whole_model"]

_PART_TAG = b"kvcore part 1\n"
_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class CachePart:
    """What of a model's KV is one stored object per chunk.

    Parameters
    ----------
    desc : LayoutDesc
        The dense chunk: of the namespace's chunk tokens, or of one page for recurrent states.
    layers : tuple of int
        The model's layers that are held, ascending.
    heads : (int, int), optional
        Half-open range of the model's KV heads; None where there are none to share out (MLA, recurrent states).
    all_heads : int
        KV heads of the model in these layers.
    kind : {"attention", "recurrent", "aux"}
        Of recurrent states a chunk holds the one at its end.
    window : int, optional
        Tokens that attention looks back, the token itself among them; None for all.

    Raises
    ------
    LayoutError
        A declaration that contradicts itself.
    """

    desc: LayoutDesc
    layers: tuple[int, ...]
    heads: tuple[int, int] | None = None
    all_heads: int = 0
    kind: str = "attention"
    window: int | None = None

    def __post_init__(self) -> None:
        extents = self.desc.layout.extents
        if not self.layers or any(a >= b for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise LayoutError(f"a part has layers, ascending, at least one; got {self.layers}")
        if extents.get("L", 1) != len(self.layers):
            raise LayoutError(f"{self.desc.layout} has {extents.get('L', 1)} layers, {len(self.layers)} are named")
        if self.kind not in KINDS:
            raise LayoutError(f"unknown kind of cache {self.kind!r}; known are {', '.join(KINDS)}")
        if self.window is not None and self.window < 1:
            raise LayoutError(f"a window has at least one token, got {self.window}")
        if self.heads is not None:
            start, stop = self.heads
            if not 0 <= start < stop <= self.all_heads:
                raise LayoutError(f"KV heads {start}:{stop} do not lie within the model's {self.all_heads}")
            if extents.get("H", 1) != stop - start:
                raise LayoutError(f"{self.desc.layout} has {extents.get('H', 1)} heads, {start}:{stop} are named")

    @property
    def recurrent(self) -> bool:
        """Whether a chunk holds a state, and not its tokens."""
        return self.kind == "recurrent"

    @property
    def prefix(self) -> bool:
        """Whether every chunk of a prefix is needed, and each is of use by itself."""
        return self.window is None and not self.recurrent

    def needed(self, stop: int, chunk_tokens: int) -> range:
        """Return which chunks are needed to go on with token `stop`."""
        last = -(-stop // chunk_tokens)
        if self.recurrent:
            return range(max(last - 1, 0), last)
        first = 0 if self.window is None else min(max(stop - self.window + 1, 0), stop)
        return range(first // chunk_tokens if first < stop else last, last)

    def describe(self, tokens: int) -> LayoutDesc:
        """Return the dense chunk of as many tokens: the last chunk of a prompt may have fewer."""
        return self.desc if self.recurrent or tokens == self.desc.tokens else _shorter(self.desc, tokens)

    def plan(self, key: ChunkKey, namespace: Namespace, group: int = 0) -> MemoryPlan:
        """Return what an object of this part looks like in memory."""
        first, last = self.layers[0], self.layers[-1] + 1
        meta = KVMeta(
            base_position=key.start,
            layers=(first, last) if last - first == len(self.layers) else None,
            heads=self.heads,
            rope=None if self.recurrent else namespace.rope,
            group=group,
            namespace=key.namespace,
        )
        return MemoryPlan.of([self.describe(key.stop - key.start)], meta)


class PartKeys:
    """What the chunks of a part are called.

    Parameters
    ----------
    part : CachePart
    whole : bool
        The part is all that a model has.
    hash : str
        The namespace's.
    """

    def __init__(self, part: CachePart, *, whole: bool, hash: str) -> None:  # noqa: A002 - the namespace's word
        low, high = part.heads or (0, 0)
        window = 0 if part.window is None else part.window
        # The window is no property of the bytes; but two groups of one range of layers and heads differ by it.
        numbers = (len(part.layers), *part.layers, low, high, part.all_heads, KINDS.index(part.kind), window)
        self._suffix = None if whole else _PART_TAG + b"".join(map(_U32.pack, numbers))
        self._digest = HASHES[hash]

    def __call__(self, chunk: ChunkKey) -> ChunkKey:
        """Return the key of this part of a chunk."""
        if self._suffix is None:
            return chunk
        parent = None if chunk.parent is None else self._digest(chunk.parent + self._suffix)
        return replace(chunk, digest=self._digest(chunk.digest + self._suffix), parent=parent)


@dataclass(frozen=True, slots=True)
class Shard:
    """A stored object that holds some of a part's heads, or more than these.

    Parameters
    ----------
    part : CachePart
        What the object is.
    mine, theirs : (int, int), optional
        The same heads, counted within the part that is wanted, and within the object; None for all of both.
    """

    part: CachePart
    mine: tuple[int, int] | None = None
    theirs: tuple[int, int] | None = None


def shardings(part: CachePart) -> Iterator[tuple[Shard, ...]]:
    """Yield the ways in which a part may have been stored: as it is; then as ranks of other degrees would have.

    A rank of a tensor-parallel degree holds as many consecutive heads as any other of that degree.
    """
    yield (Shard(part),)
    if part.heads is None or "H" not in part.desc.layout.extents:  # a page that is a rank's share cannot be taken apart
        return
    low, high = part.heads
    for degree in range(1, part.all_heads + 1):
        size = part.all_heads // degree
        if part.all_heads % degree or size == high - low:
            continue
        yield tuple(_shard(part, (start, start + size)) for start in range(low // size * size, high, size))


def whole_model(part: CachePart, model_layers: int, parts: Sequence[CachePart]) -> bool:
    """Whether a part is all of a model's KV."""
    all_heads = part.heads is None or part.heads == (0, part.all_heads)
    return len(parts) == 1 and part.layers == tuple(range(model_layers)) and all_heads and part.prefix


def check_parts(namespace: Namespace, parts: Sequence[CachePart], room: int) -> None:
    """Raise `ConfigError` unless there are parts, different, of the namespace's chunks, and `room` bytes take all."""
    if not parts:
        raise ConfigError("an engine has at least one part of KV to store")
    for part in parts:
        if not part.recurrent and part.desc.tokens != namespace.chunk_tokens:
            raise ConfigError(
                f"{part.desc.layout} has {part.desc.tokens} tokens, a chunk of the namespace {namespace.chunk_tokens}"
            )
    names = [(part.layers, part.heads, part.kind, part.window) for part in parts]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(
                f"parts {names.index(name)} and {number} both are layers {list(name[0])}, heads {name[1]}, of kind "
                f"{name[2]}: what one stores would pass for the other's; make them one part"
            )
    size = sum(MemoryPlan.of([part.desc]).size for part in parts)
    if size > room:
        raise ConfigError(
            f"a chunk of {namespace.chunk_tokens} tokens has {size} B, and the host memory of the tiers {room} B: "
            "nothing could be cached; give them more, or make chunks smaller"
        )


def _shard(part: CachePart, held: tuple[int, int]) -> Shard:
    low, high = part.heads or (0, 0)
    both = max(low, held[0]), min(high, held[1])
    desc = LayoutDesc(_with(part.desc.layout, H=held[1] - held[0]), part.desc.dtypes)
    mine = both[0] - low, both[1] - low
    theirs = both[0] - held[0], both[1] - held[0]
    return Shard(replace(part, desc=desc, heads=held), mine, theirs)


@functools.lru_cache(maxsize=1024)
def _shorter(desc: LayoutDesc, tokens: int) -> LayoutDesc:
    return LayoutDesc(_with(desc.layout, T=tokens), desc.dtypes)


def _with(layout: Layout, **extents: int) -> Layout:
    return Layout(layout.text, **{**layout.extents, **extents})
