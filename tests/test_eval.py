"""Scores of image folders: right on what can be calculated, refused on what would mislead."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from car_spec.cli import main, parse
from car_spec.eval.features import create_extractor, extract, open_image, same_size_batches
from car_spec.eval.folders import image_files, label_policy, real_images
from car_spec.eval.scores import count_warning, inception_score, kernel_distance, precision_recall
from car_spec.eval.statistics import Statistics, StatisticsError, load_statistics, save_statistics
from car_spec.recipes import RECIPES, read_recipe

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
        (dict(mu=np.zeros(4), sigma=np.eye(4), resize="256"), "was made with --resize 256, this run has None"),
    ],
)
def test_p28_a_wrong_file_is_one_sentence(tmp_path, arrays, sentence):
    np.savez(tmp_path / "s.npz", **arrays)
    with pytest.raises(StatisticsError, match=sentence):
        load_statistics(tmp_path / "s.npz", 4, resize="None")
    (tmp_path / "text.npz").write_text("no")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "s.npz").read_bytes()[:-40])
    for name in ("text.npz", "cut.npz", "absent.npz"):
        with pytest.raises(StatisticsError, match=f"{name} is no npz file"):
            load_statistics(tmp_path / name, 4)


def test_p28_the_adm_batch_serves_as_statistics_and_as_real_images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (6, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "adm.npz", arr_0=pixels, mu=np.zeros(4), sigma=np.eye(4), mu_s=np.zeros(7), sigma_s=np.eye(7))
    assert load_statistics(tmp_path / "adm.npz", 4).mean.shape == (4,)
    (batch,) = same_size_batches(real_images(tmp_path / "adm.npz", "--real-images"), 8)
    assert torch.equal(batch, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    np.savez(tmp_path / "other.npz", mu=np.zeros(4))
    with pytest.raises(ValueError, match=r"--real-images .*other.npz is no batch of images: it has no arr_0, it has mu"):
        real_images(tmp_path / "other.npz", "--real-images")


def test_p30_a_rank_deficient_covariance_gives_a_finite_real_distance():
    g = torch.Generator().manual_seed(0)
    value = Statistics.of(torch.randn(4, 8, generator=g)).distance(Statistics.of(torch.randn(4, 8, generator=g)))
    assert np.isfinite(value) and value > 0


def test_few_images_in_many_dimensions_have_the_distance_of_their_covariances():
    g = torch.Generator().manual_seed(0)
    few, many = Statistics.of(torch.randn(5, 8, generator=g) + 1), Statistics.of(torch.randn(50, 8, generator=g))
    assert few.rows is not None and many.rows is None
    plain = Statistics(few.mean, few.covariance)  # the way of large sets
    assert few.distance(many) == pytest.approx(plain.distance(many), rel=1e-6)
    assert many.distance(few) == pytest.approx(many.distance(plain), rel=1e-6)
    assert few.distance(many) == pytest.approx(many.distance(few), rel=1e-6)


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
    command = ["evaluate", str(tmp_path / "small"), "--reference", str(tmp_path / "s.npz"), "--force", "--subsets", "2"]
    assert main([*command, "--out", str(tmp_path / "r.json"), *weights]) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert set(written["results"][0]["scores"]) == {"FID", "IS"} and written["context"]["reference sha256"]
    assert written["context"]["extractor"] == "inception-v3-compat (torch-fidelity), layer 2048" and set(written["subsets"]) == {
        "images",
        "draws",
        "interval",
    }
    assert "FID" in capsys.readouterr().out


def test_p30_missing_weights_stop_before_any_image_is_read(pictures, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("car_spec.eval.cli.image_files", None)  # reading would fail on this
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    reference = ["--reference", str(pictures / "blue")]
    assert main(["evaluate", str(pictures / "red"), *reference]) == 2
    assert "--inception-weights is not given" in capsys.readouterr().err
    assert main(["evaluate", str(pictures / "red"), *reference, "--inception-weights", str(tmp_path / "no.pth")]) == 2
    assert "no.pth is no file; weights-inception-2015-12-05-6726825d.pth" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["features", "logits"])
def test_a_nan_names_its_image(pictures, what):
    files = image_files(pictures / "red", "FOLDER")
    bad = {name: torch.full((8, 3), float("nan") if name == what else 0.0) for name in ("features", "logits")}
    with pytest.raises(ValueError, match=rf"the {what} of .*000000.png and 23 more images are not finite"):
        extract(lambda images: (bad["features"], bad["logits"]), files, torch.device("cpu"), 8)


def test_resizing_makes_the_short_side_fit_and_keeps_the_centre():
    pixels = np.zeros((20, 40, 3), dtype=np.uint8)
    pixels[:, 10:30] = 255
    small = np.array(open_image(pixels, 10))
    assert small.shape == (10, 10, 3) and small[:, 2:-2].min() == 255  # at its edges bicubic weights reach beyond the cut
    assert open_image(pixels).size == (40, 20)


def test_an_unreadable_image_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"a.png is no image that can be read"):
        list(same_size_batches([tmp_path / "a.png"], 2))


def test_real_images_may_lie_in_subfolders(tmp_path):
    for i in range(4):
        (tmp_path / f"class{i % 2}").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / f"class{i % 2}" / f"{i}.jpg")
    assert [file.name for file in image_files(tmp_path, "--reference")] == ["0.jpg", "2.jpg", "1.jpg", "3.jpg"]


# --- the command


def test_folders_are_compared_side_by_side_under_the_extractors_name(pictures, tmp_path, capsys):
    folders = [str(pictures / "more-red"), str(pictures / "blue")]
    flags = [
        "--reference",
        str(pictures / "red"),
        "--metrics",
        "fid,is,kid,prc",
        "--force",
        "--subsets",
        "5",
        "--out",
        str(tmp_path / "r.json"),
    ]
    assert main(["evaluate", *folders, *flags, *LITE, "--out", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr()
    assert "published scores use 50000" in out.err and "efficientnet-lite0" in out.out and "FID" not in out.out
    written = json.loads((tmp_path / "r.json").read_text())
    same, other = written["results"]
    names = {"Frechet distance (efficientnet-lite0)", "precision (efficientnet-lite0)", "recall (efficientnet-lite0)"}
    assert names < set(same["scores"]) and all("efficientnet-lite0" in name for name in same["scores"])
    (name, *_) = names & {"Frechet distance (efficientnet-lite0)"}
    assert same["scores"][name] < other["scores"][name]
    floor, difference = written["subsets"]["real images (floor)"][name], other["difference from the first folder"][name]
    assert written["subsets"]["images"] == 12 and written["subsets"]["draws"] == 5
    assert floor["interval"][1] < other["on subsets"][name]["interval"][0] and difference["interval"][0] > 0
    assert "real images (floor)" in out.out and "12 images of each, mean of 5 random draws" in out.out
    assert len(written["context"]["extractor weights sha256"]) == len(written["context"]["reference sha256"]) == 64


def manifest(folder, files):
    images = [{"id": i, "file": name, "label": i % 2, "seed": 0} for i, name in enumerate(files)]
    (folder / "manifest.json").write_text(json.dumps({"settings": {"seed": 0}, "environment": {"image_size": 8}, "images": images}))


def test_p31_stale_foreign_and_missing_images_are_refused_before_scoring(tmp_path, capsys):
    names = [f"{i}.png" for i in range(4)]
    for name in [*names, "grid.png"]:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    manifest(tmp_path, names)
    assert [file.name for file in image_files(tmp_path, "FOLDER")] == names  # the grid is no image of the run
    manifest(tmp_path, names[:3])
    with pytest.raises(ValueError, match=r"holds 1 images, 3.png first, which its manifest of 3 does not list"):
        image_files(tmp_path, "FOLDER")
    manifest(tmp_path, [*names, "4.png"])
    assert main(["evaluate", str(tmp_path), "--metrics", "is", *LITE]) == 2
    assert "lacks 1 images, 4.png first, which its manifest of 5 lists" in capsys.readouterr().err


def test_label_policy_counts_images_a_class():
    of = lambda labels: label_policy({"images": [{"label": label} for label in labels]})
    assert of([0, 1, 0, 1]) == "2 classes, 2 images each"
    assert of([0, 1, 0]) == "2 classes, 1 to 2 images each"
    assert label_policy({"images": [{"label": 0, "prompt": text} for text in "aabb"]}) == "2 prompts, 2 images each"


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--metrics", "fid,lpips"], "--metrics lpips is none of fid, is, kid, prc"),
        (["--metrics", "fid"], "--metrics fid needs --reference"),
        (["--metrics", "prc"], "--metrics prc needs --real-images"),
        (["--metrics", "is", "--batch-size", "0"], "--batch-size 0 is below 1"),
        (["--metrics", "is", "--resize", "0"], "--resize 0 is below 1"),
        (["--metrics", "is", "--subsets", "1"], "--subsets 1 is below 2"),
        (["--metrics", "is", "--subset-size", "24"], "--subset-size 24 is outside 2..23"),
        (["--metrics", "is", "--num-images", "25"], "--num-images 25: "),
        (["--metrics", "is", "--images-per-class", "2"], "red has no manifest.json, so its labels are unknown"),
        (["--metrics", "is", "--prompts", "p.txt"], "--prompts p.txt is for clipscore, --metrics has is"),
        (["--metrics", "is", "--inception-weights", "x.pth"], "--inception-weights x.pth conflicts with --extractor efficientnet-lite0"),
    ],
)
def test_bad_flags_are_one_sentence(pictures, capsys, flags, sentence):
    assert main(["evaluate", str(pictures / "red"), *LITE, *flags]) == 2
    assert sentence in capsys.readouterr().err


# --- the field's protocols


def run_folder(folder, labels, settings, **more):
    """A folder as `generate` leaves it: grey pictures and their manifest."""
    folder.mkdir()
    images = [{"id": i, "file": f"{i:06d}.png", "label": label, "seed": i} for i, label in enumerate(labels)]
    for image in images:
        Image.new("RGB", (8, 8), (40 * image["id"] % 256,) * 3).save(folder / image["file"])
    content = {"settings": settings, "environment": {"image_size": 256, "law of the images": "approximate"}, "images": images} | more
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES.glob("*.yaml") if "\nevaluate:" in path.read_text()])
def test_shipped_protocols_check_the_number_of_images_before_anything_else(tmp_path, capsys, recipe):
    folder = run_folder(tmp_path / "run", [0, 1, 0, 1], {"seed": 3})
    flags = ["--config", recipe, "--reference", str(tmp_path / "absent.npz"), *LITE]
    assert main(["evaluate", str(folder), *flags]) == 2
    count = 50_000 if recipe.endswith("50k") else 30_000
    assert f"--num-images {count}: {folder} holds 4" in capsys.readouterr().err


def test_there_is_a_protocol_for_every_released_model():
    expected = {f"{kind}-{size}-50k" for kind in ("mar", "xar") for size in ("base", "large", "huge")}
    assert expected | {"harmon-coco-30k", "harmon-mjhq-30k", "harmon-geneval"} <= {path.stem for path in RECIPES.glob("*.yaml")}


def test_imagenet_protocols_have_the_published_settings():
    for kind, table in (("mar", {"base": 2.9, "large": 3.0, "huge": 3.2}), ("xar", {"base": 2.7, "large": 2.3, "huge": 2.2})):
        for size, guidance in table.items():
            recipe = read_recipe(f"{kind}-{size}-50k")
            assert (recipe["guidance_scale"], recipe["num_images"], recipe["image_size"]) == (guidance, 50_000, 256)
            assert recipe["evaluate"] == {"metrics": "fid,is", "images_per_class": 50}


@pytest.fixture
def small_protocol(tmp_path):
    """A recipe for eight images of two classes, over one that is shared."""
    (tmp_path / "base.yaml").write_text("num_iter: 4\nguidance_scale: 3\n")
    (tmp_path / "small.yaml").write_text(
        f"extends: {tmp_path / 'base.yaml'}\nnum_images: 8\nevaluate:\n  metrics: is\n  images-per-class: 4\n  subsets: 3\n"
    )
    return str(tmp_path / "small.yaml")


def test_one_recipe_serves_generate_and_evaluate(tmp_path, capsys, small_protocol):
    assert parse(["generate", "--config", small_protocol]).num_iter == 4
    folder = run_folder(tmp_path / "run", [0, 1] * 4, {"seed": 3, "num_iter": 4, "guidance_scale": 3.0})
    assert main(["evaluate", str(folder), "--config", small_protocol, *LITE]) == 0
    out, err = capsys.readouterr()
    assert "deviates" not in err and "8 images: published scores" not in err
    assert "labels: 2 classes, 4 images each" in out and "'seed': 3" in out and "law of the images: approximate" in out
    assert "mean of 3 random draws" in out and "no floor" in out


def test_a_folder_that_is_not_the_recipes_is_refused_or_named(tmp_path, capsys, small_protocol):
    flags = ["--config", small_protocol, *LITE]
    uneven = run_folder(tmp_path / "uneven", [0, 1, 0, 1, 0, 1, 0, 0], {})
    assert main(["evaluate", str(uneven), *flags]) == 2
    assert f"--images-per-class 4: {uneven} has 5 images of class 0" in capsys.readouterr().err
    other = run_folder(tmp_path / "other", [0, 1] * 4, {"num_iter": 2, "guidance_scale": 3.0})
    assert main(["evaluate", str(other), *flags, "--out", str(tmp_path / "r.json")]) == 0
    assert "num_iter 2 where the recipe has 4" in capsys.readouterr().err
    assert json.loads((tmp_path / "r.json").read_text())["context"][str(other)]["differs from the recipe in"]


def test_what_sampling_took_stands_beside_the_scores(tmp_path, capsys):
    took = {"images": 4, "sequential calls a batch": 239.0, "tokens a round": 3.5, "fallbacks": 0, "seconds by phase": {"draft": 1}}
    folder = run_folder(tmp_path / "run", [0, 1, 0, 1], {"seed": 3, "weights": "model_ema", "sampler": "lossless"}, runs=[took])
    assert main(["evaluate", str(folder), "--metrics", "is", "--subsets", "2", *LITE, "--out", str(tmp_path / "r.json")]) == 0
    about = json.loads((tmp_path / "r.json").read_text())["context"][str(folder)]
    assert about["runs"] == [{name: value for name, value in took.items() if name != "seconds by phase"}]
    assert about["settings"] == {"seed": 3, "weights": "model_ema", "sampler": "lossless"}


def test_statistics_made_at_another_size_are_refused(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", [0, 1, 0, 1], {})
    statistics = Statistics(torch.zeros(1280, dtype=torch.float64), torch.eye(1280, dtype=torch.float64))
    save_statistics(statistics, tmp_path / "s.npz", extractor="efficientnet-lite0", resize="16")
    assert main(["evaluate", str(folder), "--reference", str(tmp_path / "s.npz"), "--force", *LITE]) == 2
    assert "was made with --resize 16, this run has None" in capsys.readouterr().err
