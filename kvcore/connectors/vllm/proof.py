"""A proof, at start, that vLLM's CPU attention lays K and V out as the table of layouts says.

On a CPU, K is stored transposed, and how depends on the instruction set that vLLM chose. So vLLM's own operator writes
known values into a scratch cache of the same shape, type and instruction set, and every element must be found where
the layout has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.connectors.vllm.layouts import BoundPart
from kvcore.errors import LayoutError
from kvcore.layout import Layout

__all__ = ["prove_transposed"]

_BLOCKS = 2


def prove_transposed(bound: BoundPart, tensor: Any, module: Any) -> None:
    """Hold the layout of a part to what vLLM writes.

    Parameters
    ----------
    bound : BoundPart
        Of interior ``"transposed"``.
    tensor : torch.Tensor
        The cache of one of its layers, ``[blocks, heads, block tokens, D + E]``; only its shape and type are used.
    module : layer
        vLLM's attention module of this layer: it knows the instruction set and the scales.

    Raises
    ------
    LayoutError
        An element lies elsewhere, or vLLM has not told which instruction set it uses.
    """
    import torch
    from vllm import _custom_ops

    isa = getattr(module, "isa", None)
    if not isa:
        raise LayoutError(f"layer {bound.layer_names[0]!r} does not say which instruction set its attention uses")
    heads, tokens, content = (int(n) for n in tensor.shape[1:])
    width = bound.rows.segment("K")[0].width
    cache_dtype = str(getattr(module, "kv_cache_dtype", "auto"))
    generator = torch.Generator().manual_seed(1)
    count = _BLOCKS * tokens

    def values(channels: int) -> Any:  # small integers: every element type holds them, e4m3 too
        drawn = torch.randint(-8, 9, (count, heads, channels), generator=generator)
        return drawn.to(tensor.dtype if tensor.dtype.is_floating_point else torch.bfloat16)

    key, value = values(width), values(content - width)
    scratch = torch.zeros((_BLOCKS, heads, tokens, content), dtype=tensor.dtype)
    halves = scratch.view(_BLOCKS, heads, 2 * tokens, -1).chunk(2, dim=2)
    slots = torch.randperm(count, generator=generator)
    _custom_ops.cpu_attn_reshape_and_cache(
        key, value, halves[0], halves[1], slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=cache_dtype
    )
    extents = {"N": tokens, "D": width} | ({"E": content - width} if content != 2 * width else {})
    dtypes = {part: bound.rows.segment(part)[0].dtype for part in bound.rows.parts}
    rows = Layout(bound.rows.text).bind([scratch], dtypes=dtypes, **extents)
    for part, written in (("K", key), ("V", value)):
        found = rows.array(part, 0).reshape(count, heads, -1).astype(np.float32)
        if not np.array_equal(found[slots.numpy()], written.float().numpy()):
            raise LayoutError(
                f"vLLM's CPU attention with instruction set {isa!r} does not store {part} of {tensor.dtype} as "
                f"{bound.rows.text} has it, for {heads} heads of {width} in blocks of {tokens}; kvcore cannot cache "
                "here. Another --block-size, --dtype or --kv-cache-dtype may lead to an instruction set that it can"
            )
