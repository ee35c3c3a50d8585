"""One transition of a chain: a diagonal Gaussian, kept as mean and log of the standard deviation."""

import math
from typing import Any, NamedTuple

import torch

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class Gaussian(NamedTuple):
    """N(mean, exp(log_std)^2) over the last axis. log_std = -inf is a deterministic transition: its sample is the mean."""

    mean: torch.Tensor  # (..., D)
    log_std: torch.Tensor  # (..., D)

    def at(self, index: Any) -> "Gaussian":
        """The laws at an index of the leading axes, as tensors are indexed."""
        return Gaussian(self.mean[index], self.log_std[index])

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """mean + std * noise, with standard normal noise of the mean's shape."""
        return torch.addcmul(self.mean, self.log_std.exp(), noise)

    def log_prob(self, y: torch.Tensor) -> torch.Tensor:
        """Log density of y (..., D) -> (...). Undefined for a deterministic transition."""
        standardised = (y - self.mean) * (-self.log_std).exp()
        return (-0.5 * standardised.square() - self.log_std - LOG_SQRT_2PI).sum(-1)
