"""The command line as a user meets it, and the API's conveniences."""

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from car_spec.cli import main, parse, parse_ids
from car_spec.pipeline import NonFiniteImageError
from car_spec.recipes import RECIPES
from car_spec.runs import RunFolder, image_grid, image_spec


def run(capsys, *flags):
    code = main([str(flag) for flag in flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def quick(file, out, *flags):
    return ["generate", "--model", file, "--out", out, "--num-iter", "2", "--num-inference-steps", "3", *flags]


def test_generate_writes_images_a_grid_and_says_where(tiny_file, tmp_path, capsys):
    code, out, err = run(capsys, *quick(tiny_file, tmp_path / "out", "--classes", 3, 7, "--num-images", 5))
    assert code == 0
    assert out == f"5 images made: {tmp_path / 'out'}\ngrid: {tmp_path / 'out' / 'grid.png'}\n"
    assert "image/s" in err or "s/image" in err
    assert sorted(p.name for p in (tmp_path / "out").glob("0*.png")) == [f"{i:06d}.png" for i in range(5)]
    assert Image.open(tmp_path / "out" / "000004.png").size == (8, 8)
    assert Image.open(tmp_path / "out" / "grid.png").size == (2 * 66 - 2, 3 * 66 - 2)  # 8 pixels magnified to 64, gaps of 2


def test_running_again_makes_nothing_and_growing_makes_the_rest(tiny_file, tmp_path, capsys):
    assert run(capsys, *quick(tiny_file, tmp_path / "out", "--num-images", 3))[0] == 0
    assert run(capsys, *quick(tiny_file, tmp_path / "out", "--num-images", 3))[1].startswith("0 images made, 3 were there already")
    assert run(capsys, *quick(tiny_file, tmp_path / "out", "--num-images", 5))[1].startswith("2 images made, 3 were there already")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [image["id"] for image in manifest["images"]] == list(range(5))


def test_one_image_alone_has_the_pixels_of_the_whole_run(tiny_file, tmp_path, capsys):
    run(capsys, *quick(tiny_file, tmp_path / "all", "--num-images", 8))
    run(capsys, *quick(tiny_file, tmp_path / "one", "--image-ids", 7))
    alone, whole = (torch.tensor(list(Image.open(tmp_path / name / "000007.png").tobytes())) for name in ("one", "all"))
    assert (alone - whole).abs().max() <= 1  # rounding depends on the size of the batch
    assert [p.name for p in (tmp_path / "one").glob("0*.png")] == ["000007.png"]


def test_a_recipe_sets_values_and_flags_override_it(tiny_file, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"model: {tiny_file}\nclasses: [1, 2]\nnum_images: 2\nnum-iter: 3\nguidance_scale: 2.5\nseed: null\nverbose: true\nplot: false\n"
    )
    args = parse(["generate", "--config", str(recipe), "--num-iter", "2"])
    assert (args.classes, args.num_images, args.num_iter, args.guidance_scale, args.seed) == (["1", "2"], 2, 2, 2.5, 0)
    assert args.verbose and not args.plot
    assert run(capsys, "generate", "--config", recipe, "--out", tmp_path / "out", "--num-inference-steps", 2)[0] == 0
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]
    assert settings["classes"] == [1, 2] and settings["num_iter"] == 3 and settings["guidance_scale"] == 2.5


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("gudance_scale: 2", "has gudance_scale, which generate does not know"),
        ("- 1\n- 2", "holds a list, not names with values"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_recipe_with_a_mistake_is_refused(tmp_path, capsys, content, sentence):
    (tmp_path / "bad.yaml").write_text(content)
    code, _, err = run(capsys, "generate", "--config", tmp_path / "bad.yaml")
    assert code == 2 and sentence in err
    assert "shipped recipes are demo, " in run(capsys, "generate", "--config", "absent")[2]


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_parse(recipe):
    args = parse(["generate", "--config", recipe.stem])
    assert args.num_images is None or args.num_images >= 1
    if recipe.stem.startswith("mar-"):
        assert (args.num_iter, args.num_inference_steps, args.guidance_schedule, args.image_size) == (256, 100, "linear", 256)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--classes", "10"], "label 10 is outside 0..9"),
        (["--classes", "cat"], "class 'cat' is no class name of this model"),
        (["--num-images", "0"], "--num-images 0 is below 1"),
        (["--batch-size", "0"], "--batch-size 0 is below 1"),
        (["--image-ids", "3-x"], "--image-ids 3-x: '3-x' is neither a number nor a range"),
        (["--image-ids", "9", "--num-images", "4"], "--image-ids 9 goes beyond --num-images 4"),
        (["--num-iter", "17"], "num_iter 17 is outside 1..16"),
        (["--num-inference-steps", "1"], "num_inference_steps 1 is outside 2..1000"),
        (["--weights", "model"], "--weights model"),
        (["--vae", "/nowhere/kl16"], "--vae /nowhere/kl16: there is no such file or folder"),
    ],
)
def test_bad_flags_are_one_sentence_and_leave_no_folder(tiny_file, tmp_path, capsys, flags, sentence):
    code, out, err = run(capsys, "generate", "--model", tiny_file, "--out", tmp_path / "out", *flags)
    assert code == 2 and out == ""
    assert sentence in err and err.count("\n") == 1 and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_an_unreadable_manifest_is_refused(tiny_file, tmp_path, capsys):
    (tmp_path / "manifest.json").write_text("{}")
    assert "its manifest.json is no manifest of car_spec" in run(capsys, *quick(tiny_file, tmp_path))[2]


@pytest.mark.parametrize("flags", [["--model"], []], ids=["as a flag", "by place"])
def test_info_says_what_a_checkpoint_is_and_what_fits_it(tiny_file, capsys, flags):
    code, out, _ = run(capsys, "info", *flags, tiny_file)
    assert code == 0
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert lines["network"] == "MAR (Li et al. 2024)" and lines["weights"] == "flat, float32" and len(lines["sha256"]) == 64
    assert lines["tokens"] == "16 of 4 numbers; 10 classes" and lines["head"] == "width 32, 2 blocks"
    assert lines["defaults"].startswith("tiny: 4 AR steps, 100 denoising steps, guidance 1 (linear)")
    assert lines["image size"] == "8" and lines["--sampler lossless"].startswith("yes, the default")
    assert lines["--sampler cspd"].startswith("no: sampler 'cspd' needs a draft model")


def test_info_needs_no_autoencoder_and_looks_at_a_draft(tiny_file, tmp_path, capsys):
    alone = tmp_path / "a" / "b" / "c" / "alone.safetensors"
    alone.parent.mkdir(parents=True)
    alone.write_bytes(tiny_file.read_bytes())
    code, out, _ = run(capsys, "info", alone, "--draft", alone)
    assert code == 0 and "autoencoder: --vae is missing" in out and "image size" not in out
    assert "--sampler cspd: yes; law of the images: approximate" in out and "--drafter model: yes" in out
    code, _, err = run(capsys, "info", alone, "--draft", "demo")
    assert code == 2 and "--draft demo has 64 tokens, --model tiny has 16" in err


def test_info_knows_harmon_and_refuses_what_it_does_not_know(tmp_path, capsys):
    from conftest import HARMON_LLM, golden_state
    from safetensors.torch import save_file

    from car_spec.models.loading import METADATA_KEY

    metadata = {"num_heads": 4, "llm": HARMON_LLM}
    save_file(golden_state("harmon_tiny"), tmp_path / "harmon.safetensors", {METADATA_KEY: json.dumps(metadata)})
    code, out, _ = run(capsys, "info", tmp_path / "harmon.safetensors")
    assert code == 0 and "network: Harmon (Wu et al. 2025)" in out
    assert "language model: width 32, 4 heads, 2 blocks, 128 words" in out and "--sampler lossless: yes, the default" in out
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    code, out, err = run(capsys, "info", tmp_path / "other.safetensors")
    assert code == 2 and "holds no model that car_spec knows: x ..." in err
    assert run(capsys, "info", "demo", "--model", "demo")[2].endswith("info takes one model, but demo and --model demo are given\n")


def test_id_lists():
    assert parse_ids("0-3,7") == [0, 1, 2, 3, 7]
    assert parse_ids("7,1,1") == [1, 7]


def test_grids_magnify_small_images_and_keep_large_ones():
    small, large = Image.new("RGB", (32, 32), "red"), Image.new("RGB", (256, 256), "red")
    assert image_grid([small] * 3, columns=2).size == (130, 130)
    assert image_grid([large] * 2, columns=2).size == (514, 256)


def test_lossless_runs_from_the_command_line_and_says_what_it_did(tiny_file, tmp_path, capsys):
    flags = ["--sampler", "lossless", "--lookahead", 3, "--window", 2, "--num-images", 4, "--batch-size", 2, "--verbose", "--plot"]
    code, out, _ = run(capsys, *quick(tiny_file, tmp_path / "out", *flags))
    assert code == 0
    said = dict(line.split(": ") for line in out.splitlines()[2:])
    assert (tmp_path / "out" / "speculation.png").read_bytes().startswith(b"\x89PNG") and said["plot"].endswith("speculation.png")
    assert said["images"] == "4" and said["fallbacks"] == "0"
    assert float(said["rounds an image"]) <= 2 and float(said["tokens a round"]) >= 8
    assert said["acceptance by AR steps ahead"].startswith("1 ") and said["tokens a round, histogram"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (took,), settings = manifest["runs"], manifest["settings"]
    assert sum(int(count) * times for count, times in took["tokens a round, histogram"].items()) == 4 * 16
    assert len(took["rounds of each image"]) == 4 and took["head calls a batch"] == float(said["head calls a batch"])
    assert (settings["sampler"], settings["lookahead"], settings["window"], settings["final_tolerance"]) == ("lossless", 3, 2, 1e-3)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--sampler", "sequential", "--lookahead", "4"], "lookahead belongs to the lossless sampler, but sampler is 'sequential'"),
        (["--sampler", "lossless", "--lookahead", "0"], "lookahead 0 is below 1"),
        (["--sampler", "lossless", "--window", "0"], "window 0 is below 1"),
        (["--drafter", "frozen"], "drafter 'frozen' is none of self, model"),
        (["--sampler", "lossless", "--final-tolerance", "-1"], "final_tolerance -1.0 is not a number of at least 0"),
    ],
)
def test_bad_lossless_flags_are_one_sentence(tiny_file, tmp_path, capsys, flags, sentence):
    assert sentence in run(capsys, *quick(tiny_file, tmp_path / "out", *flags))[2]
    assert not (tmp_path / "out").exists()


def test_sequential_counts_its_calls(tiny_pipeline):
    trace = tiny_pipeline([0, 1], num_iter=4, num_inference_steps=6, guidance_scale=2.0, sampler="sequential").trace
    assert (trace.backbone_calls, trace.chain.calls, trace.sequential_calls) == (4, 24, 28)
    assert trace.backbone_rows == 4 * 2 * 2 and trace.chain.rows == 16 * 2 * 6
    assert [sum(rows) for rows in trace.accepted_rows] == [16, 16]


def test_at_temperature_zero_lossless_is_sequential(tiny_pipeline):
    run = lambda sampler: (
        tiny_pipeline([0, 1], temperature=0.0, sampler=sampler, generator=torch.Generator().manual_seed(0), output_type="latent").images
    )
    assert torch.equal(run("lossless"), run("sequential"))


def test_a_nan_in_lossless_sampling_names_its_image(tiny_pipeline):
    tiny_pipeline.model.class_emb.weight[3] = float("nan")
    with pytest.raises(NonFiniteImageError) as caught:
        tiny_pipeline([1, 3, 2], sampler="lossless", generator=torch.Generator().manual_seed(0))
    assert caught.value.indices == [1]


def test_a_draft_model_drafts_and_a_foreign_one_is_refused(tiny_file, tiny_mar, tmp_path, capsys):
    flags = ["--sampler", "lossless", "--drafter", "model", "--num-images", 2]
    assert run(capsys, *quick(tiny_file, tmp_path / "out", *flags, "--draft", tiny_file))[0] == 0
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]
    assert settings["drafter"] == "model" and settings["draft_sha256"] == settings["model_sha256"]
    assert "drafter 'model' needs a draft model" in run(capsys, *quick(tiny_file, tmp_path / "no", *flags))[2]
    torch.save(tiny_mar.state_dict() | {"class_emb.weight": torch.zeros(7, 32)}, tmp_path / "seven.pth")
    code, _, err = run(capsys, *quick(tiny_file, tmp_path / "no", *flags, "--draft", tmp_path / "seven.pth", "--num-heads", 4))
    assert code == 2 and "--draft seven has 7 classes, --model tiny has 10" in err


def test_the_grid_of_a_long_run_shows_its_first_images_only(tmp_path, monkeypatch):
    monkeypatch.setattr("car_spec.runs.GRID_IMAGES", 4)
    folder, specs = RunFolder(tmp_path, {}), [image_spec(i, [0], 0) for i in range(10)]
    for spec in specs:
        folder.write_image(spec, Image.new("RGB", (64, 64)))
    assert Image.open(folder.write_grid(specs, columns=2)).size == (130, 130)


@pytest.mark.parametrize("command", ["generate", "bench", "ablate"])
def test_the_demo_is_the_model_of_a_command_that_names_none(command):
    assert parse([command]).model == "demo"


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "car_spec.cli", "info", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 141
