"""One test a reported pitfall (p01 ... p31, numbered as in the project's list), as far as they touch MAR."""

import argparse
import ast
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, golden_keys, golden_state
from safetensors.torch import save_file

from car_spec.cli import main
from car_spec.models.loading import CheckpointError, load_mar, read_checkpoint, resolve
from car_spec.models.mar import MAR
from car_spec.models.vae import KL16_SCALING_FACTOR, decode_latents, encode_images, load_vae
from car_spec.pipeline import NonFiniteImageError, load_pipeline
from car_spec.runs import ImageSpec, RunFolder, generate_images, image_spec

PACKAGE = Path(__file__).parents[1] / "car_spec"


def save(path, content):
    torch.save(content, path)
    return path


# --- A. checkpoints and loading


def test_p01_depth_and_width_of_the_head_are_read_from_shapes(tmp_path, tiny_mar):
    checkpoint = read_checkpoint(save(tmp_path / "a.pth", tiny_mar.state_dict()))
    config = load_mar(checkpoint, num_heads=4).config
    assert (config.head_depth, config.head_width) == (2, 32)
    with pytest.raises(ValueError, match=r"^head_depth 3 was asked for, but .*a\.pth holds head_depth 2$"):
        load_mar(checkpoint, num_heads=4, head_depth=3)


def test_p02_a_namespace_loads_and_code_is_refused_without_running(tmp_path, tiny_mar):
    state = tiny_mar.state_dict()
    content = dict(model=state, model_ema=state, optimizer={"state": {}}, epoch=3, scaler={}, args=argparse.Namespace(a=1))
    assert read_checkpoint(save(tmp_path / "trainer.pth", content)).copy == "model_ema"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    with pytest.raises(CheckpointError, match=r"evil\.pth .* is refused: it holds pickled code \(.*system\), which is never run"):
        read_checkpoint(save(tmp_path / "evil.pth", {"model": state, "args": Evil()}))
    assert not (tmp_path / "ran").exists()


def test_p03_the_average_is_the_default_and_an_empty_one_warns(tmp_path, tiny_mar):
    ones = {k: torch.ones_like(v) for k, v in tiny_mar.state_dict().items()}
    zeros = {k: torch.zeros_like(v) for k, v in ones.items()}
    path = save(tmp_path / "both.pth", {"model": ones, "model_ema": zeros})
    assert load_mar(read_checkpoint(path), num_heads=4).mask_token.eq(0).all()
    assert load_mar(read_checkpoint(path, "model"), num_heads=4).mask_token.eq(1).all()
    path = save(tmp_path / "none.pth", {"model": ones, "model_ema": None})
    with pytest.warns(UserWarning, match="model_ema is empty, so the raw weights"):
        assert read_checkpoint(path).copy == "model"
    with pytest.raises(CheckpointError, match=r"--weights model_ema: .*none\.pth holds model only"):
        read_checkpoint(path, "model_ema")


@pytest.mark.parametrize("label", [10, -1, "10"])
def test_p04_labels_outside_the_table_are_refused_on_the_host(tiny_pipeline, label):
    with pytest.raises(ValueError, match=rf"^label {label} is outside 0\.\.9$"):
        tiny_pipeline(class_labels=[label])


def test_p05_prefixes_are_stripped_and_unrelated_files_refused(tmp_path, tiny_mar):
    state = {f"module._orig_mod.{k}": v for k, v in tiny_mar.state_dict().items()}
    loaded = load_mar(read_checkpoint(save(tmp_path / "a.pth", {"state_dict": state})), num_heads=4)
    assert torch.equal(loaded.mask_token, tiny_mar.mask_token)
    with pytest.raises(CheckpointError, match="0 of its 1 keys matched"):
        load_mar(read_checkpoint(save(tmp_path / "b.pth", {"foo": torch.zeros(1)})), num_heads=4)
    state = tiny_mar.state_dict()
    del state["mask_token"]
    with pytest.raises(CheckpointError, match=r"it lacks 1: mask_token"):
        load_mar(read_checkpoint(save(tmp_path / "c.pth", state)), num_heads=4)
    state = tiny_mar.state_dict() | {"extra.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"it has unknown 1: extra\.weight"):
        load_mar(read_checkpoint(save(tmp_path / "d.pth", state)), num_heads=4)
    state = tiny_mar.state_dict() | {"mask_token": torch.zeros(1, 1, 8)}
    with pytest.raises(CheckpointError, match=r"mask_token has shape \(1, 1, 8\), expected \(1, 1, 32\)"):
        load_mar(read_checkpoint(save(tmp_path / "e.pth", state)), num_heads=4)


def test_p05_other_models_of_the_family_are_named(tmp_path, tiny_mar):
    harmon = {f"mar.{k}": v for k, v in tiny_mar.state_dict().items()} | {"llm.x": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="holds a harmon checkpoint, where a MAR checkpoint is expected"):
        load_mar(read_checkpoint(save(tmp_path / "harmon.pth", harmon)))
    xar = {"pred.weight": torch.zeros(1), "encoder_blocks.0.mlp.fc1_g.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="holds a xar checkpoint"):
        load_mar(read_checkpoint(save(tmp_path / "xar.pth", xar)))


def test_p06_web_pages_and_cut_files_are_told_apart_with_sizes(tmp_path, tiny_mar):
    page = tmp_path / "checkpoint-last.pth"
    page.write_bytes(b"<html><body>" + b"x" * 1000)
    with pytest.raises(CheckpointError, match=r"is not a PyTorch file \(starts with <html: .*\) \(1,012 bytes\)"):
        read_checkpoint(tmp_path)
    whole = save(tmp_path / "whole.pth", {"model": tiny_mar.state_dict()}).read_bytes()
    page.write_bytes(whole[: len(whole) // 2])
    needed = sum(v.numel() * 4 for v in tiny_mar.state_dict().values())
    with pytest.raises(CheckpointError, match=rf"is cut short: {len(whole) // 2:,} bytes where its tensors alone take about {needed:,}"):
        read_checkpoint(page)
    page.write_bytes(whole[:400])
    with pytest.raises(CheckpointError, match=r"is cut short: 400 bytes and not even its table of contents is whole"):
        read_checkpoint(page)


def test_p06_cut_safetensors_give_both_sizes(tmp_path, tiny_mar):
    path = tmp_path / "model.safetensors"
    save_file(tiny_mar.state_dict(), path)
    assert load_mar(read_checkpoint(path), num_heads=4).config.width == 32
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=rf"is cut short: {len(whole) - 100:,} bytes where its header announces {len(whole):,}"):
        read_checkpoint(path)
    path.write_bytes(b"<!DOCTYPE html><html></html>")
    with pytest.raises(CheckpointError, match=r"is not a safetensors file \(starts with <!doctype html"):
        read_checkpoint(path)


def test_p07_scale_is_applied_once_and_the_callers_tensor_is_left_alone():
    seen = []
    stub = SimpleNamespace(
        config=SimpleNamespace(scaling_factor=KL16_SCALING_FACTOR),
        encode=lambda x: SimpleNamespace(latent_dist=SimpleNamespace(mean=x, std=torch.ones_like(x))),
        decode=lambda z: seen.append(z) or SimpleNamespace(sample=z),
    )
    z = torch.randn(2, 16, 4, 4, generator=torch.Generator().manual_seed(0))
    before = z.clone()
    decode_latents(stub, z)
    assert torch.equal(seen[0], z / 0.2325) and torch.equal(z, before)
    x = z / KL16_SCALING_FACTOR
    torch.testing.assert_close(decode_latents(stub, encode_images(stub, x)), x)
    with pytest.warns(UserWarning, match="latents have standard deviation 8"):
        decode_latents(stub, z * 8)


# --- B. devices, dtypes, versions


def test_p08_no_device_literal_in_the_package():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Attribute) and node.attr == "cuda" and not _is_torch_module(node)), path
            is_device = isinstance(node, ast.keyword) and node.arg == "device" and isinstance(node.value, ast.Constant)
            assert not (is_device and node.value.value not in (None, "cpu")), path


def _is_torch_module(node):  # torch.cuda.is_available() asks, it moves nothing
    return isinstance(node.value, ast.Name) and node.value.id == "torch"


def test_p08_unusable_devices_are_one_sentence(capsys):
    assert main(["generate", "--device", "nonsense"]) == 2
    assert "--device nonsense is no device of this torch" in capsys.readouterr().err


def test_p09_importing_the_package_needs_torch_alone():
    heavy = "timm diffusers einops huggingface_hub safetensors numpy PIL yaml tqdm transformers flash_attn torchvision scipy"
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy.split()!r}:
            raise ModuleNotFoundError(name)
import torch
for name in [n for n in sys.modules if n.split(".")[0] in {heavy.split()!r}]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuse())
import car_spec, car_spec.chain, car_spec.sequential, car_spec.adapters.mar, car_spec.schedule, car_spec.gaussian
import car_spec.adapters.xar, car_spec.cells, car_spec.models.xar, car_spec.xar_pipeline
import car_spec.adapters.ddpm, car_spec.diffusion_pipeline
print(car_spec.load_pipeline.__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "load_pipeline\n", done.stderr


def test_p12_a_block_has_the_twelve_names_of_the_release(tiny_mar):
    parts = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    assert set(tiny_mar.encoder_blocks[0].state_dict()) == {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}


def test_p13_a_nan_stops_the_run_names_the_image_and_writes_nothing_of_it(tiny_pipeline, tmp_path):
    folder = RunFolder(tmp_path / "out", {})
    folder.open()
    specs = [image_spec(i, range(10), 0) for i in range(5)]
    generate_images(tiny_pipeline, folder, specs[:2], 2, {})
    tiny_pipeline.model.class_emb.weight[3] = float("nan")
    with pytest.raises(ValueError, match=r"^image 3 is not finite, so nothing of its batch was written; 0 images of this run are kept"):
        generate_images(tiny_pipeline, folder, specs, 2, {})
    assert sorted(p.name for p in folder.path.glob("*.png")) == ["000000.png", "000001.png"]
    with pytest.raises(NonFiniteImageError) as caught:
        tiny_pipeline(class_labels=[1, 3, 3], generator=torch.Generator().manual_seed(0))
    assert caught.value.indices == [1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_p14_a_whole_model_in_half_precision_samples_finite_values(tiny_pipeline, dtype):
    tiny_pipeline.to(dtype=dtype)
    latents = tiny_pipeline(
        class_labels=[0, 1], guidance_scale=2.0, generator=torch.Generator().manual_seed(0), output_type="latent"
    ).images
    assert latents.dtype == torch.float32 and latents.isfinite().all()


def test_p14_half_precision_follows_single_precision(tiny_pipeline):
    run = lambda: (
        tiny_pipeline([0, 1], num_iter=2, sampler="sequential", generator=torch.Generator().manual_seed(0), output_type="latent").images
    )
    single = run()
    tiny_pipeline.to(dtype=torch.bfloat16)
    assert (run() - single).abs().mean() < 0.05  # a few bf16 roundings (4e-3) of values about 1


@pytest.mark.parametrize("steps", [100, 4])
@pytest.mark.parametrize("fraction", [-1.0, 0.0, 1.0])
def test_p16_the_std_interpolates_in_log_space_with_respaced_betas(golden_mar, steps, fraction):
    from car_spec.chain import DiffusionChain, HoistedHead, Prediction
    from car_spec.schedule import cosine_schedule

    base = torch.cumprod(1 - cosine_schedule(1000).betas, 0)  # float64
    schedule = cosine_schedule(steps)
    chain = DiffusionChain(HoistedHead(golden_mar.diffloss.net, schedule), torch.zeros(1, 32))
    for k in range(1, steps):
        signal, before = base[schedule.timestep_map[k]], base[schedule.timestep_map[k - 1]]
        beta = 1 - signal / before
        smallest, largest = (beta * (1 - before) / (1 - signal)).sqrt(), beta.sqrt()
        expected = {-1.0: smallest, 0.0: (smallest * largest).sqrt(), 1.0: largest}[fraction]
        y = torch.zeros(1, 4)
        law = chain.transition(Prediction(y, torch.full_like(y, 0.5 * (fraction + 1))), y, k)
        torch.testing.assert_close(law.log_std.exp().double(), expected.expand(1, 4), rtol=1e-6, atol=1e-7)
    assert chain.transition(Prediction(y, y), y, 0).log_std.exp().eq(0).all()


# --- C. sampling


@pytest.mark.parametrize("num_iter", [1, 2, 15, 16])
def test_p18_every_number_of_iterations_up_to_the_tokens_runs(tiny_pipeline, num_iter):
    counted = []
    tiny_pipeline([0], num_iter=num_iter, num_inference_steps=2, sampler="sequential", callback=lambda i, tokens: counted.append(i))
    assert len(counted) == num_iter


@pytest.mark.parametrize("num_iter", [0, 17])
def test_p18_more_iterations_than_tokens_is_one_sentence(tiny_pipeline, num_iter):
    with pytest.raises(ValueError, match=rf"^num_iter {num_iter} is outside 1\.\.16, the number of tokens"):
        tiny_pipeline([0], num_iter=num_iter)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_p19_shapes_hold_at_every_batch_size(tiny_pipeline, batch, guidance_scale):
    run = lambda kind: tiny_pipeline(list(range(batch)), guidance_scale=guidance_scale, num_inference_steps=3, output_type=kind).images
    assert run("latent").shape == (batch, 4, 4, 4)
    assert run("pt").shape == (batch, 3, 8, 8)
    assert run("np").shape == (batch, 8, 8, 3)
    assert [image.size for image in run("pil")] == [(8, 8)] * batch


@pytest.mark.parametrize("scale, expected", [(1.0, 3), (3.0, 6)])
def test_p20_guidance_of_one_never_doubles_the_batch(tiny_pipeline, scale, expected):
    seen, encoder, mlp = [], tiny_pipeline.model.forward_mae_encoder, tiny_pipeline.model.diffloss.net.res_blocks[0].mlp
    tiny_pipeline.model.forward_mae_encoder = lambda tokens, *rest: seen.append(len(tokens)) or encoder(tokens, *rest)
    hook = mlp.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    tiny_pipeline([0, 1, 2], num_iter=16, num_inference_steps=2, guidance_scale=scale, sampler="sequential")
    hook.remove()
    assert set(seen) == {expected} and len(seen) == 16 * 3


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(num_inference_steps=1), "num_inference_steps 1 is outside 2..1000"),
        (dict(num_inference_steps=1001), "num_inference_steps 1001 is outside 2..1000"),
        (dict(guidance_scale=float("nan")), "guidance_scale nan is not a finite number"),
        (dict(guidance_scale=-1.0), "guidance_scale -1.0 is not a finite number of at least 0"),
        (dict(temperature=-0.1), "temperature -0.1 is not a finite number of at least 0"),
        (dict(guidance_schedule="cosine"), "guidance_schedule 'cosine' is none of linear, constant"),
        (dict(output_type="jpeg"), "output_type 'jpeg' is none of pil, np, pt, latent"),
        (dict(class_labels=[]), "there is nothing to sample: class_labels is empty"),
        (dict(class_labels=None, num_images=0), "num_images 0 is below 1"),
        (dict(num_images=3), "num_images 3 differs from the 1 class_labels given"),
        (dict(generator=[torch.Generator()] * 2), "generator holds 2 generators for 1 images"),
        (dict(class_labels=["heart"]), "class 'heart' is no class name of this model"),
    ],
)
def test_p21_arguments_are_checked_before_any_work(tiny_pipeline, arguments, sentence):
    tiny_pipeline.model.forward_mae_encoder = None  # any work would fail on this
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        tiny_pipeline(**({"class_labels": [0]} | arguments))


def test_p21_two_steps_and_no_label_are_fine(tiny_pipeline):
    assert tiny_pipeline(None, num_inference_steps=2, output_type="latent").images.shape == (1, 4, 4, 4)
    assert tiny_pipeline(None, num_images=2, guidance_scale=3.0, num_inference_steps=2, output_type="latent").images.shape[0] == 2
    assert tiny_pipeline(4, temperature=0.0, num_inference_steps=2, output_type="latent").images.isfinite().all()


def test_p25_an_image_alone_equals_the_image_of_a_batch(tiny_pipeline):
    def generate(ids):
        specs = [image_spec(i, range(10), 0) for i in ids]
        generators = [torch.Generator().manual_seed(spec.seed) for spec in specs]
        labels = [spec.label for spec in specs]
        return tiny_pipeline(labels, generator=generators, guidance_scale=2.0, output_type="latent").images

    torch.testing.assert_close(generate([7])[0], generate(range(8))[7], atol=1e-5, rtol=0)


def test_p25_calls_agree_and_global_random_states_are_untouched(tiny_pipeline):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    images = [tiny_pipeline([0, 1], generator=torch.Generator().manual_seed(5), output_type="latent").images for _ in range(2)]
    assert torch.equal(*images)
    assert not torch.equal(*(tiny_pipeline([0], output_type="latent").images for _ in range(2)))  # seeds itself, differently
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()


def test_p26_a_size_the_model_cannot_make_is_one_sentence(tiny_folder, capsys):
    with pytest.raises(ValueError, match=r"^--image-size 512: checkpoint-last makes 8 only$"):
        load_pipeline(tiny_folder, num_heads=4, image_size=512)
    assert main(["generate", "--model", str(tiny_folder), "--num-heads", "4", "--image-size", "512"]) == 2
    assert "--image-size 512" in capsys.readouterr().err


# --- D. long runs


def generate(folder, out, *flags):
    arguments = ["--num-iter", "3", "--num-inference-steps", "4", "--batch-size", "4", "--seed", "1"]
    return main(["generate", "--model", str(folder), "--out", str(out), *arguments, *flags])


def test_p31_a_killed_run_resumes_to_the_same_bytes(tiny_file, tmp_path, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert generate(tiny_file, whole, "--num-images", "10") == 0
    written = []

    def die_after_three(self, spec, image, real=RunFolder.write_image):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(spec.id)
        real(self, spec, image)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_image", die_after_three)
        assert generate(tiny_file, killed, "--num-images", "10") == 130
    assert len(list(killed.glob("0*.png"))) == 3
    assert generate(tiny_file, killed, "--num-images", "10") == 0
    for name in [f"{i:06d}.png" for i in range(10)] + ["grid.png"]:
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (whole, killed)]
    assert all(len(manifest.pop("runs")) == 1 for manifest in manifests)  # only what ended is reported
    assert manifests[0] == manifests[1]
    assert not list(killed.glob(".*tmp"))


def test_p31_labels_go_round_the_classes():
    labels = [image_spec(i, [4, 5, 6, 7], 0).label for i in range(10)]
    assert [labels.count(c) for c in (4, 5, 6, 7)] == [3, 3, 2, 2]
    assert image_spec(7, [4, 5], 3) == ImageSpec(7, 5, image_spec(7, [4, 5], 3).seed)
    assert len({image_spec(i, [0], s).seed for i in range(100) for s in range(3)}) == 300


def test_p31_a_folder_with_another_manifest_is_refused(tiny_file, tmp_path, capsys):
    assert generate(tiny_file, tmp_path / "out", "--num-images", "2") == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert generate(tiny_file, tmp_path / "out", "--num-images", "2", "--guidance-scale", "3") == 2
    assert "was made with guidance_scale 1.0, this run has 3.0; give another folder" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "cat.png").write_bytes(b"")
    assert generate(tiny_file, tmp_path / "foreign", "--num-images", "2") == 2
    assert "holds PNG files but no manifest.json" in capsys.readouterr().err


def test_p31_the_manifest_names_everything_that_can_change_a_pixel(tiny_file, tmp_path):
    assert generate(tiny_file, tmp_path / "out", "--num-images", "3", "--classes", "2", "5", "--sampler", "sequential") == 0
    assert generate(tiny_file, tmp_path / "lossless", "--num-images", "1", "--sampler", "lossless") == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    settings = {"sampler", "model", "model_sha256", "weights", "vae_sha256", "classes", "seed", "dtype", "num_iter"}
    lossless = json.loads((tmp_path / "lossless" / "manifest.json").read_text())["settings"]
    assert set(lossless) - set(manifest["settings"]) == {"lookahead", "window", "final_tolerance", "token_wise", "drafter"}
    assert settings | {"num_inference_steps", "guidance_scale", "guidance_schedule", "temperature"} == set(manifest["settings"])
    assert manifest["settings"]["weights"] == "flat" and manifest["settings"]["sampler"] == "sequential"
    assert [image["label"] for image in manifest["images"]] == [2, 5, 2]
    assert len({image["seed"] for image in manifest["images"]}) == 3
    assert {"car_spec", "torch", "device", "batch_size"} <= set(manifest["environment"])


# --- hub ids


def hub_cache(root, repository, files):
    """A local cache as huggingface_hub lays it out."""
    base = root / f"models--{repository.replace('/', '--')}"
    snapshot = base / "snapshots" / ("0" * 40)
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text("0" * 40)
    for name, content in files.items():
        path = snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_hub_ids_load_from_the_local_cache(tmp_path, tiny_folder, monkeypatch):
    import huggingface_hub.constants as constants

    files = {str(p.relative_to(tiny_folder)): p.read_bytes() for p in tiny_folder.rglob("*") if p.is_file()}
    hub_cache(tmp_path / "hub", "someone/tiny-mar", files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("someone/tiny-mar/checkpoint-last.pth").name == "checkpoint-last.pth"
    assert load_pipeline("someone/tiny-mar", num_heads=4).image_size == 8
    with pytest.raises(
        CheckpointError, match=r"^--model someone/absent: .* not in the hub's local cache, and the hub could not be reached"
    ):
        load_pipeline("someone/absent")


def test_what_is_neither_a_path_nor_a_hub_id_is_one_sentence():
    with pytest.raises(CheckpointError, match=r"^--model nowhere\.pth: there is no such file or folder, and it is not a hub id"):
        load_pipeline("nowhere.pth")


# --- folders and autoencoders


def test_a_folder_with_several_checkpoints_asks_which(tmp_path, tiny_mar):
    for name in ("a.pth", "b.pth"):
        save(tmp_path / name, tiny_mar.state_dict())
    with pytest.raises(CheckpointError, match=r"holds 2 checkpoints, name one of them: a\.pth, b\.pth"):
        read_checkpoint(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty holds no checkpoint"):
        read_checkpoint(tmp_path / "empty")


def test_a_width_without_preset_asks_for_the_heads(tiny_folder):
    with pytest.raises(
        CheckpointError, match=r"width 32, which is no preset's, and files do not store the number of heads: give --num-heads"
    ):
        load_pipeline(tiny_folder)


def test_a_released_size_takes_its_settings_from_the_presets(tmp_path):
    from car_spec.models.loading import Checkpoint, infer_mar_config
    from car_spec.models.presets import PRESETS

    for name, heads, scale in (("mar_base", 12, 2.9), ("mar_large", 16, 3.0), ("mar_huge", 16, 3.2)):
        keys = {key: torch.empty(shape, device="meta") for key, shape in golden_keys(name).items()}
        config = infer_mar_config(Checkpoint(tmp_path / "renamed.pth", "model_ema", keys))
        preset = PRESETS["mar", config.width]
        assert (preset.name, config.num_heads, preset.guidance_scale, preset.num_iter) == (name, heads, scale, 256)


def test_the_released_autoencoder_format_loads_and_others_are_refused(tmp_path, tiny_mar):
    vae = load_vae(save(tmp_path / "kl16.ckpt", {"model": golden_state("kl16_tiny")}))
    assert vae.config.scaling_factor == 0.2325 and vae.config.latent_channels == 4
    with pytest.raises(CheckpointError, match=r"--vae .* holds a mar checkpoint"):
        load_vae(save(tmp_path / "mar.pth", tiny_mar.state_dict()))
    with pytest.raises(CheckpointError, match="0 of 1 keys matched"):
        load_vae(save(tmp_path / "other.pth", {"x": torch.zeros(1)}))


def test_an_autoencoder_that_does_not_fit_or_is_missing_is_one_sentence(tmp_path, tiny_folder, tiny_mar):
    golden = save(tmp_path / "kl16.ckpt", {"model": golden_state("kl16_tiny")})
    wide = MAR(dataclasses.replace(TINY, token_dim=6))
    with pytest.raises(ValueError, match=r"^--vae has 4 latent channels, which do not fit the 6 numbers a token of --model$"):
        load_pipeline(save(tmp_path / "wide.pth", wide.state_dict()), vae=golden, num_heads=4)
    lonely = tmp_path / "a" / "b" / "c" / "d"
    lonely.mkdir(parents=True)
    save(lonely / "mar.pth", tiny_mar.state_dict())
    with pytest.raises(ValueError, match=r"^--vae is missing: neither vae nor kl16\.ckpt lies beside"):
        load_pipeline(lonely / "mar.pth", num_heads=4)


def test_zip_files_that_are_no_checkpoints_are_refused(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("hello.txt", "hello")
    (tmp_path / "a.pth").write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match=r"a\.pth .* is refused: it cannot be read"):
        read_checkpoint(tmp_path / "a.pth")
