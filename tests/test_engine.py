"""The lossless engine has the law of the sequential sampler, image by image, and its bookkeeping holds."""

import copy

import pytest
import torch
from two_sample import largest_z, shared_noise, smallest_p

from car_spec.adapters.mar import MARAdapter
from car_spec.engine import DraftModel, LosslessSampler, LosslessSettings
from car_spec.eval.distances import energy_test
from car_spec.noise import Noise
from car_spec.sequential import sample_sequential
from car_spec.trace import Trace

IMAGES, STEPS = 2000, 6


class MildAdapter(MARAdapter):
    """The golden network with its prefix felt less, so that a stale condition is a fair draft, as it is in a trained model."""

    def conditions(self, tokens, mask, vectors):
        z = super().conditions(tokens, mask, vectors)
        typical = super().conditions(torch.zeros_like(tokens), torch.ones_like(mask), vectors)
        return typical + 0.15 * (z - typical)


def problem(model, images, num_iter, guidance_scale, orders=None):
    adapter = MildAdapter(model, num_inference_steps=STEPS, clip_sample_range=3.0)
    orders = torch.randperm(16, generator=torch.Generator().manual_seed(3)).expand(images, -1) if orders is None else orders
    steps = adapter.ar_steps(orders, num_iter, guidance_scale, "linear")
    labels = torch.full((images,), 3)
    return adapter, steps, model.class_vectors(labels, images), model.class_vectors(None, images)


def lossless(model, images, num_iter, guidance_scale, noise, orders=None, sampler=LosslessSampler, draft=None, **settings):
    trace = Trace(images)
    settings = LosslessSettings(**({"lookahead": 4, "window": 3} | settings))
    tokens = sampler(*problem(model, images, num_iter, guidance_scale, orders), noise, settings, trace, draft).sample()
    return tokens, trace


def sequential(model, images, num_iter, guidance_scale, seed):
    noise = shared_noise(images, seed)

    def draw(positions):
        return noise.normal(positions.shape[1], 4), noise.normal(positions.shape[1], STEPS, 4)

    return sample_sequential(*problem(model, images, num_iter, guidance_scale), draw)


CASES = [(5, 1.0), (16, 1.0), (5, 2.5)]


@pytest.fixture(scope="module")
def references(golden_mar):
    return {case: sequential(golden_mar, IMAGES, *case, seed=1) for case in CASES}


@pytest.mark.parametrize("case, token_wise", [((5, 1.0), False), ((16, 1.0), False), ((5, 2.5), False), ((5, 2.5), True)])
def test_images_have_the_sequential_law(golden_mar, references, case, token_wise):
    tokens, trace = lossless(golden_mar, IMAGES, *case, shared_noise(IMAGES, 2), token_wise=token_wise)
    assert smallest_p(tokens, references[case]) > 0.01
    assert largest_z(tokens, references[case]) < 5  # of 4096 moments
    assert energy_test(tokens[:400].flatten(1), references[case][:400].flatten(1)) > 0.01
    assert trace.fallbacks == trace.chain.fallbacks == 0
    assert trace.rounds.double().mean() < 0.95 * case[0]  # it did speculate


def draft_model(model, images, guidance_scale):
    """A relative of the target: the same network, slightly off everywhere."""
    other = copy.deepcopy(model)
    for i, parameter in enumerate(other.parameters()):
        parameter.data += 0.0003 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    adapter, _, vectors, nulls = problem(other, images, 5, guidance_scale)
    return DraftModel(adapter, vectors, nulls)


def test_a_draft_model_leaves_the_law_alone(golden_mar, references):
    case = (5, 2.5)
    tokens, trace = lossless(
        golden_mar, IMAGES, *case, shared_noise(IMAGES, 2), drafter="model", draft=draft_model(golden_mar, IMAGES, 2.5)
    )
    assert smallest_p(tokens, references[case]) > 0.01
    assert largest_z(tokens, references[case]) < 5
    assert trace.draft_calls > 0 and trace.rounds.double().mean() < 0.95 * case[0]


def test_drafter_and_draft_model_go_together(golden_mar):
    with pytest.raises(ValueError, match="drafter 'model' needs a draft model"):
        lossless(golden_mar, 1, 5, 1.0, shared_noise(1, 0), drafter="model")
    with pytest.raises(ValueError, match="drafter 'self' takes no draft model"):
        lossless(golden_mar, 1, 5, 1.0, shared_noise(1, 0), draft=draft_model(golden_mar, 1, 1.0))


class CommitsTooMuch(LosslessSampler):
    """Planted bias: the row where verification stopped is committed as it was drafted."""

    def _commit(self, state, draft, *rest):
        after = super()._commit(state, draft, *rest)
        stopped = (after.start < self.chain_steps - 1) & (after.n < len(self.group) - 1)
        row = after.n.clamp_max(len(self.group) - 1)
        drafted = state.tokens.index_put((draft.a, draft.position), draft.path.states[:, 0])
        place = self.order[after.image, row]
        a = torch.arange(len(after.n))[stopped]
        after.tokens[a, place[stopped]] = drafted[a, place[stopped]]
        after.n[stopped] += 1
        after.start[stopped] = self.chain_steps - 1
        return after


def test_rows_committed_after_tau_are_noticed(golden_mar, references):
    tokens, _ = lossless(golden_mar, IMAGES, 5, 2.5, shared_noise(IMAGES, 2), sampler=CommitsTooMuch)
    assert smallest_p(tokens, references[5, 2.5]) < 1e-4 or largest_z(tokens, references[5, 2.5]) > 7


def generators(seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
def test_an_image_does_not_depend_on_its_batch(golden_mar, guidance_scale):
    orders = torch.stack([torch.randperm(16, generator=g) for g in generators(range(6))])
    # in float64, because a float32 rounding of the first step, amplified 2e4 times, can tip a decision
    model = copy.deepcopy(golden_mar).double()
    run = lambda ids: lossless(model, len(ids), 16, guidance_scale, Noise(generators(ids)), orders[list(ids)])[0]
    together = run(range(6))
    for i in (0, 4):
        torch.testing.assert_close(run([i])[0], together[i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lookahead, window, max_rows", [(1, 1, 4096), (2, 50, 7), (50, 3, 4096)])
@pytest.mark.parametrize("num_iter", [1, 3, 16])
def test_any_settings_finish_every_image_with_finite_tokens(golden_mar, num_iter, lookahead, window, max_rows):
    tokens, trace = lossless(
        golden_mar, 3, num_iter, 2.0, Noise(generators(range(3))), lookahead=lookahead, window=window, max_rows=max_rows
    )
    assert tokens.isfinite().all() and tokens.abs().amax(-1).min() > 0
    assert [sum(rows) for rows in trace.accepted_rows] == [16, 16, 16]
    assert trace.rounds.max() <= num_iter
    if lookahead == 1:
        assert trace.rounds.tolist() == [num_iter] * 3


def test_a_tight_tolerance_takes_the_targets_own_last_value(golden_mar):
    _, loose = lossless(golden_mar, 200, 16, 1.0, shared_noise(200, 1), final_tolerance=1.0)
    tokens, tight = lossless(golden_mar, 200, 16, 1.0, shared_noise(200, 1), final_tolerance=1e-4)
    assert loose.corrections == 0 and tight.corrections > 0
    assert tight.largest_gap <= 1e-4 < loose.largest_gap
    assert tokens.isfinite().all()


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (dict(lookahead=0), "lookahead 0 is below 1"),
        (dict(window=0), "window 0"),
        (dict(taper=2.0), "taper 2.0"),
        (dict(final_tolerance=-1.0), "final_tolerance -1.0"),
    ],
)
def test_bad_settings_are_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        LosslessSettings(**settings)
