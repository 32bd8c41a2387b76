"""Where the twins run: what an op's launcher asks of whoever owns the stream. Imports no Triton."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Owner", "Queue", "aligned", "power_of_two", "shape_of_tile", "tiles_of"]


class Queue(ABC):
    """The launches of one op, in order, on one stream.

    Attributes
    ----------
    status : int
        Address of the stream's status words (``abi.h``).
    block : int
        How many elements a program should have: registers are the limit on a GPU; the interpreter has none, and costs
        by the program.
    tiles : int
        How many tiles a program should decode: as many as it has groups of 32 threads.
    programs : int
        How many programs keep it busy: a reduction into few results is cut up until there are as many.
    """

    status: int
    block: int = 1024
    tiles: int = 4
    programs: int = 512

    @abstractmethod
    def launch(self, kernel: Any, programs: int, *args: int, warps: int = 4, **constants: Any) -> None:
        """Queue a kernel.

        Parameters
        ----------
        kernel : function under ``triton.jit``
        programs : int
            Programs of the grid's one dim; none are launched if it is 0.
        *args : int
            The kernel's arguments, all int64.
        warps : int
        **constants
            Its ``tl.constexpr`` arguments.
        """

    @abstractmethod
    def upload(self, *tables: npt.NDArray[Any]) -> tuple[int, ...]:
        """Return addresses at which the kernels of this op find copies of some tables, each aligned to 16 bytes."""

    @abstractmethod
    def resident(self, key: object, make: Callable[[], tuple[npt.NDArray[Any], ...]]) -> tuple[int, ...]:
        """Return addresses of copies of what `make` returns; they are made once for a `key`, and kept beyond the op."""

    @abstractmethod
    def scratch(self, nbytes: int) -> int:
        """Return the address of memory for this op, aligned to 16 bytes, with any content."""

    @abstractmethod
    def close(self, op: str, keep: Any, subject: Any = None) -> None:
        """End the op.

        Parameters
        ----------
        op : str
        keep : object
            What must live until the stream has passed.
        subject : object, optional
            What positions of errors count in, see `kvcore.kernels.library.status_error`.

        Raises
        ------
        KVCoreError
            Where ops are done when they return: what this one has found.
        """


class Owner(ABC):
    """A device or the interpreter, as `kvcore.kernels.triton.ops.TritonOps` takes it."""

    @abstractmethod
    def open(self, op: str, stream: Any) -> Queue:
        """Begin an op on a stream; None is the default one.

        Raises
        ------
        ConfigError
            `stream` is none of this owner's.
        """


def power_of_two(count: int) -> int:
    """Return the least power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()


def shape_of_tile(outer: int, inner: int, block: int) -> dict[str, int]:
    """Return rows and columns of a tile of about `block` elements, for `outer` rows of `inner`."""
    columns = min(power_of_two(inner), block)
    return {"rows": min(block // columns, power_of_two(outer)), "columns": columns}


def tiles_of(outer: int, inner: int, shape: dict[str, int]) -> int:
    """Return how many tiles of a shape cover rows."""
    return -(-outer // shape["rows"]) * -(-inner // shape["columns"])


def aligned(tables: tuple[npt.NDArray[Any], ...], alignment: int = 16) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Return the bytes of several tables in one, and where each begins: at multiples of `alignment`."""
    starts, size = [], 0
    for table in tables:
        starts.append(size)
        size += -(-table.nbytes // alignment) * alignment
    joined = np.zeros(size, np.uint8)
    for start, table in zip(starts, tables, strict=True):
        joined[start : start + table.nbytes] = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
    return joined, starts
