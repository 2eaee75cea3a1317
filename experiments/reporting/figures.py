"""Figures of a study: every function takes curves, one per run, and draws one panel over its steps."""

import numpy as np
from matplotlib.figure import Figure

from experiments.reporting.panels import Curves, Limits, Styles, step_panel

_NATS = "nats per token"
_RECOVERED_WITHIN = 0.25  # nats: a curve that ends further above its own best has diverged


def validation_loss(
    curves: Curves, styles: Styles, title: str = "Validation loss", x: str = "step"
) -> Figure:
    """Validation loss of the whole run; a run that explodes leaves through the top."""
    return step_panel(curves, styles, title, _NATS, x=x, log=False, limits=_loss_limits(curves))


def validation_loss_zoom(curves: Curves, styles: Styles, title: str = "Validation loss, last half") -> Figure:
    """Validation loss over the last half of the steps, on the scale of the runs that have not diverged."""
    start, limits = _zoom(curves)
    return step_panel(curves, styles, title, _NATS, log=False, limits=limits, start=start)


def training_loss(curves: Curves, styles: Styles, x: str = "step") -> Figure:
    """Training loss, each point the mean over a fiftieth of the longest run's steps."""
    smooth, window = _smooth(curves)
    title = f"Training loss{window}"
    return step_panel(smooth, styles, title, _NATS, x=x, log=False, limits=_loss_limits(smooth))


def gradient_norm(curves: Curves, styles: Styles) -> Figure:
    """The gradients' global norm before clipping, each point a mean as in `training_loss`."""
    smooth, window = _smooth(curves)
    return step_panel(smooth, styles, f"Gradient norm{window}", "global norm before clipping")


def learning_rate(curves: Curves, styles: Styles) -> Figure:
    """AdamW's or SGD's learning rate, whose course all rates share."""
    return step_panel(curves, styles, "Learning rate", "AdamW's or SGD's", log=False)


def largest_singular_value(curves: Curves, styles: Styles, matrix: str) -> Figure:
    """Largest singular value of one kind of matrix; `matrix` names it in the title."""
    return step_panel(curves, styles, f"Largest singular value, {matrix}", "largest over layers")


def smallest_singular_value(curves: Curves, styles: Styles, matrix: str) -> Figure:
    """Smallest singular value of one kind of matrix; `matrix` names it in the title."""
    return step_panel(curves, styles, f"Smallest singular value, {matrix}", "smallest over layers")


def attention_logit(curves: Curves, styles: Styles) -> Figure:
    """Largest attention logit, on a logarithmic scale."""
    return step_panel(
        curves, styles, "Largest attention logit", "|scaled logit|, largest over layers", log=True
    )


def softmax_entropy(curves: Curves, styles: Styles) -> Figure:
    """Mean entropy of the attention's softmax rows."""
    return step_panel(curves, styles, "Attention entropy", "nats, mean over rows and layers")


def saturated_rows(curves: Curves, styles: Styles) -> Figure:
    """Share (0 to 1) of softmax rows that put nearly all weight on one key, drawn in percent."""
    percent = {name: (steps, 100 * values) for name, (steps, values) in curves.items()}
    return step_panel(percent, styles, "Saturated attention rows", "% of rows with a probability > 0.99")


def softmax_jacobian(curves: Curves, styles: Styles) -> Figure:
    """Mean size of the softmax's Jacobian."""
    return step_panel(curves, styles, "Softmax Jacobian", r"$\|\mathrm{diag}(p)-pp^\top\|_F$, mean over rows")


def constraint_violation(curves: Curves, styles: Styles) -> Figure:
    """Distance from the assigned manifolds, on a logarithmic scale; a run without a constraint has none."""
    title, axis = "Constraint violation", "largest over matrices and layers"
    return step_panel(curves, styles, title, axis, log=True, empty="no violation above zero")


def gram_off_diagonal(curves: Curves, styles: Styles, matrix: str) -> Figure:
    """Off-diagonal part of the Gram matrix, on a logarithmic scale; `matrix` names it in the title."""
    return step_panel(curves, styles, f"Gram off-diagonal, {matrix}", "largest over layers", log=True)


def solver_iterations(curves: Curves, styles: Styles) -> Figure:
    """Iterations of the tangent step's solver."""
    return step_panel(curves, styles, "Solver iterations", "largest over matrices and layers", log=False)


def solver_gap(curves: Curves, styles: Styles) -> Figure:
    """Relative duality gap of the tangent step, on a logarithmic scale; dual ascent does not know its own."""
    title, axis = "Relative duality gap", "largest over matrices and layers"
    return step_panel(curves, styles, title, axis, log=True, empty="no gap is known")


def _loss_limits(curves: Curves) -> Limits | None:
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


def _zoom(curves: Curves) -> tuple[float, Limits | None]:
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


def _smooth(curves: Curves) -> tuple[Curves, str]:
    """Trailing means over a fiftieth of the longest curve's points, and what a title says of them."""
    window = max(1, max((len(steps) for steps, _ in curves.values()), default=0) // 50)
    smooth = {name: (steps, _trailing_mean(values, window)) for name, (steps, values) in curves.items()}
    return smooth, f", mean of {window} steps" if window > 1 else ""


def _trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite values among the last `window`; not finite where there are none."""
    finite = np.isfinite(values)
    totals = np.cumsum(np.concatenate([np.zeros(1), np.where(finite, values, 0.0)]))
    counts = np.cumsum(np.concatenate([np.zeros(1), finite]))
    stop = np.arange(1, len(values) + 1)
    begin = np.maximum(stop - window, 0)
    count = counts[stop] - counts[begin]
    return np.where(count > 0, (totals[stop] - totals[begin]) / np.maximum(count, 1), np.nan)
