"""What a backend says about itself, without importing anything of its vendor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvcore.errors import ConfigError

__all__ = ["API_VERSION", "ENTRY_POINT_GROUP", "BackendSpec", "Probe"]

API_VERSION = 1
"""Version of the contract between the core and its backends: hookspecs, `BackendSpec` and `Runtime`."""

ENTRY_POINT_GROUP = "kvcore.backends"


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer of a backend's probe: usable on this machine or not, and why.

    Parameters
    ----------
    usable : bool
    reason : str
        One sentence for people, in both cases; where it says no it also says what would change that.
    details : mapping of str to str
        What was found: driver version, device names, counts.
    """

    usable: bool
    reason: str
    details: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ConfigError("a probe must give its reason, also when it says yes")


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend, as its entry point in the group ``kvcore.backends`` returns it.

    The module behind the entry point is light: it imports neither torch nor a vendor library. Those come in when the
    backend is linked, that is when `kvcore.open_backend` has chosen it.

    Parameters
    ----------
    name : str
        The name users type (``KVCORE_BACKEND``); equal to the name of the entry point.
    device_types : tuple of str
        Device types whose memory the ops take, as torch names them (``"cpu"``, ``"cuda"``, ``"xpu"``).
    priority : int
        Highest wins among the usable backends of a device type; -1 is never taken unless named.
        cpu_ref 0, cpu 50, a vendor 100 for its own device type.
    api_version : int
        The `API_VERSION` that the backend was written for; another one is refused, with both numbers.
    probe : callable returning Probe
        Cheap (milliseconds) and without side effects. It may raise; that counts as no, with the exception as reason.
    implementations : mapping of str to str
        Name of an implementation -> module that holds its `@kvcore.hookimpl` functions, in order of preference. An op
        is bound to the first implementation that has it unless ``KVCORE_KERNELS`` says otherwise. A module that
        raises `BackendLoadError` or another `ImportError` does not fit this machine (a library without code for its
        device, a compiler that is not installed): the next implementation serves instead, and the reason is shown.
        A module is imported only where those before it leave an op open, or ``KVCORE_KERNELS`` names it.
    runtime : str
        ``"module:factory"`` of the `kvcore.runtime.Runtime`.
    distribution : str
        The installed distribution, which the reports name and whose ``conformance.json`` is read.
    core_kernels : bool
        Whether it is built from the kernels of kvcore (`kvcore.kernels`). Its conformance record then holds for these
        very kernels only: one that was made with others counts for nothing.
    """

    name: str
    device_types: tuple[str, ...]
    priority: int
    api_version: int
    probe: Callable[[], Probe]
    implementations: Mapping[str, str] = field(default_factory=dict)
    runtime: str = "kvcore.runtime:HostRuntime"
    distribution: str = ""
    core_kernels: bool = False
