"""The coordinate check's picture; needs matplotlib, which only this module imports, and only when called."""

from typing import Any

import numpy as np

from spectral.coordinate_check import CoordinateCheck


def draw_coordinate_check(check: CoordinateCheck, step: int = -1) -> Any:
    """RMS of features, and of their changes, over width: flat lines are what the spectral condition promises.

    Args:
      check: what `coordinate_check` found.
      step: after how many steps; the last one if not given.

    Returns:
      A `matplotlib.figure.Figure` of two panels, with every line's fitted slope in the legend. A notebook
      shows it; elsewhere, `figure.savefig("check.png")`.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: python -m pip install matplotlib") from error
    figure = Figure(figsize=(13, 4), layout="constrained")
    slopes = check.slopes_at(step)
    colors = colormaps["viridis"](np.linspace(0, 0.9, len(slopes)))
    last = next(iter(check.features.values())).shape[1] - 1
    taken = last if step == -1 else step
    panels = {"features": check.features, "changes": check.changes}
    titles = {"features": f"Features after {taken} steps", "changes": f"Their changes in {taken} steps"}
    for axes, (kind, values) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for (name, slope), color in zip(slopes.items(), colors, strict=True):
            label = f"{name} ({getattr(slope, kind):+.2f})"
            axes.plot(check.widths, values[name][:, step], marker="o", color=color, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(check.widths, [str(width) for width in check.widths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(title=titles[kind], xlabel="width", ylabel="RMS")
        # Beside the lines, which flat ones leave no corner free of.
        axes.legend(title="slope in brackets", fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
        axes.grid(alpha=0.3)
    return figure
