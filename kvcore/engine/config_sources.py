"""Where the settings of an engine come from: a YAML file, over it the environment, over both arguments.

All three are read alike: the same names, the same values, the same complaints. Names that other software has for the
same settings are read as aliases.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from kvcore import settings
from kvcore.engine.config_model import (
    GROUPS,
    EngineConfig,
    contradictions,
    field_of,
    form_of,
    leaf_names,
    shown,
    without_effect,
)
from kvcore.engine.config_values import load_yaml, nearest
from kvcore.errors import ConfigError
from kvcore.tiers.config import StoreTierConfig

__all__ = ["ALIASES", "OTHERS", "SECTIONS", "load_config", "setting_names"]

ALIASES = {
    "chunk_size": "chunk_tokens",
    "save_unfull_chunk": "save_partial_chunk",
    "save_decode_cache": "save_decode",
}
"""Names of other software, and the setting of kvcore."""

OTHERS = (
    *ALIASES,
    "local_cpu",
    "max_local_cpu_size",
    "reserve_local_cpu_size",
    "local_cpu_use_hugepages",
    "local_disk",
    "max_local_disk_size",
    "remote_url",
    "remote_serde",
    "min_retrieve_tokens",
    "cache_policy",
    "lookup_strategy",
    "log_level",
)
"""Names that are read from variables ``LMCACHE_*``."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "storage": (*GROUPS["Host memory"], *GROUPS["Stores"]),
    "compression": ("serde", "remote_serde"),
    "prefetch": tuple(name.partition(".")[2] for name in GROUPS["Loading ahead"]),
}
"""Settings that may stand together, under the name of a section."""

_FLAT = {name.replace(".", "_"): name for name in leaf_names()}
_PREFIX, _FOREIGN = "KVCORE_", "LMCACHE_"
_FILE_OF_OTHERS = "LMCACHE_CONFIG_FILE"
_TIER_FIELDS = tuple(StoreTierConfig.model_fields)
# What Kubernetes sets for services called kvcore-*, in every container of the namespace.
_SERVICE = re.compile(r"KVCORE_(?:\w+_)?(?:SERVICE_(?:HOST|PORT(?:_\w+)?)|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_\w+)?)?)")
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://")

_log = logging.getLogger("kvcore")


def setting_names() -> tuple[str, ...]:
    """Return every name that a file or an argument may have: settings, sections, and those of other software."""
    return tuple(dict.fromkeys([*_FLAT, *SECTIONS, *ALIASES]))


def load_config(
    arguments: Mapping[str, Any] | None = None,
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> EngineConfig:
    """Read the configuration of an engine; `EngineConfig.describe` says where each value came from.

    Parameters
    ----------
    arguments : mapping, optional
        By the names of `setting_names`: they win over the environment.
    file : str or Path, optional
        YAML; without it the one that ``KVCORE_CONFIG_FILE`` names, if it does. The environment wins over it.
    environ : mapping of str to str, optional
        The environment's variables; those of this process if not given. ``{}`` for none.

    Raises
    ------
    ConfigError
        The file cannot be read, a name is unknown, a value means nothing, or two contradict each other. The message has
        all complaints, each with its source, and with the nearest name or what is allowed.
    """
    variables = settings.engine_variables(environ)
    found = _Found()
    layers = [_from_file(file, variables, found), _from_environment(variables, found)]
    layers.append(_from_arguments({} if arguments is None else arguments, found))
    merged: dict[str, _Given] = {}
    for layer in layers:
        merged.update(layer)
    config = None if found.complaints else _build(merged, found)
    if config is None:
        raise ConfigError(_message(found))
    for name, reason in without_effect(config):
        found.ignored.append(f"{merged[name].place}: {name} {reason}")
    for note in found.notes:
        _log.info("%s", note)
    for note in found.ignored:
        _log.warning("%s", note)
    return config


@dataclass(frozen=True, slots=True)
class _Given:
    """A setting's value, validated, and where it was written."""

    value: Any
    place: str


@dataclass(slots=True)
class _Found:
    """What is to be said about all sources."""

    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unknown: bool = False


@dataclass(slots=True)
class _Layer:
    """One source, as it is read.

    Parameters
    ----------
    found : _Found
    foreign : bool
        It was written for other software: what kvcore has no name for is not an error.
    """

    found: _Found
    foreign: bool = False
    given: dict[str, _Given] = field(default_factory=dict)

    def take(self, name: Any, value: Any, place: str, section: str = "") -> None:
        """Read a setting or a section."""
        allowed = SECTIONS.get(section, ())
        full = f"{section}.{name}" if section == "prefetch" else name
        if section and name in allowed:
            self._set(_FLAT.get(full, full), value, place)
            if section != "prefetch":
                self._note(f"{place} is read as {name}")
        elif section == "storage" and name in ALIASES:
            self.take(name, value, place)
        elif section:
            self._refuse(name, place, allowed)
        elif name in SECTIONS:
            self._section(name, value, place)
        elif name in _FLAT or name in leaf_names():
            self._set(_FLAT.get(name, name), value, place)
        elif name in ALIASES:
            self._set(ALIASES[name], value, place)
            self._note(f"{place} is read as {ALIASES[name]}")
        else:
            self._refuse(name, place, setting_names())

    def _section(self, section: str, value: Any, place: str) -> None:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = load_yaml(value)
            except ConfigError as error:
                self.found.complaints.append(f"{place}: {error}")
                return
        if section == "compression" and (not isinstance(value, Mapping) or "type" in value):
            self._set("serde", value, place)
            self._note(f"{place} is read as serde")
        elif section == "prefetch" and not isinstance(value, Mapping) and value is not None:
            self._set("prefetch.enabled", value, place)
        elif isinstance(value, Mapping):
            for name, one in value.items():
                self.take(name, one, f"{place}.{name}", section)
        elif value is not None:
            self.found.complaints.append(f"{place}: write settings below it: {', '.join(SECTIONS[section])}")

    def _set(self, leaf: str, value: Any, place: str) -> None:
        try:
            checked = _adapter(leaf).validate_python(value)
        except ValidationError as error:
            # Without the input: it may be a secret, or hold one.
            for one in error.errors(include_url=False, include_context=False, include_input=False):
                self.found.complaints.append(_complaint(place, one))
            return
        earlier = self.given.get(leaf)
        if earlier is not None and earlier.value != checked:
            said = "" if form_of(leaf).secret else f" ({shown(leaf, earlier.value)} and {shown(leaf, checked)})"
            self.found.complaints.append(
                f"{earlier.place} and {place} say different things{said}; leave one of them out"
            )
            return
        self.given[leaf] = _Given(checked, place)

    def _refuse(self, name: Any, place: str, allowed: Collection[str]) -> None:
        near = nearest(str(name), allowed)
        if self.foreign:
            self.found.ignored.append(f"{place} means nothing to kvcore, and is ignored; {near}".rstrip("; "))
            return
        self.found.unknown |= len(allowed) > len(_FLAT)
        listed = "" if len(allowed) > len(_FLAT) else f"there are {', '.join(allowed)}"
        self.found.complaints.append(f"{place}: there is no such setting; {near}{listed}".rstrip("; "))

    def _note(self, text: str) -> None:
        self.found.notes.append(text)


def _from_file(file: str | Path | None, variables: Mapping[str, str], found: _Found) -> dict[str, _Given]:
    try:
        own = settings.current(variables).config_file
    except ConfigError as error:  # of a variable that is none of a setting
        found.complaints.append(str(error))
        return {}
    others = variables.get(_FILE_OF_OTHERS, "").strip()
    if not file and own and others and own != others:
        found.complaints.append(f"KVCORE_CONFIG_FILE and {_FILE_OF_OTHERS} name different files; leave one of them out")
        return {}
    chosen = str(file or own or others)
    if not chosen:
        return {}
    foreign = not file and not own
    if foreign:
        found.notes.append(f"{_FILE_OF_OTHERS} is read as KVCORE_CONFIG_FILE")
    layer = _Layer(found, foreign)
    try:
        content = load_yaml(Path(chosen).expanduser().read_text("utf-8"))
    except OSError as error:
        found.complaints.append(f"{chosen}: this file cannot be read: {error.strerror or error}")
    except UnicodeDecodeError:
        found.complaints.append(f"{chosen}: this is no text in UTF-8")
    except ConfigError as error:
        found.complaints.append(f"{chosen}: {error}")
    except (RuntimeError, ValueError) as error:  # the home of nobody, a NUL in the name
        found.complaints.append(f"{chosen!r}: this file cannot be read: {error}")
    else:
        if content is not None and not isinstance(content, Mapping):
            found.complaints.append(f"{chosen}: write settings as NAME: VALUE, one in a line")
            return {}
        for name, value in (content or {}).items():
            layer.take(name, value, f"{chosen}:{name}")
    return layer.given


def _from_environment(variables: Mapping[str, str], found: _Found) -> dict[str, _Given]:
    layer = _Layer(found)
    declared = {variable.name for variable in settings.VARIABLES}
    names = {f"{_PREFIX}{name.upper()}": name for name in setting_names()}
    for variable, text in sorted(variables.items()):
        if not text.strip() or variable == _FILE_OF_OTHERS:
            continue
        if variable in names:
            if variable.endswith("_PORT") and _SERVICE_URL.match(text):
                found.complaints.append(
                    f"{variable} is what Kubernetes sets for a service of such a name: rename the service, or set "
                    "enableServiceLinks: false"
                )
            else:
                layer.take(names[variable], text, variable)
        elif variable.startswith(_FOREIGN):
            name = variable.removeprefix(_FOREIGN).lower()
            if name in OTHERS:
                layer.take(name, text, variable)
                if name not in ALIASES:
                    found.notes.append(f"{variable} is read as {name}")
            else:
                found.ignored.append(f"{variable} means nothing to kvcore, and is ignored")
        elif variable not in declared and not _is_service(variable, text):
            found.unknown = True
            near = nearest(variable, [*names, *declared])
            found.complaints.append(f"{variable}: there is no such variable; {near}".rstrip("; "))
    return layer.given


def _is_service(variable: str, text: str) -> bool:
    """Tell what Kubernetes sets for a service: a port of it is a URL, so no typo of a setting is taken for one."""
    if not _SERVICE.fullmatch(variable):
        return False
    return "_SERVICE_" in variable or "_TCP" in variable or "_UDP" in variable or bool(_SERVICE_URL.match(text))


def _from_arguments(arguments: Mapping[str, Any], found: _Found) -> dict[str, _Given]:
    layer = _Layer(found)
    for name, value in arguments.items():
        layer.take(name, value, f"argument {name}")
    return layer.given


def _build(merged: Mapping[str, _Given], found: _Found) -> EngineConfig | None:
    """Return the configuration; None where settings contradict each other, which is added to the complaints."""
    values: dict[str, Any] = {}
    for leaf, given in merged.items():
        outer, _, inner = leaf.partition(".")
        if inner:
            values.setdefault(outer, {})[inner] = given.value
        else:
            values[outer] = given.value
    wrong = contradictions(EngineConfig.model_construct(**values))
    for names, text in wrong:
        places = [merged[name].place for name in names if name in merged]
        found.complaints.append(f"{', '.join(places)}: {text}" if places else text)
    if wrong:
        return None
    config = EngineConfig(**values)
    config._sources.update({leaf: given.place for leaf, given in merged.items()})
    return config


def _message(found: _Found) -> str:
    lines = list(found.complaints)
    if found.unknown:
        lines.append(f"settings are {', '.join(setting_names())}; docs/configuration.md explains them")
    if len(lines) == 1:
        return f"configuration: {lines[0]}"
    return "\n  - ".join(["the configuration means nothing:", *lines])


@functools.cache
def _adapter(leaf: str) -> TypeAdapter[Any]:
    """What validates one setting."""
    info = field_of(leaf)
    annotated: Any = Annotated[(info.annotation, *info.metadata)]
    return TypeAdapter(annotated)


def _complaint(place: str, error: Any) -> str:
    """Say in one line what is wrong with a value."""
    path = ".".join(str(part) for part in error["loc"])
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        near = nearest(str(error["loc"][-1]), _TIER_FIELDS)
        said = f"there is no such setting; {near}there are {', '.join(_TIER_FIELDS)}"
    return f"{place}.{path}: {said}" if path else f"{place}: {said}"
