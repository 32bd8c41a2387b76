"""The KVCORE_* variables: what each accepts, and what it says about a value that means nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvcore.errors import ConfigError
from kvcore.settings import VARIABLES, Settings, current

BY_NAME = {variable.name: variable for variable in VARIABLES}


def test_an_empty_environment_gives_the_defaults():
    assert current({}) == Settings(
        backend="",
        cpu_isa="",
        cpu_threads=None,
        kernels=(),
        plugins=None,
        strict=False,
    )
    assert (current({}).emu_warp, current({}).emu_seed, current({}).emu_flags) == (32, 1, ())


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("KVCORE_BACKEND", "cpu_ref", "backend", "cpu_ref"),
        ("KVCORE_BACKEND", "  acme ", "backend", "acme"),
        ("KVCORE_BACKEND", "", "backend", ""),
        ("KVCORE_PLUGINS", "cpu, cpu_ref,", "plugins", ("cpu", "cpu_ref")),
        ("KVCORE_PLUGINS", " , ", "plugins", None),
        ("KVCORE_KERNELS", "digest=native,*=triton", "kernels", (("digest", "native"), ("*", "triton"))),
        ("KVCORE_KERNELS", " digest = native , ", "kernels", (("digest", "native"),)),
        ("KVCORE_CPU_ISA", " scalar ", "cpu_isa", "scalar"),
        ("KVCORE_CPU_ISA", "avx2", "cpu_isa", "avx2"),
        ("KVCORE_CPU_ISA", "", "cpu_isa", ""),
        ("KVCORE_CPU_THREADS", "3", "cpu_threads", 3),
        ("KVCORE_CPU_THREADS", "1024", "cpu_threads", 1024),
        ("KVCORE_CPU_THREADS", "", "cpu_threads", None),
        ("KVCORE_STRICT", "1", "strict", True),
        ("KVCORE_STRICT", "Yes", "strict", True),
        ("KVCORE_STRICT", "off", "strict", False),
        ("KVCORE_STRICT", "", "strict", False),
        ("KVCORE_EMU_WARP", "64", "emu_warp", 64),
        ("KVCORE_EMU_SEED", " 18446744073709551615", "emu_seed", 2**64 - 1),
        ("KVCORE_EMU_FLAGS", "-g '-I a b'", "emu_flags", ("-g", "-I a b")),
    ],
)
def test_values_are_parsed(name, text, field, value):
    assert getattr(current({name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVCORE_CPU_THREADS", "0"),
        ("KVCORE_CPU_THREADS", "-1"),
        ("KVCORE_CPU_THREADS", "two"),
        ("KVCORE_CPU_THREADS", "1025"),
        ("KVCORE_CPU_THREADS", "9" * 5000),
        ("KVCORE_CPU_THREADS", "\u0663"),
        ("KVCORE_CPU_ISA", "sse9"),
        ("KVCORE_CPU_ISA", "AVX2"),
        ("KVCORE_STRICT", "2"),
        ("KVCORE_STRICT", "maybe"),
        ("KVCORE_KERNELS", "native"),
        ("KVCORE_KERNELS", "=native"),
        ("KVCORE_KERNELS", "digest="),
        ("KVCORE_KERNELS", "digest=native,oops"),
    ],
)
def test_a_value_that_means_nothing_names_the_variable_and_an_example(name, text):
    with pytest.raises(ConfigError) as caught:
        current({name: text})
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r}: ")
    assert f"for example {name}={BY_NAME[name].example}" in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVCORE_EMU_WARP", "33"),
        ("KVCORE_EMU_SEED", "-1"),
        ("KVCORE_EMU_SEED", "9" * 5000),
        ("KVCORE_EMU_SEED", "1_0"),
        ("KVCORE_EMU_FLAGS", "'-I"),
    ],
)
def test_a_variable_of_the_emulated_device_stops_only_who_opens_it(name, text):
    settings = current({name: text})
    with pytest.raises(ConfigError) as caught:
        getattr(settings, name.removeprefix("KVCORE_").lower())
    assert str(caught.value).startswith(f"{name}={text!r}: ")
    open_it = "import kvcore\nprint(kvcore.open_backend('cpu').name)\nkvcore.open_backend('emu')"
    child = subprocess.run(
        [sys.executable, "-c", open_it], capture_output=True, text=True, check=False, env={**os.environ, name: text}
    )
    assert child.stdout == "cpu\n"
    assert child.stderr.splitlines()[-1].startswith(f"kvcore.errors.ConfigError: {name}=")


def test_the_process_environment_is_read_anew_each_time(monkeypatch):
    monkeypatch.setenv("KVCORE_BACKEND", "one")
    assert current().backend == "one"
    monkeypatch.setenv("KVCORE_BACKEND", "two")
    assert current().backend == "two"
    monkeypatch.delenv("KVCORE_BACKEND")
    assert current().backend == ""


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda v: v.name)
def test_each_variable_documents_itself(variable):
    assert variable.name.startswith("KVCORE_")
    assert len(variable.help) > 20
    assert variable.parse(variable.example) != variable.parse(variable.default)
    assert hasattr(current({}), variable.name.removeprefix("KVCORE_").lower())


def test_variables_of_others_are_left_alone():
    assert current({"KVCORE_UNHEARD_OF": "x", "PATH": "/bin"}) == current({})
