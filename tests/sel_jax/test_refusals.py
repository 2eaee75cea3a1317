"""What cannot be reparametrised is refused, with the parameter's path, while tracing too."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from sel_jax import beta_for, reparametrize

BETA = 4.0
PARAMS = {
    "h": {"kernel": np.ones((4, 5), np.float32), "bias": np.ones(5, np.float32)},
    "steps": jnp.arange(3),
}


@pytest.mark.parametrize(
    ("where", "options", "error", "message"),
    [
        ("h/kernel", {"beta": 0.0}, ValueError, r"h/kernel, of shape \(4, 5\): beta must be positive"),
        (
            "h/kernel",
            {"beta": math.nan},
            ValueError,
            r"h/kernel, .*: beta must be positive and finite, got nan",
        ),
        ("h/bias", {"beta": lambda width: -width}, ValueError, r"h/bias, .*: beta must be positive.*-5"),
        ("steps", {}, TypeError, "steps is int32: only floating weights"),
        ("h/kernel", {"rank": 5, "key": 0}, ValueError, r"h/kernel, .*: rank 5 must be from 1 to 4"),
        ("h/kernel", {"rank": -1, "key": 0}, ValueError, r"h/kernel, .*: rank -1 must be from 1 to 4"),
        ("h/bias", {"rank": 1, "key": 0}, ValueError, r"h/bias, of shape \(5,\), is a vector"),
        ("h/kernel", {"rank": 2}, TypeError, "needs a PRNG key"),
        ("h/kernels", {}, ValueError, "where's pattern 'h/kernels' matches no parameter.*h/bias, h/kernel"),
        (["h/*", "x"], {}, ValueError, "'x' matches no parameter"),
        ({"h/bias": MuonDimensionNumbers(0, 1)}, {}, ValueError, r"h/bias, of shape \(5,\): .*does not fit"),
        ("h/kernel", {"learn": "ez"}, ValueError, "unknown scales 'z': choose among e, l, m, n"),
        ("h/kernel", {"values": {"o": 1.0}}, ValueError, "unknown scales 'o'"),
        (
            "h/kernel",
            {"start": "wrong"},
            ValueError,
            "unknown start 'wrong': choose one of mismatched, exact",
        ),
        ("h/kernel", {"rule": "wrong"}, ValueError, r"h/kernel, .*: unknown rule 'wrong'"),
        (
            "h/kernel",
            {"beta": 0.5, "start": "exact"},
            ValueError,
            "h/kernel, .* beta = 0.5 is not invertible",
        ),
        ("h/kernel", {"values": {"e": -1.0}}, ValueError, "h/kernel, .*not invertible"),
    ],
)
def test_what_is_refused(where, options, error, message):
    options = {"beta": BETA, **options}
    if "key" in options:
        options["key"] = jax.random.key(options["key"])
    convert = partial(reparametrize, where=where, **options)
    for function in (convert, partial(jax.eval_shape, convert)):
        with pytest.raises(error, match=message):
            function(PARAMS)


def test_sizes_of_weights_that_have_no_curvature():
    with pytest.raises(ValueError, match="std must be positive and finite, got 0.0"):
        beta_for(0.0)
    with pytest.raises(ValueError, match="curvature must be positive and finite, got -1.0"):
        beta_for(0.02, curvature=-1.0)
