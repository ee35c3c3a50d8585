"""Several sets of images side by side, scored on repeated random subsets of one size, with real images beside them.

A Frechet distance grows as a set shrinks, so only scores of as many images can be compared. Every draw takes M images of each set and
M real ones, and scores them all against the same other real images (or against given statistics): what the M real ones get is the
floor, the score of a perfect generator. M is half of the smallest set unless it is given.

Intervals are those of the delete-d jackknife (Shao & Wu 1989): a score of M of N images drawn without replacement varies
by sqrt((N - M) / M) times the standard error that comes from having N images and not all there could be. To that the error of a mean
over so many draws is added. Far from linear scores, or with very few images, they are somewhat too narrow.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from car_spec.eval.features import Features
from car_spec.eval.scores import score
from car_spec.eval.statistics import Statistics

SUBSETS = 20
SUBSET_KID_SUBSETS = 5  # of each draw; the draws themselves are the repetition
STANDARD_ERRORS = 2  # of an interval: about 95 %
FLOOR = "real images (floor)"


@dataclass(frozen=True)
class Interval:
    """A mean over draws, and its standard error as an estimate for all images there could be."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: torch.Tensor, size: int, count: int) -> "Interval":
        """values (S,): scores of S random subsets of `size` of `count` images."""
        return cls(values.mean().item(), values.std().item() * math.sqrt(size / (count - size) + 1 / len(values)))

    @property
    def ends(self) -> tuple[float, float]:
        return self.mean - STANDARD_ERRORS * self.error, self.mean + STANDARD_ERRORS * self.error


@dataclass(frozen=True)
class Comparison:
    """size: M. draws: S. scores: set -> score -> interval. differences: the same, from the first set. paired: the sets whose draws
    held the same images as those of the first set, but for sampler and seed.
    """

    size: int
    draws: int
    scores: dict[str, dict[str, Interval]]
    differences: dict[str, dict[str, Interval]]
    paired: list[str]


def subset_size(given: int | None, counts: Sequence[int], real: int | None) -> int:
    """M: at most half of the real images, so that as many others are left; less than every set, so that draws differ."""
    limit = min([count - 1 for count in counts] + ([real // 2] if real is not None else []))
    if given is None:
        return min([count // 2 for count in counts] + ([real // 2] if real is not None else []))
    if not 2 <= given <= limit:
        raise ValueError(f"--subset-size {given} is outside 2..{limit}, which the number of images allows")
    return given


def draw(count: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of `size` of `count` images and of the others, a function of the seed."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:size], order[size:]


def compare(
    sets: dict[str, Features],
    pairings: dict[str, Hashable],
    counts: dict[str, int],
    reference: Statistics | None,
    real: Features | None,
    metrics: Sequence[str],
    called: dict[str, str],
    size: int,
    draws: int,
    reference_is_real: bool,
    on_draw: Callable[[int], object] = lambda count: None,
) -> Comparison:
    """Scores of `draws` subsets. Sets with equal `pairings` give the same images to a draw.

    reference: for fid. real: features of real images; `reference_is_real` says that the reference is theirs.
    """
    distinct = list(dict.fromkeys(pairings.values()))
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in [*sets, *([FLOOR] if real is not None else [])]}
    for i in range(draws):
        others, own = None, reference
        if real is not None:
            held, rest = draw(counts[FLOOR], size, i)
            others = real.take(rest).features
            among_real = Statistics.of(others) if "fid" in metrics and others is not None else None
            own = among_real if reference_is_real else reference
            rows[FLOOR].append(score(real.take(held), among_real, others, metrics, called, SUBSET_KID_SUBSETS))
        for name, made in sets.items():
            chosen, _ = draw(counts[name], size, i + draws * (1 + distinct.index(pairings[name])))
            rows[name].append(score(made.take(chosen), own, others, metrics, called, SUBSET_KID_SUBSETS))
        on_draw(1)

    values = {name: {key: torch.tensor([row[key] for row in of], dtype=torch.float64) for key in of[0]} for name, of in rows.items()}
    scores = {name: {key: Interval.of(of[key], size, counts[name]) for key in of} for name, of in values.items()}
    first, *rest_of_sets = sets
    paired = [name for name in rest_of_sets if pairings[name] == pairings[first]]
    differences = {}
    for name in rest_of_sets:
        differences[name] = {
            key: Interval.of(values[name][key] - values[first][key], size, counts[name])
            if name in paired
            else Interval(scores[name][key].mean - scores[first][key].mean, math.hypot(scores[name][key].error, scores[first][key].error))
            for key in values[name]
        }
    return Comparison(size, draws, scores, differences, paired)
