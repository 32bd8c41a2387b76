"""Memory for a chunk that a frame describes."""

from __future__ import annotations

import numpy as np

from kvcore.arrays import aligned_empty
from kvcore.codecs.frame_values import GroupInfo
from kvcore.dtypes import to_dtype
from kvcore.errors import LayoutError
from kvcore.layout import Layout
from kvcore.memory import LayoutDesc
from kvcore.rows import RowLayout

__all__ = ["allocate_rows", "rows_desc"]


def allocate_rows(group: GroupInfo) -> RowLayout:
    """Allocate dense rows in host memory for all layers of a group: what its frame decodes into. See `rows_desc`."""
    desc = rows_desc(group)
    return desc.bind(aligned_empty((desc.nbytes,), np.dtype(np.uint8)))


def rows_desc(group: GroupInfo) -> LayoutDesc:
    """Return the dense layout of all layers of a group.

    Parameters
    ----------
    group : GroupInfo
        With parts K and V, one of them, C, or C and R (which are ranges of one row).

    Raises
    ------
    LayoutError
        The group has other parts.
    """
    names = [part.name for part in group.parts]
    dtypes = {part.name: to_dtype(part.dtype) for part in group.parts}
    widths = {part.name: part.width for part in group.parts}
    extents = {"L": len(group.layers), "T": group.rows}
    if names in (["C"], ["C", "R"]) and len(set(dtypes.values())) == 1:
        layout = Layout("L[C:TC]", C=sum(widths.values()), **extents)
        dtypes = {"C": dtypes["C"]}
    elif names == ["K", "V"]:
        layout = Layout("L[K:HTD,V:HTE]", H=group.head_count, D=widths["K"], E=widths["V"], **extents)
    elif names in (["K"], ["V"]):
        layout = Layout(f"L[{names[0]}:HTD]", H=group.head_count, D=widths[names[0]], **extents)
    else:
        raise LayoutError(f"parts {', '.join(names)} of a group are no rows of keys and values")
    return LayoutDesc(layout, dtypes)
