"""Rate against fidelity, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcore.codecs.kvs1 import PRESETS as KVS1
from kvcore.errors import ConfigError
from kvcore.eval.measure import Row
from kvcore.eval.subjects import LEVELED

__all__ = ["draw"]

_LINES = ((list(KVS1), "KVS1", "#1f6feb", "o"), ([n + LEVELED for n in KVS1], "KVS1, level constants", "#8250df", "s"))
_OTHERS = "#57606a"
_DPI = 110


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a picture of bits per element against mean KL, in the format that the path's ending names.

    Rows whose KL is 0, which a logarithmic axis does not have, become vertical lines.

    Raises
    ------
    ConfigError
        The file cannot be written, or has an ending that means nothing.
    """
    from matplotlib.figure import Figure

    by_name = {row.codec: row for row in rows}
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    drawn: set[str] = set()
    for names, label, colour, marker in _LINES:
        line = [by_name[n] for n in names if n in by_name and by_name[n].kl > 0]
        if line:
            axes.plot([r.bits for r in line], [r.kl for r in line], marker=marker, color=colour, label=label)
        drawn.update(r.codec for r in line)
    for row in rows:
        if row.kl <= 0:
            axes.axvline(row.bits, color=_OTHERS, linestyle=":")
            name = f" {row.codec} (KL 0)"
            axes.text(row.bits, 0.98, name, rotation=90, va="top", ha="right", transform=axes.get_xaxis_transform())
            continue
        if row.codec not in drawn:
            axes.plot([row.bits], [row.kl], marker="D", color=_OTHERS, linestyle="")
        if not row.codec.endswith(LEVELED):
            axes.annotate(row.codec, (row.bits, row.kl), xytext=(7, 4), textcoords="offset points", fontsize=9)
    if any(row.kl > 0 for row in rows):
        axes.set_yscale("log")
    axes.set_xlim(0, 1.12 * max(row.bits for row in rows))  # room for the name of the last one
    axes.set_xlabel("bits per element of K and V, all side information included")
    axes.set_ylabel("mean KL from bfloat16 KV, nats per token")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.2)
    if drawn:
        axes.legend(frameon=False)
    try:
        # Without the version of the library in it, equal figures are equal files.
        figure.savefig(path, dpi=_DPI, metadata={"Software": None} if path.suffix == ".png" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
