"""Reference statistics: mean and covariance of features, as files of the ADM suite hold them (`mu`, `sigma`)."""

import math
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch


class StatisticsError(ValueError):
    """A statistics file that cannot be used, in one sentence."""


@dataclass(frozen=True)
class Statistics:
    """Moments of features, float64. rows, of a set with fewer images than features, have rows^T rows = covariance."""

    mean: torch.Tensor  # (F,)
    covariance: torch.Tensor  # (F, F)
    rows: torch.Tensor | None = None  # (N, F)

    @classmethod
    def of(cls, features: torch.Tensor) -> "Statistics":
        """Features (N, F), N at least 2."""
        mean = features.double().mean(0)
        rows = (features.double() - mean) / math.sqrt(len(features) - 1)
        return cls(mean, rows.T @ rows, rows if len(rows) < len(mean) else None)

    @cached_property
    def factor(self) -> torch.Tensor:
        """A root of the covariance: (R, F) with factor^T factor = covariance; eigenvalues that rounding made negative are zero."""
        if self.rows is not None:
            return self.rows
        values, vectors = torch.linalg.eigh(self.covariance)
        return (vectors * values.clamp_min(0).sqrt()) @ vectors.T

    def distance(self, reference: "Statistics") -> float:
        """Squared Frechet distance of the two Gaussians (Dowson & Landau 1982). The reference keeps its factor for the next distance.

        The trace of the matrix root comes from eigenvalues of a symmetric product, so a rank-deficient covariance is no trouble;
        of the equal non-zero eigenvalues of A^T A and A A^T the smaller matrix gives them.
        """
        if self.rows is None:
            gram = reference.factor @ self.covariance @ reference.factor.T
        else:
            product = self.rows @ reference.factor.T  # (N, R)
            gram = product @ product.T if product.shape[0] < product.shape[1] else product.T @ product
        trace_root = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().sum()
        return (
            (self.mean - reference.mean).square().sum() + self.covariance.trace() + reference.covariance.trace() - 2 * trace_root
        ).item()


def save_statistics(statistics: Statistics, path: Path, **about: str | int) -> None:
    """about: how they were made, for instance extractor and resize; `load_statistics` holds whoever uses the file to it."""
    if path.suffix != ".npz":
        raise ValueError(f"--out {path} does not end in .npz, which numpy would append")
    np.savez(path, mu=statistics.mean.numpy(), sigma=statistics.covariance.numpy(), **about)  # type: ignore[arg-type]


def load_statistics(path: Path, num_features: int, **about: Any) -> Statistics:
    """Any float dtype; the covariance is made symmetric. Raises StatisticsError for what is missing or has another shape, or where
    the file says that it was made otherwise than `about`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = {"mu", "sigma"} - set(file.files)
            if missing:
                raise StatisticsError(f"--reference {path} has no {' and no '.join(sorted(missing))}, it has {', '.join(file.files)}")
            made = {name: file[name].item() for name in about if name in file.files}
            mean, covariance = (torch.from_numpy(file[name].astype(np.float64)) for name in ("mu", "sigma"))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, StatisticsError):
            raise
        raise StatisticsError(f"--reference {path} is no npz file of numbers: {error}") from None
    for name, value in made.items():
        if value != about[name]:
            raise StatisticsError(f"--reference {path} was made with --{name} {value}, this run has {about[name]}")
    expected = {"mu": (num_features,), "sigma": (num_features, num_features)}
    for name, value in (("mu", mean), ("sigma", covariance)):
        if tuple(value.shape) != expected[name]:
            raise StatisticsError(f"--reference {path} has {name} of shape {tuple(value.shape)}, the extractor needs {expected[name]}")
        if not value.isfinite().all():
            raise StatisticsError(f"--reference {path} has {name} with values that are not finite")
    return Statistics(mean, (covariance + covariance.T) / 2)
