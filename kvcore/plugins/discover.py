"""Discover: which backends are installed. Nothing is probed, and of a backend only its light module is imported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points

from kvcore.plugins.spec import API_VERSION, ENTRY_POINT_GROUP, BackendSpec, Probe
from kvcore.settings import Settings

__all__ = ["KNOWN_BACKENDS", "Candidate", "discover"]

KNOWN_BACKENDS = {
    "cpu_ref": "the NumPy reference",
    "cpu": "native SIMD kernels for CPUs",
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "xpu": "Intel GPUs",
}
"""Backends of the kvcore project itself, listed with how to install them where they are missing."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend as discovery, and later its probe, found it.

    Parameters
    ----------
    name : str
    status : {"found", "usable", "unusable", "broken", "blocked", "missing"}
        ``found`` until it is probed; ``blocked`` by ``KVCORE_PLUGINS``; ``missing`` is known but not installed.
    reason : str
        Why, for people.
    spec : BackendSpec, optional
        Absent where the plug-in could not be loaded or was not to be.
    probe : Probe, optional
    distribution : str
        Distribution and version that it comes from.
    """

    name: str
    status: str
    reason: str
    spec: BackendSpec | None = None
    probe: Probe | None = None
    distribution: str = ""


def discover(settings: Settings, points: list[EntryPoint] | None = None) -> list[Candidate]:
    """Return a candidate for every installed backend and every known one, by name.

    A plug-in that fails to load is a candidate too, with the reason; it never hides the others.

    Parameters
    ----------
    settings : Settings
        Its allowlist keeps other plug-ins from being imported.
    points : list of EntryPoint, optional
        Instead of the installed ones.
    """
    found: dict[str, Candidate] = {}
    for point in points if points is not None else list(entry_points(group=ENTRY_POINT_GROUP)):
        candidate = _load(point, settings)
        other = found.get(point.name)
        if other is not None and other.distribution != candidate.distribution:
            candidate = replace(
                candidate,
                status="broken",
                spec=None,
                reason=f"the name is claimed by {other.distribution} and by {candidate.distribution}; uninstall one",
            )
        found[point.name] = candidate
    for name, what in KNOWN_BACKENDS.items():
        if name not in found:
            hint = f'pip install "kvcore[{name}]"' if name != "cpu_ref" else "pip install kvcore-cpu-ref"
            found[name] = Candidate(name, "missing", f"{what}: not installed; {hint}")
    order = {name: i for i, name in enumerate(KNOWN_BACKENDS)}
    return sorted(found.values(), key=lambda c: (order.get(c.name, len(order)), c.name))


def _load(point: EntryPoint, settings: Settings) -> Candidate:
    source = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
    if settings.plugins is not None and point.name not in settings.plugins:
        allowed = ", ".join(settings.plugins)
        return Candidate(point.name, "blocked", f"not in KVCORE_PLUGINS={allowed}", distribution=source)
    try:
        spec = point.load()()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # foreign code: what it raises becomes its reason
        return Candidate(point.name, "broken", f"{point.value} failed to load: {describe(error)}", distribution=source)
    if not isinstance(spec, BackendSpec):
        reason = f"{point.value} returned a {type(spec).__qualname__}, not a kvcore.BackendSpec"
        return Candidate(point.name, "broken", reason, distribution=source)
    if spec.api_version != API_VERSION:
        reason = (
            f"it was written for plug-in API {spec.api_version}, this kvcore speaks {API_VERSION}; "
            f"install matching versions of kvcore and {spec.distribution or source}"
        )
        return Candidate(point.name, "broken", reason, distribution=source)
    if spec.name != point.name:
        reason = f"entry point {point.name!r} yields a backend named {spec.name!r}; the two must agree"
        return Candidate(point.name, "broken", reason, distribution=source)
    return Candidate(point.name, "found", "installed", spec, distribution=source)


def describe(error: BaseException) -> str:
    """Return an exception as one line: its type and message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
