"""ACME's backend. This module is light: it is imported wherever the package is installed, used or not."""

from kvcore import BackendSpec
from kvcore_acme.probe import probe


def backend() -> BackendSpec:
    return BackendSpec(
        name="acme",
        device_types=("cpu",),
        priority=-1,  # an example: never taken unless it is named
        api_version=1,  # the contract that this package was written for
        probe=probe,
        implementations={"loops": "kvcore_acme.ops"},
        runtime="kvcore_acme.runtime:AcmeRuntime",
        distribution="kvcore-acme",
    )
