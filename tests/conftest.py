"""Tiny models with random weights, golden numbers, and the files a user would have."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file, save_file

from car_spec.models.harmon import Harmon, load_harmon
from car_spec.models.loading import METADATA_KEY, Checkpoint
from car_spec.models.mar import MAR, MARConfig
from car_spec.models.presets import Preset
from car_spec.pipeline import MARPipeline, load_pipeline

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


@pytest.fixture(scope="session")
def demo() -> MARPipeline:
    return load_pipeline("demo")
