"""All `KVCORE_*` environment variables: their names, meaning, defaults and parsers.

Nothing else in kvcore reads the environment. The documentation page and the header of the conformance suite are made
from `VARIABLES`. Beside these there is a variable for each setting of the engine, ``KVCORE_`` and its name in capitals:
`kvcore.engine.config` reads them from what `engine_variables` gives.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.errors import ConfigError

__all__ = ["VARIABLES", "Settings", "Variable", "current", "engine_variables"]

_MOST_THREADS = 1024


def _text(value: str) -> str:
    return value.strip()


def _flag(value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"", "0", "false", "no", "off"}:
        return False
    raise ValueError("expected 1 or 0")


def _names(value: str) -> tuple[str, ...] | None:
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    return names or None


def _kernels(value: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in filter(None, (p.strip() for p in value.split(","))):
        op, sep, implementation = part.partition("=")
        if not sep or not op.strip() or not implementation.strip():
            raise ValueError(f"{part!r} is not of the form op=implementation")
        pairs.append((op.strip(), implementation.strip()))
    return tuple(pairs)


def _isa(value: str) -> str:
    if value.strip() not in {"", "scalar", "avx2"}:
        raise ValueError("expected scalar or avx2")
    return value.strip()


def _threads(value: str) -> int | None:
    text = value.strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 4 or not 1 <= int(text) <= _MOST_THREADS:
        raise ValueError(f"expected a number from 1 to {_MOST_THREADS}")
    return int(text)


def _warp(value: str) -> int:
    if value.strip() not in {"16", "32", "64"}:
        raise ValueError("expected 16, 32 or 64")
    return int(value)


def _seed(value: str) -> int:
    text = value.strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 20 or int(text) >= 2**64:
        raise ValueError("expected a number from 0 to 2**64 - 1")
    return int(text)


def _options(value: str) -> tuple[str, ...]:
    return tuple(shlex.split(value))


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, what it does, its default (as text) and how it is parsed.

    The value of a secret one appears in no report and no message.
    """

    name: str
    help: str
    default: str
    parse: Callable[[str], Any]
    example: str
    secret: bool = False

    def read(self, environ: Mapping[str, str]) -> Any:
        """Return the parsed value; a value that means nothing raises `ConfigError` naming the variable."""
        raw = environ.get(self.name, self.default)
        try:
            return self.parse(raw)
        except ValueError as error:
            raise ConfigError(f"{self.name}={raw!r}: {error}; for example {self.name}={self.example}") from error

    def shown(self, environ: Mapping[str, str]) -> str | None:
        """Return the text of the value for a report, of a secret one only that it is set; None if it is not set."""
        value = environ.get(self.name)
        return "(set)" if self.secret and value else value


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "KVCORE_BACKEND",
        "Name of the backend to use. It is obeyed, or opening a backend fails; it never falls back to another one.",
        "",
        _text,
        "cpu_ref",
    ),
    Variable(
        "KVCORE_CPU_ISA",
        "Instruction set of the native CPU backend: `scalar`, or `avx2` on x86-64. One that the machine lacks is an "
        "error. Empty: the best that there is. It holds for the whole process.",
        "",
        _isa,
        "scalar",
    ),
    Variable(
        "KVCORE_CPU_THREADS",
        "How many threads an op of the native CPU backend may use, the caller's among them: 1 to "
        f"{_MOST_THREADS}. Empty: 4, or the usable cores where they are fewer. It holds for the whole process.",
        "",
        _threads,
        "1",
    ),
    Variable(
        "KVCORE_KERNELS",
        "Which implementation of an op to bind where a backend has several: `op=implementation` pairs separated by "
        "commas, `*` for every op not named.",
        "",
        _kernels,
        "digest=native,*=triton",
    ),
    Variable(
        "KVCORE_PLUGINS",
        "Allowlist of backend plug-ins (entry point names, separated by commas). Others are listed but never imported. "
        "Empty: all that are installed.",
        "",
        _names,
        "cpu,cpu_ref",
    ),
    Variable(
        "KVCORE_STRICT",
        "1 forbids every fallback: an op that the chosen backend lacks raises instead of running on cpu_ref.",
        "0",
        _flag,
        "1",
    ),
    Variable(
        "KVCORE_CUDA_ARCHS",
        "When the package of the NVIDIA backend is built: the architectures that its kernels are compiled for, with "
        "commas between them, or `none`. Empty: all that are supported and nvcc knows. It means nothing afterwards.",
        "",
        _text,
        "80,90",
    ),
    Variable(
        "KVCORE_CUDA_DRIVER",
        "Path or name of the driver library that the NVIDIA backend uses. Empty: the system's `libcuda.so.1`.",
        "",
        _text,
        "/srv/cuda-compat/libcuda.so.1",
    ),
    Variable(
        "KVCORE_ROCM_DRIVER",
        "Path or name of the HIP runtime that the AMD backend uses. Empty: the one that this process has loaded, else "
        "torch's own, else the system's `libamdhip64.so`.",
        "",
        _text,
        "/opt/rocm/lib/libamdhip64.so.7",
    ),
    Variable(
        "KVCORE_XPU_SUB_GROUP",
        "Lanes of a sub-group of the Intel backend's kernels: 32, or 64 on devices that have them; or 16, where only "
        "the ops that need no 32 lanes run.",
        "32",
        _warp,
        "16",
    ),
    Variable(
        "KVCORE_CONFIG_FILE",
        "YAML file with the settings of the engine, where none is given as an argument. The variables of single "
        "settings go before it: see docs/configuration.md.",
        "",
        _text,
        "/etc/kvcore.yaml",
    ),
    Variable(
        "KVCORE_RESP_PASSWORD",
        "Password for the Redis or Valkey server of a store `resp:` whose URI has none, so that it need not be in a "
        "configuration file. It is never shown.",
        "",
        str,
        "correct-horse",
        secret=True,
    ),
    Variable(
        "KVCORE_REQUIRE_SERVERS",
        "1 makes tests of stores fail where a server that they start (Redis, SeaweedFS) is not installed. Otherwise "
        "they are skipped, with the reason.",
        "0",
        _flag,
        "1",
    ),
    Variable(
        "KVCORE_EMU_WARP",
        "Threads in a warp of the emulated device (backend `emu`): 32 as on NVIDIA, 64 as on AMD's data centre GPUs, "
        "or 16 as on Intel's, where only some ops run.",
        "32",
        _warp,
        "64",
    ),
    Variable(
        "KVCORE_EMU_SEED",
        "From what the orders are drawn in which the emulated device runs streams, blocks, warps and threads: a result "
        "that depends on it comes of a race. 0: in order, and nothing before somebody waits for it.",
        "1",
        _seed,
        "2",
    ),
    Variable(
        "KVCORE_EMU_FLAGS",
        "More options for the compiler of the emulated device's kernels: sanitizers, or `-I` and a folder of headers "
        "to take instead of the core's, with a name of its own for each content.",
        "",
        _options,
        "-g -fsanitize=address,undefined",
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of all variables at one moment.

    Those of the emulated device are parsed when they are asked for: one that means nothing stops nobody else.
    """

    backend: str
    cpu_isa: str
    cpu_threads: int | None
    kernels: tuple[tuple[str, str], ...]
    plugins: tuple[str, ...] | None
    strict: bool
    cuda_archs: str = ""
    cuda_driver: str = ""
    rocm_driver: str = ""
    xpu_sub_group: int = 32
    config_file: str = ""
    resp_password: str = field(default="", repr=False)
    require_servers: bool = False
    emu: Mapping[str, str] = field(default_factory=dict)
    """The variables of the emulated device that are set, as they are."""

    @property
    def emu_warp(self) -> int:
        """Threads in a warp; a value that means nothing raises `ConfigError`, as in all three."""
        return int(_BY_NAME["KVCORE_EMU_WARP"].read(self.emu))

    @property
    def emu_seed(self) -> int:
        """From what orders are drawn."""
        return int(_BY_NAME["KVCORE_EMU_SEED"].read(self.emu))

    @property
    def emu_flags(self) -> tuple[str, ...]:
        """More options for the compiler."""
        return tuple(_BY_NAME["KVCORE_EMU_FLAGS"].read(self.emu))


_BY_NAME = {variable.name: variable for variable in VARIABLES}
_EMU = "KVCORE_EMU_"


def current(environ: Mapping[str, str] | None = None) -> Settings:
    """Read all variables now (nothing is cached, so tests and notebooks may change them).

    Raises
    ------
    ConfigError
        A variable has a value that means nothing; the message names it and gives an example.
    """
    env = os.environ if environ is None else environ
    values = {n.removeprefix("KVCORE_").lower(): v.read(env) for n, v in _BY_NAME.items() if not n.startswith(_EMU)}
    return Settings(**values, emu={name: env[name] for name in _BY_NAME if name.startswith(_EMU) and name in env})


def engine_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables from which settings of the engine are read: ``KVCORE_*`` and ``LMCACHE_*``, as they are."""
    env = os.environ if environ is None else environ
    return {name: value for name, value in env.items() if name.startswith(("KVCORE_", "LMCACHE_"))}
