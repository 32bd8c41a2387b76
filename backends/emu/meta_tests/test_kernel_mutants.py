"""Kernels that are wrong on purpose: one place of a header is changed, and the conformance suite must see it.

Each is compiled for the emulated device and judged by the tests of its op, in a process of its own: some end it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvcore.kernels import get_include
from kvcore.kernels.images import cache_folder, keep_last
from kvcore_emu.sanitize import environment

# Up to the first failure; whatever the project around configures must not decide what is caught, and what kernels print
# is to be seen.
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=.", "--capture=sys")
SUITE = ("--pyargs", "kvcore_conformance", "--kvcore-backend", "emu", "--kvcore-no-shrink", "-x", "-q", "--tb=short")

# What the output of a run says, by how a defect is seen. The op (or kernel) of the mutant is in the place of {}.
SEEN = {
    "test": r"^E +(\w+\.)*(ConformanceFailure|AssertionError): {}\b",
    "abort": r"^kvcore: kernel {}, block \d+, thread \d+: ",
    "fault": r"^Fatal Python error: Segmentation fault",
    "address": r"AddressSanitizer: \S*(overflow|underflow|use-after-\w+)",
}


@dataclass(frozen=True)
class Mutant:
    """A defect.

    Parameters
    ----------
    title : str
    header, text, changed : str
        Where: `text` is there exactly once, and becomes `changed`.
    op : str
        Whose tests must see it.
    seen : str
        How, a key of `SEEN`. ``"address"``: under sanitizers, and by nothing else.
    warp : {32, 64}
    """

    title: str
    header: str
    text: str
    changed: str
    op: str
    seen: str = "test"
    warp: int = 32


MUTANTS = (
    Mutant(
        "rotate: no barrier between reading a tile and the butterflies",
        "rotate.hpp",
        "                ctx.barrier();\n                butterflies(",
        "                butterflies(",
        "rotate",
    ),
    Mutant(
        "count_symbols: counting begins before all counters are zero",
        "count_symbols.hpp",
        "counts[i] = 0;\n            ctx.barrier();",
        "counts[i] = 0;",
        "count_symbols",
    ),
    Mutant(
        "rotate: only threads that have something to write come to a barrier",
        "rotate.hpp",
        "            ctx.barrier();\n            with_float(a.out_type",
        "            if (ctx.thread() < count) ctx.barrier();\n            with_float(a.out_type",
        "rotate",
        seen="abort",
    ),
    Mutant(
        "encode_symbols: words are pushed in the order of lanes, not against it",
        "encode_symbols.hpp",
        "const int to = count + lanes_above<C>(fulls, lane);",
        "const int to = count + lanes_below<C>(fulls, lane);",
        "encode_symbols",
    ),
    Mutant(
        "decode_symbols: lanes take words against their order",
        "decode_symbols.hpp",
        "take(parts, tile, read + lanes_below<C>(lows, lane))",
        "take(parts, tile, read + lanes_above<C>(lows, lane))",
        "decode_symbols",
    ),
    Mutant(
        "decode_symbols: escaped values in the wrong order of lanes",
        "decode_symbols.hpp",
        "take(parts, tile, read + lanes_below<C>(escapes, lane))",
        "take(parts, tile, read + lanes_above<C>(escapes, lane))",
        "decode_symbols",
    ),
    Mutant(
        "decode_symbols: in a warp of 64 both groups go by the votes of the first",
        "tiles.hpp",
        "uint32_t(ctx.ballot(mine) >> (ctx.lane() & ~(LANES - 1)))",
        "uint32_t(ctx.ballot(mine))",
        "decode_symbols",
        warp=64,
    ),
    Mutant(
        "quantize: scales are written although the values were refused",
        "quantize.hpp",
        "KVCORE_UNLESS_FAILED(a.status);\n        for (int64_t group = first_item(ctx)",
        "for (int64_t group = first_item(ctx)",
        "quantize",
    ),
    Mutant(
        "scatter_paged: duplicate targets are not reported",
        "paged.hpp",
        "a.least[target] != uint64_t(i))",
        "a.least[target] > uint64_t(i))",
        "scatter_paged",
    ),
    Mutant(
        "gather_paged: where a token lies in its chunk is counted from those that it is moved with",
        "paged.hpp",
        "token + k, a.first_token[chunk], moves[k]",
        "token + k, token, moves[k]",
        "gather_paged",
    ),
    Mutant(
        "shift_rope: rounds half up, not half to even",
        "floats.hpp",
        "(a + 0x7FFFu + (a >> 16 & 1)) >> 16",
        "(a + 0x8000u) >> 16",
        "shift_rope",
    ),
    Mutant(
        "unpack_bits: signs are not extended",
        "unpack_bits.hpp",
        "uint8_t((value ^ sign) - sign)",
        "uint8_t(value)",
        "unpack_bits",
    ),
    Mutant(
        "pack_bits: the last byte of a row is left out where it is not full",
        "pack_bits.hpp",
        "byte * 8 < count * a.bits; byte++",
        "byte * 8 + 8 <= count * a.bits; byte++",
        "pack_bits",
    ),
    Mutant(
        "digest: the last byte of a block at an odd address counts for nothing",
        "digest.hpp",
        "k < 16 && k < nbytes; k++)\n            (k < 8",
        "k < 15 && k < nbytes; k++)\n            (k < 8",
        "digest",
    ),
    Mutant(
        "reduce_absmax: the last two lanes do not meet",
        "reduce.hpp",
        "for (int mask = a.lanes / 2; mask > 0; mask /= 2)\n                for (Word",
        "for (int mask = a.lanes / 2; mask > 1; mask /= 2)\n                for (Word",
        "reduce_absmax",
    ),
    Mutant(
        "quantize: the table of a codebook is not copied to the device",
        "quantize.hpp",
        "elements.middles = q.upload(middles, elements.middle_count)",
        "elements.middles = middles",
        "quantize",
    ),
    Mutant(
        "reduce_absmax: an address of the device is used as it is given",
        "reduce_absmax.hpp",
        "q.template device<char>(a.out.data)",
        "reinterpret_cast<char *>(a.out.data)",
        "reduce_absmax",
        seen="fault",
    ),
    Mutant(
        "quantize: the last run of a row is read to its full length",
        "views.hpp",
        "        if (i < count) items[i] = load<T>(from + i * stride);",
        "        items[i] = load<T>(from + i * stride);",
        "quantize",
        seen="address",
    ),
    Mutant(
        "rotate: less shared memory is asked for than is used",
        "rotate.hpp",
        "KVCORE_MAX_THREADS, Rotate::shared_bytes, rotate)",
        "KVCORE_MAX_THREADS, Rotate::shared_bytes / 2, rotate)",
        "rotate",
        seen="address",
    ),
)


def changed_headers(mutant):
    """Return a folder with all headers, one of them changed; its name is that of the content.

    It is kept, with the library made of it, for as many mutants as there are and a few that were before.
    """
    path = Path(get_include(), "kvcore", mutant.header)
    text = path.read_text("utf-8")
    found = text.count(mutant.text)
    if found != 1:
        raise AssertionError(f"{mutant.title}: its text is in {mutant.header} {found} times, not once:\n{mutant.text}")
    text = text.replace(mutant.text, mutant.changed)
    digest = hashlib.sha256(text.encode())
    for header in sorted(path.parent.iterdir()):
        digest.update(header.name.encode() + header.read_bytes())
    folder = cache_folder() / f"mutant-{digest.hexdigest()[:20]}"
    if not folder.exists():
        made = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.copytree(path.parent, made / "kvcore")
        (made / "kvcore" / mutant.header).write_text(text, "utf-8")
        made.rename(folder)
    os.utime(folder)
    keep_last(folder.parent, "mutant-*", len(MUTANTS) + 8)
    return folder


def judge(op, headers, *, warp=32, sanitized=False):
    """Run the tests of an op, and return the exit status and what was printed.

    As for mutants of backends, the oracle alone must catch what can be seen in results, and by its op.
    """
    tests = ("--kvcore-ops", op, "-k", "not as_the_reference and not golden")
    return run([*PYTEST, *SUITE, *tests], headers, warp=warp, sanitized=sanitized)


def run(command, headers, *, warp=32, sanitized=False):
    flags = f"-O0 -I {shlex.quote(str(headers))}"  # not optimised: they are compiled more than they are run
    cache = {"XDG_CACHE_HOME": str(headers / "built")}  # lives as long as the headers do, and crowds nothing else out
    environ = {**os.environ, **cache, "KVCORE_EMU_WARP": str(warp), "KVCORE_EMU_FLAGS": flags}
    environ = environment(environ) if sanitized else environ
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_the_suite_catches(mutant, score):
    score[mutant.title] = False
    sanitized = mutant.seen == "address"
    status, output = judge(mutant.op, changed_headers(mutant), warp=mutant.warp, sanitized=sanitized)
    said = re.search(SEEN[mutant.seen].format(mutant.op), output, re.MULTILINE)
    assert status != 0, f"no test of {mutant.op} failed"
    assert said, f"{mutant.op} failed, but for another reason:\n{output[-4000:]}"
    score[mutant.title] = True


UNCHANGED = Mutant("unchanged", "rotate.hpp", "struct Rotate {", "struct Rotate {", "rotate")


@pytest.mark.parametrize(("warp", "sanitized"), [(32, False), (64, True)])
def test_unchanged_kernels_pass(warp, sanitized):
    status, output = judge("rotate", changed_headers(UNCHANGED), warp=warp, sanitized=sanitized)
    assert status == 0, output[-4000:]
    assert " passed" in output


@pytest.mark.parametrize("op", ["pack_bits", "gather_paged"])
def test_the_printed_source_fails_with_the_defect_and_only_with_it(op):
    headers = changed_headers(next(m for m in MUTANTS if m.op == op))
    _, output = judge(op, headers)
    source = re.search(r"^-+ source that reproduces it -+\n(.*?)^==", output, re.MULTILINE | re.DOTALL)
    assert source, output[-4000:]
    command = [sys.executable, "-c", source[1]]
    status, output = run(command, headers)
    assert (status, "AssertionError" in output) == (1, True), output
    assert run(command, changed_headers(UNCHANGED)) == (0, "")


def test_a_mutant_whose_text_is_gone_is_no_mutant():
    for text in ("there is no such text", "ctx.barrier();"):
        with pytest.raises(AssertionError, match="times, not once"):
            changed_headers(Mutant("", "rotate.hpp", text, "", "rotate"))
