"""Tiny models with random weights, golden numbers, and the files a user would have."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file, save_file

from car_spec.models.harmon import Harmon, load_harmon
from car_spec.models.loading import METADATA_KEY, Checkpoint
from car_spec.models.mar import MAR, MARConfig
from car_spec.models.presets import Preset
from car_spec.models.xar import XAR, XARConfig
from car_spec.pipeline import MARPipeline, load_pipeline
from car_spec.xar_pipeline import XARPipeline

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

GOLDEN = Path(__file__).parent / "golden"

# 16 tokens of 4 channels, as in golden/mar_tiny.json
TINY = MARConfig(
    num_tokens=16,
    token_dim=4,
    num_classes=10,
    width=32,
    encoder_depth=2,
    decoder_depth=2,
    num_heads=4,
    head_width=32,
    head_depth=2,
    buffer_size=4,
)

# 4 cells of 4 tokens
TINY_XAR = XARConfig(num_tokens=16, token_dim=2, num_classes=5, width=16, encoder_depth=1, decoder_depth=1, num_heads=2, mlp_hidden=24)
TINY_XAR_PIPELINE = replace(TINY_XAR, token_dim=4, num_classes=10)

HARMON_LLM = dict(num_attention_heads=4, max_position_embeddings=512)  # what the tensors of golden/harmon_tiny do not tell


def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def golden_json(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def golden_keys(name: str) -> dict[str, tuple[int, ...]]:
    with gzip.open(GOLDEN / "keys" / f"{name}.json.gz", "rt") as file:
        return {key: tuple(shape) for key, shape in json.load(file)["parameters"].items()}


def golden_state(name: str) -> dict[str, torch.Tensor]:
    prefix = "state/"
    return {key.removeprefix(prefix): value.float() for key, value in golden(name).items() if key.startswith(prefix)}


@pytest.fixture(scope="session")
def mar_golden():
    return golden("mar_tiny")


@pytest.fixture(scope="session")
def mar_runs():
    return golden_json("mar_tiny")["runs"]


@pytest.fixture(scope="session")
def golden_mar() -> MAR:
    """The network of the golden numbers, with their weights."""
    model = MAR(TINY)
    model.load_state_dict(golden_state("mar_tiny"))
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def harmon_golden():
    return golden("harmon_tiny")


@pytest.fixture(scope="session")
def golden_harmon() -> Harmon:
    """The networks of Harmon's golden numbers, with their weights."""
    return load_harmon(Checkpoint(Path("harmon_tiny.pth"), "flat", golden_state("harmon_tiny"), {"llm": HARMON_LLM}), num_heads=4)


CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    """One token a character and one for each of the template's marks; it pads on the left and truncates, as some files do."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    tokenizer.enable_padding(direction="left", length=40)
    tokenizer.enable_truncation(30)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def harmon_folder(tmp_path_factory, tokenizer_file, tiny_vae) -> Path:
    """The golden Harmon in transformers' layout, as the demo ships, with tokenizer and autoencoder inside."""
    folder = tmp_path_factory.mktemp("harmon")
    preset = {"name": "tiny-harmon", "num_heads": 4, "num_iter": 4, "num_inference_steps": 6, "guidance_scale": 2.0}
    metadata = {"num_heads": 4, "clip_sample_range": 3.0, "preset": preset}
    save_file(golden_state("harmon_tiny"), folder / "model.safetensors", {METADATA_KEY: json.dumps(metadata)})
    (folder / "config.json").write_text(json.dumps({"model_type": "harmon", "llm": {"hidden_size": 32} | HARMON_LLM}))
    shutil.copy(tokenizer_file, folder)
    tiny_vae.save_pretrained(folder / "vae")
    return folder


@pytest.fixture
def tiny_mar() -> MAR:
    """A tiny MAR whose every layer acts: random weights, none zero."""
    generator = torch.Generator().manual_seed(0)
    model = MAR(TINY)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_vae():
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=8,
        scaling_factor=0.5,
    )
    return vae.eval().requires_grad_(False)


@pytest.fixture
def tiny_pipeline(tiny_mar, tiny_vae) -> MARPipeline:
    preset = Preset(name="tiny", num_heads=4, num_iter=4, num_inference_steps=6)
    return MARPipeline(tiny_mar, tiny_vae, preset, clip_sample_range=3.0)


@pytest.fixture
def tiny_folder(tmp_path, tiny_mar, tiny_vae) -> Path:
    """A folder as users have it: a trainer's checkpoint with the average, and the autoencoder beside it."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    torch.save({"model": tiny_mar.state_dict(), "model_ema": tiny_mar.state_dict()}, folder / "checkpoint-last.pth")
    tiny_vae.save_pretrained(folder / "vae")
    return folder


@pytest.fixture
def tiny_file(tmp_path, tiny_mar, tiny_vae) -> Path:
    """A file as we ship them: safetensors whose header tells what shapes cannot."""
    metadata = {"num_heads": 4, "clip_sample_range": 3.0, "preset": {"name": "tiny", "num_heads": 4, "num_iter": 4}}
    tiny_vae.save_pretrained(tmp_path / "shipped" / "vae")
    save_file(tiny_mar.state_dict(), tmp_path / "shipped" / "tiny.safetensors", {METADATA_KEY: json.dumps(metadata)})
    return tmp_path / "shipped" / "tiny.safetensors"


def random_xar(config: XARConfig, seed: int, size: float = 0.3) -> XAR:
    """An xAR whose every layer acts."""
    generator, model = torch.Generator().manual_seed(seed), XAR(config)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * size
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_xar() -> XAR:
    return random_xar(TINY_XAR, 0, 0.4)


@pytest.fixture(scope="session")
def tiny_xar_draft() -> XAR:
    return random_xar(replace(TINY_XAR, width=8, mlp_hidden=8), 5, 0.2)


@pytest.fixture
def tiny_xar_pipeline(tiny_vae) -> XARPipeline:
    """With a draft model."""
    preset = Preset(name="tiny-xar", num_heads=2, num_iter=4, num_inference_steps=6, guidance_scale=2.0)
    whole = XARPipeline(random_xar(TINY_XAR_PIPELINE, 0), tiny_vae, preset)
    whole.set_draft(XARPipeline(random_xar(replace(TINY_XAR_PIPELINE, width=8), 1), tiny_vae, preset))
    return whole


@pytest.fixture
def tiny_xar_file(tmp_path, tiny_vae) -> Path:
    """A file as we ship them, the autoencoder beside it."""
    preset = {"name": "tiny-xar", "num_heads": 2, "num_iter": 4, "num_inference_steps": 6}
    tiny_vae.save_pretrained(tmp_path / "shipped" / "vae")
    metadata = {METADATA_KEY: json.dumps({"num_heads": 2, "num_cells": 4, "preset": preset})}
    save_file(random_xar(TINY_XAR_PIPELINE, 0).state_dict(), tmp_path / "shipped" / "xar.safetensors", metadata)
    return tmp_path / "shipped" / "xar.safetensors"


@pytest.fixture(scope="session")
def demo_xar() -> XARPipeline:
    """With its draft model."""
    pipeline = load_pipeline("demo-xar", draft="demo-xar-draft")
    assert isinstance(pipeline, XARPipeline)
    return pipeline


@pytest.fixture(scope="session")
def demo() -> MARPipeline:
    return load_pipeline("demo")
