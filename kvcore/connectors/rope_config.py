"""What a model's configuration says about its rotation: Hugging Face's names, and kvcore's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.errors import ConfigError, UnsupportedOpError
from kvcore.rope import SCALING_PARAMETERS, RopeParams

__all__ = ["closed_form"]

# What kvcore calls the parameters of a scaling, by what configurations call them; None stands for the default there.
_SCALING_KEYS = {
    "original_max_position_embeddings": "original_tokens",
    **{key: key for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")},
}


def closed_form(parameters: Mapping[str, Any], kind: str, dims: int, interleaved: bool) -> RopeParams | None:
    """Return what a configuration's ``rope_parameters`` say.

    Parameters
    ----------
    parameters : mapping
        ``rope_theta``, ``factor``, and what the scaling takes besides.
    kind : str
        Its ``rope_type``.
    dims : int
        Channels of a head that are rotated.
    interleaved : bool
        See `RopeParams`.

    Returns
    -------
    RopeParams or None
        None where it does not say enough, or says what is computed nowhere here.
    """
    scaling = {"default": "none"}.get(kind, kind)
    if scaling not in SCALING_PARAMETERS:
        return None
    theta, factor = parameters.get("rope_theta"), 1.0 if scaling == "none" else parameters.get("factor")
    if theta is None or factor is None:
        return None
    taken = {ours: parameters.get(key) for key, ours in _SCALING_KEYS.items() if ours in SCALING_PARAMETERS[scaling]}
    try:
        closed = RopeParams(dims, float(theta), interleaved, scaling, float(factor), **taken)
        closed.frequencies()
    except (ConfigError, UnsupportedOpError, TypeError, ValueError):  # what is no number where one belongs
        return None
    return closed
