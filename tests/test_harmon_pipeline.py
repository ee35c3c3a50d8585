"""Harmon as a user meets it: pipeline, prompts from files, command line, CSpD and the shipped demo."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import HARMON_LLM, golden_state
from PIL import Image

import car_spec
from car_spec import bench, load_pipeline
from car_spec.cli import main, parse
from car_spec.cspd import CSpDSampler, CSpDSettings, NoiseTable
from car_spec.harmon_pipeline import HarmonPipeline
from car_spec.models.harmon import TEMPLATE, tokenize
from car_spec.models.loading import CheckpointError
from car_spec.models.presets import PRESETS
from car_spec.noise import Noise
from car_spec.prompts import read_prompt_file
from car_spec.runs import sha256_of
from car_spec.sequential import sample_sequential
from car_spec.trace import Trace

TEXTS = ["a red cat", "a dog that has a much longer prompt", "a red cat"]


@pytest.fixture(scope="module")
def pipe(harmon_folder) -> HarmonPipeline:
    pipeline = load_pipeline(harmon_folder)
    assert isinstance(pipeline, HarmonPipeline)
    return pipeline


def seeds(count, first=0):
    return [torch.Generator().manual_seed(first + i) for i in range(count)]


# --- pipeline


def test_prompts_become_images_by_place_or_by_name(pipe):
    by_place = pipe("a red cat", generator=seeds(1)).images
    by_name = pipe(prompt=["a red cat"], generator=seeds(1)).images
    assert by_place[0].size == (8, 8) and by_place[0].tobytes() == by_name[0].tobytes()
    assert pipe("a red cat", generator=seeds(1)).settings == pipe.settings()  # the lossless sampler with the preset's numbers
    assert pipe.settings()["sampler"] == "lossless" and pipe.settings()["guidance_scale"] == 2.0


def test_the_example_of_the_documentation_runs(harmon_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs" / "harmon.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    assert '"demo-harmon"' in program
    names: dict = {}
    exec(program.replace('"demo-harmon"', repr(str(harmon_folder))), names)
    assert len(names["output"].images) == 4 and Image.open(tmp_path / "heart.png").size == (8, 8)


def test_several_images_a_prompt_lie_in_a_row(pipe):
    both = pipe(["a cat", "a dog"], num_images_per_prompt=2, generator=seeds(4), output_type="latent", sampler="sequential").images
    listed = pipe(["a cat", "a cat", "a dog", "a dog"], generator=seeds(4), output_type="latent", sampler="sequential").images
    assert torch.equal(both, listed) and (both[0] - both[1]).abs().max() > 0.1


def test_the_prompt_changes_the_image(pipe):
    one, other = (pipe(text, generator=seeds(1), output_type="latent", sampler="sequential").images for text in ("a cat", "blue"))
    assert (one - other).abs().max() > 0.01


def test_images_of_a_batch_have_prompts_and_accepted_lengths_of_their_own(pipe):
    output = pipe(TEXTS, generator=seeds(3), num_iter=16, lookahead=8, window=4, output_type="latent")
    assert [sum(rows) for rows in output.trace.accepted_rows] == [16, 16, 16]
    assert len({tuple(rows) for rows in output.trace.accepted_rows}) == 3
    assert output.images.isfinite().all()


@pytest.mark.parametrize("sampler", ["lossless", "sequential"])
def test_p26_height_and_width_are_made_of_tokens(pipe, sampler):
    assert pipe("a cat", height=4, width=12, sampler=sampler).images[0].size == (12, 4)
    assert pipe("a cat", width=12, sampler=sampler, output_type="latent").images.shape == (1, 4, 4, 6)
    assert pipe("a cat", sampler=sampler).images[0].size == (8, 8)  # other sizes leave the pipeline as it was
    with pytest.raises(ValueError, match=r"^image_size 8x7 is not made of whole tokens of 2 pixels a side$"):
        pipe("a cat", width=7)
    with pytest.raises(ValueError, match=r"^num_iter 17 is outside 1\.\.16"):
        pipe("a cat", num_iter=17)
    assert len(pipe("a cat", width=12, num_iter=17, sampler=sampler).images) == 1


def test_an_image_size_of_the_pipeline_is_kept(harmon_folder):
    pipeline = load_pipeline(harmon_folder, image_size=12, draft=harmon_folder)
    assert (pipeline.image_size, pipeline.grid, pipeline.num_tokens) == (12, (6, 6), 36)
    assert pipeline.draft.grid == (6, 6)
    output = pipeline("a cat", sampler="cspd", num_inference_steps=3)
    assert output.images[0].size == (12, 12)
    assert pipeline("a cat", width=8, sampler="cspd", num_inference_steps=3).images[0].size == (8, 12)


def test_the_released_sizes_are_sampled_at_512_pixels():
    assert {PRESETS["harmon", width].image_size for width in (768, 1280)} == {512}
    assert {preset.image_size for (kind, _), preset in PRESETS.items() if kind != "harmon"} == {None}


@pytest.mark.parametrize(
    "prompt, sentence",
    [
        ("", "prompt 0 is empty"),
        (["a cat", "  "], "prompt 1 is empty"),
        ([], "there is nothing to sample: prompts is empty"),
        (7, "prompt 0 is of type int, not text"),
        ("a" * 500, "prompt 0 has 538 tokens, its template included, but the context of 512 leaves 492 beside an image of 16"),
    ],
)
def test_prompts_that_cannot_be_are_one_sentence(pipe, monkeypatch, prompt, sentence):
    monkeypatch.setattr(type(pipe.model.llm.model), "forward", None)
    for call in (pipe, pipe.check_prompts):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            call(prompt)


def test_arguments_that_do_not_exist_and_numbers_out_of_range_are_refused(pipe):
    with pytest.raises(TypeError, match=r"^HarmonPipeline has no argument 'negative_prompt'; its settings are num_iter"):
        pipe("a cat", negative_prompt="a dog")
    with pytest.raises(ValueError, match=r"^num_images_per_prompt 0 is below 1$"):
        pipe("a cat", num_images_per_prompt=0)
    with pytest.raises(ValueError, match=r"^output_type 'jpeg' is none of"):
        pipe("a cat", output_type="jpeg")


def test_lookahead_auto_measures_prompts(pipe):
    output = pipe("a cat", lookahead="auto", num_iter=8)
    assert output.settings["sampler"] in ("lossless", "sequential") and output.settings.get("lookahead") != "auto"
    assert len(output.images) == 1 and len(pipe.tuned) == 1


# --- files


def test_a_flat_file_takes_tokenizer_and_autoencoder_from_where_they_are_said_to_be(tmp_path, harmon_folder, pipe):
    torch.save(golden_state("harmon_tiny"), tmp_path / "tiny.pth")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 32} | HARMON_LLM))
    given = dict(num_heads=4, vae=harmon_folder / "vae")
    with pytest.raises(CheckpointError, match=r"^--tokenizer .*tokenizer\.json"):
        load_pipeline(tmp_path / "tiny.pth", **given)
    loaded = load_pipeline(tmp_path / "tiny.pth", **given, tokenizer=harmon_folder)
    assert loaded.preset.num_iter == 16 and loaded.tokenizer.to_str() == pipe.tokenizer.to_str()
    shutil.copy(harmon_folder / "tokenizer.json", tmp_path)
    assert load_pipeline(tmp_path / "tiny.pth", **given).source.tokenizer == tmp_path / "tokenizer.json"


def test_a_tuned_file_brings_its_base_along(tmp_path, harmon_folder, capsys):
    torch.save({"mar.mask_token": torch.full((1, 1, 24), 0.5)}, tmp_path / "tuned.pth")
    pipeline = load_pipeline(tmp_path / "tuned.pth", base=harmon_folder, vae=harmon_folder / "vae", num_heads=4)
    assert pipeline.model.mar.mask_token.eq(0.5).all() and pipeline.source.base == harmon_folder / "model.safetensors"
    flags = ["--model", tmp_path / "tuned.pth", "--base", harmon_folder, "--vae", harmon_folder / "vae", "--num-heads", 4]
    small = ["--num-iter", 2, "--num-inference-steps", 3, "--prompt", "a cat", "--out", tmp_path / "out"]
    assert main([str(flag) for flag in ["generate", *flags, *small]]) == 0
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]
    assert settings["base_sha256"] == sha256_of(harmon_folder / "model.safetensors")


def test_the_autoencoder_inside_a_file_cut_into_parts_is_taken(tmp_path, harmon_folder):
    vae = {f"vae.{name}": value for name, value in golden_state("kl16_tiny").items()}
    state = golden_state("harmon_tiny") | vae
    parts = {"pytorch_model-1.bin": {}, "pytorch_model-2.bin": {}}
    for i, (name, value) in enumerate(state.items()):
        list(parts.values())[i % 2][name] = value
    for name, part in parts.items():
        torch.save(part, tmp_path / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(harmon_folder / name, tmp_path)
    pipeline = load_pipeline(tmp_path, num_heads=4)
    assert pipeline.source.vae == tmp_path / "pytorch_model.bin.index.json" and pipeline.vae.config.latent_channels == 4
    before = sha256_of(pipeline.source.model)
    torch.save(parts["pytorch_model-1.bin"] | {"mar.mask_token": torch.zeros(1, 1, 24)}, tmp_path / "pytorch_model-1.bin")
    assert sha256_of(pipeline.source.model) != before  # of the weights, not of their index alone


def test_harmon_and_mar_do_not_draft_for_each_other(harmon_folder, tiny_file):
    with pytest.raises(ValueError, match=r"^--draft tiny has MAR as kind of network, --model tiny-harmon has Harmon$"):
        load_pipeline(harmon_folder, draft=tiny_file)
    with pytest.raises(ValueError, match=r"^--tokenizer .* is for Harmon, but .*tiny\.safetensors holds a network of mar$"):
        load_pipeline(tiny_file, tokenizer=harmon_folder)


# --- prompts from files


@pytest.mark.parametrize(
    "name, content",
    [
        ("lines.txt", "a cat\n\n  a dog \n"),
        ("list.json", '["a cat", "a dog"]'),
        ("entries.json", '[{"prompt": "a cat"}, {"id": 3, "prompt": "a dog"}]'),
        ("named.json", '{"first": "a cat", "second": {"prompt": "a dog", "category": "animals"}}'),
        ("lines.jsonl", '{"prompt": "a cat", "tag": "single_object"}\n"a dog"\n'),
        (
            "coco.json",
            '{"images": [], "annotations": [{"image_id": 9, "caption": "a cat"}, {"image_id": 9, "caption": "a dog\\n"}]}',
        ),
    ],
)
def test_prompts_are_read_in_their_order(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    prompts = read_prompt_file(tmp_path / name)
    assert (list(prompts.values()) if name == "named.json" else prompts) == ["a cat", "a dog"]


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("absent.txt", None, "there is no such file"),
        ("blank.txt", " \n\n", "holds no prompt"),
        ("empty.json", "[]", "holds no prompt"),
        ("broken.json", "[", "is no list of prompts: Expecting value"),
        ("number.json", "7", "is no list of prompts: it holds a int"),
        ("numbers.json", '["a cat", 7]', "is no list of prompts: 7 is no text"),
        ("other.json", '{"annotations": [{"image_id": 9}]}', "has neither prompt nor caption"),
        ("binary.txt", b"\xff\xfe\x00", "is no list of prompts: 'utf-8' codec"),
    ],
)
def test_a_file_without_prompts_is_one_sentence(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"^--prompts .*{name}: there is no such file$|^--prompts .*{name} .*{sentence}"):
        read_prompt_file(tmp_path / name)


# --- command line


def generate(folder, out, *flags):
    small = ["--num-iter", 2, "--num-inference-steps", 3]
    return main([str(flag) for flag in ["generate", "--model", folder, "--out", out, *small, *flags]])


def manifest(out):
    return json.loads((out / "manifest.json").read_text())


def test_the_manifest_holds_the_prompt_of_every_image(harmon_folder, tmp_path, capsys):
    flags = ["--prompt", "a cat", "--prompt", "a dog, red", "--num-images", 5]
    assert generate(harmon_folder, tmp_path / "out", *flags) == 0
    assert capsys.readouterr().out.startswith("5 images made")
    held = manifest(tmp_path / "out")
    prompts = [image["prompt"] for image in held["images"]]
    assert prompts == ["a cat", "a dog, red", "a cat", "a dog, red", "a cat"]
    assert held["settings"]["prompts"] == ["a cat", "a dog, red"] and held["settings"]["image_size"] == 8
    assert not {"label", "class"} & set(held["images"][0]) and "classes" not in held["settings"]
    assert Image.open(tmp_path / "out" / "grid.png").size == (2 * 66 - 2, 3 * 66 - 2)


def test_a_run_goes_on_with_its_prompts_only(harmon_folder, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na bird\n")
    asked = ["--prompts", tmp_path / "prompts.txt"]
    assert generate(harmon_folder, tmp_path / "out", *asked, "--image-ids", 1) == 0
    assert [path.name for path in (tmp_path / "out").glob("0*.png")] == ["000001.png"]
    assert generate(harmon_folder, tmp_path / "out", *asked) == 0
    assert "2 images made, 1 were there already" in capsys.readouterr().out
    assert [image["prompt"] for image in manifest(tmp_path / "out")["images"]] == ["a cat", "a dog", "a bird"]
    assert generate(harmon_folder, tmp_path / "out", "--prompt", "a cat") == 2
    assert "was made with prompts" in capsys.readouterr().err


def test_the_image_size_is_the_runs(harmon_folder, tmp_path):
    assert generate(harmon_folder, tmp_path / "out", "--prompt", "a cat", "--image-size", 12) == 0
    assert Image.open(tmp_path / "out" / "000000.png").size == (12, 12) and manifest(tmp_path / "out")["settings"]["image_size"] == 12


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--classes", "3"], "--classes 3: --model tiny-harmon has no classes, give --prompt or --prompts"),
        ([], "--model tiny-harmon needs --prompt TEXT or --prompts FILE"),
        (["--prompt", ""], "prompt 0 is empty"),
        (["--prompt", "a cat", "--prompts", "x.txt"], "--prompt and --prompts x.txt are both given, but images follow one list"),
        (["--prompts", "absent.txt"], "--prompts absent.txt: there is no such file"),
        (["--prompt", "a cat", "--image-size", "7"], "image_size 7x7 is not made of whole tokens of 2 pixels a side"),
        (["--prompt", "a cat", "--drafter", "frozen"], "drafter 'frozen' is none of self, model"),
    ],
)
def test_bad_flags_are_one_sentence_and_leave_no_folder(harmon_folder, tmp_path, capsys, flags, sentence):
    assert generate(harmon_folder, tmp_path / "out", *flags) == 2
    assert capsys.readouterr().err == f"car-spec: error: {sentence}\n"
    assert not (tmp_path / "out").exists()


def test_prompts_for_a_model_of_classes_are_refused(tiny_file, tmp_path, capsys):
    assert generate(tiny_file, tmp_path / "out", "--prompt", "a cat") == 2
    assert capsys.readouterr().err == "car-spec: error: --prompt is for Harmon, --model tiny takes --classes\n"


def test_prompts_of_a_flag_replace_those_of_a_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text('prompt: ["a cat", "--a dog"]\nnum_images: 2\n')
    of = lambda *flags: parse(["generate", "--config", str(tmp_path / "mine.yaml"), *flags])
    assert of().prompt == ["a cat", "--a dog"]
    assert of("--prompt", "a bird").prompt == ["a bird"]
    assert of("--prompts", "file.txt").prompt is None


def test_bench_compares_samplers_on_prompts(pipe, harmon_folder, tmp_path, capsys):
    flags = ["--num-iter", 4, "--num-inference-steps", 4, "--repeats", 1, "--only", "block", "CSpD", "--draft", harmon_folder]
    assert main([str(f) for f in ["bench", "--model", harmon_folder, "--out", tmp_path, *flags]]) == 0
    runs = json.loads((tmp_path / "bench.json").read_text())["runs"]
    names = [run["name"] for run in runs]
    assert names == ["sequential", "lossless, block", "CSpD (approximate), paper", "CSpD (approximate), official"]
    assert pipe.examples(7, 2) == ["france flag", "red heart"]
    assert bench.contenders(pipe, {"num_iter": 4}, {}, 1)[0].settings["sampler"] == "sequential"


# --- CSpD


def cspd(pipe, draft, num_iter, **settings):
    """-> the sampler on three prompts, and what sequential sampling of the target makes of the same noise."""
    pipe = copy.copy(pipe)
    pipe.draft = draft
    complete = pipe.settings(sampler="cspd", num_iter=num_iter, **settings)
    texts, generators = pipe._read(TEXTS), seeds(3)
    adapter, steps = pipe._problem(generators, complete, texts)
    vectors, trace = pipe._vectors(texts, 3), Trace(3)
    noise = Noise(generators, torch.arange(3))
    table = NoiseTable.draw(noise, 16, adapter.head.num_steps, adapter.token_dim)
    own = CSpDSettings(**settings)
    sampler = CSpDSampler(adapter, steps, *vectors, noise, table, table, own, trace, pipe._draft_model(texts, 3, complete))
    return sampler, sample_sequential(adapter, steps, *vectors, table.of_positions), trace


def test_identical_harmons_accept_everything(pipe):
    sampler, sequential, trace = cspd(pipe, pipe, num_iter=16, draft_length=4, prefill=0.0)
    # the target reads several prefixes in one call, so roundings differ, as in the recorded runs with few steps
    torch.testing.assert_close(sampler.sample(), sequential, atol=2e-2, rtol=0)
    assert trace.rounds.tolist() == [4] * 3 and all(kept == seen for kept, seen in trace.accepted_by_lag.values())


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_prefilling_everything_is_the_sequential_target(pipe, variant):
    other = copy.copy(pipe)
    other.model = copy.deepcopy(pipe.model)
    other.model.mar.diffloss.net.final_layer.linear.bias.data[:4] += 3.0
    sampler, sequential, trace = cspd(pipe, other, num_iter=4, prefill=1.0, variant=variant)
    assert torch.equal(sampler.sample(), sequential) and trace.draft_calls == 0


def test_the_draft_reads_prompts_with_its_own_tokenizer(pipe, harmon_folder):
    other = load_pipeline(harmon_folder)
    asked = []
    encode = other.tokenizer.encode

    class Recording:
        def encode(self, text):
            asked.append(text)
            return encode(text)

    other.tokenizer = Recording()
    drafted = copy.copy(pipe)
    drafted.set_draft(other)
    assert len(drafted(TEXTS, sampler="cspd", num_inference_steps=3).images) == 3
    assert len(asked) == 3 and "a dog that has" in asked[1]  # two texts and the unconditional one
    assert len(drafted(TEXTS, drafter="model", num_inference_steps=3).images) == 3


# --- the shipped demo

DEMO = Path(car_spec.__file__).parent / "demo"


@pytest.fixture(scope="module")
def demo_harmon() -> HarmonPipeline:
    pipeline = load_pipeline("demo-harmon", draft="demo-harmon-draft")
    assert isinstance(pipeline, HarmonPipeline)
    return pipeline


def test_the_demos_files_are_small_and_their_language_models_tiny(demo_harmon):
    for name in ("harmon", "harmon-draft"):
        files = {path.name: path for path in (DEMO / name).iterdir()}
        assert set(files) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        assert '"/' not in files["config.json"].read_text() + files["tokenizer_config.json"].read_text()  # an absolute path
    assert sum(path.stat().st_size for folder in DEMO.glob("harmon*") if folder.is_dir() for path in folder.iterdir()) < 20e6
    count = lambda pipeline: sum(parameter.numel() for parameter in pipeline.model.parameters())
    assert count(demo_harmon.draft) < count(demo_harmon) / 5 < 1.5e6
    assert demo_harmon.image_size == 32 and demo_harmon.clip_sample_range == 4.0
    assert demo_harmon.preset.num_iter == 64 and demo_harmon.preset.guidance_scale == 3.0


def test_transformers_reads_the_demos_tokenizer_alike(demo_harmon):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(DEMO / "harmon")
    text = TEMPLATE.format(request="Generate an image: grinning cat, google")
    (ours,) = tokenize(demo_harmon.tokenizer, ["Generate an image: grinning cat, google"])
    assert theirs(text).input_ids == ours and theirs.decode(ours) == text
    assert len(ours) < 20  # words of captions are tokens; letters alone would make 60
    assert theirs.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [ours[0], ours[-5]]


def test_any_text_has_tokens(demo_harmon):
    for text in ("naïve ☃ 心", "\x00", "A" * 100):
        (ids,) = tokenize(demo_harmon.tokenizer, [text])
        assert demo_harmon.tokenizer.decode(ids, skip_special_tokens=False) == TEMPLATE.format(request=text)


def test_the_lossless_sampler_makes_the_demos_images_in_an_eighth_of_the_calls(demo_harmon):
    output = demo_harmon("red heart", generator=seeds(1), output_type="pt")
    assert output.settings["num_iter"] == 64 and output.settings["guidance_scale"] == 3.0
    assert output.images.isfinite().all()
    assert output.trace.sequential_calls < 64 * 101 / 8
    assert output.trace.fallbacks == output.trace.chain.fallbacks == 0 and output.trace.largest_gap <= 1e-3


def test_cspd_runs_on_the_demo(demo_harmon):
    output = demo_harmon(["red heart", "banana"], sampler="cspd", num_iter=6, num_inference_steps=10, generator=seeds(2), output_type="pt")
    assert output.images.isfinite().all() and output.trace.draft_calls > 0


@pytest.fixture(scope="module")
def emoji(demo_harmon):
    prompts = ["grinning face"] * 6 + ["france flag"] * 6 + ["red heart"] * 6
    settings = dict(num_iter=16, num_inference_steps=50, sampler="sequential", output_type="pt")
    return demo_harmon(prompts, generator=seeds(18), **settings).images.unflatten(0, (3, 6))


def test_prompts_show_in_the_demos_images(emoji):
    faces, flags, hearts = emoji
    assert emoji[:, :, :, [0, 0, -1, -1], [0, -1, 0, -1]].mean() > 0.9  # white corners
    red, green, blue = faces[:, :, 8:24, 8:24].mean((0, 2, 3))
    assert red > green > blue + 0.2  # faces are yellow
    notch, sides = hearts[:, :, 1:5, 15:17].mean(), hearts[:, :, 6:10, [6, 7, 24, 25]].mean()
    assert notch > sides + 0.2  # white between the halves of a heart
    assert flags[:, :, 14:18, 2:30].mean() < 0.85  # a flag fills its width
