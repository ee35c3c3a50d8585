"""Two laws of one transition: how much of the target the draft misses, and samples of exactly that part.

A drafted state x ~ draft is kept or replaced so that the outcome follows the target. What replaces it is drawn from a residual,
proportional to max(0, alpha * target - draft); alpha is 1 for token-wise verification and the acceptance probability so far for block
verification. Everything is vectorised over sequences (B).
"""

import math
from functools import cache
from typing import NamedTuple

import torch

from car_spec.gaussian import Gaussian

BISECTIONS = 60  # halvings of an interval of less than 100 in float64: to the last digit


@cache
def has_float64(device: torch.device) -> bool:
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except TypeError:  # an Apple GPU
        return False
    return True


def wide(x: torch.Tensor) -> torch.Tensor:
    """float64, on the host where the device has none."""
    return x.double() if has_float64(x.device) else x.cpu().double()


def log_ratio(target: Gaussian, draft: Gaussian, y: torch.Tensor) -> torch.Tensor:
    """log target(y) - log draft(y) of y (..., D) -> (...).

    Summed coordinate by coordinate: each of the two densities grows with D, and their float32 sums with it.
    """
    from_target, from_draft = ((y - law.mean) * (-law.log_std).exp() for law in (target, draft))
    return (0.5 * (from_draft.square() - from_target.square()) + draft.log_std - target.log_std).sum(-1)


# Equal std s. Along e = (draft mean - target mean) / |...| the target is N(0, 1) and the draft N(delta, 1), in units of s; across e
# they agree. alpha * target exceeds the draft where the coordinate along e is below s* = delta / 2 + log(alpha) / delta.


def separation(target: Gaussian, draft: Gaussian) -> tuple[torch.Tensor, torch.Tensor]:
    """Two laws of equal std -> distance of their means in stds, delta (B,), and the unit direction e (B, D) (zero where delta is)."""
    gap = (draft.mean - target.mean) * (-target.log_std).exp()
    delta = gap.norm(dim=-1)
    return delta, gap / delta.clamp_min(torch.finfo(gap.dtype).tiny)[..., None]


def _threshold(delta: torch.Tensor, log_alpha: torch.Tensor) -> torch.Tensor:
    return delta / 2 + log_alpha / delta.clamp_min(torch.finfo(delta.dtype).tiny)


def _log_excess(c: torch.Tensor, delta: torch.Tensor, log_alpha: torch.Tensor) -> torch.Tensor:
    """log of alpha Phi(c) - Phi(c - delta), the excess of the target below coordinate c <= s*; -inf where there is none."""
    larger = log_alpha + torch.special.log_ndtr(c)
    gap = (torch.special.log_ndtr(c - delta) - larger).clamp_max(0.0)
    return larger + torch.log(-torch.expm1(gap))


def log_residual_mass(delta: torch.Tensor, log_alpha: torch.Tensor) -> torch.Tensor:
    """log S_alpha, S_alpha = integral of max(0, alpha * target - draft), for equal std; delta and log alpha <= 0 (B,) -> (B,) `wide`."""
    delta, log_alpha = wide(delta), wide(log_alpha)
    mass = _log_excess(_threshold(delta, log_alpha), delta, log_alpha)
    return torch.where(delta > 0, mass, -math.inf)


def residual_coordinate(delta: torch.Tensor, log_alpha: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The coordinate along e of a draw from the residual, by inverting its distribution function; all (B,) -> (B,) `wide`."""
    delta, log_alpha, log_u = wide(delta), wide(log_alpha), wide(uniform).log()
    high = _threshold(delta, log_alpha)
    wanted = log_u + _log_excess(high, delta, log_alpha)
    low = high.clamp_max(0.0) - 40
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = _log_excess(middle, delta, log_alpha) < wanted
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def residual_equal_std(
    target: Gaussian, draft: Gaussian, log_alpha: torch.Tensor, uniform: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """A draw from r_alpha for two laws of equal std: log alpha and uniform (B,), noise (B, D) -> (B, D).

    Identical laws have no residual; a draw from the target comes back for them (verification never asks).
    """
    delta, e = separation(target, draft)
    c = residual_coordinate(delta, log_alpha, uniform).to(noise)
    along = (noise * e).sum(-1, keepdim=True)
    moved = noise + torch.where(delta > 0, c, along[..., 0])[..., None] * e - along * e
    return target.sample(moved)


def reflection(target: Gaussian, draft: Gaussian, noise: torch.Tensor) -> torch.Tensor:
    """Token-wise replacement in one draw for equal std: `noise` (B, D) is that of the rejected draft, x = draft mean + s * noise.

    Exact together with the acceptance test of the same x and alpha = 1 only (Hu et al. 2025, Algorithm 3: the reflection acts on
    the noise); inside block verification it is biased.
    """
    _, e = separation(target, draft)
    return target.sample(noise - 2 * (noise * e).sum(-1, keepdim=True) * e)


# Unequal std has no closed form, but a rejection test does: y ~ target is kept with probability max(0, alpha - draft(y) / target(y)).


class Relative(NamedTuple):
    """Two laws seen from the target: y = target mean + target std * z is shift + scale * z in stds of the draft, from its mean."""

    shift: torch.Tensor  # (P, D)
    scale: torch.Tensor  # (P, D)
    log_volume: torch.Tensor  # (P,): sum of log scale

    def at(self, index: torch.Tensor) -> "Relative":
        return Relative(*(part[index] for part in self))


def relative(target: Gaussian, draft: Gaussian) -> Relative:
    log_scale = target.log_std - draft.log_std
    return Relative((target.mean - draft.mean) * (-draft.log_std).exp(), log_scale.exp(), log_scale.sum(-1))


def win_probability(pair: Relative, log_alpha: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """max(0, alpha - draft(y) / target(y)) for P pairs of laws and y = target mean + target std * z, z (P, T, D) -> (P, T).

    Its mean over z ~ N(0, 1) is S_alpha, and y kept with this probability follows r_alpha.
    """
    seen = torch.addcmul(pair.shift[:, None], pair.scale[:, None], z)
    log_inverse = pair.log_volume[:, None] + 0.5 * (z.square() - seen.square()).sum(-1)  # log draft(y) - log target(y)
    return (log_alpha.exp()[:, None] - log_inverse.exp()).clamp_min(0.0)
