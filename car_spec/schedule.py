"""The noise schedule of MAR's diffusion head: the squared-cosine schedule of 1000 steps, and its respacing to fewer.

Everything here is float64 on the host, whatever the model runs on; a chain rounds the few columns it needs to float32 when it
moves them to its device. (diffusers' DDPMScheduler holds the same schedule, but rounds its betas to float32 first.)
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

TRAIN_STEPS = 1000
MAX_BETA = 0.999


@dataclass(frozen=True)
class DiffusionSchedule:
    """Per-step coefficients of q(x_{t-1} | x_t, x_0) on a respaced grid. Every tensor has shape (K,), index 0 next to the data.

    Source: Ho et al. 2020 eq. 6-7; Nichol & Dhariwal 2021 eq. 15 (learned-range variance), eq. 17 (cosine), section 4 (respacing).
    """

    timestep_map: torch.Tensor  # int64: respaced step -> timestep in 0..999, which is what the head is called with
    betas: torch.Tensor
    alphas_cumprod: torch.Tensor
    alphas_cumprod_prev: torch.Tensor
    sqrt_recip_alphas_cumprod: torch.Tensor  # x_0 = this * x_t - sqrt_recipm1_alphas_cumprod * eps
    sqrt_recipm1_alphas_cumprod: torch.Tensor
    posterior_mean_coef1: torch.Tensor  # mean = coef1 * x_0 + coef2 * x_t
    posterior_mean_coef2: torch.Tensor
    posterior_variance: torch.Tensor  # 0 at step 0
    min_log_variance: torch.Tensor  # variance fraction 0; at step 0, where it is -inf, the value of step 1
    max_log_variance: torch.Tensor  # variance fraction 1: the log of the respaced beta

    @property
    def num_steps(self) -> int:
        return len(self.betas)


def cosine_betas() -> torch.Tensor:
    """betas (1000,) float64 of the squared-cosine schedule."""
    signal = [math.cos((t / TRAIN_STEPS + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(TRAIN_STEPS + 1)]
    return torch.tensor([min(1 - b / a, MAX_BETA) for a, b in pairwise(signal)], dtype=torch.float64)


def respaced_timesteps(num_steps: int) -> torch.Tensor:
    """The `num_steps` timesteps kept of 0..999, first and last included: (num_steps,) int64.

    The stride is added up in float64 and rounded half to even, as the released models' code does; `linspace` differs
    at one tie (num_steps 999).
    """
    if not 2 <= num_steps <= TRAIN_STEPS:
        raise ValueError(f"num_inference_steps {num_steps} is outside 2..{TRAIN_STEPS}")
    stride, position, kept = (TRAIN_STEPS - 1) / (num_steps - 1), 0.0, []
    for _ in range(num_steps):
        kept.append(round(position))
        position += stride
    return torch.tensor(kept, dtype=torch.int64)


def cosine_schedule(num_steps: int = TRAIN_STEPS) -> DiffusionSchedule:
    """The cosine schedule respaced to `num_steps` steps (2..1000)."""
    timestep_map = respaced_timesteps(num_steps)
    kept = torch.cumprod(1 - cosine_betas(), 0)[timestep_map]  # (K,)
    one = torch.ones(1, dtype=torch.float64)
    betas = 1 - kept / torch.cat([one, kept[:-1]])
    alphas_cumprod = torch.cumprod(1 - betas, 0)
    previous = torch.cat([one, alphas_cumprod[:-1]])
    posterior_variance = betas * (1 - previous) / (1 - alphas_cumprod)
    return DiffusionSchedule(
        timestep_map=timestep_map,
        betas=betas,
        alphas_cumprod=alphas_cumprod,
        alphas_cumprod_prev=previous,
        sqrt_recip_alphas_cumprod=(1 / alphas_cumprod).sqrt(),
        sqrt_recipm1_alphas_cumprod=(1 / alphas_cumprod - 1).sqrt(),
        posterior_mean_coef1=betas * previous.sqrt() / (1 - alphas_cumprod),
        posterior_mean_coef2=(1 - previous) * (1 - betas).sqrt() / (1 - alphas_cumprod),
        posterior_variance=posterior_variance,
        min_log_variance=torch.cat([posterior_variance[1:2], posterior_variance[1:]]).log(),
        max_log_variance=betas.log(),
    )
