"""GPT-2 against a float64 NumPy transcription of its definition, and the properties it promises."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from experiments.config import Model
from experiments.model import GPT2, init_params

SMALL = Model(vocab_size=31, context=12, layers=2, heads=2, width=16)
TOKENS = np.random.default_rng(7).integers(0, SMALL.vocab_size, (3, SMALL.context))


def random_params(config: Model, seed: int = 0):
    """Parameters far from the initial ones: peaked attention, gains and biases that all matter."""
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.asarray((path[-1].key == "scale") + 0.4 * rng.normal(size=x.shape), x.dtype),
        jax.eval_shape(lambda: init_params(config, jax.random.key(seed))),
    )


@functools.partial(jax.jit, static_argnames=("config", "mutable", "deterministic"))
def apply(config: Model, params, tokens, key=None, **options):
    return GPT2(config).apply(
        {"params": params}, tokens, rngs=key if key is None else {"dropout": key}, **options
    )


def numpy_gpt2(config: Model, params, tokens):
    """Logits (B, T, V) and each layer's attention weights (B, H, T, T), float64, one head at a time."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    length, head_size = tokens.shape[1], config.width // config.heads

    def norm(x, ln):
        centred = x - x.mean(-1, keepdims=True)
        x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.layer_norm_epsilon)
        return x * ln["scale"] + ln.get("bias", 0)

    def linear(x, layer):
        return x @ layer["kernel"] + layer.get("bias", 0)

    def gelu(x):
        if config.gelu == "exact":
            return x * (1 + erf(x / np.sqrt(2))) / 2
        return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2

    x = p["wte"]["embedding"][tokens] + p["wpe"]["embedding"][:length]
    attention = []
    for layer in range(config.layers):
        h = jax.tree.map(lambda leaf: leaf[layer], p["h"])  # noqa: B023
        query, key, value = np.split(linear(norm(x, h["ln_1"]), h["attn"]["c_attn"]), 3, axis=-1)
        mixed, weights = np.empty_like(x), np.zeros((len(x), config.heads, length, length))
        for head in range(config.heads):
            features = slice(head * head_size, (head + 1) * head_size)
            for t in range(length):
                logits = np.einsum("bk,bsk->bs", query[:, t, features], key[:, : t + 1, features])
                unnormalised = np.exp(logits * numpy_attention_scale(config))
                row = unnormalised / unnormalised.sum(-1, keepdims=True)
                weights[:, head, t, : t + 1] = row
                mixed[:, t, features] = np.einsum("bs,bsk->bk", row, value[:, : t + 1, features])
        attention.append(weights)
        x = x + linear(mixed, h["attn"]["c_proj"])
        x = x + linear(gelu(linear(norm(x, h["ln_2"]), h["mlp"]["c_fc"])), h["mlp"]["c_proj"])
    head = p["wte"]["embedding"].T if config.tied else p["lm_head"]["kernel"]
    multiplier = 1
    if config.parametrization == "spectral" and config.tied:
        multiplier = config.output_scale * config.base_width / config.width
    return multiplier * (norm(x, p["ln_f"]) @ head), attention


def numpy_attention_scale(config: Model) -> float:
    head_size = config.width / config.heads
    if config.parametrization == "standard":
        return 1 / np.sqrt(head_size)
    return np.sqrt(config.base_width / config.base_heads) / head_size


VARIANTS = {
    "plain": SMALL,
    "untied-bias-tanh": replace(SMALL, tied=False, bias=True, gelu="tanh"),
    "epsilon": replace(SMALL, layer_norm_epsilon=0.1, heads=4, remat=True),
    "spectral": replace(
        SMALL, parametrization="spectral", base_width=4, base_heads=2, output_scale=0.7, bias=True
    ),
    "spectral-untied": replace(SMALL, parametrization="spectral", base_width=8, base_heads=1, tied=False),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_equals_numpy(config):
    params = random_params(config)
    expected, attention = numpy_gpt2(config, params, TOKENS)
    logits, collected = apply(config, params, TOKENS, mutable=("probes",))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())

    probes = collected["probes"]["h"]["attn"]
    (query,), (key,) = probes["query"], probes["key"]
    chex.assert_shape([query, key], (2, 3, 12, config.heads, 16 // config.heads))
    scores = np.einsum("lbthk,lbshk->lbhts", query, key) * numpy_attention_scale(config)
    scores = np.where(np.tril(np.ones((12, 12), bool)), scores, -np.inf)
    np.testing.assert_allclose(jax.nn.softmax(scores), attention, rtol=0, atol=1e-5)


def test_parameter_tree():
    shapes = {
        "wte/embedding": (31, 16),
        "wpe/embedding": (12, 16),
        "h/ln_1/scale": (2, 16),
        "h/attn/c_attn/kernel": (2, 16, 48),
        "h/attn/c_proj/kernel": (2, 16, 16),
        "h/ln_2/scale": (2, 16),
        "h/mlp/c_fc/kernel": (2, 16, 64),
        "h/mlp/c_proj/kernel": (2, 64, 16),
        "ln_f/scale": (16,),
    }
    extra = {
        "lm_head/kernel": (16, 31),
        "h/ln_1/bias": (2, 16),
        "h/attn/c_attn/bias": (2, 48),
        "h/attn/c_proj/bias": (2, 16),
        "h/ln_2/bias": (2, 16),
        "h/mlp/c_fc/bias": (2, 64),
        "h/mlp/c_proj/bias": (2, 16),
        "ln_f/bias": (16,),
    }

    def found(config):
        params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
        assert type(params) is dict
        leaves = jax.tree_util.tree_leaves_with_path(params)
        assert all(leaf.dtype == jnp.float32 for _, leaf in leaves)
        return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}

    assert found(SMALL) == shapes
    assert found(replace(SMALL, bias=True, tied=False, compute_dtype="bfloat16")) == shapes | extra


def test_initialisation_follows_gpt2():
    config = Model(vocab_size=101, context=64, layers=3, heads=2, width=64, bias=True, tied=False)
    params = init_params(config, jax.random.key(3))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("bias"):
            assert not leaf.any(), name
        elif name.endswith("scale"):
            assert (leaf == 1).all(), name
        else:
            std = 0.02 / np.sqrt(6) if "c_proj" in name else 0.02
            rows = leaf.reshape(-1, leaf.shape[-1]) if leaf.ndim == 2 else leaf.reshape(len(leaf), -1)
            # Every layer of a stack is drawn on its own, from the same distribution.
            np.testing.assert_allclose(np.std(leaf), std, rtol=0.04, err_msg=name)
            assert abs(np.corrcoef(rows[:2])[0, 1]) < 0.5, name


@pytest.mark.parametrize("width", [64, 256])
def test_spectral_initialisation(width):
    config = Model(
        context=32, layers=3, heads=2, width=width, bias=True, tied=False, parametrization="spectral"
    )
    params = init_params(config, jax.random.key(3))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("kernel"):
            branches = 6 if "c_proj" in name else 1
            target = np.sqrt(leaf.shape[-1] / leaf.shape[-2] / branches)
            norms = np.linalg.norm(leaf, 2, axis=(-2, -1))
            np.testing.assert_allclose(norms, target, rtol=0.1, err_msg=name)
        elif name.endswith("embedding"):
            np.testing.assert_allclose(np.std(leaf), config.embedding_std, rtol=0.05, err_msg=name)
        else:
            assert (leaf == name.endswith("scale")).all(), name


def test_spectral_is_standard_at_the_base_but_for_the_start():
    config = replace(SMALL, base_width=SMALL.width, base_heads=SMALL.heads)
    params = random_params(config)
    logits = [apply(replace(config, parametrization=p), params, TOKENS) for p in ("standard", "spectral")]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("parametrization", ["standard", "spectral"])
def test_initial_loss_is_that_of_uniform_guesses(parametrization):
    config = replace(SMALL, vocab_size=256, parametrization=parametrization, base_width=16, base_heads=2)
    logits = apply(config, init_params(config, jax.random.key(1)), TOKENS)
    loss = -jax.nn.log_softmax(logits)[..., 5].mean()
    np.testing.assert_allclose(loss, np.log(256), rtol=0.01 if parametrization == "standard" else 0.1)


def test_later_tokens_do_not_change_earlier_logits():
    params = random_params(SMALL)
    changed = TOKENS.copy()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocab_size
    before, after = apply(SMALL, params, TOKENS), apply(SMALL, params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (np.abs(before[:, 7:] - after[:, 7:]).max(-1) > 1e-3).all()
    np.testing.assert_allclose(apply(SMALL, params, TOKENS[:, :5]), before[:, :5], atol=1e-5)


def test_bfloat16_computes_near_float32():
    params = random_params(SMALL)
    half = replace(SMALL, compute_dtype="bfloat16")
    exact = apply(SMALL, params, TOKENS)
    logits, collected = apply(half, params, TOKENS, mutable=("probes",))
    assert logits.dtype == jnp.float32
    assert collected["probes"]["h"]["attn"]["query"][0].dtype == jnp.bfloat16
    error = np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2))
    assert 1e-4 < error < 3e-2
    # The head adds up and answers in float32: its logits are not rounded to bfloat16.
    assert (logits != logits.astype(jnp.bfloat16)).mean() > 0.9
    gradients = jax.grad(lambda p: apply(half, p, TOKENS).std())(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, params)
    chex.assert_tree_all_finite(gradients)


def test_remat_changes_nothing_but_memory():
    config = replace(SMALL, dropout=0.2)
    params = random_params(config)

    def value_and_grad(config):
        def loss(p):
            return (apply(config, p, TOKENS, jax.random.key(4), deterministic=False) ** 2).mean()

        return jax.jit(jax.value_and_grad(loss))(params)

    chex.assert_trees_all_close(
        value_and_grad(config), value_and_grad(replace(config, remat=True)), rtol=1e-5, atol=1e-6
    )


def test_dropout_only_when_not_deterministic():
    params = random_params(SMALL)
    plain = apply(SMALL, params, TOKENS)
    config = replace(SMALL, dropout=0.3)
    np.testing.assert_allclose(apply(config, params, TOKENS), plain, rtol=1e-6)
    first, again, other = (
        apply(config, params, TOKENS, jax.random.key(k), deterministic=False) for k in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - plain).max() > 0.1
    assert np.abs(first - other).max() > 0.1
    # Without dropout, training needs no key.
    np.testing.assert_allclose(apply(SMALL, params, TOKENS, deterministic=False), plain, rtol=1e-6)


def test_probes_are_stored_on_request_only():
    params = init_params(SMALL, jax.random.key(0))
    assert set(params) == {"wte", "wpe", "h", "ln_f"}
    assert isinstance(apply(SMALL, params, TOKENS), jax.Array)


def test_program_does_not_grow_with_depth():
    def equations(layers):
        model = GPT2(replace(SMALL, layers=layers))
        params = jax.eval_shape(lambda: init_params(model.config, jax.random.key(0)))
        return str(jax.make_jaxpr(lambda p: model.apply({"params": p}, TOKENS))(params)).count("\n")

    assert equations(2) == equations(9)


def test_too_long_a_sequence_is_refused_at_trace_time():
    tokens = jax.ShapeDtypeStruct((1, SMALL.context + 1), jnp.int32)
    with pytest.raises(ValueError, match="13 tokens exceeds the model's context of 12"):
        jax.eval_shape(functools.partial(apply, SMALL), random_params(SMALL), tokens)
