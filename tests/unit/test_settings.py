"""The KVCORE_* variables: what each accepts, and what it says about a value that means nothing."""

from __future__ import annotations

import pytest

from kvcore.errors import ConfigError
from kvcore.settings import VARIABLES, Settings, current

BY_NAME = {variable.name: variable for variable in VARIABLES}


def test_an_empty_environment_gives_the_defaults():
    assert current({}) == Settings(backend="", kernels=(), plugins=None, strict=False)


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
        ("KVCORE_STRICT", "1", "strict", True),
        ("KVCORE_STRICT", "Yes", "strict", True),
        ("KVCORE_STRICT", "off", "strict", False),
        ("KVCORE_STRICT", "", "strict", False),
    ],
)
def test_values_are_parsed(name, text, field, value):
    assert getattr(current({name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
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
    assert variable.name.removeprefix("KVCORE_").lower() in Settings.__slots__


def test_variables_of_others_are_left_alone():
    assert current({"KVCORE_UNHEARD_OF": "x", "PATH": "/bin"}) == current({})
