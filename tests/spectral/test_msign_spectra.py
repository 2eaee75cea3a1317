"""The matrix sign's accuracy over whole spectra, at any aspect ratio, and its price."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectral import msign

jit_msign = jax.jit(msign, static_argnames=("method", "steps", "dtype"))


def spectrum(name: str, n: int) -> np.ndarray:
    half = n // 2
    return {
        "flat": np.ones(n),
        "three decades": np.geomspace(1, 1e-3, n),
        "six decades": np.geomspace(1, 1e-6, n),
        "1/i": 1 / np.arange(1.0, n + 1),
        "half zero": np.r_[np.ones(half), np.zeros(n - half)],
        "1/i, half zero": np.r_[1 / np.arange(1.0, half + 1), np.zeros(n - half)],
        "one large": np.r_[1, np.full(n - 1, 1e-3)],
        "rank one": np.r_[1, np.zeros(n - 1)],
    }[name]


SPECTRA = (
    "flat",
    "three decades",
    "six decades",
    "1/i",
    "half zero",
    "1/i, half zero",
    "one large",
    "rank one",
)


@pytest.mark.parametrize("shape", [(64, 64), (80, 64), (100, 64), (64, 128), (640, 64)], ids=str)
@pytest.mark.parametrize("name", SPECTRA)
def test_singular_values_above_a_thousandth_of_the_largest(name, shape):
    """Within 1e-4 of 1 in x's own singular vectors, at any m/n; the others between 0 and 1."""
    rng = np.random.default_rng(23)
    n = min(shape)
    u, _, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    s = spectrum(name, n)
    found = np.asarray(jit_msign(((u * s) @ vt).astype(np.float32)), np.float64)
    aligned = u.T @ found @ vt.T
    kept = s >= 1e-3
    np.testing.assert_allclose(np.diag(aligned)[kept], 1, atol=1e-4)
    # The directions of small singular values among themselves: float32 knows them to 6e-8 / 1e-3.
    np.testing.assert_allclose(aligned[np.ix_(kept, kept)], np.eye(kept.sum()), atol=5e-4)
    assert np.linalg.norm(found, 2) < 1 + 2e-4


@pytest.mark.parametrize("shape", [(64, 64), (192, 64)], ids=str)
@pytest.mark.parametrize(("steps", "lower"), [(5, 4e-3), (6, 1e-3)])
def test_few_steps_reach_the_largest_value(shape, steps, lower):
    """<x, A> for Muon: 0.99 of the nuclear norm, with ||A||_2 <= 1."""
    rng = np.random.default_rng(24)
    u, _, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    for s in (np.geomspace(1, lower, 64), np.arange(1.0, 65) ** -0.5, np.ones(64), spectrum("half zero", 64)):
        x = (u * s) @ vt
        found = np.asarray(jit_msign(x.astype(np.float32), steps=steps), np.float64)
        assert np.sum(found * x) / max(1, np.linalg.norm(found, 2)) >= 0.985 * s.sum()
        assert np.linalg.norm(found, 2) < 1.011


def product_flops(shape: tuple[int, int], **settings) -> float:
    """FLOPs of the matrix products, loop bodies times their trips."""

    def count(jaxpr) -> float:
        total = 0.0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                terms = equation.invars[0].aval.shape[contracted[0]]
                total += 2 * terms * np.prod(equation.outvars[0].aval.shape)
            elif "jaxpr" in equation.params:
                inner = equation.params["jaxpr"]
                total += equation.params.get("length", 1) * count(getattr(inner, "jaxpr", inner))
        return total

    traced = jax.make_jaxpr(partial(msign, **settings))(jax.ShapeDtypeStruct(shape, jnp.float32))
    return count(traced.jaxpr)


@pytest.mark.parametrize("steps", [5, 8])
def test_cost(steps):
    """Against the plain quintic in full space, 4 m n^2 + 2 n^3 a step."""
    n = 256
    for ratio, most in ((1, 0.84), (2, 0.72), (3, 0.63), (4, 0.57)):
        plain = steps * (4 * ratio + 2) * n**3
        assert product_flops((ratio * n, n), steps=steps) <= most * plain
        assert product_flops((n, ratio * n), steps=steps) == product_flops((ratio * n, n), steps=steps)


def test_bfloat16_of_tall_matrices_and_decaying_spectra():
    rng = np.random.default_rng(25)
    u, _, vt = np.linalg.svd(rng.normal(size=(192, 64)), full_matrices=False)
    for name in ("flat", "1/i", "three decades"):
        x = ((u * spectrum(name, 64)) @ vt).astype(np.float32)
        found = np.asarray(jit_msign(x, dtype=jnp.bfloat16), np.float64)
        np.testing.assert_allclose(np.linalg.svd(found, compute_uv=False), 1, atol=1e-2)
