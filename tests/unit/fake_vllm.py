"""Stands in for the package `vllm` in a process that the tests start: an engine that answers from what it is given.

A token is a digest of all tokens before it. A connector's folder keeps the prompts that engines were given; what begins
like one of them counts as cached, in chunks of its configuration.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace


class SamplingParams(SimpleNamespace):
    pass


class KVTransferConfig(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, kv_transfer_config=None, **options):
        if options.get("max_num_seqs") == 13:
            raise ValueError("thirteen sequences bring bad luck")
        self.llm_engine = Engine(kv_transfer_config, options)

    def collective_rpc(self, function, args):
        return [function("a worker", *args)]

    def reset_prefix_cache(self):
        self.llm_engine.own.clear()
        return True


class Engine:
    def __init__(self, connector, options):
        self.own, self.waiting = [], {}
        self.engine_core = SimpleNamespace(shutdown=lambda timeout: None)
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=9, block_size=128, enable_prefix_caching=True),
            scheduler_config=SimpleNamespace(
                enable_chunked_prefill=True, max_num_batched_tokens=options.get("max_num_batched_tokens", 4096)
            ),
        )
        self.folder, self.chunk = None, 256
        if connector is not None:
            extra = connector.kv_connector_extra_config
            self.chunk = extra.get("chunk_tokens", self.chunk)
            uri = extra["tiers"][0]["store"] if "tiers" in extra else extra["shared_storage_path"]
            self.folder = Path(uri.removeprefix("fs:"))
            self.folder.mkdir(parents=True, exist_ok=True)

    def add_request(self, name, prompt, params):
        tokens = prompt["prompt_token_ids"]
        if tokens[0] == 666:
            os._exit(3)
        self.waiting[name + "-internal"] = (name, tokens, params.max_tokens)
        return name + "-internal"

    def abort_request(self, names, internal=False):
        for name in names:
            del self.waiting[name]

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        done = []
        for name, prompt, count in self.waiting.values():
            tokens = list(prompt)
            for _ in range(count):
                digest = hashlib.sha256(json.dumps(tokens).encode()).digest()
                tokens.append(int.from_bytes(digest[:2], "little"))
            new = tokens[len(prompt) :]
            steps = [{token: SimpleNamespace(logprob=-0.5)} for token in new]
            completion = SimpleNamespace(token_ids=new, finish_reason="length", logprobs=steps)
            done.append(
                SimpleNamespace(
                    request_id=name, finished=True, outputs=[completion], num_cached_tokens=self.cached(prompt)
                )
            )
            self.own.append(prompt)
            if self.folder is not None:
                digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
                (self.folder / digest).write_text(json.dumps(prompt))
        self.waiting = {}
        return done

    def cached(self, prompt):
        seen = list(self.own)
        if self.folder is not None:
            seen += [json.loads(path.read_text()) for path in self.folder.iterdir()]
        return max((common(prompt, other) // self.chunk * self.chunk for other in seen), default=0)


def common(one, other):
    same = [a == b for a, b in zip(one[:-1], other, strict=False)]
    return same.index(False) if False in same else len(same)


__version__ = "0.32.0"
config = ModuleType("vllm.config")
config.KVTransferConfig = KVTransferConfig
sys.modules["vllm.config"] = config
