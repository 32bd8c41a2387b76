"""What the scheduler side of the vLLM connector tells the workers, once a step.

Plain values that pickle: vLLM carries them to every worker of the engine in its own message. They hold copies, so
that nothing which the scheduler does later changes what a worker reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvcore.engine.keys import ChunkKey

__all__ = ["BlockTables", "Load", "Save", "StepMetadata"]

BlockTables: TypeAlias = tuple[list[int], ...]
"""The block ids of a request, by cache group, from its first token on."""


@dataclass(frozen=True, slots=True)
class Load:
    """KV to bring into the blocks of a request.

    Parameters
    ----------
    request : str
    keys : tuple of ChunkKey
        The chunks from token 0 up to the one that holds token ``stop - 1``, in order.
    start, stop : int
        Tokens ``[start, stop)`` are wanted; `stop` is a multiple of every group's block size.
    blocks : tuple of list of int
        The whole block table of each group; it reaches `stop` at least.
    num_tokens : int
        Tokens of the request as it was looked up; more than `stop`, for one at least is computed.
    asynchronous : bool
        Whether the request waits for it outside of the batch, so that steps go on meanwhile.
    """

    request: str
    keys: tuple[ChunkKey, ...]
    start: int
    stop: int
    blocks: BlockTables
    num_tokens: int
    asynchronous: bool


@dataclass(frozen=True, slots=True)
class Save:
    """Chunks of a request whose KV is complete when this step's forward pass is: in it, or in steps before.

    Parameters
    ----------
    request : str
    keys : tuple of ChunkKey
        In order; consecutive chunks as a rule. What is stored already, a worker leaves out.
    blocks : tuple of list of int
        The whole block table of each group; an entry may be the null block, where a window has slid past.
    computed : int
        All tokens from this one on got their KV from the model since the request's last `Save`, or since it was started
        or resumed: whatever was in their blocks before has been overwritten. Those before have it from earlier steps,
        from vLLM's own prefix cache, or from a load.
    total : int
        Tokens of the request that have their KV after this step.
    """

    request: str
    keys: tuple[ChunkKey, ...]
    blocks: BlockTables
    computed: int
    total: int


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """All that a step asks of the workers.

    Parameters
    ----------
    loads, saves : tuple
        At most one `Load` and one `Save` of each request.
    """

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.loads or self.saves)
