"""Updates and weights held to a spectral norm, against NumPy's float64 SVD."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from spectral import (
    SpectralNormState,
    clip_by_spectral_norm,
    clip_weights,
    normalize_update,
    normalize_weights,
)
from spectral.dimensions import fans, to_matrices

HEADS = MuonDimensionNumbers((1,), (0, 2))
SHAPES = {"a/kernel": (12, 8), "stack/kernel": (3, 6, 10), "heads/kernel": (2, 8, 4), "bias": (8,)}
DIMENSIONS = {"heads/*": HEADS, "*kernel": MuonDimensionNumbers(-2, -1)}
EXACT = dict(tolerance=1e-7, max_iterations=400)
TRANSFORMS = {"normalize_update": normalize_update, "normalize_weights": normalize_weights}


def random_tree(seed, dtype=np.float32, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray((scale * rng.normal(size=shape)).astype(dtype)) for name, shape in SHAPES.items()
    }


def norms(x, spec=DIMENSIONS["*kernel"]):
    """(spectral norms, their target)."""
    fan_in, fan_out = fans(x.shape, spec)
    matrices = np.asarray(to_matrices(jnp.asarray(x, jnp.float32), spec), np.float64)
    return np.linalg.norm(matrices, 2, axis=(-2, -1)), np.sqrt(fan_out / fan_in)


def relative(tree):
    """Spectral norms over their targets, for every matrix of a tree like SHAPES."""
    found = {
        name: norms(x, HEADS if "heads" in name else DIMENSIONS["*kernel"])
        for name, x in tree.items()
        if name.endswith("kernel")
    }
    return {name: norm / target for name, (norm, target) in found.items()}


def one_step(transform, updates, params=None):
    state = transform.init(updates if params is None else params)
    return jax.jit(transform.update)(updates, state, params)


PARAMS = random_tree(0, scale=0.1)
UPDATES = [random_tree(seed) for seed in (1, 2, 3)]


# ---------------------------------------------------------------------------- one step


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_every_matrix_gets_its_target(scale):
    updates = random_tree(1, scale=scale)
    found, state = one_step(normalize_update("*kernel", 0.5, DIMENSIONS, **EXACT), updates)
    for name, ratio in relative(found).items():
        np.testing.assert_allclose(ratio, 0.5, rtol=1e-4, err_msg=name)
        along = np.sum(np.asarray(found[name], np.float64) * np.asarray(updates[name], np.float64) / scale)
        sizes = np.linalg.norm(found[name]) * np.linalg.norm(np.asarray(updates[name], np.float64) / scale)
        if found[name].ndim == 2:
            np.testing.assert_allclose(along, sizes, rtol=1e-5)
    np.testing.assert_array_equal(found["bias"], updates["bias"])
    assert state.norms["stack/kernel"].shape == (3, 1, 1)
    assert state.vectors["heads/kernel"].shape == (1, 8, 1)
    expected, _ = norms(updates["stack/kernel"] / np.float32(scale))
    np.testing.assert_allclose(state.norms["stack/kernel"].ravel() / np.float32(scale), expected, rtol=1e-4)


def test_zero_updates_stay_zero_and_the_next_step_is_right():
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    transform = normalize_update("*kernel", 1.0, DIMENSIONS, **EXACT)
    found, state = one_step(transform, zeros)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0.0), found)
    # Of one matrix of a stack, too.
    mixed = {**UPDATES[0], "stack/kernel": UPDATES[0]["stack/kernel"].at[1].set(0)}
    found, _ = jax.jit(transform.update)(mixed, state)
    ratios = relative(found)
    np.testing.assert_allclose(ratios["stack/kernel"], [1, 0, 1], rtol=1e-4)
    np.testing.assert_allclose(ratios["heads/kernel"], 1, rtol=1e-4)


def test_a_step_orthogonal_to_all_before():
    """As when other rows of a kernel come alive: the kept vectors are in its null space."""
    x = np.random.default_rng(5).normal(size=(8, 6)).astype(np.float32)
    first, second = x.copy(), x.copy()
    first[4:], second[:4] = 0, 0
    transform = normalize_update("*")
    update = jax.jit(transform.update)
    _, state = update({"w": first}, transform.init({"w": first}))
    found, _ = update({"w": second}, state)
    np.testing.assert_allclose(*norms(found["w"]), rtol=0.01)


def test_a_step_of_nan_does_not_spoil_the_next():
    transform = normalize_update("*kernel", 1.0, DIMENSIONS, **EXACT)
    update = jax.jit(transform.update)
    _, state = update(jax.tree.map(lambda x: x * jnp.nan, PARAMS), transform.init(PARAMS))
    found, _ = update(UPDATES[0], state)
    for ratio in relative(found).values():
        np.testing.assert_allclose(ratio, 1, rtol=1e-4)


def test_columns_that_sum_to_zero():
    x = np.random.default_rng(6).normal(size=(6, 4)).astype(np.float32)
    x -= x.mean(axis=0)
    found, _ = one_step(normalize_update("*"), {"w": jnp.asarray(x)})
    np.testing.assert_allclose(*norms(found["w"]), rtol=0.01)


def test_narrow_dtypes():
    updates = random_tree(1, jnp.bfloat16)
    found, state = one_step(normalize_update("*kernel", 1.0, DIMENSIONS), updates)
    for name, ratio in relative(found).items():
        assert found[name].dtype == jnp.bfloat16 and state.vectors[name].dtype == jnp.float32
        np.testing.assert_allclose(ratio, 1, rtol=0.02)


def test_clipping_only_shrinks():
    transform = clip_by_spectral_norm(4.0, "*kernel", DIMENSIONS, **EXACT)
    small, large = random_tree(1, scale=0.1), random_tree(1)
    large["stack/kernel"] = large["stack/kernel"].at[0].multiply(0.01)
    found, _ = one_step(transform, small)
    jax.tree.map(np.testing.assert_array_equal, found, small)
    found, _ = one_step(transform, large)
    for name in ("a/kernel", "stack/kernel", "heads/kernel"):
        spec = HEADS if "heads" in name else DIMENSIONS["*kernel"]
        expected = np.minimum(norms(large[name], spec)[0], 4.0)
        np.testing.assert_allclose(norms(found[name], spec)[0], expected, rtol=1e-4)
    np.testing.assert_array_equal(found["stack/kernel"][0], large["stack/kernel"][0])


def test_clipping_in_units_of_the_target():
    found, _ = one_step(clip_by_spectral_norm(0.3, "*kernel", DIMENSIONS, relative=True, **EXACT), UPDATES[0])
    for ratio in relative(found).values():
        np.testing.assert_allclose(ratio, 0.3, rtol=1e-4)


# ---------------------------------------------------------------------------- weights


def test_weights_end_at_their_target():
    transform = optax.chain(optax.adamw(1e-2), normalize_weights("*kernel", 0.7, DIMENSIONS, **EXACT))
    params, state = PARAMS, transform.init(PARAMS)
    for gradient in UPDATES:
        updates, state = jax.jit(transform.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
    for ratio in relative(params).values():
        np.testing.assert_allclose(ratio, 0.7, rtol=1e-4)
    with pytest.raises(ValueError, match="normalize_weights rescales weights and needs them"):
        normalize_weights("*kernel").update(UPDATES[0], state[-1])


def test_weights_below_the_bound_are_left_alone():
    small = jax.tree.map(lambda x: 1e-3 * x, UPDATES[0])
    transform = clip_weights("*kernel", 0.3, DIMENSIONS, **EXACT)
    params = {**PARAMS, "a/kernel": 1e-3 * PARAMS["a/kernel"]}
    moved = optax.apply_updates(params, one_step(transform, small, params)[0])
    before = relative(jax.tree.map(jnp.add, params, small))
    for name, ratio in relative(moved).items():
        np.testing.assert_allclose(ratio, np.minimum(before[name], 0.3), rtol=1e-4)
    assert before["a/kernel"] < 0.3 < before["heads/kernel"]


# ---------------------------------------------------------------------------- training


def optimizers():
    spec = DIMENSIONS["*kernel"]
    return {
        "sgd": optax.identity(),
        "adam": optax.scale_by_adam(),
        "muon": optax.contrib.muon(
            -1.0, muon_weight_dimension_numbers=lambda p: jax.tree.map(lambda _: spec, p)
        ),
    }


@pytest.mark.parametrize(
    ("name", "after", "error"), [("sgd", 5, 0.01), ("adam", 5, 0.01), ("muon", 30, 0.05)]
)
def test_accuracy_in_training(name, after, error):
    """A network learns to classify, with a fresh batch of 128 at every step."""
    sizes = (16, 96, 64, 8)
    layers = list(zip(sizes[:-1], sizes[1:], strict=True))

    def init(key):
        keys = jax.random.split(key, len(layers))
        return [
            jax.random.normal(k, shape) / np.sqrt(shape[0]) for k, shape in zip(keys, layers, strict=True)
        ]

    def forward(params, x):
        for kernel in params[:-1]:
            x = jax.nn.relu(x @ kernel)
        return x @ params[-1]

    teacher, params = init(jax.random.key(1)), init(jax.random.key(2))
    transform = optax.chain(optimizers()[name], normalize_update("*"))

    def loss(params, key):
        x = jax.random.normal(key, (128, sizes[0]))
        labels = jnp.argmax(forward(teacher, x), axis=-1)
        return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), labels).mean()

    @jax.jit
    def step(params, state, key):
        updates, state = transform.update(jax.grad(loss)(params, key), state, params)
        return jax.tree.map(lambda w, u: w - 0.02 * u, params, updates), state, updates

    state = transform.init(params)
    for index in range(after + 5):
        params, state, updates = step(params, state, jax.random.key(100 + index))
        if index >= after:
            for update in updates:
                norm, target = norms(update)
                assert (1 - 1e-4) * target <= norm <= (1 + error) * target
    assert int(state[-1].iterations) <= {"sgd": 10, "adam": 3, "muon": 20}[name]


def test_a_matrix_that_stays_takes_one_pair_a_step():
    transform = normalize_update("*kernel", 1.0, DIMENSIONS)
    update, state = jax.jit(transform.update), transform.init(PARAMS)
    counts = []
    for _ in range(12):
        found, state = update(UPDATES[0], state)
        counts.append(int(state.iterations))
    assert counts[0] > 1 and counts[-4:] == [1, 1, 1, 1]
    for ratio in relative(found).values():
        np.testing.assert_allclose(ratio, 1, rtol=1e-3)


def test_operations():
    """A pair is 4 m n, and the rest of a step a few m n: nothing beside a training step's 6 m n a token."""
    m, n, tokens = 768, 3072, 8192
    leaf = jax.ShapeDtypeStruct((m, n), jnp.float32)
    transform = normalize_update("*", max_iterations=1)
    state = jax.eval_shape(transform.init, [leaf])
    compiled = jax.jit(transform.update).lower([leaf], state).compile()
    # The loop's body, which never runs here, is counted once like the pair before it.
    per_pair = 4 * m * n
    assert compiled.cost_analysis()["flops"] <= 2 * per_pair + 8 * m * n
    assert 30 * per_pair + 8 * m * n <= 0.01 * 6 * m * n * tokens


# ---------------------------------------------------------------------------- devices


@pytest.mark.parametrize("which", TRANSFORMS)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_sharded(kind, which):
    """Every axis on some mesh axis; steps in a scan, whose carry must keep its layout."""
    shapes = {"a": (16, 8), "stack": (2, 8, 12), "heads": (4, 8, 4)}
    specs = {"a": P("x", "y"), "stack": P("y", "x"), "heads": P("x", None, "y")}
    dimensions = {"heads": HEADS, "*": DIMENSIONS["*kernel"]}
    rng = np.random.default_rng(7)
    trees = [{k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()} for _ in range(2)]
    transform = TRANSFORMS[which]("*", 1.0, dimensions)

    @jax.jit
    def run(params, gradient):
        def step(carry, _):
            params, state = carry
            updates, state = transform.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, transform.init(params)), None, length=2)[0]

    expected = run(*trees)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        put = [{k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in t.items()} for t in trees]
        found = run(*put)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, expected)
    assert found[0]["a"].sharding.is_equivalent_to(NamedSharding(mesh, specs["a"]), 2)


def test_shard_map_and_vmap():
    transform = normalize_update("*")
    x = np.random.default_rng(8).normal(size=(8, 2, 6, 4)).astype(np.float32)
    update = lambda x: transform.update([x], transform.init([x]))[0][0]  # noqa: E731
    expected = np.stack([jax.jit(update)(part) for part in x])
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    found = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(x.reshape(16, 6, 4))
    np.testing.assert_allclose(found.reshape(x.shape), expected, rtol=1e-3)
    np.testing.assert_allclose(jax.jit(jax.vmap(update))(x), expected, rtol=1e-3)


# ---------------------------------------------------------------------------- optax and Flax


def test_map_params():
    transform = normalize_update("*kernel", 1.0, DIMENSIONS)
    state = transform.init(PARAMS)
    marked = optax.tree.map_params(transform, lambda x: x + 1, state, transform_non_params=lambda x: x - 1)
    assert isinstance(marked, SpectralNormState) and int(marked.iterations) == -1
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 1.0), (marked.vectors, marked.norms))


def test_inject_hyperparams_and_masked_and_none():
    injected = optax.inject_hyperparams(normalize_update)("*kernel", 0.5, DIMENSIONS, **EXACT)
    params = {**PARAMS, "frozen": None}
    found, state = one_step(injected, {**UPDATES[0], "frozen": None}, params)
    assert "scale" in state.hyperparams
    for ratio in relative({k: v for k, v in found.items() if v is not None}).values():
        np.testing.assert_allclose(ratio, 0.5, rtol=1e-4)
    masked = optax.masked(normalize_update("*"), {name: name == "a/kernel" for name in SHAPES})
    found, _ = one_step(masked, UPDATES[0])
    np.testing.assert_allclose(*norms(found["a/kernel"]), rtol=0.01)
    np.testing.assert_array_equal(found["heads/kernel"], UPDATES[0]["heads/kernel"])


def test_nnx_optimizer():
    model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    before = model.kernel[...]
    tx = optax.chain(optax.scale_by_adam(), normalize_update("*kernel"), optax.scale(-0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        x = jnp.arange(12.0).reshape(2, 6)
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(jnp.sin(m(x))))(model))

    step(model, optimizer)
    norm, target = norms(model.kernel[...] - before)
    np.testing.assert_allclose(norm, 0.1 * target, rtol=0.01)
    step(model, optimizer)


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"bias has shape \(8,\) and is no matrix: narrow the pattern"):
        normalize_update("*").init(PARAMS)
    with pytest.raises(ValueError, match="pattern '\\*weight' matches no parameter"):
        normalize_update(["*kernel", "*weight"]).init(PARAMS)
    with pytest.raises(ValueError, match="no pattern of dimension_numbers fits a/kernel"):
        normalize_update("*kernel", 1.0, {"heads/*": HEADS}).init(PARAMS)
    with pytest.raises(ValueError, match="a/kernel: .* does not fit"):
        normalize_update("a/*", 1.0, HEADS).init(PARAMS)
    with pytest.raises(TypeError, match="int32 entries"):
        normalize_update("*").init({"w": jnp.zeros((2, 2), jnp.int32)})
    with pytest.raises(ValueError, match="max_iterations must be at least 1, got 0"):
        normalize_update("*", max_iterations=0)
