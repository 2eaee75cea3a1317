"""Points of the manifolds by NumPy, their tangent directions, and what their constraints leave."""

import numpy as np

from manifold_muon import DGram, DualAscent, Oblique, Stiefel, Unconstrained

MANIFOLDS = {
    "stiefel": Stiefel(),
    "stiefel-2": Stiefel(radius=2.0),
    "dgram": DGram(),
    "dgram-svd": DGram(retraction="svd"),
    "oblique": Oblique(),
    "oblique-2": Oblique(radius=2.0),
    "unconstrained": Unconstrained(),
}
# Few iterations: these tests are about where weights end, not about the best direction.
QUICK = DualAscent(iterations=3)


def polar(x: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u @ vt


def tall_matrices(seed: int, shape: tuple[int, ...] = (3, 9, 5)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on_manifold(name: str, seed: int = 0, shape: tuple[int, ...] = (3, 9, 5)) -> np.ndarray:
    """Tall points of the manifold, by NumPy."""
    w = np.random.default_rng(seed).normal(size=shape)
    scales = np.random.default_rng(seed + 1).uniform(0.3, 3.0, (*shape[:-2], 1, shape[-1]))
    radius = 2.0 if name.endswith("-2") else 1.0
    if name.startswith("stiefel"):
        w = radius * polar(w)
    elif name.startswith("dgram"):
        w = polar(w) * scales
    elif name.startswith("oblique"):
        w = radius * w / np.linalg.norm(w, axis=-2, keepdims=True)
    return w.astype(np.float32)


def residual(name: str, w: np.ndarray) -> np.ndarray:
    """||H||_F / n of what the constraint wants to be zero, one number a matrix."""
    w = np.asarray(w, np.float64)
    if name.endswith("-2"):
        w = w / 2.0
    if name.startswith("dgram"):
        w = w / np.linalg.norm(w, axis=-2, keepdims=True)
    n = w.shape[-1]
    h = np.swapaxes(w, -1, -2) @ w - np.eye(n)
    if name.startswith("dgram"):
        h = h * (1 - np.eye(n))
    if name.startswith("oblique"):
        h = h * np.eye(n)
    if name == "unconstrained":
        h = 0 * h
    return np.linalg.norm(h, axis=(-2, -1)) / n


def frame(w: np.ndarray) -> np.ndarray:
    w = w.astype(np.float64)
    q = polar(w / np.linalg.norm(w, axis=-2, keepdims=True))
    return q * np.sum(q * w, axis=-2, keepdims=True)


def tangent(name: str, w: np.ndarray, a: np.ndarray) -> np.ndarray:
    """The nearest tangent direction at w, over its spectral norm."""
    d = np.sum(w * w, axis=-2)
    defect = np.swapaxes(w, -1, -2) @ a
    c = (defect + np.swapaxes(defect, -1, -2)) / (d[..., :, None] + d[..., None, :])
    if name.startswith("dgram"):
        c *= 1 - np.eye(w.shape[-1])
    a = a - w @ c
    return a / np.linalg.norm(a, 2, axis=(-2, -1))[..., None, None]
