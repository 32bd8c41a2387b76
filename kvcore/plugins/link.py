"""Link: import a chosen backend's implementations, hold them to the hookspecs, and bind one function per op.

pluggy registers and validates; the functions are taken out once and called directly ever after.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pluggy

from kvcore.errors import BackendLoadError, ConfigError
from kvcore.hookspecs import FUSED_PREFIX, OP_PREFIX, SPEC_MODULES, composite, composite_specs, op_specs
from kvcore.plugins.discover import describe
from kvcore.plugins.spec import BackendSpec
from kvcore.runtime import Runtime

__all__ = ["Binding", "LinkedBackend", "link"]

logger = logging.getLogger("kvcore")


@dataclass(frozen=True, slots=True)
class Binding:
    """The implementation bound for an op, and why it and no other."""

    op: str
    function: Callable[..., Any]
    implementation: str
    reason: str


@dataclass(frozen=True, slots=True)
class LinkedBackend:
    """A backend ready to run: its bound ops, the composites that it fuses, and its runtime."""

    spec: BackendSpec
    bindings: Mapping[str, Binding]
    runtime: Runtime
    fused: Mapping[str, Binding] = field(default_factory=dict)


def link(spec: BackendSpec, kernels: tuple[tuple[str, str], ...] = ()) -> LinkedBackend:
    """Import a backend's implementations and bind its ops.

    Parameters
    ----------
    spec : BackendSpec
    kernels : tuple of (op, implementation)
        As ``KVCORE_KERNELS``; ``"*"`` stands for every op not named.

    Raises
    ------
    BackendLoadError
        A module does not import, or a function does not follow its hookspec.
    ConfigError
        `kernels` names an op or an implementation that there is not, or a variable of the backend means nothing.
    """
    manager = pluggy.PluginManager("kvcore")
    for module in (*SPEC_MODULES, composite):
        manager.add_hookspecs(module)
    for implementation, path in spec.implementations.items():
        plugin = _import(spec, path)
        _check_signatures(spec, implementation, plugin)
        try:
            manager.register(plugin, name=implementation)
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise BackendLoadError(f"backend {spec.name}, implementation {implementation} ({path}): {error}") from error
    wanted = dict(kernels)
    _check_wanted(spec, wanted)
    bindings = {op: _bind(manager, spec, op, OP_PREFIX, wanted) for op in op_specs()}
    fused = {name: _bind(manager, spec, name, FUSED_PREFIX, wanted) for name in composite_specs()}
    return LinkedBackend(
        spec,
        {op: binding for op, binding in bindings.items() if binding is not None},
        _runtime(spec),
        {name: binding for name, binding in fused.items() if binding is not None},
    )


def _bind(
    manager: pluggy.PluginManager, spec: BackendSpec, op: str, prefix: str, wanted: Mapping[str, str]
) -> Binding | None:
    """Choose among the implementations of one op; None if there is none."""
    impls = getattr(manager.hook, prefix + op).get_hookimpls()
    by_name = {impl.plugin_name: impl.function for impl in impls}
    if not by_name:
        return None
    choice = wanted.get(op, wanted.get("*"))
    if choice is not None and choice in by_name:
        return Binding(op, by_name[choice], choice, "chosen by KVCORE_KERNELS")
    if op in wanted:
        raise ConfigError(
            f"KVCORE_KERNELS asks for {op}={wanted[op]}, but backend {spec.name} has {op} only as {', '.join(by_name)}"
        )
    there = [name for name in spec.implementations if name in by_name]
    reason = "the only implementation" if len(there) == 1 else f"first of {', '.join(there)}"
    if choice is not None:
        reason += f" (there is no {choice} implementation of it)"
    return Binding(op, by_name[there[0]], there[0], reason)


def _import(spec: BackendSpec, path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ConfigError:  # a variable that the backend reads means nothing: the user's to mend
        raise
    except (Exception, SystemExit) as error:  # vendor code: anything may go wrong, and the reason must be seen
        raise BackendLoadError(f"backend {spec.name}: {path} failed to import: {describe(error)}") from error


def _runtime(spec: BackendSpec) -> Runtime:
    path, _, factory = spec.runtime.partition(":")
    try:
        runtime: Runtime = getattr(_import(spec, path), factory)()
    except (BackendLoadError, ConfigError):
        raise
    except (Exception, SystemExit) as error:
        raise BackendLoadError(f"backend {spec.name}: runtime {spec.runtime} failed: {describe(error)}") from error
    return runtime


def _check_signatures(spec: BackendSpec, implementation: str, plugin: Any) -> None:
    """pluggy compares positional names only; keyword-only parameters and defaults are part of our contract too."""
    specs = {OP_PREFIX + op: function for op, function in op_specs().items()}
    specs |= {FUSED_PREFIX + name: function for name, function in composite_specs().items()}
    for name, function in vars(plugin).items():
        if not getattr(function, "kvcore_impl", None) or not callable(function):
            continue
        where = f"backend {spec.name}, implementation {implementation}: {name}"
        wanted = specs.get(name)
        if wanted is None:
            raise BackendLoadError(f"{where} implements no op of this kvcore; ops are {', '.join(op_specs())}")
        have, want = (
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (function, wanted)
        )
        if have != want:
            raise BackendLoadError(
                f"{where}{inspect.signature(function)} does not follow its hookspec "
                f"{name}{inspect.signature(wanted)}: names, kinds and defaults must be equal"
            )


def _check_wanted(spec: BackendSpec, wanted: Mapping[str, str]) -> None:
    rest = wanted.get("*")
    if rest is not None and rest not in spec.implementations:  # no error: it may be meant for other backends
        known = ", ".join(spec.implementations) or "none"
        logger.warning("KVCORE_KERNELS *=%s: backend %s has no such implementation; it has %s", rest, spec.name, known)
    for op, implementation in wanted.items():
        if op != "*" and op not in {**op_specs(), **composite_specs()}:
            raise ConfigError(f"KVCORE_KERNELS names {op!r}, which is no op; ops are {', '.join(op_specs())}")
        if op != "*" and implementation not in spec.implementations:
            known = ", ".join(spec.implementations) or "none"
            raise ConfigError(
                f"KVCORE_KERNELS: backend {spec.name} has no implementation {implementation!r}; it has {known}"
            )
