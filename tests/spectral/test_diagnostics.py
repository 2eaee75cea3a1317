"""Norms against their targets and the geometry of layer inputs, against NumPy's float64 SVD."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from spectral import alignment, condition_report, norm_ratios, null_space_share, singular_shares

HEADS = MuonDimensionNumbers((0, 1), 2)
PAIR = MuonDimensionNumbers(-2, -1)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {
    "attn": {"kernel": normal(0, 2, 3, 4)},
    "mlp": {"kernel": normal(1, 3, 8, 4), "bias": normal(2, 4)},
    "wte": {"embedding": normal(3, 10, 4)},
}
DIMENSIONS = {"attn/*": HEADS, "mlp/*": PAIR}


def expected_ratios(params):
    attn = np.linalg.norm(params["attn"]["kernel"].reshape(6, 4).astype(np.float64), 2) / np.sqrt(4 / 6)
    mlp = np.linalg.norm(params["mlp"]["kernel"].astype(np.float64), 2, axis=(1, 2)) / np.sqrt(4 / 8)
    rows = np.linalg.norm(params["wte"]["embedding"].astype(np.float64), axis=1).max() / np.sqrt(4)
    return {"attn/kernel": [attn], "mlp/kernel": mlp, "wte/embedding": [rows]}


def test_norm_ratios():
    measure = jax.jit(lambda params: norm_ratios(params, "*kernel", DIMENSIONS, embeddings="*embedding"))
    expected = expected_ratios(PARAMS)
    found = measure(PARAMS)
    assert found.keys() == expected.keys()
    for name, ratio in found.items():
        np.testing.assert_allclose(ratio, expected[name], rtol=1e-5)
    estimate = norm_ratios(PARAMS, "*kernel", DIMENSIONS, iterations=50)
    assert "wte/embedding" not in estimate
    np.testing.assert_allclose(estimate["mlp/kernel"], expected["mlp/kernel"], rtol=1e-2)


@pytest.mark.parametrize("given", ["updates", "previous", "nothing"])
def test_condition_report(given):
    updates = jax.tree.map(lambda x: 0.1 * x, PARAMS)
    previous = jax.tree.map(lambda x: 0.9 * x, PARAMS)
    options = {"updates": {"updates": updates}, "previous": {"previous": previous}, "nothing": {}}[given]
    report = condition_report(PARAMS, **options, dimension_numbers=DIMENSIONS, embeddings="*embedding")
    expected = expected_ratios(PARAMS)
    assert [row.path for row in report.rows] == ["attn/kernel", "mlp/kernel", "wte/embedding"]
    assert [row.target for row in report.rows] == pytest.approx([np.sqrt(4 / 6), np.sqrt(4 / 8), 2.0])
    for row in report.rows:
        ratio = np.max(expected[row.path])
        assert row.ratio == pytest.approx(ratio, rel=1e-4)
        assert row.norm == pytest.approx(ratio * row.target, rel=1e-4)
        if given == "nothing":
            assert np.isnan(row.update_norm) and np.isnan(row.update_ratio)
        else:
            assert row.update_ratio == pytest.approx(0.1 * ratio, rel=1e-3)
            assert row.update_norm == pytest.approx(0.1 * row.norm, rel=1e-3)
    table = str(report).splitlines()
    assert len(table) == 4 and len({len(line) for line in table}) == 1
    assert table[1].split()[0] == "attn/kernel" and f"{report.rows[0].ratio:.4g}" in table[1]


def test_a_report_takes_updates_or_previous_params():
    with pytest.raises(ValueError, match="not both"):
        condition_report(PARAMS, PARAMS, previous=PARAMS)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (5, 5)], ids=str)
def test_layer_geometry(shape):
    kernel, x = normal(4, *shape), normal(5, 2, 7, shape[0])
    x[0, 0] = 0
    w, inputs = kernel.astype(np.float64).T, x.astype(np.float64)
    _, s, vt = np.linalg.svd(w, full_matrices=True)
    rank, along = min(shape), inputs @ vt.T
    squares = np.sum(inputs**2, axis=-1)
    safe = np.where(squares == 0, 1, squares)
    np.testing.assert_allclose(
        alignment(kernel, x), np.linalg.norm(inputs @ w.T, axis=-1) / (s[0] * np.sqrt(safe)), atol=1e-5
    )
    np.testing.assert_allclose(
        null_space_share(kernel, x), np.sum(along[..., rank:] ** 2, axis=-1) / safe, atol=1e-5
    )
    shares = np.sum(along[..., :rank].reshape(-1, rank) ** 2, axis=0) / squares.sum()
    np.testing.assert_allclose(singular_shares(kernel, x), shares, atol=1e-5)


def test_inputs_along_singular_vectors():
    kernel = normal(6, 12, 5)
    u, s, _ = np.linalg.svd(kernel, full_matrices=True)
    x = np.stack([u[:, 0], u[:, 1], u[:, -1]])
    np.testing.assert_allclose(alignment(kernel, x), [1, s[1] / s[0], 0], atol=1e-5)
    np.testing.assert_allclose(null_space_share(kernel, x), [0, 0, 1], atol=1e-5)
    # Directions whose singular values count as zero belong to the null space.
    np.testing.assert_allclose(null_space_share(kernel, x, rtol=0.999), [0, 1, 1], atol=1e-5)
    np.testing.assert_allclose(null_space_share(0 * kernel, x), 1, atol=1e-5)


def test_random_inputs_lie_mostly_in_the_null_space():
    share = null_space_share(normal(7, 64, 8), normal(8, 400, 64))
    assert np.mean(share) == pytest.approx(1 - 8 / 64, abs=0.01)


def test_several_input_axes():
    kernel, x = normal(9, 2, 3, 4), normal(10, 5, 2, 3)
    found = alignment(kernel, x, HEADS)
    np.testing.assert_allclose(found, alignment(kernel.reshape(6, 4), x.reshape(5, 6)), rtol=1e-5)


def test_what_does_not_fit():
    with pytest.raises(ValueError, match="a stack of 3 matrices"):
        alignment(normal(0, 3, 4, 5), normal(1, 4))
    with pytest.raises(ValueError, match="do not fit a kernel with fan_in 4"):
        alignment(jnp.ones((4, 5)), jnp.ones((2, 5)))
