"""The Polar Express's coefficients against its paper's list, and the property that defines them."""

import numpy as np
import pytest

from spectral import polar_express_coefficients

# arXiv:2505.16932, the list of coefficients for lower = 1e-3, before the safety factor.
PUBLISHED = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


def test_coefficients_match_the_published_list():
    found = polar_express_coefficients(8, safety=1.0)
    np.testing.assert_allclose(np.array(found), np.array(PUBLISHED), rtol=3e-6)
    # The first five are far from the fixed point and determined to many more digits.
    np.testing.assert_allclose(np.array(found[:5]), np.array(PUBLISHED[:5]), rtol=1e-9)


def test_safety_shrinks_the_argument_of_all_but_the_last():
    plain = np.array(polar_express_coefficients(6, safety=1.0))
    safe = np.array(polar_express_coefficients(6))
    shrink = 1.01 ** -np.array([1.0, 3.0, 5.0])
    np.testing.assert_allclose(safe[:-1], plain[:-1] * shrink, rtol=1e-13)
    np.testing.assert_allclose(safe[-1], plain[-1], rtol=1e-13)


@pytest.mark.parametrize("lower", [1e-3, 1e-2, 0.1, 0.5])
def test_each_polynomial_equioscillates(lower):
    """Chebyshev: the best of all a x + b x^3 + c x^5 has four points of equal, alternating error."""
    cushion = 0.02407327424182761
    low, high = lower, 1.0
    for a, b, c in polar_express_coefficients(6, lower=lower, safety=1.0):
        if low > 1 - 1e-3:  # from here on the errors are below float64's resolution on a grid
            break
        start = max(low, cushion * high)
        x = np.linspace(start, high, 20_001)
        y = a * x + b * x**3 + c * x**5
        inner = np.flatnonzero((np.diff(y[:-1]) * np.diff(y[1:])) < 0) + 1
        assert len(inner) == 2
        extremes = y[[0, *inner, -1]]
        error = (extremes.max() - extremes.min()) / 2
        centre = (extremes.max() + extremes.min()) / 2
        np.testing.assert_allclose(extremes - centre, error * np.array([-1, 1, -1, 1]), atol=1e-6)
        # Centred anew: the image of [low, high] is symmetric about 1, and is the next interval.
        image = a * np.array([low, x[inner[0]]]) + b * np.array([low, x[inner[0]]]) ** 3
        image += c * np.array([low, x[inner[0]]]) ** 5
        np.testing.assert_allclose(image.sum(), 2.0, atol=1e-6)
        low, high = image
    assert low > 0.5


def test_composition_maps_the_interval_to_one():
    x = np.geomspace(1e-3, 1.0, 20_001)
    for a, b, c in polar_express_coefficients(10):
        x = a * x + b * x**3 + c * x**5
    np.testing.assert_allclose(x, 1.0, atol=1e-6)


@pytest.mark.parametrize("lower", [1e-12, 1e-6, 0.03, 0.3, 0.9, 0.999, 0.99999])
def test_coefficients_exist_for_any_lower(lower):
    assert np.isfinite(polar_express_coefficients(12, lower=lower)).all()


@pytest.mark.parametrize("steps", [0, -1])
def test_coefficients_need_a_step(steps):
    with pytest.raises(ValueError, match=f"at least one step is needed, got {steps}"):
        polar_express_coefficients(steps)


@pytest.mark.parametrize("lower", [2.0, -1.0])
def test_coefficients_reject_an_impossible_lower(lower):
    with pytest.raises(ValueError, match="lower"):
        polar_express_coefficients(3, lower=lower)
