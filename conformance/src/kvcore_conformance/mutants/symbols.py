"""Defects of bit packing, counting, positions, and of the runtime."""

# ruff: noqa: D103 -- a defect says in its name what is wrong
from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.errors import LeaseError, QuantizationError
from kvcore.runtime import HostBuffer, HostRuntime, SharedName
from kvcore_conformance.mutants.catalogue import MUTANTS, Call, Mutant, mutant
from kvcore_cpu_ref.floats import narrow

# --- bits


@mutant("pack_bits")
def most_significant_bit_first(call: Call) -> Any:
    x, bits, out = call.args[0], call.kwargs["bits"], call.run()
    each = np.unpackbits(x.view(np.uint8)[..., None], axis=-1)[..., 8 - bits :]
    out[...] = np.packbits(each.reshape(*x.shape[:-1], x.shape[-1] * bits), axis=-1)
    return out


@mutant("pack_bits")
def unused_bits_set(call: Call) -> Any:
    out = call.run()
    used = call.args[0].shape[-1] * call.kwargs["bits"] % 8
    if used:
        out[..., -1] |= np.uint8(0xFF << used & 0xFF)
    return out


@mutant("pack_bits")
def range_unchecked(call: Call) -> Any:
    try:
        return call.run()
    except QuantizationError:
        bits = call.kwargs["bits"]
        low = call.args[0].view(np.uint8) & np.uint8((1 << bits) - 1)
        return call.original(low, bits=bits, out=call.kwargs["out"])


@mutant("unpack_bits")
def sign_not_extended(call: Call) -> Any:
    out = call.kwargs["out"]
    call.kwargs["out"] = np.empty(out.shape, np.uint8)
    out[...] = call.run().view(out.dtype)
    return out


@mutant("unpack_bits")
def last_value_of_a_row_dropped(call: Call) -> Any:
    out = call.kwargs["out"]
    kept = out[..., -1:].copy()
    call.run()
    out[..., -1:] = kept
    return out


@mutant("count_symbols")
def symbol_255_dropped(call: Call) -> Any:
    out = call.run()
    out[..., 255] = 0
    return out


@mutant("count_symbols")
def counts_added_to_what_was_there(call: Call) -> Any:
    before = call.kwargs["out"].copy()
    out = call.run()
    out += before
    return out


@mutant("count_symbols")
def last_channel_has_the_counts_of_the_first(call: Call) -> Any:
    out = call.run()
    if out.shape[-2] > 1:
        out[..., -1, :] = out[..., 0, :]
    return out


# --- positions


def _pairs(call: Call) -> tuple[Any, Any]:
    pairs = call.args[1].shape[1]
    if call.kwargs.get("interleaved"):
        return np.arange(pairs) * 2, np.arange(pairs) * 2 + 1
    return np.arange(pairs), np.arange(pairs) + pairs


@mutant("shift_rope")
def sine_with_the_wrong_sign(call: Call) -> Any:
    call.args[2] = -call.args[2]
    return call.run()


@mutant("shift_rope")
def interleaved_ignored(call: Call) -> Any:
    call.kwargs["interleaved"] = False
    return call.run()


@mutant("shift_rope")
def channels_beyond_the_table_zeroed(call: Call) -> Any:
    out = call.run()
    out[..., 2 * call.args[1].shape[1] :] = 0
    return out


@mutant("shift_rope")
def identity_computed(call: Call) -> Any:
    x = call.args[0].astype(np.float32)
    out = call.run()
    first, second = _pairs(call)
    c, s = call.args[1][:, None, :], call.args[2][:, None, :]
    same = np.broadcast_to((c == 1) & (s == 0), x[..., first].shape)
    with np.errstate(all="ignore"):
        for channels, value in (
            (first, x[..., first] * c - x[..., second] * s),
            (second, x[..., second] * c + x[..., first] * s),
        ):
            out[..., channels] = np.where(same, narrow(value.astype(np.float32), out.dtype), out[..., channels])
    return out


@mutant("shift_rope")
def multiply_add_fused(call: Call) -> Any:
    x = call.args[0].astype(np.float32).astype(np.float64)
    out = call.run()
    if not np.isfinite(x).all():
        return out
    first, second = _pairs(call)
    c, s = (t.astype(np.float64)[:, None, :] for t in call.args[1:3])
    a, b = x[..., first], x[..., second]
    a_s, b_s = ((v * s).astype(np.float32) for v in (a, b))  # one product is rounded, the other goes into the sum exact
    with np.errstate(over="ignore"):
        out[..., first] = narrow((a * c - b_s).astype(np.float32), out.dtype)
        out[..., second] = narrow((b * c + a_s).astype(np.float32), out.dtype)
    return out


@mutant("shift_rope")
def table_of_the_next_token(call: Call) -> Any:
    call.args[1], call.args[2] = np.roll(call.args[1], -1, axis=0), np.roll(call.args[2], -1, axis=0)
    return call.run()


@mutant("shift_rope")
def second_half_from_the_updated_first(call: Call) -> Any:
    # What an in-place kernel does that forgets to keep a.
    x, out = call.args[0].astype(np.float32), call.run()
    first, second = _pairs(call)
    c, s = call.args[1][:, None, :], call.args[2][:, None, :]
    if np.shares_memory(call.args[0], out) and np.isfinite(x).all():
        out[..., second] = narrow(
            (x[..., second] * c + out[..., first].astype(np.float32) * s).astype(np.float32), out.dtype
        )
    return out


# --- runtime


class _SilentBuffer(HostBuffer):
    def free(self) -> None:
        """Free, and say nothing the second time."""
        try:
            HostBuffer.free(self)
        except LeaseError:
            return


def _runtime(kind: type[HostRuntime]) -> None:
    MUTANTS.append(Mutant(kind.__name__, "runtime", kind))


class SecondFreeIsSilent(HostRuntime):
    """Its buffers may be freed twice."""

    def alloc_host(self, nbytes: int, **wishes: Any) -> HostBuffer:
        """Allocate as the host runtime does."""
        buffer = super().alloc_host(nbytes, **wishes)
        return _SilentBuffer(buffer.array, buffer.granted, buffer._mapping, buffer._unlink)


class WishesUnanswered(HostRuntime):
    """It does not say what it granted."""

    def alloc_host(self, nbytes: int, **wishes: Any) -> HostBuffer:
        """Allocate as the host runtime does."""
        buffer = super().alloc_host(nbytes, **wishes)
        buffer.granted = {k: v for k, v in buffer.granted.items() if k == "shared_name"}
        return buffer


class ImportCopies(HostRuntime):
    """It hands out a copy of shared memory."""

    def import_buffer(self, handle: SharedName) -> HostBuffer:
        """Copy instead of mapping."""
        shared = super().import_buffer(handle)
        copy = super().alloc_host(handle.nbytes)
        copy.array[:] = shared.array
        shared.free()
        return copy


class ArraysCopied(HostRuntime):
    """It copies the arrays it is given."""

    def array(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a copy."""
        return super().array(array).copy()


for _kind in (SecondFreeIsSilent, WishesUnanswered, ImportCopies, ArraysCopied):
    _runtime(_kind)
