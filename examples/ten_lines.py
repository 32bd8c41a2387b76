"""The KV of a prompt, kept in a directory: run it twice, and the second time the prompt is not computed again.

usage: python examples/ten_lines.py MODEL FILE    (a local directory or hub id, and a long text)
"""

# ruff: noqa: E402  (the example below begins with its own imports)
import sys
from pathlib import Path

model_path, text = sys.argv[1], Path(sys.argv[2]).read_text("utf-8")
# --8<-- [start:example]
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcore.connectors.transformers import PrefixKVCache

model, tokenizer = (kind.from_pretrained(model_path) for kind in (AutoModelForCausalLM, AutoTokenizer))
tokens = tokenizer(text, return_tensors="pt").input_ids
cache = PrefixKVCache.for_model(model, store="fs:kv-store")
kv, hit_tokens = cache.restore(tokens)  # whole chunks of 256 tokens; empty the first time
output = model.generate(tokens, cache=kv, max_new_tokens=32)  # computes the other tokens only
report = cache.save(tokens, kv)  # writes what was not there yet
# --8<-- [end:example]
print(f"{tokens.shape[1]} tokens, {hit_tokens} restored, {report.chunks_written} chunks written")
print(tokenizer.decode(output[0, tokens.shape[1] :]))
