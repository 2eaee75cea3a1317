"""Arrays as batches of matrices, against explicit loops over every index."""

import itertools
import math

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers

from spectral import KERNEL, fans, from_matrices, to_matrices

CASES = (
    ((4, 6), KERNEL),
    ((3, 4, 6), KERNEL),
    ((2, 3, 4, 6), KERNEL),
    ((6, 4), MuonDimensionNumbers(-1, -2)),  # Equinox: (out, in)
    ((4, 3, 6), MuonDimensionNumbers(0, 2)),  # batch axis in the middle
    ((2, 4, 3, 5), MuonDimensionNumbers(1, (2, 3))),  # (L, d, H, dh) as one matrix
    ((2, 4, 3, 5), MuonDimensionNumbers(1, 3)),  # the same, one matrix a head
    ((2, 3, 5, 4), MuonDimensionNumbers((1, 2), 3)),  # (L, H, dh, d), the heads' output projection
    ((2, 3, 5, 4), MuonDimensionNumbers((2, 0), (3, 1))),  # axes out of order, both sides
    ((2, 3, 5, 4), MuonDimensionNumbers((-1, 0), -2)),
    ((3, 3, 4, 6), MuonDimensionNumbers((0, 1, 2), 3)),  # a convolution
    ((5, 1), KERNEL),
)


def by_loops(x: np.ndarray, batch: list[int], inputs: list[int], outputs: list[int]) -> np.ndarray:
    """Every entry set on its own: [which batch index, which input, which output], all row-major."""
    sizes = [[x.shape[axis] for axis in side] for side in (batch, inputs, outputs)]
    result = np.empty([math.prod(side) for side in sizes], x.dtype)
    for b, index_b in enumerate(itertools.product(*map(range, sizes[0]))):
        for i, index_i in enumerate(itertools.product(*map(range, sizes[1]))):
            for o, index_o in enumerate(itertools.product(*map(range, sizes[2]))):
                where = dict(zip(batch + inputs + outputs, index_b + index_i + index_o, strict=True))
                result[b, i, o] = x[tuple(where[axis] for axis in range(x.ndim))]
    return result


def named_axes(ndim: int, dims: MuonDimensionNumbers) -> tuple[list[int], list[int], list[int]]:
    inputs, outputs = ([a % ndim for a in np.atleast_1d(side)] for side in dims)
    return [a for a in range(ndim) if a not in inputs + outputs], inputs, outputs


@pytest.mark.parametrize(("shape", "dims"), CASES, ids=str)
def test_to_matrices_and_back(shape, dims):
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    matrices = to_matrices(jnp.asarray(x), dims)
    np.testing.assert_array_equal(matrices, by_loops(x, *named_axes(x.ndim, dims)))
    chex.assert_shape(matrices, (None, *fans(shape, dims)))
    back = from_matrices(matrices, shape, dims)
    np.testing.assert_array_equal(back, x)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_dimension_numbers(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5), label="shape"))
    order = data.draw(st.permutations(range(len(shape))), label="order")
    first = data.draw(st.integers(1, len(shape) - 1), label="number of inputs")
    second = data.draw(st.integers(first + 1, len(shape)), label="end of outputs")
    sign = data.draw(st.sampled_from([0, -len(shape)]), label="from the end")
    inputs, outputs = order[:first], order[first:second]
    dims = MuonDimensionNumbers(tuple(a + sign for a in inputs), tuple(outputs))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    matrices = to_matrices(jnp.asarray(x), dims)
    batch = sorted(order[second:])
    np.testing.assert_array_equal(matrices, by_loops(x, batch, list(inputs), list(outputs)))
    np.testing.assert_array_equal(from_matrices(matrices, shape, dims), x)


def test_the_matrices_act_as_the_array_does():
    """y = x @ kernel, with heads as outputs."""
    rng = np.random.default_rng(1)
    x, kernel = rng.normal(size=(7, 4)), rng.normal(size=(4, 3, 5)).astype(np.float32)
    matrix = to_matrices(jnp.asarray(kernel), MuonDimensionNumbers(0, (1, 2)))[0]
    np.testing.assert_allclose(
        (x @ matrix).reshape(7, 3, 5), np.einsum("bi,iho->bho", x, kernel), rtol=1e-5, atol=1e-6
    )


def test_fans():
    assert fans((3, 4, 6)) == (4, 6)
    assert fans((6, 4), MuonDimensionNumbers(-1, -2)) == (4, 6)
    assert fans((2, 4, 3, 5), MuonDimensionNumbers(1, (2, 3))) == (4, 15)
    assert fans((2, 4, 3, 5), MuonDimensionNumbers(1, 3)) == (4, 5)
    assert fans((3, 3, 4, 6), MuonDimensionNumbers((0, 1, 2), 3)) == (36, 6)
    assert all(isinstance(fan, int) for fan in fans((3, 4, 6)))


def test_the_default_is_not_optaxs():
    assert KERNEL == MuonDimensionNumbers(-2, -1) != MuonDimensionNumbers()


def test_empty_batch():
    assert to_matrices(jnp.zeros((0, 4, 6))).shape == (0, 4, 6)
    assert from_matrices(jnp.zeros((0, 4, 6)), (0, 4, 6)).shape == (0, 4, 6)


@pytest.mark.parametrize("function", [fans, lambda shape, dims: to_matrices(jnp.ones(shape), dims)])
@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ((4,), KERNEL, r"does not fit an array of shape \(4,\)"),
        ((), KERNEL, r"does not fit an array of shape \(\)"),
        ((4, 6), MuonDimensionNumbers(0, 2), r"does not fit an array of shape \(4, 6\)"),
        ((4, 6), MuonDimensionNumbers(-3, 1), r"does not fit an array of shape \(4, 6\)"),
        ((4, 6), MuonDimensionNumbers((), 1), r"does not fit an array of shape \(4, 6\)"),
        ((4, 6), MuonDimensionNumbers(0, ()), r"does not fit an array of shape \(4, 6\)"),
        ((4, 6), MuonDimensionNumbers(1, -1), r"names an axis of shape \(4, 6\) twice"),
        ((3, 4, 6), MuonDimensionNumbers((0, 1), (1, 2)), r"names an axis of shape \(3, 4, 6\) twice"),
        ((3, 4, 6), MuonDimensionNumbers((0, 0), 2), r"names an axis of shape \(3, 4, 6\) twice"),
    ],
)
def test_errors(function, shape, dims, message):
    with pytest.raises(ValueError, match=message):
        function(shape, dims)


@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 6, 4)])
def test_from_matrices_of_the_wrong_shape(shape):
    """Even where the sizes agree: the numbers would be scrambled."""
    with pytest.raises(ValueError, match="do not make up"):
        from_matrices(jnp.ones((2, 4, 6)), shape)
