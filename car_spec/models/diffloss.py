"""MAR's diffusion head: a small residual MLP that denoises one token given its condition (Li et al. 2024, section 3.2)."""

import math

import torch
from torch import nn

from car_spec.schedule import TRAIN_STEPS, cosine_schedule

LN_EPS = 1e-6
FREQUENCIES = 256


def timestep_embedding(timesteps: torch.Tensor) -> torch.Tensor:
    """Sinusoids of integer timesteps (N,) -> (N, 256), 128 cosines then 128 sines. Always float32: bf16 cannot hold the angles."""
    half = FREQUENCIES // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=timesteps.device) / half)
    angles = timesteps.float()[:, None] * rates  # (N, 128)
    return torch.cat([angles.cos(), angles.sin()], -1)


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        return self.mlp(timestep_embedding(timesteps).to(next(self.parameters()).dtype))


class ResBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=LN_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, -1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class FinalLayer(nn.Module):
    def __init__(self, width: int, out_dim: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=LN_EPS, elementwise_affine=False)
        self.linear = nn.Linear(width, out_dim)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shift, scale = self.adaLN_modulation(y).chunk(2, -1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class DenoisingMLP(nn.Module):
    """x (N, D), timesteps (N,) in 0..999, condition (N, Z) -> (N, 2 D): the noise prediction, then the variance interpolation v."""

    def __init__(self, token_dim: int, condition_dim: int, width: int, depth: int):
        super().__init__()
        self.time_embed = TimestepEmbedder(width)
        self.cond_embed = nn.Linear(condition_dim, width)
        self.input_proj = nn.Linear(token_dim, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(depth))
        self.final_layer = FinalLayer(width, 2 * token_dim)

    def init_weights(self) -> None:
        """Identity blocks and a zero output, so that training starts from the standard normal prediction."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.time_embed.mlp:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        zero = [module.adaLN_modulation for module in [*self.res_blocks, self.final_layer]] + [self.final_layer.linear]
        for parameter in (p for module in zero for p in module.parameters()):
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        y = self.time_embed(timesteps) + self.cond_embed(condition)  # (N, W)
        x = self.input_proj(x)
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x, y)


class DiffLoss(nn.Module):
    """The head with its training loss. Parameters lie under `net`, as in the released checkpoints."""

    def __init__(self, token_dim: int, condition_dim: int, width: int, depth: int):
        super().__init__()
        self.token_dim = token_dim
        self.net = DenoisingMLP(token_dim, condition_dim, width, depth)
        self._schedule = cosine_schedule()

    def forward(self, x_0: torch.Tensor, condition: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Denoising loss of tokens x_0 (N, D) given conditions (N, Z) at random timesteps -> (N,).

        Squared error of the noise, plus the variational bound for the variance alone (Nichol & Dhariwal 2021 section 3.1:
        the mean inside the bound is detached). The bound's decoder term at timestep 0 is left out, because the variance
        of the last step is never used.
        """
        timesteps = torch.randint(TRAIN_STEPS, (len(x_0),), generator=generator)  # (N,)
        noise = torch.randn(x_0.shape, generator=generator).to(x_0)
        column = lambda table: table[timesteps, None].float().to(x_0.device)
        schedule = self._schedule
        signal = column(schedule.alphas_cumprod)
        x_t = signal.sqrt() * x_0 + (1 - signal).sqrt() * noise

        eps, v = self.net(x_t, timesteps.to(x_0.device), condition).float().chunk(2, -1)  # (N, D) each
        squared_error = (eps - noise).square().mean(-1)

        low, high = column(schedule.min_log_variance), column(schedule.max_log_variance)
        log_variance = low + 0.5 * (v + 1) * (high - low)
        # both means share x_t, so they differ by coef1 times the difference of the clean predictions
        gap = column(schedule.posterior_mean_coef1 * schedule.sqrt_recipm1_alphas_cumprod) * (eps.detach() - noise)
        kl = 0.5 * (log_variance - low + (low - log_variance).exp() - 1 + gap.square() * (-log_variance).exp())
        bits = kl.mean(-1) / math.log(2)
        return squared_error + torch.where(timesteps.to(x_0.device) > 0, bits, 0.0)
