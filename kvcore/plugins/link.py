"""Link: import a chosen backend's implementations, hold them to the hookspecs, and bind one function per op.

pluggy registers and validates; the functions are taken out once and called directly ever after.

An implementation whose module raises `BackendLoadError`, or another `ImportError`, does not fit this machine: a library
without code for its device, a compiler that is not installed. The backend's next implementation serves then, and the
reason is logged once and shown wherever bindings are. Any other error of a module is a fault of its code, and raised.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
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
_logged: set[tuple[str, str, str]] = set()


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
    unloaded: Mapping[str, str] = field(default_factory=dict)
    """Implementations that do not load on this machine, and why."""

    @property
    def remark(self) -> str:
        """What to say of it beside its name: what did not load, why, and what serves instead; empty if all did."""
        return _remark(self.spec, self.unloaded)


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
        No implementation loads, or not the one that `kernels` names, or a function does not follow its hookspec.
    ConfigError
        `kernels` names an op or an implementation that there is not, or a variable of the backend means nothing.
    """
    wanted = dict(kernels)
    _check_wanted(spec, wanted)
    plugins, unloaded = _load(spec, set(wanted.values()))
    for op, name in wanted.items():
        if name in unloaded:
            raise BackendLoadError(
                f"KVCORE_KERNELS asks for {op}={name}, which backend {spec.name} cannot load: {unloaded[name]}"
            )
    manager = pluggy.PluginManager("kvcore")
    for module in (*SPEC_MODULES, composite):
        manager.add_hookspecs(module)
    for implementation, plugin in plugins.items():
        _check_signatures(spec, implementation, plugin)
        try:
            manager.register(plugin, name=implementation)
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            path = spec.implementations[implementation]
            raise BackendLoadError(f"backend {spec.name}, implementation {implementation} ({path}): {error}") from error
    bindings = {op: _bind(manager, spec, op, OP_PREFIX, wanted, unloaded) for op in op_specs()}
    fused = {name: _bind(manager, spec, name, FUSED_PREFIX, wanted, unloaded) for name in composite_specs()}
    return LinkedBackend(
        spec,
        {op: binding for op, binding in bindings.items() if binding is not None},
        _runtime(spec),
        {name: binding for name, binding in fused.items() if binding is not None},
        unloaded,
    )


def _load(spec: BackendSpec, wanted: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Import the implementations; return those that load, and why the others do not.

    One that is not asked for, and that stands behind others which have every op, is left alone: what it imports may
    take seconds.
    """
    plugins: dict[str, Any] = {}
    unloaded: dict[str, str] = {}
    causes: list[ImportError] = []
    for implementation, path in spec.implementations.items():
        if implementation not in wanted and _have_all_ops(plugins.values()):
            continue
        try:
            plugins[implementation] = importlib.import_module(path)
        except ConfigError:  # a variable that the backend reads means nothing: the user's to mend
            raise
        except ImportError as error:
            unloaded[implementation] = str(error) if isinstance(error, BackendLoadError) else describe(error)
            causes.append(error)
        except (Exception, SystemExit) as error:  # vendor code: anything may go wrong, and the reason must be seen
            raise _failed(spec, path, error) from error
    if not plugins and len(causes) == 1:
        raise _failed(spec, next(iter(spec.implementations.values())), causes[0]) from causes[0]
    if not plugins and causes:
        reasons = "; ".join(f"{name}: {why}" for name, why in unloaded.items())
        raise BackendLoadError(f"backend {spec.name}: no implementation loads: {reasons}") from causes[0]
    _log(spec, unloaded)
    return plugins, unloaded


def _have_all_ops(plugins: Iterable[Any]) -> bool:
    return all(any(hasattr(plugin, OP_PREFIX + op) for plugin in plugins) for op in op_specs())


def _log(spec: BackendSpec, unloaded: Mapping[str, str]) -> None:
    """Log once what does not load: as a warning where something preferred is missed."""
    for implementation, why in unloaded.items():
        if (spec.name, implementation, why) in _logged:
            continue
        _logged.add((spec.name, implementation, why))
        missed = next(iter(spec.implementations)) in unloaded
        logger.log(logging.WARNING if missed else logging.INFO, "backend %s: %s", spec.name, _remark(spec, unloaded))


def _remark(spec: BackendSpec, unloaded: Mapping[str, str]) -> str:
    if not unloaded:
        return ""
    reasons = "; ".join(f"{name} does not load: {why}" for name, why in unloaded.items())
    preferred = next(name for name in spec.implementations if name not in unloaded)
    return f"{reasons}; {preferred} is bound" + (" instead" if next(iter(spec.implementations)) in unloaded else "")


def _bind(
    manager: pluggy.PluginManager,
    spec: BackendSpec,
    op: str,
    prefix: str,
    wanted: Mapping[str, str],
    unloaded: Mapping[str, str],
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
    # Only what stands before the chosen one would have been bound in its place.
    before = list(spec.implementations)[: list(spec.implementations).index(there[0])]
    missed = [f"{name} does not load: {unloaded[name]}" for name in before if name in unloaded]
    if missed:
        reason = f"{'; '.join(missed)}; {reason} that loads"
    return Binding(op, by_name[there[0]], there[0], reason)


def _import(spec: BackendSpec, path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ConfigError:  # a variable that the backend reads means nothing: the user's to mend
        raise
    except (Exception, SystemExit) as error:  # vendor code: anything may go wrong, and the reason must be seen
        raise _failed(spec, path, error) from error


def _failed(spec: BackendSpec, path: str, error: BaseException) -> BackendLoadError:
    return BackendLoadError(f"backend {spec.name}: {path} failed to import: {describe(error)}")


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
