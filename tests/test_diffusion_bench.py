"""The tables of whole-image diffusion, on a tiny network."""

import json

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

from car_spec.asd import ChainTrace
from car_spec.cli import main
from car_spec.diffusion_bench import DEMO, load
from car_spec.diffusion_pipeline import accelerate_pipeline


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    shape = dict(
        sample_size=4, in_channels=1, out_channels=1, block_out_channels=(4,), layers_per_block=1, norm_num_groups=2, attention_head_dim=2
    )
    network = UNet2DModel(**shape, down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",))
    DDPMPipeline(network, DDPMScheduler()).save_pretrained(tmp_path / "pixel")
    return tmp_path / "pixel"


def test_the_tables_come_from_one_command(folder, tmp_path, capsys):
    out = tmp_path / "bench"
    flags = ["--steps", "8", "--windows", "3", "unlimited", "--repeats", "1", "--images", "16", "--dtype", "bfloat16", "--out", str(out)]
    assert main(["diffusion-bench", "--model", str(folder), *flags]) == 0
    table = (out / "tables.md").read_text()
    assert table in capsys.readouterr().out
    for title in ("the scheduler's chain, 8 steps", "churned SDE, eps 0.25, 8 steps", "churned SDE, eps 1, 8 steps"):
        assert f"**{title}**" in table
    runs = json.loads((out / "the-schedulers-chain-8-steps.json").read_text())["runs"]
    assert [run["name"] for run in runs] == [
        "sequential",
        *("frozen, token, window 3", "frozen, token, window unlimited"),
        *("free, block, window 3", "free, block, window unlimited"),
    ]
    calls = [run["counts"][0]["head calls a batch"] for run in runs]
    assert calls[0] == 8 and min(calls[3:]) < 8
    assert all(run["p_value"] > 0 and run["frechet"] >= 0 for run in runs)
    churned = json.loads((out / "churned-SDE-eps-0.5-8-steps.json").read_text())["runs"]
    assert {run["settings"]["churn"] for run in churned} == {0.5} and len(churned) == 5


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--windows", "0"], "window 0 is below 1"),
        (["--steps", "1"], "--steps 1 is below 2"),
        (["--images", "3"], "--images 3 is too few for a comparison"),
        (["--spread", "-1"], "spread -1.0 is negative"),
    ],
)
def test_bad_flags_are_one_sentence(folder, flags, sentence, capsys):
    assert main(["diffusion-bench", "--model", str(folder), *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_the_shipped_pixel_model_makes_pictures_on_a_white_ground_in_fewer_calls():
    pipe, trace = load(DEMO, torch.device("cpu")), ChainTrace()
    assert 2e6 < sum(parameter.numel() for parameter in pipe.unet.parameters()) < 4e6
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    images = accelerate_pipeline(pipe)(2, generators, num_inference_steps=30, output_type="pt", trace=trace).images
    border = torch.cat([images[..., 0, :], images[..., -1, :]], -1)
    assert border.mean() > 0.85 and images.std() > 0.1
    assert trace.calls < 28
