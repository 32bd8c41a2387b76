"""Layers import lower layers only; the contracts stand in pyproject.toml, under [tool.importlinter]."""

from __future__ import annotations

import subprocess
import sys

LINT = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"

CONTRACT = """
[tool.importlinter]
root_package = "layered"

[[tool.importlinter.contracts]]
name = "layers"
type = "layers"
containers = ["layered"]
exhaustive = true
layers = ["(high)", "(absent)", "(low)"]
"""


def lint(config, cwd):
    command = [sys.executable, "-c", LINT, str(config), "--no-cache"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_imports_follow_the_arrows(root):
    done = lint(root / "pyproject.toml", root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_an_import_against_the_arrows_is_found(tmp_path):
    # The optional layers of the real contract are only safe because it is exhaustive: show that both bite.
    package = tmp_path / "layered"
    for name in ("high", "low", "unlisted"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("import layered.high\n" if name == "low" else "")
    (package / "__init__.py").write_text("")
    config = tmp_path / "contracts.toml"
    config.write_text(CONTRACT)
    done = lint(config, tmp_path)
    assert done.returncode != 0
    assert "layered.low" in done.stdout
    assert "unlisted" in done.stdout
