"""FID, Inception Score, KID, precision and recall, CLIPScore: from features to numbers."""

from collections.abc import Sequence

import torch

from car_spec.eval.features import Extractor, Features
from car_spec.eval.statistics import Statistics

METRICS = ("fid", "is", "kid", "prc", "clipscore")
FULL, LEAST = 50_000, 2_048  # images of the field's protocol; fewer than the second leave an Inception covariance rank-deficient
IS_SPLITS, IS_SEED = 10, 2020
KID_SUBSETS, KID_SIZE = 100, 1000


def names(extractor: Extractor) -> dict[str, str]:
    """What the scores are called: only Inception's go by the field's names, and precision never does without saying whose features."""
    tail = f" ({extractor.label})" if extractor.label else ""
    fid = f"Frechet distance{tail}" if extractor.label else "FID"
    features = extractor.label or "Inception"
    return {
        "fid": fid,
        "is": f"IS{tail}",
        "kid": f"KID{tail}",
        "precision": f"precision ({features})",
        "recall": f"recall ({features})",
        "clipscore": "CLIPScore",
    }


def inception_score(logits: torch.Tensor) -> float:
    """Ten shuffled splits, as torch-fidelity does it (Salimans et al. 2016)."""
    from torch_fidelity.metric_isc import isc_features_to_metric

    return isc_features_to_metric(logits, splits=min(IS_SPLITS, len(logits)), shuffle=True, rng_seed=IS_SEED)["inception_score_mean"]


def kernel_distance(features: torch.Tensor, real: torch.Tensor, subsets: int = KID_SUBSETS) -> float:
    """Kernel inception distance over random subsets (Binkowski et al. 2018)."""
    from torch_fidelity.metric_kid import kid_features_to_metric

    size = min(KID_SIZE, len(features), len(real))
    numbers = kid_features_to_metric(features, real, kid_subsets=subsets, kid_subset_size=size, rng_seed=IS_SEED, verbose=False)
    return numbers["kernel_inception_distance_mean"]


def precision_recall(real: torch.Tensor, features: torch.Tensor) -> tuple[float, float]:
    """Precision: share of the images inside the real manifold; recall the other way round (Kynkaanniemi et al. 2019). Real first."""
    from torch_fidelity.metric_prc import prc_features_to_metric

    numbers = prc_features_to_metric(features, real, verbose=False, save_cpu_ram=True)  # torch-fidelity 0.4 takes generated images first
    return numbers["precision"], numbers["recall"]


def score(
    made: Features,
    reference: Statistics | None,
    real: torch.Tensor | None,
    metrics: Sequence[str],
    called: dict[str, str],
    kid_subsets: int = KID_SUBSETS,
) -> dict[str, float]:
    """One set of images -> its scores by the names of `called`. reference: for fid. real (R, F): for kid and prc."""
    values: dict[str, float] = {}
    if "fid" in metrics:
        assert made.features is not None and reference is not None
        values["fid"] = Statistics.of(made.features).distance(reference)
    if "is" in metrics:
        assert made.logits is not None
        values["is"] = inception_score(made.logits)
    if "kid" in metrics:
        assert made.features is not None and real is not None
        values["kid"] = kernel_distance(made.features, real, kid_subsets)
    if "prc" in metrics:
        assert made.features is not None and real is not None
        values["precision"], values["recall"] = precision_recall(real, made.features)
    if "clipscore" in metrics and made.cosines is not None:  # real images have no prompts
        values["clipscore"] = 100 * made.cosines.double().mean().item()
    return {called[name]: value for name, value in values.items()}


def count_warning(count: int, metrics: Sequence[str], force: bool, full: int = FULL) -> str | None:
    """Refuses a FID of too few images; -> a warning for a number below the protocol's, `full`."""
    if "fid" in metrics and count < LEAST and not force:
        raise ValueError(f"fid of {count} images is refused, below {LEAST} it means little: make more images, or give --force")
    if count < full:
        whose = "published scores use" if full == FULL else "the recipe has"
        return f"{count} images: {whose} {full}, and fewer images give a larger FID"
    return None
