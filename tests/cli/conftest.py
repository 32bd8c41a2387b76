"""What the tests of commands share: running one in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcore.cli import app


@dataclass(frozen=True)
class Done:
    """What a command did."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def run() -> Callable[..., Done]:
    """Run a command; `typed` is what is typed at its questions."""

    def invoke(*arguments: str, typed: str | None = None) -> Done:
        done = CliRunner().invoke(app, [str(a) for a in arguments], input=typed, env={"COLUMNS": "200"})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Done(done.exit_code, done.stdout, done.stderr)

    return invoke
