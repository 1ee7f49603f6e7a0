"""Plots as SVG, by matplotlib: the extra `bench`. Without it there are none, and a message."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

STYLES = {"p99": "--"}


def is_possible() -> bool:
    """Whether there can be plots."""
    return find_spec("matplotlib") is not None


def draw(
    path: Path, curves: list[dict[str, Any]], title: str, x_label: str, y_label: str
) -> Path | None:
    """Draw curves into one picture; both axes are logarithmic where zero is not among them."""
    if not is_possible():
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # the same figures are to give the same file
    with mpl.rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for curve in curves:
            xs, ys = zip(*curve["points"], strict=True)
            style = next((s for end, s in STYLES.items() if curve["label"].endswith(end)), "-")
            axes.plot(xs, ys, style, marker="o", markersize=4, label=curve["label"])
        _scale(axes, curves)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    return path


def _scale(axes: Any, curves: list[dict[str, Any]]) -> None:
    points = [point for curve in curves for point in curve["points"]]
    for place, set_scale in ((0, axes.set_xscale), (1, axes.set_yscale)):
        values = [point[place] for point in points]
        if min(values) > 0 and max(values) > 20 * min(values):
            set_scale("log")
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
