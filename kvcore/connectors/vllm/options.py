"""What the vLLM connector is told: `kv_connector_extra_config`, over the sources of the engine's configuration.

The mapping holds settings of the engine (`kvcore.engine.config.EngineConfig`), those of the connector
(`VllmOptions`), and ``config_file``. All of it is strict: a name that means nothing stops vLLM's start, because an
engine that ignores a typo runs for weeks without the cache that was meant.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvcore.engine.config import EngineConfig, load_config, setting_names
from kvcore.errors import ConfigError

__all__ = ["LOADS", "ConnectorConfig", "VllmOptions", "read_options"]

LoadMode = Literal["async", "sync", "layerwise"]
LOADS: tuple[LoadMode, ...] = ("async", "sync", "layerwise")
_FILE = "config_file"
_ROLES = ("kv_both", "kv_producer", "kv_consumer")

logger = logging.getLogger("kvcore")


class VllmOptions(BaseModel):
    """Settings of the connector itself.

    Parameters
    ----------
    load : {"async", "sync", "layerwise"}
        How KV comes in. ``"async"``: while other requests go on, a request waits for its own outside of the batch.
        ``"sync"``: before the step that needs it. ``"layerwise"``: each layer before its attention needs it.
    load_threads : int
        Asynchronous loads at a time.
    lookup_wait_ms : float
        How long a step of the scheduler waits for lookups, of all requests together, in milliseconds; who has no answer
        by then is asked about again in the next step.
    lookup_timeout_s : float
        A worker that has not answered for so long is taken for dead: no hits, until it answers.
    lookup_directory : str
        Where the sockets of lookups are; a directory of this user's. By default in that for temporary files.
    flush_seconds : float
        How long a stop of the engine waits for what is still on its way to the stores.
    trust_media_ids : bool
        Take the ids that callers give to images and other media for their content. Only where no caller can lie.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    load: LoadMode = "async"
    load_threads: int = Field(2, gt=0)
    lookup_wait_ms: float = Field(5.0, ge=0)
    lookup_timeout_s: float = Field(2.0, gt=0)
    lookup_directory: str = ""
    flush_seconds: float = Field(30.0, ge=0)
    trust_media_ids: bool = False


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """All that the two sides of a connector are configured with.

    Parameters
    ----------
    engine : EngineConfig
    options : VllmOptions
    loads, saves : bool
        Whether this engine takes KV from the cache, and gives KV to it.
    """

    engine: EngineConfig
    options: VllmOptions
    loads: bool = True
    saves: bool = True


def read_options(
    extra: Mapping[str, Any], *, role: str = "kv_both", environ: Mapping[str, str] | None = None
) -> ConnectorConfig:
    """Read ``kv_connector_extra_config``.

    Parameters
    ----------
    extra : mapping
    role : {"kv_both", "kv_producer", "kv_consumer"}
        A producer never loads, a consumer never saves.
    environ : mapping of str to str, optional
        The environment's variables; those of this process if not given.

    Raises
    ------
    ConfigError
        A name or a value that means nothing, with the nearest name.
    """
    if role not in _ROLES:
        raise ConfigError(f"kv_role is one of {', '.join(_ROLES)}, got {role!r}")
    ours, engine = set(VllmOptions.model_fields), set(setting_names())
    known = sorted({*ours, *engine, _FILE})
    unknown = [name for name in extra if name not in known]
    if unknown:
        raise ConfigError(f"kv_connector_extra_config: {'; '.join(_unknown(name, known) for name in unknown)}")
    try:
        options = VllmOptions.model_validate({name: extra[name] for name in extra if name in ours})
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"kv_connector_extra_config: {said}") from error
    rest = {name: value for name, value in extra.items() if name in engine}
    config = load_config(rest, file=extra.get(_FILE), environ=environ)
    return ConnectorConfig(config, options, role != "kv_producer", role != "kv_consumer")


def _unknown(name: object, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no setting {name!r}; {hint}there are {', '.join(known)}"
