"""The Gaussian chain behind one token: MAR's diffusion head as transitions y_{k+1} -> y_k, and its sequential sampler.

A chain holds N rows, each with its own condition. One call takes any (row, step) pairs, so the same object serves sequential
sampling (all rows at one step) and verification (many states of a few rows).
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from car_spec.execution import run_head
from car_spec.gaussian import Gaussian
from car_spec.schedule import DiffusionSchedule

# Modulations of all (row, step) pairs are kept while they stay below this count (256 MiB in float32). Beyond it there are
# rows enough to fill a matrix product per call, and computing them on the fly costs about the same.
MAX_HOISTED = 2**26

# One step for every row of a call; or an int64 tensor (M,) with a step a row; or (S, 1): all rows at each of S steps, y (S, N, D).
Steps = int | torch.Tensor


HeadRunner = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]  # as `run_head`

# Std of a token's clean value, given all that is known, that drafts reckon with; in latent stds. See `HoistedHead`.
SPREAD = 0.17


class Prediction(NamedTuple):
    """What the network says at one state, in the form that can be re-used at the next state."""

    centre: torch.Tensor  # (M, D) of clean samples, as `HoistedHead` explains
    fraction: torch.Tensor  # (M, D) 0: smallest posterior log variance, 1: largest; not clamped


class Chain(Protocol):
    """K transitions for each of N rows; step 0 is deterministic."""

    num_steps: int
    num_rows: int

    def __call__(self, y: torch.Tensor, k: Steps, rows: torch.Tensor | None = None) -> Gaussian:
        """The law of y_k given y = y_{k+1} (M, D), for rows (M,) of the chain (all of them, in order, if None)."""
        ...


class HoistedHead:
    """A diffusion head with everything that does not depend on the state taken out of the loop.

    The adaLN layers of all blocks are stacked into one product, with each block's LayerNorm weights folded into its
    scale and shift; the time embeddings of all steps are computed once. Works on any module with the attribute names of
    `DenoisingMLP`. One object serves all AR steps of a run.

    What is re-used in drafts is not the clean sample x_0 that the network said at y, but a centre. If clean samples were N(centre,
    spread^2), the best guess of one at y would be centre + share (y - sqrt(alpha) centre), share = spread^2 sqrt(alpha) / (spread^2
    alpha + 1 - alpha) with alpha the cumulative product: it follows the state, the centre does not. Solved for the centre at y and
    put into the posterior mean, it gives back the network's own transition there, whatever the spread; spread 0 re-uses x_0 itself.
    """

    def __init__(self, net: Any, schedule: DiffusionSchedule, spread: float = SPREAD, run: HeadRunner = run_head):
        weight = net.input_proj.weight
        self.net, self.schedule, self.run = net, schedule, run
        self.dtype, self.device = weight.dtype, weight.device
        self.width, self.num_steps = weight.shape[0], schedule.num_steps
        self.time = net.time_embed(schedule.timestep_map.to(weight.device))  # (K, W)
        layers = [self._fold(block.in_ln, block.adaLN_modulation[1]) for block in net.res_blocks]
        layers.append(self._fold(None, net.final_layer.adaLN_modulation[1]))
        self.weight = torch.cat([w for w, _ in layers]).to(self.dtype)  # (F, W), F = (3 * depth + 2) W
        self.bias = torch.cat([b for _, b in layers]).to(self.dtype)  # (F,)
        alpha = 1 / schedule.sqrt_recip_alphas_cumprod**2
        share = spread**2 * alpha.sqrt() / (spread**2 * alpha + 1 - alpha)
        rest = 1 - share * alpha.sqrt()  # x_0 = rest * centre + share * y
        columns = torch.stack(
            [
                schedule.sqrt_recip_alphas_cumprod,
                schedule.sqrt_recipm1_alphas_cumprod,
                1 / rest,
                share / rest,
                schedule.posterior_mean_coef1 * rest,
                schedule.posterior_mean_coef2 + schedule.posterior_mean_coef1 * share,
                0.5 * schedule.min_log_variance,
                0.5 * (schedule.max_log_variance - schedule.min_log_variance),
            ],
            -1,
        )
        self._scalars = columns.tolist()  # for calls at a single step
        self._columns = columns.float().to(weight.device)  # (K, 8)
        self.decay = self._columns[:, 5]  # (K,): how much of the state the mean keeps, the centre being given

    @staticmethod
    def _fold(norm: nn.LayerNorm | None, linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (shift, scale[, gate]) of an adaLN layer -> the same with `1 +` and the LayerNorm's own weight and bias inside.

        (n w + b)(1 + scale) + shift = n [w (1 + scale)] + [b (1 + scale) + shift], n being the bare normalisation.
        """
        width = linear.in_features
        w, b = linear.weight.float(), linear.bias.float()
        w_shift, w_scale, w_gate = w[:width], w[width : 2 * width], w[2 * width :]
        b_shift, b_scale, b_gate = b[:width], b[width : 2 * width] + 1, b[2 * width :]
        if norm is not None:
            gain, offset = norm.weight.float(), norm.bias.float()
            w_shift, b_shift = w_shift + offset[:, None] * w_scale, b_shift + offset * b_scale
            w_scale, b_scale = gain[:, None] * w_scale, gain * b_scale
        return torch.cat([w_shift, w_scale, w_gate]), torch.cat([b_shift, b_scale, b_gate])

    def coefficients(self, k: Steps) -> tuple:
        """The eight columns of the way from the network's output to a Gaussian at k: numbers, or tensors (*k.shape, 1)."""
        return tuple(self._scalars[k]) if isinstance(k, int) else self._columns[k].split(1, -1)

    def modulations(self, time: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Time embeddings (..., W) and projected conditions (..., W), broadcast -> (..., F)."""
        return F.linear(F.silu(time + condition), self.weight, self.bias)

    def __call__(self, x: torch.Tensor, modulations: torch.Tensor) -> torch.Tensor:
        """x (..., W) after `input_proj`, modulations (..., F) -> (..., 2 D) in float32: noise prediction, then v."""
        return self.run(self.net, x, modulations).float()


class DiffusionChain:
    """The chain of N rows given their conditions (Li et al. 2024, section 3; learned-range variance of Nichol & Dhariwal 2021).

    condition: (N, Z). unconditional: (N, Z), or None for no guidance; then nothing is doubled.
    guidance_scale: a number or (N,). Guides the noise prediction only; the variance is that of the conditional half.
    temperature: multiplies the std of every transition; 0 leaves the means. The initial noise is not scaled.
    clip_sample_range: the clean sample is clamped to +- this, as in diffusers' schedulers; None does not clamp.
    """

    equal_std = False  # the head learned the variance

    def __init__(
        self,
        head: HoistedHead,
        condition: torch.Tensor,
        unconditional: torch.Tensor | None = None,
        guidance_scale: float | torch.Tensor = 1.0,
        temperature: float = 1.0,
        clip_sample_range: float | None = None,
    ):
        if temperature < 0:
            raise ValueError(f"temperature {temperature} is negative")
        self.head, self.num_rows, self.num_steps = head, len(condition), head.num_steps
        self.decay = head.decay
        self.guided = unconditional is not None
        self.scale = guidance_scale[:, None] if isinstance(guidance_scale, torch.Tensor) else guidance_scale
        self.log_temperature = math.log(temperature) if temperature > 0 else -math.inf
        self.clip_sample_range = clip_sample_range
        both = torch.cat([condition, unconditional]) if unconditional is not None else condition  # (H N, Z), H = 2 or 1
        self.condition = head.net.cond_embed(both.to(head.dtype))  # (H N, W)

    @cached_property
    def hoisted(self) -> torch.Tensor | None:
        """Modulations of every (step, row) (K, H N, F), or None where they are too many."""
        size = self.num_steps * len(self.condition) * len(self.head.bias)
        return self.head.modulations(self.head.time[:, None], self.condition) if size <= MAX_HOISTED else None

    def _modulations(self, k: Steps, rows: torch.Tensor | None) -> torch.Tensor:
        """-> (H M, F) for the pairs (rows, k), or (S, H N, F) for all rows at steps (S, 1): each is used once, so nothing is kept."""
        if isinstance(k, torch.Tensor) and k.dim() == 2:
            return self.head.modulations(self.head.time[k], self.condition)
        if rows is not None and self.guided:
            rows = torch.cat([rows, rows + self.num_rows])
            k = k if isinstance(k, int) else torch.cat([k, k])
        elif rows is None and not isinstance(k, int):
            rows = torch.arange(len(self.condition), device=self.condition.device)
            k = torch.cat([k, k]) if self.guided else k
        if self.hoisted is not None:
            return self.hoisted[k] if rows is None else self.hoisted[k, rows]
        return self.head.modulations(self.head.time[k], self.condition if rows is None else self.condition[rows])

    def predict(self, y: torch.Tensor, k: Steps, rows: torch.Tensor | None = None) -> Prediction:
        """One network call at y = y_{k+1} (M, D), or (S, N, D) for steps k (S, 1)."""
        x = self.head.net.input_proj(y.to(self.head.dtype))  # (..., M, W)
        out = self.head(torch.cat([x, x], -2) if self.guided else x, self._modulations(k, rows))  # (..., H M, 2 D)
        eps, v = out[..., : y.shape[-2], :].chunk(2, -1)
        if self.guided:
            scale = self.scale if rows is None or not isinstance(self.scale, torch.Tensor) else self.scale[rows]
            eps_unconditional = out[..., y.shape[-2] :, : y.shape[-1]]
            eps = eps_unconditional + scale * (eps - eps_unconditional)
        recip, recipm1, of_x_0, of_y, *_ = self.head.coefficients(k)
        x_0 = recip * y - recipm1 * eps
        if self.clip_sample_range is not None:
            x_0 = x_0.clamp(-self.clip_sample_range, self.clip_sample_range)
        return Prediction(of_x_0 * x_0 - of_y * y, 0.5 * (v + 1))

    def transition(self, prediction: Prediction, y: torch.Tensor, k: Steps) -> Gaussian:
        """The affine map of step k applied to a prediction: the law of y_k given y = y_{k+1} (M, D)."""
        *_, gain, decay, _, _ = self.head.coefficients(k)
        mean = gain * prediction.centre + decay * y
        log_std = self.stated_log_std(prediction, k) + self.log_temperature
        if isinstance(k, int):
            return Gaussian(mean, log_std if k > 0 else torch.full_like(log_std, -math.inf))
        return Gaussian(mean, log_std.masked_fill((k == 0)[..., None], -math.inf))

    def stated_log_std(self, prediction: Prediction, k: Steps) -> torch.Tensor:
        """What the network says about step k, without the temperature; for step 0 too, which adds no noise when sampling."""
        *_, low, spread = self.head.coefficients(k)
        return low + spread * prediction.fraction

    def __call__(self, y: torch.Tensor, k: Steps, rows: torch.Tensor | None = None) -> Gaussian:
        return self.transition(self.predict(y, k, rows), y, k)


def sample_chain(chain: Chain, initial: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Sequential sampling of all rows: y_K = initial (N, D), noise[:, k] of (N, K, D) used at step k > 0 -> y_0 (N, D)."""
    y = initial
    for k in reversed(range(chain.num_steps)):
        y = chain(y, k).sample(noise[:, k])
    return y
