"""`SerdeConfig`: which serde, with what options, as users write it down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.errors import ConfigError

__all__ = ["SerdeConfig"]


@dataclass(frozen=True, slots=True)
class SerdeConfig:
    """The type of a serde and its options.

    Parameters
    ----------
    type : str
        Of `get_registered_serde_types`.
    kwargs : mapping of str to object
        What its factory takes.

    Raises
    ------
    ConfigError
        The type is no name, or an option has none.

    Examples
    --------
    >>> SerdeConfig.of('{"type": "kvs1", "preset": "balanced"}')
    SerdeConfig(type='kvs1', kwargs={'preset': 'balanced'})
    >>> SerdeConfig.of("raw")
    SerdeConfig(type='raw', kwargs={})
    """

    type: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.type, str) or not self.type:
            raise ConfigError(f"the type of a serde is a name, got {self.type!r}")
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(name, str) for name in self.kwargs):
            raise ConfigError(f"the options of serde {self.type} go by name, got {self.kwargs!r}")
        object.__setattr__(self, "kwargs", dict(self.kwargs))

    @classmethod
    def of(cls, given: SerdeConfig | Mapping[str, Any] | str) -> SerdeConfig:
        """Take a configuration in any of its forms.

        Parameters
        ----------
        given : SerdeConfig, mapping or str
            A mapping with the key ``type``, all other keys being options; such a mapping as JSON; or a bare name.

        Raises
        ------
        ConfigError
            It is none of these.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            text = given.strip()
            if not text.startswith(("{", "[", '"')):
                return cls(text)
            try:
                given = json.loads(text)
            except json.JSONDecodeError as error:
                raise ConfigError(f"the serde {text!r} is no JSON: {error}") from error
            if isinstance(given, str):
                return cls(given)
        if not isinstance(given, Mapping) or "type" not in given:
            raise ConfigError(f'a serde is a name or an object with a type, as in {{"type": "raw"}}, got {given!r}')
        options = dict(given)
        return cls(options.pop("type"), options)
