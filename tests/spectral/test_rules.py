"""The table of the spectral parametrisation, by hand-computed numbers."""

import math

import pytest

from spectral import Role, gaussian_sigma, learning_rate_scale, relative_learning_rate, target_norm

# fan_in 256, fan_out 1024 (the first MLP matrix); fan_in 1024, fan_out 256 (the second); square.
UP, DOWN, SQUARE = (256, 1024), (1024, 256), (64, 64)


@pytest.mark.parametrize(("fans", "expected"), [(UP, 2.0), (DOWN, 0.5), (SQUARE, 1.0), ((1, 9), 3.0)])
def test_target_norm(fans, expected):
    assert target_norm(*fans) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("role", "fans", "simplified", "expected"),
    [
        (Role.MATRIX, UP, False, 2 / 48),
        (Role.MATRIX, DOWN, False, 0.5 / 48),
        (Role.MATRIX, SQUARE, False, 1 / 16),
        (Role.MATRIX, UP, True, 1 / 16),
        (Role.MATRIX, DOWN, True, 0.5 / 32),
        (Role.MATRIX, SQUARE, True, 1 / 8),
        (Role.EMBEDDING, (50257, 768), False, 1.0),
        (Role.EMBEDDING, (50257, 768), True, 1.0),
        (Role.BIAS, (1, 768), False, 0.0),
        (Role.GAIN, (1, 768), False, 0.0),
    ],
)
def test_gaussian_sigma(role, fans, simplified, expected):
    assert gaussian_sigma(role, *fans, simplified=simplified) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("ratio", [1 / 64, 1 / 4, 1, 4, 64])
def test_simplified_sigma_is_at_most_twice_the_exact_one(ratio):
    fans = 4096, int(4096 * ratio)
    quotient = gaussian_sigma(Role.MATRIX, *fans, simplified=True) / gaussian_sigma(Role.MATRIX, *fans)
    assert 1 < quotient <= 2 + 1e-12


@pytest.mark.parametrize(
    ("role", "optimizer", "fans", "expected"),
    [
        (Role.MATRIX, "sgd", UP, 4.0),
        (Role.MATRIX, "sgd", DOWN, 0.25),
        (Role.MATRIX, "adam", UP, 1 / 256),
        (Role.MATRIX, "adam", DOWN, 1 / 1024),
        (Role.MATRIX, "muon", UP, 2.0),
        (Role.MATRIX, "muon", DOWN, 0.5),
        (Role.EMBEDDING, "sgd", (50257, 768), 768.0),
        (Role.EMBEDDING, "adam", (50257, 768), 1.0),
        (Role.BIAS, "sgd", (1, 768), 768.0),
        (Role.BIAS, "adam", (1, 768), 1.0),
        (Role.GAIN, "sgd", (1, 768), 768.0),
        (Role.GAIN, "adam", (1, 768), 1.0),
    ],
)
def test_learning_rate_scale(role, optimizer, fans, expected):
    assert learning_rate_scale(role, optimizer, *fans) == pytest.approx(expected, rel=1e-15)


def test_matrix_rules_give_every_update_the_target_norm():
    """SGD's gradient has norm sqrt(in / out), Adam's signs sqrt(in * out), Muon's update 1."""
    fan_in, fan_out = DOWN
    update_norm = {"sgd": math.sqrt(fan_in / fan_out), "adam": math.sqrt(fan_in * fan_out), "muon": 1.0}
    for optimizer, norm in update_norm.items():
        step = learning_rate_scale(Role.MATRIX, optimizer, fan_in, fan_out) * norm
        assert step == pytest.approx(target_norm(fan_in, fan_out), rel=1e-12)


@pytest.mark.parametrize(
    ("role", "optimizer", "fans", "base", "expected"),
    [
        (Role.MATRIX, "adam", (1024, 1024), (256, 256), 0.25),
        (Role.MATRIX, "sgd", (1024, 1024), (256, 256), 1.0),
        (Role.MATRIX, "muon", (1024, 50257), (256, 50257), 0.5),
        (Role.EMBEDDING, "sgd", (50257, 1024), (50257, 256), 4.0),
        (Role.EMBEDDING, "adam", (50257, 1024), (50257, 256), 1.0),
        (Role.BIAS, "sgd", (1, 1024), (1, 256), 4.0),
        (Role.MATRIX, "adam", (256, 256), (256, 256), 1.0),
    ],
)
def test_relative_learning_rate(role, optimizer, fans, base, expected):
    assert relative_learning_rate(role, optimizer, fans, base) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("role", [Role.EMBEDDING, Role.BIAS, Role.GAIN])
def test_muon_is_for_matrices(role):
    with pytest.raises(ValueError, match=f"not for a parameter with role {role.value}: use Adam"):
        learning_rate_scale(role, "muon", 4, 4)


def test_unknown_optimizer():
    with pytest.raises(ValueError, match="unknown optimizer kind 'lion': choose sgd, adam or muon"):
        learning_rate_scale(Role.MATRIX, "lion", 4, 4)


@pytest.mark.parametrize("fans", [(0, 4), (4, 0), (-1, 4)])
def test_fans_must_be_positive(fans):
    message = f"fan_in and fan_out must be at least 1, got {fans[0]} and {fans[1]}"
    for call in (
        lambda: target_norm(*fans),
        lambda: gaussian_sigma(Role.MATRIX, *fans),
        lambda: learning_rate_scale(Role.MATRIX, "adam", *fans),
        lambda: relative_learning_rate(Role.MATRIX, "adam", (4, 4), fans),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_roles_are_checked():
    with pytest.raises((TypeError, ValueError)):
        gaussian_sigma("matrix", 4, 4)
    with pytest.raises((TypeError, ValueError)):
        learning_rate_scale("matrix", "adam", 64, 64)
