"""The settings of an engine: what each takes, what it becomes, and that no secret is shown."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvcore.engine.config import EngineConfig, PrefetchConfig, load_config
from kvcore.engine.config_model import GROUPS, field_of, form_of, leaf_names
from kvcore.errors import ConfigError
from kvcore.sizes import parse_size
from kvcore.tiers.config import StoreTierConfig, TiersConfig


def test_the_defaults_are_host_memory_alone():
    config = load_config(environ={})
    assert config == EngineConfig()
    assert config.to_tiers() == TiersConfig()
    assert config.chunk_tokens == 256
    assert (config.prefetch.enabled, config.prefetch.watermark, config.prefetch.max_chunks) == (False, 0.6, 8)
    assert {row.source for row in config.describe()} == {"default"}


def test_every_setting_is_in_one_group_and_explains_itself():
    fields = {name for name in EngineConfig.model_fields if name != "prefetch"}
    nested = {f"prefetch.{name}" for name in type(EngineConfig().prefetch).model_fields}
    assert sorted(leaf_names()) == sorted(fields | nested)
    assert sum(len(names) for names in GROUPS.values()) == len(set(leaf_names()))
    for name in leaf_names():
        assert len(field_of(name).description) > 20
        assert form_of(name).text
    assert [row.name for row in EngineConfig().describe()] == list(leaf_names())


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("chunk_tokens", "512", 512),
        ("chunk_tokens", 512.0, 512),
        ("save_partial_chunk", "Yes", True),
        ("local_cpu", 1, True),
        ("pinned", "off", False),
        ("max_local_cpu_size", 2, 2.0),
        ("max_local_cpu_size", "0.5", 0.5),
        ("max_local_cpu_size", "512MiB", 0.5),
        ("max_local_cpu_size", "5GB", 5e9 / 2**30),
        ("log_file_bytes", "1 KiB", 1024),
        ("log_file_bytes", 7, 7),
        ("prefetch", {"watermark": "1e-3"}, PrefetchConfig(watermark=0.001)),
        ("numa_node", "null", None),
        ("numa_node", "1", 1),
        ("cache_policy", "LRU", "lru"),
        ("lookup_strategy", "Exact", "exact"),
        ("log_level", "debug", "DEBUG"),
        ("log_level", None, ""),
        ("store_retry_seconds", 2, (2.0, 2.0)),
        ("store_retry_seconds", "[0.1, 5]", (0.1, 5.0)),
        ("salt", "none", "none"),  # the word is a salt; it would be shared with everybody if it meant nothing
        ("salt", " a ", " a "),
        ("model_name", None, ""),
        ("serde", "kvs1", "kvs1"),
        ("serde", "naive", "raw"),
        ("serde", {"type": "raw"}, "raw"),
        ("serde", '{"type": "kvs1", "preset": "high"}', {"type": "kvs1", "preset": "high"}),
        ("serde", "{type: kivi, bits: 2}", {"type": "kivi", "bits": 2}),
        ("serde", {"type": "chain", "steps": ["naive"]}, {"type": "chain", "steps": ["raw"]}),
        ("remote_serde", None, None),
        ("local_disk", "true", True),
        ("local_disk", None, False),
        ("local_disk", "", False),
        ("local_disk", "file:///srv/kv/", "/srv/kv/"),
        ("local_disk", "file://local_disk/", "local_disk/"),
        ("local_disk", "fs:/srv/kv", "/srv/kv"),
        ("local_disk", "/srv/kv", "/srv/kv"),
        ("remote_url", None, ""),
        ("remote_url", "redis://h:1/2?ttl=1h", "resp://h:1/2?ttl=1h"),
        ("remote_url", "rediss://h", "resps://h"),
        ("remote_url", "valkey://h", "resp://h"),
        ("remote_url", "fs://host:0/srv/kv", "fs:/srv/kv"),
        ("remote_url", "fs://localhost:65432/srv/kv", "fs:/srv/kv"),
        ("remote_url", "fs:///srv/kv?direct=1", "fs:/srv/kv?direct=1"),
        ("remote_url", "file:///srv/kv", "fs:/srv/kv"),
        ("remote_url", "fs:kv", "fs:kv"),
        ("remote_url", "s3://b.s3.eu-west-1.amazonaws.com/p/", "s3://b/p?region=eu-west-1"),
        ("remote_url", "s3://b.s3-us-east-2.amazonaws.com?part_mb=9", "s3://b?part_mb=9&region=us-east-2"),
        ("remote_url", "s3://my.bucket/p", "s3://my.bucket/p"),
        ("remote_url", "capped:1GiB:memory:", "capped:1GiB:memory:"),
    ],
)
def test_values_are_taken_in_all_their_forms(name, given, value):
    read = getattr(EngineConfig(**{name: given}), name)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("chunk_tokens", 0, "greater than or equal to 1"),
        ("chunk_tokens", 2**32, "less than"),
        ("chunk_tokens", True, "whole number"),
        ("chunk_tokens", 1.5, "whole number"),
        ("chunk_tokens", "1e3", "whole number"),
        ("chunk_tokens", "1e999", "whole number"),
        ("chunk_tokens", "9" * 30, "whole number"),
        ("chunk_tokens", float("nan"), "whole number"),
        ("chunk_tokens", [], "whole number"),
        ("save_decode", "maybe", "true or false"),
        ("save_decode", 2, "true or false"),
        ("save_decode", None, "true or false"),
        ("max_local_cpu_size", 0, "greater than 0"),
        ("max_local_cpu_size", float("inf"), "GiB"),
        ("max_local_cpu_size", "much", "'much' is not a size"),
        ("max_local_cpu_size", -1, "greater than 0"),
        ("max_local_disk_size", "-1", "greater than or equal to 0"),
        ("numa_node", -1, "greater than or equal to 0"),
        ("metrics_port", 65536, "less than or equal to 65535"),
        ("metrics_host", " ", "write an address"),
        ("metrics_host", "0.0.0.0:9000", "metrics_port"),
        ("local_disk", "s3://bucket/kv", "remote_url"),
        ("local_disk", "redis://h", "remote_url"),
        ("local_disk", "capped:1GiB:fs:/srv/kv", "remote_url"),
        ("local_disk", "fs://host/srv/kv", "has no host"),
        ("local_disk", "~nobody-of-that-name/kv", "nobody-of-that-name"),
        ("log_file", "~nobody-of-that-name/log", "nobody-of-that-name"),
        ("log_file_bytes", "0", "greater than or equal to 1"),
        ("cache_policy", "lruu", "did you mean 'lru'.*lfu"),
        ("lookup_strategy", "semantic", "other tokens"),
        ("lookup_strategy", "exat", "did you mean 'exact'.*chunked"),
        ("hash", "md5", "blake3, sha256"),
        ("store_policy", "write_thru", "did you mean 'write_through'"),
        ("store_retry_seconds", [5, 1], "shortest and the longest"),
        ("store_retry_seconds", [1, 2, 3], "a number, or two"),
        ("store_retry_seconds", 0, "shortest and the longest"),
        ("log_level", "loud", "DEBUG"),
        ("salt", 5, "a text"),
        ("serde", "kvs2", "did you mean 'kvs1'.*cachegen"),
        ("serde", {"preset": "high"}, "with a type"),
        ("serde", {"type": "chain", "steps": ["kvs2"]}, "no serde 'kvs2'"),
        ("serde", None, "a type"),
        ("local_disk", 5, "a directory"),
        ("local_disk", "file:///a,file:///b", "one directory"),
        ("local_disk", "file://", "no directory"),
        ("remote_url", "h:6379/x", "no kind of store 'h'"),
        ("remote_url", "cache.example", "begins with none of memory:"),
        ("remote_url", "lm://h:1", "no kind of store 'lm'.*there are memory, fs"),
        ("remote_url", "fs://server/export", "no host"),
        ("remote_url", 5, "a text"),
        ("tiers", 5, "list of tiers"),
        ("tiers", [{"store": "memry:"}], "tier 0: store: .*did you mean 'memory'"),
        ("tiers", [{"store": "memory:", "serde": "kvs2"}], "tier 0: serde: .*'kvs1'"),
        ("tiers", [{"store": "memory:", "read_onli": True}], "read_onli"),
        ("tiers", [{}], "store"),
        ("prefetch", {"watermark": 1.5}, "less than or equal to 1"),
        ("prefetch", {"watermrk": 0.5}, "watermrk"),
        ("no_such", 1, "no_such"),
    ],
)
def test_what_means_nothing_is_refused_with_what_is_allowed(name, given, said):
    with pytest.raises(ValidationError, match=f"(?s){said}"):
        EngineConfig(**{name: given})


def test_the_tiers_of_a_configuration(monkeypatch, tmp_path):
    config = EngineConfig(
        max_local_cpu_size="512MiB",
        reserve_local_cpu_size=1,
        local_disk="/srv/kv",
        max_local_disk_size="2GiB",
        cache_policy="LFU",
        tiers=["memory:", {"store": "fs:/far", "name": "far", "serde": "raw", "promote": False}],
        remote_url="redis://h",
        serde={"type": "kvs1", "preset": "high"},
        remote_serde="kivi",
        store_retry_seconds=[1, 2],
        pinned=False,
        numa_node=0,
        local_cpu_use_hugepages=True,
        max_in_flight=3,
        serde_workers=4,
        store_workers=5,
    )
    high = {"type": "kvs1", "preset": "high"}
    assert config.to_tiers() == TiersConfig(
        tiers=(
            StoreTierConfig(store="capped:2147483648,policy=lfu:fs:/srv/kv", serde=high, name="disk"),
            StoreTierConfig(store="memory:", serde=high),
            StoreTierConfig(store="fs:/far", name="far", serde="raw", promote=False),
            StoreTierConfig(store="resp://h", serde="kivi", name="remote"),
        ),
        host_bytes=1 << 29,
        reserve_host_bytes=1 << 30,
        policy="lfu",
        pinned=False,
        numa_node=0,
        hugepages=True,
        max_in_flight=3,
        serde_workers=4,
        store_workers=5,
        retry_seconds=(1, 2),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", "/home-of-somebody")
    assert EngineConfig(local_disk=True).to_tiers().tiers[0].store == f"fs:{tmp_path}/kvcore/kv"
    assert EngineConfig(local_disk="~/kv").to_tiers().tiers[0].store == "fs:/home-of-somebody/kv"
    assert EngineConfig(local_disk="fs:/srv/kv?direct=1").to_tiers().tiers[0].store == "fs:/srv/kv?direct=1"
    assert EngineConfig(remote_url="memory:", serde="kivi").to_tiers().tiers[0].serde == "kivi"


def test_without_local_cpu_host_memory_is_a_buffer():
    assert EngineConfig(local_cpu=False, local_disk="/srv/kv").to_tiers().store_policy == "buffer_only"
    assert EngineConfig(store_policy="write_through").to_tiers().store_policy == "write_through"


CONTRADICTIONS = [
    ({"local_cpu": False}, "nothing would be kept"),
    ({"store_policy": "buffer_only"}, "buffer_only needs a store"),
    ({"local_cpu": False, "local_disk": True, "store_policy": "write_through"}, "buffer_only, not write_through"),
    ({"metrics_port": 9000}, "metrics is false"),
    ({"local_disk": True, "tiers": ["fs:/x"]}, "got host, disk, disk"),
    ({"tiers": [{"store": "memory:", "name": "host"}]}, "got host, host"),
]


@pytest.mark.parametrize(("values", "said"), CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused(values, said):
    with pytest.raises(ValidationError, match=said):
        EngineConfig(**values)
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(values, environ={})
    assert "argument " in str(caught.value)


def test_secrets_are_shown_nowhere():
    secret = "s3cr3t"
    bucket = f"s3://b?secret_key={secret}"
    config = load_config(
        {
            "salt": secret,
            "remote_url": f"redis://engine:{secret}@h/0?prefix=a:",
            "tiers": [
                {"store": f"capped:1GiB:resp://:{secret}@h", "name": "a"},
                {"store": bucket, "name": "b"},
            ],
        },
        environ={},
    )
    assert config.salt == secret
    assert secret in config.to_tiers().tiers[2].store
    shown = repr(config) + str(config) + json.dumps([[row.name, row.value, row.source] for row in config.describe()])
    assert secret not in shown
    assert "resp://***@h/0?prefix=a:" in shown
    spaced = load_config(
        {"remote_url": f"resp://u:with {secret}@h", "tiers": [{"store": f'resp://u:"with {secret}@k', "name": "k"}]},
        environ={},
    )
    assert secret not in repr(spaced) + repr(spaced.describe())
    assert "(set)" in shown
    bad = {"salt": [secret], "remote_url": f"redis+x://u:{secret}@h", "tiers": [{"store": f"x://u:{secret}@h"}]}
    for names in (["salt"], ["remote_url"], ["tiers"], list(bad)):
        with pytest.raises(ConfigError) as caught:
            load_config({name: bad[name] for name in names}, environ={})
        assert secret not in str(caught.value)
        assert caught.value.__cause__ is None
        with pytest.raises(ValidationError) as refused:
            EngineConfig(**{name: bad[name] for name in names})
        assert secret not in str(refused.value)


def test_a_configuration_does_not_change_and_can_be_sent():
    config = load_config({"chunk_tokens": 16, "serde": {"type": "kvs1", "preset": "high"}}, environ={})
    with pytest.raises(ValidationError, match="frozen"):
        config.chunk_tokens = 32
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.describe() == config.describe()
    assert config != load_config({"chunk_tokens": 32}, environ={})
    assert EngineConfig(chunk_tokens=16).describe()[0].source == "argument"


def test_names_that_a_program_registers_are_known(monkeypatch):
    from kvcore.tiers.stores import registry

    monkeypatch.setattr(registry._STORES, "_factories", dict(registry._STORES._factories))
    registry.register_store("acme", lambda rest: None)
    assert EngineConfig(remote_url="acme:x").remote_url == "acme:x"


@given(st.integers(0, 10**15), st.sampled_from(["", "B", "K", "kB", "KiB", "MB", "Mi", "GiB", "T"]), st.booleans())
def test_sizes(number, unit, space):
    powers = {"": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    scale = (1024 if "i" in unit else 1000) ** powers[unit[:1].upper()]
    assert parse_size(f"{number}{' ' if space else ''}{unit}") == number * scale
    assert parse_size(f"{number / 8:.3f}{unit}") == pytest.approx(number * scale / 8, abs=1, rel=1e-12)
