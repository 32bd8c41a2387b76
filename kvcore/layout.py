"""Layouts as data: an axis string, bound to the tensors that it describes.

``Layout("L|KBNHD")`` says what each dim of a cache is; `Layout.bind` reads extents and strides from the tensors and
checks them against it. Nothing is ever guessed from a shape: two blocks cannot be taken for K and V, nor heads for
tokens, because only the string says which is which.

======  ======================================  ======  ==============================================
axis                                            form
======  ======================================  ======  ==============================================
``L``   layer                                   ``|``   axes before it are list levels, outermost first
``K``   the pair K, V (extent 2)                ``()``  axes fused into one dim, first one outermost
``B``   block                                   ``[]``  regions of the remaining dims: each with its own axes
``N``   token within a block                    ``1``   a dim of extent 1
``T``   token of a dense chunk                  ``*``   opaque bytes of a block (last)
``H``   KV head
``D``   channel of a head (``E``: of V's, where it differs)
``C``   channel of a packed row (MLA)
======  ======================================  ======  ==============================================

A number after an axis in a region (``L|B[v:N128,s:N4]``) gives the bytes each of its entries takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.errors import LayoutError
from kvcore.rows import RowLayout, Segment

__all__ = ["AXES", "Layout", "RowLayout", "Segment"]

AXES = {
    "L": "layer",
    "K": "K/V pair",
    "B": "block",
    "N": "token within a block",
    "T": "token",
    "H": "KV head",
    "D": "head dim",
    "E": "head dim of V",
    "C": "packed row",
}
_WIDTHS = "DEC"
_TOKEN = re.compile(r"(?P<axis>[A-Z])|(?P<unit>1)|\((?P<fused>[^()]*)\)|\[(?P<regions>[^\[\]]*)\]|(?P<opaque>\*)")
_REGION = re.compile(r"(?P<label>[A-Za-z]\w*):(?P<axes>[A-Z]+)(?P<bytes>[1-9]\d*)?")


@dataclass(frozen=True, slots=True)
class Region:
    """One region of a bracket: a label, its axes, and the bytes of an entry where the string gives them."""

    label: str
    axes: str
    nbytes: int | None


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """An axis string, parsed and validated.

    Parameters
    ----------
    text : str
        For example ``"L|KBNHD"`` (vLLM NHD), ``"KL|(BN)HD"`` (SGLang), ``"LKTHD"`` (a kvcore chunk).
    **extents : int
        Declared extents by axis, ``N=16`` say. Needed where fused axes leave them open, checked everywhere else.

    Raises
    ------
    LayoutError
        An unknown axis, an axis given twice, or a string that describes no KV cache.

    Examples
    --------
    >>> str(Layout("L|KBNHD", N=16))
    'L|KBNHD N=16'
    """

    text: str
    list_axes: str
    dims: tuple[str, ...]  # one entry a tensor dim: "B", "(BN)", "1"; the last may be "[" or "*"
    regions: tuple[Region, ...]
    extents: Mapping[str, int] = field(hash=False)

    def __init__(self, text: str, **extents: int) -> None:
        list_axes, dims, regions = _parse(text)
        for name, value in (
            ("text", text),
            ("list_axes", list_axes),
            ("dims", dims),
            ("regions", regions),
            ("extents", dict(extents)),
        ):
            object.__setattr__(self, name, value)
        self._validate()

    def __str__(self) -> str:
        declared = "".join(f" {axis}={extent}" for axis, extent in sorted(self.extents.items()))
        return self.text + declared

    @property
    def axes(self) -> str:
        """All axes outside regions, list levels first, then dims in order."""
        return self.list_axes + "".join(d.strip("()") for d in self.dims if d not in "1[*")

    @property
    def paged(self) -> bool:
        """Whether tokens live in blocks (``B``) rather than in one dense run (``T``)."""
        return "B" in self.axes + "".join(r.axes for r in self.regions)

    @property
    def opaque(self) -> bool:
        """Whether blocks are bytes without structure (``*``)."""
        return self.dims[-1:] == ("*",)

    @property
    def parts(self) -> tuple[str, ...]:
        """What a token has in a layer: K and V, regions by label, C, ``page`` (for ``*``), or X if nameless."""
        if self.regions:
            return tuple(r.label for r in self.regions)
        if "K" in self.axes:
            return ("K", "V")
        return ("page",) if self.opaque else ("C",) if "C" in self.axes else ("X",)

    def part_axes(self, part: str) -> str:
        """Return all axes that a part has, its region's included."""
        return self.axes + next((r.axes for r in self.regions if r.label == part), "")

    def _validate(self) -> None:
        def fail(why: str) -> None:
            raise LayoutError(f"layout {self.text!r}: {why}")

        axes = self.axes
        for region in self.regions or (None,):
            seen = axes + (region.axes if region else "")
            where = f" in region {region.label}" if region else ""
            for axis in seen:
                if axis not in AXES:
                    known = ", ".join(f"{a} ({n})" for a, n in AXES.items())
                    fail(f"unknown axis {axis!r}{where}; axes are {known}")
                if seen.count(axis) > 1:
                    fail(f"axis {axis} ({AXES[axis]}) is given twice{where}")
            widths = [a for a in seen if a in _WIDTHS]
            sized = region is not None and region.nbytes is not None
            if self.opaque:
                if sorted(seen.replace("L", "")) not in (["B"], ["T"]):
                    fail("opaque pages (*) have layers and blocks only, as in 'L|B*' (or 'LT*' for a chunk of them)")
                continue
            if ("B" in seen) != ("N" in seen):
                fail(f"B (block) and N (token within a block) come together{where}; a dense chunk has T instead")
            if ("T" in seen) == ("B" in seen):
                fail(f"tokens are either paged (B and N) or dense (T){where}, one of the two")
            if sized and widths:
                fail(f"region {region.label if region else ''} has a size in bytes and a width {widths[0]}; give one")
            if not sized and len(widths) != 1:
                fail(f"one axis must be the row's width (D, E for V, or C){where}, got {widths or 'none'}")
            if "C" in seen and set(seen) & set("HK"):
                fail("a packed row (C) has neither heads (H) nor a K/V pair (K)")
        if self.paged and any("B" not in axes + r.axes for r in self.regions):
            fail("some regions are paged (B and N) and some dense (T); all are one or the other")
        labels = [r.label for r in self.regions]
        if len(set(labels)) != len(labels):
            fail(f"region labels must differ, got {', '.join(labels)}")
        if "K" in axes and self.regions and set(labels) != {"K", "V"}:
            fail(f"regions under a K axis are K and V, one side each, got {', '.join(labels)}")
        for axis, extent in self.extents.items():
            if axis not in AXES or all(axis not in self.part_axes(p) for p in self.parts):
                fail(f"extent {axis}={extent} is declared, but the layout has no axis {axis}")
            if not isinstance(extent, int) or extent < (0 if axis in "BTL" else 1):
                fail(f"extent {axis}={extent} of the {AXES[axis]} axis is not a positive integer")
        if self.extents.get("K", 2) != 2:
            fail(f"the K axis is the pair K, V: its extent is 2, not {self.extents['K']}")

    def bind(self, tensors: Any, *, dtypes: Mapping[str, object] | None = None, **extents: int) -> RowLayout:
        """Bind to memory: read extents and strides from the tensors, check them, return the addresses.

        Parameters
        ----------
        tensors
            One array, or (nested) sequences of them where the string has list levels. NumPy, torch on any device,
            DLPack, or `ArrayRef.at` for raw pointers. Nothing is copied, and the result keeps them alive.
        dtypes : mapping of str to dtype, optional
            Element type by part, where it is not the tensors': caches stored as uint8 that hold fp8, or regions of
            different types.
        **extents : int
            More declared extents.

        Raises
        ------
        LayoutError
            The tensors do not fit; the message names the axis, what was given and what would fit.
        """
        from kvcore.binding import bind  # the binder needs Layout; importing it here keeps the two files apart

        return bind(Layout(self.text, **{**self.extents, **extents}) if extents else self, tensors, dtypes or {})


def _parse(text: str) -> tuple[str, tuple[str, ...], tuple[Region, ...]]:
    head, bar, tail = text.rpartition("|")
    if "|" in head:
        raise LayoutError(f"layout {text!r}: one '|' at most separates list levels from dims")
    if bar and (not head or not head.isalpha() or not set(head) <= set("LK")):
        raise LayoutError(f"layout {text!r}: list levels before '|' are L and K, got {head!r}")
    dims: list[str] = []
    regions: tuple[Region, ...] = ()
    position = 0
    while position < len(tail):
        match = _TOKEN.match(tail, position)
        if match is None:
            raise LayoutError(
                f"layout {text!r}: cannot read {tail[position:]!r} at position {len(head + bar) + position}"
            )
        if regions or dims[-1:] == ["*"]:
            raise LayoutError(f"layout {text!r}: nothing comes after {dims[-1]!r}... it takes all remaining dims")
        position = match.end()
        if match["fused"] is not None:
            if len(match["fused"]) < 2 or not match["fused"].isalpha():
                raise LayoutError(f"layout {text!r}: ({match['fused']}) fuses nothing; name two or more axes")
            dims.append(match.group())
        elif match["regions"] is not None:
            regions = tuple(_parse_region(text, part) for part in match["regions"].split(","))
            dims.append("[")
        else:
            dims.append(match.group())
    if not dims:
        raise LayoutError(f"layout {text!r}: no dims; a KV cache has at least tokens and a width, as in 'LKTHD'")
    return head, tuple(dims), regions


def _parse_region(text: str, part: str) -> Region:
    match = _REGION.fullmatch(part.strip())
    if match is None:
        raise LayoutError(
            f"layout {text!r}: a region is LABEL:AXES or LABEL:AXES<bytes>, as in K:DN or v:N128, got {part!r}"
        )
    return Region(match["label"], match["axes"], int(match["bytes"]) if match["bytes"] else None)


def width_of(part_axes: str) -> str:
    """Return the axis of a part that is its row's width: D, E, C, or '' for sizes in bytes."""
    return next((a for a in part_axes if a in _WIDTHS), "")
