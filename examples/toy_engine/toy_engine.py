"""A toy inference engine with a paged KV cache, and a connector that gives it kvcore's tiers."""

import numpy as np

from kvcore.engine import Namespace
from kvcore.engine.config import load_config
from kvcore.engine.kv import PagedKV
from kvcore.engine.opening import open_engine
from kvcore.engine.parts import CachePart
from kvcore.layout import Layout
from kvcore.memory import chunk_desc

LAYERS, HEADS, WIDTH, BLOCK = 3, 2, 8, 16


class ToyEngine:
    """Reads prompts. The KV of a token depends on all tokens before it, as in a model; so does what comes out."""

    def __init__(self, weights, blocks=64):
        self.weights = weights
        self.kv = np.zeros((LAYERS, 2, blocks, BLOCK, HEADS, WIDTH), np.float32)  # layer, K and V, block, token, ...
        self.free = list(range(blocks))
        self.computed = 0  # tokens that it had to compute, in all
        self.connector = None

    def prefill(self, name, tokens):
        """Return a number that depends on the KV of every token of the prompt."""
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // BLOCK))]
        ready = 0 if self.connector is None else self.connector.load(name, tokens, blocks)
        for at in range(ready, len(tokens)):
            state = np.random.default_rng([self.weights, *tokens[: at + 1]])
            self.kv[:, :, blocks[at // BLOCK], at % BLOCK] = state.standard_normal((LAYERS, 2, HEADS, WIDTH))
            self.computed += 1
        if self.connector is not None:
            self.connector.save(name, tokens, blocks)
        answer = float(self.kv[:, :, blocks].reshape(LAYERS, 2, -1, HEADS, WIDTH)[:, :, : len(tokens)].sum())
        self.free += blocks  # the next request overwrites them
        return answer


class ToyConnector:
    """What stands between the two: whose KV it is, where it lies, and when to look, load and save."""

    def __init__(self, toy, settings):
        config = load_config(settings)  # a file and KVCORE_* variables too; a typo is an error here
        self.rows = Layout("L|KBNHD").bind(list(toy.kv))  # addresses and strides, no copy
        namespace = Namespace(
            "toy", f"weights:{toy.weights}", kv_dtype="float32", chunk_tokens=config.chunk_tokens, salt=config.salt
        )
        desc = chunk_desc(self.rows, config.chunk_tokens)  # the form that is stored
        part = CachePart(desc, layers=tuple(range(LAYERS)), heads=(0, HEADS), all_heads=HEADS)
        self.cache = open_engine(config, namespace, [part], model_layers=LAYERS, block_tokens=BLOCK)

    def load(self, name, tokens, blocks):
        """Fill blocks with what is stored; return up to which token they are right."""
        keys = self.cache.keys(tokens)
        stop = self.cache.lookup_keys(keys, len(tokens), request=name)  # whole blocks, and not the last token
        if not stop:
            return 0
        return self.cache.retrieve_keys(keys, self._kv(blocks), start=0, stop=stop, request=name)

    def save(self, name, tokens, blocks):
        """Copy what is not stored yet; coding and writing go on in the background."""
        self.cache.store_keys(self.cache.keys(tokens), self._kv(blocks), total=len(tokens), request=name)

    def close(self):
        """Wait until all of it is stored."""
        self.cache.flush()
        self.cache.close()

    def _kv(self, blocks):
        return PagedKV.of_blocks(self.cache.backend, [self.rows], [blocks])
