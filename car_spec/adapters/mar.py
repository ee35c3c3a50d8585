"""MAR behind the four questions that samplers ask of a model: its AR steps, conditions, chains, and how tokens become images."""

import math
from typing import Any, NamedTuple

import torch

from car_spec.chain import DiffusionChain, HeadRunner, HoistedHead
from car_spec.execution import run_head
from car_spec.schedule import cosine_schedule

GUIDANCE_SCHEDULES = ("linear", "constant")


class ARStep(NamedTuple):
    """Tokens that are sampled independently of each other given the tokens before them, in every image of a batch."""

    positions: torch.Tensor  # (B, n) raster indices
    guidance_scale: float


def remaining_after_each_step(num_tokens: int, num_iter: int) -> list[int]:
    """How many tokens MAR's cosine schedule leaves unknown after each AR step; as in the release, 1 and not 0 after the last."""
    if not 1 <= num_iter <= num_tokens:
        raise ValueError(f"num_iter {num_iter} is outside 1..{num_tokens}, the number of tokens: every AR step predicts at least one")
    remaining, counts = num_tokens, []
    for step in range(1, num_iter + 1):
        wanted = math.floor(num_tokens * math.cos(math.pi / 2 * step / num_iter))
        remaining = max(1, min(remaining - 1, wanted))
        counts.append(remaining)
    return counts


def guidance_scale_of_step(guidance_scale: float, schedule: str, num_tokens: int, remaining: int) -> float:
    """Constant, or growing linearly from 1 with the share of tokens known *after* the step (Li et al. 2024, appendix B)."""
    if schedule not in GUIDANCE_SCHEDULES:
        raise ValueError(f"guidance_schedule {schedule!r} is none of {', '.join(GUIDANCE_SCHEDULES)}")
    return guidance_scale if schedule == "constant" else 1 + (guidance_scale - 1) * (num_tokens - remaining) / num_tokens


def patchify(latents: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Latents (B, C, H, W) -> tokens (B, N, C p^2) in raster order, p being the patch size."""
    from einops import rearrange

    return rearrange(latents, "b c (h p) (w q) -> b (h w) (c p q)", p=patch_size, q=patch_size)


def unpatchify(tokens: torch.Tensor, patch_size: int, rows: int | None = None) -> torch.Tensor:
    """The inverse of `patchify` on a grid of so many rows; None: on a square one."""
    from einops import rearrange

    rows = math.isqrt(tokens.shape[1]) if rows is None else rows
    return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, p=patch_size, q=patch_size)


class MARAdapter:
    """Binds a MAR network to the settings of one run.

    class_vectors: (B, W), a row an image. Guidance is on where some AR step's scale differs from 1.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_inference_steps: int = 100,
        temperature: float = 1.0,
        clip_sample_range: float | None = None,
        run: HeadRunner = run_head,
    ):
        self.model = model
        self.head = HoistedHead(model.diffloss.net, cosine_schedule(num_inference_steps), run=run)
        self.temperature, self.clip_sample_range = temperature, clip_sample_range
        self.num_tokens: int = model.diffusion_pos_embed_learned.shape[1]
        self.token_dim: int = model.z_proj.weight.shape[1]
        self.condition_dim: int = model.diffusion_pos_embed_learned.shape[2]  # W
        self.dtype = self.head.dtype  # of conditions

    def ar_steps(self, orders: torch.Tensor, num_iter: int, guidance_scale: float, guidance_schedule: str) -> list[ARStep]:
        """orders (B, N): permutations, generated from the end to the beginning as in the release. -> `num_iter` steps."""
        unknown, steps = self.num_tokens, []
        counts = remaining_after_each_step(self.num_tokens, num_iter)
        for i, remaining in enumerate(counts):
            end = 0 if i == num_iter - 1 else remaining
            scale = guidance_scale_of_step(guidance_scale, guidance_schedule, self.num_tokens, remaining)
            steps.append(ARStep(orders[:, end:unknown], scale))
            unknown = end
        return steps

    def conditions(self, tokens: torch.Tensor, mask: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """The conditions of all positions given P prefixes (P, H, N, W), in one backbone call.

        tokens (P, N, D); mask (P, N), 1 = unknown; vectors (P, H, W): of the class, and with guidance (H = 2) the null vector.
        """
        halves = vectors.shape[1]
        tokens, mask = (x.repeat_interleave(halves, 0) for x in (tokens, mask))
        encoded = self.model.forward_mae_encoder(tokens.to(self.head.dtype), mask, vectors.flatten(0, 1).to(self.head.dtype))
        return self.model.forward_mae_decoder(encoded, mask).unflatten(0, (-1, halves))

    def chain(self, conditions: torch.Tensor, guidance_scale: float | torch.Tensor = 1.0) -> DiffusionChain:
        """Conditions (R, H, W) and a guidance scale, for all or a row (R,), -> the chain of R rows."""
        unconditional = conditions[:, 1] if conditions.shape[1] == 2 else None
        return DiffusionChain(self.head, conditions[:, 0], unconditional, guidance_scale, self.temperature, self.clip_sample_range)
