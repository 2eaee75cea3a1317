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
# # A coordinate check of your own model
#
# The spectral condition asks every matrix, and each of its updates, for a spectral norm of the order of
# $\sqrt{n_\text{out} / n_\text{in}}$. Where it holds, the RMS of every layer's features $h$ and that of
# their changes $\Delta h$ do not depend on the width $n$: the fitted exponents of $n$ are about 0.
# `coordinate_check` trains a few steps at several widths and fits them. It needs pure functions and knows
# no framework; `spectral.linen` and `spectral.nnx` make them from Flax modules.

# %%
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import linen as nn
from flax import nnx

from spectral import (
    Role,
    coordinate_check,
    decide,
    format_decisions,
    learning_rate_multipliers,
    reinitialize,
    spectral_adamw,
    spectral_normal,
)
from spectral.linen import linen_features
from spectral.nnx import nnx_functions
from spectral.paths import map_named

# A figure that pyplot did not make is shown as a picture only with this.
# %matplotlib inline
plt.rcParams["figure.dpi"] = 64

WIDTHS, BASE, FEATURES, OUTPUTS = (64, 128, 256, 512), 64, 16, 4
x = jax.random.normal(jax.random.key(0), (64, FEATURES))
batch = (x, jnp.sin(2 * x[:, :OUTPUTS]) * x[:, OUTPUTS : 2 * OUTPUTS])
RATE, STEPS, SEEDS = 3e-3, 6, (0, 1)


def squared_error(outputs: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jnp.mean((outputs - batch[1]) ** 2)


# %% [markdown]
# ## Standard parametrisation
#
# LeCun's initialisation and one Adam rate for all layers and widths. An Adam update has entries of the size
# of the rate and, since gradients of all examples agree, a spectral norm of the order of $\eta\, n$: a
# hidden layer's change grows as $n$, until the nonlinearity and the loss hold it back.

# %%


class MLP(nn.Module):
    width: int
    kernel_init: Callable = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in ("first", "second", "third"):
            x = nn.tanh(nn.Dense(self.width, kernel_init=self.kernel_init, name=name)(x))
        return nn.Dense(OUTPUTS, kernel_init=self.kernel_init, name="readout")(x)


def standard(width: int, seed: int) -> tuple:
    model = MLP(width)
    params = model.init(jax.random.key(seed), x)
    loss = lambda params, batch: squared_error(model.apply(params, batch[0]), batch)  # noqa: E731
    return params, linen_features(model, lambda batch: batch[0]), loss, optax.adam(RATE)


check = coordinate_check(standard, WIDTHS, batch=batch, steps=STEPS, seeds=SEEDS)
print(check)
assert min(check.slopes[name].changes for name in ("second", "third")) > 0.3
check.draw()

# %% [markdown]
# ## Spectral parametrisation, in Linen
#
# Two changes: the initialiser, and an optimiser that knows the shapes at the width where its rate was
# tuned. At that width it is `optax.adamw`, to the bit.

# %%


def linen(width: int, seed: int) -> tuple:
    model = MLP(width, spectral_normal())
    params = model.init(jax.random.key(seed), x)
    base = jax.eval_shape(MLP(BASE).init, jax.random.key(0), x)
    loss = lambda params, batch: squared_error(model.apply(params, batch[0]), batch)  # noqa: E731
    return params, linen_features(model, lambda batch: batch[0]), loss, spectral_adamw(RATE, base)


check = coordinate_check(linen, WIDTHS, batch=batch, steps=STEPS, seeds=SEEDS)
print(check)
assert all(abs(slope.changes) < 0.2 for slope in check.slopes.values())
check.draw()

# %% [markdown]
# The rule reads roles and fans from names and shapes; print what it took each parameter for, and what it
# makes of the rate. What it cannot tell it refuses, and `roles` or `dimension_numbers` say.

# %%
wide, base = (jax.eval_shape(MLP(width).init, jax.random.key(0), x) for width in (512, BASE))
multipliers = learning_rate_multipliers(wide, base)
print(format_decisions(decide(wide), multipliers))
assert multipliers["params/second/kernel"] == multipliers["params/readout/kernel"] == BASE / 512
assert multipliers["params/first/kernel"] == 1  # its fan-in, the data's, does not grow
assert decide(wide)["params/readout/kernel"].role is Role.READOUT

params = MLP(BASE).init(jax.random.key(0), x)
gradient = jax.tree.map(jnp.cos, params)
ours, theirs = (
    optimizer.update(gradient, optimizer.init(params), params)[0]
    for optimizer in (spectral_adamw(RATE, base), optax.adamw(RATE))
)
assert jax.tree.all(jax.tree.map(jnp.array_equal, ours, theirs))

# %% [markdown]
# ## The same in NNX and in Equinox
#
# `nnx_functions` splits a module into parameters and pure functions. An Equinox model is its own tree of
# parameters, and the features are whatever a function of your own returns. Neither is told an initialiser:
# `reinitialize` draws a whole tree by the same roles.

# %%


class NnxMLP(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(FEATURES, width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
        self.third, self.readout = nnx.Linear(width, width, rngs=rngs), nnx.Linear(width, OUTPUTS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (self.first, self.second, self.third):
            x = nnx.tanh(layer(x))
        return self.readout(x)


def in_nnx(width: int, seed: int) -> tuple:
    params, features, apply = nnx_functions(NnxMLP(width, nnx.Rngs(0)), lambda batch: batch[0])
    base = nnx.state(nnx.eval_shape(lambda: NnxMLP(BASE, nnx.Rngs(0))), nnx.Param)
    loss = lambda params, batch: squared_error(apply(params, batch[0]), batch)  # noqa: E731
    return reinitialize(params, jax.random.key(seed)), features, loss, spectral_adamw(RATE, base)


# %%


def equinox_mlp(width: int) -> eqx.nn.MLP:
    return eqx.nn.MLP(FEATURES, OUTPUTS, width, depth=3, activation=jnp.tanh, key=jax.random.key(0))


def layers(model: eqx.nn.MLP, x: jax.Array) -> dict[str, jax.Array]:
    found = {}
    for name, layer in zip(("first", "second", "third", "readout"), model.layers, strict=True):
        found[name] = jax.vmap(layer)(x)
        x = jnp.tanh(found[name])
    return found


def in_equinox(width: int, seed: int) -> tuple:
    roles = {"layers/3/weight": Role.READOUT}  # no name says so; Equinox's weights are (out, in)
    params, static = eqx.partition(equinox_mlp(width), eqx.is_array)
    base = eqx.filter(equinox_mlp(BASE), eqx.is_array)
    features = lambda params, batch: layers(eqx.combine(params, static), batch[0])  # noqa: E731
    loss = lambda params, batch: squared_error(features(params, batch)["readout"], batch)  # noqa: E731
    start = reinitialize(params, jax.random.key(seed), roles=roles)
    return start, features, loss, spectral_adamw(RATE, base, roles=roles)


checks = {"linen": check}
for name, make in {"nnx": in_nnx, "equinox": in_equinox}.items():
    checks[name] = coordinate_check(make, WIDTHS, batch=batch, steps=STEPS, seeds=(0,))
for name, found in checks.items():
    changes = {layer: found.slopes[layer].changes for layer in ("first", "second", "third", "readout")}
    print(f"{name:8}", "  ".join(f"{layer} {slope:+.2f}" for layer, slope in changes.items()))
    assert all(abs(slope) < 0.2 for slope in changes.values()), name

# %% [markdown]
# ## A mistake, and where it shows
#
# The check names the layer. Here one layer's rate is left as it was at the base, as a pattern that misses a
# parameter would: its own features change more the wider the model, and with them all later ones; those
# before it hardly do.

# %%


def one_rate_forgotten(width: int, seed: int) -> tuple:
    params, features, loss, optimizer = linen(width, seed)
    forgotten = lambda path, u: u * width / BASE if path == "params/third/kernel" else u  # noqa: E731
    wrong = optax.stateless(lambda updates, _: map_named(forgotten, updates))
    return params, features, loss, optax.chain(optimizer, wrong)


check = coordinate_check(one_rate_forgotten, WIDTHS, batch=batch, steps=STEPS, seeds=(0,))
print(check)
slopes = check.slopes
assert max(abs(slopes[name].changes) for name in ("first", "second")) < 0.3 < slopes["third"].changes
check.draw()
