"""Scores of image folders: right on what can be calculated, refused on what would mislead."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from car_spec.cli import main
from car_spec.eval.features import EXTRACTORS, create_extractor, extract, same_size_batches
from car_spec.eval.folders import image_files, label_policy
from car_spec.eval.scores import count_warning, floor, inception_score, kernel_distance, precision_recall
from car_spec.eval.statistics import Statistics, StatisticsError, load_statistics, save_statistics

LITE = ["--extractor", "efficientnet-lite0"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Three folders of 24 small pictures: red noise, red noise again, and blue noise."""
    rng, root = np.random.default_rng(0), tmp_path_factory.mktemp("pictures")
    for name, colour in (("red", [200, 60, 60]), ("more-red", [200, 60, 60]), ("blue", [60, 60, 200])):
        (root / name).mkdir()
        for i in range(24):
            pixels = np.clip(np.array(colour) + rng.normal(0, 40, (32, 32, 3)), 0, 255).astype("uint8")
            Image.fromarray(pixels).save(root / name / f"{i:06d}.png")
    return root


# --- statistics


def test_p27_two_gaussians_in_files_give_the_analytic_distance(tmp_path):
    d = 5
    first = Statistics(torch.zeros(d, dtype=torch.float64), torch.eye(d, dtype=torch.float64))
    second = Statistics(torch.full((d,), 2.0, dtype=torch.float64), 9 * torch.eye(d, dtype=torch.float64))
    save_statistics(second, tmp_path / "s.npz")
    assert first.distance(load_statistics(tmp_path / "s.npz", d)) == pytest.approx(4 * d + d * (1 + 9 - 2 * 3))


def test_p28_float32_and_float64_files_give_the_same_distance(tmp_path):
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    statistics = Statistics.of(x)
    for dtype in (np.float32, np.float64):
        np.savez(
            tmp_path / f"{dtype.__name__}.npz", mu=statistics.mean.numpy().astype(dtype), sigma=statistics.covariance.numpy().astype(dtype)
        )
    single, double = (Statistics.of(x + 1).distance(load_statistics(tmp_path / f"{n}.npz", 4)) for n in ("float32", "float64"))
    assert single == pytest.approx(double, rel=1e-5) and double == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize(
    "arrays, sentence",
    [
        (dict(mu=np.zeros(3), sigma=np.eye(4)), r"has mu of shape \(3,\), the extractor needs \(4,\)"),
        (dict(mu=np.zeros(4), sigma=np.eye(3)), r"has sigma of shape \(3, 3\), the extractor needs \(4, 4\)"),
        (dict(mean=np.zeros(4), sigma=np.eye(4)), "has no mu, it has mean, sigma"),
        (dict(mu=np.full(4, np.nan), sigma=np.eye(4)), "has mu with values that are not finite"),
    ],
)
def test_p28_a_wrong_file_is_one_sentence(tmp_path, arrays, sentence):
    np.savez(tmp_path / "s.npz", **arrays)
    with pytest.raises(StatisticsError, match=sentence):
        load_statistics(tmp_path / "s.npz", 4)
    (tmp_path / "text.npz").write_text("no")
    with pytest.raises(StatisticsError, match="is no npz file"):
        load_statistics(tmp_path / "text.npz", 4)


def test_p30_a_rank_deficient_covariance_gives_a_finite_real_distance():
    g = torch.Generator().manual_seed(0)
    value = Statistics.of(torch.randn(4, 8, generator=g)).distance(Statistics.of(torch.randn(4, 8, generator=g)))
    assert np.isfinite(value) and value > 0


def test_statistics_of_a_set_have_no_distance_to_themselves():
    statistics = Statistics.of(torch.randn(100, 6, generator=torch.Generator().manual_seed(0)))
    assert statistics.distance(statistics) == pytest.approx(0, abs=1e-9)


# --- scores


def test_p29_swapping_real_and_made_swaps_precision_and_recall():
    g = torch.Generator().manual_seed(0)
    real = torch.cat([torch.randn(100, 2, generator=g), torch.randn(100, 2, generator=g) + 20])
    collapsed = torch.randn(200, 2, generator=g)  # one of the two modes only
    precision, recall = precision_recall(real, collapsed)
    assert precision > 0.9 and recall < 0.6
    assert precision_recall(collapsed, real) == pytest.approx((recall, precision))


def test_inception_score_counts_equally_likely_classes():
    logits = 50 * torch.eye(5).repeat(200, 1)
    assert inception_score(logits) == pytest.approx(5.0, rel=0.02)
    assert inception_score(torch.zeros(100, 5)) == pytest.approx(1.0)


def test_kernel_distance_is_zero_for_one_law_and_grows_with_a_shift():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 400, 3, generator=g)
    assert abs(kernel_distance(x, y)) < 0.05 < kernel_distance(x + 1, y)


def test_the_floor_is_the_distance_of_halves_of_the_same_size():
    real = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    small, size = floor(real, 50)
    large, whole = floor(real, 10_000)
    assert size == 50 and whole == 500 and 0 < large < small


def test_p29_few_images_are_warned_about_or_refused():
    assert count_warning(50_000, ["fid"], False) is None
    assert "published scores use 50000" in count_warning(2_048, ["fid"], False)
    assert count_warning(8, ["is"], False) and count_warning(8, ["fid"], True)
    with pytest.raises(ValueError, match="fid of 8 images is refused, below 2048"):
        count_warning(8, ["fid"], False)


# --- extractors


def test_features_do_not_depend_on_the_batch_size(pictures):
    module, files = create_extractor("efficientnet-lite0", None, torch.device("cpu")), image_files(pictures / "red", "FOLDER")
    whole, single = (extract(module, files, torch.device("cpu"), size) for size in (24, 5))
    assert whole.features.shape == (24, 1280) and whole.logits.shape == (24, 1000)
    torch.testing.assert_close(whole.features, single.features, atol=1e-4, rtol=1e-4)


def test_the_extractor_was_trained_and_sees_a_red_heart_as_no_noise(pictures):
    files = image_files(pictures / "red", "FOLDER")
    module = create_extractor("efficientnet-lite0", None, torch.device("cpu"))
    red, blue = (extract(module, image_files(pictures / name, "FOLDER"), torch.device("cpu"), 24).features for name in ("red", "blue"))
    assert (red.mean(0) - blue.mean(0)).norm() > 3 * (red[:12].mean(0) - red[12:].mean(0)).norm()
    assert len(files) == 24


def test_a_batch_ends_where_the_size_changes(tmp_path):
    for i, side in enumerate((8, 8, 9, 8)):
        Image.new("RGB", (side, side)).save(tmp_path / f"{i}.png")
    files = image_files(tmp_path, "FOLDER")
    assert [tuple(batch.shape[:1] + batch.shape[2:]) for batch in same_size_batches(files, 8)] == [(2, 8, 8), (1, 9, 9), (1, 8, 8)]


def test_p30_a_random_inception_file_goes_all_the_way_offline(pictures, tmp_path, capsys):
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    module = FeatureExtractorInceptionV3.__new__(FeatureExtractorInceptionV3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_fidelity.feature_extractor_inceptionv3.load_state_dict_from_url", lambda *a, **k: None)
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        torch.manual_seed(0)
        module.__init__("inception-v3-compat", ["2048"])
    torch.save(module.state_dict(), tmp_path / "inception.pth")
    for folder in ("small", "other"):
        (tmp_path / folder).mkdir()
        for file in image_files(pictures / ("red" if folder == "small" else "blue"), "FOLDER")[:4]:
            (tmp_path / folder / file.name).write_bytes(file.read_bytes())
    weights = ["--inception-weights", str(tmp_path / "inception.pth")]
    assert main(["stats", str(tmp_path / "other"), "-o", str(tmp_path / "s.npz"), *weights]) == 0
    command = ["evaluate", str(tmp_path / "small"), "--reference", str(tmp_path / "s.npz"), "--force", "--out", str(tmp_path / "r.json")]
    assert main([*command, *weights]) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert set(written["results"][0]["scores"]) == {"FID", "IS"} and "reference sha256" in written["context"]
    assert "FID" in capsys.readouterr().out


def test_p30_missing_weights_stop_before_any_image_is_read(pictures, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("car_spec.eval.cli.image_files", None)  # reading would fail on this
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    reference = ["--reference", str(pictures / "blue")]
    assert main(["evaluate", str(pictures / "red"), *reference]) == 2
    assert "--inception-weights is not given" in capsys.readouterr().err
    assert main(["evaluate", str(pictures / "red"), *reference, "--inception-weights", str(tmp_path / "no.pth")]) == 2
    assert "no.pth is no file; weights-inception-2015-12-05-6726825d.pth" in capsys.readouterr().err


def test_a_nan_feature_names_its_image(pictures):
    files = image_files(pictures / "red", "FOLDER")
    module = lambda images: (torch.full((len(images), 3), float("nan")), torch.zeros(len(images), 2))
    with pytest.raises(ValueError, match=r"000000.png and 23 more images are not finite"):
        extract(module, files, torch.device("cpu"), 8)


# --- the command


def test_folders_are_compared_side_by_side_under_the_extractors_name(pictures, tmp_path, capsys):
    folders = [str(pictures / "more-red"), str(pictures / "blue")]
    flags = ["--reference", str(pictures / "red"), "--metrics", "fid,is,kid,prc", "--force", "--out", str(tmp_path / "r.json")]
    assert main(["evaluate", *folders, *flags, *LITE]) == 0
    out = capsys.readouterr()
    assert "published scores use 50000" in out.err and "efficientnet-lite0" in out.out and "FID" not in out.out
    same, other = json.loads((tmp_path / "r.json").read_text())["results"]
    name = "Frechet distance (efficientnet-lite0)"
    assert same["scores"][name] < other["scores"][name] and same["spread over random halves"][name] > 0
    assert "between two disjoint sets of 12 real images" in out.out
    assert EXTRACTORS["efficientnet-lite0"].label in name


def manifest(folder, files):
    images = [{"id": i, "file": name, "label": i % 2, "seed": 0} for i, name in enumerate(files)]
    (folder / "manifest.json").write_text(json.dumps({"settings": {"seed": 0}, "environment": {}, "images": images}))


def test_p31_stale_foreign_and_missing_images_are_refused_before_scoring(tmp_path, capsys):
    for i in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "grid.png")
    manifest(tmp_path, ["0.png", "1.png", "2.png"])
    assert [file.name for file in image_files(tmp_path, "FOLDER")] == ["0.png", "1.png", "2.png"]  # the grid is no image of the run
    manifest(tmp_path, ["0.png", "1.png"])
    with pytest.raises(ValueError, match=r"holds 1 of 2 images, 2.png first, which its manifest does not list"):
        image_files(tmp_path, "FOLDER")
    manifest(tmp_path, ["0.png", "1.png", "2.png", "3.png"])
    assert main(["evaluate", str(tmp_path), "--metrics", "is", *LITE]) == 2
    assert "lacks 1 of 4 images, 3.png first" in capsys.readouterr().err


def test_label_policy_counts_images_a_class():
    of = lambda labels: label_policy({"images": [{"label": label} for label in labels]})
    assert of([0, 1, 0, 1]) == "2 classes, 2 images each"
    assert of([0, 1, 0]) == "2 classes, 1 to 2 images each"


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--metrics", "fid,lpips"], "--metrics lpips is none of fid, is, kid, prc"),
        (["--metrics", "fid"], "--metrics fid needs --reference"),
        (["--metrics", "prc"], "--metrics prc needs --real-images"),
        (["--metrics", "is", "--batch-size", "0"], "--batch-size 0 is below 1"),
        (["--metrics", "is", "--inception-weights", "x.pth"], "--inception-weights x.pth conflicts with --extractor efficientnet-lite0"),
    ],
)
def test_bad_flags_are_one_sentence(pictures, capsys, flags, sentence):
    assert main(["evaluate", str(pictures / "red"), *LITE, *flags]) == 2
    assert sentence in capsys.readouterr().err
