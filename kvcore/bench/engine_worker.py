"""A vLLM engine that is told what to do, line by line: `engine.py` runs this in the engine's own environment.

The first line of standard input says what to start, each further one what to do; each is answered by one line. Lines
are JSON objects. What the engine's libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

__all__: list[str] = []

_END_SECONDS = 40.0


class Worker:
    """An engine, and the calls on it that a line may name.

    Parameters
    ----------
    model : str
    options : dict
        Arguments of ``vllm.LLM``.
    connector : dict, optional
        Fields of ``vllm.config.KVTransferConfig``.
    """

    def __init__(self, model: str, options: dict[str, Any], connector: dict[str, Any] | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if connector is not None:
            options = {**options, "kv_transfer_config": KVTransferConfig(**connector)}
        self._llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=False, **options)
        self._engine = self._llm.llm_engine
        self._requests = 0

    def describe(self) -> dict[str, Any]:
        """What the engine made of its options."""
        import vllm

        config = self._engine.vllm_config
        cache = config.cache_config
        return {
            "version": vllm.__version__,
            "blocks": cache.num_gpu_blocks,
            "block_tokens": cache.block_size,
            "prefix_caching": cache.enable_prefix_caching,
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }

    def generate(
        self, prompts: list[list[int]], tokens: int, together: bool, abort: list[int], abort_after: float, pause: float,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Go on from prompts greedily, all of them at once or one after the other.

        Those whose index is in `abort` are aborted `abort_after` seconds after all were given to the engine. `pause` is
        a time to wait after each prompt that goes alone, so that what the engine does in the background ends.
        """
        answers: list[dict[str, Any]] = []
        for batch in [prompts] if together else [[prompt] for prompt in prompts]:
            answers += self._run(batch, tokens, set(abort) if together else set(), abort_after)
            time.sleep(pause)
        return answers

    def _run(self, prompts: list[list[int]], tokens: int, abort: set[int], abort_after: float) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        answers: dict[str, dict[str, Any]] = {}
        began = time.perf_counter()
        last = ""
        for number, prompt in enumerate(prompts):
            name = f"{self._requests}-{number}"
            answers[name] = {"aborted": True, "tokens": [], "logprobs": [], "cached": 0, "ttft": None, "finish": None}
            last = self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
            if number in abort:
                answers[name]["id"] = last
        self._requests += 1
        if abort:
            time.sleep(abort_after)
            self._engine.abort_request(
                [answer.pop("id") for answer in answers.values() if "id" in answer], internal=True
            )
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                self._take(answers[output.request_id], output, time.perf_counter() - began)
        return list(answers.values())

    @staticmethod
    def _take(answer: dict[str, Any], output: Any, now: float) -> None:
        """Note what a request has come to."""
        (completion,) = output.outputs
        if answer["ttft"] is None and completion.token_ids:
            answer["ttft"] = now
        if output.finished:
            answer["aborted"] = completion.finish_reason == "abort"
            answer["finish"] = completion.finish_reason
            answer["tokens"] = list(completion.token_ids)
            answer["cached"] = output.num_cached_tokens or 0
            steps = completion.logprobs or []
            answer["logprobs"] = [next(iter(step.values())).logprob for step in steps]

    def forget(self) -> bool:
        """Empty the engine's own prefix cache, so that hits come from the connector alone."""
        return bool(self._llm.reset_prefix_cache())

    def metrics(self) -> dict[str, Any]:
        """Sums of the engine's counters by name, and the page that a Prometheus server would read."""
        from prometheus_client import REGISTRY, generate_latest

        sums: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if metric.type == "counter" and sample.name.endswith("_total"):
                    sums[metric.name] = sums.get(metric.name, 0.0) + sample.value
        return {"counters": sums, "text": generate_latest(REGISTRY).decode()}

    def call(self, module: str, function: str, arguments: list[Any]) -> list[Any]:
        """Call a function of a module in every worker process, with vLLM's worker and the arguments."""
        target = getattr(importlib.import_module(module), function)
        return list(self._llm.collective_rpc(target, args=tuple(arguments)))

    def close(self) -> None:
        """End the engine in order, so that its connector may finish what is on its way."""
        self._engine.engine_core.shutdown(timeout=_END_SECONDS)

    def idle(self, seconds: float) -> None:
        """Let what happens in the background happen."""
        time.sleep(seconds)


def main() -> None:
    """Serve until the input ends."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # whatever a library prints from here on goes to the log, not between our lines

        def tell(**message: Any) -> None:
            out.write(json.dumps(message) + "\n")
            out.flush()

        try:
            began = time.perf_counter()
            worker = Worker(**json.loads(sys.stdin.readline()))
            tell(result={**worker.describe(), "start_seconds": time.perf_counter() - began})
            for line in sys.stdin:
                request = json.loads(line)
                tell(result=getattr(worker, request.pop("do"))(**request))
            worker.close()
        except Exception as error:
            tell(error=f"{type(error).__name__}: {error}")
            raise


if __name__ == "__main__":
    main()
