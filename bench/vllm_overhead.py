"""What storing costs a vLLM that finds nothing: prefill times of one engine that saves, and does not, in turn.

Two engines that are started alike differ by a fifth from one another on a shared machine: so it is one engine, whose
worker is told before each prompt whether to save. No prompt was seen before. Paired differences are reported, as a
share of the time without saving:

- alone: the time to the first token; what goes on in the background ends before the next prompt;
- back to back: three prompts without a pause, so that coding and writing compete with the model for the processor.

Run ``python -m bench.vllm_overhead [--engine-python PATH] [--tokens N] [--rounds N] [--serde NAME] [--direct]
[--json]``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvcore.bench.engine import EngineProcess
from kvcore.bench.engine_prompts import read_document
from kvcore.bench.ttft import EngineOptions
from kvcore.cli.bench_ttft import find_engine_python
from kvcore.cli.conversion import model_directory

GROUP = 3
AIM = 0.03


def set_saving(worker: Any, saving: bool) -> bool:
    """Run in vLLM's worker: save from now on, or do not."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group()._worker
    before = bool(side._saves)
    side._saves = saving
    return before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine-python", help="Python of an environment with vLLM")
    parser.add_argument("--tokens", type=int, default=1280, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=24, help="pairs of prompts alone; a third as many groups")
    parser.add_argument("--serde", default="raw")
    parser.add_argument("--direct", action="store_true", help="write to the disk past the page cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvcore-overhead-") as folder:
        report = measure(options, Path(folder))
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for name in ("alone", "back_to_back"):
        one = report[name]
        print(
            f"{name}: {one['plain_ms']:,.0f} ms a prompt, saving adds {100 * one['overhead']:+.2f} % "
            f"(standard error {100 * one['error']:.2f} %), aim < {100 * AIM:.0f} %: "
            f"{'met' if one['overhead'] < AIM else 'MISSED'}"
        )
    print(f"of it copying in the step: {report['store_ms']:.1f} ms; looking up: {report['lookup_ms']:.2f} ms a prompt")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the engine; return what ``--json`` prints."""
    python, model = find_engine_python(options.engine_python), model_directory()
    store = f"fs:{folder / 'kvcore'}?direct={int(options.direct)}"
    connector = EngineOptions(python, model, folder, store=store, serde=options.serde).kvcore()
    prompts = fresh_prompts(read_document(model), options.tokens)
    insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # so that it takes a function of ours
    with EngineProcess(
        python, model, connector=connector, timeout=1800, environment=insecure, max_model_len=options.tokens + 8,
        max_num_batched_tokens=max(options.tokens + 8, 2048),
    ) as engine:  # fmt: skip
        for _ in range(3):
            ask(engine, [next(prompts)], saving=True)
        alone = [pair(engine, [[next(prompts)] for _ in range(2)], number) for number in range(options.rounds)]
        groups = [[[next(prompts) for _ in range(GROUP)] for _ in range(2)] for _ in range(max(options.rounds // 3, 2))]
        together = [pair(engine, group, number) for number, group in enumerate(groups)]
        page = engine.metrics_text()
    return {
        "tokens": options.tokens,
        "rounds": options.rounds,
        "serde": options.serde,
        "direct": options.direct,
        "alone": summary(alone, 1),
        "back_to_back": summary(together, GROUP),
        "store_ms": round(milliseconds(page, "store"), 3),
        "lookup_ms": round(milliseconds(page, "lookup"), 3),
        "aim": AIM,
    }


def fresh_prompts(document: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield prompts of which no two begin alike."""
    choose = random.Random(21)
    for number in range(1 << 15):
        start = choose.randrange(len(document) - tokens)
        yield [3000 + number, *document[start : start + tokens - 1]]


def pair(engine: EngineProcess, prompts: Sequence[list[list[int]]], number: int) -> tuple[float, float]:
    """Return the seconds without and with saving; which goes first alternates."""
    seconds = {saving: ask(engine, prompts[saving], saving=saving) for saving in (number % 2 == 0, number % 2 == 1)}
    return seconds[False], seconds[True]


def ask(engine: EngineProcess, prompts: list[list[int]], *, saving: bool) -> float:
    """Return the seconds from the first prompt to the last one's first token."""
    engine.call("bench.vllm_overhead", "set_saving", saving)
    began = time.perf_counter()
    answers = engine.generate(prompts, tokens=1, together=False)
    seconds = time.perf_counter() - began if len(prompts) > 1 else answers[0].ttft or 0.0
    engine.idle(1.5)  # what is still written would fall on the next prompt
    return seconds


def summary(pairs: Sequence[tuple[float, float]], prompts: int) -> dict[str, Any]:
    """Median of the paired differences, and how sure it is: the error of a median, from the quartiles."""
    shares = sorted((saving - plain) / plain for plain, saving in pairs)
    low, median, high = statistics.quantiles(shares, n=4)
    return {
        "plain_ms": round(1e3 * statistics.median(plain for plain, _ in pairs) / prompts, 1),
        "overhead": round(median, 5),
        "error": round(1.25 * (high - low) / 1.35 / len(shares) ** 0.5, 5),
        "pairs": [[round(plain, 4), round(saving, 4)] for plain, saving in pairs],
    }


def milliseconds(page: str, operation: str) -> float:
    """Return the mean time of an operation on the engine's own path, from its metrics."""
    found = {"count": 0.0, "sum": 0.0}
    for line in page.splitlines():
        labelled, _, value = line.rpartition(" ")
        for what in found:
            if labelled.startswith(f"kvcore_request_seconds_{what}") and f'operation="{operation}"' in labelled:
                found[what] += float(value)
    return 1e3 * found["sum"] / found["count"] if found["count"] else 0.0


if __name__ == "__main__":
    main()
