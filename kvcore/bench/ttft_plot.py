"""Times to the first token over the length of a prefix, as lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcore.bench.ttft import TtftRow
from kvcore.errors import ConfigError

__all__ = ["draw_ttft"]

_LINES = (
    ("plain_ms", "computed", "#6e7781", "o-"),
    ("cold_ms", "computed and stored with kvcore", "#1f6feb", "o:"),
    ("store_ms", "kvcore, from the store in a new engine", "#1f6feb", "o-"),
    ("host_ms", "kvcore, from host memory, next user", "#54aeff", "o-"),
    ("own_ms", "vLLM's own prefix cache, next user", "#2da44e", "o--"),
    ("example_ms", "vLLM's ExampleConnector, same prompt", "#8250df", "o--"),
)


def draw_ttft(rows: Sequence[TtftRow], title: str, path: Path) -> None:
    """Write a picture of the rows, both axes logarithmic.

    Parameters
    ----------
    rows : sequence of TtftRow
    title : str
    path : Path
        Its ending names the format.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for field, label, colour, style in _LINES:
        points = [(row.tokens, getattr(row, field)) for row in rows if getattr(row, field) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row.tokens for row in rows], [f"{row.tokens:,}" for row in rows])
    axes.set_xlabel("tokens of the shared prefix")
    axes.set_ylabel("time to the first token, ms")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
