"""The chain as an object: any (row, step) pairs in one call, hoisted or not, guided or not; and the AR schedule."""

import math
from itertools import pairwise

import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import car_spec.chain
from car_spec.adapters.mar import MARAdapter, guidance_scale_of_step, patchify, remaining_after_each_step, unpatchify
from car_spec.chain import SPREAD, DiffusionChain, HoistedHead, sample_chain
from car_spec.gaussian import Gaussian
from car_spec.models.diffloss import DiffLoss
from car_spec.models.mar import MAR, truncated_mask_share
from car_spec.schedule import cosine_schedule


@pytest.fixture(params=[True, False], ids=["hoisted", "on the fly"])
def hoisting(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(car_spec.chain, "MAX_HOISTED", 0)
    return request.param


def make_chain(model, guided, spread=SPREAD, **options):
    g = torch.Generator().manual_seed(1)
    head = HoistedHead(model.diffloss.net, cosine_schedule(8), spread)
    condition, unconditional = torch.randn(2, 5, 32, generator=g)
    scale = torch.tensor([1.0, 1.5, 2.0, 3.0, 4.0])
    return DiffusionChain(head, condition, unconditional if guided else None, scale if guided else 1.0, **options)


@pytest.mark.parametrize("guided", [False, True])
def test_any_pairs_of_rows_and_steps_equal_their_own_calls(golden_mar, hoisting, guided):
    chain = make_chain(golden_mar, guided)
    assert (chain.hoisted is not None) == hoisting
    y = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    rows, k = torch.tensor([4, 0, 0, 2, 3, 3, 1]), torch.tensor([6, 0, 3, 3, 1, 0, 5])
    together = chain(y[rows], k, rows)
    for i, (row, step) in enumerate(zip(rows.tolist(), k.tolist())):
        alone = chain(y, step)
        torch.testing.assert_close(together.mean[i], alone.mean[row], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(together.log_std[i], alone.log_std[row], atol=1e-5, rtol=1e-5)
    same_step = chain(y[rows], 3, rows)
    torch.testing.assert_close(same_step.mean, chain(y, 3).mean[rows], atol=1e-5, rtol=1e-5)
    a_step_a_row = chain(y, torch.full((5,), 3))
    torch.testing.assert_close(a_step_a_row.mean, chain(y, 3).mean, atol=1e-5, rtol=1e-5)


def test_hoisted_head_equals_the_plain_network(golden_mar, hoisting):
    chain = make_chain(golden_mar, guided=False, spread=0.0)  # its centre is the clean sample
    condition = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))[0]
    y = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    schedule = chain.head.schedule
    for k in range(8):
        timesteps = schedule.timestep_map[k].expand(5)
        eps, v = golden_mar.diffloss.net(y, timesteps, condition).chunk(2, -1)
        x_0 = schedule.sqrt_recip_alphas_cumprod[k] * y - schedule.sqrt_recipm1_alphas_cumprod[k] * eps
        prediction = chain.predict(y, k)
        torch.testing.assert_close(prediction.centre.double(), x_0.double(), rtol=1e-4, atol=1e-2 if k == 7 else 1e-4)
        torch.testing.assert_close(prediction.fraction, (v + 1) / 2, rtol=1e-4, atol=1e-5)


def test_guidance_leaves_the_variance_to_the_conditional_half(golden_mar):
    guided, plain = make_chain(golden_mar, guided=True), make_chain(golden_mar, guided=False)
    y = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(guided(y, 3).log_std, plain(y, 3).log_std)
    torch.testing.assert_close(guided(y, 3).mean[0], plain(y, 3).mean[0])  # row 0 has scale 1
    assert (guided(y, 3).mean[1:] - plain(y, 3).mean[1:]).abs().amax(1).min() > 1e-3


def test_clipping_bounds_the_clean_sample_and_so_the_first_step(golden_mar):
    y = 2 * torch.ones(5, 4)
    free, clipped = make_chain(golden_mar, False, 0.0), make_chain(golden_mar, False, 0.0, clip_sample_range=1.5)
    assert free.predict(y, 7).centre.abs().max() > 100
    assert clipped.predict(y, 7).centre.abs().max() == 1.5
    torch.testing.assert_close(clipped.predict(y, 7).centre, free.predict(y, 7).centre.clamp(-1.5, 1.5))


def test_the_spread_that_drafts_reckon_with_leaves_transitions_alone(golden_mar):
    y = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    none, some = (make_chain(golden_mar, True, spread, clip_sample_range=1.5) for spread in (0.0, 0.6))
    for k in range(8):
        torch.testing.assert_close(some(y, k).mean, none(y, k).mean, atol=1e-5, rtol=1e-5)
        assert torch.equal(some(y, k).log_std, none(y, k).log_std)
    assert (some.decay[:4] - none.decay[:4]).min() > 0.05  # but a draft follows its state more


def test_the_centre_of_gaussian_samples_is_their_mean():
    """Clean samples N(mean, spread^2) with the exact denoiser: what is re-used is the mean, at every state and step."""
    spread, mean, schedule = 0.4, 0.7, cosine_schedule(8)
    alpha = 1 / schedule.sqrt_recip_alphas_cumprod**2  # (K,)
    columns = HoistedHead(MAR(TINY).diffloss.net, schedule, spread)._columns.double()
    y = torch.linspace(-2, 2, 9, dtype=torch.float64)
    for k in range(8):
        x_0 = mean + spread**2 * alpha[k].sqrt() * (y - alpha[k].sqrt() * mean) / (spread**2 * alpha[k] + 1 - alpha[k])
        torch.testing.assert_close(columns[k, 2] * x_0 - columns[k, 3] * y, torch.full_like(y, mean), atol=1e-3, rtol=0)


def test_temperature_scales_every_std_and_zero_leaves_the_means(golden_mar):
    y, noise = torch.ones(5, 4), torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(3))
    warm, cold = make_chain(golden_mar, False), make_chain(golden_mar, False, temperature=0.5)
    torch.testing.assert_close(cold(y, 4).log_std, warm(y, 4).log_std + math.log(0.5))
    frozen = make_chain(golden_mar, False, temperature=0.0, clip_sample_range=2.0)
    assert torch.equal(sample_chain(frozen, y, noise), sample_chain(frozen, y, -noise))
    with pytest.raises(ValueError, match=r"temperature -1\.0 is negative"):
        make_chain(golden_mar, False, temperature=-1.0)


def test_sequential_samples_of_an_affine_chain_have_its_exact_moments():
    class Affine:
        num_steps, num_rows = 3, 100_000

        def __call__(self, y, k, rows=None):
            log_std = torch.full_like(y, math.log(0.5) if k else -math.inf)
            return Gaussian(0.6 * y + 0.3, log_std)

    g = torch.Generator().manual_seed(0)
    y = sample_chain(Affine(), torch.randn(100_000, 2, generator=g), torch.randn(100_000, 3, 2, generator=g))
    mean, variance = 0.0, 1.0
    for k in (2, 1, 0):
        mean, variance = 0.6 * mean + 0.3, 0.36 * variance + (0.25 if k else 0.0)
    assert (y.mean(0) - mean).abs().max() < 4 * math.sqrt(variance / 100_000)
    assert (y.var(0) / variance - 1).abs().max() < 4 * math.sqrt(2 / 100_000)


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.floats(-3, 1), st.floats(-4, 4))
def test_gaussian_density_equals_torch(mean, log_std, y):
    law = Gaussian(torch.tensor(mean), torch.full((3,), log_std))
    expected = torch.distributions.Normal(law.mean, law.log_std.exp()).log_prob(torch.full((3,), y)).sum()
    torch.testing.assert_close(law.log_prob(torch.full((3,), y)), expected, rtol=1e-4, atol=1e-3)


@given(st.integers(1, 17), st.data())
@settings(deadline=None)
def test_ar_steps_partition_the_tokens_for_every_number_of_iterations(side, data):
    tokens = side * side
    num_iter = data.draw(st.integers(1, tokens))
    counts = [tokens, *remaining_after_each_step(tokens, num_iter)[:-1], 0]
    predicted = [a - b for a, b in pairwise(counts)]
    assert len(predicted) == num_iter and sum(predicted) == tokens and min(predicted) >= 1
    with pytest.raises(ValueError, match=rf"num_iter {tokens + 1} is outside 1\.\.{tokens}"):
        remaining_after_each_step(tokens, tokens + 1)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
@settings(deadline=None)
def test_patches_round_trip(side, patch, channels, batch):
    latents = torch.arange(batch * channels * (side * patch) ** 2).reshape(batch, channels, side * patch, side * patch)
    tokens = patchify(latents, patch)
    assert tokens.shape == (batch, side * side, channels * patch**2)
    assert torch.equal(unpatchify(tokens, patch), latents)


def test_guidance_schedules_are_constant_or_grow_with_the_known_share():
    assert guidance_scale_of_step(3.0, "constant", 16, 15) == 3.0
    assert guidance_scale_of_step(3.0, "linear", 16, 12) == 1.5
    assert guidance_scale_of_step(1.0, "linear", 16, 12) == 1.0


def test_orders_are_generated_from_their_end(tiny_mar):
    orders = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in range(2)])
    steps = MARAdapter(tiny_mar, num_inference_steps=2).ar_steps(orders, 5, 1.0, "linear")
    assert torch.equal(torch.cat([s.positions for s in reversed(steps)], 1), orders)


# --- training loss


def test_conditions_ignore_the_values_of_unknown_tokens(tiny_mar):
    g = torch.Generator().manual_seed(0)
    tokens, mask, labels = torch.randn(2, 16, 4, generator=g), (torch.arange(16) % 3 == 0).float().expand(2, -1), torch.tensor([1, 2])
    adapter = MARAdapter(tiny_mar, num_inference_steps=2)
    junk = torch.where(mask[..., None] == 1, 100 * torch.randn(2, 16, 4, generator=g), tokens)
    vectors = tiny_mar.class_vectors(labels, 2)[:, None]
    assert torch.equal(adapter.conditions(tokens, mask, vectors), adapter.conditions(junk, mask, vectors))


class FixedOutput(nn.Module):
    """A head that says the true noise plus a constant error, and a constant v."""

    def __init__(self, error, v):
        super().__init__()
        self.error, self.v, self.noise = error, v, None

    def forward(self, x, timesteps, condition):
        alphas = cosine_schedule().alphas_cumprod[timesteps, None]
        noise = ((x - alphas.sqrt() * condition) / (1 - alphas).sqrt()).float()  # the condition carries x_0
        return torch.cat([noise + self.error, torch.full_like(x, self.v)], 1)


@pytest.mark.parametrize("error, v", [(0.0, -1.0), (0.0, 0.3), (0.1, 1.0)])
def test_training_loss_is_squared_error_plus_the_bound_for_the_variance(error, v):
    loss, x_0 = DiffLoss(4, 4, 8, 1), torch.randn(4000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss.net = FixedOutput(error, v)
    values = loss(x_0, x_0, torch.Generator().manual_seed(1))
    schedule = cosine_schedule()
    timesteps = torch.randint(1000, (4000,), generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(4000, dtype=torch.float64)
    for i, t in enumerate(timesteps.tolist()):
        expected[i] = error**2
        if t > 0:
            low, high = schedule.min_log_variance[t], schedule.max_log_variance[t]
            gap = schedule.posterior_mean_coef1[t] * schedule.sqrt_recipm1_alphas_cumprod[t] * error
            true = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), (0.5 * low).exp())
            ours = torch.distributions.Normal(gap, (0.5 * (low + 0.5 * (v + 1) * (high - low))).exp())
            expected[i] += torch.distributions.kl_divergence(true, ours) / math.log(2)
    # the noise is recovered by a division, which at the last timesteps loses digits of float32
    torch.testing.assert_close(values.double(), expected, rtol=2e-2, atol=2e-4)


def test_the_bound_trains_the_variance_and_not_the_mean():
    """With a perfect noise prediction the gradient of the bound must still not reach it through the mean."""
    loss = DiffLoss(4, 4, 8, 1)
    loss.net = FixedOutput(0.0, 0.5)
    loss.net.error = nn.Parameter(torch.tensor(0.5))
    x_0 = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    loss(x_0, x_0, torch.Generator().manual_seed(1)).mean().backward()
    assert loss.net.error.grad.item() == pytest.approx(2 * 0.5, rel=1e-2)  # of the squared error alone


def test_training_learns_two_tokens_by_heart():
    torch.manual_seed(0)
    model = MAR(TINY)
    model.init_weights()
    g = torch.Generator().manual_seed(0)
    tokens, labels = torch.randn(2, 16, 4, generator=g).repeat(8, 1, 1), torch.arange(2).repeat(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(150):
        loss = model(tokens, labels, g, label_drop=0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for n, p in model.named_parameters() if n != "fake_latent")
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])


def test_mask_shares_follow_the_cut_normal_law():
    g = torch.Generator().manual_seed(0)
    shares = torch.tensor([truncated_mask_share(g) for _ in range(4000)])
    assert shares.min() >= 0.7 and shares.max() <= 1.0
    x = torch.linspace(0.7, 1, 10_001)
    weight = torch.exp(-0.5 * ((x - 1) / 0.25) ** 2)
    mean = (x * weight).sum() / weight.sum()
    assert (shares.mean() - mean).abs() < 4 * shares.std() / math.sqrt(4000)


def test_dropped_labels_see_the_fake_latent():
    torch.manual_seed(0)
    model = MAR(TINY)
    model.init_weights()
    run = lambda drop: model(torch.ones(4, 16, 4), torch.arange(4), torch.Generator().manual_seed(0), label_drop=drop)
    run(1.0).backward()
    assert model.class_emb.weight.grad is None or model.class_emb.weight.grad.eq(0).all()
    assert model.fake_latent.grad is not None
    model.zero_grad()
    run(0.0).backward()
    assert model.fake_latent.grad is None or model.fake_latent.grad.eq(0).all()
