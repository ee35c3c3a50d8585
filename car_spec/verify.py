"""Verification of a drafted sequence: how many of its transitions stand, and what replaces the first that does not.

B sequences of up to G transitions. Transition i (0-based) leads from state X_i to X_{i+1}; `log_ratios` (B, G) holds
log target(X_{i+1}) - log draft(X_{i+1}); shorter sequences are padded, `lengths` (B,) counts the real transitions. tau (B,) is the
number of accepted transitions. Where tau < length, the next state is drawn from the residual of transition tau.
"""

from typing import NamedTuple

import torch

from car_spec.coupling import (
    log_residual_mass,
    relative,
    residual_equal_std,
    separation,
    wide,
    win_probability,
)
from car_spec.gaussian import Gaussian
from car_spec.noise import Noise

FIRST_TRIES = 16  # drawn at once for a pair; most races end within them
MAX_TRIES = 2**20  # draws a residual may take; a sane run never comes near it


class Verdict(NamedTuple):
    """What verification decided for B sequences."""

    accepted: torch.Tensor  # (B,) tau, 0..length
    replacement: torch.Tensor  # (B, D) the next state where accepted < length; undefined elsewhere
    fallbacks: int  # residual draws that met MAX_TRIES and became fresh target draws; 0 in any healthy run


def token_wise_accepted(log_ratios: torch.Tensor, lengths: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """tau of token-wise verification: stop at the first i with u_i >= exp(min(0, l_i)). uniform (B, G)."""
    failed = (uniform.log() >= log_ratios) | _padding(log_ratios, lengths)
    return torch.where(failed.any(1), failed.int().argmax(1), lengths)


def block_log_acceptance(log_ratios: torch.Tensor) -> torch.Tensor:
    """log p_0 ... log p_G (B, G + 1): log p_i = min(0, log p_{i-1} + l_i) without a loop (Sun et al. 2024, Algorithm 2)."""
    total = log_ratios.cumsum(1)
    log_p = total - total.clamp_min(0).cummax(1).values
    return torch.cat([torch.zeros_like(log_p[:, :1]), log_p], 1)


def _padding(log_ratios: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(log_ratios.shape[1], device=lengths.device) >= lengths[:, None]


def _uniform(real: torch.Tensor, noise: Noise) -> torch.Tensor:
    """Uniform draws at the True places of (B, G), so that a sequence draws as often as it is long, whatever the padding."""
    out = torch.ones(real.shape, device=real.device)
    out[real] = noise.of(real.nonzero()[:, 0]).uniform()
    return out


def _pick(law: Gaussian, index: torch.Tensor) -> Gaussian:
    """Laws (B, G, D) at one transition a sequence (B,) -> (B, D); an index of G gives the last, which is then not used."""
    rows = torch.arange(len(index), device=index.device)
    index = index.clamp_max(law.mean.shape[1] - 1)
    return law.at((rows, index))


def verify_token_wise(log_ratios: torch.Tensor, lengths: torch.Tensor, target: Gaussian, draft: Gaussian, noise: Noise) -> Verdict:
    """Accept while u_i < target / draft; replace from r_1 (Leviathan et al. 2023, De Bortoli et al. 2025). Any stds."""
    accepted = token_wise_accepted(log_ratios, lengths, _uniform(~_padding(log_ratios, lengths), noise))
    short = accepted < lengths
    zeros = torch.zeros_like(log_ratios[:, 0])
    replacement, fallbacks = draw_residual(_pick(target, accepted), _pick(draft, accepted), zeros, short, noise)
    return Verdict(accepted, replacement, fallbacks)


def draw_residual(
    target: Gaussian, draft: Gaussian, log_alpha: torch.Tensor, wanted: torch.Tensor, noise: Noise
) -> tuple[torch.Tensor, int]:
    """r_alpha by rejection for the sequences (B,) in the mask `wanted` -> (B, D) and the number of fallbacks."""
    index = wanted.nonzero()[:, 0]
    race = _race(target.at(index), draft.at(index), log_alpha[index], index, torch.zeros_like(index), noise, lose=False)
    out = torch.zeros_like(target.mean)
    out[index] = race.draw
    return out, race.fallbacks


def verify_block(log_ratios: torch.Tensor, lengths: torch.Tensor, target: Gaussian, draft: Gaussian, noise: Noise) -> Verdict:
    """Block verification with unequal stds: tau by a race at every i from the last to the first, never stopping at a first failure.

    At i = G accept with probability p_G. At i < G repeat: lose with probability (1 - p_i) / (2 - p_i), else draw y ~ target of
    transition i and win with probability max(0, p_i - draft(y) / target(y)). P(win) = S / (S + 1 - p_i) = h_i, and the winning
    y is a draw from r_alpha with alpha = p_i, so it is the next state. tau is the largest i that wins; where p_i = 1 it must.
    The races are independent of each other and run side by side.
    """
    log_p = block_log_acceptance(log_ratios)  # (B, G + 1)
    last = log_p.gather(1, lengths[:, None])[:, 0]
    everything = noise.uniform(1)[:, 0].log() < last  # (B,)

    steps = torch.arange(log_p.shape[1], device=log_p.device)
    inside = steps < torch.where(everything, 0, lengths)[:, None]  # (B, G + 1): i < G, of sequences that did not accept it all
    certain = torch.where(inside & (log_p >= 0), steps, 0).amax(1)  # (B,) the largest i with p_i = 1: the race ends there at the latest
    entered = (inside & (steps >= certain[:, None]))[:, :-1]
    index = entered.flatten().nonzero()[:, 0]  # pairs in the order of sequences
    sequence, transition = index // entered.shape[1], index % entered.shape[1]
    entries = [Gaussian(law.mean.flatten(0, 1)[index], law.log_std.flatten(0, 1)[index]) for law in (target, draft)]  # (P, D)
    race = _race(entries[0], entries[1], log_p[:, :-1].flatten()[index], sequence, transition, noise)
    won = torch.full_like(lengths, -1).scatter_reduce(0, sequence, torch.where(race.won, transition, -1), "amax")
    accepted = torch.where(everything, lengths, won)
    replacement = torch.zeros_like(target.mean[:, 0])
    winner = (race.won & (transition == won[sequence])).nonzero()[:, 0]
    replacement[sequence[winner]] = race.draw[winner]
    return Verdict(accepted, replacement, race.fallbacks)


class _Race(NamedTuple):
    won: torch.Tensor  # (P,) bool
    draw: torch.Tensor  # (P, D) the winning draw
    fallbacks: int


def _race(
    target: Gaussian,
    draft: Gaussian,
    log_p: torch.Tensor,
    sequence: torch.Tensor,
    transition: torch.Tensor,
    noise: Noise,
    lose: bool = True,
) -> _Race:
    """P races side by side, pair j belonging to (sequence[j], transition[j]); a pair below a won one of its sequence is dropped.

    How many tries a sequence takes at a time depends on its own pairs only, so a sequence never feels its neighbours.
    """
    won = torch.zeros(len(log_p), dtype=torch.bool, device=log_p.device)
    draw = torch.zeros_like(target.mean)
    p = log_p.exp()
    lose_probability = (1 - p) / (2 - p) if lose else torch.zeros_like(p)
    pair = relative(target, draft)
    active = torch.arange(len(log_p), device=log_p.device)
    best = torch.full((int(sequence[-1]) + 1 if len(sequence) else 0,), -1, device=sequence.device)  # by sequence, which ascend
    tries, done, fallbacks = FIRST_TRIES, 0, 0
    while len(active):
        drawn = noise.of(sequence[active])
        normal, uniform = drawn.normal(tries, target.mean.shape[-1]), drawn.uniform(tries, 2)  # (P, T, D), (P, T, 2)
        loses = uniform[..., 0] < lose_probability[active, None]  # (P, T)
        wins = ~loses & (uniform[..., 1] < win_probability(pair.at(active), log_p[active], normal))
        ends, first = (loses | wins).max(1)
        here = (ends & wins.gather(1, first[:, None])[:, 0]).nonzero()[:, 0]
        winner = active[here]
        won[winner] = True
        draw[winner] = target.at(winner).sample(normal[here, first[here]])
        done += tries
        active = active[~ends]
        if not len(active):
            break
        best.scatter_reduce_(0, sequence[winner], transition[winner], "amax")
        active = active[transition[active] > best[sequence[active]]]
        if done >= MAX_TRIES:  # the residual of what is left is empty to within rounding: its laws agree
            fallbacks = len(active)
            won[active] = True
            draw[active] = target.at(active).sample(noise.of(sequence[active]).normal(draw.shape[-1]))
            break
        tries = min(2 * tries, 256)
    return _Race(won, draw, fallbacks)


def verify_block_equal_std(log_ratios: torch.Tensor, lengths: torch.Tensor, target: Gaussian, draft: Gaussian, noise: Noise) -> Verdict:
    """Block verification with equal stds, in closed form: h_i = S / (S + 1 - p_i) with S of `log_residual_mass`, h_G = p_G."""
    log_p = block_log_acceptance(log_ratios)  # (B, G + 1)
    steps = torch.arange(log_p.shape[1], device=log_p.device)
    delta, _ = separation(target, draft)  # (B, G)
    mass = log_residual_mass(delta, log_p[:, :-1]).exp()  # (B, G)
    miss = -torch.expm1(wide(log_p[:, :-1]))
    h = torch.where(miss > 0, mass / (mass + miss), 1.0).to(log_p)  # p_i = 1: accept, also where S = 0
    h = torch.cat([h, torch.zeros_like(h[:, :1])], 1)
    h = torch.where(steps == lengths[:, None], log_p.exp(), h)
    real = steps <= lengths[:, None]
    stands = (_uniform(real, noise) < h) & real
    accepted = torch.where(stands, steps, 0).amax(1)
    rows = torch.arange(len(lengths), device=lengths.device)
    replacement = residual_equal_std(
        _pick(target, accepted),
        _pick(draft, accepted),
        log_p[rows, accepted],
        noise.uniform(1)[:, 0],
        noise.normal(target.mean.shape[-1]),
    )
    return Verdict(accepted, replacement, 0)
