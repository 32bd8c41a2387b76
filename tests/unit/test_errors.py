"""Errors are one family, and are also what callers of Python's own types already catch."""

from __future__ import annotations

import copy

import pytest

import kvcore
from kvcore import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("NoBackendError", LookupError),
        ("BackendLoadError", ImportError),
        ("UnsupportedOpError", NotImplementedError),
        ("LayoutError", ValueError),
        ("SlotError", IndexError),
        ("QuantizationError", ValueError),
        ("LeaseError", RuntimeError),
        ("OutOfMemoryError", MemoryError),
        ("StoreError", OSError),
        ("CorruptFrameError", ValueError),
    ],
)
def test_each_error_is_ours_and_pythons(name, builtin):
    kind = getattr(kvcore, name)
    assert issubclass(kind, kvcore.KVCoreError)
    assert issubclass(kind, builtin)


def test_every_error_is_exported():
    kinds = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.KVCoreError)}
    assert kinds == set(errors.__all__) <= set(kvcore.__all__)


def test_a_corrupt_frame_keeps_its_reason_when_it_is_copied():
    # Worker processes send exceptions home by the same protocol.
    error = errors.CorruptFrameError("the frame ends early", reason="truncated")
    again = copy.copy(error)
    assert type(again) is errors.CorruptFrameError
    assert (str(again), again.reason) == ("the frame ends early", "truncated")


def test_a_corrupt_frame_needs_a_reason():
    with pytest.raises(TypeError, match="reason"):
        errors.CorruptFrameError("the frame ends early")
