"""Residuals against brute force, for equal and unequal std."""

import math

import pytest
import torch
from scipy import stats
from two_sample import shared_noise, smallest_p

from car_spec.coupling import log_ratio, log_residual_mass, reflection, relative, residual_coordinate, residual_equal_std, win_probability
from car_spec.gaussian import Gaussian
from car_spec.verify import draw_residual

ALPHAS = [1e-3, 0.1, 0.7, 1.0]
DELTAS = [1e-6, 1e-3, 0.1, 1.0, 5.0, 20.0]
GRID = torch.linspace(-60, 60, 1_000_001, dtype=torch.float64)


def excess_density(alpha, delta):
    """max(0, alpha * N(0, 1) - N(delta, 1)) on the grid."""
    normal = lambda x: torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return (alpha * normal(GRID) - normal(GRID - delta)).clamp_min(0)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("delta", DELTAS)
def test_residual_mass_and_quantiles_equal_the_integral(alpha, delta):
    one = torch.ones(3, dtype=torch.float64)
    density = excess_density(alpha, delta)
    mass = torch.trapezoid(density, GRID).item()
    ours = log_residual_mass(delta * one, one * math.log(alpha)).exp()
    assert ours[0].item() == pytest.approx(mass, rel=1e-4, abs=1e-12)
    if mass > 1e-9:
        uniform = torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)
        c = residual_coordinate(delta * one, one * math.log(alpha), uniform)
        below = torch.cumulative_trapezoid(density, GRID) / mass
        found = below[torch.searchsorted(GRID, c).clamp_max(len(below) - 1)]
        torch.testing.assert_close(found, uniform, atol=1e-3, rtol=0)


def test_mass_of_alpha_one_is_the_total_variation_distance():
    delta = torch.linspace(0, 8, 50, dtype=torch.float64)
    expected = 2 * torch.special.ndtr(delta / 2) - 1
    torch.testing.assert_close(log_residual_mass(delta, torch.zeros(50)).exp(), expected, atol=1e-12, rtol=1e-9)


def test_identical_laws_have_no_residual_and_give_a_target_draw():
    law = Gaussian(torch.ones(4, 3), torch.zeros(4, 3))
    zeros = torch.zeros(4)
    assert log_residual_mass(zeros, zeros).eq(-math.inf).all()
    noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(residual_equal_std(law, law, zeros, torch.full((4,), 0.5), noise), law.sample(noise))


def laws(count, equal):
    target = Gaussian(torch.tensor([0.3, -0.2]).expand(count, 2), torch.tensor([-0.2, 0.1]).expand(count, 2))
    log_std = target.log_std + (0.0 if equal else torch.tensor([0.25, -0.15]))
    return target, Gaussian(target.mean + torch.tensor([0.5, -0.4]), log_std)


def brute_force_residual(target, draft, alpha, wanted, seed):
    """Thinning of target draws one by one, from the definition."""
    kept, generator = [], torch.Generator().manual_seed(seed)
    while sum(map(len, kept)) < wanted:
        y = target.sample(torch.randn(target.mean.shape, generator=generator))
        ratio = alpha - (draft.log_prob(y) - target.log_prob(y)).exp()
        kept.append(y[torch.rand(len(y), generator=generator) < ratio])
    return torch.cat(kept)[:wanted]


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_residual_draws_follow_the_residual(equal, alpha):
    count = 40_000
    target, draft = laws(count, equal)
    log_alpha, noise = torch.full((count,), math.log(alpha)), shared_noise(count, 1)
    expected = brute_force_residual(target, draft, alpha, count, seed=2)
    ours, fallbacks = draw_residual(target, draft, log_alpha, torch.ones(count, dtype=torch.bool), noise)
    assert fallbacks == 0
    assert smallest_p(ours, expected) > 0.01
    if equal:
        closed = residual_equal_std(target, draft, log_alpha, noise.uniform(), noise.normal(2))
        assert smallest_p(closed, expected) > 0.01
        if alpha < 1:  # the test of the test: r_1 is not r_alpha
            wrong = residual_equal_std(target, draft, torch.zeros(count), noise.uniform(), noise.normal(2))
            assert smallest_p(wrong, expected) < 1e-6


def test_accept_or_reflect_gives_the_target():
    count = 100_000
    target, draft = laws(count, equal=True)
    noise = shared_noise(count, 3)
    xi = noise.normal(2)
    x = draft.sample(xi)
    accept = noise.uniform().log() < target.log_prob(x) - draft.log_prob(x)
    y = torch.where(accept[:, None], x, reflection(target, draft, xi))
    for j in range(2):
        standardised = ((y - target.mean) * (-target.log_std).exp())[:, j]
        assert stats.kstest(standardised.numpy(), "norm").pvalue > 0.01


def test_win_probability_averages_to_the_mass():
    count = 200_000
    target, draft = laws(count, equal=True)
    z = shared_noise(count, 4).normal(1, 2)  # one try for each pair
    chance = win_probability(relative(target, draft), torch.full((count,), math.log(0.8)), z)[:, 0]
    delta = (((draft.mean - target.mean) * (-target.log_std).exp()) ** 2).sum(-1).sqrt()
    expected = log_residual_mass(delta[:1], torch.tensor([math.log(0.8)])).exp().item()
    assert chance.mean().item() == pytest.approx(expected, abs=4 * chance.std().item() / math.sqrt(count))


def test_win_probability_is_alpha_minus_the_density_ratio():
    target, draft = laws(1000, equal=False)
    z = shared_noise(1000, 5).normal(4, 2)
    log_alpha = torch.linspace(-3, 0, 1000)
    y = target.at((slice(None), None)).sample(z)
    ratio = (-log_ratio(target.at((slice(None), None)), draft.at((slice(None), None)), y)).exp()
    expected = (log_alpha.exp()[:, None] - ratio).clamp_min(0)
    torch.testing.assert_close(win_probability(relative(target, draft), log_alpha, z), expected, rtol=1e-4, atol=1e-5)
