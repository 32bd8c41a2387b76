"""What the connector is told: strict, so that vLLM does not start without the cache that was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.connectors.vllm.options import VllmOptions, read_options
from kvcore.engine.config import EngineConfig, setting_names
from kvcore.errors import ConfigError

NAMES = sorted({*VllmOptions.model_fields, *EngineConfig.model_fields})


def test_settings_of_the_connector_and_of_the_engine_stand_side_by_side():
    config = read_options({"load": "sync", "chunk_tokens": 64, "lookup_wait_ms": 2}, environ={})
    assert (config.options.load, config.options.lookup_wait_ms) == ("sync", 2.0)
    assert config.engine.chunk_tokens == 64
    assert (config.loads, config.saves) == (True, True)


def test_names_of_other_software_are_read():
    assert read_options({"chunk_size": 64}, environ={}).engine.chunk_tokens == 64


def test_the_file_and_the_environment_are_read_too(tmp_path):
    file = tmp_path / "kvcore.yaml"
    file.write_text("chunk_tokens: 32\nmin_retrieve_tokens: 7\nserde: fp8\n")
    environ = {"KVCORE_MIN_RETRIEVE_TOKENS": "8"}
    config = read_options({"config_file": str(file), "serde": "raw"}, environ=environ)
    assert (config.engine.chunk_tokens, config.engine.min_retrieve_tokens, config.engine.serde) == (32, 8, "raw")


@pytest.mark.parametrize(("role", "loads", "saves"), [("kv_producer", False, True), ("kv_consumer", True, False)])
def test_a_producer_never_loads_and_a_consumer_never_saves(role, loads, saves):
    config = read_options({}, role=role, environ={})
    assert (config.loads, config.saves) == (loads, saves)


def test_an_unknown_role_is_refused():
    with pytest.raises(ConfigError, match="kv_role is one of kv_both"):
        read_options({}, role="kv_reader", environ={})


@given(name=st.sampled_from([n for n in NAMES if len(n) > 6]), at=st.integers(1, 5))
def test_a_typo_is_refused_with_the_nearest_name(name, at):
    typo = name[:at] + name[at + 1 :]
    if typo in {*NAMES, *setting_names()}:
        return
    with pytest.raises(ConfigError, match=f"no setting '{typo}'; did you mean '"):
        read_options({typo: 1}, environ={})


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"load": "later"}, "load: Input should be 'async', 'sync' or 'layerwise'"),
        ({"lookup_wait_ms": -1}, "lookup_wait_ms"),
        ({"load_threads": 0}, "load_threads"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"serde": "zip"}, "serde"),
    ],
)
def test_values_that_mean_nothing_are_refused(extra, said):
    with pytest.raises(ConfigError, match=said):
        read_options(extra, environ={})
