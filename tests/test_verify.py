"""Block and token-wise verification keep the joint law of a non-linear chain with state-dependent std; planted biases do not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from two_sample import largest_z, shared_noise, smallest_p

from car_spec.coupling import reflection
from car_spec.gaussian import Gaussian
from car_spec.verify import (
    Verdict,
    block_log_acceptance,
    token_wise_accepted,
    verify_block,
    verify_block_equal_std,
    verify_token_wise,
)

CHAINS, STEPS, DIM = 200_000, 5, 2
MATRIX = torch.tensor([[0.6, 0.3], [-0.4, 0.7]])


def law(y, k, drafting, equal):
    """The chain, and a draft of it that is off in mean and, unless `equal`, in std."""
    mean = torch.tanh(y @ MATRIX) + 0.3 * k + (0.6 * torch.sin(y) if drafting else 0.0)
    log_std = -0.7 + 0.3 * torch.tanh(y.flip(-1)) + (0.3 * torch.cos(y) if drafting and not equal else 0.0)
    return Gaussian(mean, log_std)


@pytest.fixture(scope="module")
def sequential():
    noise, states = shared_noise(CHAINS, 1), []
    y = noise.normal(DIM)
    for k in range(STEPS):
        y = law(y, k, drafting=False, equal=False).sample(noise.normal(DIM))
        states.append(y)
    return torch.stack(states, 1)  # (CHAINS, STEPS, DIM)


def stack(laws):
    return Gaussian(*(torch.stack(parts, 1) for parts in zip(*laws)))


def speculative(verify, equal, reuse_noise=False):
    """Draft all remaining steps, verify, go on behind what stands. -> states, and of the first round: tau, log p, fallbacks."""
    noise, first = shared_noise(CHAINS, 2), None
    states = torch.zeros(CHAINS, STEPS + 1, DIM)
    states[:, 0] = noise.normal(DIM)
    position = torch.zeros(CHAINS, dtype=torch.int64)
    leftover = torch.randn(CHAINS, STEPS, DIM, generator=torch.Generator().manual_seed(5))
    while True:
        active = (position < STEPS).nonzero()[:, 0]
        if not len(active):
            return states[:, 1:], first
        here, drawn = position[active], noise.of(active)
        y, drafted, drafts, targets = states[active, here], [], [], []
        for j in range(STEPS):
            k = (here + j).clamp_max(STEPS - 1)[:, None]
            drafts.append(law(y, k, True, equal))
            targets.append(law(y, k, False, equal))
            y = drafts[-1].sample(leftover[active, k[:, 0]] if reuse_noise else drawn.normal(DIM))
            drafted.append(y)
        drafted, target, draft, length = torch.stack(drafted, 1), stack(targets), stack(drafts), STEPS - here
        inside = torch.arange(STEPS) < length[:, None]
        ratios = torch.where(inside, target.log_prob(drafted) - draft.log_prob(drafted), 0.0)
        verdict = verify(ratios, length, target, draft, drawn)
        first = first or (verdict.accepted, block_log_acceptance(ratios), verdict.fallbacks)
        for j in range(STEPS):
            kept = j < verdict.accepted
            states[active[kept], here[kept] + j + 1] = drafted[kept, j]
        short = verdict.accepted < length
        at = here + verdict.accepted
        states[active[short], at[short] + 1] = verdict.replacement[short]
        position[active] = at + short.long()


def with_r_1(ratios, lengths, target, draft, noise):
    """Planted bias: the token-wise residual where the block one is due."""
    verdict = verify_block(ratios, lengths, target, draft, noise)
    rows, index = torch.arange(len(lengths)), verdict.accepted.clamp_max(STEPS - 1)
    pick = lambda laws: Gaussian(laws.mean[rows, index], laws.log_std[rows, index])
    from car_spec.verify import draw_residual

    wrong, _ = draw_residual(pick(target), pick(draft), torch.zeros(len(rows)), verdict.accepted < lengths, noise)
    return verdict._replace(replacement=wrong)


def with_reflection(ratios, lengths, target, draft, noise):
    """Planted bias: the reflection inside block verification."""
    verdict = verify_block_equal_std(ratios, lengths, target, draft, noise)
    rows, index = torch.arange(len(lengths)), verdict.accepted.clamp_max(STEPS - 1)
    pick = lambda laws: Gaussian(laws.mean[rows, index], laws.log_std[rows, index])
    return Verdict(verdict.accepted, reflection(pick(target), pick(draft), noise.normal(DIM)), 0)


@pytest.mark.parametrize(
    "verify, equal",
    [(verify_token_wise, False), (verify_token_wise, True), (verify_block, False), (verify_block, True), (verify_block_equal_std, True)],
)
def test_verified_chains_have_the_joint_law_of_sequential_ones(sequential, verify, equal):
    states, (tau, log_p, fallbacks) = speculative(verify, equal)
    assert fallbacks == 0
    assert smallest_p(states, sequential) > 0.01
    assert largest_z(states, sequential) < 4.5  # of 100 moments
    if verify is not verify_token_wise:
        expected = log_p[:, 1:].double().exp().sum(1)
        assert abs(tau.double().mean() - expected.mean()).item() < 4 * tau.double().std().item() / math.sqrt(CHAINS)


@pytest.mark.parametrize("verify, equal", [(with_r_1, False), (with_reflection, True)])
def test_a_wrong_residual_is_noticed(sequential, verify, equal):
    states, _ = speculative(verify, equal)
    assert smallest_p(states, sequential) < 1e-4


def test_noise_used_again_after_tau_is_noticed(sequential):
    states, _ = speculative(verify_block, False, reuse_noise=True)
    assert smallest_p(states, sequential) < 1e-6 or largest_z(states, sequential) > 6


def test_block_verification_accepts_at_least_as_much_as_token_wise():
    for equal in (True, False):
        block, token = (speculative(v, equal)[1][0].double().mean() for v in (verify_block, verify_token_wise))
        assert block > token + 0.05


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=20))
def test_block_acceptance_equals_its_recursion(values):
    log_p = [0.0]
    for value in values:
        log_p.append(min(0.0, log_p[-1] + value))
    ours = block_log_acceptance(torch.tensor([values], dtype=torch.float64))[0]
    torch.testing.assert_close(ours, torch.tensor(log_p, dtype=torch.float64), atol=1e-9, rtol=1e-9)


@given(st.lists(st.floats(-5, 1), min_size=1, max_size=10), st.integers(0, 10), st.integers(0, 1000))
def test_token_wise_stops_at_the_first_failure(values, length, seed):
    length = min(length, len(values))
    ratios, uniform = torch.tensor([values]), torch.rand(1, len(values), generator=torch.Generator().manual_seed(seed))
    expected = next((i for i in range(length) if uniform[0, i].log() >= values[i]), length)
    assert token_wise_accepted(ratios, torch.tensor([length]), uniform).item() == expected


@pytest.mark.parametrize("verify", [verify_token_wise, verify_block, verify_block_equal_std])
def test_equal_laws_accept_everything_and_far_ones_nothing(verify):
    count, noise = 1000, shared_noise(1000, 0)
    target = Gaussian(torch.zeros(count, 4, 3), torch.zeros(count, 4, 3))
    lengths = torch.arange(count) % 5
    x = target.sample(noise.normal(4, 3))
    verdict = verify(torch.zeros(count, 4), lengths, target, target, noise)
    assert torch.equal(verdict.accepted, lengths)
    far = Gaussian(target.mean + 40.0, target.log_std)
    ratios = torch.where(torch.arange(4) < lengths[:, None], target.log_prob(x + 40) - far.log_prob(x + 40), 0.0)
    verdict = verify(ratios, lengths, target, far, noise)
    assert verdict.accepted.eq(0).all() and verdict.fallbacks == 0
    replaced = verdict.replacement[lengths > 0]
    assert replaced.isfinite().all() and smallest_p(replaced, torch.randn(5000, 3, generator=torch.Generator().manual_seed(1))) > 0.01
