"""Tangent-step problems (G, W) with prescribed spectra, drawn in float64."""

import numpy as np

SPECTRA = ("flat", "i^-0.5", "i^-1", "i^-1.5", "half-rank", "parallel", "zero")


def orthonormal_columns(rng: np.random.Generator, m: int, n: int) -> np.ndarray:
    """Haar-distributed: the signs of QR's diagonal are taken out."""
    q, r = np.linalg.qr(rng.normal(size=(m, n)))
    return q * np.sign(np.diag(r))


def random_point(rng: np.random.Generator, manifold: str, m: int, n: int) -> np.ndarray:
    """A random point at radius 1; DGram's column norms are uniform in (0.5, 2)."""
    if manifold == "oblique":
        w = rng.normal(size=(m, n))
        return w / np.linalg.norm(w, axis=0)
    w = orthonormal_columns(rng, m, n)
    return w * rng.uniform(0.5, 2.0, n) if manifold == "dgram" else w


def gradient(rng: np.random.Generator, spectrum: str, w: np.ndarray) -> np.ndarray:
    """G of W's shape with spectral norm 1 and random singular vectors, or W itself, or zero."""
    m, n = w.shape
    if spectrum == "parallel":
        return w / np.linalg.norm(w, 2)
    if spectrum == "zero":
        return np.zeros((m, n))
    i = np.arange(1.0, n + 1)
    s = {"flat": i**0.0, "half-rank": 1.0 * (i <= n // 2)}.get(spectrum)
    if s is None:
        s = i ** float(spectrum.removeprefix("i^"))
    return (orthonormal_columns(rng, m, n) * s) @ orthonormal_columns(rng, n, n).T


def problem(manifold: str, m: int, n: int, spectrum: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(G, W) in float32, as the solver gets them."""
    rng = np.random.default_rng(seed)
    w = random_point(rng, manifold, m, n)
    return gradient(rng, spectrum, w).astype(np.float32), w.astype(np.float32)
