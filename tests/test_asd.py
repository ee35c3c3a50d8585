"""Autospeculation of a chain has the law of its sequential sampling, for every drafter, in fewer calls."""

import math

import pytest
import torch
from two_sample import largest_z, shared_noise, smallest_p

from car_spec.asd import ChainTrace, NonFiniteError, autospeculate, decay_tables, draft_lengths
from car_spec.chain import DiffusionChain, HoistedHead, Prediction, sample_chain
from car_spec.gaussian import Gaussian
from car_spec.noise import Noise
from car_spec.schedule import cosine_schedule

COUNT, STEPS, DIM = 40_000, 8, 2


class ToyChain:
    """A non-linear chain; the std depends on the state, or on the step alone (`equal_std`)."""

    num_steps, num_rows = STEPS, COUNT

    def __init__(self, equal_std, shift=0.0):
        self.equal_std, self.shift = equal_std, shift
        self.decay = torch.linspace(0.1, 0.9, STEPS)
        self.decay[0] = 0.0
        self.low = torch.linspace(-2.0, -0.7, STEPS)

    def predict(self, y, k, rows):
        x_0 = 1.5 * torch.tanh(y @ torch.tensor([[0.8, 0.4], [-0.5, 0.9]]) + 0.1 * (rows % 3)[:, None] + self.shift)
        return Prediction(x_0, torch.sigmoid(2 * y.flip(-1)))

    def transition(self, prediction, y, k):
        mean = self.decay[k][..., None] * y + (1 - self.decay[k][..., None]) * prediction.centre
        log_std = self.low[k][..., None] + (0.0 if self.equal_std else 0.4) * prediction.fraction
        return Gaussian(mean, log_std.expand_as(mean).masked_fill((k == 0)[..., None], -math.inf))

    def __call__(self, y, k, rows=None):
        k, rows = torch.full((len(y),), k), torch.arange(len(y))
        return self.transition(self.predict(y, k, rows), y, k)


@pytest.fixture(scope="module", params=[True, False], ids=["equal std", "learned std"])
def toy(request):
    chain, noise = ToyChain(request.param), shared_noise(COUNT, 1)
    return chain, sample_chain(chain, noise.normal(DIM), noise.normal(STEPS, DIM))


@pytest.mark.parametrize("token_wise", [False, True], ids=["block", "token-wise"])
@pytest.mark.parametrize("drafter, window", [("free", 1), ("free", 4), ("free", 50), ("frozen", 4), ("model", 3)])
def test_samples_have_the_sequential_law(toy, drafter, window, token_wise):
    chain, expected = toy
    noise, trace = shared_noise(COUNT, 2), ChainTrace()
    draft_chain = ToyChain(chain.equal_std, shift=0.15) if drafter == "model" else None
    path = autospeculate(
        chain, noise.normal(DIM), noise, window=window, drafter=drafter, draft_chain=draft_chain, token_wise=token_wise, trace=trace
    )
    assert smallest_p(path.states[:, 0], expected) > 0.01
    assert largest_z(path.states[:, 0], expected) < 4
    assert trace.fallbacks == 0


def test_recorded_laws_are_the_chains_at_the_recorded_states(toy):
    chain, _ = toy
    noise = shared_noise(200, 3)
    path = autospeculate(chain, noise.normal(DIM), noise, window=4)
    for k in range(STEPS):
        law = chain(path.states[:, k + 1], k)
        torch.testing.assert_close(path.mean[:, k], law.mean)
        torch.testing.assert_close(path.log_std[:, k], law.log_std)
    assert torch.equal(path.states[:, 0], path.mean[:, 0])


def test_a_row_resumes_at_its_own_step(toy):
    chain, expected = toy
    noise = shared_noise(COUNT, 4)
    y, start = noise.normal(DIM), torch.arange(COUNT) % STEPS
    for k in reversed(range(STEPS)):  # bring each row to its start sequentially
        y = torch.where((start < k)[:, None], chain(y, k).sample(noise.normal(DIM)), y)
    path = autospeculate(chain, y, noise, start=start, window=4)
    assert smallest_p(path.states[:, 0], expected) > 0.01


@pytest.mark.parametrize("guided", [False, True])
def test_the_diffusion_head_is_sampled_exactly_in_fewer_calls(golden_mar, mar_golden, guided):
    count = 20_000
    head = HoistedHead(golden_mar.diffloss.net, cosine_schedule(25))
    condition = mar_golden["posterior/c"][:1].expand(count, -1)
    unconditional = mar_golden["posterior/c"][1:2].expand(count, -1) if guided else None
    chain = DiffusionChain(head, condition, unconditional, 1.5 if guided else 1.0, clip_sample_range=3.0)
    noise, trace = shared_noise(count, 6), ChainTrace()
    expected = sample_chain(chain, noise.normal(4), noise.normal(25, 4))
    path = autospeculate(chain, noise.normal(4), noise, window=6, trace=trace)
    assert smallest_p(path.states[:, 0], expected) > 0.01
    assert largest_z(path.states[:, 0], expected) < 4
    assert trace.calls < 25


def test_a_row_does_not_depend_on_the_rows_of_other_images(toy):
    chain, _ = toy
    make = lambda: [torch.Generator().manual_seed(s) for s in (1, 2, 3)]
    y = torch.randn(5, DIM, generator=torch.Generator().manual_seed(0))
    together = autospeculate(chain, y, Noise(make(), torch.tensor([0, 1, 1, 1, 2])), window=3)

    class OfImageOne(ToyChain):
        def predict(self, y, k, rows):
            return super().predict(y, k, rows + 1)

    alone = autospeculate(OfImageOne(chain.equal_std), y[1:4], Noise(make(), torch.tensor([1, 1, 1])), window=3)
    torch.testing.assert_close(together.states[1:4], alone.states)


def test_drafts_by_one_product_equal_the_loop():
    decay = torch.rand(6, generator=torch.Generator().manual_seed(0))
    first, mixing = decay_tables(decay, 4)
    y, v = torch.randn(6, 2), torch.randn(6, 4, 2)
    ours = first[..., None] * y[:, None] + mixing @ v  # from every step k at once
    for k in range(3, 6):
        x = y[k]
        for j in range(4):
            x = decay[k - j] * x + v[k, j]
            torch.testing.assert_close(ours[k, j], x)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(window=0), "window 0 is below 1"),
        (dict(taper=0.0), r"taper 0.0 is outside \(0, 1\]"),
        (dict(drafter="oracle"), "drafter 'oracle' is none of free, frozen, model"),
        (dict(drafter="model"), "drafter 'model' needs draft_chain"),
        (dict(draft_chain=object()), "drafter 'free' takes no draft_chain"),
    ],
)
def test_bad_arguments_are_one_sentence(toy, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        autospeculate(toy[0], torch.zeros(1, DIM), shared_noise(1, 0), **arguments)


def test_a_nan_stops_and_names_the_rows(toy):
    y = torch.zeros(3, DIM)
    y[1] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        autospeculate(toy[0], y, shared_noise(3, 0))
    assert caught.value.rows.tolist() == [1]


def test_drafts_shrink_with_the_steps_left():
    assert draft_lengths(10, 4, 0.5).tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert draft_lengths(5, 99, 1.0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("taper", [0.3, 0.5])
def test_a_tapered_window_keeps_the_law(toy, taper):
    chain, expected = toy
    noise, trace = shared_noise(COUNT, 12), ChainTrace()
    path = autospeculate(chain, noise.normal(DIM), noise, window=6, taper=taper, trace=trace)
    assert smallest_p(path.states[:, 0], expected) > 0.01
    assert max(trace.accepted) <= math.ceil(taper * (STEPS - 1))
