"""Places in a region of bytes: best fit with coalescing, in time that does not depend on how many blocks there are.

Neighbours are found through the ends of blocks (boundary tags: Knuth, The Art of Computer Programming 1, section 2.5),
and the best fit through bitmaps of the sizes that are free, as TLSF finds its lists (Masmano, Ripoll, Crespo and Real,
"TLSF: a new dynamic memory allocator for real-time systems", ECRTS 2004). TLSF rounds sizes to classes and may refuse
what would fit; here each size is a class of its own, in a radix tree of bitmaps: taking and giving back are
O(log U) for U possible sizes, with 256 branches a level (three levels for 4 GiB in steps of 256 B).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.errors import LeaseError
from kvcore.memory import ALIGNMENT

__all__ = ["BlockAllocator", "SizeSet"]

_BITS = 8
_MASK = (1 << _BITS) - 1


class SizeSet:
    """A set of whole numbers that finds the least one from a number on, in O(log bound).

    Parameters
    ----------
    bound : int
        Numbers are in ``0..bound``.
    """

    def __init__(self, bound: int) -> None:
        self._levels: list[dict[int, int]] = [{}]  # of each level: word -> bitmap of the words below that are not empty
        while bound >> _BITS * len(self._levels):
            self._levels.append({})

    def add(self, number: int) -> None:
        """Add a number; adding it again changes nothing."""
        for level in self._levels:
            word, bit = number >> _BITS, 1 << (number & _MASK)
            before = level.get(word, 0)
            level[word] = before | bit
            if before:
                return
            number = word

    def discard(self, number: int) -> None:
        """Take a number out, if it is there."""
        for level in self._levels:
            word, bit = number >> _BITS, 1 << (number & _MASK)
            rest = level.get(word, 0) & ~bit
            if rest:
                level[word] = rest
                return
            level.pop(word, None)
            number = word

    def ceiling(self, number: int) -> int | None:
        """Return the least member that is not below a number, or None."""
        for height, level in enumerate(self._levels):
            word = number >> _BITS
            above = level.get(word, 0) >> (number & _MASK)
            if above:
                found = number + _lowest(above)
                for lower in reversed(self._levels[:height]):
                    found = found << _BITS | _lowest(lower[found])
                return found
            number = word + 1  # nothing in this word: on to the words behind it
        return None

    def greatest(self) -> int:
        """Return the greatest member, 0 for the empty set."""
        found = 0
        for level in reversed(self._levels):
            if found not in level:
                return 0
            found = found << _BITS | level[found].bit_length() - 1
        return found


def _lowest(word: int) -> int:
    return (word & -word).bit_length() - 1


class BlockAllocator:
    """Free and taken blocks of a region; the memory itself is somebody else's.

    Parameters
    ----------
    nbytes : int
        Size of the region, a multiple of `unit`.
    unit : int
        Alignment of all offsets and sizes.

    Notes
    -----
    Not thread-safe.
    """

    def __init__(self, nbytes: int, unit: int = ALIGNMENT) -> None:
        if nbytes < unit or nbytes % unit:
            raise ValueError(f"a region has one or more whole units of {unit} B, got {nbytes} B")
        self.nbytes = nbytes
        self.unit = unit
        self.free_bytes = 0
        self._start: dict[int, int] = {}  # offset of a free block -> its size
        self._end: dict[int, int] = {}  # where a free block ends -> its offset
        self._by_size: dict[int, dict[int, None]] = {}  # size -> offsets of free blocks, in the order they came
        self._sizes = SizeSet(nbytes // unit)
        self._insert(0, nbytes)
        self.free_bytes = nbytes

    @property
    def largest(self) -> int:
        """Bytes of the largest free block."""
        return self._sizes.greatest() * self.unit

    def take(self, nbytes: int) -> int | None:
        """Take the beginning of the smallest free block that is large enough.

        Parameters
        ----------
        nbytes : int
            A multiple of the unit, at least one.

        Returns
        -------
        int or None
            The offset; None if no free block is large enough.
        """
        found = self._sizes.ceiling(nbytes // self.unit)
        if found is None:
            return None
        size = found * self.unit
        offset = next(reversed(self._by_size[size]))  # the latest to be given back is the likeliest to be in a cache
        self._remove(offset, size)
        if size > nbytes:
            self._insert(offset + nbytes, size - nbytes)
        self.free_bytes -= nbytes
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Give a block back, and join it with its free neighbours.

        Raises
        ------
        LeaseError
            It begins or ends within what is free already, or lies outside the region. Nothing changes then.
        """
        if offset in self._start or offset + nbytes in self._end or not 0 <= offset <= self.nbytes - nbytes:
            raise LeaseError(f"block of {nbytes} B at {offset} is given back, but was not taken")
        self.free_bytes += nbytes
        before = self._end.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            offset, nbytes = before, nbytes + offset - before
        after = self._start.get(offset + nbytes)
        if after is not None:
            self._remove(offset + nbytes, after)
            nbytes += after
        self._insert(offset, nbytes)

    def free_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield offset and size of each free block, in no order."""
        yield from self._start.items()

    def _insert(self, offset: int, size: int) -> None:
        self._start[offset] = size
        self._end[offset + size] = offset
        offsets = self._by_size.setdefault(size, {})
        if not offsets:
            self._sizes.add(size // self.unit)
        offsets[offset] = None

    def _remove(self, offset: int, size: int) -> None:
        del self._start[offset], self._end[offset + size]
        offsets = self._by_size[size]
        del offsets[offset]
        if not offsets:
            del self._by_size[size]
            self._sizes.discard(size // self.unit)
