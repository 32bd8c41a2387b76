"""What the commands share: how they print, read sizes, and ask for packages that are not there."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from kvcore import sizes
from kvcore.errors import ConfigError, KVCoreError

__all__ = ["console", "count_bytes", "parse_size", "plain_table", "print_json", "require"]


def console(*, stderr: bool = False) -> Console:
    """Return a console on standard output, or on standard error for progress and messages.

    Text is printed as it is: ``kvcore[cuda]`` in a message is the name of an extra, not markup.
    """
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def plain_table(*columns: str, header: bool = True) -> Table:
    """Return a table without lines: readable in a terminal, in a log, and when copied into an issue."""
    table = Table(box=None, show_header=header, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_json(value: Any) -> None:
    """Print exactly one JSON value on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def count_bytes(nbytes: int) -> str:
    """Return a number of bytes for people: ``45.1 MiB (47,294,464 B)``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes:,} B" if unit == "B" else f"{value:.1f} {unit} ({nbytes:,} B)"


def parse_size(text: str, option: str) -> int:
    """Return the bytes that a text such as ``4GiB``, ``500MB`` or ``4096`` says.

    Raises
    ------
    ConfigError
        It says none, or less than one; the message names the option.
    """
    nbytes = sizes.parse_size(text, f"{option} ")
    if nbytes < 1:
        raise ConfigError(f"{option} {text!r} is less than one byte")
    return nbytes


def require(extra: str, *modules: str) -> None:
    """Raise, naming the extra to install, unless all modules are installed. Imports none of them.

    Raises
    ------
    KVCoreError
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise KVCoreError(f'this needs {", ".join(missing)}: pip install "kvcore[{extra}]"')
