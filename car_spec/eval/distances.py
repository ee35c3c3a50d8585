"""Distances between two sets of samples, as features (B, F)."""

import torch

from car_spec.eval.statistics import Statistics


def frechet_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Squared Frechet distance of the Gaussians fitted to two sets of features, float64."""
    return Statistics.of(first).distance(Statistics.of(second))


def energy_test(first: torch.Tensor, second: torch.Tensor, permutations: int = 199, seed: int = 7) -> float:
    """p-value of the energy distance by permutation: small where the two sets differ in any way (Szekely & Rizzo 2004)."""
    x = torch.cat([first, second]).double()
    distance, n, generator = torch.cdist(x, x), len(first), torch.Generator().manual_seed(seed)

    def statistic(order: torch.Tensor) -> torch.Tensor:
        weight = torch.full((len(x),), -1.0 / (len(x) - n), dtype=x.dtype, device=x.device)
        weight[order[:n]] = 1.0 / n
        return -weight @ distance @ weight  # 2 E|a - b| - E|a - a'| - E|b - b'|

    observed = statistic(torch.arange(len(x)))
    others = [statistic(torch.randperm(len(x), generator=generator)) for _ in range(permutations)]
    return (1 + sum(bool(other >= observed) for other in others)) / (permutations + 1)


def principal_components(reference: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (F,) and directions (F, count) of the largest variance of features (B, F); project with (x - mean) @ directions."""
    mean = reference.double().mean(0)
    _, _, directions = torch.linalg.svd(reference.double() - mean, full_matrices=False)
    return mean, directions[:count].T
