"""Whole-image chains: every configuration equals its scheduler's own step, and autospeculation keeps the law of the chain."""

import math

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler
from two_sample import largest_z, shared_noise, smallest_p

from car_spec import asd
from car_spec.adapters.ddpm import DenoisingChain, churned_coefficients, reverse_schedule
from car_spec.asd import ChainTrace, NonFiniteError, autospeculate
from car_spec.chain import sample_chain
from car_spec.coupling import log_ratio
from car_spec.eval.distances import energy_test
from car_spec.gaussian import Gaussian
from car_spec.verify import Verdict

SHAPE = (2, 4, 4)
ROWS = 3


def smooth_denoiser(learned: bool, scale: float = 1.0, positive: bool = False):
    """A non-linear function of state and time with outputs of the order of one; the variance half in (-1, 1), or positive."""

    def denoiser(x, timesteps, rows):
        time = (timesteps / 1000)[:, None, None, None]
        out = scale * torch.tanh(0.7 * x + 0.3 * x.flip(1) - time)
        if not learned:
            return out
        said = torch.sin(3 * x + time)
        return torch.cat([out, 1e-3 * (1.5 + said) if positive else said], 1)

    return denoiser


def steps_of_scheduler(scheduler, denoiser, y, k, chain, noise, **arguments):
    """The scheduler's own step from y at index k of the chain, with given noise in the place of its random numbers."""
    t = int(chain.schedule.timesteps[k])
    x = y.unflatten(1, SHAPE)
    out = denoiser(x, torch.full((len(x),), t), torch.arange(len(x)))
    module = type(scheduler).__module__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.randn_tensor", lambda *_, **__: noise.unflatten(1, SHAPE))
        return scheduler.step(out, t, x, **arguments).prev_sample.flatten(1)


def agree(chain, scheduler, denoiser, **arguments):
    """At every step, from a state of about the right size."""
    g = torch.Generator().manual_seed(0)
    last_call = 1 if chain.schedule.timesteps[0] < 0 else 0
    for k in range(last_call, chain.num_steps):
        signal = chain.schedule.signal[k]
        clean, eps, noise = (torch.randn(ROWS, math.prod(SHAPE), generator=g) for _ in range(3))
        y = signal.sqrt() * 0.7 * clean + (1 - signal).sqrt() * eps
        ours = chain(y, k).sample(noise)
        theirs = steps_of_scheduler(scheduler, denoiser, y, k, chain, noise, **arguments)
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)  # both in float32, with signals down to 4e-5


KEEPS = {
    "unclipped": dict(clip_sample=False),
    "clipped": dict(clip_sample=True, clip_sample_range=0.8),
    "thresholded": dict(clip_sample=False, thresholding=True, dynamic_thresholding_ratio=0.9, sample_max_value=1.5),
}
SPACINGS = {"leading": dict(), "trailing": dict(timestep_spacing="trailing"), "offset": dict(steps_offset=1)}
VARIANCE_TYPES = ("fixed_small", "fixed_small_log", "fixed_large", "learned", "learned_range")
PREDICTIONS = ("epsilon", "v_prediction", "sample")


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("variance_type", VARIANCE_TYPES)
@pytest.mark.parametrize("prediction_type", PREDICTIONS)
def test_a_transition_equals_the_ddpm_schedulers_step(prediction_type, variance_type, keep, spacing):
    scheduler = DDPMScheduler(prediction_type=prediction_type, variance_type=variance_type, **KEEPS[keep], **SPACINGS[spacing])
    scheduler.set_timesteps(12)
    denoiser = smooth_denoiser(variance_type.startswith("learned"), positive=variance_type == "learned")
    for spread in (0.0, 0.5):  # concerns drafts only
        chain = DenoisingChain(denoiser, reverse_schedule(scheduler), SHAPE, ROWS, spread=spread)
        assert chain.equal_std == (not variance_type.startswith("learned"))
        agree(chain, scheduler, denoiser)


@pytest.mark.parametrize("steps", [250, 50, 1])
@pytest.mark.parametrize("beta_schedule", ["linear", "squaredcos_cap_v2", "scaled_linear"])
def test_any_grid_equals_the_ddpm_schedulers_step(beta_schedule, steps):
    scheduler = DDPMScheduler(beta_schedule=beta_schedule)
    scheduler.set_timesteps(steps)
    denoiser = smooth_denoiser(False)
    agree(DenoisingChain(denoiser, reverse_schedule(scheduler), SHAPE, ROWS), scheduler, denoiser)


@pytest.mark.parametrize("settings", [dict(), dict(set_alpha_to_one=False), dict(steps_offset=1), dict(timestep_spacing="trailing")])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("eta", [0.3, 1.0])
@pytest.mark.parametrize("prediction_type", PREDICTIONS)
def test_a_transition_equals_the_ddim_schedulers_step(prediction_type, eta, keep, settings):
    scheduler = DDIMScheduler(prediction_type=prediction_type, **KEEPS[keep], **settings)
    scheduler.set_timesteps(12)
    denoiser = smooth_denoiser(False)
    chain = DenoisingChain(denoiser, reverse_schedule(scheduler, eta=eta), SHAPE, ROWS, spread=0.4)
    agree(chain, scheduler, denoiser, eta=eta)


def test_fixed_large_log_is_fixed_large_where_diffusers_takes_the_root_of_a_logarithm():
    laws = []
    for variance_type in ("fixed_large", "fixed_large_log"):
        scheduler = DDPMScheduler(variance_type=variance_type)
        scheduler.set_timesteps(10)
        chain = DenoisingChain(smooth_denoiser(False), reverse_schedule(scheduler), SHAPE, ROWS)
        laws.append(chain(torch.ones(ROWS, math.prod(SHAPE)), 5))
    assert torch.equal(laws[0].mean, laws[1].mean) and torch.equal(laws[0].log_std, laws[1].log_std)
    assert scheduler._get_variance(500) < 0  # what its `step` takes the root of


def test_full_churn_is_ddpm():
    scheduler = DDPMScheduler(variance_type="fixed_small")
    scheduler.set_timesteps(40)
    ddpm, churned = reverse_schedule(scheduler), reverse_schedule(scheduler, churn=1.0)
    for name in ("of_kept", "of_clean", "of_y", "min_log_std"):
        # rounding of the scheduler's float32 betas
        torch.testing.assert_close(getattr(churned, name)[1:], getattr(ddpm, name)[1:], rtol=1e-3, atol=1e-5)
    assert churned.of_kept[0] == 1 and churned.of_y[0] == 0


@pytest.mark.parametrize("churn", [0.25, 0.5, 1.0])
def test_a_churned_transition_solves_the_reverse_sde(churn):
    """Moments over 4000 Euler-Maruyama substeps of dx = [-x / 2 - (1 + churn^2) / 2 score] beta dt + churn sqrt(beta) dW, backwards."""
    scheduler = DDPMScheduler()
    scheduler.set_timesteps(8)
    i, clean, y = 3, 0.6, -0.9
    signal, signal_next = (scheduler.alphas_cumprod[scheduler.timesteps[j]].double() for j in (i, i + 1))
    step = (signal_next.log() - signal.log()) / 4000  # beta dt
    mean, variance = torch.tensor(y, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for j in range(4000):
        now = (signal.log() + j * step).exp()
        pull = 0.5 * step - 0.5 * (1 + churn**2) * step / (1 - now)  # what multiplies x
        mean = mean + pull * mean + 0.5 * (1 + churn**2) * step * now.sqrt() * clean / (1 - now)
        variance = variance * (1 + pull) ** 2 + churn**2 * step
    of_kept, _, of_y, std, _ = (column[i] for column in churned_coefficients(scheduler, churn))
    assert (of_kept * clean + of_y * y).item() == pytest.approx(mean.item(), abs=2e-3)
    assert std.item() == pytest.approx(variance.sqrt().item(), rel=2e-3)


def test_a_noisy_last_step_is_followed_by_a_transition_without_a_call():
    scheduler = DDPMScheduler(variance_type="fixed_large", timestep_spacing="trailing")
    scheduler.set_timesteps(10)
    asked = []

    def denoiser(x, timesteps, rows):
        asked.extend(timesteps.tolist())
        return torch.tanh(x)

    chain = DenoisingChain(denoiser, reverse_schedule(scheduler), SHAPE, ROWS)
    assert chain.num_steps == 11
    y = torch.randn(ROWS, math.prod(SHAPE), generator=torch.Generator().manual_seed(1))
    assert torch.equal(chain(y, 0).mean, y) and not asked
    noise = shared_noise(ROWS, 0)
    autospeculate(chain, y, noise, window=4)
    assert min(asked) == 99 and chain(y, 1).log_std.max() > -10


def test_chunks_change_nothing():
    scheduler = DDPMScheduler()
    scheduler.set_timesteps(10)
    sizes = []

    def denoiser(x, timesteps, rows):
        sizes.append(len(x))
        return torch.tanh(x + rows[:, None, None, None])

    y = torch.randn(ROWS, math.prod(SHAPE), generator=torch.Generator().manual_seed(1))
    whole, chunked = (DenoisingChain(denoiser, reverse_schedule(scheduler), SHAPE, ROWS, max_rows=n)(y, 5).mean for n in (None, 2))
    torch.testing.assert_close(chunked, whole)
    assert sizes == [3, 2, 1]


@pytest.mark.parametrize(
    "make, arguments, sentence",
    [
        (DDIMScheduler, {}, "DDIMScheduler with eta 0 is deterministic: nothing random is left to speculate on"),
        (DDIMScheduler, dict(eta=1.5), r"eta 1.5 is outside \(0, 1\]"),
        (DDPMScheduler, dict(churn=0), "churn 0 is the probability flow: nothing random is left to speculate on"),
        (DDPMScheduler, dict(churn=-0.5), r"churn -0.5 is outside \(0, 1\]"),
        (EulerDiscreteScheduler, {}, "EulerDiscreteScheduler is no stochastic scheduler known here"),
    ],
)
def test_what_is_deterministic_is_refused_with_the_reason(make, arguments, sentence):
    scheduler = make()
    scheduler.set_timesteps(5)
    with pytest.raises(ValueError, match=sentence):
        reverse_schedule(scheduler, **arguments)


def test_a_variance_that_is_not_learned_by_the_network_is_one_sentence():
    scheduler = DDPMScheduler(variance_type="learned_range")
    scheduler.set_timesteps(5)
    with pytest.raises(ValueError, match="output has 2 channels, a learned_range variance needs 4"):
        DenoisingChain(smooth_denoiser(False), reverse_schedule(scheduler), SHAPE, ROWS)(torch.zeros(ROWS, math.prod(SHAPE)), 2)


def test_a_learned_variance_below_zero_names_the_rows():
    scheduler = DDPMScheduler(variance_type="learned")
    scheduler.set_timesteps(5)

    def denoiser(x, timesteps, rows):
        return torch.cat([x, torch.where(rows[:, None, None, None] == 1, -1.0, 1.0).expand_as(x)], 1)

    with pytest.raises(NonFiniteError) as caught:
        DenoisingChain(denoiser, reverse_schedule(scheduler), SHAPE, ROWS)(torch.zeros(ROWS, math.prod(SHAPE)), 2)
    assert caught.value.rows.tolist() == [1]


# Exactness on an analytic denoiser: clean samples follow a mixture of three Gaussians in the plane, K = 50.

COUNT, STEPS = 4_000, 50
MEANS = torch.tensor([[1.2, 0.0], [-0.8, 1.0], [-0.3, -1.1]])
SPREADS = torch.tensor([0.15, 0.3, 0.2])


def mixture_denoiser(alphas_cumprod, learned=False, shift=0.0):
    """E[noise | state] of the mixture, (M, 2, 1): the network that training would find; `shift` moves its components."""

    def denoiser(x, timesteps, rows):
        signal = alphas_cumprod[timesteps][:, None]  # (M, 1)
        variance = signal * SPREADS**2 + 1 - signal  # (M, 3)
        gap = x[:, None, :, 0] - signal.sqrt()[..., None] * (MEANS + shift)  # (M, 3, 2)
        weights = torch.softmax(-0.5 * gap.square().sum(-1) / variance - variance.log(), 1)
        eps = ((1 - signal).sqrt() / variance * weights)[..., None] * gap
        out = eps.sum(1)[..., None]
        return torch.cat([out, torch.tanh(2 * x.flip(1))], 1) if learned else out

    return denoiser


SAMPLERS = {
    "ddpm": (DDPMScheduler(variance_type="fixed_large", clip_sample=True, clip_sample_range=2.0), {}),
    "ddim": (DDIMScheduler(clip_sample=True, clip_sample_range=1.5), dict(eta=0.8)),
    "churned": (DDPMScheduler(clip_sample=False), dict(churn=0.5)),
    "learned": (DDPMScheduler(variance_type="learned_range", clip_sample=False), {}),
}


@pytest.fixture(scope="module")
def mixtures():
    """Chains by sampler, and samples of their sequential law, made once each."""
    made = {}

    def chain_of(name, shift=0.0, spread=0.3):
        scheduler, arguments = SAMPLERS[name]
        scheduler.set_timesteps(STEPS)
        denoiser = mixture_denoiser(scheduler.alphas_cumprod, learned=name == "learned", shift=shift)
        return DenoisingChain(denoiser, reverse_schedule(scheduler, **arguments), (2, 1), COUNT, spread=spread)

    def get(name):
        if name not in made:
            chain, noise = chain_of(name), shared_noise(COUNT, 1)
            made[name] = chain, sample_chain(chain, noise.normal(2), noise.normal(STEPS, 2)), chain_of
        return made[name]

    return get


def compare(samples, expected):
    """-> smallest p of Kolmogorov-Smirnov and energy tests, largest z of the cross moments."""
    p = min(smallest_p(samples, expected), energy_test(samples[:800], expected[:800]))
    return p, largest_z(samples, expected)


@pytest.mark.parametrize("token_wise", [False, True], ids=["block", "token-wise"])
@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("drafter", ["free", "frozen", "model"])
def test_samples_of_a_mixture_have_the_sequential_law(mixtures, drafter, window, token_wise):
    chain, expected, chain_of = mixtures("ddpm")
    noise, trace = shared_noise(COUNT, 2), ChainTrace()
    draft_chain = chain_of("ddpm", shift=0.1) if drafter == "model" else None
    path = autospeculate(
        chain,
        noise.normal(2),
        noise,
        window=window,
        drafter=drafter,
        draft_chain=draft_chain,
        token_wise=token_wise,
        trace=trace,
        record=False,
    )
    p, z = compare(path.states[:, 0], expected)
    assert p > 0.005 and z < 4.5
    assert trace.fallbacks == 0 and path.states.shape[1] == 1


@pytest.mark.parametrize("name", ["ddim", "churned", "learned"])
def test_every_kind_of_transition_keeps_its_law(mixtures, name):
    chain, expected, _ = mixtures(name)
    noise = shared_noise(COUNT, 3)
    samples = autospeculate(chain, noise.normal(2), noise, window=8, record=False).states[:, 0]
    p, z = compare(samples, expected)
    assert p > 0.005 and z < 4.5


def reuses_the_noise(log_ratios, lengths, target, draft, noise, verify=asd.verify_block_equal_std):
    """The replacement takes the noise of the rejected draft again, around the target's mean."""
    verdict = verify(log_ratios, lengths, target, draft, noise)
    rows = torch.arange(len(lengths))
    at = verdict.accepted.clamp_max(target.mean.shape[1] - 1)
    drafted = reuses_the_noise.states[rows, at]
    law, old = target.at((rows, at)), draft.at((rows, at))
    return Verdict(verdict.accepted, law.sample((drafted - old.mean) / old.log_std.exp()), 0)


def replaces_from_the_target(log_ratios, lengths, target, draft, noise, verify=asd.verify_block_equal_std):
    """The wrong residual: a fresh draw from the target itself."""
    verdict = verify(log_ratios, lengths, target, draft, noise)
    rows = torch.arange(len(lengths))
    law = target.at((rows, verdict.accepted.clamp_max(target.mean.shape[1] - 1)))
    return Verdict(verdict.accepted, law.sample(noise.normal(target.mean.shape[-1])), 0)


@pytest.mark.parametrize("planted", [reuses_the_noise, replaces_from_the_target])
def test_a_planted_bias_is_noticed(mixtures, monkeypatch, planted):
    chain, expected, _ = mixtures("ddpm")
    draft = asd._draft

    def remembering(*arguments):
        states, law = draft(*arguments)
        reuses_the_noise.states = states[:, 1:]
        return states, law

    monkeypatch.setattr(asd, "_draft", remembering)
    monkeypatch.setattr(asd, "verify_block_equal_std", planted)
    noise = shared_noise(COUNT, 2)
    p, z = compare(autospeculate(chain, noise.normal(2), noise, window=16, record=False).states[:, 0], expected)
    assert p < 1e-4 or z > 7


def test_long_drafts_equal_short_ones_made_by_a_product(mixtures, monkeypatch):
    chain, _, _ = mixtures("ddpm")
    run = lambda: autospeculate(chain, shared_noise(50, 5).normal(2), shared_noise(50, 6), window=STEPS).states
    product = run()
    monkeypatch.setattr(asd, "MAX_MIXING", 0)
    torch.testing.assert_close(run(), product, atol=1e-4, rtol=1e-4)


def test_a_path_that_is_not_recorded_ends_in_the_same_state(mixtures):
    chain, _, _ = mixtures("learned")
    run = lambda record: autospeculate(chain, shared_noise(20, 5).normal(2), shared_noise(20, 6), record=record).states[:, 0]
    assert torch.equal(run(True), run(False))


def test_ratios_of_many_coordinates_keep_their_digits():
    g = torch.Generator().manual_seed(0)
    mean, noise, gap = torch.randn(3, 200_000, generator=g)
    log_std = torch.full_like(mean, -3.0)
    target, draft = Gaussian(mean, log_std), Gaussian(mean + 2e-5 * gap, log_std)
    y = draft.sample(noise)
    exact = log_ratio(*(Gaussian(law.mean.double(), law.log_std.double()) for law in (target, draft)), y.double())
    assert log_ratio(target, draft, y).item() == pytest.approx(exact.item(), abs=1e-3)
