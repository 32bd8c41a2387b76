"""Reads the object that `kvcore demo --json` prints, and fails unless it keeps what the project promises.

With the argument ``exact`` for a demo that stores every bit: then tokens are the same. Without it, for the default: a
quarter of the bytes.
"""

from __future__ import annotations

import json
import sys

CHUNK_TOKENS = 256
MIN_HIT_TOKENS = 1536
MIN_SPEEDUP = 5.0
MIN_RATIO = 4.0
FIELDS = (
    "model",
    "prompt_tokens",
    "hit_tokens",
    "backend",
    "codec",
    "cold_ttft_ms",
    "warm_ttft_ms",
    "host_ttft_ms",
    "speedup",
    "tiers",
    "raw_bytes",
    "stored_bytes",
    "ratio",
    "tokens_identical",
    "generated",
)


def broken_promises(result: dict[str, object], exact: bool) -> list[str]:
    """Return one sentence for each promise that the result does not keep."""
    missing = [name for name in FIELDS if name not in result]
    if missing:
        return [f"fields missing: {', '.join(missing)}"]
    hit_tokens, speedup, ratio = result["hit_tokens"], result["speedup"], result["ratio"]
    if not isinstance(hit_tokens, int) or not isinstance(speedup, float) or not isinstance(ratio, float):
        return [f"hit_tokens, speedup and ratio must be numbers, got {hit_tokens!r}, {speedup!r}, {ratio!r}"]
    tiers = result["tiers"]
    hits = {name: tier["hits"] for name, tier in tiers.items()} if isinstance(tiers, dict) else {}
    checks = {
        "tokens_identical is not true": result["tokens_identical"] is True or not exact,
        f"ratio {ratio} is under {MIN_RATIO}": ratio >= MIN_RATIO or exact,
        f"the tiers' hits {hits} are not once all chunks in each": all(
            found * CHUNK_TOKENS == hit_tokens for found in hits.values()
        )
        and len(hits) == 2,
        f"hit_tokens {hit_tokens} is not a multiple of {CHUNK_TOKENS}": hit_tokens % CHUNK_TOKENS == 0,
        f"hit_tokens {hit_tokens} is under {MIN_HIT_TOKENS}": hit_tokens >= MIN_HIT_TOKENS,
        f"speedup {speedup} is under {MIN_SPEEDUP}": speedup >= MIN_SPEEDUP,
    }
    return [sentence for sentence, kept in checks.items() if not kept]


def main() -> int:
    """Read the result from standard input; return 0 if every promise is kept."""
    result = json.loads(sys.stdin.read())
    broken = broken_promises(result, exact="exact" in sys.argv[1:])
    for name, value in result.items():
        sys.stdout.write(f"  {name}: {str(value)[:100]}\n")
    for sentence in broken:
        sys.stderr.write(f"demo: {sentence}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
