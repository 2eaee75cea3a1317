"""The coordinate check: known exponents, standard and spectral parametrisation, and users' own models."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from spectral import coordinate_check, log_log_slope, spectral_normal, target_norm
from spectral.linen import linen_features
from spectral.nnx import nnx_functions

WIDTHS = (16, 32, 64)
X = jax.random.normal(jax.random.key(0), (32, 8))
Y = jnp.sin(X[:, :1])


def mean_square(outputs, batch):
    return jnp.mean((outputs - batch[1]) ** 2)


def test_known_exponents():
    """Features w n^-1/2 and w^2 n, where SGD with rate n^1/2 moves w from 1 by n^1/2 n^-1 = n^-1/2 a step."""

    def make(width):
        features = lambda w, batch: {"a": w * width**-0.5, "b": w**2 * width * jnp.ones((3, 2))}  # noqa: E731
        loss = lambda w, batch: -jnp.sum(w) / width  # noqa: E731
        return jnp.ones(1), features, loss, optax.sgd(1e-4 * width**0.5)

    check = coordinate_check(make, (64, 128, 256), batch=None, steps=3)
    assert check.features["a"].shape == check.changes["b"].shape == (3, 4)
    assert check.slopes["a"] == pytest.approx((-0.5, -1.0), abs=0.02)
    assert check.slopes["b"] == pytest.approx((1.0, 0.5), abs=0.02)
    np.testing.assert_allclose(check.features["a"][:, 0], np.array([64, 128, 256]) ** -0.5, rtol=1e-5)
    np.testing.assert_allclose(check.changes["a"][1, 3], 3e-4 / 128, rtol=0.02)
    start = check.slopes_at(0)["a"]
    assert start.features == pytest.approx(-0.5, abs=1e-5) and np.isnan(start.changes)
    assert "a" in str(check) and "-0.500" in str(check)


def test_log_log_slope():
    assert log_log_slope((2, 4, 8), (3.0, 12.0, 48.0)) == pytest.approx(2.0)
    assert np.isnan(log_log_slope((2, 4), (1.0, 0.0)))
    assert np.isnan(log_log_slope((2, 4), (1.0, np.inf)))


def test_seeds_are_averaged_in_the_mean_square():
    def make(width, seed):
        return jnp.ones(1), lambda w, _: {"h": w * seed}, lambda w, _: jnp.sum(w), optax.sgd(0.1)

    check = coordinate_check(make, (2, 4), batch=None, steps=0, seeds=(3, 4))
    np.testing.assert_allclose(check.features["h"], np.sqrt((9 + 16) / 2), rtol=1e-6)


@pytest.mark.parametrize("parametrization", ["standard", "spectral"])
def test_parametrisations_differ_under_sgd(parametrization):
    """At one rate for all widths the standard changes grow; the spectral ones keep their size."""

    def make(width, seed):
        sizes = (8, width, width, 1)
        layers = list(zip(sizes[:-1], sizes[1:], strict=True))
        keys = jax.random.split(jax.random.key(seed), len(layers))
        standard = parametrization == "standard"
        init = nn.initializers.lecun_normal() if standard else spectral_normal()
        params = [init(key, shape) for key, shape in zip(keys, layers, strict=True)]
        rates = [1.0 if standard else target_norm(*shape) ** 2 for shape in layers]
        scale = optax.stateless(lambda updates, _: [r * u for r, u in zip(rates, updates, strict=True)])

        def features(params, batch):
            h, found = batch[0], {}
            for index, kernel in enumerate(params):
                h = h @ kernel
                found[f"layer {index}"] = h
                h = jnp.tanh(h)
            return found

        def loss(params, batch):
            return mean_square(features(params, batch)["layer 2"], batch)

        return params, features, loss, optax.chain(scale, optax.sgd(1e-3 if standard else 0.05))

    slopes = coordinate_check(make, (32, 64, 128, 256), batch=(X, Y), steps=4, seeds=(0, 1)).slopes
    hidden = slopes["layer 1"].changes
    if parametrization == "spectral":
        assert abs(hidden) < 0.3 and abs(slopes["layer 0"].changes) < 0.3
    else:
        assert hidden > 0.3 and slopes["layer 2"].changes > 0.5


# ---------------------------------------------------------------------------- users' own models


class Linen(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(self.width)(x))
        return nn.Dense(1)(x)


class Nnx(nnx.Module):
    def __init__(self, width, rngs):
        self.first, self.last = nnx.Linear(8, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


def test_linen():
    def make(width):
        model = Linen(width)
        loss = lambda params, batch: mean_square(model.apply(params, batch[0]), batch)  # noqa: E731
        params = model.init(jax.random.key(0), X)
        return params, linen_features(model, lambda batch: batch[0]), loss, optax.adam(1e-2)

    check = coordinate_check(make, WIDTHS, batch=(X, Y), steps=2)
    assert set(check.features) == {"Dense_0", "Dense_1", "output"}
    np.testing.assert_array_equal(check.features["Dense_1"], check.features["output"])
    assert all(np.isfinite(slope).all() for slope in check.slopes.values())
    expected = Linen(16).bind(Linen(16).init(jax.random.key(0), X))(X)
    np.testing.assert_allclose(check.features["output"][0, 0], np.sqrt(np.mean(expected**2)), rtol=1e-5)


def test_nnx():
    def make(width):
        params, features, apply = nnx_functions(Nnx(width, nnx.Rngs(0)), lambda batch: batch[0])
        loss = lambda params, batch: mean_square(apply(params, batch[0]), batch)  # noqa: E731
        return params, features, loss, optax.adam(1e-2)

    check = coordinate_check(make, WIDTHS, batch=(X, Y), steps=2)
    assert set(check.features) == {"first", "last", "output"}
    expected = Nnx(16, nnx.Rngs(0))(X)
    np.testing.assert_allclose(check.features["output"][0, 0], np.sqrt(np.mean(expected**2)), rtol=1e-5)


def test_equinox():

    def make(width):
        model = eqx.nn.MLP(8, 1, width, 1, jnp.tanh, key=jax.random.key(0))
        params, static = eqx.partition(model, eqx.is_array)
        apply = lambda p, batch: jax.vmap(eqx.combine(p, static))(batch[0])  # noqa: E731
        hidden = lambda p, batch: {"hidden": jax.vmap(p.layers[0])(batch[0]), "out": apply(p, batch)}  # noqa: E731
        return params, hidden, lambda p, batch: mean_square(apply(p, batch), batch), optax.adam(1e-2)

    check = coordinate_check(make, WIDTHS, batch=(X, Y), steps=2)
    assert all(np.isfinite(slope).all() for slope in check.slopes.values())


def test_drawing(tmp_path):
    def make(width):
        return (
            jnp.ones(1),
            lambda w, _: {"h": w * width, "g": w * width**0.5},
            lambda w, _: jnp.sum(w),
            optax.sgd(0.1),
        )

    figure = coordinate_check(make, (2, 4, 8), batch=None, steps=1).draw()
    figure.savefig(tmp_path / "check.png")
    features, changes = figure.axes
    assert features.get_title() == "Features after 1 steps"
    labels = [text.get_text() for text in features.get_legend().get_texts()]
    assert labels == ["h (+1.00)", "g (+0.50)"]
    np.testing.assert_allclose(changes.lines[0].get_ydata(), 0.1 * np.array([2, 4, 8]), rtol=1e-4)


def test_drawing_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check = coordinate_check(
        lambda width: (jnp.ones(1), lambda w, _: {"h": w}, lambda w, _: jnp.sum(w), optax.sgd(0.1)),
        (2, 4),
        batch=None,
        steps=0,
    )
    with pytest.raises(ImportError, match="drawing needs matplotlib: python -m pip install matplotlib"):
        check.draw()


def test_the_core_imports_neither_flax_nor_matplotlib():
    code = "import sys, spectral; print([m for m in ('flax', 'matplotlib', 'equinox') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_what_does_not_fit():
    def make(width):
        return jnp.ones(1), lambda w, _: {f"h{width}": w}, lambda w, _: jnp.sum(w), optax.sgd(0.1)

    with pytest.raises(ValueError, match="names must be the same"):
        coordinate_check(make, (2, 4), batch=None, steps=0)
    with pytest.raises(ValueError, match="at least two widths"):
        coordinate_check(make, (2, 2), batch=None)
    with pytest.raises(ValueError, match="steps must not be negative"):
        coordinate_check(make, (2, 4), batch=None, steps=-1)
    with pytest.raises(ValueError, match="seeds is empty"):
        coordinate_check(make, (2, 4), batch=None, seeds=())
