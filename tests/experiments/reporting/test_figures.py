"""The figures: what is drawn, where the axes end, and that no gap in the data breaks them."""

import io
from collections.abc import Callable

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from experiments.reporting import figures, line_labels, panels
from experiments.reporting.panels import Curve, Curves

STEPS = np.arange(0.0, 101.0, 10.0)
PANELS: list[Callable] = [
    figures.validation_loss,
    figures.validation_loss_zoom,
    figures.training_loss,
    lambda curves, styles: figures.largest_singular_value(curves, styles, "c_attn"),
    lambda curves, styles: figures.smallest_singular_value(curves, styles, "c_fc"),
    figures.attention_logit,
    figures.softmax_entropy,
    figures.saturated_rows,
    figures.softmax_jacobian,
    figures.constraint_violation,
    lambda curves, styles: figures.gram_off_diagonal(curves, styles, "c_fc"),
    figures.solver_iterations,
    figures.solver_gap,
]


def curve(values: list[float], steps: np.ndarray = STEPS) -> Curve:
    return steps[: len(values)], np.array(values, dtype=float)


def losses() -> Curves:
    good = 2 + 3.5 * np.exp(-STEPS / 15)
    return {
        "none": curve(list(good)),
        "hetero": curve(list(good - 0.05)),
        "dgram": curve([5.5, 4.0, 3.0, 2.8, 2.6, 3.0, 900.0]),
        "hetero-inv": curve([5.5, 4.0, np.nan]),
    }


def lines(figure: Figure) -> dict[str, np.ndarray]:
    """Heights of the drawn lines (not of the leaders to their names), by colour."""
    axes = figure.axes[0]
    return {
        line.get_color(): line.get_ydata() for line in axes.lines if line.get_transform() == axes.transData
    }


def named(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.axes[0].texts}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(
    "curves",
    [
        losses(),
        {},
        {"none": curve([])},
        {"none": curve([np.nan, np.nan]), "dgram": curve([1.0, np.inf])},
        {"none": curve([0.0]), "dgram": curve([0.0, 0.0])},
        {"none": curve([1.0, np.nan, 3.0]), "mine": curve([2.0])},
        {"none": curve([1e-12, 1e12])},
    ],
    ids=["usual", "no run", "no value", "not finite", "zeros", "gap and point", "wide"],
)
def test_every_panel_bears_every_gap(panel: Callable, curves: Curves) -> None:
    figure = panel(curves, panels.styles(curves))
    axes = figure.axes[0]
    assert axes.get_title(loc="left") and axes.get_xlabel() == "step" and axes.get_ylabel()
    with Image.open(io.BytesIO(panels.png(figure))) as image:
        assert len(np.unique(np.asarray(image.convert("L")))) > 20


def test_png_is_deterministic_and_says_nothing_of_its_maker() -> None:
    first, second = (panels.png(figures.validation_loss(losses(), panels.styles(losses()))) for _ in range(2))
    assert first == second
    with Image.open(io.BytesIO(first)) as image:
        assert not set(image.info) & {"Software", "Creation Time"}


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    before = dict(matplotlib.rcParams)
    panels.png(figures.softmax_entropy(losses(), panels.styles(losses())))
    assert dict(matplotlib.rcParams) == before


def test_styles_are_ordered_distinct_and_do_not_depend_on_the_input_order() -> None:
    names = ["zebra", "hetero", "adamw", "apple", "none"]
    chosen = panels.styles(names)
    assert list(chosen) == ["adamw", "none", "hetero", "apple", "zebra"]
    assert chosen == panels.styles(reversed(names))
    assert chosen["hetero"] == panels.styles(["hetero"])["hetero"]
    assert chosen["apple"].label == "apple" and chosen["adamw"].label == "AdamW"
    everything = panels.styles([*panels._KNOWN, *(f"mine{index:02d}" for index in range(16))])
    looks = {(style.color, style.dashes, style.marker) for style in everything.values()}
    assert len(looks) == len(everything)


def test_colours_can_be_read_on_white() -> None:
    """Contrast of at least 2 (sky blue, the lightest, has 2.3), by WCAG's relative luminance."""
    everything = panels.styles([*panels._KNOWN, "a", "b", "c", "d"])
    for style in everything.values():
        channels = np.array(to_rgb(style.color))
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        assert 1.05 / (linear @ [0.2126, 0.7152, 0.0722] + 0.05) > 2, style


def test_lines_hold_the_values_and_every_line_is_named() -> None:
    curves = {"none": curve([0.5, np.nan, 0.25]), "hetero": curve([0.1, 0.2, 0.3]), "dgram": curve([np.nan])}
    styles = panels.styles(curves)
    figure = figures.saturated_rows(curves, styles)
    drawn = lines(figure)
    np.testing.assert_allclose(drawn[styles["none"].color], [50, np.nan, 25])
    np.testing.assert_allclose(drawn[styles["hetero"].color], [10, 20, 30])
    assert styles["dgram"].color not in drawn
    assert named(figure) == {"unconstrained Muon", "hetero"}


def test_zoom_fits_the_runs_that_hold() -> None:
    curves = losses()
    figure = figures.validation_loss_zoom(curves, panels.styles(curves))
    axes = figure.axes[0]
    assert axes.get_xlim() == (50, 100)
    low, high = axes.get_ylim()
    late = np.concatenate([curves[name][1][5:] for name in ("none", "hetero")])
    assert low < late.min() and late.max() < high < late.max() + 0.1 * np.ptp(late)
    assert "\u2191 all-DGram" in named(figure) and "\u2191 hetero-inv" in named(figure)


def test_zoom_when_every_run_diverged_shows_them() -> None:
    curves = {"dgram": curve([5.0, 3.0, 4.0, 5.0, 7.0])}
    low, high = figures.validation_loss_zoom(curves, panels.styles(curves)).axes[0].get_ylim()
    assert low < 4.0 and high > 7.0


def test_an_explosion_does_not_flatten_the_whole_curve() -> None:
    curves = losses()
    figure = figures.validation_loss(curves, panels.styles(curves))
    low, high = figure.axes[0].get_ylim()
    assert low < 1.96 and 5.5 < high < 6.5
    assert "\u2191 all-DGram" in named(figure) and "hetero-inv" in named(figure)


def test_logits_are_on_a_logarithmic_scale_and_zeros_are_left_out() -> None:
    curves = {"none": curve([0.0, 1.0, 100.0]), "hetero": curve([0.0, 0.0])}
    figure = figures.attention_logit(curves, panels.styles(curves))
    assert figure.axes[0].get_yscale() == "log"
    assert named(figure) == {"unconstrained Muon"}
    np.testing.assert_array_equal(lines(figure)["#7f7f7f"], [np.nan, 1.0, 100.0])


def test_rounding_noise_fills_no_more_than_a_decade() -> None:
    curves = {"hetero": curve([3.0e-7, 3.1e-7, 2.9e-7])}
    low, high = figures.constraint_violation(curves, panels.styles(curves)).axes[0].get_ylim()
    assert high / low > 9


def test_all_zeros_are_drawn_at_the_bottom() -> None:
    curves = {"none": curve([0.0, 0.0])}
    assert figures.saturated_rows(curves, panels.styles(curves)).axes[0].get_ylim() == (0, 1)


def test_a_panel_without_values_says_so() -> None:
    curves = {"none": curve([0.0, 0.0])}
    assert named(figures.constraint_violation(curves, panels.styles(curves))) == {"no violation above zero"}
    assert named(figures.softmax_entropy({}, {})) == {"nothing recorded yet"}


def test_trailing_mean_is_numpys_over_each_window() -> None:
    values = np.random.default_rng(0).normal(size=30)
    values[[4, 5, 6, 20]] = np.nan
    expected = [
        np.nanmean(part) if np.isfinite(part).any() else np.nan
        for part in (values[max(0, stop - 3) : stop] for stop in range(1, 31))
    ]
    assert np.isnan(expected[6])
    np.testing.assert_allclose(figures._trailing_mean(values, 3), expected, atol=1e-12)


def test_training_loss_window_grows_with_the_run() -> None:
    values = np.random.default_rng(1).normal(3, 0.2, size=500)
    curves = {
        "none": curve(list(values), np.arange(1.0, 501.0)),
        "hetero": curve(list(values[:20]), np.arange(1.0, 501.0)),
    }
    figure = figures.training_loss(curves, panels.styles(curves))
    assert "mean of 10 steps" in figure.axes[0].get_title(loc="left")
    np.testing.assert_allclose(lines(figure)["#7f7f7f"][-1], values[-10:].mean())


@pytest.mark.parametrize("ends", [[0.5] * 7, [0.0] * 7, [1.0] * 7, [0.0, 0.01, 0.5, 0.52, 0.99, 1.0]])
def test_names_keep_apart_and_within_the_panel(ends: list[float]) -> None:
    heights = line_labels.spread(np.array(ends))
    assert np.diff(heights).min() >= line_labels.LABEL_GAP - 1e-9
    assert heights.min() >= 0 and heights.max() <= 1


def test_names_with_room_stay_at_their_lines() -> None:
    np.testing.assert_allclose(line_labels.spread(np.array([0.1, 0.4, 0.9])), [0.1, 0.4, 0.9])


def rates(values: list[float]) -> Curve:
    """Values at 0.02, 0.04 and so on."""
    return curve(values, 0.02 * 2.0 ** np.arange(len(values)))


def crosses(figure: Figure) -> dict[str, np.ndarray]:
    """Positions (x, y), in units of the axes, of the crosses in each colour."""
    axes = figure.axes[0]
    return {
        line.get_color(): np.column_stack(line.get_data())
        for line in axes.lines
        if line.get_marker() == "x" and line.get_transform() == axes.transAxes
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("log", [True, False])
def test_unstable_rates_are_crossed_within_the_panel(log: bool) -> None:
    curves = {"none": rates([2.0, 1.5, 900.0, np.nan]), "dgram": rates([2.5, 2.0])}
    unstable = {"none": np.array([False, False, True, True]), "dgram": np.array([False, False])}
    figure = panels.rate_panel(
        curves,
        panels.styles(curves),
        "title",
        "nats",
        rates=0.02 * 2.0 ** np.arange(6),
        unstable=unstable,
        log=log,
        limits=(1.0, 4.0),
        level=("entropy", 3.0),
    )
    axes = figure.axes[0]
    assert axes.get_xscale() == "log" and axes.get_ylim() == (1.0, 4.0)
    assert axes.get_xlim() == (pytest.approx(0.02 / 2**0.5), pytest.approx(0.64 * 2**0.5))
    found = crosses(figure)["#7f7f7f"]
    # Six rates are five octaves, with half an octave at each end.
    np.testing.assert_allclose(found, [(2.5 / 6, 0.97), (3.5 / 6, 0.97)], atol=1e-6)
    assert len(crosses(figure)[panels.styles(curves)["dgram"].color]) == 0
    assert {"entropy", "all-DGram", "\u2191 unconstrained Muon"} == named(figure)
    panels.png(figure)


def test_a_cross_in_view_stands_at_its_value() -> None:
    curves, unstable = {"dgram": rates([1.0, 3.0])}, {"dgram": np.array([False, True])}
    figure = panels.rate_panel(
        curves,
        panels.styles(curves),
        "title",
        "nats",
        rates=np.array([0.02, 0.04]),
        unstable=unstable,
        log=False,
        limits=(0.0, 4.0),
    )
    ((_, height),) = crosses(figure)[panels.styles(curves)["dgram"].color]
    assert height == pytest.approx(0.75)


def test_a_panel_over_rates_without_runs_says_so() -> None:
    figure = panels.rate_panel({}, {}, "title", "nats", rates=np.array([]), unstable={})
    assert named(figure) == {"no run has ended yet"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("joined", [True, False])
def test_a_panel_over_words_marks_means_and_repeats(joined: bool) -> None:
    points = {
        "none": np.array([[1.0, 3.0], [4.0, np.nan], [np.nan, np.nan]]),
        "dgram": np.full((3, 0), np.nan),
    }
    figure = panels.category_panel(
        points,
        panels.styles(points),
        ["a", "b", "c"],
        "title",
        "x",
        "nats",
        joined=joined,
        level=("as many", 2.5),
    )
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "c"]
    large = next(line for line in axes.lines if line.get_marker() == "s")
    np.testing.assert_array_equal(large.get_ydata(), [2.0, 4.0, np.nan])
    dots = [line.get_ydata() for line in axes.lines if line.get_marker() == "."]
    np.testing.assert_array_equal(np.column_stack(dots), points["none"])
    assert named(figure) == {"as many"} | ({"unconstrained Muon"} if joined else set())
    panels.png(figure)


def test_a_panel_over_words_without_points_says_so() -> None:
    figure = panels.category_panel({}, {}, [], "title", "x", "nats")
    assert named(figure) == {"nothing recorded yet"}
