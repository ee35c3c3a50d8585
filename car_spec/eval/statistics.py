"""Reference statistics: mean and covariance of features, as files of the ADM suite hold them (`mu`, `sigma`)."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from car_spec.eval.distances import frechet_of_moments


class StatisticsError(ValueError):
    """A statistics file that cannot be used, in one sentence."""


class Statistics(NamedTuple):
    """Moments of features, float64."""

    mean: torch.Tensor  # (F,)
    covariance: torch.Tensor  # (F, F)

    @classmethod
    def of(cls, features: torch.Tensor) -> "Statistics":
        """Features (B, F), B at least 2."""
        features = features.double()
        return cls(features.mean(0), torch.cov(features.T))

    def distance(self, other: "Statistics") -> float:
        """Squared Frechet distance."""
        return frechet_of_moments(*self, *other)


def save_statistics(statistics: Statistics, path: Path) -> None:
    np.savez(path, mu=statistics.mean.numpy(), sigma=statistics.covariance.numpy())


def load_statistics(path: Path, num_features: int) -> Statistics:
    """Any float dtype; the covariance is made symmetric. Raises StatisticsError for what is missing or has another shape."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = {"mu", "sigma"} - set(file.files)
            if missing:
                raise StatisticsError(f"--reference {path} has no {' and no '.join(sorted(missing))}, it has {', '.join(file.files)}")
            mean, covariance = (torch.from_numpy(file[name].astype(np.float64)) for name in ("mu", "sigma"))
    except (OSError, ValueError) as error:
        if isinstance(error, StatisticsError):
            raise
        raise StatisticsError(f"--reference {path} is no npz file of numbers: {error}") from None
    expected = {"mu": (num_features,), "sigma": (num_features, num_features)}
    for name, value in (("mu", mean), ("sigma", covariance)):
        if tuple(value.shape) != expected[name]:
            raise StatisticsError(f"--reference {path} has {name} of shape {tuple(value.shape)}, the extractor needs {expected[name]}")
        if not value.isfinite().all():
            raise StatisticsError(f"--reference {path} has {name} with values that are not finite")
    return Statistics(mean, (covariance + covariance.T) / 2)
