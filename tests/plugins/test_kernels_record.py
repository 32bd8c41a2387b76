"""What the check of kernels writes into a backend's record."""

from __future__ import annotations

import pytest

from kvcore import settings
from kvcore.hookspecs import op_names
from kvcore.kernels.check import Target
from kvcore.kernels.check import __main__ as check
from kvcore.plugins.discover import discover
from kvcore.plugins.record import RECORD_NAME, read_evidence
from kvcore.plugins.verification import recorded_statuses

NVCC = """\
#!/bin/sh
for word; do
    case $word in
        --version) echo "Cuda compilation tools, release 13.5, V13.5.9" ;;
        -arch=bad) echo "error: bad is no architecture" >&2; exit 1 ;;
        *.cu) sed -n "s/^KVCORE_GPU_KERNEL(\\([a-z0-9_]*\\),.*/entry function '\\1'\\nUsed 8 registers/p" $word ;;
    esac
done
"""


@pytest.fixture
def fast(shelf, tmp_path, monkeypatch):
    """Return the package of a backend that is built from the core's kernels, for targets of a made-up compiler."""
    compiler = tmp_path / "nvcc"
    compiler.write_text(NVCC)
    compiler.chmod(0o755)
    by = (str(compiler),)
    targets = [Target(arch, by, (f"-arch={arch}",), "fast") for arch in ("good", "better", "bad")]
    targets += [Target("other", ("no-such-compiler",), (), "fast"), Target("sm_1", by, (), "slow")]
    monkeypatch.setattr(check, "TARGETS", targets)
    return shelf.folder / shelf.add("fast", modules={"native": "", "triton": ""}, core_kernels="True")


def spec():
    return next(c.spec for c in discover(settings.current({})) if c.name == "fast")


def test_what_compiled_is_recorded_with_its_compiler_and_what_did_not_is_told(fast, capsys):
    assert check.main(["--record", "fast", "--jobs", "1"]) == 1  # one target failed
    (piece,) = read_evidence(fast)[0]
    assert (piece.status, piece.targets) == ("compiled", {"good": "nvcc 13.5.9", "better": "nvcc 13.5.9"})
    printed = capsys.readouterr()
    assert "not in the record: bad, other" in " ".join(printed.err.split())
    assert "error: bad is no architecture" in printed.out
    rows = recorded_statuses(spec())
    assert [row.op for row in rows] == list(op_names())
    assert {(row.status, row.implementation, row.compiled_for) for row in rows} == {
        ("compiled", "native", "good better")
    }


def test_recording_is_for_all_targets_of_a_backend_that_says_it_uses_the_kernels(fast, shelf, capsys):
    with pytest.raises(SystemExit):
        check.main(["--record", "fast", "--arch", "good"])
    assert "leave --arch out" in capsys.readouterr().err
    shelf.add("slow", modules={"native": ""})
    with pytest.raises(SystemExit):
        check.main(["--record", "slow"])
    assert "BackendSpec.core_kernels" in capsys.readouterr().err
    assert not (fast / RECORD_NAME).exists()
