"""ACME's ops: loops over tokens, bit patterns for magnitudes, Python's integers for bits."""

import numpy as np

from kvcore import QuantizationError, SlotError, hookimpl, supports


def copy_token(src, source, dst, target):
    """Copy one token: in each part and layer, its bytes [heads, width, item size]."""
    for part, layer in src.planes():
        dst.bytes_view(part, layer)[target] = src.bytes_view(part, layer)[source]


def moves(cache, index, unit, skip_tokens, chunks):
    """Return (chunk, place in it, place in the cache) of every token that moves; all are checked first."""
    size, limit = (1, cache.tokens) if unit == "slot" else (cache.block_tokens, cache.blocks)
    homes, found = [(chunk, t) for chunk in chunks for t in range(chunk.tokens)], []
    for t, (chunk, token) in enumerate(homes[skip_tokens:], skip_tokens):
        row = int(index[t // size])
        if not -1 <= row < limit:
            raise SlotError(f"token {t} has {unit} {row}, outside -1 .. {limit - 1}")
        if row >= 0:
            found.append((chunk, (0, token), divmod(row * size + t % size, cache.block_tokens)))
    return found


@hookimpl
def kvcore_op_gather_paged(src, index, *, unit="slot", skip_tokens=0, out, stream=None, workspace=None):
    for chunk, token, place in moves(src, index, unit, skip_tokens, out):
        copy_token(src, place, chunk, token)
    return out


@hookimpl
def kvcore_op_scatter_paged(
    src, index, *, unit="slot", skip_tokens=0, check_duplicates=True, out, stream=None, workspace=None
):
    found = moves(out, index, unit, skip_tokens, src)
    if check_duplicates and len({place for _, _, place in found}) < len(found):
        raise SlotError("two tokens have one target; each slot takes one token")
    for chunk, token, place in found:
        copy_token(chunk, token, out, place)
    return out


@hookimpl
def kvcore_op_convert_layout(src, *, out, stream=None, workspace=None):
    for token in range(src.tokens):
        copy_token(src, (0, token), out, (0, token))
    return out


@hookimpl
def kvcore_op_copy_batch(src, *, digests=None, out, stream=None, workspace=None):
    for source, target in zip(src, out, strict=True):
        target[:] = source
    if digests is not None:
        kvcore_op_digest(src, out=digests)
    return out


def mix(z):
    z = (z ^ z % 2**64 >> 30) * 0xBF58476D1CE4E5B9
    z = (z ^ z % 2**64 >> 27) * 0x94D049BB133111EB
    return (z ^ z % 2**64 >> 31) % 2**64


@hookimpl
def kvcore_op_digest(src, *, out, stream=None, workspace=None):
    golden = 0x9E3779B97F4A7C15
    for i, buffer in enumerate(src):
        words = [int.from_bytes(buffer[at : at + 8], "little") for at in range(0, buffer.size, 8)] + [0]
        total = mix(buffer.size ^ 0xD6E8FEB86659FD93)
        for n in range(0, len(words) - 1, 2):
            total += mix((mix(words[n] + golden * (n + 1)) ^ words[n + 1]) + golden * (n + 2))
        out[i] = total % 2**64
    return out


@hookimpl
@supports(dtypes=("bfloat16", "float32"))  # float16 goes to the fallback
def kvcore_op_reduce_absmax(x, *, axes, nonfinite="error", out, stream=None, workspace=None):
    bits, infinity = x.astype(np.float32).view(np.uint32) & 0x7FFFFFFF, 0x7F800000  # they order as magnitudes do
    if nonfinite == "error" and (bits >= infinity).any():
        raise QuantizationError("x has a NaN or infinity")
    if nonfinite == "saturate":
        bits = np.where(bits > infinity, 0, np.minimum(bits, 0x7F7F0000 if x.itemsize == 2 else 0x7F7FFFFF))
    top = bits.max(axis=axes, keepdims=True)
    out[...] = np.where(top > infinity, 0x7FC00000, top).astype(np.uint32).view(np.float32)
    return out


@hookimpl
def kvcore_op_pack_bits(x, *, bits, out, stream=None, workspace=None):
    low = 0 if x.dtype == np.uint8 else -(1 << bits - 1)
    if x.size and not low <= x.min() <= x.max() < low + (1 << bits):
        raise QuantizationError(f"x has values that do not fit {bits} bits")
    for row in np.ndindex(x.shape[:-1]):
        number = sum(int(value) % (1 << bits) << bits * i for i, value in enumerate(x[row]))
        out[row] = np.frombuffer(number.to_bytes(out.shape[-1], "little"), np.uint8)
    return out


@hookimpl
def kvcore_op_unpack_bits(x, *, bits, out, stream=None, workspace=None):
    sign = 1 << bits - 1 if out.dtype == np.int8 else 0
    for row in np.ndindex(out.shape[:-1]):
        number = int.from_bytes(x[row].tobytes(), "little")
        out[row] = [((number >> bits * i) % (1 << bits) ^ sign) - sign for i in range(out.shape[-1])]
    return out


@hookimpl
def kvcore_op_count_symbols(x, *, out, stream=None, workspace=None):
    out[...] = np.stack([(x == symbol).sum(axis=-2) for symbol in range(256)], axis=-1)
    return out
