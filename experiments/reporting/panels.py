"""Panels: a line per run, named at its right end.

A curve is two arrays of equal length, where and what; values that are not finite are gaps. Panels are small
so that a page can put them side by side on a desk and one below another on a phone. They are made without
pyplot: nothing global is touched, and PNG comes from Agg wherever the code runs.
"""

import io
from collections.abc import Iterable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from experiments.reporting.line_labels import Curve, Curves, Limits, Style, Styles, label_lines

# Colours are Okabe and Ito's, told apart under the usual colour blindnesses; markers tell them apart in grey.
# Runs without a constraint are dashed.
_KNOWN = {
    "adamw": Style("AdamW", "#000000", "o", "--"),
    "none": Style("unconstrained Muon", "#7f7f7f", "s", "--"),
    "stiefel": Style("all-Stiefel", "#0072b2", "^"),
    "dgram": Style("all-DGram", "#d55e00", "v"),
    "oblique": Style("all-Oblique", "#e69f00", "P"),
    "hetero": Style("hetero", "#009e73", "D"),
    "hetero-inv": Style("hetero-inv", "#cc79a7", "X"),
}
_SPARE = (("#56b4e9", "h"), ("#8c6d00", "<"), ("#6a3d9a", ">"), ("#a6761d", "p"))
_DASHES = ("-", ":", "-.", "--")

_RC = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
}
_MARKERS_PER_LINE = 7


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Each run's style, in the order of the table: the paper's runs first, then the others by name.

    Args:
      names: run names; those that are not of the paper keep their name as label and get the spare colours,
        and then those of the paper's runs that are not there.
    """
    names = set(names)
    chosen = {name: style for name, style in _KNOWN.items() if name in names}
    absent = [(style.color, style.marker) for name, style in _KNOWN.items() if name not in names]
    spare = (*_SPARE, *absent)
    for index, name in enumerate(sorted(names - _KNOWN.keys())):
        cycle, place = divmod(index, len(spare))
        color, marker = spare[place]
        chosen[name] = Style(name, color, marker, _DASHES[cycle % len(_DASHES)])
    return chosen


def png(figure: Figure) -> bytes:
    """The figure as PNG, without metadata: equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def step_panel(
    curves: Curves,
    styles: Styles,
    title: str,
    axis: str,
    *,
    x: str = "step",
    log: bool | None = None,
    limits: Limits | None = None,
    start: float = 0,
    empty: str = "nothing recorded yet",
) -> Figure:
    """One panel over a run's steps or its time, a line per run; `log=None` chooses the scale by the data."""
    with matplotlib.rc_context(_RC):
        axes = _axes(title, x, axis)
        drawn = _drawn(curves, log)
        if not drawn:
            return _blank(axes, empty)
        end = max(steps[-1] for steps, _ in curves.values() if len(steps))
        _set_scale(axes, drawn, log)
        for rank, (name, (steps, values)) in enumerate(drawn.items()):
            style, every = styles[name], max(1, len(steps) // _MARKERS_PER_LINE)
            # Markers set apart, so that equal lines do not hide one another's.
            marks = slice(rank % every, None, every)
            axes.plot(steps, values, style.dashes, color=style.color, marker=style.marker, markevery=marks)
        axes.set_xlim(start, max(end, start + 1))
        if limits is not None:
            axes.set_ylim(*limits)
        label_lines(axes, drawn, styles)
    return axes.figure


def rate_panel(
    curves: Curves,
    styles: Styles,
    title: str,
    axis: str,
    *,
    rates: np.ndarray,
    unstable: Mapping[str, np.ndarray],
    log: bool | None = None,
    limits: Limits | None = None,
    level: tuple[str, float] | None = None,
    whose: str = "Muon's",
) -> Figure:
    """One panel over learning rates, a line per assignment, with a cross where a run was not stable.

    Args:
      curves: rates, ascending, and values; a cross whose value is out of view stands at the edge.
      styles: of the lines.
      title: of the panel.
      axis: what the values are.
      rates: all rates, ascending, of this panel and of those that it stands beside.
      unstable: for every curve, which of its rates get a cross.
      log: scale of the values; None chooses by the data.
      limits: of the values' axis.
      level: name and height of a horizontal line.
      whose: rates they are.
    """
    with matplotlib.rc_context(_RC):
        axes = _axes(title, f"{whose} peak learning rate", axis)
        drawn = _drawn(curves, log)
        if not drawn:
            return _blank(axes, "no run has ended yet")
        _set_scale(axes, drawn, log)
        axes.set_xscale("log", base=2)
        for name, (at, values) in drawn.items():
            style = styles[name]
            axes.plot(at, values, style.dashes, color=style.color, marker=style.marker)
        if limits is not None:
            axes.set_ylim(*limits)
        axes.set_xlim(rates[0] / 2**0.5, rates[-1] * 2**0.5)
        labelled = rates[:: len(rates) // 7 + 1]
        axes.set_xticks(labelled, [f"{rate:.2g}" for rate in labelled])
        _mark_level(axes, level)
        to_axes = axes.transData + axes.transAxes.inverted()
        for name, (at, values) in curves.items():
            heights = np.where(np.isfinite(values), values, axes.get_ylim()[1])[unstable[name]]
            crosses = to_axes.transform(np.column_stack([at[unstable[name]], heights]))
            inside = np.clip(crosses[:, 1], 0.03, 0.97)
            look = {"color": styles[name].color, "ms": 8, "mew": 2, "zorder": 3}
            axes.plot(crosses[:, 0], inside, "x", transform=axes.transAxes, **look)
        label_lines(axes, drawn, styles)
    return axes.figure


def category_panel(
    points: Mapping[str, np.ndarray],
    styles: Styles,
    categories: Sequence[str],
    title: str,
    x: str,
    axis: str,
    *,
    joined: bool = True,
    log: bool | None = False,
    level: tuple[str, float] | None = None,
) -> Figure:
    """One panel over words: for every name a large mark at the mean of each category, and a dot a repeat.

    Args:
      points: name -> values (categories, repeats); those that are not finite are left out.
      styles: of the names.
      categories: the words on the axis.
      title: of the panel.
      x: what the categories are.
      axis: what the values are.
      joined: join a name's marks by a line, and name it at its end.
      log: scale of the values; None chooses by the data.
      level: name and height of a horizontal line.
    """
    with matplotlib.rc_context(_RC):
        axes = _axes(title, x, axis)
        places = np.arange(len(categories), dtype=float)
        means = {name: (places, _finite_mean(values)) for name, values in points.items()}
        drawn = _drawn(means, log)
        if not drawn:
            return _blank(axes, "nothing recorded yet")
        _set_scale(axes, drawn, log)
        for name, (at, values) in drawn.items():
            style = styles[name]
            dashes = style.dashes if joined else ""
            axes.plot(at, values, dashes, color=style.color, marker=style.marker, ms=6)
            axes.plot(at, points[name], ".", color=style.color, alpha=0.5)
        axes.set_xticks(places, categories, rotation=0 if max(map(len, categories)) < 8 else 20, size=8)
        axes.set_xlim(-0.5, len(categories) - 0.5)
        _mark_level(axes, level)
        if joined:
            label_lines(axes, drawn, styles)
    return axes.figure


def _finite_mean(values: np.ndarray) -> np.ndarray:
    seen = np.isfinite(values)
    count = seen.sum(axis=1)
    return np.where(count > 0, np.where(seen, values, 0).sum(axis=1) / np.maximum(count, 1), np.nan)


def _mark_level(axes: Axes, level: tuple[str, float] | None) -> None:
    if level is None:
        return
    axes.axhline(level[1], color="#666666", lw=0.8, ls=":")
    where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(level[0], (0.02, level[1]), (0, 2), size=8, color="#666666", **where)


def _axes(title: str, x: str, y: str) -> Axes:
    axes = Figure(figsize=(5.6, 3.8)).add_axes((0.145, 0.13, 0.565, 0.78))
    axes.set(title=title, xlabel=x, ylabel=y)
    return axes


def _blank(axes: Axes, message: str) -> Figure:
    axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", color="#666666")
    axes.set(xticks=[], yticks=[])
    return axes.figure


def _drawn(curves: Curves, log: bool | None) -> Curves:
    """The curves that have anything to draw."""
    drawn = {name: _drawable(curve, positive=bool(log)) for name, curve in curves.items()}
    return {name: curve for name, curve in drawn.items() if np.isfinite(curve[1]).any()}


def _drawable(curve: Curve, *, positive: bool) -> Curve:
    steps, values = curve
    keep = np.isfinite(values) & ((values > 0) if positive else True)
    return steps, np.where(keep, values, np.nan)


def _set_scale(axes: Axes, curves: Curves, log: bool | None) -> None:
    values = np.concatenate([values[np.isfinite(values)] for _, values in curves.values()])
    low, high = float(values.min()), float(values.max())
    if log is None:
        log = low > 0 and high > 20 * low
    if not log:
        if low == high == 0:
            axes.set_ylim(0, 1)
        return
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    # At least a decade in view: rounding noise should look like it.
    margin = max(1.3, (10 * low / high) ** 0.5)
    axes.set_ylim(low / margin, high * margin)
    if high < 1e3 * low:  # under three decades, powers of ten alone would leave the axis nearly bare
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
