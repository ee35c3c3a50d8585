"""Distances between two sets of samples, as features (B, F)."""

import torch


def frechet_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Squared Frechet distance of the Gaussians fitted to two sets of features, float64."""
    moments = [(x.double().mean(0), torch.cov(x.double().T)) for x in (first, second)]
    return frechet_of_moments(*moments[0], *moments[1])


def frechet_of_moments(mean_a: torch.Tensor, cov_a: torch.Tensor, mean_b: torch.Tensor, cov_b: torch.Tensor) -> float:
    """Squared Frechet distance of two Gaussians (Dowson & Landau 1982); means (F,) and covariances (F, F) in float64.

    The trace of the matrix root comes from eigenvalues of a symmetric product, so a rank-deficient covariance is no trouble.
    """
    values, vectors = torch.linalg.eigh(cov_a)
    root_a = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    trace_root = torch.linalg.eigvalsh(root_a @ cov_b @ root_a).clamp_min(0).sqrt().sum()
    return ((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * trace_root).item()


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
