"""Two-sample comparisons, and noise from one shared generator so that hundreds of thousands of sequences are cheap."""

import torch
from scipy import stats

from car_spec.noise import Noise


class SharedNoise(Noise):
    """All sequences draw from one generator: right in law, and fast, but a sequence then depends on its neighbours."""

    def _draw(self, draw, shape):
        return draw((len(self.owner), *shape), generator=self.generators[0])


def shared_noise(sequences: int, seed: int) -> SharedNoise:
    return SharedNoise([torch.Generator().manual_seed(seed)], torch.arange(sequences))


def smallest_p(first: torch.Tensor, second: torch.Tensor, projections: int = 30) -> float:
    """Kolmogorov-Smirnov over all coordinates and random projections of samples (B, ...), times the number of tests (Bonferroni)."""
    first, second = first.flatten(1).double(), second.flatten(1).double()
    directions = torch.randn(first.shape[1], projections, generator=torch.Generator().manual_seed(99)).double()
    first, second = (torch.cat([x, x @ directions], 1).numpy() for x in (first, second))
    return min(stats.ks_2samp(first[:, j], second[:, j]).pvalue for j in range(first.shape[1])) * first.shape[1]


def largest_z(first: torch.Tensor, second: torch.Tensor) -> float:
    """Largest standardised difference of all second cross moments E[x_i x_j]."""
    outer = [(x[:, :, None] * x[:, None, :]).flatten(1) for x in (first.flatten(1).double(), second.flatten(1).double())]
    error = sum(x.var(0) / len(x) for x in outer).sqrt()
    return ((outer[0].mean(0) - outer[1].mean(0)) / error).abs().max().item()
