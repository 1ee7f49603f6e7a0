"""Plots as SVG, by matplotlib: the extra `bench`. Without it there are none, and a message."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

STYLES = {"p99": "--"}


@dataclass(frozen=True)
class Words:
    """What is written at a plot, and how its axes are scaled."""

    title: str
    x: str
    y: str
    x_scale: str
    y_scale: str


def is_possible() -> bool:
    """Whether there can be plots."""
    return find_spec("matplotlib") is not None


def draw(path: Path, curves: list[dict[str, Any]], words: Words) -> Path | None:
    """Draw curves into one picture."""
    if not is_possible():
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # the same figures are to give the same file
    with mpl.rc_context({"svg.hashsalt": words.title, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        sides = list(dict.fromkeys(curve["label"].split(",")[0] for curve in curves))
        for curve in curves:
            xs, ys = zip(*curve["points"], strict=True)
            side, _, part = curve["label"].partition(", ")
            look = {"color": f"C{sides.index(side)}", "linestyle": STYLES.get(part, "-")}
            axes.plot(xs, ys, marker="o", markersize=4, label=curve["label"], **look)
        axes.set(title=words.title, xlabel=words.x, ylabel=words.y)
        axes.set(xscale=words.x_scale, yscale=words.y_scale)
        if words.y_scale == "linear":
            axes.set_ylim(bottom=0)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    return path
