"""The whole optimiser step against a float64 version written from the formulas of arXiv:2606.13276 alone.

Only the matrix sign is float32 in the reference too: it is the polynomial, not its limit, that defines it.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifold_muon import (
    DGram,
    DualAscent,
    Manifold,
    Oblique,
    Stiefel,
    Unconstrained,
    manifold_muon,
    scale_by_manifold_muon,
)

# arXiv:2505.16932, for singular values from 1e-3 to 1; later steps repeat the last triple.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
    (1.875, -1.25, 0.375),
    (1.875, -1.25, 0.375),
)
SHAPES = {"tall": (2, 6, 10), "wide": (2, 10, 6), "square": (2, 6, 6)}  # kernels (L, in, out)
STEPS, LEARNING_RATE, MOMENTUM, DECAY = 3, 0.02, 0.95, 0.1
ATOL = 1e-5


def msign(x: np.ndarray) -> np.ndarray:
    y = x.astype(np.float32)
    y = y / (np.float32(1.01) * np.linalg.norm(y))
    for step, (a, b, c) in enumerate(POLAR_EXPRESS, start=1):
        safety = 1.01 if step < len(POLAR_EXPRESS) else 1.0
        a, b, c = np.float32(a / safety), np.float32(b / safety**3), np.float32(c / safety**5)
        gram = y.T @ y
        y = a * y + y @ (b * gram + c * (gram @ gram))
    return y.astype(np.float64)


def polar(x: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


def dgram_frame(w: np.ndarray) -> np.ndarray:
    q = polar(w / np.linalg.norm(w, axis=0))
    return q * np.diag(q.T @ w)


def dgram_svd(w: np.ndarray) -> np.ndarray:
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    return (u @ vt) @ np.diag(s)


class Reference(NamedTuple):
    """A manifold as the paper writes it: P, the retraction, and whether weights decay."""

    project: Callable[[np.ndarray], np.ndarray]
    retract: Callable[[np.ndarray], np.ndarray]
    decays: bool = False


MANIFOLDS = {
    "stiefel": (Stiefel(), Reference(lambda s: s, polar)),
    "dgram": (DGram(), Reference(lambda s: s - np.diag(np.diag(s)), dgram_frame)),
    "dgram-svd": (DGram(retraction="svd"), Reference(lambda s: s - np.diag(np.diag(s)), dgram_svd)),
    "oblique": (
        Oblique(),
        Reference(lambda s: np.diag(np.diag(s)), lambda w: w / np.linalg.norm(w, axis=0)),
    ),
    "unconstrained": (Unconstrained(), Reference(np.zeros_like, lambda w: w, decays=True)),
}


class IllConditioned(Exception):
    """A matrix whose sign is taken is nearly singular, so that float32 does not know its sign to 1e-5."""


class Run(NamedTuple):
    weights: list[np.ndarray]
    directions: list[np.ndarray]


def direction(
    g: np.ndarray, w: np.ndarray, reference: Reference, iterations: int, alpha: float
) -> np.ndarray:
    """The reference algorithm, for tall W."""
    dual = -0.25 * reference.project(w.T @ g + g.T @ w)
    for k in range(iterations):
        m = g + 2 * w @ reference.project((dual + dual.T) / 2)
        if np.linalg.svd(m, compute_uv=False)[-1] < 0.02 * np.linalg.norm(m):
            raise IllConditioned
        a = msign(m)
        h = reference.project(w.T @ a + a.T @ w)
        dual = dual - alpha * (1 - k / iterations) * h
    return a


def reference_run(
    kernel: np.ndarray,
    gradients: np.ndarray,
    reference: Reference,
    *,
    radius: float = 1.0,
    nesterov: bool = True,
    iterations: int = 20,
    alpha: float = 0.1,
) -> Run:
    """Every step for one kernel (in, out).

    The paper's W is kernel^T, (out, in); a wide one is made tall by transposing once more, a square one not.
    """
    fan_in, fan_out = kernel.shape

    def to_papers(x: np.ndarray) -> np.ndarray:
        return x.T.astype(np.float64) if fan_out >= fan_in else x.astype(np.float64)

    def to_kernel(x: np.ndarray) -> np.ndarray:
        return x.T if fan_out >= fan_in else x

    w = to_papers(kernel)
    buffer = np.zeros_like(w)
    weights, directions = [], []
    for gradient in gradients:
        g = to_papers(gradient)
        buffer = MOMENTUM * buffer + g
        g = g + MOMENTUM * buffer if nesterov else buffer
        a = radius * direction(g, w / radius, reference, iterations, alpha)
        decay = DECAY * w if reference.decays else 0.0
        w = radius * reference.retract((w - LEARNING_RATE * (a + decay)) / radius)
        weights.append(to_kernel(w))
        directions.append(to_kernel(a))
    return Run(weights, directions)


def random_problem(rng: np.random.Generator, name: str, fan_in: int, fan_out: int, radius: float):
    """A kernel on its manifold, and gradients with singular values between 1/2 and 3/2.

    Square ones are 20 times larger: the dual's optimum is a singular matrix there, and is not to be reached.
    """
    tall = rng.normal(size=(max(fan_in, fan_out), min(fan_in, fan_out)))
    if name == "oblique":
        tall = tall / np.linalg.norm(tall, axis=0)
    elif name != "unconstrained":
        tall = polar(tall)
    if name.startswith("dgram"):
        tall = tall * rng.uniform(0.5, 2.0, tall.shape[1])
    kernel = radius * (tall.T if fan_out >= fan_in else tall)
    u, _, vt = np.linalg.svd(rng.normal(size=(STEPS, fan_in, fan_out)), full_matrices=False)
    size = 20.0 if fan_in == fan_out else 1.0
    gradients = size * (u * rng.uniform(0.5, 1.5, (STEPS, 1, tall.shape[1]))) @ vt
    return kernel.astype(np.float32), gradients.astype(np.float32)


def solved_problem(name: str, reference: Reference, radius: float | str, **settings: Any):
    """Well-conditioned parameters, the gradients of every step, and the reference's run for every matrix."""
    rng = np.random.default_rng(0)
    params, gradients, runs = {}, [{} for _ in range(STEPS)], {}
    for key, (layers, fan_in, fan_out) in SHAPES.items():
        number = np.sqrt(fan_out / fan_in) if radius == "spectral" else radius
        drawn = []
        while len(drawn) < layers:
            kernel, steps = random_problem(rng, name, fan_in, fan_out, number)
            with suppress(IllConditioned):
                run = reference_run(kernel, steps, reference, radius=number, **settings)
                drawn.append((kernel, steps, run))
        params[key] = np.stack([kernel for kernel, _, _ in drawn])
        runs[key] = [run for _, _, run in drawn]
        for step in range(STEPS):
            gradients[step][key] = np.stack([steps[step] for _, steps, _ in drawn])
    return params, gradients, runs


def library_run(optimizer: optax.GradientTransformation, params: dict, gradients: list[dict]):
    """Weights and updates of every step."""

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, updates

    params = jax.tree.map(jnp.asarray, params)
    state, weights, all_updates = optimizer.init(params), [], []
    for gradient in gradients:
        params, state, updates = step(params, state, gradient)
        weights.append(params)
        all_updates.append(updates)
    return weights, all_updates


def largest_error(found: list[dict], runs: dict[str, list[Run]], field: str) -> float:
    """Over all steps, parameters and layers."""
    return max(
        np.abs(np.asarray(tree[key][layer], np.float64) - getattr(run, field)[step]).max()
        for step, tree in enumerate(found)
        for key, layers in runs.items()
        for layer, run in enumerate(layers)
    )


def weight_error(
    name: str,
    manifold: Manifold,
    radius: float | str = 1.0,
    solver: str | DualAscent = "dual_ascent",
    **settings,
) -> float:
    params, gradients, runs = solved_problem(name, MANIFOLDS[name][1], radius, **settings)
    optimizer = manifold_muon(
        LEARNING_RATE,
        {"*": manifold},
        adam_learning_rate=0.0,
        weight_decay=DECAY,
        nesterov=settings.get("nesterov", True),
        solver=solver,
    )
    weights, _ = library_run(optimizer, params, gradients)
    assert largest_error([params], runs, "weights") > 1e-3, "the steps are too small to tell anything"
    return largest_error(weights, runs, "weights")


@pytest.mark.parametrize("name", MANIFOLDS)
def test_three_steps(name):
    assert weight_error(name, MANIFOLDS[name][0]) < ATOL


@pytest.mark.parametrize("name", ["dgram", "unconstrained"])
def test_three_steps_without_nesterov(name):
    assert weight_error(name, MANIFOLDS[name][0], nesterov=False) < ATOL


@pytest.mark.parametrize(
    ("name", "radius"),
    [("stiefel", 2.0), ("stiefel", "spectral"), ("oblique", "spectral"), ("unconstrained", 2.0)],
)
def test_three_steps_with_a_radius(name, radius):
    manifold = type(MANIFOLDS[name][0])(radius=radius)
    assert weight_error(name, manifold, radius) < ATOL


@pytest.mark.parametrize(
    ("name", "iterations", "alpha"), [("stiefel", 1, 0.1), ("stiefel", 7, 0.03), ("dgram", 2, 0.2)]
)
def test_solver_settings(name, iterations, alpha):
    solver = DualAscent(iterations=iterations, step_size=alpha)
    error = weight_error(name, MANIFOLDS[name][0], solver=solver, iterations=iterations, alpha=alpha)
    assert error < ATOL


@pytest.mark.parametrize("name", ["stiefel", "dgram", "oblique"])
def test_directions(name):
    """The first direction alone, not scaled down by the learning rate."""
    manifold, reference = MANIFOLDS[name]
    params, gradients, runs = solved_problem(name, reference, 1.0)
    optimizer = scale_by_manifold_muon({"*": manifold}, momentum=MOMENTUM, solver="dual_ascent")
    _, updates = library_run(optimizer, params, gradients[:1])
    assert largest_error(updates, runs, "directions") < ATOL
