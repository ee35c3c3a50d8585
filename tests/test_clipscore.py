"""CLIPScore through transformers, with a tiny CLIP of random weights in its file format; prompts and GenEval's folders."""

import json
import shutil
import string

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from car_spec.cli import main
from car_spec.eval.clip import cosines, load_clip, overlong
from car_spec.eval.folders import image_files, read_manifest
from car_spec.eval.prompts import prompts_of

PROMPTS = ["a red cube", "two dogs", "a dog and a very red cube", "cubes"]
CONTEXT = 30  # text tokens, here letters


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    folder = tmp_path_factory.mktemp("clip")
    letters = list(string.ascii_lowercase)
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer", "model_max_length": CONTEXT}))
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    ends = dict(bos_token_id=len(tokens) - 2, eos_token_id=len(tokens) - 1, pad_token_id=len(tokens) - 1)
    text = sizes | ends | dict(vocab_size=len(tokens), max_position_embeddings=CONTEXT)
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=sizes | dict(image_size=16, patch_size=8), projection_dim=8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path):
    """Four pictures with their prompts in a manifest."""
    folder = tmp_path / "run"
    folder.mkdir()
    rng, images = np.random.default_rng(0), []
    for i, prompt in enumerate(PROMPTS):
        images.append({"id": i, "file": f"{i:06d}.png", "prompt": prompt, "seed": i})
        Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(folder / images[-1]["file"])
    (folder / "manifest.json").write_text(json.dumps({"settings": {}, "environment": {}, "images": images}))
    return folder


def test_the_score_is_a_hundred_times_the_cosine_of_image_and_prompt(clip_folder, run, tmp_path, capsys):
    from transformers import CLIPModel, CLIPProcessor

    flags = ["--metrics", "clipscore", "--clip-model", str(clip_folder), "--subsets", "2"]
    assert main(["evaluate", str(run), *flags, "--out", str(tmp_path / "r.json")]) == 0
    written, out = json.loads((tmp_path / "r.json").read_text()), capsys.readouterr().out
    model, processor = CLIPModel.from_pretrained(clip_folder).eval(), CLIPProcessor.from_pretrained(clip_folder)
    expected = []
    for i, prompt in enumerate(PROMPTS):
        with Image.open(run / f"{i:06d}.png") as image:
            inputs = processor(text=[prompt], images=[image], return_tensors="pt")
        with torch.no_grad():
            expected.append(model(**inputs).logits_per_image.item() / model.logit_scale.exp().item())
    assert np.std(expected) > 0.01  # another pairing would score otherwise
    assert written["results"][0]["scores"] == {"CLIPScore": pytest.approx(100 * np.mean(expected), abs=1e-3)}
    assert written["context"]["CLIP"]["model"] == str(clip_folder) and str(clip_folder) in out
    assert "100 x cosine" in out and "transformers" in written["context"]["versions"]
    assert "extractor" not in written["context"] and "FID" not in out  # CLIPScore alone needs no Inception


def test_clip_cosines_do_not_depend_on_the_batch_size(clip_folder, run):
    clip, files = load_clip(str(clip_folder), torch.device("cpu")), image_files(run, "FOLDER")
    whole, single = (cosines(clip, files, PROMPTS, size) for size in (4, 1))
    torch.testing.assert_close(whole, single, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(whole, cosines(clip, files, PROMPTS[::-1], 4), atol=1e-3)


def test_prompts_beyond_the_context_are_cut_counted_and_warned_about(clip_folder, run, tmp_path, capsys):
    clip, files = load_clip(str(clip_folder), torch.device("cpu")), image_files(run, "FOLDER")
    long = ["a" * 100, *PROMPTS[1:]]
    assert overlong(clip, long) == 1 and overlong(clip, PROMPTS) == 0
    assert torch.equal(cosines(clip, files, long, 4), cosines(clip, files, ["a" * 50, *PROMPTS[1:]], 4))
    manifest = read_manifest(run)
    manifest["images"][0]["prompt"] = long[0]
    (run / "manifest.json").write_text(json.dumps(manifest))
    flags = ["--metrics", "clipscore", "--clip-model", str(clip_folder), "--subsets", "2"]
    assert main(["evaluate", str(run), *flags]) == 0
    out, err = capsys.readouterr()
    assert f"1 of 4 prompts are cut, --clip-model reads {CONTEXT} text tokens" in err and "1 of 4, to 30 tokens" in out


@pytest.mark.parametrize("content, problem", [(None, "cannot be loaded"), ("empty", "holds no config.json"), ("{}", "cannot be loaded")])
def test_a_clip_model_that_is_not_there_is_one_sentence(run, tmp_path, capsys, monkeypatch, content, problem):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("car_spec.eval.clip.open_image", None)  # reading an image would fail on this
    folder = tmp_path / "clip"
    if content is not None:
        folder.mkdir()
        if content != "empty":
            (folder / "config.json").write_text(content)
    assert main(["evaluate", str(run), "--metrics", "clipscore", "--clip-model", str(folder)]) == 2
    err = capsys.readouterr().err
    assert f"--clip-model {folder} {problem}" in err and "Traceback" not in err


def test_a_clip_model_without_all_its_weights_is_refused(clip_folder, tmp_path):
    shutil.copytree(clip_folder, tmp_path / "clip")
    state = load_file(clip_folder / "model.safetensors")
    del state["text_projection.weight"]
    save_file(state, tmp_path / "clip" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of a CLIP model, text_projection.weight first"):
        load_clip(str(tmp_path / "clip"), torch.device("cpu"))


# --- prompts


@pytest.mark.parametrize(
    "name, content",
    [
        ("p.txt", "\n".join(PROMPTS) + "\n"),
        ("p.jsonl", "\n".join(json.dumps({"tag": "counting", "prompt": prompt}) for prompt in PROMPTS)),
        ("p.json", json.dumps(PROMPTS)),
        ("p.json", json.dumps({f"{i:06d}": {"category": "art", "prompt": prompt} for i, prompt in enumerate(PROMPTS)})),
        ("p.json", json.dumps({f"{i:06d}.png": prompt for i, prompt in reversed(list(enumerate(PROMPTS)))})),
    ],
)
def test_prompts_of_a_foreign_folder_come_from_a_file(run, tmp_path, name, content):
    (run / "manifest.json").unlink()
    (tmp_path / name).write_text(content)
    assert prompts_of(run, image_files(run, "FOLDER"), None, tmp_path / name) == PROMPTS


@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "there is no such file"),
        ('["a"]', "has 1 prompts, "),
        ('{"000000": "a"}', "has no prompt for 000001.png of "),
        ("[1]", "is no list of prompts"),
        ("[", "is no list of prompts"),
    ],
)
def test_prompts_that_do_not_fit_are_one_sentence(run, tmp_path, content, sentence):
    (run / "manifest.json").unlink()
    if content is not None:
        (tmp_path / "p.json").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        prompts_of(run, image_files(run, "FOLDER"), None, tmp_path / "p.json")


def test_a_folder_without_prompts_asks_for_them_before_anything_is_loaded(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("car_spec.eval.clip.load_clip", None)
    flags = ["--metrics", "clipscore", "--clip-model", str(tmp_path)]
    manifest = read_manifest(run)
    for image in manifest["images"]:
        del image["prompt"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert main(["evaluate", str(run), *flags]) == 2
    assert f"clipscore needs the prompts of {run}: the manifest lists none; give --prompts FILE" in capsys.readouterr().err
    (run / "manifest.json").unlink()
    assert main(["evaluate", str(run), *flags]) == 2
    assert "it has no manifest.json; give --prompts" in capsys.readouterr().err


def test_prompts_given_twice_are_refused(run, tmp_path):
    with pytest.raises(ValueError, match="already"):
        prompts_of(run, image_files(run, "FOLDER"), read_manifest(run), tmp_path / "p.txt")


# --- GenEval's layout


def metadata_file(path, prompts):
    path.write_text("".join(json.dumps({"tag": "counting", "prompt": prompt}) + "\n" for prompt in prompts))
    return path


def prompted_run(folder, prompts):
    folder.mkdir()
    images = []
    for i, prompt in enumerate(prompts):
        images.append({"id": i, "file": f"{i:06d}.png", "prompt": prompt})
        Image.new("RGB", (4, 4), (i, 0, 0)).save(folder / images[-1]["file"])
    (folder / "manifest.json").write_text(json.dumps({"settings": {}, "environment": {}, "images": images}))
    return folder


def test_geneval_gets_a_numbered_folder_for_every_line_of_its_file(tmp_path, capsys):
    lines = ["a dog", "two cats", "a dog"]  # a prompt that stands twice has twice the images
    folder = prompted_run(tmp_path / "run", lines * 4)
    metadata, out = metadata_file(tmp_path / "metadata.jsonl", lines), tmp_path / "geneval"
    assert main(["export-geneval", str(folder), "--metadata", str(metadata), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"3 prompts, 4 images each: {out}\n"
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        name for i in range(3) for name in (f"{i:05d}/metadata.jsonl", *(f"{i:05d}/samples/{j:04d}.png" for j in range(4)))
    ]
    for i, line in enumerate(metadata.read_text().splitlines()):
        assert (out / f"{i:05d}" / "metadata.jsonl").read_text() == line + "\n"
        reds = [Image.open(out / f"{i:05d}" / "samples" / f"{j:04d}.png").getpixel((0, 0))[0] for j in range(4)]
        assert reds == [i, i + 3, i + 6, i + 9]


@pytest.mark.parametrize(
    "prompts, lines, sentence",
    [
        (["a", "b", "a", "b"], ["a"], "has images of 'b', which --metadata"),
        (["a", "b", "a", "a"], ["a", "b"], "has 1 images of 'b' and 3 of others"),
        (["a", "a", "a", "a"], ["a", "b"], "has 0 images of 'b' and 4 of others"),
        (["a", "", "a", "a"], ["a"], "has no manifest with the prompts of its images"),
        (["a"] * 4, [], "is empty"),
    ],
)
def test_a_run_that_is_not_genevals_is_refused_before_anything_is_written(tmp_path, capsys, prompts, lines, sentence):
    folder, metadata = prompted_run(tmp_path / "run", prompts), metadata_file(tmp_path / "m.jsonl", lines)
    assert main(["export-geneval", str(folder), "--metadata", str(metadata), "-o", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_geneval_folders_are_never_mixed_and_another_number_of_images_is_warned_about(tmp_path, capsys):
    folder, metadata = prompted_run(tmp_path / "run", ["a", "b"] * 2), metadata_file(tmp_path / "m.jsonl", ["a", "b"])
    command = ["export-geneval", str(folder), "--metadata", str(metadata), "-o", str(tmp_path / "out")]
    assert main(command) == 0
    assert "2 images a prompt, published scores use 4" in capsys.readouterr().err
    assert main(command) == 2
    assert "is not empty; give another folder" in capsys.readouterr().err
