"""The code of docs/integrate.md runs, and its worked example samples the law of its model."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_accelerate import AuthorsHarmon, AuthorsMAR, AuthorsXAR
from two_sample import largest_z, shared_noise, smallest_p

from car_spec.engine import LosslessSampler, LosslessSettings
from car_spec.parallel import Ranks, Shares
from car_spec.sequential import sample_sequential
from car_spec.trace import Trace

PAGE = Path(__file__).parents[1] / "docs" / "integrate.md"
IMAGES, STEPS = 800, 6


@pytest.fixture(scope="module")
def page():
    """The names that the page's code leaves, run from top to bottom; the models of its reader are stand-ins."""
    ids = torch.tensor([[5, 17, 99], [11, 90, 6]])
    names = {"torch": torch, "mar": AuthorsMAR(), "xar": AuthorsXAR(), "harmon": AuthorsHarmon()}
    names |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    state = torch.get_rng_state()
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    torch.set_rng_state(state)
    return SimpleNamespace(**names)


def test_the_two_lines_of_each_model_return_what_its_method_does(page):
    assert page.images.shape == (1, 4, 4, 4) and page.latents.shape == (1, 4, 4, 4)
    assert page.mar.sample_tokens(2, 4).shape == (2, 4, 4, 4)
    assert page.xar.sample_tokens(bsz=1, num_steps=5).shape == (1, 16, 16, 16)
    assert page.calls == page.fast.trace.sequential_calls > 8 and page.fast.settings["lookahead"] == 4


def sample(page, sampler, seed):
    adapter, noise = page.FlowAdapter(page.model, STEPS), shared_noise(IMAGES, seed)
    orders = torch.randperm(12, generator=torch.Generator().manual_seed(5)).expand(IMAGES, -1)
    vectors = page.model.class_emb(torch.full((IMAGES,), 2))
    problem = (adapter, adapter.ar_steps(orders), vectors, vectors)
    if sampler == "sequential":
        draw = lambda positions: (noise.normal(positions.shape[1], 3), noise.normal(positions.shape[1], STEPS, 3))
        return sample_sequential(*problem, draw), 12
    trace = Trace(IMAGES)
    tokens = LosslessSampler(*problem, noise, LosslessSettings(lookahead=4, window=3), trace).sample()
    return tokens, trace.rounds.double().mean()


def test_the_worked_example_samples_the_law_of_its_model(page):
    assert page.tokens.shape == page.reference.shape == (2, 12, 3)
    assert page.trace.sequential_calls < 0.5 * (12 + 12 * 20)
    (reference, _), (tokens, rounds) = sample(page, "sequential", 1), sample(page, "lossless", 2)
    assert smallest_p(tokens, reference) > 0.01 and largest_z(tokens, reference) < 5
    assert rounds < 10


def test_processes_can_share_the_worked_example(page):
    trace, generators = Trace(1), [torch.Generator().manual_seed(0)]
    shared = Shares(Ranks(), 2).adapter(page.adapter, trace)
    tokens, mask, vectors = torch.zeros(3, 12, 3), torch.ones(3, 12), page.model.class_emb.weight[:3, None]
    conditions = shared.conditions(tokens, mask, vectors)
    torch.testing.assert_close(conditions, page.adapter.conditions(tokens, mask, vectors))
    y, k = torch.randn(5, 3, generator=generators[0]), torch.tensor([3, 2, 1, 7, 6])
    rows = torch.tensor([0, 0, 0, 1, 1])
    for ours, expected in zip(*(a.chain(conditions[0].transpose(0, 1)[:2])(y, k, rows) for a in (shared, page.adapter))):
        torch.testing.assert_close(ours, expected)
