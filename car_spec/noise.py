"""Random numbers for many sequences, each owned by an image with its own generator.

What one image draws depends on its own sequences only, so an image does not depend on the batch it is in.
"""

from collections.abc import Sequence

import torch


class Noise:
    """Draws for S sequences; sequence s belongs to image owner[s], and owners ascend.

    Generators live on the CPU, so that a seed means the same image on every device.
    """

    def __init__(self, generators: Sequence[torch.Generator], owner: torch.Tensor | None = None):
        self.generators = list(generators)
        self.owner = torch.arange(len(self.generators)) if owner is None else owner  # (S,)

    def of(self, sequences: torch.Tensor) -> "Noise":
        """The draws of some of the sequences (ascending, repeats allowed)."""
        return type(self)(self.generators, self.owner[sequences])

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal (S, *shape), float32."""
        return self._draw(torch.randn, shape)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Uniform on [0, 1) (S, *shape), float32."""
        return self._draw(torch.rand, shape)

    def _draw(self, draw, shape: tuple[int, ...]) -> torch.Tensor:
        if len(self.generators) == 1:  # nothing to divide
            return draw((len(self.owner), *shape), generator=self.generators[0]).to(self.owner.device)
        counts = torch.bincount(self.owner, minlength=len(self.generators)).tolist()
        parts = [draw((n, *shape), generator=g) for g, n in zip(self.generators, counts) if n]
        return torch.cat(parts).to(self.owner.device) if parts else torch.zeros(0, *shape, device=self.owner.device)


def image_generators(generator: torch.Generator | Sequence[torch.Generator] | None, batch: int) -> list[torch.Generator]:
    """One generator an image, on the CPU: those given, or seeded from the one given, which None seeds itself."""
    if isinstance(generator, Sequence):
        if len(generator) != batch:
            raise ValueError(f"generator holds {len(generator)} generators for {batch} images")
        return [g if g.device.type == "cpu" else _cpu_generators(g, 1)[0] for g in generator]
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return _cpu_generators(generator, batch)


def _cpu_generators(generator: torch.Generator, count: int) -> list[torch.Generator]:
    seeds = torch.randint(2**63 - 1, (count,), generator=generator, device=generator.device).tolist()
    return [torch.Generator().manual_seed(seed) for seed in seeds]
