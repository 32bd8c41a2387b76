"""Whose KV a vLLM engine makes: on stand-ins of vLLM's configuration, and on vLLM's own where it is installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.connectors.vllm.identity import model_namespace
from kvcore.connectors.vllm.weights import SAMPLE_BYTES, content_digest, file_signature, snapshot_commit
from kvcore.engine.keys import Namespace
from kvcore.errors import ConfigError, StoreError, UnsupportedOpError
from kvcore.rope import RopeParams

from .requests_made import KINDS, import_for

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}
CONFIG = SimpleNamespace(chunk_tokens=64, model_name="", model_revision="", salt="", hash="blake3")


def safetensors(path: Path, tensors: dict[str, tuple[list[int], bytes]]) -> None:
    header, at = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, data in tensors.values()))


def folder(place: Path, config: dict[str, Any] = LLAMA, value: int = 1) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    safetensors(place / "model.safetensors", {"a": ([64], bytes([value]) * 64)})
    return place


class HfConfig:
    """What is read of a configuration of transformers."""

    def __init__(self, values: dict[str, Any], commit: str | None = None) -> None:
        self.__dict__.update(values)
        self._commit_hash = commit

    def to_dict(self) -> dict[str, Any]:
        return {"_name_or_path": "anything", **self.__dict__}


class Configs:
    """Makes vLLM's configuration of a model in a folder."""

    def __init__(self, kind: str) -> None:
        import_for(kind)
        self.real = kind == "vllm"

    def __call__(self, place: Path, **more: Any) -> Any:
        more = {"dtype": "float32", "load_format": "auto", "kv_cache_dtype": "auto", **more}
        if self.real:
            from vllm.engine.arg_utils import EngineArgs

            args = {"model": str(place), "tokenizer": str(place), "skip_tokenizer_init": True, "max_model_len": 256}
            return EngineArgs(**{**args, **more}).create_engine_config()
        values = {**json.loads((place / "config.json").read_text()), **more.get("hf_overrides", {})}
        config = HfConfig(values)
        model = SimpleNamespace(
            model=str(place),
            model_weights="",
            dtype=more["dtype"],
            hf_config=config,
            hf_text_config=config,
            hf_config_path=None,
            hf_overrides=more.get("hf_overrides", {}),
            seed=more.get("seed", 0),
            quantization=more.get("quantization"),
            quantization_config=None,
            attn_type="decoder",
            is_encoder_decoder=False,
            pooler_config=None,
            use_mla=False,
            max_model_len=256,
            disable_sliding_window=False,
            multimodal_config=None,
            get_head_size=lambda: 16,
        )
        return SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(
                cache_dtype=more["kv_cache_dtype"],
                kv_cache_dtype_skip_layers=[],
                mamba_cache_dtype="auto",
                mamba_ssm_cache_dtype="auto",
            ),
            load_config=SimpleNamespace(load_format=more["load_format"]),
            parallel_config=SimpleNamespace(tensor_parallel_size=more.get("tensor_parallel_size", 1)),
        )


@pytest.fixture(params=KINDS)
def configs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Configs:
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "1")
    return Configs(request.param)


class FullAttentionSpec:
    pass


class MambaSpec:
    pass


class ShortConvSpec(MambaSpec):
    pass


def caches(*kinds: type) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind()) for kind in kinds])


ATTENTION = caches(FullAttentionSpec)


def space(vllm_config: Any, kv_caches: Any = ATTENTION, **config: Any) -> Namespace:
    return model_namespace(vllm_config, kv_caches, SimpleNamespace(**{**vars(CONFIG), **config}))


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def test_a_folder_is_named_by_its_architecture_and_content_not_by_its_path(configs: Configs, tmp_path: Path) -> None:
    found = space(configs(folder(tmp_path / "one")))
    assert (found.model, found.kv_dtype, found.cache_class) == ("LlamaForCausalLM", "float32", "mha")
    assert found.revision.startswith("sampled:")
    assert found.rope == RopeParams(16, 1e5)
    assert (found.chunk_tokens, found.scales, found.salt) == (64, b"", "")
    assert found == space(configs(folder(tmp_path / "renamed")))
    assert found != space(configs(folder(tmp_path / "other", value=2)))
    assert found != space(configs(folder(tmp_path / "deeper", {**LLAMA, "rms_norm_eps": 0.5})))


def test_a_snapshot_of_the_hub_is_named_by_its_commit(configs: Configs, tmp_path: Path) -> None:
    place = folder(tmp_path / "models--HuggingFaceTB--Smol--LM" / "snapshots" / ("0f" * 20))
    found = space(configs(place))
    assert (found.model, found.revision) == ("HuggingFaceTB/Smol--LM", f"commit:{'0f' * 20}")


def test_random_weights_are_named_by_configuration_and_seed(configs: Configs, tmp_path: Path) -> None:
    place = folder(tmp_path / "one")
    seeds = [space(configs(place, load_format="dummy", seed=seed)) for seed in (1, 2, 1)]
    assert seeds[0].revision.startswith("dummy:")
    assert seeds[0] == seeds[2] != seeds[1]
    wide = folder(tmp_path / "wide", {**LLAMA, "intermediate_size": 256})
    assert seeds[0] != space(configs(wide, load_format="dummy", seed=1))


def test_what_a_user_says_counts(configs: Configs, tmp_path: Path) -> None:
    config = configs(folder(tmp_path / "one"))
    found = space(config, model_name="mine", model_revision="7", salt="me", hash="sha256", chunk_tokens=128)
    assert (found.model, found.revision, found.salt, found.hash, found.chunk_tokens) == (
        "mine",
        "7",
        "me",
        "sha256",
        128,
    )


def test_overrides_of_the_configuration_count_even_with_a_commit(configs: Configs, tmp_path: Path) -> None:
    place = folder(tmp_path / "models--a--b" / "snapshots" / ("0f" * 20))
    plain, one, two = (
        space(configs(place, **({"hf_overrides": {"rms_norm_eps": eps}} if eps else {}))) for eps in (None, 0.1, 0.2)
    )
    assert len({plain, one, two}) == 3
    assert one.revision.startswith(f"commit:{'0f' * 20} overrides:")


def test_the_type_that_is_computed_in_counts_where_the_cache_has_another(configs: Configs, tmp_path: Path) -> None:
    place = folder(tmp_path / "one")
    full = space(configs(place))
    half = space(configs(place, dtype="bfloat16"))
    assert half.kv_dtype == "bfloat16"
    assert half.revision == full.revision
    assert half != full


@pytest.mark.parametrize(("name", "dtype"), [("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_fp8_caches_are_known_by_type_and_scales(tmp_path: Path, name: str, dtype: str) -> None:
    place = folder(tmp_path / "one")
    found = space(Configs("stand-in")(place, kv_cache_dtype=name))
    assert (found.kv_dtype, len(found.scales)) == (dtype, 32)
    assert found.revision.endswith(" compute:float32")
    other = space(Configs("stand-in")(folder(tmp_path / "two", value=2), kv_cache_dtype=name))
    assert other.scales != found.scales, "the scales are in the weights"
    assert space(Configs("stand-in")(place, kv_cache_dtype=name, dtype="bfloat16")) != found


@pytest.mark.parametrize("name", ["nvfp4", "int8_per_token_head", "fp8_ds_mla", "turboquant_4bit_nc"])
def test_caches_with_scales_that_change_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedOpError, match=f"kv_cache_dtype '{name}' packs"):
        space(Configs("stand-in")(folder(tmp_path / "one"), kv_cache_dtype=name))


def test_scales_that_are_made_while_running_are_refused(tmp_path: Path) -> None:
    config = Configs("stand-in")(folder(tmp_path / "one"), kv_cache_dtype="fp8")
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(UnsupportedOpError, match="no two engines have the same"):
        space(config)


def test_weights_that_are_quantized_make_other_kv(tmp_path: Path) -> None:
    place = folder(tmp_path / "one")
    plain, awq = (space(Configs("stand-in")(place, quantization=name)) for name in (None, "awq"))
    assert plain != awq
    assert awq.revision.endswith(" weights:awq")


def test_layers_that_are_left_unquantized_count(tmp_path: Path) -> None:
    config = Configs("stand-in")(folder(tmp_path / "one"), kv_cache_dtype="fp8")
    before = space(config)
    config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    assert space(config) != before


@pytest.mark.parametrize(
    ("kinds", "mla", "name"),
    [
        ((FullAttentionSpec,), True, "mla"),
        ((FullAttentionSpec, MambaSpec), False, "hybrid"),
        ((ShortConvSpec,), False, "recurrent"),
    ],
)
def test_classes_of_caches(tmp_path: Path, kinds: tuple[type, ...], mla: bool, name: str) -> None:
    config = Configs("stand-in")(folder(tmp_path / "one"))
    config.model_config.use_mla = mla
    found = space(config, caches(*kinds))
    assert (found.cache_class, found.rope) == (name, None)
    config.cache_config.mamba_ssm_cache_dtype = "float32"
    assert (space(config, caches(*kinds)) == found) == (name == "mla")


def test_groups_of_unlike_layers_are_looked_into(tmp_path: Path) -> None:
    both = SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(), "b": MambaSpec()})
    found = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=both)])
    assert space(Configs("stand-in")(folder(tmp_path / "one")), found).cache_class == "hybrid"


ROPES = [
    ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, RopeParams(16, scaling="linear", factor=2.0)),
    ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, RopeParams(8)),
    (
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        RopeParams(16, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=256),
    ),
    ({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}, None),
    ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}, None),
    ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, None),
    ({"rope_type": "default", "rope_theta": "much"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("parameters", "rope"), ROPES)
def test_rotation(tmp_path: Path, parameters: dict[str, Any], rope: RopeParams | None) -> None:
    place = folder(tmp_path / "one", {**LLAMA, "rope_parameters": parameters})
    assert space(Configs("stand-in")(place)).rope == rope


@pytest.mark.parametrize("change", [{"model_type": "cohere"}, {"quantization": "gguf"}])
def test_rotation_that_the_configuration_does_not_tell(tmp_path: Path, change: dict[str, Any]) -> None:
    place = folder(tmp_path / "one", {**LLAMA, **change})
    found = space(Configs("stand-in")(place, quantization=change.get("quantization")))
    assert found.rope is None


def test_the_longest_sequence_counts_where_the_rotation_depends_on_it(tmp_path: Path) -> None:
    def found(kind: str, length: int) -> Namespace:
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        config = Configs("stand-in")(folder(tmp_path / kind, {**LLAMA, "rope_parameters": rope}))
        config.model_config.max_model_len = length
        return space(config)

    assert found("dynamic", 256) != found("dynamic", 512)
    assert found("linear", 256) == found("linear", 512)


@pytest.mark.parametrize("kind", ["encoder_only", "encoder_decoder"])
def test_models_that_look_ahead_are_refused(tmp_path: Path, kind: str) -> None:
    config = Configs("stand-in")(folder(tmp_path / "one"))
    config.model_config.attn_type = kind
    with pytest.raises(UnsupportedOpError, match=f"attention of type {kind}: a prefix has no KV of its own"):
        space(config)


def test_models_that_pool_over_all_tokens_are_refused(tmp_path: Path) -> None:
    config = Configs("stand-in")(folder(tmp_path / "one"))
    config.model_config.pooler_config = object()
    with pytest.raises(UnsupportedOpError, match="pools over all tokens"):
        space(config)
    config.model_config.is_prefix_caching_supported = True
    assert space(config).cache_class == "mha"


def test_a_name_of_the_hub_needs_a_commit(tmp_path: Path) -> None:
    config = Configs("stand-in")(folder(tmp_path / "one"))
    config.model_config.model = "owner/name"
    with pytest.raises(ConfigError, match="say it in model_revision"):
        space(config)
    config.model_config.hf_config._commit_hash = "ab" * 20
    found = space(config)
    assert (found.model, found.revision) == ("owner/name", f"commit:{'ab' * 20}")
    config.model_config.hf_config_path = "somewhere/else"
    with pytest.raises(ConfigError, match="say it in model_revision"):
        space(config)


def test_weights_that_are_streamed_need_a_revision(tmp_path: Path) -> None:
    config = Configs("stand-in")(folder(tmp_path / "one"))
    config.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(ConfigError, match="streamed"):
        space(config)
    assert space(config, model_revision="7").revision == "7"


def test_every_word_is_the_same_in_every_process(tmp_path: Path) -> None:
    place = folder(tmp_path / "one")
    config = Configs("stand-in")(place)
    assert space(config).digest.hex() == "65a09ed61150b255d6152315a1cbd64482c67e518bcb4e7ae062238124f947a1"


# --- weights


def test_a_sampled_byte_a_shape_or_a_name_changes_the_digest_and_the_folder_does_not(tmp_path: Path) -> None:
    size = 10 * SAMPLE_BYTES
    data = bytes(range(256)) * (size // 256)
    base = {"a": ([size], data), "b": ([4], b"1234")}

    def digest(tensors: dict[str, tuple[list[int], bytes]], name: str = "x") -> bytes:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        safetensors(place / "model.safetensors", tensors)
        return content_digest(place)

    first = digest(base)
    assert digest(base, "renamed") == first
    middle = (size - SAMPLE_BYTES) // 2
    for at in (0, SAMPLE_BYTES - 1, middle, middle + SAMPLE_BYTES - 1, size - SAMPLE_BYTES, size - 1):
        changed = bytearray(data)
        changed[at] ^= 1
        assert digest({**base, "a": ([size], bytes(changed))}) != first, at
    assert digest({**base, "a": ([2, size // 2], data)}) != first
    assert digest({"c": base["a"], "b": base["b"]}) != first
    assert digest({**base, "b": ([4], b"1235")}) != first


def test_shards_count_in_their_order_and_other_files_do_not(tmp_path: Path) -> None:
    for number in (1, 2):
        safetensors(tmp_path / f"model-{number}.safetensors", {f"t{number}": ([4], bytes([number]) * 4)})
    first = content_digest(tmp_path)
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / "pytorch_model.bin").write_bytes(b"the same in another format")
    assert content_digest(tmp_path) == first
    (tmp_path / "model-1.safetensors").rename(tmp_path / "model-3.safetensors")
    assert content_digest(tmp_path) != first
    safetensors(tmp_path / "model-4.safetensors", {"t4": ([4], b"4444")})
    assert content_digest(tmp_path) != first


@given(size=st.integers(0, 9 << 20), at=st.integers(0, 1023), data=st.data())
def test_other_formats_are_sampled_evenly(
    tmp_path_factory: pytest.TempPathFactory, size: int, at: int, data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("w") / "model.gguf"
    with file.open("wb") as stream:
        stream.truncate(size)
    first = content_digest(file)
    other = file.rename(file.with_name("other.gguf"))
    assert content_digest(other) == first
    if size:
        start = (
            (size - SAMPLE_BYTES) * at // 1023 if size > 1024 * SAMPLE_BYTES else data.draw(st.integers(0, size - 1))
        )
        with other.open("r+b") as stream:
            stream.seek(start)
            stream.write(b"\1")
        assert content_digest(other) != first
    with other.open("ab") as stream:
        stream.write(b"\0")
    assert content_digest(other) != first
    shutil.rmtree(other.parent)


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        content_digest(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no weights"):
        content_digest(tmp_path)
    file = tmp_path / "model.safetensors"
    for data, why in (
        (b"", "no header"),
        ((10**9).to_bytes(8, "little") + b"{}", "no header"),
        ((4).to_bytes(8, "little") + b"nope", "malformed"),
        ((2).to_bytes(8, "little") + b"[]", "malformed"),
        ((12).to_bytes(8, "little") + b'{"a": "b" } ', "malformed"),
    ):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=why):
            content_digest(tmp_path)
    safetensors(file, {"a": ([64], bytes(64))})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="cut short"):
        content_digest(tmp_path)


def test_signatures_tell_whether_files_have_changed(tmp_path: Path) -> None:
    place = folder(tmp_path / "one")
    before = file_signature(place)
    assert file_signature(place) == before
    folder(place, value=2)
    assert file_signature(place) != before
    with pytest.raises(StoreError, match="cannot be read"):
        file_signature(tmp_path / "nothing")


def test_only_folders_of_snapshots_have_a_commit() -> None:
    assert snapshot_commit(Path("/x/snapshots") / ("ab" * 20)) == "ab" * 20
    assert snapshot_commit("/x/snapshots/main") is None
    assert snapshot_commit(Path("/x/other") / ("ab" * 20)) is None
