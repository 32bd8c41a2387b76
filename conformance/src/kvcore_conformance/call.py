"""One call of an op, as a value: it can be copied with all its memory, run checked or planned, and written out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore import Backend
from kvcore.hookspecs import op_specs
from kvcore_conformance.arena import Bound, arenas, clone
from kvcore_conformance.placement import Placement

__all__ = ["Call", "first_dtype"]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An op and the arguments of the method of `kvcore.Backend`, arrays in arenas.

    Parameters
    ----------
    op : str
    args : tuple
    kwargs : mapping
        `out` among them, where the call writes into given memory.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def out(self) -> Any:
        """What was given as `out`."""
        return self.kwargs.get("out")

    def clone(self) -> Call:
        """Copy the call with all its memory."""
        copies: dict[int, Any] = {}
        return Call(self.op, clone(self.args, copies), clone(dict(self.kwargs), copies))

    def memory(self) -> list[Any]:
        """Return its arenas, in order of appearance."""
        return arenas((self.args, dict(self.kwargs)))

    def without_out(self) -> Call:
        """The same call, letting the backend allocate; unpacking and converting are told the type instead."""
        kwargs = {k: v for k, v in self.kwargs.items() if k != "out"}
        if "dtype" in inspect.signature(getattr(Backend, self.op)).parameters:
            kwargs["dtype"] = str(self.out.dtype)
        return Call(self.op, self.args, kwargs)

    def run(self, backend: Backend) -> tuple[Any, bool]:
        """Call the checked op and wait for its status; return its result, and whether that is `out` itself."""
        where = Placement(backend, self.memory())
        kwargs = {name: where.over(value) for name, value in self.kwargs.items()}
        try:
            result = getattr(backend, self.op)(*where.over(self.args), **kwargs)
            backend.runtime.check()
        finally:
            where.back()
        return (result, True) if result is kwargs.get("out") else (where.home(result), False)

    def launch(self) -> Launch:
        """Take the call apart as a plan wants it: what is static, and what each launch is given."""
        given = inspect.signature(getattr(Backend, self.op)).bind(None, *self.args, **self.kwargs).arguments
        hook = inspect.signature(op_specs()[self.op]).parameters
        for name in ("src", "out"):  # gather and scatter take sequences of chunks
            value = given.get(name)
            if isinstance(value, Bound) and self.op != "convert_layout" and not value.rows.paged:
                given[name] = (value,)
        positional = [given[n] for n, p in hook.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        keywords = {n: given[n] for n, p in hook.items() if p.kind is inspect.Parameter.KEYWORD_ONLY and n in given}
        arrays = {n: v for n, v in keywords.items() if n == "out" or arenas(v)}
        static = {n: v for n, v in keywords.items() if n not in arrays}
        paged = [v for v in (given.get("src"), given.get("out")) if isinstance(v, Bound) and v.rows.paged]
        layout = paged[0] if paged else None
        return Launch(static, positional, arrays, layout, None if layout is not None else first_dtype(self))

    def run_plan(self, backend: Backend) -> tuple[Any, bool]:
        """Plan the op and launch it with its arrays in the backend's form; return what `run` does."""
        how = self.launch()
        layout = None if how.layout is None else how.layout.rows
        plan = backend.plan(self.op, dtype=how.dtype, layout=layout, **how.static)
        workspace = backend.runtime.empty((plan.workspace_bytes,), np.dtype(np.uint8)) if plan.workspace_bytes else None
        where = Placement(backend, self.memory())
        arrays = {name: where.over(value) for name, value in how.arrays.items()}
        try:
            result = plan(*map(where.over, how.positional), **arrays, workspace=workspace)
            backend.runtime.check()
        finally:
            where.back()
        return result, result is arrays["out"]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A planned call: arguments of `Backend.plan`, and of the plan."""

    static: dict[str, Any]
    positional: list[Any]
    arrays: dict[str, Any]
    layout: Bound | None
    dtype: str | None


def first_dtype(call: Call) -> str | None:
    """Return the element type by which a backend's declared support is judged, None where it is bytes."""
    if call.op in ("copy_batch", "digest"):
        return None
    if call.op == "dequantize":
        return str(call.out.dtype)
    first = call.args[0]
    if isinstance(first, Bound):
        return first.rows.dtypes
    return str(first.dtype) if isinstance(first, np.ndarray) else None
