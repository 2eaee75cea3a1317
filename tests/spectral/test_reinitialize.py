"""Initial values of whole trees: norms measured with NumPy, by role, in every framework's tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from spectral import Role, decide, reinitialize
from spectral.paths import named_leaves
from tests.spectral.scaled_models import STACKED, equinox_like, nnx_state, ones, shapes

KEY = jax.random.key(0)
# Fan ratios 1/16 to 16, widths 64 to 4096.
FANS = [(64, 64), (64, 1024), (256, 64), (1024, 64), (256, 4096), (4096, 1024), (4096, 256), (4096, 4096)]


def spectral_norm(x: np.ndarray) -> float:
    """By power iteration on the smaller Gram side, started at random, to about 1 %."""
    x = x if x.shape[0] >= x.shape[1] else x.T
    v = np.random.default_rng(1).standard_normal(x.shape[1]).astype(x.dtype)
    for _ in range(20):
        v = (x @ v) @ x
        v /= np.linalg.norm(v)
    return float(np.linalg.norm(x @ v))


@pytest.mark.parametrize("fans", FANS, ids=str)
def test_gaussian_kernels_have_the_target_norm(fans):
    params = {"dense": {"kernel": jax.ShapeDtypeStruct(fans, jnp.float32)}}
    kernel = np.asarray(reinitialize(params, KEY)["dense"]["kernel"])
    assert spectral_norm(kernel) == pytest.approx(np.sqrt(fans[1] / fans[0]), rel=0.1)


@pytest.mark.parametrize("fans", [x for x in FANS if min(x) <= 256], ids=str)
def test_orthogonal_kernels_have_it_exactly(fans):
    params = {"dense": {"kernel": jax.ShapeDtypeStruct(fans, jnp.float32)}}
    kernel = np.asarray(reinitialize(params, KEY, kind="orthogonal")["dense"]["kernel"], np.float64)
    tall = kernel if fans[0] >= fans[1] else kernel.T
    singular_values = np.sqrt(np.linalg.eigvalsh(tall.T @ tall))
    np.testing.assert_allclose(singular_values, np.sqrt(fans[1] / fans[0]), rtol=1e-5)


@pytest.mark.parametrize("width", [64, 1024, 4096])
def test_embeddings_by_their_largest_row(width):
    params = {"embedding": jax.ShapeDtypeStruct((500, width), jnp.float32)}
    for kind, tolerance in (("gaussian", 0.35 if width < 1000 else 0.1), ("orthogonal", 1e-5)):
        rows = np.linalg.norm(reinitialize(params, KEY, kind=kind)["embedding"], axis=1)
        assert rows.max() == pytest.approx(np.sqrt(width), rel=tolerance)


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal"])
def test_every_role_of_a_stacked_tree(kind):
    params = reinitialize(ones(64), KEY, kind=kind, stacked=STACKED)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes(64)
    )
    leaves = dict(named_leaves(params))
    for path, decision in decide(params, stacked=STACKED).items():
        x = np.asarray(leaves[path], np.float64)
        if decision.role in (Role.MATRIX, Role.READOUT):
            norms = np.linalg.norm(x, 2, axis=(-2, -1))  # of each layer's own
            np.testing.assert_allclose(norms, np.sqrt(decision.fan_out / decision.fan_in), rtol=0.15)
        elif decision.role is Role.EMBEDDING:
            assert np.linalg.norm(x, axis=1).max() == pytest.approx(8.0, rel=0.35)
        else:
            np.testing.assert_array_equal(x, 1.0 if decision.role is Role.GAIN else 0.0)


def test_trees_keep_their_kind():
    for params in (equinox_like(16), nnx_state(16)):
        new = reinitialize(params, KEY)
        assert jax.tree.structure(new) == jax.tree.structure(params)
    model = reinitialize(equinox_like(64), KEY, kind="orthogonal")
    assert np.linalg.norm(model.layers[0].weight, 2) == pytest.approx(2.0, rel=1e-5)  # (out, in) = (256, 64)
    assert np.linalg.norm(model.layers[1].weight, 2) == pytest.approx(0.5, rel=1e-5)


def test_it_works_traced_and_on_shapes_alone():
    eager = reinitialize(ones(16), KEY, stacked=STACKED)

    @jax.jit
    def traced(params, key):
        return reinitialize(params, key, stacked=STACKED)

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), traced(ones(16), KEY), eager
    )
    assert jax.eval_shape(traced, shapes(4096), KEY)["h"]["up"]["kernel"].shape == (2, 4096, 16384)
    jax.tree.map(np.testing.assert_array_equal, reinitialize(shapes(16), KEY, stacked=STACKED), eager)


def test_dtypes_are_kept():
    params = {"a": {"kernel": jnp.ones((8, 8), jnp.bfloat16), "bias": jnp.ones(8, jnp.float16)}}
    for kind in ("gaussian", "orthogonal"):
        new = reinitialize(params, KEY, kind=kind)
        assert new["a"]["kernel"].dtype == jnp.bfloat16 and new["a"]["bias"].dtype == jnp.float16


def test_values_depend_on_key_and_path_alone():
    small = {"a": {"kernel": jnp.ones((8, 8))}}
    large = {"0": {"kernel": jnp.ones((8, 8))}, **small}
    new = reinitialize(large, KEY)
    np.testing.assert_array_equal(new["a"]["kernel"], reinitialize(small, KEY)["a"]["kernel"])
    assert np.abs(new["a"]["kernel"] - new["0"]["kernel"]).max() > 0.01
    other = reinitialize(large, jax.random.key(1))
    assert np.abs(new["a"]["kernel"] - other["a"]["kernel"]).max() > 0.01


def test_gain_and_simplified():
    params = ones(16)
    plain = reinitialize(params, KEY, stacked=STACKED)
    doubled = reinitialize(params, KEY, gain=2.0, stacked=STACKED)
    some = reinitialize(params, KEY, gain={"h/down/*": 0.25}, stacked=STACKED)
    for path, x in named_leaves(plain):
        is_vector = path.endswith(("bias", "scale"))
        np.testing.assert_allclose(dict(named_leaves(doubled))[path], x if is_vector else 2 * x, rtol=1e-6)
        expected = 0.25 * x if path == "h/down/kernel" else x
        np.testing.assert_allclose(dict(named_leaves(some))[path], expected, rtol=1e-6)
    simplified = reinitialize(params, KEY, simplified=True, stacked=STACKED)
    ratio = simplified["h"]["up"]["kernel"] / plain["h"]["up"]["kernel"]
    np.testing.assert_allclose(ratio, 1 / 4 / (2 / (4 + 8)), rtol=1e-5)  # fans (16, 64)


def test_embeddings_of_any_layout():
    """(features, vocabulary), with orthogonal rows' norms exact along the declared axis."""
    params = {"wte": jnp.ones((4, 9))}
    new = reinitialize(params, KEY, kind="orthogonal", dimension_numbers={"wte": MuonDimensionNumbers(1, 0)})
    np.testing.assert_allclose(np.linalg.norm(new["wte"], axis=0), 2.0, rtol=1e-6)


def test_errors():
    with pytest.raises(ValueError, match="unknown kind 'uniform': choose gaussian or orthogonal"):
        reinitialize(ones(4), KEY, kind="uniform", stacked=STACKED)
    with pytest.raises(ValueError, match="simplified is a choice of sigma"):
        reinitialize(ones(4), KEY, kind="orthogonal", simplified=True, stacked=STACKED)
    with pytest.raises(ValueError, match="pattern of gain 'mlp' matches no parameter"):
        reinitialize(ones(4), KEY, gain={"mlp": 2.0}, stacked=STACKED)
    with pytest.raises(ValueError, match="cannot tell which axes of h/attn/kernel"):
        reinitialize(ones(4), KEY)
