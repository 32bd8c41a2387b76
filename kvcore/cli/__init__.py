"""The command line. Only here are typer and rich imported; each command imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvcore import __version__
from kvcore.cli.bench import bench
from kvcore.cli.calc import calc
from kvcore.cli.clear import clear
from kvcore.cli.demo import demo, demo_phase
from kvcore.cli.describe import describe
from kvcore.cli.doctor import doctor
from kvcore.cli.eval import evaluate
from kvcore.cli.inspect import inspect
from kvcore.cli.ops import ops
from kvcore.cli.simulate import simulate
from kvcore.cli.vllm_demo import vllm_demo
from kvcore.errors import KVCoreError

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Turns errors that kvcore raises on purpose into one clean message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVCoreError as error:
            if ctx.params.get("traceback"):
                raise
            # An OSError prints its errno in front; the message says it in words.
            message = error.strerror if isinstance(error, OSError) and error.strerror else error
            typer.echo(f"kvcore: {message}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    name="kvcore",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcore {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error was raised, not just its message.")
    ] = False,
) -> None:
    """Move an LLM's KV cache out of the engine, make it small, keep it in tiers, put it back."""


app.command()(bench)
app.command()(calc)
app.command()(clear)
app.command()(demo)
app.command()(describe)
app.command()(doctor)
app.command("eval")(evaluate)
app.command()(inspect)
app.command()(ops)
app.command()(simulate)
app.command("vllm-demo")(vllm_demo)
app.command(hidden=True)(demo_phase)


def main() -> None:
    """Run the command line; the console script ``kvcore`` and ``python -m kvcore`` call this."""
    app(prog_name="kvcore")
