"""The lines of a panel: what draws one, and its name at its right end."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

Curve = tuple[np.ndarray, np.ndarray]
Curves = Mapping[str, Curve]
Limits = tuple[float, float]


class Style(NamedTuple):
    """How a run is named and drawn, the same in every figure and in the table."""

    label: str
    color: str
    marker: str
    dashes: str = "-"


Styles = Mapping[str, Style]

LABEL_GAP = 0.068  # of the axes' height: a line of text at a panel's size
MOST_LABELS = 15


def label_lines(axes: Axes, curves: Curves, styles: Styles) -> None:
    """Names each line right of the axes, joined to its last point; an arrow marks one that left the view.

    Of more lines than have room, the highest, the lowest and some between are named.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = {}
    for name, (steps, values) in curves.items():
        last = np.flatnonzero(np.isfinite(values))[-1]
        ends[name] = to_axes.transform((steps[last], values[last]))
    order = sorted(ends, key=lambda name: ends[name][1])
    if len(order) > MOST_LABELS:
        order = [order[place] for place in np.linspace(0, len(order) - 1, MOST_LABELS).round().astype(int)]
    heights = spread(np.clip([ends[name][1] for name in order], 0, 1))
    for name, height in zip(order, heights, strict=True):
        (x, y), style = ends[name], styles[name]
        inside = 0 <= x and 0 <= y <= 1
        if inside:
            leader = ":" if x < 0.99 else "-"
            axes.plot(
                (x, 1.035),
                (y, height),
                leader,
                color=style.color,
                lw=0.8,
                transform=axes.transAxes,
                clip_on=False,
            )
        arrow = "" if inside else "\u2191 " if y > 1 else "\u2193 " if y < 0 else "\u2190 "
        axes.text(
            1.05,
            height,
            arrow + _short(style.label),
            color=style.color,
            size=9,
            va="center",
            transform=axes.transAxes,
        )


def _short(label: str) -> str:
    """Without its middle if it is long: names of runs differ at either end."""
    return label if len(label) <= 20 else f"{label[:9]}\u2026{label[-9:]}"


def spread(heights: np.ndarray) -> np.ndarray:
    """Ascending heights in [0, 1] moved apart to at least the label gap, each group about its own middle."""
    offsets = LABEL_GAP * np.arange(len(heights))
    # Pushing up from below and down from above both keep the gap, so their mean does.
    up = np.maximum.accumulate(heights - offsets)
    down = np.minimum.accumulate((heights - offsets)[::-1])[::-1]
    return np.maximum(np.minimum((up + down) / 2, 0.97 - offsets[-1]), 0) + offsets
