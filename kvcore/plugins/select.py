"""Select: which backend serves a request, and why not the others.

Argument > ``KVCORE_BACKEND`` > highest priority among the usable backends of the device type. A tie is an error. A
named backend is obeyed, or the call raises; nothing is substituted for it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcore.errors import NoBackendError
from kvcore.plugins.discover import Candidate
from kvcore.plugins.spec import BackendSpec

__all__ = ["Explanation", "Verdict", "select"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate in an explanation: what became of it, and why."""

    name: str
    status: str
    taken: bool
    reason: str
    priority: int | None
    device_types: tuple[str, ...]
    distribution: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every candidate with the reason it was or was not taken; prints as a table."""

    request: str
    verdicts: tuple[Verdict, ...]

    def remarked(self, remark: str) -> Explanation:
        """Return the same with a remark on the backend that was taken; an empty one changes nothing."""
        taken = (replace(v, reason=f"{v.reason}; {remark}") if v.taken and remark else v for v in self.verdicts)
        return Explanation(self.request, tuple(taken))

    def __str__(self) -> str:
        width = max((len(v.name) for v in self.verdicts), default=0)
        rows = [f"  {'*' if v.taken else ' '} {v.name:<{width}}  {v.status:<8}  {v.reason}" for v in self.verdicts]
        return "\n".join([f"Asked for {self.request}:", *rows])


def select(
    candidates: Sequence[Candidate], *, name: str | None, named_by: str, device_type: str
) -> tuple[BackendSpec, Explanation]:
    """Choose among probed candidates.

    Parameters
    ----------
    candidates : sequence of Candidate
        Probed.
    name : str, optional
        The backend that was named.
    named_by : str
        What named it, for messages: ``"the argument"`` or ``"KVCORE_BACKEND"``.
    device_type : str
        Device type of the memory, ``"cpu"`` or ``"cuda"`` say.

    Raises
    ------
    NoBackendError
        The named one is not usable or not there, none is usable, or two of the highest priority are; the message
        carries the whole table.
    """
    if name:
        request = f"backend {name!r} (named by {named_by})"
        chosen = next((c for c in candidates if c.name == name), None)
        if chosen is not None and chosen.status == "usable" and chosen.spec is not None:
            return chosen.spec, _explain(request, candidates, chosen, f"another one is named by {named_by}")
        table = _explain(request, candidates, None, f"another one is named by {named_by}")
        if chosen is None:
            close = difflib.get_close_matches(name, [c.name for c in candidates], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise NoBackendError(f"backend {name!r} is either misspelled or not installed{hint}\n{table}")
        raise NoBackendError(f"backend {name!r} cannot be used: {chosen.reason}\n{table}")
    request = f"a backend for device type {device_type!r}"
    fit = [c for c in candidates if c.status == "usable" and c.spec and _serves(c.spec, device_type)]
    best = max((c.spec.priority for c in fit if c.spec), default=None)
    top = [c for c in fit if c.spec and c.spec.priority == best]
    if len(top) == 1 and top[0].spec is not None:
        return top[0].spec, _explain(request, candidates, top[0], "", device_type)
    table = _explain(request, candidates, None, "", device_type)
    if not top:
        raise NoBackendError(f"no usable backend for device type {device_type!r}\n{table}")
    names = " and ".join(c.name for c in top)
    raise NoBackendError(
        f"{names} both have priority {best}; name one, as in KVCORE_BACKEND={top[0].name}, or uninstall the one that "
        f"is not for this machine\n{table}"
    )


def _serves(spec: BackendSpec, device_type: str) -> bool:
    return device_type in spec.device_types and spec.priority >= 0


def _explain(
    request: str, candidates: Sequence[Candidate], chosen: Candidate | None, otherwise: str, device_type: str = ""
) -> Explanation:
    verdicts = []
    for c in candidates:
        reason = c.reason
        if c is not chosen and c.status == "usable" and c.spec is not None:
            if otherwise:
                reason = otherwise
            elif device_type not in c.spec.device_types:
                reason = f"usable, but for {', '.join(c.spec.device_types)} memory only"
            elif c.spec.priority < 0:
                reason = f"usable, but taken only when named: KVCORE_BACKEND={c.name}"
            elif chosen is not None and chosen.spec is not None:
                reason = f"usable, but priority {c.spec.priority} is below {chosen.name}'s {chosen.spec.priority}"
        verdicts.append(
            Verdict(
                c.name,
                c.status,
                c is chosen,
                reason,
                c.spec.priority if c.spec else None,
                c.spec.device_types if c.spec else (),
                c.distribution,
            )
        )
    return Explanation(request, tuple(verdicts))
