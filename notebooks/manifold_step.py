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
# # The manifold step
#
# A manifold here is a linear condition on the Gram matrix of $W \in \mathbb{R}^{m \times n}$, $m \ge n$:
# what a self-adjoint projector $P$ on symmetric matrices sees of $W^\top W$ is held. $P$ is the identity on
# Stiefel, the off-diagonal part on DGram, the diagonal on Oblique, and zero for plain Muon. The step is
#
# $$A^\star = \arg\max_A\ \langle G, A\rangle \quad\text{subject to}\quad
#   \|A\|_2 \le 1,\quad P(A^\top W + W^\top A) = 0,$$
#
# and its dual $\min_{L = P(L)} \|G + 2 W L\|_*$: a shift of the gradient by a vector normal to the
# manifold, of which $A^\star$ is the matrix sign wherever $G + 2WL^\star$ has full rank. Any $L$ bounds the
# optimum from above, any feasible $A$ from below; the ratio is the gap that `manifold_muon` reports.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from manifold_muon import DGram, DualAscent, GramSolver, Manifold, Oblique, Stiefel, Unconstrained
from spectral import msign

MANIFOLDS = {"Stiefel": Stiefel(), "DGram": DGram(), "Oblique": Oblique()}
COLORS = dict(zip(MANIFOLDS, ("#1b6ca8", "#d1603d", "#3c8d5a"), strict=True))
plt.rcParams.update(
    {"figure.dpi": 64, "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3}
)


def inner(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64)))


def norm(a: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(a, np.float64), 2))


def symmetric(w: jax.Array, a: jax.Array) -> jax.Array:
    """W'A + A'W: the first-order change of the Gram matrix along A."""
    return w.T @ a + a.T @ w


def tangent_part(w: jax.Array, a: jax.Array, manifold: Manifold) -> jax.Array:
    """The orthogonal projection of A on the tangent space, at a W with orthonormal columns."""
    return a - w @ manifold.project_symmetric(symmetric(w, a)) / 2


# %% [markdown]
# ## A tangent ball that can be drawn
#
# At $W = (I; 0) \in \mathrm{St}(4, 2)$ the tangent directions are $A = (\Omega; B)$ with $\Omega$ skew, $a$
# its one entry, and $A^\top A = a^2 I + B^\top B$. On the slice $B = \mathrm{diag}(b, c)$ the spectral unit
# ball is therefore $a^2 + \max(b^2, c^2) \le 1$, the intersection of two cylinders: edges, on which a
# linear function takes its maximum, and nothing that a rescaled gradient or a projected sign would find.
#
# Take $G = (sI + \Omega_\alpha; \mathrm{diag}(\beta, \gamma))$. Setting the off-diagonal of $B$ to zero
# shortens $A$ and changes nothing in $\langle G, A \rangle = 2 a \alpha + b \beta + c \gamma$, so the
# optimum lies in the slice, on the edge $b = c$ (for $\beta, \gamma > 0$), with the value $\sqrt{4\alpha^2
# + (\beta + \gamma)^2}$. The normal part $s$ is no direction of descent on the manifold, but `msign` sees
# it.

# %%
ALPHA, BETA, GAMMA = 0.5, 1.6, 0.3
W2 = jnp.eye(4, 2)


def gradient(s: float) -> jax.Array:
    return jnp.array([[s, -ALPHA], [ALPHA, s], [BETA, 0.0], [0.0, GAMMA]])


def coordinates(a: jax.Array) -> np.ndarray:
    """(a, b, c) of a tangent direction, scaled to spectral norm 1."""
    return np.array([a[1, 0], a[2, 0], a[3, 1]]) / norm(a)


optimum = np.hypot(2 * ALPHA, BETA + GAMMA)
a, b = np.array([2 * ALPHA, BETA + GAMMA]) / optimum
solution = GramSolver(tolerance=1e-4, max_iterations=50)(gradient(1.0), W2, Stiefel())
assert norm(solution.direction) < 1 + 1e-5
assert abs(inner(gradient(1.0), solution.direction) / optimum - 1) < 1e-3
np.testing.assert_allclose(coordinates(solution.direction), (a, b, b), atol=0.02)


def rivals(s: float) -> dict[str, jax.Array]:
    """Directions that cost no solver: tangent parts of the sign and of the gradient, and the sign of that."""
    g = gradient(s)
    part = tangent_part(W2, g, Stiefel())
    return {
        "projected msign(G)": tangent_part(W2, msign(g, method="svd"), Stiefel()),
        "projected G": part,
        "projected msign(projected G)": tangent_part(W2, msign(part, method="svd"), Stiefel()),
    }


ELEVATION, AZIMUTH = 25, 40
polar, azimuth = np.deg2rad([ELEVATION, AZIMUTH])
EYE = np.array([np.cos(polar) * np.cos(azimuth), np.cos(polar) * np.sin(azimuth), np.sin(polar)])
figure = plt.figure(figsize=(9.5, 3.5))
solid = figure.add_subplot(1, 2, 1, projection="3d", computed_zorder=False)
angle, height = np.meshgrid(np.linspace(-np.pi, np.pi, 61), np.linspace(-1, 1, 9))
for straight in (0, 1):
    # On the cylinder a^2 + b^2 = 1 the other coordinate goes from -|b| to |b|, and the other way round.
    x, y = np.sin(angle), np.cos(angle)
    sides = (y, y * height) if straight == 0 else (y * height, y)
    value = (2 * ALPHA * x + BETA * sides[0] + GAMMA * sides[1]) / optimum
    # Faces turned away would be drawn over those in front: the normal is (y, x) on its cylinder.
    seen = np.where(y * EYE[straight] + x * EYE[2] > -0.1, 1.0, np.nan)
    colors = plt.cm.coolwarm((value + 1) / 2)
    solid.plot_surface(sides[0] * seen, sides[1], x, facecolors=colors, shade=False, rstride=1, cstride=1)
marks = {"optimum": solution.direction, **rivals(1.0)}
for (name, direction), marker in zip(marks.items(), "*os^", strict=True):
    x, *sides = coordinates(direction)
    color, size = ("yellow", 150) if name == "optimum" else ("white", 45)
    solid.scatter(*sides, x, s=size, marker=marker, color=color, edgecolor="black", label=name, zorder=9)
solid.set(xlabel="b", ylabel="c", zlabel="a", title="Tangent unit ball; the redder, the larger <G, A>")
solid.set(xticks=(-1, 0, 1), yticks=(-1, 0, 1), zticks=(-1, 0, 1))
solid.view_init(elev=ELEVATION, azim=AZIMUTH)
solid.legend(fontsize="small", loc="upper left", bbox_to_anchor=(-0.45, 1.0))

shares = np.linspace(0, 4, 41)
values = [{name: inner(gradient(s), d) / norm(d) for name, d in rivals(s).items()} for s in shares]
lines = figure.add_subplot(1, 2, 2)
lines.axhline(1, color="black", label="optimum: does not see s")
for name in values[0]:
    lines.plot(shares, [row[name] / optimum for row in values], label=name)
lines.set(xlabel="s, the part of G normal to the manifold", ylabel="<G, A> / optimum", ylim=(0.7, 1.02))
lines.set_title("Value reached at spectral norm 1")
lines.legend(fontsize="small")
assert all(value <= optimum * (1 + 1e-5) for row in values for value in row.values())

# %% [markdown]
# ## One point, one gradient, three manifolds
#
# A $W$ with orthonormal columns lies on all three, and their tangent spaces are nested: Stiefel's is the
# intersection of the other two. So the optima are ordered, and below $\|G\|_*$, plain Muon's. The
# gradient's singular values decay as $i^{-1}$. The bounds below are
# recomputed in float64, by NumPy, from the returned direction and multiplier alone.

# %%
M, N = 96, 64
keys = jax.random.split(jax.random.key(0), 3)
W = Stiefel().project(jax.random.normal(keys[0], (M, N)))
U, V = jax.random.orthogonal(keys[1], M)[:, :N], jax.random.orthogonal(keys[2], N)
G = (U / jnp.arange(1, N + 1)) @ V.T

tight = GramSolver(tolerance=1e-3, max_iterations=100)
solutions = {name: tight(G, W, manifold) for name, manifold in MANIFOLDS.items()}
best = {name: inner(G, x.direction) for name, x in solutions.items()}
nuclear = np.linalg.svd(np.asarray(G, np.float64), compute_uv=False).sum()

rms_singular_value = np.linalg.norm(G) / np.sqrt(N)  # the multipliers' unit
for name, manifold in MANIFOLDS.items():
    direction = solutions[name].direction
    assert norm(direction) < 1 + 1e-4
    assert jnp.abs(manifold.project_symmetric(symmetric(W, direction))).max() < 1e-4
    shifted = np.asarray(G, np.float64) + 2 * np.asarray(W @ solutions[name].dual) * rms_singular_value
    gap = 1 - best[name] / np.linalg.svd(shifted, compute_uv=False).sum()
    share, iterations = best[name] / nuclear, solutions[name].iterations
    print(f"{name:8} {share:.4f} of ||G||_*   gap {gap:.1e}   iterations {iterations}")
    assert gap < 1.5e-3
assert best["Stiefel"] < min(best["DGram"], best["Oblique"]) < nuclear

# %% [markdown]
# What the step may do to the Gram matrix, to first order: nothing on Stiefel; change the columns' norms on
# DGram, their angles on Oblique; anything without a constraint. In each picture the part that $P$ sees is
# zero.

# %%
figure, axes = plt.subplots(1, 4, figsize=(10, 2.6))
free = GramSolver()(G, W, Unconstrained()).direction
for panel, (name, direction) in zip(
    axes, {**{k: x.direction for k, x in solutions.items()}, "unconstrained": free}.items(), strict=True
):
    change = symmetric(W, direction)[:24, :24]
    image = panel.imshow(change, cmap="RdBu_r", vmin=-0.6, vmax=0.6)
    panel.set(
        title=f"{name}: $W^T\\!A + A^T W$", xlabel="column", ylabel="column" if name == "Stiefel" else ""
    )
    panel.grid(False)
figure.colorbar(image, ax=axes, shrink=0.8, label="first 24 x 24 entries")
plt.show()
# %% [markdown]
# Directions that need no solver, all made tangent and scaled to spectral norm 1, as shares of the optimum;
# on the right their singular values on Stiefel. The optimum spends the whole ball, a projected sign falls
# short of it in many directions for the sake of its longest.

# %%
signs = msign(G, method="svd")
figure, (bars, spectra) = plt.subplots(1, 2, figsize=(10, 3.3))
shares = {}
for name, manifold in MANIFOLDS.items():
    part = tangent_part(W, G, manifold)
    found = {
        "projected G": part,
        "projected msign(G)": tangent_part(W, signs, manifold),
        "projected msign(projected G)": tangent_part(W, msign(part, method="svd"), manifold),
        "paper's dual ascent, 20 signs": tangent_part(W, DualAscent()(G, W, manifold).direction, manifold),
        "optimum": solutions[name].direction,
    }
    shares[name] = {rival: inner(G, d) / norm(d) / best[name] for rival, d in found.items()}
    if name == "Stiefel":
        for rival, d in found.items():
            values = np.linalg.svd(np.asarray(d) / norm(d), compute_uv=False)
            spectra.plot(np.arange(1, N + 1), values, label=rival)
rows = np.arange(len(found))
for offset, (name, row) in enumerate(shares.items()):
    bars.barh(rows + 0.26 * (offset - 1), row.values(), height=0.24, color=COLORS[name], label=name)
bars.set_yticks(rows, list(found))
bars.set(xlabel="<G, A> / optimum", xlim=(0, 1.02), title="Value reached at spectral norm 1")
bars.legend(fontsize="small", loc="lower right")
spectra.set(
    xlabel="index",
    ylabel="singular value of A",
    title="Stiefel: how much of the ball is spent",
    ylim=(0, 1.05),
)
spectra.legend(fontsize="small", loc="lower left")
assert all(value < 1 + 1e-3 for row in shares.values() for value in row.values())

# %% [markdown]
# ## The gap against iterations
#
# Every iteration is a reweighted least-squares step on $n \times n$ matrices with Anderson acceleration.
# The reported gap is a certificate at any iteration: it bounds the true distance from the optimum (dashed,
# against the tight solution) from above.

# %%
ITERATIONS = {"Stiefel": (0, 1, 3, 8, 16), "DGram": (0, 1, 3, 8, 16), "Oblique": (0, 1, 3)}
figure, axes = plt.subplots(figsize=(6.5, 3.3))
for name, counts in ITERATIONS.items():
    found = [
        GramSolver(tolerance=1e-5, max_iterations=k, early_stopping=False, method="eigh")(
            G, W, MANIFOLDS[name]
        )
        for k in counts
    ]
    certified = np.array([float(x.gap) for x in found])
    true = np.array([1 - inner(G, x.direction) / best[name] for x in found])
    assert np.all(true <= certified + 1e-4), name
    assert certified[-1] < certified[0] / 10, name
    axes.semilogy(counts, certified, marker="o", color=COLORS[name], label=f"{name}: certified gap")
    # Below the tight solution's own gap, the distance from it says nothing.
    seen = true > 2e-3
    axes.semilogy(np.array(counts)[seen], true[seen], "--", marker=".", color=COLORS[name])
axes.axhline(1e-2, color="gray", lw=1)
axes.text(4, 8.2e-3, "default tolerance", color="gray", fontsize="small")
axes.set(
    xlabel="iterations", ylabel="relative gap", title="Cold starts; dashed: true distance from the optimum"
)
axes.legend(fontsize="small")
plt.show()
# %% [markdown]
# ## Off the manifold and back
#
# For a tangent direction the cross terms cancel: on Stiefel $(W - \eta A)^\top (W - \eta A) = I + \eta^2
# A^\top A$, so that before the retraction the singular values lie in $[1, \sqrt{1 + \eta^2}]$, the
# constraint is off by $O(\eta^2)$, and the retraction costs the step nothing to first order. A direction
# that is not tangent, such as `msign(G)`, is off by $O(\eta)$, and the retraction takes its normal
# part back.

# %%
etas = np.geomspace(1e-3, 0.5, 12)
directions = {"optimum": solutions["Stiefel"].direction, "msign(G)": signs}
records: dict[str, dict[str, list[float]]] = {}
for name, direction in directions.items():
    record = records.setdefault(name, {"violation": [], "after": [], "moved": [], "descent": []})
    for eta in etas:
        moved = W - eta * direction
        back = Stiefel().retract(moved)
        record["violation"].append(float(Stiefel().violation(moved)))
        record["after"].append(float(Stiefel().violation(back)))
        record["moved"].append(norm(back - moved))
        record["descent"].append(inner(G, W - back) / eta / best["Stiefel"])
# Below, the violation is the rounding of W; above, the next order shows.
fitted = (etas > 0.01) & (etas < 0.1)
slopes = {
    name: np.polyfit(np.log(etas[fitted]), np.log(np.array(record["violation"])[fitted]), 1)[0]
    for name, record in records.items()
}
assert abs(slopes["optimum"] - 2) < 0.05 and abs(slopes["msign(G)"] - 1) < 0.1
assert max(records["optimum"]["after"] + records["msign(G)"]["after"]) < 1e-6

figure, (violation, descent, spectra) = plt.subplots(1, 3, figsize=(11.5, 3.3))
for (name, record), color in zip(records.items(), ("black", "#d1603d"), strict=True):
    violation.loglog(
        etas, record["violation"], marker="o", color=color, label=f"{name}, slope {slopes[name]:.2f}"
    )
    violation.loglog(etas, record["after"], ":", color=color, label=f"{name}, retracted")
    descent.semilogx(etas, record["descent"], marker="o", color=color, label=name)
violation.set(
    ylim=(1e-8, 1e3), xlabel="step $\\eta$", ylabel="RMS of $W^T W - I$", title="Constraint violation"
)
violation.legend(fontsize="small", loc="upper left")
descent.set(
    xlabel="step $\\eta$", ylabel="<G, W - W'> / (optimum x $\\eta$)", title="Descent after the retraction"
)
descent.legend(fontsize="small")
ETA = 0.3
for name, color in zip(directions, ("black", "#d1603d"), strict=True):
    values = np.linalg.svd(np.asarray(W - ETA * directions[name]), compute_uv=False)
    spectra.plot(np.arange(1, N + 1), values, color=color, label=f"W - {ETA} A, A = {name}")
    if name == "optimum":
        assert values.min() > 1 - 1e-5 and values.max() < np.sqrt(1 + ETA**2) + 1e-5
spectra.axhline(np.sqrt(1 + ETA**2), color="gray", ls="--", lw=1, label="$(1 + \\eta^2)^{1/2}$")
spectra.axhline(1, color="#1b6ca8", ls=":", label="after the retraction")
spectra.set(xlabel="index", ylabel="singular value", title=f"Singular values, $\\eta$ = {ETA}")
spectra.legend(fontsize="small")
assert records["optimum"]["descent"][0] > records["msign(G)"]["descent"][0]
