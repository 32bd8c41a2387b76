"""`KVCoreConnector` on vLLM's own classes, without an engine. Runs where vLLM is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pickle
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest

from kvcore.connectors.vllm.metadata import Load, Save, StepMetadata
from kvcore.engine.keys import chunk_keys
from kvcore.errors import ConfigError, LayoutError, UnsupportedOpError

from .caches import attention_name


def test_the_package_imports_no_vllm():
    code = "import sys, kvcore.connectors.vllm; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make vllm-env, and run with its Python", allow_module_level=True)
torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    from kvcore.connectors.vllm import KVCoreConnector
    from kvcore.connectors.vllm.connector import KVCoreMetadata

pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS, HEADS, WIDTH, BLOCK, BLOCKS, CHUNK = 2, 2, 32, 32, 12, 64
TOKENS = list(range(10, 10 + 2 * CHUNK + 3))
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": WIDTH,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


@pytest.fixture
def make(model, tmp_path):
    """Return what makes a configuration of vLLM with a connector that is told something."""

    def configured(*, own_cache=None, **extra):
        known = {"tiers": [f"fs:{tmp_path}/kv"], "chunk_tokens": CHUNK, "max_local_cpu_size": 0.01, "pinned": False}
        known["lookup_directory"] = str(tmp_path / "s")
        transfer = KVTransferConfig(
            kv_connector="KVCoreConnector",
            kv_connector_module_path="kvcore.connectors.vllm",
            kv_role=extra.pop("kv_role", "kv_both"),
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={**known, **extra},
        )
        arguments = EngineArgs(
            model=model, load_format="dummy", skip_tokenizer_init=True, dtype="float32", max_model_len=512
        )
        arguments.enable_prefix_caching = extra.get("load", "async") == "async" if own_cache is None else own_cache
        arguments.kv_transfer_config = transfer
        return arguments.create_engine_config()

    return configured


def spec(**changes):
    known = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": WIDTH, "dtype": torch.float32}
    window = changes.get("sliding_window")
    return (FullAttentionSpec if window is None else SlidingWindowSpec)(**{**known, **changes})


def cache_config(*groups):
    groups = groups or (KVCacheGroupSpec([attention_name(n) for n in range(LAYERS)], spec()),)
    return KVCacheConfig(BLOCKS, [], list(groups))


class Module:
    isa, kv_cache_dtype, kv_sharing_target_layer_name = "vec", "auto", None

    def __init__(self, backend="CPU_ATTN"):
        self.backend = backend

    def get_attn_backend(self):
        return SimpleNamespace(get_name=lambda: self.backend)


def tensors():
    shape = (BLOCKS, HEADS, BLOCK, 2 * WIDTH)
    return {attention_name(n): torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in range(LAYERS)}


def worker(config, caches, backend="CPU_ATTN", cache=None):
    config.compilation_config.static_forward_context = {name: Module(backend) for name in caches}
    connector = KVCoreConnector(config, KVConnectorRole.WORKER, cache or cache_config())
    connector.register_kv_caches(caches)
    return connector


def run(connector, step, slots=None):
    """Do what vLLM's runner does in a step; return what it reports."""
    connector.bind_connector_metadata(pickle.loads(pickle.dumps(KVCoreMetadata(step))))
    connector.start_load_kv(SimpleNamespace(slot_mapping=slots or {}))
    for n in range(LAYERS):
        connector.wait_for_layer_load(attention_name(n))
        connector.save_kv_layer(attention_name(n), None, None)
    connector.wait_for_save()
    results = connector.get_transfer_results(set())
    blocks = connector.get_block_ids_with_load_errors()
    connector.clear_connector_metadata()
    return results, blocks


def keys_of(connector):
    return tuple(chunk_keys(connector._worker.engine.namespace, TOKENS))


def a_request():
    return SimpleNamespace(
        request_id="s",
        num_tokens=len(TOKENS),
        num_prompt_tokens=len(TOKENS),
        all_token_ids=TOKENS,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
        num_preemptions=0,
    )


def test_vllm_finds_it_and_takes_it_for_a_connector_with_groups(make):
    config = make()
    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is KVCoreConnector
    assert supports_hma(KVCoreConnector)
    assert KVCoreConnector.get_required_kvcache_layout(config) is None
    assert KVCoreConnector.requires_piecewise_for_cudagraph({"load": "layerwise"})
    assert not KVCoreConnector.requires_piecewise_for_cudagraph({})


@pytest.mark.parametrize("load", ["async", "sync", "layerwise"])
def test_kv_goes_out_of_blocks_and_into_others(make, load):
    caches = tensors()
    connector = worker(make(load=load), caches)
    before = {name: tensor.clone() for name, tensor in caches.items()}
    chunks, table = keys_of(connector), [1, 2, 3, 4, 5]
    run(connector, StepMetadata(saves=(Save("r", chunks, (table,), 0, len(TOKENS)),)))
    assert connector._worker.engine.flush(10)
    stop, other = 2 * CHUNK, [9, 8, 7, 6]
    wanted = Load("r", chunks, 0, stop, (other,), len(TOKENS), load == "async")
    results, blocks = run(connector, StepMetadata(loads=(wanted,)))
    end = time.monotonic() + 10
    while load == "async" and not results.finished_recving and time.monotonic() < end:
        results, blocks = run(connector, StepMetadata())
    assert (results.finished_recving, results.failed_recving, blocks) == (
        {"r"} if load == "async" else set(),
        set(),
        set(),
    )
    for name, tensor in caches.items():
        assert torch.equal(tensor[other], before[name][table[:4]])
        assert torch.equal(tensor[table], before[name][table])
    connector.shutdown()


def test_a_load_that_fails_is_reported_and_poisons_nothing(make):
    connector = worker(make(load="sync"), tensors())
    chunks = keys_of(connector)
    wanted = Load("r", chunks, 0, 2 * CHUNK, ([9, 8, 7, 6],), len(TOKENS), False)
    saved = Save("r", chunks, ([9, 8, 7, 6, 5],), 2 * CHUNK, len(TOKENS))
    _, blocks = run(connector, StepMetadata(loads=(wanted,), saves=(saved,)))
    assert blocks == {9, 8, 7, 6}
    assert connector._worker.engine.stats().stores == 0
    slots = torch.cat([torch.arange(BLOCK) + b * BLOCK for b in (9, 8, 7, 6)])
    run(connector, StepMetadata(), {attention_name(n): slots for n in range(LAYERS)})
    run(connector, StepMetadata(saves=(saved,)))
    assert connector._worker.engine.stats().stores == 1
    connector.shutdown()


@pytest.fixture
def runner(monkeypatch):
    """Return what puts a connector into vLLM's own sequence of calls around a forward pass."""

    def around(config, connector, step, **how):
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        sync = any(not load.asynchronous for load in step.loads)
        scheduled = SimpleNamespace(
            kv_connector_metadata=KVCoreMetadata(step), has_sync_kv_loads=sync, finished_req_ids=set()
        )
        stack = contextlib.ExitStack()
        stack.enter_context(set_forward_context(None, config))
        output = stack.enter_context(KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled, **how))
        return stack, output

    return around


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_nothing_is_saved_of_a_forward_pass_that_was_cut_off(make, runner, caplog, error):
    """A worker's SIGTERM raises in the middle of the model; vLLM has the step saved all the same."""
    config = make()
    connector = worker(config, tensors())
    saves = StepMetadata(saves=(Save("r", keys_of(connector), ([1, 2, 3, 4, 5],), 0, len(TOKENS)),))
    with pytest.raises(error), runner(config, connector, saves)[0]:
        raise error
    assert connector._worker.engine.stats().stores == 0
    assert "not cached" in caplog.text
    try:
        raise error
    except error:  # vLLM may run while somebody handles an error of their own
        with runner(config, connector, saves)[0]:
            pass
    assert connector._worker.engine.stats().stores == 1
    connector.shutdown()


def test_with_a_draft_model_layerwise_failures_are_told_in_their_own_step(make, runner):
    config = make(load="layerwise")
    connector = worker(config, tensors())
    wanted = Load("r", keys_of(connector), 0, 2 * CHUNK, ([9, 8, 7, 6],), len(TOKENS), False)
    stack, output = runner(config, connector, StepMetadata(loads=(wanted,)), defer_finalize=True)
    with stack:
        for n in range(LAYERS):
            connector.wait_for_layer_load(attention_name(n))
    assert output.invalid_block_ids == {9, 8, 7, 6}
    KVConnectorModelRunnerMixin.finalize_kv_connector()
    connector.shutdown()


def test_both_sides_meet_on_the_lookup_channel(make):
    config = make(lookup_wait_ms=5000)
    scheduler = KVCoreConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    connector = worker(config, tensors())
    chunks = keys_of(connector)
    run(connector, StepMetadata(saves=(Save("r", chunks, ([1, 2, 3, 4, 5],), 0, len(TOKENS)),)))
    request = a_request()
    scheduler.on_new_request(request)
    hit = None
    end = time.monotonic() + 10
    while hit is None and time.monotonic() < end:
        hit, aside = scheduler.get_num_new_matched_tokens(request, 0)
    assert (hit, aside) == (2 * CHUNK, True)
    assert scheduler.request_finished(request, [1, 2]) == (False, None)
    connector.shutdown()
    scheduler.shutdown()


def test_what_happened_travels_to_vllms_log_and_prometheus(make):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    config = make()
    connector = worker(config, tensors())
    saved = Save("r", keys_of(connector), ([1, 2, 3, 4, 5],), 0, len(TOKENS))
    run(connector, StepMetadata(saves=(saved,)))
    stats = connector.get_kv_connector_stats()
    data = json.loads(json.dumps(stats.to_dict()))
    twice = KVCoreConnector.build_kv_connector_stats(data).aggregate(stats)
    assert twice.reduce()["Stored tokens"] == 2 * 2 * CHUNK
    registry = CollectorRegistry()

    def kind(of):
        def make_one(**arguments):
            return of(registry=registry, **arguments)

        return make_one

    metrics = KVCoreConnector.build_prom_metrics(
        config, {one: kind(one) for one in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]}
    )
    metrics.observe(data, 0)
    assert f'kvcore_stored_tokens_total{{engine="0",rank="0"}} {2.0 * CHUNK}' in generate_latest(registry).decode()
    connector.shutdown()


def test_a_typo_stops_the_start_and_names_what_was_meant(make):
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match="no setting 'chunk_token'; did you mean 'chunk_tokens'"):
            KVCoreConnector(make(chunk_token=64), role, cache_config())


def test_an_unknown_attention_backend_stops_the_start(make):
    with pytest.raises(LayoutError, match="ROCM_ATTN"):
        worker(make(), tensors(), backend="ROCM_ATTN")


def test_loads_within_steps_of_hybrid_models_stop_the_start(make):
    groups = (
        KVCacheGroupSpec([attention_name(0)], spec()),
        KVCacheGroupSpec([attention_name(1)], spec(sliding_window=64)),
    )
    with pytest.raises(ConfigError, match="use load='async'"):
        KVCoreConnector(make(load="sync"), KVConnectorRole.WORKER, cache_config(*groups))


def test_an_older_vllm_stops_the_start(make, monkeypatch):
    config = make()
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    with pytest.raises(UnsupportedOpError, match=r"0\.32 or newer"):
        KVCoreConnector(config, KVConnectorRole.WORKER, cache_config())


def test_a_vllm_built_from_its_sources_without_a_version_starts(make, monkeypatch, caplog):
    config = make()
    monkeypatch.setattr(vllm, "__version__", "dev")
    KVCoreConnector(config, KVConnectorRole.WORKER, cache_config())
    assert "tested with vLLM 0.32, this is dev" in caplog.text


def test_sequences_shared_out_among_ranks_stop_the_start(make):
    config = make()
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(UnsupportedOpError, match="decode_context_parallel_size is 2"):
        KVCoreConnector(config, KVConnectorRole.WORKER, cache_config())


@pytest.mark.parametrize("load", ["sync", "layerwise"])
def test_loads_within_a_step_are_not_for_a_vllm_that_shares_blocks(make, load):
    with pytest.raises(ConfigError, match=f"load='{load}'.*use load='async', or turn it off"):
        KVCoreConnector(make(load=load, own_cache=True), KVConnectorRole.WORKER, cache_config())
    KVCoreConnector(make(load=load, own_cache=True, kv_role="kv_producer"), KVConnectorRole.WORKER, cache_config())


def test_workers_on_other_machines_stop_the_start(make):
    config = make()
    config.parallel_config.nnodes = 2
    with pytest.raises(UnsupportedOpError, match="workers on 2 nodes"):
        KVCoreConnector(config, KVConnectorRole.WORKER, cache_config())


def test_the_sides_do_not_do_one_anothers_work(make):
    connector = KVCoreConnector(make(), KVConnectorRole.WORKER, cache_config())
    with pytest.raises(ConfigError, match="the scheduler's work"):
        connector.build_connector_meta(None)
    with pytest.raises(ConfigError, match="register_kv_caches was not called"):
        connector.get_block_ids_with_load_errors()


def test_where_vllm_takes_whole_prompts_only_nothing_is_loaded(make, monkeypatch, caplog):
    """Its MLA on a processor gives other tokens behind a prefix that was not computed in the same step."""
    config = make(lookup_wait_ms=5000)
    connector = worker(config, tensors())
    run(connector, StepMetadata(saves=(Save("r", keys_of(connector), ([1, 2, 3, 4, 5],), 0, len(TOKENS)),)))
    monkeypatch.setattr(type(config.model_config), "use_mla", True)
    config.scheduler_config.enable_chunked_prefill = False
    scheduler = KVCoreConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    assert "whole prompts only" in caplog.text
    request = a_request()
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.shutdown()
    scheduler.shutdown()
