"""``kvcore bench --suite ttft``: times to the first token of a real vLLM, with kvcore and without."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvcore.cli.conversion import model_directory
from kvcore.cli.output import console, plain_table, require
from kvcore.errors import ConfigError

if TYPE_CHECKING:
    from kvcore.bench.ttft import Say, TtftRow

__all__ = ["TtftSizes", "bench_ttft", "find_engine_python", "print_ttft", "progress", "read_lengths", "ttft_table"]

LENGTHS = "512,1024,2048,4000,7000"
_DEFAULT_PYTHON = Path(".vllm-venv", "bin", "python")


@dataclass(frozen=True, slots=True)
class TtftSizes:
    """How much is measured.

    Parameters
    ----------
    lengths : str
        Of documents, in tokens.
    users : int
        Prompts that begin with one document.
    chunk_tokens : int
        Of kvcore's chunks.
    repeats : int
        Documents of each length.
    """

    lengths: str = LENGTHS
    users: int = 3
    chunk_tokens: int = 256
    repeats: int = 1

    @classmethod
    def of(cls, **given: Any) -> TtftSizes:
        """Take what is given; None is the default."""
        return cls(**{name: value for name, value in given.items() if value is not None})


def find_engine_python(given: str | None) -> str:
    """Return the interpreter of an environment with vLLM: the one that is named, this one, or `make vllm-env`'s.

    Raises
    ------
    ConfigError
        There is none; the message says how to make one.
    """
    from kvcore.bench.engine import check_engine_python

    if given is None and importlib.util.find_spec("vllm") is not None:
        return sys.executable
    return check_engine_python(given or str(_DEFAULT_PYTHON))


def read_lengths(text: str) -> list[int]:
    """Return numbers of tokens with commas between them, in order. Raises `ConfigError` for anything else."""
    try:
        lengths = sorted({int(part.replace("_", "")) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"--lengths {text!r} is not numbers of tokens with commas between them: 512,4000") from error
    return lengths


def bench_ttft(
    python: str | None, model: str | None, store: str | None, sizes: TtftSizes, *, quiet: bool
) -> tuple[dict[str, Any], list[TtftRow]]:
    """Measure; return what ``--json`` prints but for the machine, and the rows.

    Parameters
    ----------
    python : str, optional
        Of the engine's environment.
    model : str, optional
        Directory of Hugging Face or GGUF file.
    store : str, optional
        URI of kvcore's store; by default a new directory, which is removed.
    sizes : TtftSizes
    quiet : bool
        Show no progress.

    Raises
    ------
    ConfigError, KVCoreError
        There is no engine, no model, a length means nothing, or an engine fails.
    """
    from kvcore.bench.engine_prompts import read_document
    from kvcore.bench.ttft import EngineOptions, conversations, measure_ttft

    wanted, interpreter = read_lengths(sizes.lengths), find_engine_python(python)
    require("demo", "tokenizers")
    with tempfile.TemporaryDirectory(prefix="kvcore-ttft-") as folder, progress("ttft", quiet) as say:
        say("convert the model")
        directory = model_directory(model)
        document = read_document(directory, least=max(wanted) + 4096)
        how = {name: value for name, value in asdict(sizes).items() if name != "lengths"}
        asked = conversations(document, wanted, **how)
        options = EngineOptions(interpreter, directory, Path(folder), store or "", chunk_tokens=sizes.chunk_tokens)
        rows, about = measure_ttft(asked, options, say)
    report = {
        "suite": "ttft",
        "engine": f"vllm {about['version']}",
        "model": Path(directory).name,
        "store": store or "fs: a new directory",
        **how,
        "rows": [row.to_dict() for row in rows],
        "hit_rate": about["hit_rate"],
        "metrics": about["metrics"],
    }
    return report, rows


@contextlib.contextmanager
def progress(name: str, quiet: bool) -> Iterator[Say]:
    """Give a function that shows what happens."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), disable=quiet, transient=True) as shown:
        task = shown.add_task(name)
        yield lambda what: shown.update(task, description=f"{name}: {what}")


def ttft_table(rows: Sequence[TtftRow]) -> Any:
    """Return the rows as a table; columns that nothing was measured for are left out."""
    fields = (
        ("plain_ms", "computed, ms"),
        ("own_ms", "vLLM's cache"),
        ("cold_ms", "computed, stored"),
        ("store_ms", "from the store"),
        ("host_ms", "from host memory"),
        ("example_ms", "ExampleConnector"),
    )
    shown = [(field, title) for field, title in fields if any(getattr(row, field) is not None for row in rows)]
    table = plain_table("prefix, tokens", *(title for _, title in shown), "faster", "restored", "identical")
    for row in rows:
        values = [getattr(row, field) for field, _ in shown]
        table.add_row(
            f"{row.tokens:,}",
            *("" if value is None else f"{value:,.0f}" for value in values),
            f"{row.speedup:.1f}x",
            f"{row.hit_tokens:,}",
            "yes" if row.identical else "NO",
        )
    return table


def print_ttft(report: dict[str, Any], rows: Sequence[TtftRow]) -> None:
    """Print the figures for people."""
    out = console()
    machine = report["machine"]
    out.print(f"{report['engine']}, {report['model']}, on {machine['processor'] or machine['machine']}")
    out.print(f"times to the first token; {report['users']} users a document, store: {report['store']}")
    out.print(ttft_table(rows))
    out.print(
        "Computed: an engine without a connector. vLLM's cache: the next user there. Computed, stored: an engine that "
        "stores with kvcore. From the store: a new engine, the same prompt; from host memory: its next users, after "
        "vLLM's own cache was emptied. Faster: from the store, against the faster of both that computed. "
        "ExampleConnector: the same prompt again, which it finds to the block; kvcore finds chunks of "
        f"{report['chunk_tokens']} tokens.",
        style="dim",
    )
    if report["hit_rate"] is not None:
        out.print(f"hit rate of the new engine: {100 * report['hit_rate']:.1f} %")
