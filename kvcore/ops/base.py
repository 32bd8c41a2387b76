"""What the checked ops share: resolving an implementation, and turning arguments into what implementations take."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvcore.arrays import ArrayRef, overlap, same_view
from kvcore.dtypes import dtype_name, to_dtype
from kvcore.errors import LayoutError, UnsupportedOpError
from kvcore.hookspecs import op_names
from kvcore.hookspecs.markers import capabilities
from kvcore.plugins.link import Binding, LinkedBackend
from kvcore.plugins.select import Explanation
from kvcore.plugins.spec import BackendSpec
from kvcore.runtime import Runtime

__all__ = ["FLOATS", "OpsBase"]

logger = logging.getLogger("kvcore")

FLOATS = ("float16", "bfloat16", "float32")


class OpsBase:
    """A linked backend with its fallback; the families of ops are mixed in on top.

    Parameters
    ----------
    linked : LinkedBackend
    explanation : Explanation
        How it was selected.
    fallback : LinkedBackend, optional
        Serves ops that the backend lacks, on memory that it can address.
    no_fallback : str
        Why there is none, for the error that then follows.
    """

    def __init__(
        self,
        linked: LinkedBackend,
        explanation: Explanation,
        fallback: LinkedBackend | None = None,
        no_fallback: str = "",
    ) -> None:
        self._linked = linked
        self._fallback = fallback
        self._no_fallback = no_fallback
        self._explanation = explanation
        self._resolved: dict[tuple[str, Any, str | None], Callable[..., Any]] = {}
        self.fallback_calls: Counter[str] = Counter()
        """How often each op ran on the fallback."""

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._linked.spec.name

    @property
    def spec(self) -> BackendSpec:
        """What the backend says about itself."""
        return self._linked.spec

    @property
    def runtime(self) -> Runtime:
        """Streams, events, host memory."""
        return self._linked.runtime

    @property
    def bindings(self) -> Mapping[str, Binding]:
        """The backend's own implementations by op; ops it lacks are absent."""
        return self._linked.bindings

    def fused(self, composite: str) -> Callable[..., Any] | None:
        """Return the backend's own implementation of a composite (`kvcore.hookspecs.composite`), or None."""
        binding = self._linked.fused.get(composite)
        return None if binding is None else binding.function

    def explain(self) -> Explanation:
        """Return every candidate with the reason it was or was not taken, and what of the taken one does not load."""
        return self._explanation.remarked(self._linked.remark)

    def refusal(self, op: str, *, dtype: object = None, layout: str | None = None) -> str | None:
        """Return why this backend itself does not do an op, or None if it does.

        Raises
        ------
        UnsupportedOpError
            There is no op of that name.
        ConfigError
            There is no dtype of that name.
        """
        if op not in op_names():
            raise UnsupportedOpError(f"there is no op {op!r}; ops are {', '.join(op_names())}")
        binding = self._linked.bindings.get(op)
        if binding is None:
            return f"backend {self.name} has no {op}"
        # A cache whose parts differ in type asks with several names, "bfloat16/float8_e4m3fn": each must be supported.
        names = dtype.split("/") if isinstance(dtype, str) else [] if dtype is None else [dtype]
        dtypes = [dtype_name(to_dtype(name)) for name in names]
        why = capabilities(binding.function).refusal(dtypes=dtypes, layout=layout, arch=self.runtime.arch)
        return f"{op} of backend {self.name} ({binding.implementation}): {why}" if why else None

    def supports(self, op: str, *, dtype: object = None, layout: str | None = None) -> bool:
        """Tell whether this backend itself does an op for a dtype and layout, without a fallback."""
        return self.refusal(op, dtype=dtype, layout=layout) is None

    def resolve(self, op: str, dtype: Any = None, layout: str | None = None) -> Callable[..., Any]:
        """Return the plain function that runs an op for a dtype and layout string; cached.

        Raises
        ------
        UnsupportedOpError
            The backend does not do it, and there is no fallback that does.
        """
        key = (op, dtype, layout)
        function = self._resolved.get(key)
        if function is None:
            function = self._resolved[key] = self._bind(op, dtype, layout)
        return function

    def _bind(self, op: str, dtype: Any, layout: str | None) -> Callable[..., Any]:
        why = self.refusal(op, dtype=dtype, layout=layout)
        if why is None:
            return self._linked.bindings[op].function
        if self._fallback is None:
            raise UnsupportedOpError(f"{why}, and nothing else may do it: {self._no_fallback}\n{self._explanation}")
        if not set(self.spec.device_types) & set(self._fallback.spec.device_types):
            raise UnsupportedOpError(
                f"{why}; {self._fallback.spec.name} cannot reach its {'/'.join(self.spec.device_types)} memory: "
                f"copy to the host with copy_batch and use kvcore.open_backend('{self._fallback.spec.name}')"
            )
        binding = self._fallback.bindings[op]
        logger.warning("%s; it runs on %s instead (KVCORE_STRICT=1 forbids that)", why, self._fallback.spec.name)
        calls, target = self.fallback_calls, binding.function

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[op] += 1
            return target(*args, **kwargs)

        return counted

    # --- arguments

    def _in(self, x: Any, what: str, dtypes: tuple[str, ...]) -> Any:
        """Return an input in the backend's form, of one of some dtypes."""
        array = self.runtime.array(x)
        if dtype_name(array.dtype) not in dtypes:
            raise LayoutError(f"{what} has dtype {array.dtype}; {' or '.join(dtypes)} would fit")
        return array

    def _out(
        self, out: Any, what: str, shape: tuple[int, ...], dtype: Any, *inputs: Any, in_place: Any = None
    ) -> tuple[Any, Any]:
        """Return `out` in the backend's form and as the caller gets it back; allocate it if there is none.

        It shares no memory with `inputs`; with `in_place` only if it is the same view.
        """
        if out is None:
            fresh = self.runtime.empty(shape, np.dtype(dtype))
            return fresh, fresh
        array = self.runtime.array(out)
        if array.shape != shape or array.dtype != dtype:
            raise LayoutError(f"{what} is {array.dtype} {list(array.shape)}; {np.dtype(dtype)} {list(shape)} would fit")
        if read_only(array):
            raise LayoutError(f"{what} is read-only")
        for given in inputs:
            if overlap(array, given):
                raise LayoutError(f"{what} shares memory with an input of the op; give it memory of its own")
        if in_place is not None and overlap(array, in_place) and not same_view(array, in_place):
            raise LayoutError(
                f"{what} shares memory with an input that it is not the same view of; give it memory of its own, "
                "or that very array"
            )
        return array, out


def read_only(array: Any) -> bool:
    """Tell whether an array in its backend's form must not be written to."""
    if isinstance(array, np.ndarray):
        return not array.flags.writeable
    return isinstance(array, ArrayRef) and array.readonly


def check_axes(axes: Any, ndim: int) -> tuple[int, ...]:
    """Return axes as hookspecs want them: ascending, not negative, at least one."""
    return _check_axes((axes,) if isinstance(axes, int) else tuple(axes), ndim)


@functools.lru_cache(maxsize=256)
def _check_axes(wanted: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    resolved = tuple(sorted(a + ndim if a < 0 else a for a in wanted))
    if not resolved or len(set(resolved)) != len(resolved) or resolved[0] < 0 or resolved[-1] >= ndim:
        raise LayoutError(f"axes {wanted} are not one or more distinct axes of an array with {ndim} dims")
    return resolved


@functools.lru_cache(maxsize=256)
def kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with 1 for each of some axes."""
    return tuple(1 if i in axes else n for i, n in enumerate(shape))
