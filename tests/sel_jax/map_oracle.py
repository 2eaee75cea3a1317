"""The map and its derivatives, one weight at a time as the formulas are written, in NumPy float64."""

from collections.abc import Mapping

import numpy as np

SATURATION = 40.0
ONES = {"e": 1.0, "l": 1.0, "m": 1.0, "n": 0.0}


def growth(x):
    """exp(x) - 1, continued by its tangent above the saturation."""
    low = np.minimum(x, SATURATION)
    return np.where(
        x > SATURATION, np.expm1(SATURATION) + np.exp(SATURATION) * (x - SATURATION), np.expm1(low)
    )


def steepness(x):
    return np.exp(np.minimum(x, SATURATION))


def paths(w, beta: float, e=1.0, l=1.0, m=1.0, n=0.0):  # noqa: E741
    """E(|w|) and the linear path of |w|."""
    size = np.abs(np.asarray(w, np.float64))
    return e / beta * np.exp(-n) * growth(beta * m * size), l / beta * size


def effective(w, beta: float, rule: str = "mismatch", **scales):
    exponential, linear = paths(w, beta, **scales)
    w = np.asarray(w, np.float64)
    if rule == "congruent":
        return np.sign(w) * (exponential + linear)
    return np.where(w >= 0, exponential + linear, -exponential + linear)


def by_weight(w, beta: float, rule: str = "mismatch", e=1.0, l=1.0, m=1.0, n=0.0):  # noqa: E741
    """(derivative by w, the sum of its paths' sizes); at w = 0 the mean of the branches'."""
    w = np.asarray(w, np.float64)
    exponential = e * m * np.exp(-n) * steepness(beta * m * np.abs(w))
    linear = l / beta + 0 * w if rule == "congruent" else l / beta * np.sign(w)
    return exponential + linear, np.abs(exponential) + np.abs(linear)


def by_scale(w, beta: float, rule: str = "mismatch", e=1.0, l=1.0, m=1.0, n=0.0) -> dict:  # noqa: E741
    """Derivatives of every effective weight by its own e, l, m and n."""
    w = np.asarray(w, np.float64)
    size, sign = np.abs(w), np.sign(w)
    outer = np.exp(-n) * growth(beta * m * size) / beta
    return {
        "e": sign * outer,
        "l": (w if rule == "congruent" else size) / beta,
        "m": sign * e * np.exp(-n) * steepness(beta * m * size) * size,
        "n": -sign * e * outer,
    }


def product(factors) -> np.ndarray:
    first, *rest = (np.asarray(factor, np.float64) for factor in factors)
    for factor in rest:
        first = first * factor
    return first


def by_factor(cotangent, w, beta: float, rule: str, factors: Mapping[str, tuple]) -> dict:
    """Derivatives of sum(cotangent * weights) by every factor: (value, sum of the summands' sizes)."""
    terms = by_scale(w, beta, rule, **{name: product(pair) for name, pair in factors.items()})
    found = {}
    for name, pair in factors.items():
        for i, factor in enumerate(pair):
            others = [np.asarray(other, np.float64) for j, other in enumerate(pair) if j != i]
            summand = np.asarray(cotangent, np.float64) * terms[name]
            for other in others:
                summand = summand * other
            kept = tuple(
                axis for axis in range(summand.ndim) if np.shape(factor)[axis] != summand.shape[axis]
            )
            found[name, i] = tuple(np.sum(x, axis=kept, keepdims=True) for x in (summand, np.abs(summand)))
    return found


def inverse(t, beta: float, rule: str = "mismatch", **scales):
    """Raw weights by bisection, for increasing maps: every one to the last bit of a float64."""
    t = np.asarray(t, np.float64)
    low, high = np.full(t.shape, -1e9), np.full(t.shape, 1e9)
    for _ in range(400):
        middle = np.where(
            (low < 0) & (high > 0) | (low * high == 0),
            (low + high) / 2,
            np.sign(low) * np.sqrt(np.abs(low * high)),
        )
        above = effective(middle, beta, rule, **scales) > t
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return (low + high) / 2
