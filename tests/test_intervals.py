"""Intervals from repeated subsets: they cover what they say, compare equal sizes, and hold a floor that a perfect generator meets."""

import json
import math

import pytest
import torch

from car_spec.eval.features import EXTRACTORS, Features
from car_spec.eval.folders import pairing, read_manifest
from car_spec.eval.intervals import FLOOR, Interval, compare, draw, subset_size
from car_spec.eval.scores import names
from car_spec.eval.statistics import Statistics

CALLED = names(EXTRACTORS["inception"])
STANDARD = Statistics(torch.zeros(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))


def normal(seed, count=200, dims=4, shift=0.0):
    return Features(torch.randn(count, dims, generator=torch.Generator().manual_seed(seed)) + shift, None)


def side_by_side(sets, real=None, metrics=("fid",), pairings=None, size=None, draws=20, reference=STANDARD):
    counts = {name: len(made.features) for name, made in sets.items()} | ({FLOOR: len(real.features)} if real else {})
    size = subset_size(size, list(counts.values()), counts.get(FLOOR))
    pairings = pairings or {name: name for name in sets}
    return compare(sets, pairings, counts, reference, real, metrics, CALLED, size, draws, reference_is_real=real is not None)


def test_the_interval_of_a_mean_is_its_standard_error():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double()
    for size in (250, 500, 750):
        means = torch.stack([x[draw(1000, size, seed)[0]].mean() for seed in range(2000)])
        assert Interval.of(means, size, 1000).error == pytest.approx(x.std().item() / math.sqrt(1000), rel=0.06)


@pytest.mark.parametrize("size", [50, 100])
def test_an_interval_covers_the_expected_distance_of_a_set_of_its_size(size):
    shift, sets = 0.5, 300  # away from the reference, where the distance is closer to linear in the images
    expected = sum(Statistics.of(normal(10_000 + i, size, shift=shift).features).distance(STANDARD) for i in range(2000)) / 2000
    covered = 0
    for i in range(sets):
        low, high = side_by_side({"a": normal(i, shift=shift)}, size=size).scores["a"]["FID"].ends
        covered += low < expected < high
    assert 0.88 < covered / sets < 0.99  # about 95 %


def test_smaller_subsets_score_worse_and_the_floor_moves_with_them():
    sets, real = {"a": normal(0)}, normal(1)
    small, large = (side_by_side(sets, real, size=size).scores for size in (20, 100))
    for name in ("a", FLOOR):
        assert small[name]["FID"].mean > large[name]["FID"].mean + 2 * large[name]["FID"].error


def test_a_perfect_generator_meets_the_floor_and_another_does_not():
    real = normal(1, 400)
    scores = side_by_side({"perfect": normal(0, 400), "other": normal(2, 400, shift=0.5)}, real, ("fid", "kid", "prc")).scores
    for name in ("FID", "KID", "precision (Inception)", "recall (Inception)"):
        perfect, floor = scores["perfect"][name], scores[FLOOR][name]
        assert abs(perfect.mean - floor.mean) < 2 * (perfect.error + floor.error)
    assert scores["other"]["FID"].ends[0] > scores[FLOOR]["FID"].ends[1]


def test_pairing_narrows_the_difference_of_sets_that_share_their_images():
    first, noise = normal(0), 0.05 * normal(5).features
    sets = {"a": first, "b": Features(first.features + noise + 0.1, None)}
    paired = side_by_side(sets, pairings={"a": 1, "b": 1}, reference=Statistics.of(normal(3).features))
    apart = side_by_side(sets, pairings={"a": 1, "b": 2}, reference=Statistics.of(normal(3).features))
    assert paired.paired == ["b"] and apart.paired == []
    assert paired.differences["b"]["FID"].error < 0.5 * apart.differences["b"]["FID"].error
    assert paired.differences["b"]["FID"].mean == pytest.approx(paired.scores["b"]["FID"].mean - paired.scores["a"]["FID"].mean)


def test_a_difference_between_sets_of_one_law_is_mostly_within_its_interval():
    inside = 0
    for i in range(60):
        sets = {"a": normal(2 * i, shift=0.5), "b": normal(2 * i + 1, shift=0.5)}
        low, high = side_by_side(sets, pairings={"a": 1, "b": 1}).differences["b"]["FID"].ends
        inside += low < 0 < high
    assert inside >= 52


def test_subsets_are_half_of_the_smallest_set_unless_given():
    assert subset_size(None, [100, 60], 80) == 30 and subset_size(None, [100], 80) == 40 and subset_size(None, [100], None) == 50
    assert subset_size(40, [100, 60], 80) == 40
    with pytest.raises(ValueError, match=r"--subset-size 41 is outside 2..40"):
        subset_size(41, [100, 60], 80)
    with pytest.raises(ValueError, match=r"--subset-size 60 is outside 2..59"):
        subset_size(60, [100, 60], None)


def test_folders_pair_where_names_and_labels_agree(tmp_path):
    def folder(name, labels):
        (tmp_path / name).mkdir()
        images = [{"file": f"{i}.png", "label": label, "seed": hash(name)} for i, label in enumerate(labels)]
        (tmp_path / name / "manifest.json").write_text(json.dumps({"settings": {}, "environment": {}, "images": images}))
        path = tmp_path / name
        return pairing(path, [path / image["file"] for image in images], read_manifest(path))

    assert folder("a", [0, 1, 2]) == folder("b", [0, 1, 2])
    assert folder("c", [0, 2, 1]) != folder("d", [0, 1, 2]) != folder("e", [0, 1])
