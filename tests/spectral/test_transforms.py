"""The multipliers against hand-computed tables, what a base must be, and each place where optax puts them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from optax.contrib import MuonDimensionNumbers

from spectral import (
    Role,
    decide,
    format_decisions,
    gradient_scale,
    learning_rate_multipliers,
    scale_by_spectral_rule,
    scale_gradients_to_base,
)
from spectral.paths import map_named, named_leaves
from tests.spectral.scaled_models import (
    EIGHTFOLD,
    STACKED,
    equinox_like,
    nnx_state,
    ones,
    shapes,
)

COLUMNS = {"sgd": 0, "adam": 1, "muon": 2}


def factors(transform, updates):
    """What a transform multiplies each parameter's update by, which is one number."""
    new, _ = transform.update(updates, transform.init(updates))
    found = {}
    for (path, x), (_, old) in zip(named_leaves(new), named_leaves(updates), strict=True):
        ratio = np.asarray(x, np.float64) / np.asarray(old, np.float64)
        np.testing.assert_allclose(ratio, ratio.flat[0], rtol=1e-6)
        assert x.dtype == old.dtype
        found[path] = ratio.flat[0]
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_multipliers_are_the_tables(optimizer):
    expected = {path: row[COLUMNS[optimizer]] for path, row in EIGHTFOLD.items()}
    transform = scale_by_spectral_rule(shapes(4), optimizer, stacked=STACKED)
    assert factors(transform, ones(32)) == pytest.approx(expected, rel=1e-6)
    multipliers = learning_rate_multipliers(shapes(32), shapes(4), optimizer, stacked=STACKED)
    assert multipliers == pytest.approx(expected, rel=1e-12)


def test_muon_is_for_matrices():
    expected = {path: row[2] for path, row in EIGHTFOLD.items() if row[2] is not None}
    transform = scale_by_spectral_rule(shapes(4), "muon", stacked=STACKED)
    mask = map_named(lambda path, _: path in expected, ones(32))
    masked = factors(optax.masked(transform, mask), ones(32))
    assert {path: masked[path] for path in expected} == pytest.approx(expected, rel=1e-6)
    assert {masked[path] for path in masked if path not in expected} == {1.0}  # left alone
    with pytest.raises(ValueError, match=r"h/attn/bias with shape .* role bias: use Adam"):
        transform.init(ones(32))


def test_multipliers_of_a_muon_chain_have_adams_for_the_rest():
    found = learning_rate_multipliers(shapes(32), shapes(4), "muon", stacked=STACKED)
    expected = {path: adam if muon is None else muon for path, (_, adam, muon) in EIGHTFOLD.items()}
    expected["lm_head/kernel"] = 1 / 8  # a readout, by Adam
    assert found == pytest.approx(expected, rel=1e-12)
    table = format_decisions(decide(shapes(32), stacked=STACKED), found)
    assert "patches/kernel  10x32     matrix         10       32" in table and "2.828" in table


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_nothing_changes_at_the_base(optimizer):
    for base, params in ((shapes(8), ones(8)), (equinox_like(8), equinox_like(8))):
        stacked = STACKED if isinstance(params, dict) else ()
        rule = scale_by_spectral_rule(base, optimizer, stacked=stacked)
        assert set(factors(rule, params).values()) == {1.0}
        assert set(factors(scale_gradients_to_base(base, stacked=stacked), params).values()) == {1.0}


def test_gradients_shrink_as_one_over_fan_out_in_every_role():
    assert gradient_scale(Role.MATRIX, 256, 1024) == pytest.approx(1 / 1024)
    for role in (Role.READOUT, Role.EMBEDDING, Role.BIAS, Role.GAIN):
        assert gradient_scale(role, 64, 16) == pytest.approx(1 / 16)
    expected = {path: 8.0 for path in EIGHTFOLD} | {"lm_head/kernel": 1.0, "lm_head/bias": 1.0}
    found = factors(scale_gradients_to_base(shapes(4), stacked=STACKED), ones(32))
    assert found == pytest.approx(expected, rel=1e-6)


def test_heads_are_outputs_of_one_matrix():
    """Flax's attention: width grows by heads, declared as outputs, and the bias has both axes."""

    def attention(heads):
        return {"q": {"kernel": jnp.ones((4 * heads, heads, 4)), "bias": jnp.ones((heads, 4))}}

    dims = {"q/kernel": MuonDimensionNumbers(0, (1, 2)), "q/bias": MuonDimensionNumbers((), (0, 1))}
    rule = scale_by_spectral_rule(attention(2), "sgd", dimension_numbers=dims)
    assert factors(rule, attention(6)) == pytest.approx({"q/kernel": 1.0, "q/bias": 3.0}, rel=1e-6)
    dims["q/kernel"] = MuonDimensionNumbers(0, 2)
    with pytest.raises(
        ValueError, match=r"differ in the batch axes \[1\]: build the base with the same depth"
    ):
        scale_by_spectral_rule(attention(2), "sgd", dimension_numbers=dims).init(attention(6))


@pytest.mark.parametrize(
    "base",
    [
        lambda: shapes(4),
        functools.partial(shapes, 4),
        jax.jit(lambda: ones(4)),
        FrozenDict(ones(4)),
        map_named(lambda _, x: np.ones(x.shape), shapes(4)),
    ],
    ids=["function", "partial", "jitted", "frozen", "numpy"],
)
def test_what_a_base_may_be(base):
    expected = {path: row[1] for path, row in EIGHTFOLD.items()}
    assert factors(scale_by_spectral_rule(base, stacked=STACKED), ones(32)) == pytest.approx(
        expected, rel=1e-6
    )


def test_a_base_is_never_allocated():
    def enormous():
        return {"kernel": jnp.ones((1 << 20, 1 << 20)), "bias": jnp.ones(1 << 20)}  # 4 TB

    rule = scale_by_spectral_rule(enormous, "adam")
    small = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    assert factors(rule, small) == {"kernel": 2.0**19, "bias": 1.0}


def test_dataclasses_and_nnx_states():
    found = factors(scale_by_spectral_rule(equinox_like(4), "sgd"), equinox_like(8))
    assert found == pytest.approx(
        {
            "embed/weight": 2,
            "layers/0/weight": 1,
            "layers/0/bias": 2,
            "layers/1/weight": 1,
            "norm/weight": 2,
            "norm/bias": 2,
            "head/weight": 0.5,
        }
    )
    found = factors(scale_by_spectral_rule(lambda: nnx_state(4), "adam"), nnx_state(8))
    assert found == {
        "embed/embedding": 1,
        "head/kernel": 0.5,
        "norm/bias": 1,
        "norm/scale": 1,
        "up/bias": 1,
        "up/kernel": 0.5,
    }


@pytest.mark.parametrize(
    ("base", "params", "says"),
    [
        ({"kernel": (2, 2)}, {"kernel": (4, 4), "bias": (4,)}, "only here bias; only in the base none"),
        ({"kernel": (2, 2), "bias": (2,)}, {"kernel": (4, 4)}, "only here none; only in the base bias"),
        (
            {"scale": (2, 2)},
            {"scale": (2,)},
            r"scale has shape \(2,\) here and \(2, 2\) in the base.*same axes",
        ),
        (
            {"scale": (3, 4)},
            {"scale": (2, 8)},
            r"differ in the batch axes \[0\]: build the base with the same",
        ),
        ({"wte": (9, 4)}, {"wte": (10, 8)}, "it is an embedding, whose vocabulary does not grow"),
        ({"wte": (4, 9)}, {"wte": (8, 9)}, "it is an embedding, whose vocabulary does not grow"),
        (
            {"head/kernel": (4, 4)},
            {"head/kernel": (8, 8)},
            "roles={'head/kernel': Role.MATRIX} if it is none",
        ),
    ],
)
def test_a_base_differs_in_width_alone(base, params, says):
    def arrays(tree):
        return {path: jnp.ones(shape) for path, shape in tree.items()}

    for transform in (scale_by_spectral_rule(arrays(base)), scale_gradients_to_base(arrays(base))):
        with pytest.raises(ValueError, match=says):
            transform.init(arrays(params))


def test_declarations_are_checked_against_the_base():
    with pytest.raises(ValueError, match="pattern of roles 'typo' matches no parameter"):
        scale_by_spectral_rule(shapes(4), stacked=STACKED, roles={"typo": Role.GAIN}).init(ones(8))
    with pytest.raises(ValueError, match="unknown optimizer kind 'lion'"):
        scale_by_spectral_rule(shapes(4), "lion")
    with pytest.raises(ValueError, match="cannot tell which axes of h/attn/kernel"):
        scale_by_spectral_rule(shapes(4)).init(ones(8))


def chained(base):
    rule = functools.partial(scale_by_spectral_rule, base, stacked=STACKED)
    return {
        "chain": optax.chain(optax.identity(), rule("adam")),
        "partition": optax.partition(
            {"rule": rule("adam"), "same": rule("adam", roles={"wte/*": Role.EMBEDDING})},
            lambda params: map_named(lambda path, _: "rule" if "kernel" in path else "same", params),
        ),
        "multi_steps": optax.MultiSteps(rule("adam"), 1).gradient_transformation(),
        "apply_if_finite": optax.apply_if_finite(rule("adam"), 3),
        "inject": optax.inject_hyperparams(lambda scale: optax.chain(rule("adam"), optax.scale(scale)))(
            scale=1.0
        ),
    }


@pytest.mark.parametrize("where", list(chained(shapes(4))))
def test_inside_optax_under_jit(where):
    transform = chained(shapes(4))[where]
    expected = {path: row[1] for path, row in EIGHTFOLD.items()}
    updates = ones(32)
    new, _ = jax.jit(transform.update)(updates, transform.init(updates), updates)
    assert {path: float(x.ravel()[0]) for path, x in named_leaves(new)} == pytest.approx(expected, rel=1e-6)


def test_under_vmap_and_scan():
    rule = optax.chain(optax.trace(0.9), scale_by_spectral_rule({"kernel": jnp.ones((2, 2))}))
    params = {"kernel": jnp.ones((3, 8, 8)), "bias": None}
    states = jax.vmap(rule.init)(params)

    @jax.jit
    def steps(states):
        return jax.lax.scan(lambda state, _: jax.vmap(rule.update)(params, state)[::-1], states, None, 2)

    _, updates = steps(states)
    np.testing.assert_allclose(updates["kernel"][:, 0, 0, 0], [0.25, 0.25 * 1.9], rtol=1e-6)
    assert updates["bias"] is None


def test_narrow_dtypes_stay():
    params = {"kernel": jnp.ones((8, 8), jnp.bfloat16)}
    assert factors(scale_by_spectral_rule({"kernel": np.ones((2, 2))}), params) == {"kernel": 0.25}
