"""Figures of a study: every function takes curves, one per run, and draws one panel.

A curve is `(steps, values)`, two arrays of equal length; values that are not finite are gaps. Panels are
small so that a page can put them side by side on a desk and one below another on a phone. They are made
without pyplot: nothing global is touched, and PNG comes from Agg wherever the code runs.
"""

import io
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

Curve = tuple[np.ndarray, np.ndarray]
Curves = Mapping[str, Curve]


class Style(NamedTuple):
    """How a run is named and drawn, the same in every figure and in the table."""

    label: str
    color: str
    marker: str
    dashes: str = "-"


Styles = Mapping[str, Style]

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
_LABEL_GAP = 0.068  # of the axes' height: a line of text at this panel's size
_RECOVERED_WITHIN = 0.25  # nats: a curve that ends further above its own best has diverged


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Each run's style, in the order of the table: the paper's runs first, then the others by name.

    Args:
      names: run names; those that are not of the paper keep their name as label and get the spare colours.
    """
    names = set(names)
    chosen = {name: style for name, style in _KNOWN.items() if name in names}
    for index, name in enumerate(sorted(names - _KNOWN.keys())):
        cycle, place = divmod(index, len(_SPARE))
        color, marker = _SPARE[place]
        chosen[name] = Style(name, color, marker, _DASHES[cycle % len(_DASHES)])
    return chosen


def png(figure: Figure) -> bytes:
    """The figure as PNG, without metadata: equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def validation_loss(curves: Curves, styles: Styles) -> Figure:
    """Validation loss of the whole run; a run that explodes leaves through the top."""
    return _panel(curves, styles, "Validation loss", _NATS, log=False, limits=_loss_limits(curves))


def validation_loss_zoom(curves: Curves, styles: Styles) -> Figure:
    """Validation loss over the last half of the steps, on the scale of the runs that have not diverged."""
    start, limits = _zoom(curves)
    return _panel(curves, styles, "Validation loss, last half", _NATS, log=False, limits=limits, start=start)


def training_loss(curves: Curves, styles: Styles) -> Figure:
    """Training loss, each point the mean over a fiftieth of the longest run's steps."""
    window = max(1, max((len(steps) for steps, _ in curves.values()), default=0) // 50)
    smooth = {name: (steps, _trailing_mean(values, window)) for name, (steps, values) in curves.items()}
    title = f"Training loss, mean of {window} steps" if window > 1 else "Training loss"
    return _panel(smooth, styles, title, _NATS, log=False, limits=_loss_limits(smooth))


def largest_singular_value(curves: Curves, styles: Styles, matrix: str) -> Figure:
    """Largest singular value of one kind of matrix; `matrix` names it in the title."""
    return _panel(curves, styles, f"Largest singular value, {matrix}", "largest over layers")


def smallest_singular_value(curves: Curves, styles: Styles, matrix: str) -> Figure:
    """Smallest singular value of one kind of matrix; `matrix` names it in the title."""
    return _panel(curves, styles, f"Smallest singular value, {matrix}", "smallest over layers")


def attention_logit(curves: Curves, styles: Styles) -> Figure:
    """Largest attention logit, on a logarithmic scale."""
    return _panel(curves, styles, "Largest attention logit", "|scaled logit|, largest over layers", log=True)


def softmax_entropy(curves: Curves, styles: Styles) -> Figure:
    """Mean entropy of the attention's softmax rows."""
    return _panel(curves, styles, "Attention entropy", "nats, mean over rows and layers")


def saturated_rows(curves: Curves, styles: Styles) -> Figure:
    """Share (0 to 1) of softmax rows that put nearly all weight on one key, drawn in percent."""
    percent = {name: (steps, 100 * values) for name, (steps, values) in curves.items()}
    return _panel(percent, styles, "Saturated attention rows", "% of rows with a probability > 0.99")


def softmax_jacobian(curves: Curves, styles: Styles) -> Figure:
    """Mean size of the softmax's Jacobian."""
    return _panel(curves, styles, "Softmax Jacobian", r"$\|\mathrm{diag}(p)-pp^\top\|_F$, mean over rows")


def constraint_violation(curves: Curves, styles: Styles) -> Figure:
    """Distance from the assigned manifolds, on a logarithmic scale; a run without a constraint has none."""
    title, axis = "Constraint violation", "largest over matrices and layers"
    return _panel(curves, styles, title, axis, log=True, empty="no violation above zero")


def gram_off_diagonal(curves: Curves, styles: Styles, matrix: str) -> Figure:
    """Off-diagonal part of the Gram matrix, on a logarithmic scale; `matrix` names it in the title."""
    return _panel(curves, styles, f"Gram off-diagonal, {matrix}", "largest over layers", log=True)


_NATS = "nats per token"


def _panel(
    curves: Curves,
    styles: Styles,
    title: str,
    axis: str,
    *,
    log: bool | None = None,
    limits: tuple[float, float] | None = None,
    start: float = 0,
    empty: str = "nothing recorded yet",
) -> Figure:
    """One panel with a line per run, named at its right end; `log=None` chooses the scale by the data."""
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(5.6, 3.8))
        axes = figure.add_axes((0.145, 0.13, 0.565, 0.78))
        axes.set(title=title, xlabel="step", ylabel=axis)
        drawn = {name: _drawable(curve, positive=bool(log)) for name, curve in curves.items()}
        drawn = {name: curve for name, curve in drawn.items() if np.isfinite(curve[1]).any()}
        if not drawn:
            axes.text(0.5, 0.5, empty, transform=axes.transAxes, ha="center", color="#666666")
            axes.set(xticks=[], yticks=[])
            return figure
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
        _label_lines(axes, drawn, styles)
    return figure


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


def _label_lines(axes: Axes, curves: Curves, styles: Styles) -> None:
    """Names each line right of the axes, joined to its last point; an arrow marks one that left the view."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = {}
    for name, (steps, values) in curves.items():
        last = np.flatnonzero(np.isfinite(values))[-1]
        ends[name] = to_axes.transform((steps[last], values[last]))
    order = sorted(ends, key=lambda name: ends[name][1])
    heights = _spread(np.clip([ends[name][1] for name in order], 0, 1))
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
    return label if len(label) <= 20 else label[:19] + "\u2026"


def _spread(heights: np.ndarray) -> np.ndarray:
    """Ascending heights in [0, 1] moved apart to at least the label gap, each group about its own middle."""
    offsets = _LABEL_GAP * np.arange(len(heights))
    # Pushing up from below and down from above both keep the gap, so their mean does.
    up = np.maximum.accumulate(heights - offsets)
    down = np.minimum.accumulate((heights - offsets)[::-1])[::-1]
    return np.maximum(np.minimum((up + down) / 2, 0.97 - offsets[-1]), 0) + offsets


def _loss_limits(curves: Curves) -> tuple[float, float] | None:
    """From the lowest loss to just above the highest first one: an explosion must not flatten the rest."""
    finite = [values[np.isfinite(values)] for _, values in curves.values()]
    finite = [values for values in finite if len(values)]
    if not finite:
        return None
    low = min(values.min() for values in finite)
    first = max(values[0] for values in finite)
    high = min(max(values.max() for values in finite), first + 0.15 * max(first - low, 0.1))
    pad = 0.04 * max(high - low, 1e-3)
    return low - pad, high + pad


def _zoom(curves: Curves) -> tuple[float, tuple[float, float] | None]:
    """The last half's first step, and the range there of the curves that end near their own best."""
    end = max((steps[-1] for steps, _ in curves.values() if len(steps)), default=0)
    start = end / 2
    late, stable = [], []
    for steps, values in curves.values():
        finite = np.isfinite(values)
        seen, tail = values[finite], values[finite & (steps >= start)]
        late.append(tail)
        if len(seen) and seen[-1] <= seen.min() + _RECOVERED_WITHIN:
            stable.append(tail)
    shown = np.concatenate(stable) if any(map(len, stable)) else np.concatenate([*late, []])
    if not len(shown):
        return start, None
    pad = 0.06 * max(float(np.ptp(shown)), 1e-3 * max(1, float(shown.max())))
    return start, (float(shown.min()) - pad, float(shown.max()) + pad)


def _trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite values among the last `window`; not finite where there are none."""
    finite = np.isfinite(values)
    totals = np.cumsum(np.concatenate([np.zeros(1), np.where(finite, values, 0.0)]))
    counts = np.cumsum(np.concatenate([np.zeros(1), finite]))
    stop = np.arange(1, len(values) + 1)
    begin = np.maximum(stop - window, 0)
    count = counts[stop] - counts[begin]
    return np.where(count > 0, (totals[stop] - totals[begin]) / np.maximum(count, 1), np.nan)
