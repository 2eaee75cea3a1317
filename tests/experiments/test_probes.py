"""Probes against float64 NumPy that follows the definitions letter by letter."""

from functools import partial

import jax
import numpy as np
import pytest

from experiments.config import Model, Optimizer, Run, Sel
from experiments.model import GPT2, init_params
from experiments.optimizers import prepare_params
from experiments.probes import (
    MATRICES,
    attention_statistics,
    input_statistics,
    make_probe,
    make_size_probe,
    matrix_statistics,
    softmax_jacobian_norm,
)
from sel_jax import effective


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def attention_oracle(query, key):
    """Row by row: (B, T, H, K) -> the four numbers."""
    batch, length, heads, features = query.shape
    largest, entropies, saturated, jacobians = 0.0, [], [], []
    for b in range(batch):
        for h in range(heads):
            for t in range(1, length):
                logits = key[b, : t + 1, h] @ query[b, t, h] / np.sqrt(features)
                p = np.exp(logits - logits.max())
                p /= p.sum()
                largest = max(largest, np.abs(logits).max())
                entropies.append(-np.sum(p[p > 0] * np.log(p[p > 0])))
                saturated.append(p.max() > 0.99)
                jacobians.append(np.linalg.norm(np.diag(p) - np.outer(p, p)))
    return {
        "max_logit": largest,
        "entropy": np.mean(entropies),
        "saturated": np.mean(saturated),
        "jacobian": np.mean(jacobians),
    }


def test_attention_statistics(rng):
    # From nearly uniform attention to mostly saturated.
    scales = np.array([0.1, 1.0, 6.0]).reshape(3, 1, 1, 1, 1)
    query, key = (scales * rng.standard_normal((3, 2, 9, 2, 4)) for _ in range(2))
    statistics = jax.jit(partial(attention_statistics, scale=0.5))  # 1 / sqrt(4 features)
    found = jax.device_get(statistics(np.float32(query), np.float32(key)))
    for layer in range(3):
        expected = attention_oracle(query[layer], key[layer])
        for name, number in expected.items():
            np.testing.assert_allclose(
                found[name][layer], number, rtol=2e-5, err_msg=f"{name}, layer {layer}"
            )
    assert found["saturated"][0] == 0
    assert found["saturated"][2] > 0.5


@pytest.mark.parametrize("rest", [0.3, 1e-3, 1e-6, 1e-12, 0.0])
def test_jacobian_norm_keeps_its_digits_in_saturated_rows(rng, rest):
    others = np.float32(rng.dirichlet(np.ones(6)) * rest)
    p = np.insert(others, 2, np.float32(1 - rest))
    # In float64, with the largest probability's distance from 1 taken from the others.
    exact = np.float64(p)
    rest = np.float64(others).sum()
    exact[2] = 1 - rest
    jacobian = np.diag(exact) - np.outer(exact, exact)
    jacobian[2, 2] = exact[2] * rest
    np.testing.assert_allclose(softmax_jacobian_norm(p), np.linalg.norm(jacobian), rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 8, 24), (3, 24, 8), (2, 9, 9)])
def test_matrix_statistics(rng, shape):
    kernels = rng.standard_normal(shape)
    found = jax.device_get(jax.jit(matrix_statistics)(np.float32(kernels)))
    for layer, kernel in enumerate(kernels):
        weight = kernel.T  # The papers' W, (out, in).
        tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
        columns = tall.T
        n = len(columns)
        total = 0.0
        for i in range(n):
            for j in range(n):
                if i != j:
                    cosine = columns[i] @ columns[j] / np.linalg.norm(columns[i]) / np.linalg.norm(columns[j])
                    total += cosine**2
        sigma = np.sqrt(np.linalg.eigvalsh(tall.T @ tall))
        np.testing.assert_allclose(found["sigma_max"][layer], sigma[-1], rtol=1e-5)
        np.testing.assert_allclose(found["sigma_min"][layer], sigma[0], rtol=1e-4)
        np.testing.assert_allclose(found["gram_off_diagonal"][layer], np.sqrt(total) / n, rtol=1e-5)
        centred = kernel - kernel.mean()
        kurtosis = np.mean(centred**4) / np.mean(centred**2) ** 2
        np.testing.assert_allclose(found["kurtosis"][layer], kurtosis, rtol=1e-5)


def test_a_square_matrix_is_judged_by_the_columns_of_the_papers_w(rng):
    orthogonal, _ = np.linalg.qr(rng.standard_normal((6, 6)))
    weight = orthogonal * np.arange(
        1, 7
    )  # Orthogonal columns of different norms; its rows are not orthogonal.
    kernel = np.float32(weight.T)[None]
    assert matrix_statistics(kernel)["gram_off_diagonal"][0] < 1e-6
    assert matrix_statistics(np.swapaxes(kernel, 1, 2))["gram_off_diagonal"][0] > 0.1


def test_a_zero_column_gives_finite_numbers():
    kernel = np.ones((1, 4, 3), np.float32)
    kernel[..., 0] = 0
    assert np.isfinite(matrix_statistics(kernel)["gram_off_diagonal"]).all()


@pytest.mark.parametrize("shape", [(12, 4), (4, 12)])
def test_input_statistics(rng, shape):
    kernels, inputs = rng.standard_normal((2, *shape)), rng.standard_normal((2, 3, 5, shape[0]))
    inputs[1] = inputs[1] @ kernels[1] @ kernels[1].T  # none in its null space
    found = jax.device_get(jax.jit(input_statistics)(np.float32(kernels), np.float32(inputs)))
    for layer, (kernel, x) in enumerate(zip(kernels, inputs, strict=True)):
        norms = np.linalg.norm(x, axis=-1)
        ratio = np.linalg.norm(x @ kernel, axis=-1) / norms / np.linalg.norm(kernel, 2)
        np.testing.assert_allclose(found["alignment"][layer], ratio.mean(), rtol=1e-5)
        inside = x @ kernel @ np.linalg.pinv(kernel)  # projected on what the matrix sees
        share = 1 - (np.linalg.norm(inside, axis=-1) / norms) ** 2
        np.testing.assert_allclose(found["null_space"][layer], share.mean(), atol=1e-6)
    assert (found["null_space"][0] > 0.4) == (shape[0] > shape[1]) and found["null_space"][1] < 1e-6


def test_make_probe_sees_the_models_own_queries_and_keys(rng):
    config = Run(
        model=Model(context=8, layers=2, heads=2, width=16),
        optimizer=Optimizer(name="adamw", warmup_steps=2),
        steps=4,
        alignment=True,
    )
    params = jax.tree.map(lambda x: 10 * x, init_params(config.model, jax.random.key(0)))
    tokens = rng.integers(0, 256, (3, 8))
    found = jax.device_get(make_probe(config)(params, tokens))

    # The first layer by hand.
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = wide["wte"]["embedding"][tokens] + wide["wpe"]["embedding"]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.model.layer_norm_epsilon)
    x *= wide["h"]["ln_1"]["scale"][0]
    qkv = x @ wide["h"]["attn"]["c_attn"]["kernel"][0]
    query, key, _ = (part.reshape(3, 8, 2, 8) for part in np.split(qkv, 3, axis=-1))
    for name, number in attention_oracle(query, key).items():
        assert found["attention"][name].shape == (2,)
        np.testing.assert_allclose(found["attention"][name][0], number, rtol=1e-4, err_msg=name)
    _, sown = GPT2(config.model).apply({"params": params}, tokens, mutable=["probes"])
    hidden = np.asarray(sown["probes"]["h"]["mlp"]["c_proj_input"][0], np.float64)
    for layer, kernel in enumerate(wide["h"]["mlp"]["c_proj"]["kernel"]):
        ratio = np.linalg.norm(hidden[layer] @ kernel, axis=-1) / np.linalg.norm(hidden[layer], axis=-1)
        expected = (ratio / np.linalg.norm(kernel, 2)).mean()
        np.testing.assert_allclose(found["inputs"]["mlp/c_proj"]["alignment"][layer], expected, rtol=1e-4)

    assert set(found["weights"]) == set(MATRICES)
    for name, statistics in found["weights"].items():
        module, matrix = name.split("/")
        expected = np.linalg.svd(wide["h"][module][matrix]["kernel"], compute_uv=False)
        np.testing.assert_allclose(statistics["sigma_max"], expected[:, 0], rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(statistics["violation"], [0, 0], err_msg=name)


def test_sizes_are_of_the_effective_weights() -> None:
    config = Run(
        model=Model(context=8, layers=2, heads=2, width=16),
        optimizer=Optimizer(name="adamw", warmup_steps=2),
        sel=Sel(on=True),
        steps=4,
    )
    params = prepare_params(init_params(config.model, jax.random.key(0)), config)
    weights = effective(params)["h"]
    found = jax.device_get(make_size_probe(config)(params))
    assert set(found) == set(MATRICES)
    for name, sizes in found.items():
        module, matrix = name.split("/")
        drawn_with = 0.02 / 2 if matrix == "c_proj" else 0.02
        for layer, kernel in enumerate(np.asarray(weights[module][matrix]["kernel"], np.float64)):
            for quantile in (0.5, 0.9, 0.99, 0.999, 1):
                expected = np.quantile(np.abs(kernel), quantile) / drawn_with
                np.testing.assert_allclose(sizes[f"size_{quantile:g}"][layer], expected, rtol=1e-4)
    tokens = np.zeros((2, 8), np.int32)
    curved, plain = (make_probe(config)(tree, tokens) for tree in (params, effective(params)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), curved, plain)
