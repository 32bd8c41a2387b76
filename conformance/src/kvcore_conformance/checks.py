"""Run a call on a backend, and compare everything it may or may not have touched with what the oracle leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore import Backend
from kvcore.dtypes import dtype_name
from kvcore.errors import CorruptFrameError, KVCoreError, UnsupportedOpError
from kvcore.ops import fetch, on_host, send
from kvcore_conformance.arena import Bound, offset_in, root
from kvcore_conformance.call import Call, first_dtype
from kvcore_conformance.oracle import ORACLE
from kvcore_conformance.snippet import snippet

__all__ = ["ConformanceFailure", "Subject"]


class ConformanceFailure(AssertionError):
    """A backend differs from the specification.

    Parameters
    ----------
    message : str
        Begins with the op's name.
    source : str
        Python source that reproduces it.
    """

    def __init__(self, message: str, source: str) -> None:
        super().__init__(message)
        self.source = source


class Subject:
    """The backend under test, as the tests see it.

    Parameters
    ----------
    backend : Backend
        Opened with ``fallback="error"``.
    name : str
        As ``--kvcore-backend`` was given.
    """

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend = backend
        self.name = name

    @property
    def ops(self) -> Backend:
        """The backend for arrays in host memory: itself, or staged where it computes on a device."""
        return on_host(self.backend)

    def put(self, array: Any) -> Any:
        """Return a contiguous array of the host where the backend computes: itself, or a copy on the device."""
        return array if "cpu" in self.backend.spec.device_types else send(self.backend, array)

    def get(self, array: Any) -> Any:
        """Return what `put` gave as an array of the host."""
        return array if isinstance(array, np.ndarray) else fetch(self.backend, array)

    @property
    def is_reference(self) -> bool:
        """Whether it is cpu_ref itself, which cannot be compared with cpu_ref."""
        return self.backend.name == "cpu_ref"

    def require(self, op: str, *, dtype: object = None, layout: str | None = None) -> None:
        """Skip the test if the backend does not claim this."""
        why = self.backend.refusal(op, dtype=dtype, layout=layout)
        if why is not None:
            pytest.skip(why)

    def check(self, op: str, *args: Any, reference: Backend | None = None, **kwargs: Any) -> None:
        """Call an op with `out` given; all memory must end up as the oracle (or a reference) leaves it.

        Where the oracle raises, the backend must raise the same error and write nothing; before a `CorruptFrameError`
        nothing outside `out`.

        Raises
        ------
        ConformanceFailure
        """
        self._compare(Call(op, args, kwargs), reference, "checked")

    def check_plan(self, op: str, *args: Any, **kwargs: Any) -> None:
        """The same through a plan."""
        self._compare(Call(op, args, kwargs), None, "plan")

    def check_fresh(self, op: str, *args: Any, **kwargs: Any) -> None:
        """Call an op with and without `out`: the array it allocates has the shape, dtype and bytes of the given one."""
        call = Call(op, args, kwargs)
        wanted = call.clone()
        ORACLE[op](*wanted.args, **wanted.kwargs)
        expected = wanted.out.rows if isinstance(wanted.out, Bound) else wanted.out
        fresh = call.without_out()
        result, _ = self._run(fresh, fresh.clone(), "checked", [m.tobytes() for m in fresh.memory()])
        for want, have in zip(_parts(expected), _parts(result), strict=True):
            facts = {"result": want.tobytes(), "shape": want.shape, "dtype": dtype_name(want.dtype)}
            have = np.asarray(have)
            if (have.shape, have.dtype) != (want.shape, want.dtype):
                why = f"returned {have.dtype} {list(have.shape)} where {want.dtype} {list(want.shape)} is specified"
                raise self.failure(op, why, fresh, facts)
            if have.tobytes() != want.tobytes():
                raise self.failure(op, f"without out, {_difference(want, have)}", fresh, facts)

    def check_raises(self, error: type[KVCoreError], op: str, *args: Any, **kwargs: Any) -> None:
        """Call an op with bad arguments: it must raise this error, and leave all memory as it was."""
        self._expect_error(Call(op, args, kwargs), error, "checked")

    def _compare(self, call: Call, reference: Backend | None, how: str) -> None:
        wanted = call.clone()
        try:
            if reference is None:
                ORACLE[call.op](*wanted.args, **wanted.kwargs)
            else:
                wanted.run(reference)
        except KVCoreError as error:
            self._expect_error(call, type(error), how)
            return
        expected = [m.tobytes() for m in wanted.memory()]
        got = call.clone()
        _, returned_out = self._run(call, got, how, expected)
        if not returned_out:
            raise self.failure(call.op, "did not return its out", call, expected, how)
        for number, (memory, want) in enumerate(zip(got.memory(), expected, strict=True)):
            if memory.tobytes() != want:
                why = _where(got, number, np.frombuffer(want, np.uint8))
                raise self.failure(call.op, why, call, expected, how)

    def _run(self, call: Call, got: Call, how: str, expected: list[bytes]) -> tuple[Any, bool]:
        """Run a copy of a call; an error that the specification knows nothing of is a failure."""
        try:
            return got.run_plan(self.backend) if how == "plan" else got.run(self.backend)
        except UnsupportedOpError:
            self.require(call.op, dtype=first_dtype(call), layout=_layout(call))
            raise
        except Exception as error:  # a backend may raise anything; that is what the report must show
            why = f"raised {type(error).__name__} where the specification has a result: {error}"
            raise self.failure(call.op, why, call, expected, how) from error

    def _expect_error(self, call: Call, error: type[BaseException], how: str) -> None:
        got = call.clone()
        before = [m.tobytes() for m in got.memory()]
        try:
            if how == "plan":
                got.run_plan(self.backend)
            else:
                got.run(self.backend)
        except error:
            pass
        except UnsupportedOpError:
            self.require(call.op, dtype=first_dtype(call), layout=_layout(call))
            raise
        except Exception as other:  # as above
            why = f"raised {type(other).__name__} where {error.__name__} is specified: {other}"
            raise self.failure(call.op, why, call, error, how) from other
        else:
            raise self.failure(call.op, f"accepted what must raise {error.__name__}", call, error, how)
        if error is CorruptFrameError:  # found on the way: what was decoded until then may be there
            got.out[...] = call.out
        for number, (memory, want) in enumerate(zip(got.memory(), before, strict=True)):
            if memory.tobytes() != want:
                why = f"wrote before it raised {error.__name__}: {_where(got, number, np.frombuffer(want, np.uint8))}"
                raise self.failure(call.op, why, call, error, how)

    def failure(self, op: str, why: str, call: Call, expected: Any, how: str = "checked") -> ConformanceFailure:
        """Build the failure of a call."""
        planned = " (planned)" if how == "plan" else ""
        on_host = "cpu" in self.backend.spec.device_types
        source = snippet(self.name, call, expected, how=how, on_host=on_host)
        return ConformanceFailure(f"{op}{planned}: {why}", source)


def _layout(call: Call) -> str | None:
    if call.op not in ("gather_paged", "scatter_paged"):
        return None
    cache = call.args[0] if call.op == "gather_paged" else call.out
    return str(cache.text)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return [value]
    if hasattr(value, "planes"):
        return [value.array(part, layer) for part, layer in value.planes()]
    return [part for part in value if part is not None]


def _difference(want: Any, have: Any) -> str:
    flat_want, flat_have = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (want, have))
    item = want.dtype.itemsize
    at = int(np.flatnonzero(flat_want != flat_have)[0]) // item
    index = [int(i) for i in np.unravel_index(at, want.shape)] if want.shape else []
    return f"element {index} is {_show(have.flat[at])} where {_show(want.flat[at])} is specified"


def _show(element: Any) -> str:
    return f"{element!r} (0x{element.tobytes()[::-1].hex()})"


def _where(got: Call, number: int, want: Any) -> str:
    """Say which array, and which element of it, holds the first byte that differs."""
    memory = got.memory()[number].view(np.uint8)
    at = int(np.flatnonzero(memory != want)[0])
    named = [(f"argument {i}", a) for i, a in enumerate(got.args)] + list(got.kwargs.items())
    for name, value in named:
        several = _arrays(value)
        for i, array in enumerate(several):
            if root(array) is not got.memory()[number]:
                continue
            covered = _offsets(array)
            index = np.argwhere((covered <= at) & (at < covered + array.dtype.itemsize))
            if index.size:
                position = tuple(int(i) for i in index[0])
                ideal = np.ndarray(array.shape, array.dtype, want.copy(), offset_in(array, root(array)), array.strides)
                which = name if len(several) == 1 else f"{name}[{i}]"
                role = "" if name in ("out", "digests") else " (which is input)"
                found, wanted = _show(array[position]), _show(ideal[position])
                return f"{which}{role} {list(position)} is {found} where {wanted} is specified"
    owner = next((name for name, value in named for a in _arrays(value) if root(a) is got.memory()[number]), "?")
    return f"byte {at} of the memory around {owner} was written; it belongs to no element"


def _arrays(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, Bound):
        return _arrays(value.tensors)
    return [a for item in value for a in _arrays(item)] if isinstance(value, (list, tuple)) else []


def _offsets(array: Any) -> Any:
    """Return the byte offset of every element in the array's arena."""
    offsets = np.full(array.shape, offset_in(array, root(array)), np.int64)
    for axis, (extent, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        offsets += (np.arange(extent) * stride).reshape(-1, *(1,) * (array.ndim - axis - 1))
    return offsets
