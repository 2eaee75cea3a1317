"""What is decided about parameters of any framework, what is refused, and the table that says so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from spectral import KERNEL, Role, decide, format_decisions
from tests.spectral.scaled_models import STACKED, equinox_like, nnx_state, shapes


def summary(decisions):
    return {path: (d.role.value, d.fan_in, d.fan_out) for path, d in decisions.items()}


def tree(**leaves):
    """Arrays of these shapes, at paths with `__` for `/`."""
    return {
        name.replace("__", "/"): jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in leaves.items()
    }


def test_flax_with_stacked_layers():
    decisions = decide(shapes(64), stacked=STACKED)
    assert summary(decisions) == {
        "h/attn/bias": ("bias", 1, 192),
        "h/attn/kernel": ("matrix", 64, 192),
        "h/down/kernel": ("matrix", 256, 64),
        "h/ln_1/bias": ("bias", 1, 64),
        "h/ln_1/scale": ("gain", 1, 64),
        "h/up/kernel": ("matrix", 64, 256),
        "lm_head/bias": ("bias", 1, 50),
        "lm_head/kernel": ("readout", 64, 50),
        "patches/bias": ("bias", 1, 64),
        "patches/kernel": ("matrix", 10, 64),
        "wte/embedding": ("embedding", 1, 64),
    }
    assert decisions["h/attn/kernel"].shape == (2, 64, 192)
    assert decisions["h/attn/kernel"].dimension_numbers == KERNEL


def test_equinox_has_transposed_kernels():
    assert summary(decide(equinox_like(8))) == {
        "embed/weight": ("embedding", 1, 8),
        "layers/0/weight": ("matrix", 8, 32),
        "layers/0/bias": ("bias", 1, 32),
        "layers/1/weight": ("matrix", 32, 8),
        "norm/weight": ("gain", 1, 8),
        "norm/bias": ("bias", 1, 8),
        "head/weight": ("readout", 8, 50),
    }


def test_nnx():
    assert summary(decide(nnx_state(8))) == {
        "embed/embedding": ("embedding", 1, 8),
        "head/kernel": ("readout", 32, 50),
        "norm/bias": ("bias", 1, 32),
        "norm/scale": ("gain", 1, 32),
        "up/bias": ("bias", 1, 32),
        "up/kernel": ("matrix", 8, 32),
    }


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("linear/~/w", (3, 4), ("matrix", 3, 4)),  # Haiku
        ("linear/b", (4,), ("bias", 1, 4)),
        ("layer_norm/offset", (4,), ("bias", 1, 4)),
        ("embed/embeddings", (9, 4), ("embedding", 1, 4)),
        ("LayerNorm_12/weight", (2, 4), ("gain", 1, 4)),
        ("h/ln_1/scale", (2, 4), ("gain", 1, 4)),
        ("h/ln_1/bias", (2, 4), ("bias", 1, 4)),
        ("linear_1/weight", (4, 3), ("matrix", 3, 4)),
        ("embed_tokens/weight", (9, 4), ("embedding", 1, 4)),
        ("patch_embed/weight", (4, 9), ("matrix", 9, 4)),
        ("embed_proj/weight", (4, 9), ("matrix", 9, 4)),
        ("embedding/kernel", (9, 4), ("matrix", 9, 4)),  # a convolution's or a Dense layer's
        ("unembed/weight", (9, 4), ("readout", 4, 9)),
        ("unembedding/kernel", (4, 9), ("readout", 4, 9)),
        ("wpe", (9, 4), ("embedding", 1, 4)),
        ("norm/scale", (), ("gain", 1, 1)),
    ],
)
def test_names(path, shape, expected):
    assert summary(decide(tree(**{path: shape}))) == {path: expected}


def test_declarations_go_before_names():
    params = tree(lookup__kernel=(9, 4), temperature=(), lm_head__kernel=(4, 4), a__kernel=(4, 4))
    roles = {"lookup/*": Role.EMBEDDING, "temperature": Role.GAIN, "lm_head/*": Role.MATRIX}
    assert summary(decide(params, roles=roles)) == {
        "a/kernel": ("matrix", 4, 4),
        "lm_head/kernel": ("matrix", 4, 4),
        "lookup/kernel": ("embedding", 1, 4),
        "temperature": ("gain", 1, 1),
    }
    assert decide(params, roles={"a/*": Role.GAIN, "temperature": Role.BIAS}, stacked=["a/*"])


def test_dimension_numbers_for_all_matrices_or_by_pattern():
    params = tree(q__kernel=(64, 4, 16), q__bias=(4, 16), out__kernel=(4, 16, 64), e__embedding=(9, 64))
    by_pattern = {
        "q/kernel": MuonDimensionNumbers(0, (1, 2)),
        "q/bias": MuonDimensionNumbers((), (0, 1)),
        "out/kernel": MuonDimensionNumbers((0, 1), 2),
    }
    found = decide(params, dimension_numbers=by_pattern)
    assert summary(found) == {
        "e/embedding": ("embedding", 1, 64),
        "out/kernel": ("matrix", 64, 64),
        "q/bias": ("bias", 1, 64),
        "q/kernel": ("matrix", 64, 64),
    }
    params = tree(a__kernel=(5, 3, 4), e__embedding=(9, 4), b__bias=(4,))
    transposed = decide(params, dimension_numbers=MuonDimensionNumbers(-1, -2))
    assert summary(transposed)["a/kernel"] == ("matrix", 4, 3)
    assert summary(transposed)["e/embedding"] == ("embedding", 1, 4)  # for matrices only


@pytest.mark.parametrize(
    ("path", "shape", "says"),
    [
        ("theta", (3, 4), "roles={'theta': Role.MATRIX}"),
        ("lm_head", (3, 4), "roles={'lm_head': Role.MATRIX}"),
        ("0", (3,), "roles={'0': Role.MATRIX}"),
        ("h/attn/kernel", (2, 3, 4), "MuonDimensionNumbers(-2, -1)} with its own axes, or stacked=["),
        ("conv/weight", (4, 3, 5), "dimension_numbers={'conv/weight': MuonDimensionNumbers("),
        ("attn/bias", (2, 4), "dimension_numbers={'attn/bias': MuonDimensionNumbers((), -1)}"),
        (
            "dense/kernel",
            (4,),
            "and role matrix are inputs and outputs: write dimension_numbers={'dense/kernel'",
        ),
        ("x/embedding", (1, 3, 4), "and role embedding are inputs"),
    ],
)
def test_what_cannot_be_decided_names_path_and_shape_and_what_to_write(path, shape, says):
    with pytest.raises(ValueError) as error:
        decide(tree(**{path: shape, "fine/kernel": (3, 4)}))
    message = str(error.value)
    assert f"{path} with shape {shape}" in message and says in message
    assert "fine" not in message


def test_the_advice_of_an_error_works():
    params = tree(h__attn__kernel=(2, 3, 4), h__attn__bias=(2, 4))
    expected = {"h/attn/bias": ("bias", 1, 4), "h/attn/kernel": ("matrix", 3, 4)}
    assert summary(decide(params, stacked=["h/*"])) == expected
    assert summary(decide(params, stacked="h/*")) == expected
    declared = {
        "h/attn/kernel": MuonDimensionNumbers(-2, -1),
        "h/attn/bias": MuonDimensionNumbers((), -1),
    }
    assert summary(decide(params, dimension_numbers=declared)) == expected


def test_all_that_is_undecided_is_named_at_once():
    with pytest.raises(ValueError) as error:
        decide(tree(theta=(3, 4), h__kernel=(2, 3, 4)))
    assert len(str(error.value).splitlines()) == 2


def test_a_vector_that_is_declared_stacked():
    with pytest.raises(ValueError, match=r"ln_f/scale with shape \(4,\) .* leave it out of `stacked`"):
        decide(tree(ln_f__scale=(4,), h__scale=(2, 4)), stacked=["*"])


@pytest.mark.parametrize(
    ("hints", "error", "says"),
    [
        ({"roles": {"b/*": Role.GAIN}}, ValueError, "pattern of roles 'b/\\*' matches no parameter"),
        ({"dimension_numbers": {"b": KERNEL}}, ValueError, "pattern of dimension_numbers 'b' matches"),
        ({"stacked": ["b"]}, ValueError, "pattern of stacked 'b' matches no parameter"),
        ({"roles": {"a/*": "matrix"}}, TypeError, "roles must map patterns to Roles"),
        ({"roles": Role.MATRIX}, TypeError, "roles must map patterns to Roles"),
        ({"dimension_numbers": (0, 1)}, TypeError, "must be an optax.contrib.MuonDimensionNumbers"),
        (
            {"dimension_numbers": {"a/bias": KERNEL}},
            ValueError,
            "a/bias .* is a bias, which has no input axes",
        ),
        (
            {"dimension_numbers": MuonDimensionNumbers(2, 3)},
            ValueError,
            "a/kernel with role matrix: .* does not fit",
        ),
        ({"dimension_numbers": {"a/bias": MuonDimensionNumbers((), 1)}}, ValueError, "does not fit shape"),
    ],
)
def test_declarations_are_checked(hints, error, says):
    with pytest.raises(error, match=says):
        decide(tree(a__kernel=(3, 4), a__bias=(4,)), **hints)


def test_integers_are_not_for_training():
    with pytest.raises(ValueError, match=r"count with shape \(\) has int32 entries, which no rule is for"):
        decide({"count": jnp.zeros((), jnp.int32), "kernel": jnp.ones((2, 2))})


def test_placeholders_are_passed_over():
    params = {"a": {"kernel": np.ones((3, 4), np.float32), "bias": None}, "b": optax.MaskedNode()}
    assert list(decide(params)) == ["a/kernel"]


def test_the_table():
    params = tree(h__kernel=(2, 256, 1024), wte__embedding=(50, 256), ln__scale=(256,), temperature=())
    decisions = decide(params, stacked=["h/*"], roles={"temperature": Role.GAIN})
    lines = format_decisions(
        decisions, {"h/kernel": 0.25, "ln/scale": 1, "temperature": 1, "wte/embedding": 1.0}
    )
    rows = [line.split() for line in lines.splitlines()]
    assert rows == [
        ["path", "shape", "role", "fan_in", "fan_out", "sigma", "multiplier"],
        ["h/kernel", "2x256x1024", "matrix", "256", "1024", "0.04167", "0.25"],  # 2 / 48
        ["ln/scale", "256", "gain", "1", "256", "0", "1"],
        ["temperature", "scalar", "gain", "1", "1", "0", "1"],
        ["wte/embedding", "50x256", "embedding", "1", "256", "1", "1"],
    ]
    assert all(line.split()[-1] == "-" for line in format_decisions(decisions).splitlines()[1:])
