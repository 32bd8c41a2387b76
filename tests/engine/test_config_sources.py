"""Where settings come from: one reading for file, environment and arguments; who wins; and what is said of mistakes."""

import functools
import importlib.metadata
import json
import logging
import subprocess
import sys

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvcore.engine.config import EngineConfig, load_config, setting_names
from kvcore.engine.config_model import leaf_names
from kvcore.engine.config_sources import ALIASES, OTHERS
from kvcore.errors import ConfigError
from kvcore.settings import VARIABLES

WORDS = st.text("abcdefghijklmnopqrstuvwxyzäß0123456789 _-:#'\"{}[]%", min_size=1, max_size=12).filter(str.strip)
SERDES = st.sampled_from(["raw", "lossless", {"type": "kvs1", "preset": "high"}, {"type": "kivi", "bits": 2}])
SIZES = st.one_of(st.integers(1, 10**6), st.floats(0.001, 1e6), st.sampled_from(["512MiB", "5 GB", "2t"]))
VALUES = {
    "chunk_tokens": st.integers(1, 2**32 - 1),
    "save_partial_chunk": st.booleans(),
    "save_decode": st.booleans(),
    "min_retrieve_tokens": st.integers(0, 10**9),
    "lookup_strategy": st.sampled_from(["chunked", "exact", "EXACT"]),
    "model_name": WORDS,
    "model_revision": WORDS,
    "salt": WORDS,
    "hash": st.sampled_from(["blake3", "sha256"]),
    "max_local_cpu_size": SIZES,
    "reserve_local_cpu_size": SIZES,
    "local_cpu_use_hugepages": st.booleans(),
    "numa_node": st.none() | st.integers(0, 9),
    "pinned": st.booleans(),
    "cache_policy": st.sampled_from(["lru", "LFU", "Arc"]),
    "local_disk": st.sampled_from([True, False, "/srv/kv", "file:///srv/kv", None]),
    "max_local_disk_size": SIZES,
    "tiers": st.lists(
        st.fixed_dictionaries(
            {"store": st.sampled_from(["memory:", "redis://u:p@h/1", "s3://bucket?region=eu-west-1"])},
            optional={"serde": SERDES, "read_only": st.booleans(), "promote": st.booleans()},
        ),
        max_size=3,
    ).map(lambda tiers: [{**tier, "name": f"tier{number}"} for number, tier in enumerate(tiers)]),
    "remote_url": st.sampled_from(["", "resp://h", "rediss://h:1", "fs://host:0/srv/kv"]),
    "serde": SERDES,
    "remote_serde": st.none() | SERDES,
    "max_in_flight": st.integers(1, 99),
    "serde_workers": st.integers(1, 9),
    "store_workers": st.integers(1, 9),
    "store_retry_seconds": st.sampled_from([1, 0.5, [0.5, 30], [1, 1]]),
    "prefetch.enabled": st.booleans(),
    "prefetch.watermark": st.floats(0, 1),
    "prefetch.max_chunks": st.integers(1, 99),
    "backend": st.sampled_from(["", "cpu"]),
    "log_level": st.sampled_from(["", "debug", "INFO"]),
    "log_file": WORDS,
    "log_file_bytes": st.integers(1, 10**12) | st.just("64 MiB"),
    "log_file_count": st.integers(0, 9),
    "tracing": st.booleans(),
}
CONFIGS = st.fixed_dictionaries({}, optional=VALUES)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", autouse=True)
def _packages_are_looked_through_once():
    # Each look takes milliseconds, and nothing is installed meanwhile.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", functools.cache(importlib.metadata.entry_points))
        yield


def as_text(value):
    """A value as a variable has it."""
    if value is None or isinstance(value, (bool, list, dict)):
        return json.dumps(value)
    return str(value)


def variables(values):
    # An empty variable counts as not set, and so does the empty value of every setting that has one.
    return {f"KVCORE_{name.replace('.', '_').upper()}": as_text(value) for name, value in values.items()}


def nested(values):
    """Settings as a file has them."""
    flat = {name: value for name, value in values.items() if "." not in name}
    inner = {name.partition(".")[2]: value for name, value in values.items() if "." in name}
    return {**flat, "prefetch": inner} if inner else flat


def written(folder, values):
    path = folder / "kvcore.yaml"
    path.write_text(yaml.safe_dump(values, allow_unicode=True), "utf-8")
    return path


def refused(*args, **kwargs):
    """The message of what must fail."""
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **{"environ": {}, **kwargs})
    return str(caught.value)


@QUICK
@given(CONFIGS)
def test_a_file_the_environment_and_arguments_say_the_same(tmp_path, values):
    wanted = EngineConfig(**nested(values))
    by_file = load_config(file=written(tmp_path, nested(values)), environ={})
    by_variables = load_config(environ=variables(values))
    by_arguments = load_config(nested(values), environ={})
    assert by_file == by_variables == by_arguments == wanted
    assert by_file.to_tiers() == by_variables.to_tiers() == by_arguments.to_tiers() == wanted.to_tiers()
    assert load_config(values, environ={}) == wanted  # prefetch.enabled, and so on, in one name


@QUICK
@given(CONFIGS, CONFIGS, CONFIGS)
def test_arguments_win_over_the_environment_and_that_over_the_file(tmp_path, first, second, third):
    second = {name: value for name, value in second.items() if as_text(value).strip()}
    path = written(tmp_path, nested(first))
    config = load_config(third, file=path, environ=variables(second))
    assert config == EngineConfig(**nested({**first, **second, **third}))
    sources = {row.name: row.source for row in config.describe()}
    for name in leaf_names():
        if name in third:
            assert sources[name] == f"argument {name}"
        elif name in second:
            assert sources[name] == f"KVCORE_{name.replace('.', '_').upper()}"
        elif name in first:
            assert sources[name] == f"{path}:{name}"
        else:
            assert sources[name] == "default"


LETTERS = "abcdefghijklmnopqrstuvwxyz_"


def typos(name):
    """All names that are one letter away from a name: one left out, one too many, one that is wrong."""
    for at in range(len(name) + 1):
        yield from (name[:at] + letter + name[at:] for letter in LETTERS)
        if at < len(name):
            yield name[:at] + name[at + 1 :]
            yield from (name[:at] + letter + name[at + 1 :] for letter in LETTERS)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(setting_names()).flatmap(lambda n: st.tuples(st.just(n), st.sampled_from(sorted({*typos(n)})))))
@example(("hash", "has"))
@example(("serde", "erde"))
@example(("serde_workers", "strde_workers"))
def test_a_typo_of_one_letter_gives_the_name_that_was_meant(case):
    name, typo = case
    if typo in setting_names():
        return
    message = refused({typo: "x"})
    assert f"argument {typo}: there is no such setting; did you mean '{name}'?" in message
    assert all(known in message for known in setting_names())
    if f"KVCORE_{typo.upper()}" not in {variable.name for variable in VARIABLES}:
        wanted = f"did you mean 'KVCORE_{name.upper()}'?"
        assert wanted in refused(environ={f"KVCORE_{typo.upper()}": "x"})


def test_all_complaints_come_at_once_each_with_its_place(tmp_path):
    path = written(
        tmp_path,
        {"chunk_tokens": 0, "storage": {"local_dsk": "/x"}, "prefetch": {"watermark": 2}, "tiers": [{"store": "x"}]},
    )
    tiers = '[{"store": "memory:", "nam": "a"}]'
    message = refused(
        {"max_local_cpu_size": "much"},
        file=path,
        environ={"KVCORE_LOCAL_CPU": "maybe", "KVCORE_CHUNK_TOKEN": "1", "KVCORE_TIERS": tiers},
    )
    for said in (
        f"{path}:chunk_tokens: Input should be greater than or equal to 1",
        f"{path}:storage.local_dsk: there is no such setting; did you mean 'local_disk'? there are local_cpu, ",
        f"{path}:prefetch.watermark: Input should be less than or equal to 1",
        f"{path}:tiers: tier 0: store: this is not the URI of a store",
        "KVCORE_LOCAL_CPU: write true or false",
        "KVCORE_CHUNK_TOKEN: there is no such variable; did you mean 'KVCORE_CHUNK_TOKENS'?",
        "KVCORE_TIERS.0.nam: there is no such setting; did you mean 'name'? there are store, serde, name",
        "argument max_local_cpu_size: 'much' is not a size",
    ):
        assert said in message
    assert message.count("\n  - ") == 9


def test_a_bad_value_is_refused_even_if_another_one_counts(tmp_path):
    path = written(tmp_path, {"chunk_tokens": "many"})
    assert "chunk_tokens: write a whole number" in refused({"chunk_tokens": 16}, file=path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chunk_tokens: 16\nchunk_tokens: 32\n", "line 2: 'chunk_tokens' stands here a second time"),
        ("prefetch:\n  enabled: true\n  enabled: true\n", "line 3: 'enabled' stands"),
        ("tiers: [{store: 'memory:', store: 'memory:'}]\n", "'store' stands"),
        ("salt: 's3cr3t\n", "this is not YAML"),
        ("salt: {s3cr3t\n", "this is not YAML"),
        ("salt: !!python/object/apply:os.system ['true']\n", "this is not YAML"),
        ("model_revision: 2026-13-45\n", "this is not YAML"),
        ("a: 1\n---\nb: 2\n", "this is not YAML"),
        ("salt: \x00\n", "this is not YAML"),
        ("[" * 5000, "nested too deeply"),
        ("- chunk_tokens\n", "NAME: VALUE"),
        ("word\n", "NAME: VALUE"),
        ("5: 6\n", ":5: there is no such setting"),
        ("model_revision: 1.10\n", "within quotes"),
        ("model_revision: 2026-01-02\n", "within quotes"),
        ("&a [*a]\n", "NAME: VALUE"),
        ("storage: 5\n", "write settings below it: local_cpu"),
        ("compression: {}\nstorage: {chunk_tokens: 5}\n", "storage.chunk_tokens: there is no such setting; "),
    ],
)
def test_a_file_that_is_wrong_is_refused_and_not_repeated(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = refused(file=path)
    assert said in message
    assert str(path) in message
    assert "s3cr3t" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for name in ("~nobody-of-that-name/kvcore.yaml", "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(file=name, environ={})
    assert f"{tmp_path}/none.yaml: this file cannot be read: No such file" in refused(file=tmp_path / "none.yaml")
    assert "Is a directory" in refused(environ={"KVCORE_CONFIG_FILE": str(tmp_path)})
    (tmp_path / "latin.yaml").write_bytes(b"salt: \xe4\n")
    assert "no text in UTF-8" in refused(file=tmp_path / "latin.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_config(file=tmp_path / "empty.yaml", environ={}) == EngineConfig()


def test_the_file_of_an_argument_counts_and_not_that_of_a_variable(tmp_path):
    path = written(tmp_path, {"chunk_tokens": 16})
    assert load_config(environ={"KVCORE_CONFIG_FILE": str(path)}).chunk_tokens == 16
    assert load_config(environ={"LMCACHE_CONFIG_FILE": str(path)}).chunk_tokens == 16
    assert load_config(file=path, environ={"KVCORE_CONFIG_FILE": "/none"}).chunk_tokens == 16
    both = {"KVCORE_CONFIG_FILE": str(path), "LMCACHE_CONFIG_FILE": "/none"}
    assert "name different files" in refused(environ=both)


def test_variables_that_are_none_of_settings():
    plain = load_config(environ={"PATH": "/bin", "KVCORE_STRICT": "1", "KVCORE_SALT": "", "KVCORE_TIERS": "  "})
    assert plain == EngineConfig()
    assert load_config(environ={"KVCORE_BACKEND": "cpu"}).backend == "cpu"
    assert "KVCORE_CPU_THREADS='many'" in refused(environ={"KVCORE_CPU_THREADS": "many"})
    assert "did you mean 'KVCORE_STRICT'?" in refused(environ={"KVCORE_STRICTT": "1"})


def test_what_kubernetes_sets_for_services_is_passed_over():
    url = "tcp://10.0.0.1:6379"
    service = {
        "KVCORE_SERVICE_HOST": "10.0.0.1",
        "KVCORE_SERVICE_PORT": "6379",
        "KVCORE_SERVICE_PORT_REDIS": "6379",
        "KVCORE_PORT": url,
        "KVCORE_PORT_6379_TCP": url,
        "KVCORE_PORT_6379_TCP_ADDR": "10.0.0.1",
        "KVCORE_STORE_SERVICE_HOST": "10.0.0.1",
        "KVCORE_STORE_PORT": url,
    }
    assert load_config(environ=service) == EngineConfig()
    assert "enableServiceLinks" in refused(environ={"KVCORE_METRICS_PORT": url})
    assert "KVCORE_METRIC_PORT: there is no such variable" in refused(environ={"KVCORE_METRIC_PORT": "9000"})


LMCACHE_FILE = """
chunk_size: 128
local_cpu: false
max_local_cpu_size: 20.0
local_disk: "file:///srv/lmcache/"
max_local_disk_size: 50
remote_url: "redis://cache:6379"
remote_serde: "cachegen"
save_unfull_chunk: true
save_decode_cache: false
cache_policy: LRU
enable_blending: false
extra_config: {use_odirect: true}
"""


def test_a_configuration_of_lmcache_is_read_as_it_is(tmp_path, caplog):
    path = tmp_path / "lmcache.yaml"
    path.write_text(LMCACHE_FILE)
    with caplog.at_level(logging.INFO, "kvcore"):
        config = load_config(environ={"LMCACHE_CONFIG_FILE": str(path), "LMCACHE_USE_EXPERIMENTAL": "True"})
    assert config == EngineConfig(
        chunk_tokens=128,
        local_cpu=False,
        max_local_cpu_size=20,
        local_disk="/srv/lmcache/",
        max_local_disk_size=50,
        remote_url="resp://cache:6379",
        remote_serde="cachegen",
        save_partial_chunk=True,
        save_decode=False,
    )
    lines = [record.getMessage() for record in caplog.records]
    assert f"{path}:chunk_size is read as chunk_tokens" in lines
    assert f"{path}:enable_blending means nothing to kvcore, and is ignored" in lines
    assert "LMCACHE_USE_EXPERIMENTAL means nothing to kvcore, and is ignored" in lines
    assert len(lines) == len(set(lines)) == 7
    message = refused(file=path)
    assert "enable_blending: there is no such setting" in message
    assert "extra_config: there is no such setting" in message


@pytest.mark.parametrize("name", OTHERS)
def test_each_variable_of_lmcache_counts_as_that_of_kvcore(name, caplog):
    own = ALIASES.get(name, name)
    text = {"local_cpu": "True", "cache_policy": "LFU", "lookup_strategy": "exact", "log_level": "INFO"}.get(name)
    text = text or {"local_disk": "file:///srv/kv", "remote_url": "redis://h", "remote_serde": "naive"}.get(name, "1")
    with caplog.at_level(logging.INFO, "kvcore"):
        config = load_config(environ={f"LMCACHE_{name.upper()}": text})
    assert config == load_config(environ={f"KVCORE_{own.upper()}": text})
    assert {row.name: row.source for row in config.describe()}[own] == f"LMCACHE_{name.upper()}"
    notes = [record.getMessage() for record in caplog.records]
    assert notes.count(f"LMCACHE_{name.upper()} is read as {own}") == 1


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_a_name_and_its_alias_must_say_the_same(tmp_path, alias):
    own, first, second = ALIASES[alias], 1, 0 if alias.startswith("save") else 2
    assert load_config({own: first, alias: str(first)}, environ={}) == load_config({own: first}, environ={})
    assert f"argument {own} and argument {alias} say different things" in refused({own: first, alias: second})
    path = written(tmp_path, {own: first, alias: second})
    assert f"{path}:{alias}" in refused(file=path)
    environ = {f"KVCORE_{own.upper()}": str(first), f"LMCACHE_{alias.upper()}": str(second)}
    assert "say different things" in refused(environ=environ)
    assert load_config({own: second}, environ={f"LMCACHE_{alias.upper()}": str(first)}) == EngineConfig(**{own: second})


def test_a_disagreement_about_a_secret_does_not_tell_it(tmp_path):
    path = written(tmp_path, {"remote_url": "redis://u:s3cr3t@h", "storage": {"remote_url": "redis://u:0ther@h2"}})
    message = refused(file=path)
    assert "resp://***@h and resp://***@h2" in message
    assert "s3cr3t" not in message


def test_sections(tmp_path):
    text = "storage: {local_disk: /srv/kv, chunk_size: 16}\ncompression: {type: kvs1, preset: high}\nprefetch: true\n"
    (tmp_path / "a.yaml").write_text(text)
    config = load_config(file=tmp_path / "a.yaml", environ={"KVCORE_PREFETCH_MAX_CHUNKS": "3"})
    assert (config.local_disk, config.chunk_tokens) == ("/srv/kv", 16)
    assert config.serde == {"type": "kvs1", "preset": "high"}
    assert (config.prefetch.enabled, config.prefetch.max_chunks) == (True, 3)
    by_variable = load_config(environ={"KVCORE_STORAGE": "{local_disk: /srv/kv}", "KVCORE_COMPRESSION": "kvs1"})
    assert (by_variable.local_disk, by_variable.serde) == ("/srv/kv", "kvs1")
    assert (
        load_config({"compression": {"remote_serde": "kivi"}, "remote_url": "memory:"}, environ={}).remote_serde
        == "kivi"
    )
    assert load_config({"prefetch": {"enabled": 1}, "storage": None}, environ={}).prefetch.enabled
    assert "KVCORE_STORAGE: line 1: this is not YAML" in refused(environ={"KVCORE_STORAGE": "{x"})


def test_an_address_for_metrics_without_a_port_is_said_in_the_log(caplog):
    load_config({"metrics": True, "metrics_host": "0.0.0.0"}, environ={})
    assert caplog.messages == ["argument metrics_host: metrics_host counts with metrics_port only"]
    load_config({"metrics": True, "metrics_port": 9000}, environ={"KVCORE_METRICS_HOST": "::"})
    assert len(caplog.messages) == 1


def test_settings_without_effect_are_said_in_the_log(caplog):
    load_config({"max_local_disk_size": 5, "remote_serde": "raw"}, environ={})
    assert [record.getMessage() for record in caplog.records] == [
        "argument max_local_disk_size: max_local_disk_size counts with local_disk only",
        "argument remote_serde: remote_serde counts with remote_url only",
    ]


def test_the_environment_of_the_process_counts_unless_another_is_given(monkeypatch):
    monkeypatch.setenv("KVCORE_CHUNK_TOKENS", "16")
    assert load_config().chunk_tokens == 16
    assert load_config(environ={}).chunk_tokens == 256


def test_the_package_and_its_keys_import_neither_pydantic_nor_yaml():
    program = "import kvcore, kvcore.engine.keys, sys; print({'pydantic', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
