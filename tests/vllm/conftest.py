"""A real vLLM to test the connector in: its environment, models, documents, and what the plain engine makes of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore.bench.engine import EngineProcess, check_engine_python
from kvcore.bench.engine_prompts import read_document
from kvcore.cli.conversion import model_directory
from kvcore.kernels.images import cache_folder

from .reference import References
from .serving import kvcore_connector
from .small_models import small_model


def pytest_collection_modifyitems(items):
    """All that is here needs a real engine, and waits for one for minutes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def engine_python() -> str:
    """The interpreter of the engine's environment: this one, or that of `make vllm-env`."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    return check_engine_python(str(Path(__file__).parents[2] / ".vllm-venv" / "bin" / "python"))


@pytest.fixture(scope="session")
def smollm() -> str:
    """SmolLM2-135M in float32."""
    return model_directory()


@pytest.fixture(scope="session")
def document(smollm) -> list[int]:
    """The tokens of a long text."""
    return read_document(smollm)


@pytest.fixture(scope="session")
def small() -> Callable[[str], str]:
    """The directory of a small random model, by its name in `small_models`."""
    folder = cache_folder() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return lambda name: str(small_model(name, folder))


@pytest.fixture(scope="session")
def references(engine_python) -> References:
    """What the engine generates without a connector."""
    return References(engine_python, cache_folder() / "vllm-references")


@pytest.fixture
def start(engine_python):
    """Start an engine with a connector; what a test leaves running is killed."""
    engines: list[EngineProcess] = []

    def run(model: str, extra: dict | None = None, *, role: str = "kv_both", connector: dict | None = None, **options):
        if extra is not None:
            connector = kvcore_connector(extra, role)
        engine = EngineProcess(engine_python, model, connector=connector, **options)
        engines.append(engine)
        return engine

    yield run
    for engine in engines:
        engine.__exit__()
