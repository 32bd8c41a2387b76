"""The figures of a suite as bars: kvcore, the peer, and the memory's own speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcore.bench.cases import Row
from kvcore.errors import ConfigError

__all__ = ["check_path", "draw"]

_COLOURS = ("#1f6feb", "#8250df", "#b1bac4")


def check_path(path: Path) -> None:
    """Raise unless a picture can be written there, so that nothing is measured in vain.

    Raises
    ------
    ConfigError
        There is no such directory, or the ending names no format.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no such directory")
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ConfigError(f"--plot {path}: its ending names no format; {', '.join(sorted(formats))} do")


def draw(rows: Sequence[Row], title: str, path: Path, *, limit: str = "memcpy") -> None:
    """Write a picture of the rows, on a logarithmic axis: paths differ by orders of magnitude.

    Parameters
    ----------
    rows : sequence of Row
    title : str
    path : Path
        Its ending names the format.
    limit : str
        What the roofline is called.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.27
    for offset, (name, colour) in enumerate(zip(("kvcore", "peer", limit), _COLOURS, strict=True)):
        values = [(row.kvcore_gbps, row.peer_gbps, row.roofline_gbps)[offset] for row in rows]
        places = [i + (offset - 1) * height for i, value in enumerate(values) if value is not None]
        drawn = [value for value in values if value is not None]
        if drawn:
            axes.barh(places, drawn, height, color=colour, label=name)
    axes.set_yticks(range(len(rows)), [row.path for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(" or ".join(dict.fromkeys(row.unit for row in rows)) + ", one thread")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
