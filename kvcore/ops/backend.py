"""`Backend`: the ops of one backend as checked methods and plans; `open_backend` selects, links and returns it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from kvcore.arrays import ArrayRef
from kvcore.errors import ConfigError
from kvcore.hookspecs import op_specs
from kvcore.hookspecs.markers import capabilities
from kvcore.layout import Layout
from kvcore.ops.checks import STATIC_CHECKS
from kvcore.ops.entropy import EntropyOps
from kvcore.ops.movement import MovementOps
from kvcore.ops.numeric import NumericOps
from kvcore.plugins.discover import Candidate, discover
from kvcore.plugins.link import LinkedBackend, link
from kvcore.plugins.probe import probe
from kvcore.plugins.select import Explanation, select
from kvcore.plugins.spec import BackendSpec
from kvcore.rows import RowLayout
from kvcore.settings import Settings, current

__all__ = ["Backend", "Plan", "candidates", "explain", "open_backend", "open_host"]


class Plan(functools.partial):  # type: ignore[type-arg]  # partial's parameter is the return type, which ops leave open
    """An op with everything static checked and bound: call it with the op's arrays, ``out=`` and ``stream=``.

    A launch checks nothing that does not depend on the data, and never raises "unsupported": the caller answers for
    arrays of the planned dtype and layout, in the form ``backend.runtime.array`` gives them.

    Attributes
    ----------
    op, backend, implementation : str
    workspace_bytes : int
        Scratch memory that each launch needs, to be passed as ``workspace=`` where it is not 0.
    """

    op: str
    backend: str
    implementation: str
    workspace_bytes: int

    def __repr__(self) -> str:
        bound = "".join(f", {k}={v!r}" for k, v in self.keywords.items())
        return f"Plan({self.op} on {self.backend}/{self.implementation}{bound}, workspace {self.workspace_bytes} B)"


class Backend(MovementOps, NumericOps, EntropyOps):
    """The ops of one backend. Get one from `kvcore.open_backend`."""

    def plan(
        self, op: str, *, dtype: object = None, layout: Layout | RowLayout | str | None = None, **static: Any
    ) -> Plan:
        """Check everything static about an op once, and return the callable that runs it.

        Parameters
        ----------
        op : str
        dtype : dtype or name, optional
            Element type of the op's first array (of `layout`, if that is bound memory).
        layout : Layout, RowLayout or str, optional
            Of the paged cache, for ops that take one.
        **static
            Keyword arguments of the op to bind: ``unit="block"``, ``spec=QuantSpec...``.

        Raises
        ------
        UnsupportedOpError
            The backend does not do it, and there is no fallback that does.
        ConfigError
            A keyword that the op does not have, or a value that means nothing.
        """
        if isinstance(layout, RowLayout):
            dtype, layout = layout.dtypes if dtype is None else dtype, layout.text
        text = layout.text if isinstance(layout, Layout) else layout
        function = self.resolve(op, dtype, text)
        _check_static(op, static)
        plan = Plan(function, **static)
        binding = self.bindings.get(op)
        own = binding is not None and binding.function is function
        plan.op = op
        plan.backend = self.name if own or self._fallback is None else self._fallback.spec.name
        plan.implementation = binding.implementation if own and binding is not None else "fallback"
        need = capabilities(function).workspace_bytes
        plan.workspace_bytes = need(static) if need is not None else 0
        return plan

    def __repr__(self) -> str:
        return f"Backend({self.name!r}, {len(self.bindings)} of {len(op_specs())} ops)"


def _check_static(op: str, static: dict[str, Any]) -> None:
    """Hold a plan's keywords to the op: all that it needs, none that it has not, no value that means nothing."""
    parameters = inspect.signature(op_specs()[op]).parameters
    allowed = {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and n in STATIC_CHECKS}
    for name, value in static.items():
        if name not in allowed:
            raise ConfigError(f"{op} has no static argument {name!r}; it has {', '.join(allowed) or 'none'}")
        STATIC_CHECKS[name](value)
    missing = [n for n, p in allowed.items() if p.default is p.empty and n not in static]
    if missing:
        raise ConfigError(f"a plan of {op} needs {', '.join(missing)}")


def candidates(settings: Settings | None = None) -> list[Candidate]:
    """Return every backend, installed or known, probed."""
    return [probe(c) for c in discover(settings or current())]


def explain(name: str | None = None, *, device: object = "cpu") -> Explanation:
    """Return what `open_backend` would choose, and why not the others, without loading anything.

    Raises
    ------
    NoBackendError
        Nothing can be chosen; the message carries the table.
    """
    settings = current()
    _, explanation = _choose(candidates(settings), name, settings, device)
    return explanation


def open_backend(
    name: str | None = None, *, device: object = "cpu", fallback: str = "cpu_ref", found: list[Candidate] | None = None
) -> Backend:
    """Select a backend, link it, and return its ops.

    Parameters
    ----------
    name : str, optional
        Obeyed, or the call raises. Without it ``KVCORE_BACKEND``, and without that the usable backend of highest
        priority for `device`.
    device : str or array
        Device type of the memory (``"cpu"``, ``"cuda"``), or an array that lives there.
    fallback : {"cpu_ref", "error"}
        What to do for ops that the backend lacks: run them on the reference (logged once, counted), or raise.
    found : list of Candidate, optional
        Choose among these instead of what is installed.

    Raises
    ------
    NoBackendError
        With the whole candidate table.
    BackendLoadError
        The chosen backend does not load, or breaks the contract of a hook.
    """
    if fallback not in ("cpu_ref", "error"):
        raise ConfigError(f"fallback={fallback!r}; it is 'cpu_ref' or 'error'")
    settings = current()
    everything = candidates(settings) if found is None else found
    spec, explanation = _choose(everything, name, settings, device)
    linked = link(spec, settings.kernels)
    reserve, why_none = _fallback(everything, spec, fallback, settings)
    return Backend(linked, explanation, reserve, why_none)


def open_host() -> Backend:
    """Open the best backend of the host beside a device's: ``KVCORE_BACKEND`` and ``KVCORE_KERNELS`` are the device's.

    Raises
    ------
    NoBackendError, BackendLoadError
        As `open_backend`.
    """
    settings = current()
    everything = candidates(settings)
    spec, explanation = select(everything, name=None, named_by="", device_type="cpu")
    reserve, why_none = _fallback(everything, spec, "cpu_ref", settings)
    return Backend(link(spec), explanation, reserve, why_none)


def _fallback(
    everything: list[Candidate], spec: BackendSpec, fallback: str, settings: Settings
) -> tuple[LinkedBackend | None, str]:
    """Return the linked reference as fallback, or None and why there is none."""
    if fallback == "error":
        return None, "fallback='error' was asked for"
    if settings.strict:
        return None, "KVCORE_STRICT=1 forbids fallbacks"
    if spec.name == "cpu_ref":
        return None, "it is the last fallback itself"
    reference = next((c for c in everything if c.name == "cpu_ref"), None)
    if reference is None or reference.spec is None:
        return None, f"the fallback cpu_ref is {reference.status}: {reference.reason}" if reference else "no cpu_ref"
    return link(reference.spec), ""


def _choose(
    everything: list[Candidate], name: str | None, settings: Settings, device: object
) -> tuple[BackendSpec, Explanation]:
    named_by = "the argument" if name else "KVCORE_BACKEND"
    device_type = device.partition(":")[0] if isinstance(device, str) else ArrayRef.of(device).device_type
    return select(everything, name=name or settings.backend or None, named_by=named_by, device_type=device_type)
