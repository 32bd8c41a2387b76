"""The transformers connector on small random models: what is restored is what was saved, or it is a miss."""

from __future__ import annotations

import errno
import importlib.util
import threading

import numpy as np
import pytest

import kvcore
from kvcore.engine import ExtraKey
from kvcore.tiers.stores import FsStore, MemoryStore

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("torch and transformers are not installed", allow_module_level=True)

import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

from kvcore.codecs.frame_format import FrameHeader
from kvcore.codecs.frame_values import Flags
from kvcore.connectors.transformers import PrefixKVCache, cache_argument
from kvcore.connectors.transformers_model import model_rope, weights_revision

CHUNK = 16
LAYERS, HEADS, WIDTH = 3, 2, 8


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    values = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 512,
        **config,
    }
    return LlamaForCausalLM(LlamaConfig(**values)).to(dtype).eval()


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def prefill(model: torch.nn.Module, tokens: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens, **{cache_argument(model): cache})
    return cache


def greedy(model: torch.nn.Module, tokens: torch.Tensor, cache: DynamicCache, hit: int) -> list[int]:
    new, fed = [], tokens[:, hit:]
    with torch.inference_mode():
        for _ in range(8):
            logits = model(input_ids=fed, **{cache_argument(model): cache}).logits
            fed = logits[:, -1:].argmax(-1)
            new.append(int(fed))
    return new


def opened(model: torch.nn.Module, store: object, **arguments: object) -> PrefixKVCache:
    return PrefixKVCache.for_model(model, store=store, **{"name": "tiny", "chunk_tokens": CHUNK, **arguments})


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_restored_is_what_was_saved_bit_by_bit(dtype):
    model, tokens = llama(dtype=dtype), prompt(53)
    cache, kv = opened(model, MemoryStore()), prefill(model, tokens)
    report = cache.save(tokens, kv)
    raw = 2 * LAYERS * HEADS * WIDTH * 48 * dtype.itemsize
    assert (report.tokens, report.chunks_written, report.chunks_present, report.raw_bytes) == (48, 3, 0, raw)
    assert report.stored_bytes > raw
    restored, hit = cache.restore(tokens)
    assert hit == 48
    for old, new in zip(kv.layers, restored.layers, strict=True):
        for a, b in ((old.keys, new.keys), (old.values, new.values)):
            assert b.dtype == dtype
            assert torch.equal(a[:, :, :48], b)


def test_a_cache_with_strides_of_its_own_is_read_where_it_lies(model):
    tokens = prompt(40)
    kv = prefill(model, tokens)
    wide = DynamicCache(config=model.config)
    for i, layer in enumerate(kv.layers):
        wide.update(layer.keys, layer.values, i)
        wide.layers[i].keys = torch.empty(1, 40, HEADS, 2 * WIDTH).transpose(1, 2)[..., ::2].copy_(layer.keys)
        wide.layers[i].values = torch.empty(1, 40, HEADS, 2 * WIDTH).transpose(1, 2)[..., 1::2].copy_(layer.values)
    cache = opened(model, MemoryStore())
    cache.save(tokens, wide)
    restored, hit = cache.restore(tokens)
    assert hit == 32
    assert all(
        torch.equal(a.keys[:, :, :32], b.keys) and torch.equal(a.values[:, :, :32], b.values)
        for a, b in zip(kv.layers, restored.layers, strict=True)
    )


def test_generation_goes_on_as_if_nothing_had_been_restored(model):
    tokens = prompt(53)
    cold = DynamicCache(config=model.config)
    expected = greedy(model, tokens, cold, 0)
    cache = opened(model, MemoryStore())
    cache.save(tokens, cold)
    restored, hit = cache.restore(tokens)
    assert hit == 48
    assert greedy(model, tokens, restored, hit) == expected


def test_the_models_own_generate_takes_and_fills_the_cache(model):
    tokens = prompt(40)
    cache = opened(model, MemoryStore())
    texts = []
    for wanted in (0, 32):
        kv, hit = cache.restore(tokens)
        assert hit == wanted
        arguments = {cache_argument(model): kv, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        texts.append(model.generate(tokens, **arguments).tolist())
        cache.save(tokens, kv)
    assert texts[0] == texts[1]


def test_a_prompt_that_is_stored_wholly_leaves_a_token_to_compute(model):
    tokens = prompt(2 * CHUNK)
    expected = greedy(model, tokens, DynamicCache(config=model.config), 0)
    cache = opened(model, MemoryStore())
    assert cache.save(tokens, prefill(model, tokens)).tokens == 2 * CHUNK
    assert cache.lookup(tokens) == CHUNK
    restored, hit = cache.restore(tokens)
    assert hit == CHUNK == restored.get_seq_length()
    assert greedy(model, tokens, restored, hit) == expected
    assert cache.lookup(torch.cat([tokens, tokens[:, :1]], 1)) == 2 * CHUNK


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK])
def test_prompts_too_short_for_a_chunk_restore_nothing(model, length):
    tokens = prompt(length) if length else torch.zeros(1, 0, dtype=torch.int64)
    cache = opened(model, MemoryStore())
    if length:
        cache.save(tokens, prefill(model, tokens))
    restored, hit = cache.restore(tokens)
    assert hit == cache.lookup(tokens) == restored.get_seq_length() == 0


def test_tokens_may_be_a_tensor_an_array_or_a_list(model):
    tokens = prompt(40)
    cache = opened(model, MemoryStore())
    cache.save(tokens[0].tolist(), prefill(model, tokens))
    for form in (tokens, tokens[0], tokens.numpy(), np.asarray(tokens[0], np.int32), tokens[0].tolist()):
        assert cache.lookup(form) == 32
    with pytest.raises(kvcore.ConfigError, match="one sequence"):
        cache.lookup(torch.cat([tokens, tokens]))
    with pytest.raises(kvcore.ConfigError, match="integers"):
        cache.lookup([0.5] * 40)


def test_saving_again_writes_what_is_new_only(model):
    tokens = prompt(53)
    kv, cache = prefill(model, tokens), opened(model, MemoryStore())
    cache.save(tokens[:, :33], kv)
    report = cache.save(tokens, kv)
    assert (report.chunks_written, report.chunks_present, report.tokens) == (1, 2, 48)


def test_a_common_prefix_serves_another_prompt(model):
    first, cache = prompt(53), opened(model, MemoryStore())
    cache.save(first, prefill(model, first))
    second = torch.cat([first[:, :35], prompt(20, seed=9)], 1)
    restored, hit = cache.restore(second)
    assert hit == 32
    assert greedy(model, second, restored, hit) == greedy(model, second, DynamicCache(config=model.config), 0)


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "other"},
        {"adapter": "lora-7"},
        {"salt": "tenant-2"},
        {"kv_dtype": "bfloat16"},
        {"name": "tiny-2"},
        {"rope": kvcore.RopeParams(8, theta=20000.0)},
    ],
)
def test_whatever_changes_the_bytes_or_their_owner_is_a_miss(model, change):
    store, tokens = MemoryStore(), prompt(40)
    opened(model, store).save(tokens, prefill(model, tokens))
    other = opened(model, store, **change)
    assert other.lookup(tokens) == 0
    assert other.restore(tokens)[1] == 0
    assert opened(model, store).lookup(tokens) == 32


def test_updated_weights_are_another_revision():
    store, tokens = MemoryStore(), prompt(40)
    before, after = llama(seed=0), llama(seed=0)
    assert weights_revision(before) == weights_revision(after)
    opened(before, store).save(tokens, prefill(before, tokens))
    with torch.no_grad():
        after.model.layers[1].self_attn.k_proj.weight[0, 0] += 1e-3
    assert opened(after, store).lookup(tokens) == 0


def test_an_image_among_the_tokens_is_part_of_the_key(model):
    tokens, cache = prompt(40), opened(model, MemoryStore())
    kv = prefill(model, tokens)
    image, other = (ExtraKey(20, 24, content) for content in (b"first image", b"second image"))
    cache.save(tokens, kv, extra_keys=[image])
    assert cache.lookup(tokens, extra_keys=[image]) == 32
    assert cache.restore(tokens, extra_keys=[other])[1] == 16
    assert cache.lookup(tokens) == 16


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_a_narrower_kv_dtype_rounds_once_and_halves_the_bytes(model, kv_dtype):
    tokens = prompt(40)
    kv, cache = prefill(model, tokens), opened(model, MemoryStore(), kv_dtype=kv_dtype)
    assert cache.save(tokens, kv).raw_bytes == 2 * LAYERS * HEADS * WIDTH * 32 * 2
    restored, hit = cache.restore(tokens)
    narrow = getattr(torch, kv_dtype)
    for old, new in zip(kv.layers, restored.layers, strict=True):
        for a, b in ((old.keys, new.keys), (old.values, new.values)):
            assert b.dtype == torch.float32
            assert torch.equal(a[:, :, :hit].to(narrow).float(), b)


def test_a_value_that_the_kv_dtype_cannot_hold_is_an_error_and_nothing_is_stored(model):
    tokens, store = prompt(40), MemoryStore()
    kv, cache = prefill(model, tokens), opened(model, store, kv_dtype="float16")
    kv.layers[1].values[0, 1, 3, 4] = 1e5
    with pytest.raises(kvcore.QuantizationError, match=r"layer 1 .*float16"):
        cache.save(tokens, kv)
    assert list(store.list()) == []


@pytest.mark.parametrize("codec", ["lossless", "high"])
def test_a_codec_makes_it_smaller_and_restores_it(model, codec):
    tokens = prompt(70)
    kv, cache = prefill(model, tokens), opened(model, MemoryStore(), codec=codec, chunk_tokens=64)
    stages: list[int] = []
    report = cache.save(tokens, kv, progress=stages.append)
    assert (report.tokens, stages) == (64, [64])
    assert report.stored_bytes < report.raw_bytes
    restored, hit = cache.restore(tokens)
    assert hit == 64
    for old, new in zip(kv.layers, restored.layers, strict=True):
        for a, b in ((old.keys, new.keys), (old.values, new.values)):
            if codec == "lossless":
                assert torch.equal(a[:, :, :64], b)
            else:
                assert float((a[:, :, :64] - b).norm() / a.norm()) < 0.05
    assert len(greedy(model, tokens, restored, hit)) == 8


def test_frames_of_codecs_that_are_not_accepted_are_computed_again(model):
    store, tokens = MemoryStore(), prompt(40)
    opened(model, store, codec="small").save(tokens, prefill(model, tokens))
    strict = opened(model, store, codec="high", codecs=["high", "lossless"])
    restored, hit = strict.restore(tokens)
    assert (hit, restored.get_seq_length(), dict(strict.misses)) == (0, 0, {"codec": 1})
    assert opened(model, store, codec="high", codecs=["high", "small"]).restore(tokens)[1] == 32


def test_a_nan_in_the_cache_is_left_out_of_a_lossy_store(model):
    tokens = prompt(53)
    kv, cache = prefill(model, tokens), opened(model, MemoryStore(), codec="balanced")
    kv.layers[2].keys[0, 1, 20, 3] = float("nan")
    report = cache.save(tokens, kv)
    assert (report.tokens, report.chunks_refused, cache.refused) == (16, 2, 2)
    assert cache.restore(tokens)[1] == 16
    cache.save(tokens, kv)
    assert cache.refused == 4


def test_two_processes_share_a_directory(model, tmp_path):
    tokens = prompt(40)
    opened(model, f"fs:{tmp_path / 'kv'}").save(tokens, prefill(model, tokens))
    assert opened(model, FsStore(tmp_path / "kv")).restore(tokens)[1] == 32


class FullAfter(MemoryStore):
    """A store that has room for some frames and then no more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def put(self, key, frame) -> int:
        if self.room == 0:
            raise kvcore.StoreError(errno.ENOSPC, "no space left")
        self.room -= 1
        return super().put(key, frame)


def test_a_full_disk_is_an_error_and_what_was_stored_before_is_of_use(model):
    tokens, store = prompt(53), FullAfter(1)
    cache = opened(model, store)
    with pytest.raises(kvcore.StoreError, match="no space left") as caught:
        cache.save(tokens, prefill(model, tokens))
    assert caught.value.errno == errno.ENOSPC
    store.room = 2
    restored, hit = cache.restore(tokens)
    assert hit == CHUNK
    assert greedy(model, tokens, restored, hit) == greedy(model, tokens, DynamicCache(config=model.config), 0)
    assert cache.save(tokens, prefill(model, tokens)).chunks_written == 2


def test_a_corrupt_chunk_ends_the_prefix_and_the_rest_is_computed(model):
    tokens, store = prompt(70), MemoryStore()
    cache = opened(model, store)
    kv = prefill(model, tokens)
    cache.save(tokens, kv)
    key = kvcore.engine.chunk_keys(cache.engine.namespace, tokens[0].numpy())[2]
    frame = bytearray(store.get(key))
    frame[-5] ^= 1
    store.put(key, bytes(frame))
    restored, hit = cache.restore(tokens)
    assert hit == 2 * CHUNK == restored.get_seq_length()
    assert cache.misses == {"digest": 1}
    assert greedy(model, tokens, restored, hit) == greedy(model, tokens, DynamicCache(config=model.config), 0)
    assert cache.save(tokens, kv).chunks_written == 1
    assert cache.restore(tokens)[1] == 4 * CHUNK


def test_a_chunk_that_was_held_for_too_long_is_computed_again(model, monkeypatch):
    tokens = prompt(70)
    cache = opened(model, MemoryStore())
    cache.save(tokens, prefill(model, tokens))
    host, copied = cache.engine.tiers.host, []
    convert = cache.engine.backend.convert_layout
    now = host._l1._clock()
    monkeypatch.setattr(host._l1, "_clock", lambda: now + 301 * (len(copied) > 2))

    def slow(rows, out):
        """Takes minutes for the third chunk, whose memory is given to somebody else meanwhile."""
        convert(rows, out=out)
        if threading.current_thread() is threading.main_thread():  # not where chunks are decoded
            copied.append(rows)
            host.relieve()

    monkeypatch.setattr(cache.engine.backend, "convert_layout", slow)
    restored, hit = cache.restore(tokens)
    monkeypatch.undo()
    copied.clear()
    assert hit == 2 * CHUNK == restored.get_seq_length()
    assert greedy(model, tokens, restored, hit) == greedy(model, tokens, DynamicCache(config=model.config), 0)
    cache.close()


# --- what is refused


def test_a_batch_a_short_cache_and_another_shape_are_errors(model):
    cache, tokens = opened(model, MemoryStore()), prompt(40)
    with pytest.raises(kvcore.LayoutError, match="batch of 2"):
        cache.save(tokens, prefill(model, torch.cat([tokens, tokens])))
    with pytest.raises(kvcore.LayoutError, match="hold 39 tokens, 40 were given"):
        cache.save(tokens, prefill(model, tokens[:, :39]))
    with pytest.raises(kvcore.LayoutError, match="hold 0 tokens"):
        cache.save(tokens, DynamicCache(config=model.config))
    with pytest.raises(kvcore.LayoutError, match="2 layers, the model 3"):
        cache.save(tokens, prefill(llama(num_hidden_layers=2), tokens))
    with pytest.raises(kvcore.LayoutError, match="4 heads of 8 channels"):
        cache.save(tokens, prefill(llama(num_key_value_heads=4), tokens))


def test_caches_of_another_kind_are_named_in_the_refusal(model):
    cache, tokens = opened(model, MemoryStore()), prompt(40)
    with pytest.raises(kvcore.UnsupportedOpError, match="StaticCache"):
        cache.save(tokens, StaticCache(config=model.config, max_cache_len=64))
    sliding = MistralConfig(**{**model.config.to_dict(), "model_type": "mistral", "sliding_window": 8})
    with pytest.raises(kvcore.UnsupportedOpError, match="DynamicSlidingWindowLayer"):
        cache.save(tokens, DynamicCache(config=sliding))
    with pytest.raises(kvcore.UnsupportedOpError, match="DynamicSlidingWindowLayer"):
        opened(MistralForCausalLM(sliding), MemoryStore())


def test_what_identifies_the_kv_must_be_known(model):
    with pytest.raises(kvcore.ConfigError, match="pass name="):
        PrefixKVCache.for_model(model, store="memory:")
    with pytest.raises(kvcore.ConfigError, match="float8_e4m3fn"):
        opened(model, MemoryStore(), kv_dtype="fp8")
    with pytest.raises(kvcore.ConfigError, match="no kind of store 'redis'"):
        opened(model, "redis:localhost")
    with pytest.raises(kvcore.NoBackendError, match="misspelled"):
        opened(model, MemoryStore(), backend="cpu-ref")
    adapted = llama()
    adapted.peft_config = {"default": object()}
    with pytest.raises(kvcore.ConfigError, match="adapter="):
        opened(adapted, MemoryStore())
    assert opened(adapted, MemoryStore(), adapter="default").lookup(prompt(40)) == 0


def test_rotation_is_read_from_the_model(model):
    assert model_rope(model) == kvcore.RopeParams(8, theta=10000.0)
    theta = {"rope_type": "default", "rope_theta": 5e5}
    assert model_rope(llama(rope_parameters=theta)) == kvcore.RopeParams(8, theta=5e5)
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert model_rope(llama(rope_parameters=linear)) == kvcore.RopeParams(8, scaling="linear", factor=4.0)
    with pytest.raises(kvcore.UnsupportedOpError, match="dynamic"):
        opened(llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), MemoryStore())


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            LLAMA3,
            {"theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_tokens": 64},
        ),
        (YARN, {"theta": 1e4, "factor": 4.0, "original_tokens": 128}),
        ({**YARN, "beta_fast": None, "truncate": False}, {"factor": 4.0, "original_tokens": 128, "truncate": False}),
        (
            {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5},
            {"factor": 4.0, "original_tokens": 128, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
)
def test_scaled_rotation_is_read_from_the_model(config, expected):
    model = llama(rope_parameters=dict(config))
    rope = model_rope(model)
    assert rope == kvcore.RopeParams(8, scaling=config["rope_type"], **expected)
    np.testing.assert_allclose(rope.frequencies(), model.model.rotary_emb.inv_freq.double().numpy(), rtol=2e-6)


def test_a_table_that_the_parameters_do_not_give_is_taken_itself():
    model = llama(rope_parameters=dict(LLAMA3))
    model.model.rotary_emb.inv_freq *= 1.01
    assert model_rope(model) == kvcore.RopeParams(8, inv_freq=tuple(model.model.rotary_emb.inv_freq.tolist()))
    model = llama(rope_parameters=dict(YARN))
    model.config.rope_parameters["beta_slow"] = 64.0  # beyond beta_fast: what no RopeParams are
    assert model_rope(model) == kvcore.RopeParams(8, inv_freq=tuple(model.model.rotary_emb.inv_freq.tolist()))


@pytest.mark.parametrize("config", [LLAMA3, YARN], ids=lambda config: config["rope_type"])
def test_keys_of_scaled_rotation_are_stored_without_it_and_come_back(config):
    model, tokens, store = llama(rope_parameters=dict(config)), prompt(70), MemoryStore()
    kv, cache = prefill(model, tokens), opened(model, store, codec="high", chunk_tokens=64)
    cache.save(tokens, kv)
    (key,) = store.list()
    assert FrameHeader.parse(store.get(key)).flags & Flags.UNROPED
    restored, hit = cache.restore(tokens)
    assert hit == 64
    for old, new in zip(kv.layers, restored.layers, strict=True):
        assert float((old.keys[:, :, :64] - new.keys).norm() / old.keys.norm()) < 0.05


def test_keys_multiplied_by_another_factor_are_other_keys():
    # Neither the weights nor the rotation tell them apart.
    store, tokens = MemoryStore(), prompt(40)
    plain, scaled = (llama(rope_parameters={**YARN, "attention_factor": factor}) for factor in (1.0, 1.25))
    assert model_rope(plain) == model_rope(scaled)
    opened(plain, store).save(tokens, prefill(plain, tokens))
    assert opened(scaled, store).lookup(tokens) == 0
    assert opened(plain, store).lookup(tokens) == 32
    assert weights_revision(plain).startswith("weights:")
    assert weights_revision(scaled) == f"{weights_revision(plain)} keys x 1.25"


def test_a_model_without_rotation_and_with_the_older_argument(model):
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128)).eval()
    assert model_rope(gpt2) is None
    tokens, cache = prompt(40), opened(gpt2, MemoryStore())
    cold = DynamicCache(config=gpt2.config)
    expected = greedy(gpt2, tokens, cold, 0)
    cache.save(tokens, cold)
    restored, hit = cache.restore(tokens)
    assert hit == 32
    assert greedy(gpt2, tokens, restored, hit) == expected


def test_both_spellings_of_the_argument_are_found():
    class Older:
        def forward(self, input_ids: object, past_key_values: object = None) -> None:
            raise NotImplementedError

    class Neither:
        def forward(self, input_ids: object) -> None:
            raise NotImplementedError

    assert cache_argument(llama()) in {"cache", "past_key_values"}
    assert cache_argument(Older()) == "past_key_values"
    with pytest.raises(kvcore.UnsupportedOpError, match=r"Neither\.forward takes no cache"):
        cache_argument(Neither())
