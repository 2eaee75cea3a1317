"""Whole optimisers: decay and epsilon at every width, optax's own at the base, and training with each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifold_muon import Unconstrained, scale_by_manifold_muon
from spectral import (
    Role,
    muon_labels,
    reinitialize,
    scale_by_spectral_rule,
    spectral_adamw,
    spectral_muon,
    spectral_sgd,
)
from spectral.paths import map_named, named_leaves
from tests.spectral.scaled_models import EIGHTFOLD, STACKED, equinox_like, nnx_state, ones, shapes

OPTIMIZERS = {
    "adamw": lambda rate, base, decay, **hints: spectral_adamw(rate, base, weight_decay=decay, **hints),
    "sgd": lambda rate, base, decay, **hints: spectral_sgd(rate, base, weight_decay=decay, **hints),
    "momentum": lambda rate, base, decay, **hints: spectral_sgd(
        rate, base, momentum=0.9, nesterov=True, weight_decay=decay, **hints
    ),
    "muon": lambda rate, base, decay, **hints: spectral_muon(
        rate, base, adam_learning_rate=rate, weight_decay=decay, adam_weight_decay=decay, **hints
    ),
}


def step(optimizer, params, gradients):
    return jax.jit(optimizer.update)(gradients, optimizer.init(params), params)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("width", [4, 32])
def test_decay_does_not_know_the_multiplier(name, width):
    """With zero gradients every weight shrinks by rate times decay."""
    params = ones(width)
    zeros = jax.tree.map(jnp.zeros_like, params)
    optimizer = OPTIMIZERS[name](0.1, shapes(4), 0.25, stacked=STACKED)
    for _, update in named_leaves(step(optimizer, params, zeros)):
        np.testing.assert_allclose(update, -0.1 * 0.25, rtol=1e-6)


def test_adamw_followed_by_the_rule_would_scale_the_decay():
    params = ones(32)
    zeros = jax.tree.map(jnp.zeros_like, params)
    wrong = optax.chain(
        optax.adamw(0.1, weight_decay=0.25), scale_by_spectral_rule(shapes(4), stacked=STACKED)
    )
    update = step(wrong, params, zeros)["h"]["up"]["kernel"]
    np.testing.assert_allclose(update, -0.1 * 0.25 / 8, rtol=1e-6)


def random_like(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), tree)


@pytest.mark.parametrize(
    ("ours", "optaxs"),
    [
        (
            spectral_adamw(0.1, shapes(4), b1=0.8, b2=0.9, weight_decay=0.5, stacked=STACKED),
            optax.adamw(0.1, 0.8, 0.9, weight_decay=0.5),
        ),
        (spectral_sgd(0.1, shapes(4), stacked=STACKED), optax.sgd(0.1)),
        (
            spectral_sgd(0.1, shapes(4), momentum=0.9, nesterov=True, stacked=STACKED),
            optax.sgd(0.1, 0.9, True),
        ),
    ],
    ids=["adamw", "sgd", "momentum"],
)
def test_at_the_base_it_is_optaxs_own(ours, optaxs):
    params, gradients = random_like(shapes(4)), random_like(shapes(4), 1)
    expected = step(optaxs, params, gradients)
    for (path, x), (_, y) in zip(
        named_leaves(step(ours, params, gradients)), named_leaves(expected), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-6, err_msg=path)


RATIO = 64


def block(width):
    return {"embedding": (9, width), "kernel": (width, width), "bias": (width,), "scale": (width,)}


def tiled(small, width):
    """The base's array repeated in every axis that grew."""
    return {
        path: np.tile(x, [m // n for m, n in zip(block(width)[path], x.shape, strict=True)])
        for path, x in small.items()
    }


def test_epsilon_does_not_bind_at_64_times_the_width():
    """Gradients that shrink as 1 / fan_out give the base's updates, although they sink to epsilon's size."""
    rng = np.random.default_rng(0)
    base = {path: rng.uniform(1, 3, shape).astype(np.float32) for path, shape in block(8).items()}
    small = {path: 1e-6 * x for path, x in base.items()}
    wide = {path: x / RATIO for path, x in tiled(small, 8 * RATIO).items()}  # 1.6e-8 to 5e-8
    expected = tiled(step(spectral_adamw(1.0, base, weight_decay=0.0), base, small), 8 * RATIO)
    expected["kernel"] = expected["kernel"] / RATIO  # the multiplier
    params = tiled(base, 8 * RATIO)
    found = step(spectral_adamw(1.0, base, weight_decay=0.0), params, wide)
    for path, x in expected.items():
        np.testing.assert_allclose(found[path], x, rtol=1e-5)
    # Epsilon shrinks these steps by 1e-8 / 1e-6 at most, and would by 1e-8 / 1.6e-8 without the rule.
    np.testing.assert_allclose(np.abs(found["bias"]), 1.0, rtol=0.011)
    bound = step(
        optax.chain(optax.scale_by_adam(), scale_by_spectral_rule(base), optax.scale(-1.0)), params, wide
    )
    assert np.abs(bound["bias"]).min() < 0.8


def network(width):
    return {
        "embed": {"embedding": (16, width)},
        "layers": {"0": {"kernel": (width, 2 * width)}, "1": {"kernel": (2 * width, width)}},
        "norm": {"bias": (width,)},
        "head": {"kernel": (width, 8)},
    }


def network_shapes(width):
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), network(width), is_leaf=lambda x: isinstance(x, tuple)
    )


TOKENS, LABELS = np.arange(16), np.arange(16) * 5 % 8


def loss(params):
    x = params["embed"]["embedding"][TOKENS]
    x = jax.nn.relu(x @ params["layers"]["0"]["kernel"])
    x = jax.nn.relu(x @ params["layers"]["1"]["kernel"] + params["norm"]["bias"])
    logits = x @ params["head"]["kernel"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def test_a_networks_gradients_shrink_as_the_rule_says():
    """RMS of the entries against the width, in log-log slopes: -1, and 0 for the readout."""
    widths, sizes = (64, 512), []
    for width in widths:
        params = reinitialize(network_shapes(width), jax.random.key(0))
        gradients = jax.jit(jax.grad(loss))(params)
        sizes.append({p: float(jnp.sqrt(jnp.mean(g**2))) for p, g in named_leaves(gradients)})
    for path in sizes[0]:
        slope = np.log(sizes[1][path] / sizes[0][path]) / np.log(widths[1] / widths[0])
        assert slope == pytest.approx(0.0 if path == "head/kernel" else -1.0, abs=0.2), path


@pytest.mark.parametrize(("name", "rate"), [("adamw", 0.02), ("sgd", 1.0), ("momentum", 0.3), ("muon", 0.05)])
def test_a_wide_network_learns_with_the_bases_rate(name, rate):
    params = reinitialize(network_shapes(64), jax.random.key(0))
    optimizer = OPTIMIZERS[name](rate, network_shapes(16), 0.0)

    @jax.jit
    def train(params):
        def body(carry, _):
            params, state = carry
            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(body, (params, optimizer.init(params)), None, 15)[1]

    values = train(params)
    assert values[-1] < 0.9 * values[0]


@pytest.mark.parametrize(
    ("direction", "tolerance"),
    [(None, 0.3), (scale_by_manifold_muon({"*kernel": Unconstrained()}), 0.02)],
    ids=["optax", "manifold_muon"],
)
def test_muons_updates_have_the_tables_norms(direction, tolerance):
    """At the rate 1: the multiplier (the newton-schulz quintic's norms are within 0.7 to 1.2)."""
    params = random_like(shapes(32))
    optimizer = spectral_muon(1.0, shapes(4), adam_learning_rate=2.0, direction=direction, stacked=STACKED)
    updates = dict(named_leaves(step(optimizer, params, params)))
    for path, (_, adam, muon) in EIGHTFOLD.items():
        if muon is None or path == "lm_head/kernel":  # a readout, by Adam
            np.testing.assert_allclose(np.abs(updates[path]), 2 * adam, rtol=1e-3)
        else:
            found = np.linalg.norm(np.asarray(updates[path], np.float64), 2, axis=(-2, -1))
            np.testing.assert_allclose(found, muon, rtol=tolerance)


def test_muon_of_other_trees():
    for make in (equinox_like, nnx_state):
        params = random_like(make(8))
        optimizer = spectral_muon(0.1, make(4), adam_learning_rate=0.1)
        updates = step(optimizer, params, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_labels():
    labels = dict(named_leaves(muon_labels(stacked=STACKED)(ones(4))))
    matrices = {path for path, label in labels.items() if label == "muon"}
    assert matrices == {"patches/kernel", "h/attn/kernel", "h/up/kernel", "h/down/kernel"}
    labels = muon_labels(stacked=STACKED, roles={"lm_head/kernel": Role.MATRIX})(ones(4))
    assert labels["lm_head"] == {"kernel": "muon", "bias": "adamw"}


def test_masks_schedules_and_injected_rates():
    params = ones(8)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def mask(params):
        return map_named(lambda path, _: path.endswith("kernel"), params)

    schedule = optax.linear_schedule(0.1, 0.0, 10)
    for name in ("adamw", "muon"):
        injected = optax.inject_hyperparams(
            spectral_adamw if name == "adamw" else spectral_muon, static_args=("mask",)
        )
        more = {} if name == "adamw" else {"adam_learning_rate": schedule, "adam_weight_decay": 0.25}
        optimizer = injected(
            learning_rate=schedule, base=shapes(4), weight_decay=0.25, mask=mask, stacked=STACKED, **more
        )
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for rate in (0.1, 0.09):
            updates, state = update(zeros, state, params)
            for path, x in named_leaves(updates):
                expected = -rate * 0.25 if path.endswith("kernel") else 0.0
                np.testing.assert_allclose(x, expected, rtol=1e-5)
