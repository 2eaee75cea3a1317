"""Assignments, and every error with its message."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from manifold_muon import (
    ASSIGNMENTS,
    DGram,
    Oblique,
    Stiefel,
    Unconstrained,
    assign,
    constraint_violations,
    manifold_muon,
    named_assignment,
    project_params,
    retract,
    scale_by_manifold_muon,
)
from spectral import KERNEL

PARAMS = {
    "attn": {"kernel": jnp.ones((2, 4, 6)), "bias": jnp.ones((2, 6))},
    "mlp": {"kernel": jnp.ones((2, 6, 4))},
    "norm": {"scale": jnp.ones(4)},
}
KERNELS = {"*kernel": Stiefel()}
# Every public entry that takes an assignment, called on PARAMS.
ENTRIES = {
    "assign": assign,
    "project_params": project_params,
    "constraint_violations": constraint_violations,
    "retract": lambda params, *args: retract(*args).init(params),
    "scale_by_manifold_muon": lambda params, *args: scale_by_manifold_muon(*args).init(params),
    "manifold_muon": lambda params, *args: manifold_muon(0.02, *args, adam_learning_rate=1e-3).init(params),
}


def test_named_assignments():
    assert ASSIGNMENTS == ("none", "stiefel", "dgram", "oblique", "hetero", "hetero-inv")
    pairs = {
        "none": (Unconstrained(), Unconstrained()),
        "stiefel": (Stiefel(), Stiefel()),
        "dgram": (DGram(), DGram()),
        "oblique": (Oblique(), Oblique()),
        "hetero": (Stiefel(), DGram()),
        "hetero-inv": (DGram(), Stiefel()),
    }
    for name, pair in pairs.items():
        assert named_assignment(name) == dict(zip(("*attn*/kernel", "*mlp*/kernel"), pair, strict=True))
    assert named_assignment("hetero", attention="a", mlp="m") == {"a": Stiefel(), "m": DGram()}
    changed = named_assignment("hetero")
    changed["*attn*/kernel"] = Oblique()
    assert named_assignment("hetero")["*attn*/kernel"] == Stiefel()


def test_assign():
    found = assign(PARAMS, named_assignment("hetero"))
    assert list(found) == ["attn/kernel", "mlp/kernel"]
    assert found["attn/kernel"] == (Stiefel(), 1.0, KERNEL)
    assert found["mlp/kernel"] == (DGram(), 1.0, KERNEL)


def test_the_first_pattern_that_fits_decides():
    found = assign(PARAMS, {"attn/kernel": DGram(), "*kernel": Oblique()})
    assert [found[name].manifold for name in found] == [DGram(), Oblique()]


def test_radii_are_numbers_by_fans():
    params = {"a": jnp.ones((2, 4, 16)), "b": jnp.ones((16, 4)), "c": jnp.ones((3, 3))}
    found = assign(params, {"a": Stiefel("spectral"), "b": Oblique("spectral"), "c": Unconstrained(3.0)})
    assert [a.radius for a in found.values()] == [2.0, 0.5, 3.0]
    assert [a.manifold for a in found.values()] == [Stiefel(2.0), Oblique(0.5), Unconstrained(3.0)]
    heads = assign({"q": jnp.ones((4, 2, 9))}, {"q": Stiefel("spectral")}, MuonDimensionNumbers(0, 2))
    assert heads["q"].radius == 1.5


def test_constraint_violations_name_only_the_assigned():
    found = constraint_violations(PARAMS, named_assignment("hetero"))
    assert list(found) == ["attn/kernel", "mlp/kernel"]
    assert all(violation.shape == (2,) for violation in found.values())
    assert constraint_violations(PARAMS, named_assignment("none"))["attn/kernel"].tolist() == [0.0, 0.0]


def test_project_params_leaves_the_rest_alone():
    found = project_params(PARAMS, named_assignment("hetero"))
    assert found["norm"]["scale"] is PARAMS["norm"]["scale"]
    assert found["attn"]["bias"] is PARAMS["attn"]["bias"]
    assert jax.tree.structure(found) == jax.tree.structure(PARAMS)


def test_unknown_assignment():
    message = "unknown assignment 'euclid': choose one of none, stiefel, dgram, oblique, hetero, hetero-inv"
    with pytest.raises(ValueError, match=message):
        named_assignment("euclid")


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ({"*kernel": Stiefel(), "conv*": DGram()},),
            "pattern 'conv*' matches no parameter; the parameters are: attn/bias, attn/kernel, mlp/kernel",
        ),
        (
            ({"*": Stiefel()},),
            "norm/scale has shape (4,) and is assigned to Stiefel(radius=1.0), which is for matrices: "
            "narrow the pattern so that it leaves this parameter out",
        ),
        (
            (KERNELS, MuonDimensionNumbers(0, 3)),
            "attn/kernel: MuonDimensionNumbers(reduction_axis=0, output_axis=3) does not fit an array of",
        ),
        (
            (KERNELS, MuonDimensionNumbers(2, -1)),
            "attn/kernel: MuonDimensionNumbers(reduction_axis=2, output_axis=-1) names an axis of shape "
            "(2, 4, 6) twice",
        ),
        (
            (KERNELS, {"attn/kernel": KERNEL}),
            "no pattern of dimension_numbers fits mlp/kernel with shape (2, 6, 4), which is on Stiefel",
        ),
    ],
    ids=["no match", "1-D", "out of range", "twice", "no dimensions"],
)
def test_misfits(entry, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ENTRIES[entry](PARAMS, *arguments)


@pytest.mark.parametrize("entry", ENTRIES)
def test_dimension_numbers_that_fit_nothing(entry):
    message = "pattern of dimension_numbers 'conv*' matches no parameter"
    # These two may see a part of the parameters, of which the dimension numbers may name others.
    if entry in ("scale_by_manifold_muon", "retract"):
        message = "no pattern of dimension_numbers fits attn/kernel"
    with pytest.raises(ValueError, match=re.escape(message)):
        ENTRIES[entry](PARAMS, KERNELS, {"conv*": KERNEL})


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("value", [Stiefel, "stiefel", None])
def test_values_must_be_manifolds(entry, value):
    with pytest.raises(
        TypeError, match=r"pattern '\*kernel' is assigned .*, which is not a Manifold such as"
    ):
        ENTRIES[entry](PARAMS, {"*kernel": value})


def test_unassigned_parameters_need_another_optimizer():
    message = re.escape("no pattern of the assignment fits attn/bias with shape (2, 6): add one, or leave")
    transform = scale_by_manifold_muon(KERNELS)
    with pytest.raises(ValueError, match=message):
        transform.init(PARAMS)


@pytest.mark.parametrize("name", ["scale_by_manifold_muon", "retract"])
def test_update_needs_params(name):
    params = {"kernel": jnp.eye(3)}
    transform = {"scale_by_manifold_muon": scale_by_manifold_muon, "retract": retract}[name](KERNELS)
    state = transform.init(params)
    message = f"{name} moves weights on their manifolds and needs them: call update\\(grads, state, params\\)"
    with pytest.raises(ValueError, match=message):
        transform.update(params, state)


def test_the_whole_optimizer_needs_params():
    params = {"kernel": jnp.eye(3)}
    transform = manifold_muon(0.02, KERNELS, adam_learning_rate=1e-3)
    with pytest.raises(ValueError, match="needs them"):
        transform.update(params, transform.init(params))


@pytest.mark.parametrize("make", [scale_by_manifold_muon, lambda *a, **k: manifold_muon(0.02, *a, **k)])
def test_unknown_solver(make):
    kwargs = {} if make is scale_by_manifold_muon else {"adam_learning_rate": 1e-3}
    with pytest.raises(ValueError, match="unknown solver .newton.: choose gram or dual_ascent, or pass"):
        make(KERNELS, solver="newton", **kwargs)


def test_solver_of_the_wrong_type():
    with pytest.raises(TypeError, match="solver must be a name or a Solver such as GramSolver"):
        scale_by_manifold_muon(KERNELS, solver=None)


def test_an_assignments_name_in_place_of_it():
    with pytest.raises(TypeError, match="an assignment maps patterns to manifolds.*; got 'hetero'"):
        manifold_muon(0.02, "hetero", adam_learning_rate=1e-3).init(PARAMS)


def test_integer_weights():
    with pytest.raises(TypeError, match="kernel has int32 entries and is assigned to Stiefel"):
        project_params({"kernel": jnp.arange(9).reshape(3, 3)}, KERNELS)


def test_errors_come_from_abstract_parameters_too():
    structs = jax.eval_shape(lambda: PARAMS)
    with pytest.raises(ValueError, match="matches no parameter"):
        jax.eval_shape(retract({"conv*": Stiefel()}).init, structs)


def test_a_wrong_momentum_state_is_not_silent():
    """A checkpoint of other parameters does not train."""
    transform = scale_by_manifold_muon(KERNELS)
    state = transform.init({"kernel": jnp.eye(3)})
    other = {"kernel": jnp.eye(4)}
    with pytest.raises((TypeError, ValueError)):
        transform.update(other, state, other)


def test_learning_rate_is_relative_to_the_radius():
    """Documented in manifold_muon: the rate is the spectral norm of a step relative to the radius."""
    g = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    params = project_params({"kernel": g}, {"*": Stiefel("spectral")})
    transform = optax.chain(
        scale_by_manifold_muon({"*": Stiefel("spectral")}), optax.scale_by_learning_rate(0.1)
    )
    updates, _ = transform.update({"kernel": jnp.cos(5 * g)}, transform.init(params), params)
    assert np.linalg.norm(updates["kernel"], 2) == pytest.approx(0.1 * 2.0, rel=1e-3)
