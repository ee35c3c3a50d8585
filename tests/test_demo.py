"""The shipped weights: they load as any checkpoint does, are small, and make images of their classes."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from two_sample import largest_z, shared_noise, smallest_p

import car_spec
from car_spec import load_pipeline
from car_spec.adapters.mar import MARAdapter
from car_spec.asd import ChainTrace, autospeculate
from car_spec.chain import sample_chain
from car_spec.cli import parse
from car_spec.engine import LosslessSampler, LosslessSettings
from car_spec.eval.distances import energy_test, principal_components
from car_spec.eval.folders import image_files, read_manifest
from car_spec.models.loading import load_mar, read_checkpoint
from car_spec.models.mar import MAR
from car_spec.sequential import sample_sequential
from car_spec.trace import Trace

FOLDER = Path(car_spec.__file__).parent / "demo"


def test_the_shipped_files_are_small_and_name_no_machine():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {"mar.safetensors", "mar-draft.safetensors", "README.md", "samples.png"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) < 45e6
    for path in files:
        if path.suffix == ".json":
            assert not re.search(r'"/\w', path.read_text())  # an absolute path


def test_target_and_draft_have_the_promised_sizes(demo):
    draft = load_pipeline("demo-draft")
    count = lambda pipeline: sum(parameter.numel() for parameter in pipeline.model.parameters())
    assert 3e6 <= count(demo) <= 6e6 and count(draft) <= count(demo) / 5
    assert demo.image_size == draft.image_size == 32 and demo.num_tokens == 64
    assert demo.vae.config.latent_channels <= 16
    assert demo.class_names == draft.class_names and len(demo.class_names) == demo.num_classes == 37
    assert demo.preset.num_inference_steps == 100 and demo.clip_sample_range == 4.0


def test_shipped_files_load_through_the_loader_of_released_ones():
    checkpoint = read_checkpoint(FOLDER / "mar.safetensors")
    assert checkpoint.copy == "model_ema"
    assert load_mar(checkpoint, head_depth=3, width=160).config.num_heads == 5


@pytest.fixture(scope="module")
def emoji(demo):
    """Hearts and country flags, few steps: enough for shape and colour."""
    labels = ["heart"] * 8 + ["country-flag"] * 8 + ["face-smiling"] * 8
    generators = [torch.Generator().manual_seed(i) for i in range(len(labels))]
    return demo(labels, num_iter=16, num_inference_steps=50, sampler="sequential", generator=generators, output_type="pt").images


def test_images_are_emoji_on_a_white_ground(emoji):
    assert emoji.shape == (24, 3, 32, 32) and emoji.min() >= 0 and emoji.max() <= 1
    corners = emoji[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.mean() > 0.9
    inside = emoji[:, :, 8:24, 8:24]
    assert inside.mean(1).lt(0.9).float().mean() > 0.6


def test_classes_show_in_the_images(emoji):
    _, _, faces = emoji.split(8)
    middle = faces[:, :, 6:26, 6:26].mean((0, 2, 3))
    assert middle[0] > 0.75 and middle[1] > 0.55 and middle[2] < 0.5  # yellow
    height = lambda images: images.mean(1).lt(0.9).any(2).float().sum(1).mean()  # rows that are not blank
    assert height(emoji[8:16]) < height(faces)  # flags are lower than faces


def test_guidance_and_labels_change_the_image(demo):
    run = lambda label, scale: (
        demo(
            [label], num_iter=8, num_inference_steps=20, guidance_scale=scale, generator=torch.Generator().manual_seed(1), output_type="pt"
        ).images
    )
    assert F.mse_loss(run("heart", 1.0), run("heart", 4.0)) > 1e-4
    assert F.mse_loss(run("heart", 3.0), run("country-flag", 3.0)) > 1e-3


def test_the_readme_call_gives_pil_images(demo):
    images = demo(
        class_labels=["heart", 3],
        guidance_scale=2.0,
        num_inference_steps=20,
        num_iter=8,
        generator=torch.Generator().manual_seed(0),
        output_type="pil",
    ).images
    assert [type(image) for image in images] == [Image.Image] * 2 and images[0].size == (32, 32)


def test_class_names_are_found_by_a_unique_part_and_ambiguous_ones_are_listed(demo):
    assert demo.class_ids(["heart", "drink", 3]) == [
        demo.class_names.index("heart"),
        demo.class_names.index("drink"),
        3,
    ]
    assert demo.class_ids(["smiling"]) == [demo.class_names.index("face-smiling")]
    with pytest.raises(ValueError, match=r"class 'face' is no class name of this model; did you mean face-smiling"):
        demo.class_ids(["face"])


def test_the_lossless_sampler_makes_the_demos_images_in_a_fraction_of_the_calls(demo):
    kwargs = dict(class_labels=["heart"], guidance_scale=1.0, output_type="pt")
    output = demo(**kwargs, sampler="lossless", generator=torch.Generator().manual_seed(0))
    assert output.images.isfinite().all()
    assert output.trace.sequential_calls < 64 * 101 / 8
    assert output.trace.fallbacks == output.trace.chain.fallbacks == 0 and output.trace.largest_gap <= 1e-3


def corner(model: MAR, tokens: int) -> MAR:
    """The trained network on its first tokens only: real weights, at a size that affords thousands of images."""
    state = {
        name: value[:, : value.shape[1] - model.config.num_tokens + tokens] if "pos_embed" in name else value
        for name, value in model.state_dict().items()
    }
    small = MAR(replace(model.config, num_tokens=tokens))
    small.load_state_dict(state)
    return small.eval()


@pytest.mark.parametrize("name, images", [("demo-draft", 1000), pytest.param("demo", 4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@torch.no_grad()
def test_the_engine_keeps_the_law_of_the_shipped_networks(name, images, guidance_scale):
    tokens, denoising = 9, 8
    model = corner(load_pipeline(name).model, tokens)
    adapter = MARAdapter(model, num_inference_steps=denoising, clip_sample_range=4.0)
    orders = torch.randperm(tokens, generator=torch.Generator().manual_seed(3)).expand(images, -1)
    steps = adapter.ar_steps(orders, tokens, guidance_scale, "constant")
    problem = (adapter, steps, model.class_vectors(torch.full((images,), 3), images), model.class_vectors(None, images))
    noise, trace = shared_noise(images, 1), Trace(images)

    def draw(positions):
        return noise.normal(positions.shape[1], 8), noise.normal(positions.shape[1], denoising, 8)

    expected = sample_sequential(*problem, draw)
    ours = LosslessSampler(*problem, shared_noise(images, 2), LosslessSettings(lookahead=4, window=4), trace).sample()
    assert trace.rounds.double().mean() < 0.9 * tokens and trace.fallbacks == 0  # it did speculate
    mean, directions = principal_components(expected.flatten(1), 24)
    ours, expected = ((x.flatten(1).double() - mean) @ directions for x in (ours, expected))
    assert smallest_p(ours, expected) > 0.01
    assert largest_z(ours, expected) < 5
    assert energy_test(ours[:1000], expected[:1000]) > 0.01


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@torch.no_grad()
def test_autospeculation_keeps_the_law_of_the_demos_head(demo, guidance_scale):
    """One token's chain, its condition that of an empty canvas: many samples of the shipped head."""
    count, model = 6_000, demo.model
    adapter = MARAdapter(model, num_inference_steps=20, clip_sample_range=demo.clip_sample_range)
    vectors = torch.stack([model.class_vectors(torch.tensor([3]), 1), model.class_vectors(None, 1)][: 2 if guidance_scale != 1 else 1], 1)
    z = adapter.conditions(torch.zeros(1, 64, 8), torch.ones(1, 64), vectors)[0, :, 27]  # (H, W)
    chain = adapter.chain(z.expand(count, -1, -1), guidance_scale)
    noise, trace = shared_noise(count, 1), ChainTrace()
    expected = sample_chain(chain, noise.normal(8), noise.normal(20, 8))
    ours = autospeculate(chain, noise.normal(8), noise, window=8, taper=0.5, trace=trace).states[:, 0]
    assert smallest_p(ours, expected) > 0.01 and largest_z(ours, expected) < 4.5
    assert sum(trace.accepted) / len(trace.accepted) > 1.5 and trace.fallbacks == 0  # it did speculate


def test_the_reference_holds_every_training_emoji_once_and_its_recipe_has_the_same_labels(tmp_path, monkeypatch):
    names = ["heart", "heart, dark skin tone", "flag", "held out", "of no demo class"]
    columns = dict(
        vendor=[0, 1], name=names, subcategory=[0, 0, 1, 0, 2], category=[0, 0, 1, 0, 2], split=[0, 0, 0, 1, 0]
    )  # of each vendor the same five pictures
    pixels = np.stack([np.full((64, 64, 3), 20 * i, dtype=np.uint8) for i in range(10)])
    own = {key: np.array(value * 2) for key, value in columns.items() if key != "vendor"}
    np.savez(
        tmp_path / "emoji64.npz",
        image=pixels,
        vendor=np.repeat([0, 1], 5),
        subcategory_names=np.array(["heart", "country-flag", "dishes"]),
        category_names=np.array(["Smileys & Emotion", "Flags", "Objects"]),
        vendor_names=np.array(["google", "twitter"]),
        **own,
    )
    script = Path(__file__).parent.parent / "scripts" / "train_demo.py"
    monkeypatch.setattr("sys.argv", [str(script), "reference", "--data", str(tmp_path / "emoji64.npz"), "--out", str(tmp_path / "out")])
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_flush_denormal(False)  # the script asks for it, and other tests may run in this process
    manifest = read_manifest(tmp_path / "out" / "reference")
    assert sorted(image["class"] for image in manifest["images"]) == ["country-flag"] * 2 + ["heart"] * 2
    greys = [Image.open(file).getpixel((0, 0))[0] for file in image_files(tmp_path / "out" / "reference", "--reference")]
    assert {40, 140} < set(greys) and len(set(greys) & {0, 20}) == len(set(greys) & {100, 120}) == 1  # one tone of each vendor
    labels = [str(image["label"]) for image in manifest["images"]]
    args = parse(["generate", "--config", str(tmp_path / "out" / "quality.yaml")])
    assert (args.classes, args.num_images, args.guidance_scale) == (labels, 2048, 1.0)
    assert parse(["evaluate", "x", "--config", str(tmp_path / "out" / "quality.yaml")]).extractor == "efficientnet-lite0"
    captions = parse(["generate", "--config", str(tmp_path / "out" / "quality-harmon.yaml")]).prompt
    assert len(captions) == 4 and {"flag, google", "flag, twitter"} < set(captions)
    assert all(("flag" in caption) == (image["class"] == "country-flag") for caption, image in zip(captions, manifest["images"]))
