"""Pages for operators, held to the code that they are about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcore.connectors.vllm.layouts import INTERIORS
from kvcore.connectors.vllm.options import VllmOptions, read_options

DOCS = Path(__file__).parents[2] / "docs"
VLLM = (DOCS / "vllm.md").read_text("utf-8")


def table(page: str, header: str) -> dict[str, list[str]]:
    """Return the rows of a table by their first cell, without backquotes."""
    lines = page[page.index(header) :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_connectors_settings_are_all_there_with_their_defaults():
    rows = table(VLLM, "| setting | default | |")
    assert set(rows) == set(VllmOptions.model_fields)
    for name, (default, _) in rows.items():
        value = VllmOptions.model_fields[name].default
        shown = {"true": True, "false": False, "": ""}.get(default.strip("`"), default.strip("`"))
        assert shown == value or float(shown) == value, name


def test_attention_backends_are_those_that_are_known():
    rows = table(VLLM, "| block interior | attention backends |")
    said = {name: set(re.findall(r"`(\w+)`", cells[0])) for name, cells in rows.items()}
    interiors = {
        "K, then V, token by token": "tokens",
        "K transposed, then V": "transposed",
        "one packed row a token (MLA)": "latent",
    }
    assert said == {
        name: {backend for backend, inside in INTERIORS.items() if inside == interior}
        for name, interior in interiors.items()
    }


def test_roles_do_what_the_table_says():
    for role, cells in table(VLLM, "| `kv_role` | loads | saves |").items():
        config = read_options({}, role=role, environ={})
        assert ["yes" if one else "no" for one in (config.loads, config.saves)] == cells


def test_the_settings_of_the_command_are_taken():
    for text in re.findall(r'"kv_connector_extra_config": (\{[^}]*\})', VLLM + (DOCS.parent / "README.md").read_text()):
        extra = dict(re.findall(r'"(\w+)": "([^"]*)"', text))
        assert read_options(extra, environ={}).engine.local_disk == "/var/cache/kvcore"


@pytest.mark.parametrize(
    "command", re.findall(r"^kvcore (calc .*--host.*)$", (DOCS / "calc.md").read_text(), re.MULTILINE)
)
def test_the_page_of_calc_shows_what_calc_prints(run, command):
    shown = re.search(r"```text\n(.*?)```", (DOCS / "calc.md").read_text("utf-8"), re.DOTALL)[1]
    done = run(*command.split())
    printed = [line.rstrip() for line in done.out.splitlines() if not line.startswith("* ")]
    assert shown.rstrip().splitlines() == "\n".join(printed).rstrip().splitlines()
