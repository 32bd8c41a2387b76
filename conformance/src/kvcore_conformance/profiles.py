"""How long the suite searches: profiles, and the decorator that runs a test over generated inputs.

Hypothesis reads its settings when a test is decorated, that is at import. `explore` decorates at call time instead, so
the profile of this run holds, and the settings of other tests in the same process are left alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

__all__ = ["PROFILES", "Profile", "activate", "active", "explore"]

F = TypeVar("F", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Profile:
    """How many inputs each test tries, and whether they are the same ones every time.

    Parameters
    ----------
    name : str
    examples : int
        Inputs of a test of weight 1.
    derandomize : bool
        The same inputs in every run. Otherwise each run explores others, and failures are kept in Hypothesis'
        database.
    shrink : bool
        Look for the smallest failing input.
    """

    name: str
    examples: int
    derandomize: bool
    shrink: bool = True

    def settings(self, weight: float) -> settings:
        """Return the Hypothesis settings of a test of some weight."""
        phases = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if self.shrink else [])]
        quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
        base = settings(
            max_examples=max(1, round(self.examples * weight)),
            derandomize=self.derandomize,
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=quiet,
        )
        return settings(base, database=None) if self.derandomize else base


PROFILES = {
    "tiny": Profile("tiny", 4, derandomize=True),
    "quick": Profile("quick", 20, derandomize=True),
    "ci": Profile("ci", 120, derandomize=True),
    "nightly": Profile("nightly", 2000, derandomize=False),
}
_active = [PROFILES["quick"]]


def active() -> Profile:
    """Return the profile of this run."""
    return _active[-1]


def activate(name: str, *, shrink: bool = True) -> Profile:
    """Make a profile the one of this run."""
    _active.append(replace(PROFILES[name], shrink=shrink))
    return _active[-1]


def explore(weight: float = 1.0, **strategies: SearchStrategy[Any]) -> Callable[[F], F]:
    """Run a test over generated arguments; its other arguments are fixtures and parameters as usual.

    Parameters
    ----------
    weight : float
        Multiplies the profile's number of inputs: below 1 for tests whose inputs are slow.
    **strategies
        By argument of the test.
    """

    def wrap(test: F) -> F:
        signature = inspect.signature(test)
        fixtures = [p for name, p in signature.parameters.items() if name not in strategies]

        @functools.wraps(test)
        def explored(**given_by_pytest: Any) -> None:
            def generated(**values: Any) -> None:
                test(**given_by_pytest, **values)

            generated.__name__ = generated.__qualname__ = test.__name__
            active().settings(weight)(given(**strategies)(generated))()

        # pytest must ask for the fixtures only.
        explored.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        del explored.__wrapped__
        return explored  # type: ignore[return-value]

    return wrap
