"""The coordinate check: do features, and their changes in training, keep their size as width grows?"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from numpy.typing import ArrayLike

Features = Callable[[Any, Any], Mapping[str, Array]]
"""(params, batch) -> name -> features, of any shape."""


class Probe(NamedTuple):
    """A model of one width; a plain tuple of the four will do."""

    params: Any
    features: Features
    loss: Callable[[Any, Any], Array]
    """(params, batch) -> scalar."""
    optimizer: optax.GradientTransformation


class Slope(NamedTuple):
    """Exponents of the width: d log RMS / d log width; about 0 where Condition 1 holds."""

    features: float
    changes: float


@dataclass(frozen=True)
class CoordinateCheck:
    """RMS of features and of their changes since the start: name -> array (widths, steps + 1)."""

    widths: tuple[int, ...]
    features: dict[str, np.ndarray]
    changes: dict[str, np.ndarray]

    @property
    def slopes(self) -> dict[str, Slope]:
        """Fitted slopes after the last step, for every name."""
        return self.slopes_at(-1)

    def slopes_at(self, step: int) -> dict[str, Slope]:
        """Fitted slopes after this many steps, for every name; changes have none (NaN) before the first."""
        return {
            name: Slope(
                log_log_slope(self.widths, self.features[name][:, step]),
                log_log_slope(self.widths, self.changes[name][:, step]),
            )
            for name in self.features
        }

    def draw(self) -> Any:
        """The picture: see `spectral.drawing.draw_coordinate_check`."""
        from spectral.drawing import draw_coordinate_check  # matplotlib is for those who draw

        return draw_coordinate_check(self)

    def __str__(self) -> str:
        width = max(map(len, self.features), default=0)
        lines = [f"{'':{width}}  features  changes   (slopes over widths {self.widths})"]
        for name, slope in self.slopes.items():
            lines.append(f"{name:{width}}  {slope.features:+8.3f}  {slope.changes:+7.3f}")
        return "\n".join(lines)


def coordinate_check(
    make: Callable[..., Probe | tuple],
    widths: Sequence[int] = (64, 128, 256, 512),
    *,
    batch: Any,
    steps: int = 10,
    seeds: Iterable[int] | None = None,
) -> CoordinateCheck:
    """Train small models of several widths for a few steps, and fit how their features grow with width.

        def make(width):
            model = MLP(width)
            params = model.init(jax.random.key(0), x)
            loss = lambda params, batch: jnp.mean((model.apply(params, batch[0]) - batch[1]) ** 2)
            return params, linen_features(model, lambda batch: batch[0]), loss, optax.adam(1e-3)

        check = coordinate_check(make, (64, 128, 256, 512), batch=(x, y))
        print(check)
        check.draw()

    Under the spectral parametrisation all slopes are about 0 (negative at the start for readouts whose
    initial outputs shrink by design); a positive slope is a layer that blows up with width, a negative slope
    of the changes one that stops learning.

    Args:
      make: width -> (params, features, loss, optimizer); the first three in the framework of your choice,
        as pure functions. With seeds, (width, seed) -> the same.
      widths: to train at, two or more.
      batch: what features and loss are given, the same at every step and width.
      steps: of training.
      seeds: RMS are taken over these runs together, for steadier slopes.

    Returns:
      The records, with `.slopes`, and `.draw()` for the picture.

    Raises:
      ValueError: fewer than two widths, a negative number of steps, or widths or seeds whose features have
        different names.

    Source: Yang et al., arXiv:2203.03466, appendix D.1 (the check); arXiv:2310.17813, Desideratum 1.
    """
    if len(set(widths)) < 2:
        raise ValueError(f"slopes need at least two widths, got {tuple(widths)}")
    if steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}")
    runs = [(None,)] if seeds is None else [(seed,) for seed in seeds]
    if not runs:
        raise ValueError("seeds is empty")
    squares: list[list[tuple[dict[str, np.ndarray], ...]]] = []
    for width in widths:
        probes = (make(width, *(() if run == (None,) else run)) for run in runs)
        squares.append([_mean_squares(Probe(*probe), batch, steps) for probe in probes])
    names = list(squares[0][0][0])
    if any(list(one[0]) != names for run in squares for one in run):
        raise ValueError("the features' names must be the same at every width and seed")

    def rms(kind: int) -> dict[str, np.ndarray]:
        return {
            name: np.stack([np.sqrt(np.mean([one[kind][name] for one in run], axis=0)) for run in squares])
            for name in names
        }

    return CoordinateCheck(tuple(widths), rms(0), rms(1))


def by_module(captured: Any) -> dict[str, Array]:
    """Flax's captured outputs, like `Dense_0/__call__/0`, by the modules' paths; the model's is `output`."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(captured):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # A tuple of one output a call.
        name = name.removesuffix("/0").removesuffix("__call__").removesuffix("/")
        found[name or "output"] = x
    return found


def log_log_slope(widths: Sequence[int], values: ArrayLike) -> float:
    """Least-squares slope of log values over log widths; NaN unless all values are positive and finite."""
    y = np.asarray(values, np.float64)
    if not (np.isfinite(y).all() and (y > 0).all()):
        return float("nan")
    return float(np.polyfit(np.log(np.asarray(widths, np.float64)), np.log(y), 1)[0])


def _mean_squares(probe: Probe, batch: Any, steps: int) -> tuple[dict[str, np.ndarray], ...]:
    """Mean squares of the features, and of their changes since the start, before and after every step."""
    params, features, loss, optimizer = probe

    @jax.jit
    def measure(params: Any, start: dict[str, Array], batch: Any) -> tuple[dict, dict]:
        now = _wide(features(params, batch))
        changes = {name: jnp.mean((now[name] - start[name]) ** 2) for name in now}
        return {name: jnp.mean(x**2) for name, x in now.items()}, changes

    @jax.jit
    def advance(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    names: list[str] = []

    @jax.jit
    def first(params: Any, batch: Any) -> dict[str, Array]:
        found = _wide(features(params, batch))
        names[:] = found  # in the caller's order: what jit returns is sorted
        return found

    start = first(params, batch)
    state = optimizer.init(params)
    records = [measure(params, start, batch)]
    for _ in range(steps):
        params, state = advance(params, state, batch)
        records.append(measure(params, start, batch))
    records = jax.device_get(records)
    return tuple(
        {name: np.array([record[kind][name] for record in records], np.float64) for name in names}
        for kind in (0, 1)
    )


def _wide(features: Mapping[str, Array]) -> dict[str, Array]:
    return {name: x.astype(jnp.promote_types(x.dtype, jnp.float32)) for name, x in features.items()}
