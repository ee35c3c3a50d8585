"""FID, Inception Score, KID, precision and recall of features, and what has to stand beside them to mean something."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from car_spec.eval.features import Extractor, Features
from car_spec.eval.statistics import Statistics

METRICS = ("fid", "is", "kid", "prc")
FULL, LEAST = 50_000, 2_048  # images of the field's protocol; fewer than the second leave an Inception covariance rank-deficient
SUBSETS = 10  # random halves for the spread of a score
IS_SPLITS, IS_SEED = 10, 2020
KID_SUBSETS, KID_SIZE = 100, 1000


@dataclass
class Scores:
    """One folder's scores. values: name -> number; spread: its standard deviation over random halves of the images."""

    folder: str
    count: int
    values: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)


def names(extractor: Extractor) -> dict[str, str]:
    """What the scores are called: only Inception's go by the field's names."""
    tail = f" ({extractor.label})" if extractor.label else ""
    fid = f"Frechet distance{tail}" if extractor.label else "FID"
    return {"fid": fid, "is": f"IS{tail}", "kid": f"KID{tail}", "precision": f"precision{tail}", "recall": f"recall{tail}"}


def inception_score(logits: torch.Tensor) -> float:
    """Ten shuffled splits, as torch-fidelity does it (Salimans et al. 2016)."""
    from torch_fidelity.metric_isc import isc_features_to_metric

    return isc_features_to_metric(logits, splits=min(IS_SPLITS, len(logits)), shuffle=True, rng_seed=IS_SEED)["inception_score_mean"]


def kernel_distance(features: torch.Tensor, real: torch.Tensor) -> float:
    """Kernel inception distance over random subsets (Binkowski et al. 2018)."""
    from torch_fidelity.metric_kid import kid_features_to_metric

    size = min(KID_SIZE, len(features), len(real))
    numbers = kid_features_to_metric(features, real, kid_subsets=KID_SUBSETS, kid_subset_size=size, rng_seed=IS_SEED, verbose=False)
    return numbers["kernel_inception_distance_mean"]


def precision_recall(real: torch.Tensor, features: torch.Tensor) -> tuple[float, float]:
    """Precision: share of the images inside the real manifold; recall the other way round (Kynkaanniemi et al. 2019). Real first."""
    from torch_fidelity.metric_prc import prc_features_to_metric

    numbers = prc_features_to_metric(features, real, verbose=False)  # torch-fidelity 0.4 takes generated images first
    return numbers["precision"], numbers["recall"]


def halves(count: int, subsets: int = SUBSETS) -> list[torch.Tensor]:
    """Indices of random halves of `count` images, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(count, generator=generator)[: count // 2] for _ in range(subsets)]


def score(
    folder: str, made: Features, reference: Statistics | None, real: torch.Tensor | None, metrics: Sequence[str], extractor: Extractor
) -> Scores:
    """reference: for fid. real: features of real images, for kid and prc."""
    called, out = names(extractor), Scores(folder, len(made.features))
    subsets = halves(out.count) if out.count >= 4 else []

    def note(name: str, value: float, of_subset: list[float]) -> None:
        out.values[called[name]] = value
        if of_subset:
            out.spread[called[name]] = torch.tensor(of_subset).std().item()

    if "fid" in metrics:
        assert reference is not None
        value = Statistics.of(made.features).distance(reference)
        note("fid", value, [Statistics.of(made.features[i]).distance(reference) for i in subsets])
    if "is" in metrics:
        note("is", inception_score(made.logits), [inception_score(made.logits[i]) for i in subsets])
    if "kid" in metrics:
        assert real is not None
        note("kid", kernel_distance(made.features, real), [])
    if "prc" in metrics:
        assert real is not None
        precision, recall = precision_recall(real, made.features)
        note("precision", precision, [])
        note("recall", recall, [])
    return out


def floor(real: torch.Tensor, count: int) -> tuple[float, int]:
    """Frechet distance between two disjoint random sets of real images (R, F), of `count` images each or half of what there is.

    What a perfect generator would score with as many images. -> the distance and the size of the sets.
    """
    size = min(count, len(real) // 2)
    order = torch.randperm(len(real), generator=torch.Generator().manual_seed(0))
    return Statistics.of(real[order[:size]]).distance(Statistics.of(real[order[size : 2 * size]])), size


def count_warning(count: int, metrics: Sequence[str], force: bool) -> str | None:
    """Refuses a FID of too few images; -> a warning for a number below the protocol's."""
    if "fid" in metrics and count < LEAST and not force:
        raise ValueError(f"fid of {count} images is refused, below {LEAST} it means little: make more images, or give --force")
    if count < FULL:
        return f"{count} images: published scores use {FULL}, and fewer images give a larger FID"
    return None


def report(scores: Sequence[Scores], context: dict[str, Any]) -> dict[str, Any]:
    """Everything a score needs beside it, as JSON."""
    rows = [{"folder": s.folder, "images": s.count, "scores": s.values, "spread over random halves": s.spread} for s in scores]
    return {"context": context, "results": rows}
