"""A run's optimizer: which parameter gets what, and at which rate."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.config import Model, Optimizer, Run, Sel
from experiments.errors import InputError
from experiments.model import init_params
from experiments.optimizers import (
    constraint_violations,
    learning_rate_schedule,
    make_optimizer,
    manifolds,
    prepare_params,
    solver_diagnostics,
)
from manifold_muon import DGram, Stiefel, Unconstrained
from spectral.paths import named_leaves

RUN = Run(
    model=Model(vocab_size=11, context=8, layers=2, heads=2, width=8, bias=True, tied=False),
    optimizer=Optimizer(warmup_steps=4, solver_iterations=3),
    steps=20,
)
MATRICES = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")


def first_update(run: Run, scale: float = 1e-3):
    """(params, updates) of the first step, on a gradient that is the parameters' own, shifted and scaled."""
    params = prepare_params(init_params(run.model, jax.random.key(0)), run)
    gradient = jax.tree.map(lambda x: scale * (x + 1), params)
    optimizer = make_optimizer(run)
    return params, optimizer.update(gradient, optimizer.init(params), params)[0]


def test_schedule_in_closed_form() -> None:
    schedule = learning_rate_schedule(RUN)
    for step in range(RUN.steps + 1):
        warm = (step + 1) / 5
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 16)) / 2
        np.testing.assert_allclose(schedule(step), 6e-4 * (warm if step < 4 else cosine), rtol=1e-5)
    np.testing.assert_allclose(learning_rate_schedule(RUN, 0.02)(4), 0.02, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "attention", "mlp"),
    [
        ("adamw", Unconstrained(), Unconstrained()),
        ("none", Unconstrained(), Unconstrained()),
        ("hetero", Stiefel(), DGram(retraction="frame")),
        ("hetero-inv", DGram(retraction="frame"), Stiefel()),
    ],
)
def test_manifolds_of_a_name(name: str, attention, mlp) -> None:
    assert list(manifolds(RUN.with_optimizer(name)).values()) == [attention, mlp]


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="unknown assignment 'sphere': choose one of none, .*adamw"):
        make_optimizer(RUN.with_optimizer("sphere"))


def test_dgram_retraction_is_the_configurations() -> None:
    faithful = RUN.with_solver("dual_ascent").with_optimizer("dgram")
    assert set(manifolds(faithful).values()) == {DGram(retraction="svd")}


@pytest.mark.parametrize("name", ["stiefel", "dgram", "oblique", "hetero", "hetero-inv"])
def test_matrices_start_and_stay_on_their_manifolds(name: str) -> None:
    run = RUN.with_optimizer(name)
    params, updates = first_update(run)
    for tree in (params, optax.apply_updates(params, updates)):
        found = constraint_violations(tree, run)
        assert set(found) == set(MATRICES)
        for violation in found.values():
            assert violation.shape == (2,)
            assert violation.max() < 1e-5


def test_solver_is_the_configurations() -> None:
    """The gram solver stops at the configured gap; dual ascent makes all its iterations and knows no gap."""

    def diagnostics(run: Run) -> dict[str, dict[str, np.ndarray]]:
        params = prepare_params(init_params(run.model, jax.random.key(0)), run)
        noise = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
        gradient = jax.tree.map(lambda x: 1e-3 * jax.random.normal(next(noise), x.shape), params)
        optimizer = make_optimizer(run)
        _, state = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
        return jax.device_get(solver_diagnostics(state))

    ours = replace(RUN, optimizer=replace(RUN.optimizer, name="dgram", tolerance=0.03))
    found = diagnostics(ours)
    assert set(found) == set(MATRICES)
    for matrix in found.values():
        assert matrix["iterations"].shape == matrix["gap"].shape == (2,)
        assert np.all(matrix["gap"] <= 0.03) and np.all(matrix["iterations"] < 20)
    for matrix in diagnostics(ours.with_solver("dual_ascent")).values():
        np.testing.assert_array_equal(matrix["iterations"], [3, 3])
        assert np.isnan(matrix["gap"]).all()


@pytest.mark.parametrize("solver", ["gram", "dual_ascent"])
def test_nothing_in_the_state_is_empty(solver: str) -> None:
    """Orbax refuses to save an array without entries."""
    run = RUN.with_optimizer("hetero").with_solver(solver)
    state = jax.eval_shape(make_optimizer(run).init, init_params(run.model, jax.random.key(0)))
    assert all(leaf.size for leaf in jax.tree.leaves(state))


def test_adamw_has_no_solver() -> None:
    run = RUN.with_optimizer("adamw")
    assert solver_diagnostics(make_optimizer(run).init(init_params(run.model, jax.random.key(0)))) == {}


def test_adamw_start_is_untouched() -> None:
    params = init_params(RUN.model, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, prepare_params(params, RUN.with_optimizer("adamw")), params)


@pytest.mark.parametrize("name", ["adamw", "none", "hetero"])
def test_decay_is_for_matrices_without_a_manifold(name: str) -> None:
    """With weight decay off, the updates that change are those of matrices that no manifold bounds."""
    run = RUN.with_optimizer(name)
    off = replace(run, optimizer=replace(run.optimizer, weight_decay=0.0))
    (_, decayed), (_, plain) = first_update(run), first_update(off)
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), decayed, plain)
    assert changed["wte"]["embedding"] and changed["wpe"]["embedding"] and changed["lm_head"]["kernel"]
    assert (
        not changed["ln_f"]["scale"]
        and not changed["h"]["ln_1"]["scale"]
        and not changed["h"]["ln_1"]["bias"]
    )
    for matrix in MATRICES:
        module, layer = matrix.split("/")
        assert changed["h"][module][layer]["kernel"] == (name != "hetero"), matrix
        assert not changed["h"][module][layer]["bias"], matrix


def test_gradients_are_clipped_to_norm_1() -> None:
    """Dual ascent depends on the gradient's scale; with clipping, twice a large gradient is the same step."""
    (_, once), (_, twice) = first_update(RUN, 10.0), first_update(RUN, 20.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), once, twice)


def test_rates_of_the_first_step() -> None:
    """Muon's step has a spectral norm of its rate, AdamW's an entry size of its rate; both fifths here."""
    run = replace(RUN, optimizer=replace(RUN.optimizer, name="none", weight_decay=0.0))
    _, updates = first_update(run)
    norms = jnp.linalg.norm(updates["h"]["mlp"]["c_fc"]["kernel"], ord=2, axis=(-2, -1))
    # Directions have spectral norm 1 to the solver's 2e-3.
    np.testing.assert_allclose(norms, 0.02 / 5, rtol=2e-3)
    np.testing.assert_allclose(jnp.abs(updates["wte"]["embedding"]), 6e-4 / 5, rtol=1e-2)


def compiled_update(run: Run):
    """`first_update` as one program."""
    return jax.jit(lambda: first_update(run))()


def spectral(run: Run, **model) -> Run:
    return replace(run, model=replace(run.model, parametrization="spectral", **model))


@pytest.mark.parametrize("name", ["adamw", "sgd", "none"])
def test_spectral_is_standard_at_the_base(name: str) -> None:
    run = RUN.with_optimizer(name)
    params = init_params(run.model, jax.random.key(0))
    updates = []
    for each in (run, spectral(run, base_width=8, base_heads=2)):
        optimizer = make_optimizer(each)

        @jax.jit
        def two_updates(params, optimizer=optimizer):
            state = optimizer.init(params)
            for scale in (1.0, 0.3):
                gradient = jax.tree.map(lambda x: scale * (x + 1), params)  # noqa: B023
                moved, state = optimizer.update(gradient, state, params)
            return moved

        updates.append(two_updates(params))
    # Muon's matrix signs are in other stacks, so equal to their rounding.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-7), *updates)


@pytest.mark.parametrize(
    ("name", "matrix", "readout", "embedding", "vector"),
    [("adamw", 1 / 4, 1 / 4, 1, 1), ("sgd", 1, 1 / 4, 4, 4), ("none", 1, 1 / 4, 1, 1)],
)
def test_rates_at_four_times_the_base(name, matrix, readout, embedding, vector) -> None:
    """Against the same gradients at the base width itself; no decay, a loose clip."""
    settings = replace(RUN.optimizer, name=name, weight_decay=0.0, clip_norm=1e9)
    wide = spectral(replace(RUN, optimizer=settings), width=32, base_width=8, base_heads=2)
    (_, updates), (_, same) = (
        compiled_update(wide),
        compiled_update(replace(wide, model=replace(wide.model, base_width=32))),
    )
    found = jax.tree.map(lambda a, b: float(jnp.linalg.norm(a) / jnp.linalg.norm(b)), updates, same)
    expected = {"kernel": matrix, "embedding": embedding, "scale": vector, "bias": vector}
    for path, ratio in named_leaves(found):
        factor = readout if path == "lm_head/kernel" else expected[path.split("/")[-1]]
        np.testing.assert_allclose(ratio, factor, rtol=1e-3, err_msg=path)


@pytest.mark.parametrize("name", ["adamw", "sgd", "none"])
def test_spectral_decay_has_the_rate_alone(name: str) -> None:
    run = spectral(RUN.with_optimizer(name), width=32, base_width=8, base_heads=2)
    off = replace(run, optimizer=replace(run.optimizer, weight_decay=0.0))
    (params, decayed), (_, plain) = compiled_update(run), compiled_update(off)
    # Their multipliers are 1/4 and 1/4 under Adam, 1 and 4 (the embedding) under SGD.
    for path, leaf in named_leaves(params):
        if path.endswith("bias") or path.endswith("scale"):
            continue
        rate = 0.02 if name == "none" and path.startswith("h/") else 6e-4
        found = (dict(named_leaves(decayed))[path] - dict(named_leaves(plain))[path]) / (rate / 5)
        np.testing.assert_allclose(found, -0.1 * leaf, rtol=1e-2, atol=1e-3 * jnp.abs(leaf).max())


def test_spectral_muons_solver_is_the_configurations() -> None:
    settings = replace(RUN.optimizer, name="none", solver="dual_ascent", msign_steps=1)
    run = spectral(replace(RUN, optimizer=settings), base_width=8, base_heads=2)
    (_, crude), (_, exact) = (
        compiled_update(replace(run, optimizer=replace(settings, msign_steps=steps))) for steps in (1, 10)
    )
    matrices = [updates["h"]["mlp"]["c_fc"]["kernel"] for updates in (crude, exact)]
    assert float(jnp.abs(matrices[0] - matrices[1]).max()) > 1e-4


def under_sel(name: str = "adamw", **settings) -> Run:
    return replace(RUN.with_optimizer(name), sel=Sel(on=True, **settings))


def sel_params(run: Run):
    return jax.jit(lambda: prepare_params(init_params(RUN.model, jax.random.key(0)), run))()


def sel_updates(run: Run):
    return jax.jit(lambda: first_update(run)[1])()


def test_sel_is_for_the_blocks_matrices() -> None:
    params = sel_params(under_sel(curvature=0.5))
    raw = [name for name, _ in named_leaves(params) if name.endswith("/raw")]
    assert raw == [f"h/{matrix}/kernel/raw" for matrix in MATRICES]
    # Each is curved at its own entries' size: the projections' are smaller by sqrt(2 * layers).
    stds = {"c_fc": 0.02, "c_proj": 0.01}
    for name in stds:
        assert params["h"]["mlp"][name]["kernel"].config.beta == pytest.approx(0.5 / stds[name])


@pytest.mark.parametrize(
    ("settings", "learnt", "exact"),
    [
        ({}, "elmn", False),
        ({"start": "congruent"}, "elmn", True),
        ({"linear": False}, "emn", True),  # the rules differ in the linear path alone
        ({"learnable": False}, "", False),
    ],
    ids=["whole", "congruent", "no linear path", "fixed scales"],
)
def test_ablations_of_sel(settings: dict, learnt: str, exact: bool) -> None:
    drawn = init_params(RUN.model, jax.random.key(0))
    params = sel_params(under_sel(**settings))
    kernel, before = params["h"]["mlp"]["c_fc"]["kernel"], drawn["h"]["mlp"]["c_fc"]["kernel"]
    assert sorted(kernel.scales) == list(learnt)
    assert kernel.config.l == (0.0 if "linear" in settings else 1.0)
    after = kernel.effective()
    np.testing.assert_allclose(after[before > 0], before[before > 0], rtol=1e-4)
    if exact:
        np.testing.assert_allclose(after, before, rtol=1e-4)
    else:  # negative weights start smaller than drawn
        assert np.all(after[before < 0] > 0.99 * before[before < 0])


def test_decay_is_not_for_scales() -> None:
    run = under_sel()
    off = replace(run, optimizer=replace(run.optimizer, weight_decay=0.0))
    decayed, plain = sel_updates(run), dict(named_leaves(sel_updates(off)))
    # Decay adds 1e-6 to a typical entry, rounding 1e-11.
    changed = {name for name, leaf in named_leaves(decayed) if jnp.abs(leaf - plain[name]).max() > 1e-8}
    assert changed == {
        "wte/embedding",
        "wpe/embedding",
        "lm_head/kernel",
        *(f"h/{matrix}/kernel/raw" for matrix in MATRICES),
    }


def test_rates_of_scales() -> None:
    """Adam's first step has the size of the rate, a fifth of the peak, times the scale's multiplier."""
    updates = sel_updates(under_sel(e_first=3.0, m_first=0.5))
    for scale, multiplier in {"e": 3.0, "l": 1.0, "m": 0.5, "n": 1.0}.items():
        for factor in updates["h"]["mlp"]["c_fc"]["kernel"].scales[scale]:
            np.testing.assert_allclose(jnp.abs(factor), multiplier * 6e-4 / 5, rtol=1e-2, err_msg=scale)
    fixed = sel_updates(under_sel(annealed=False, e_first=3.0))
    for factor in jax.tree.leaves(fixed["h"]["mlp"]["c_fc"]["kernel"].scales):
        np.testing.assert_allclose(jnp.abs(factor), 6e-4 / 5, rtol=1e-2)


def test_muon_takes_the_raw_weights() -> None:
    run = under_sel("none")
    updates = sel_updates(replace(run, optimizer=replace(run.optimizer, weight_decay=0.0)))
    norms = jnp.linalg.norm(updates["h"]["mlp"]["c_fc"]["kernel"].raw, ord=2, axis=(-2, -1))
    np.testing.assert_allclose(norms, 0.02 / 5, rtol=2e-3)
    state = jax.eval_shape(make_optimizer(run).init, sel_params(run))
    assert set(solver_diagnostics(state)) == set(MATRICES)
