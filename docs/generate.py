"""Write the pages of the documentation that are made from the code: python docs/generate.py."""

from __future__ import annotations

from pathlib import Path

from kvcore.settings import VARIABLES

HEADER = """\
# Environment variables

kvcore reads these variables and no others; all are optional. They are read when a backend is opened, not when kvcore
is imported, so a notebook may change them. A value that means nothing raises `kvcore.ConfigError`, which names the
variable and gives an example. The header of the conformance suite prints their values.

This page is written by `docs/generate.py` from `kvcore.settings.VARIABLES`.
"""


def environment() -> str:
    """Return the text of `environment.md`."""
    sections = [HEADER]
    for variable in VARIABLES:
        default = f"`{variable.default}`" if variable.default else "empty"
        example = f"`{variable.name}={variable.example}`"
        sections.append(f"## {variable.name}\n\n{variable.help}\n\nDefault: {default}. For example {example}.\n")
    return "\n".join(sections)


PAGES = {"environment.md": environment}

if __name__ == "__main__":
    for name, text in PAGES.items():
        (Path(__file__).parent / name).write_text(text(), encoding="utf-8")
