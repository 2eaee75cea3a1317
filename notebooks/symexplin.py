# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # SymExpLin: learning in curved weight space
#
# The raw weight $w$ is what the optimiser sees, the effective one $W = f(w)$ what the model sees:
#
# $$f(w) = \operatorname{sign}(w)\, E(|w|) + L, \qquad
#   E(a) = \tfrac{e}{\beta}\left(e^{\beta m a - n} - e^{-n}\right), \qquad
#   L = \begin{cases} \tfrac{l}{\beta}\, w & \text{congruent} \\
#   \tfrac{l}{\beta}\, |w| & \text{mismatch} \end{cases}$$
#
# with $e = l = m = 1$, $n = 0$ at the start, and each of them learnable as a rank-1 scale.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import sel_jax as sel
from sel_jax import SymExpLin

plt.rcParams.update(
    {"figure.dpi": 72, "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3}
)

# %% [markdown]
# ## The map and the size of a step
#
# The two rules differ on negative weights only: there the mismatched paths work against each other. With $W
# = f(w) > 0$ the exponential is $\beta W - w + 1$, and so
#
# $$f'(w) = 1 + \beta W - w + 1/\beta .$$
#
# An optimiser whose steps in $w$ do not depend on $w$ (Adam) moves $W$ by about $\eta\,(1 + \beta |W|)$:
# additive below $1/\beta$, in proportion to the weight above.

# %%
BETA = 3.0
maps = {rule: SymExpLin(BETA, rule) for rule in ("congruent", "mismatch")}
raw = jnp.linspace(-1, 1, 401)
slope = {rule: jax.vmap(jax.grad(f))(raw) for rule, f in maps.items()}
positive = raw > 0
for rule, f in maps.items():
    expected = 1 + BETA * f(raw) - raw + 1 / BETA
    np.testing.assert_allclose(slope[rule][positive], expected[positive], rtol=1e-5)
np.testing.assert_allclose(
    slope["mismatch"][~positive][:-1], slope["congruent"][~positive][:-1] - 2 / BETA, rtol=1e-4
)


def adam_step(f: SymExpLin, weights: jax.Array, rate: float) -> jax.Array:
    """|Change of W| by Adam's first step, for the loss sum(W)."""
    w = sel.invert(weights, f)
    optimizer = optax.adam(rate)
    updates, _ = optimizer.update(jax.grad(lambda w: jnp.sum(f(w)))(w), optimizer.init(w), w)
    return jnp.abs(f(w + updates) - weights)


sizes = jnp.geomspace(1e-3, 10, 60)
figure, (curve, steps) = plt.subplots(1, 2, figsize=(11, 3.8))
for rule, color in zip(maps, ("#1b6ca8", "#d1603d"), strict=True):
    curve.plot(raw, maps[rule](raw), color=color, label=rule)
    for sign, style in ((1, "-"), (-1, "--")):
        moved = adam_step(maps[rule], sign * sizes, 1e-4) / 1e-4
        label = f"{rule}, W {'> 0' if sign > 0 else '< 0'}"
        steps.loglog(
            sizes, moved, style, color=color, label=label, lw=3 if (rule, sign) == ("congruent", 1) else 1.5
        )
        slopes = jax.vmap(jax.grad(maps[rule]))(sel.invert(sign * sizes, maps[rule]))
        np.testing.assert_allclose(moved, slopes, rtol=1e-2)
curve.plot(raw, raw, color="gray", lw=1, label="identity")
curve.set(xlabel="raw w", ylabel="effective W", title=f"The map, $\\beta$ = {BETA:g}")
curve.legend(fontsize="small")
steps.loglog(sizes, 1 + BETA * sizes, ":", color="black", label="$1 + \\beta |W|$")
steps.axvline(1 / BETA, color="gray", lw=1)
steps.text(1.1 / BETA, 20, "$1/\\beta$", color="gray")
steps.set(xlabel="|W|", ylabel="change of W / rate", title="Adam's first step in w, seen in W")
steps.legend(fontsize="small")
plt.show()

# %% [markdown]
# ## The inverse
#
# Newton's method on $e^y - 1 + r y = t$, explicit above the saturation of the exponent. It is correct to
# float32's roundings over sixteen decades and on both sides, where $r = \pm 1/\beta$: those of $w$ count
# $\beta |w|$ times in the exponent. The oracle evaluates the map in float64.

# %%


def oracle(w: jax.Array, beta: float, rule: str) -> np.ndarray:
    """The map in NumPy and float64, below the saturation."""
    w = np.asarray(w, np.float64)
    linear = w if rule == "congruent" else np.abs(w)
    return np.sign(w) * np.expm1(beta * np.abs(w)) / beta + linear / beta


magnitudes = jnp.geomspace(1e-8, 1e8, 120)
figure, axes = plt.subplots(figsize=(7, 3.4))
for beta, color in ((1.5, "#1b6ca8"), (8.0, "#3c8d5a"), (64.0, "#d1603d")):
    for sign, marker in ((1, "o"), (-1, "x")):
        weights = sign * magnitudes
        w = sel.invert(weights, SymExpLin(beta))
        assert jnp.max(beta * jnp.abs(w)) < sel.SATURATION
        error = np.abs(oracle(w, beta, "mismatch") / np.asarray(weights, np.float64) - 1)
        # Of two paths that cancel, and of w in the exponent, where a rounding counts beta |w| times.
        condition = (beta + 1) / (beta - 1) + beta * np.abs(w)
        assert np.all(error < 3 * np.finfo(np.float32).eps * condition)
        label = f"$\\beta$ = {beta:g}, W {'> 0' if sign > 0 else '< 0'}"
        axes.loglog(magnitudes, np.maximum(error, 1e-10), marker, ms=3, color=color, label=label)
axes.axhline(np.finfo(np.float32).eps, color="gray", lw=1, label="epsilon")
axes.set(xlabel="|W|", ylabel="|f(f$^{-1}$(W)) / W - 1|", title="Round trip, the map in float64")
axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## Three starts
#
# `mismatched` (the paper's, for fresh weights) inverts the congruent rule and applies the mismatch one, so
# a negative weight starts higher by $2|w|/\beta$: at small sizes by the factor $(1 - 1/\beta)/(1 +
# 1/\beta)$. `exact` inverts the map itself. `anchored` keeps the function to the bit: $W_0 + f(u) -
# f_0(u_0)$.

# %%
WIDTH, FEATURES = 64, 16
SIZES = (FEATURES, WIDTH, WIDTH, 1)


def init(key: jax.Array) -> list[jax.Array]:
    keys = jax.random.split(key, len(SIZES) - 1)
    shapes = zip(SIZES[:-1], SIZES[1:], strict=True)
    return [jax.random.normal(k, shape) / shape[0] ** 0.5 for k, shape in zip(keys, shapes, strict=True)]


def apply(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in kernels[:-1]:
        x = jax.nn.relu(x @ kernel)
    return x @ kernels[-1]


STARTS = ("mismatched", "exact", "anchored")
fresh = init(jax.random.key(0))
inputs = jax.random.normal(jax.random.key(1), (256, FEATURES))
trees = {start: sel.reparametrize(fresh, "*", start=start) for start in STARTS}
weights = {start: sel.effective(tree) for start, tree in trees.items()}

drawn, beta = np.asarray(fresh[1]), sel.default_beta(WIDTH)
raw_abs = np.abs(np.asarray(trees["mismatched"][1].raw))
expected = np.where(drawn < 0, drawn + 2 * raw_abs / beta, drawn)
np.testing.assert_allclose(weights["mismatched"][1], expected, atol=1e-6)
np.testing.assert_allclose(weights["exact"][1], drawn, rtol=2e-6, atol=1e-8)
assert np.array_equal(weights["anchored"][1], drawn)
for start in STARTS:
    change = jnp.linalg.norm(apply(weights[start], inputs) - apply(fresh, inputs))
    print(f"{start:10} relative change of the outputs {change / jnp.linalg.norm(apply(fresh, inputs)):.1e}")
assert np.array_equal(apply(weights["anchored"], inputs), apply(fresh, inputs))

figure, axes = plt.subplots(figsize=(6.5, 3.6))
for start, marker in zip(STARTS, ("o", "x", "+"), strict=True):
    sample = np.random.default_rng(0).choice(drawn.size, 250, replace=False)
    ratio = np.asarray(weights[start][1]).ravel()[sample] / drawn.ravel()[sample]
    axes.plot(drawn.ravel()[sample], ratio, marker, ms=4, ls="", label=start)
axes.axhline(
    (1 - 1 / beta) / (1 + 1 / beta), color="gray", lw=1, ls="--", label="(1 - 1/$\\beta$) / (1 + 1/$\\beta$)"
)
axes.set(
    xlabel="weight as drawn", ylabel="effective / drawn", title=f"Starts, width {WIDTH}, $\\beta$ = {beta:g}"
)
axes.legend(fontsize="small", loc="lower right")
plt.show()

# %% [markdown]
# ## Does the start matter, and what grows?
#
# A student of random teachers, AdamW, four seeds a point, every method over the same grid of rates: methods
# are compared at their own best. The lines are means, the dots seeds. One regression at one size says
# nothing of language models (for those: `python -m experiments sel`); what it shows is how a claim is to be
# tested.

# %%
STEPS, SEEDS = 400, 4
RATES = 1e-3 * 2.0 ** np.arange(7)
METHODS = ("plain", *STARTS)
teacher = [2 * kernel for kernel in init(jax.random.key(7))]
batches = jax.random.normal(jax.random.key(8), (STEPS, 64, FEATURES))
held_out = jax.random.normal(jax.random.key(9), (256, FEATURES))
variance = jnp.var(apply(teacher, held_out))


def loss(params: list, x: jax.Array) -> jax.Array:
    return jnp.mean((apply(sel.effective(params), x) - apply(teacher, x)) ** 2) / variance


def train(method: str, kernels: list[jax.Array], rate: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Effective weights after training, and the loss on held-out data before every step and at the end."""
    params = kernels if method == "plain" else sel.reparametrize(kernels, "*", start=method)
    optimizer = optax.chain(
        optax.adamw(optax.cosine_decay_schedule(rate, STEPS), mask=sel.decay_mask),
        sel.scale_rates(sel.annealed(STEPS)),
    )

    def step(carry: tuple, x: jax.Array) -> tuple[tuple, jax.Array]:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return (optax.apply_updates(params, updates), state), loss(params, held_out)

    (params, _), values = jax.lax.scan(step, (params, optimizer.init(params)), batches)
    return sel.effective(params), jnp.append(values, loss(params, held_out))


# All rates and seeds of a method are one program.
runs = {method: jax.jit(jax.vmap(partial(train, method))) for method in METHODS}
students = jax.vmap(init)(jax.random.split(jax.random.key(10), SEEDS))
starts = [jnp.tile(kernels, (len(RATES), 1, 1)) for kernels in students]
rate_of_run = jnp.repeat(RATES, SEEDS)
trained, losses = {}, {}
for method in METHODS:
    trained[method], values = runs[method](starts, rate_of_run)
    losses[method] = np.asarray(values[:, -1]).reshape(len(RATES), SEEDS)

# %%
COLORS = dict(zip(METHODS, ("black", "#d1603d", "#1b6ca8", "#3c8d5a"), strict=True))
figure, (rates, tails) = plt.subplots(1, 2, figsize=(11, 3.8))
for method in METHODS:
    mean, color = np.mean(losses[method], axis=1), COLORS[method]
    best = int(np.argmin(mean))
    rates.loglog(RATES, mean, color=color, label=method, lw=4 if method == "exact" else 1.5)
    rates.plot(RATES, losses[method], ".", ms=4, color=color)
    hidden = np.asarray(trained[method][1]).reshape(len(RATES), -1)[best]
    values = np.sort(np.abs(hidden))[::-1] * WIDTH**0.5
    tails.loglog(
        values,
        np.arange(1, values.size + 1) / values.size,
        color=color,
        label=method,
        lw=4 if method == "exact" else 1.5,
    )
    largest = f"largest |W| {values[0]:.1f} initial deviations"
    print(f"{method:10} loss {mean[best]:.3f} at rate {RATES[best]:.3f}, {largest}")
    assert mean[best] < 0.5
rates.set(xlabel="rate", ylabel="loss / variance of the teacher", title=f"After {STEPS} steps of AdamW")
rates.legend(fontsize="small")
tails.set(
    xlim=(0.1, None),
    xlabel="|W| / initial deviation",
    ylabel="share of weights above",
    title="Tails at each best rate",
)
tails.legend(fontsize="small")
plt.show()

# %% [markdown]
# For weights that are trained already the start does matter. The plain students go on, in curved space:
# from `mismatched`, another function, they have to learn again; `exact` and `anchored` start where they
# were.

# %%
best = int(np.argmin(np.mean(losses["plain"], axis=1)))
starts = [jnp.tile(x[best * SEEDS : (best + 1) * SEEDS], (len(RATES), 1, 1)) for x in trained["plain"]]
figure, axes = plt.subplots(figsize=(7, 3.6))
curves = {}
for method in METHODS:
    _, values = runs[method](starts, rate_of_run)
    curves[method] = np.asarray(values).reshape(len(RATES), SEEDS, -1)[1]
    mean, width = curves[method].mean(axis=0), 4 if method == "exact" else 1.5
    axes.semilogx(np.arange(STEPS + 1) + 1, mean, color=COLORS[method], label=method, lw=width)
title = f"Going on from trained weights, rate {RATES[1]:g}"
axes.set(xlabel="step + 1", ylabel="loss / variance of the teacher", title=title)
axes.legend(fontsize="small")
first = {method: curve[:, 0] for method, curve in curves.items()}
assert np.all(first["mismatched"] > 1.5 * first["plain"])
np.testing.assert_allclose(first["exact"], first["plain"], rtol=1e-4)
np.testing.assert_allclose(first["anchored"], first["plain"], rtol=1e-5)
plt.show()

# %% [markdown]
# ## Folding
#
# After training, `fold` gives plain arrays for the plain model: the same function, with nothing left of the
# map. `unfold` takes them back into the trained tree's space, with its scales.

# %%
key = jax.random.key(5)
tree = sel.reparametrize(fresh, "*", start="exact")
noise = lambda leaf: leaf + 0.02 * jax.random.normal(key, leaf.shape)  # noqa: E731
tree = jax.tree.map(noise, tree)  # scales too, as after training
folded = sel.fold(tree)
assert all(
    type(kernel) is type(fresh[0]) and kernel.shape == old.shape
    for kernel, old in zip(folded, fresh, strict=True)
)
np.testing.assert_allclose(apply(folded, inputs), apply(sel.effective(tree), inputs), rtol=1e-5, atol=1e-5)
again = sel.fold(sel.unfold(folded, like=tree))
for one, other in zip(folded, again, strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7)
print({"leaves in training": len(jax.tree.leaves(tree)), "leaves folded": len(jax.tree.leaves(folded))})
