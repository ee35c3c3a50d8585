"""The worked example of docs/diffusion.md runs as it is printed, and samples the law of its policy."""

import re
from pathlib import Path

import torch
from two_sample import shared_noise

from car_spec.adapters.ddpm import DenoisingChain, reverse_schedule
from car_spec.diffusion_pipeline import DiffusionSettings, sample_sequentially, sample_speculatively
from car_spec.eval.distances import energy_test


def test_actions_of_the_documented_policy_follow_its_law_in_fewer_calls(capsys):
    page = (Path(__file__).parents[1] / "docs" / "diffusion.md").read_text()
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    assert names["actions"].shape == (16, 7) and names["trace"].calls < 60
    assert f"{names['trace'].calls} calls of the policy instead of 100" in capsys.readouterr().out
    reach = names["actions"][-1] - names["actions"][0]
    assert (reach - 0.5).abs().max() < 0.2  # the policy has learned something

    count, goal, policy = 200, torch.full((7,), 0.5), names["policy"]
    denoiser = lambda x, timesteps, rows: policy(x, timesteps, goal.expand(len(x), -1))
    chain = DenoisingChain(denoiser, reverse_schedule(names["scheduler"]), (7, 16), count)
    with torch.no_grad():
        expected = sample_sequentially(chain, shared_noise(count, 1))
        samples = sample_speculatively(chain, shared_noise(count, 2), DiffusionSettings(window=12))
    assert energy_test(samples, expected) > 0.01
    assert energy_test(samples + 0.05, expected) < 0.01  # what the test would notice
