"""What a model looks like inside: statistics of its attention, and of its blocks' matrices.

Shapes in names: L layers, B sequences, T tokens, H heads, K features per head; a matrix is m x n.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.config import MATRICES, Run
from experiments.model import GPT2, attention_scale, initial_std
from experiments.optimizers import constraint_violations
from manifold_muon import DGram, to_tall
from sel_jax import effective
from spectral import alignment, null_space_share
from spectral.matrix_functions import svd

SATURATED = 0.99
"""A softmax row counts as saturated when its largest probability exceeds this."""

QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
"""Of the sizes of a matrix's entries."""

NARROWING = "mlp/c_proj"
"""The blocks' matrix with fan_out < fan_in, which has a null space."""

Probes = dict[str, dict[str, Any]]


def make_probe(config: Run) -> Callable[[Any, Array], Probes]:
    """A jitted function (params, tokens (B, T)) -> {"attention": ..., "weights": ...}, each number per layer.

    `attention` is `attention_statistics` of the model's own queries and keys. `weights` has, for every
    matrix of the blocks, `matrix_statistics` and the `violation` of its manifold's constraint (0 where
    it has none). Where the configuration asks for it, `inputs` has the `input_statistics` of `NARROWING`.
    Reparametrised params are taken at their effective weights.
    """

    def probe(params: Any, tokens_BxT: Array) -> Probes:
        params = effective(params)
        _, sown = GPT2(config.model).apply({"params": params}, tokens_BxT, mutable=["probes"])
        (query_LxBxTxHxK,), (key_LxBxTxHxK,) = (
            sown["probes"]["h"]["attn"][name] for name in ("query", "key")
        )
        violations = constraint_violations(params, config)
        weights = {}
        for name in MATRICES:
            weights[name] = {**matrix_statistics(_kernel(params, name)), "violation": violations[name]}
        attention = attention_statistics(query_LxBxTxHxK, key_LxBxTxHxK, attention_scale(config.model))
        found = {"attention": attention, "weights": weights}
        if config.alignment:
            (input_LxBxTxF,) = sown["probes"]["h"]["mlp"]["c_proj_input"]
            found["inputs"] = {NARROWING: input_statistics(_kernel(params, NARROWING), input_LxBxTxF)}
        return found

    return jax.jit(probe)


def _kernel(params: Any, name: str) -> Array:
    module, matrix = name.split("/")
    return params["h"][module][matrix]["kernel"]


def make_size_probe(config: Run) -> Callable[[Any], Probes]:
    """A jitted function of the params that gives, for every matrix of the blocks, its entries' sizes.

    Those are the `QUANTILES` of |W| over the standard deviation that its entries were drawn with, as
    `size_0.5` and so on, each number per layer. It sorts all entries: too slow for every evaluation.
    """

    def quantiles(kernel_IxO: Array) -> Array:
        return jnp.quantile(jnp.abs(kernel_IxO.astype(jnp.float32)), jnp.array(QUANTILES))

    def probe(params: Any) -> Probes:
        params, found = effective(params), {}
        for name in MATRICES:
            sizes_LxQ = jax.lax.map(quantiles, _kernel(params, name))
            relative = sizes_LxQ.T / initial_std(config.model, name)
            found[name] = {f"size_{q:g}": sizes for q, sizes in zip(QUANTILES, relative, strict=True)}
        return found

    return jax.jit(probe)


def attention_statistics(query_LxBxTxHxK: Array, key_LxBxTxHxK: Array, scale: float) -> dict[str, Array]:
    """Statistics of causal attention, one number per layer; position 0, which sees one key, is left out.

    Args:
      query_LxBxTxHxK: projected queries, T at least 2, before scaling.
      key_LxBxTxHxK: projected keys.
      scale: of their products (see `attention_scale`).

    Returns:
      `max_logit`, the largest absolute scaled logit that the mask lets through; `entropy`, the softmax
      rows' mean entropy (nats); `saturated`, the share of rows whose largest probability exceeds 0.99;
      `jacobian`, the mean Frobenius norm of the softmax's Jacobian diag(p) - p p^T. Each (L,).
    """
    # One layer at a time, because its (B, H, T, T) probabilities are the largest arrays here.
    return jax.lax.map(lambda layer: _layer_statistics(*layer, scale), (query_LxBxTxHxK, key_LxBxTxHxK))


def _layer_statistics(query_BxTxHxK: Array, key_BxTxHxK: Array, scale: float) -> dict[str, Array]:
    query, key = (x.astype(jnp.float32) for x in (query_BxTxHxK, key_BxTxHxK))
    length = query.shape[1]
    logits = scale * jnp.einsum("bthk,bshk->bhts", query, key, precision="highest")
    logits, seen = logits[:, :, 1:], jnp.tri(length, dtype=bool)[1:]
    log_p = jax.nn.log_softmax(jnp.where(seen, logits, -jnp.inf))
    p = jnp.exp(log_p)
    return {
        "max_logit": jnp.max(jnp.abs(logits), where=seen, initial=0),
        "entropy": -jnp.sum(p * jnp.where(seen, log_p, 0), axis=-1).mean(),
        "saturated": (p.max(axis=-1) > SATURATED).mean(),
        "jacobian": softmax_jacobian_norm(p).mean(),
    }


def softmax_jacobian_norm(p: Array) -> Array:
    """The Frobenius norm of diag(p) - p p^T for probabilities p along the last axis.

    The textbook form, sum p^2 - 2 sum p^3 + (sum p^2)^2, cancels to rounding noise where one p nears 1.
    With that largest p apart, what is left is a sum of terms that are small themselves.
    """
    largest = p.max(axis=-1, keepdims=True)
    others = jnp.where(jax.nn.one_hot(p.argmax(axis=-1), p.shape[-1], dtype=bool), 0, p)
    squares = jnp.square(others)
    sum_squares = squares.sum(axis=-1)
    largest = largest[..., 0]
    diagonal = jnp.square(largest * others.sum(axis=-1)) + (squares * jnp.square(1 - others)).sum(axis=-1)
    off_diagonal = 2 * jnp.square(largest) * sum_squares + (
        jnp.square(sum_squares) - jnp.square(squares).sum(axis=-1)
    )
    return jnp.sqrt(jnp.maximum(diagonal + off_diagonal, 0))


def input_statistics(kernel_LxIxO: Array, input_LxBxTxI: Array) -> dict[str, Array]:
    """How a layer's inputs lie to its matrix, one number per layer, means over the inputs.

    Args:
      kernel_LxIxO: kernels (in, out).
      input_LxBxTxI: what they are multiplied with.

    Returns:
      `alignment`, ||W x|| over ||W||_2 ||x||; and `null_space`, the share of ||x||^2 in the null space of W,
      which is 0 where W has none. Each (L,). Two SVDs a matrix, so slow for large ones.
    """

    def statistics(layer: tuple[Array, Array]) -> dict[str, Array]:
        kernel, inputs = layer
        return {
            "alignment": alignment(kernel, inputs).mean(),
            "null_space": null_space_share(kernel, inputs).mean(),
        }

    return jax.lax.map(statistics, (kernel_LxIxO, input_LxBxTxI))


def matrix_statistics(kernel_LxIxO: Array) -> dict[str, Array]:
    """Statistics of a stack of kernels, one number per layer.

    Args:
      kernel_LxIxO: kernels (in, out).

    Returns:
      `sigma_max` and `sigma_min`, the largest and smallest singular value; `gram_off_diagonal`,
      `||off(C)||_F / n` with C the cosines between the n columns of the tall orientation (m >= n rows;
      a square matrix's columns are those of the papers' W, the kernel transposed); `kurtosis` of the
      entries, 3 for a Gaussian. Each (L,).
    """
    sigma = svd(kernel_LxIxO.astype(jnp.float32), compute_uv=False)
    centred = kernel_LxIxO.astype(jnp.float32)
    centred -= centred.mean((-2, -1), keepdims=True)
    squares = jnp.square(centred / centred.std((-2, -1), keepdims=True))
    return {
        "sigma_max": sigma[..., 0],
        "sigma_min": sigma[..., -1],
        "gram_off_diagonal": DGram().violation(to_tall(kernel_LxIxO)),
        "kurtosis": jnp.square(squares).mean((-2, -1)),
    }
