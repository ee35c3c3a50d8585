"""Autospeculation of a chain: y_0 from y_K without K sequential calls (Hu et al. 2025, with block verification).

A drafter proposes up to `window` transitions; one call of the chain evaluates all drafted states; verification keeps a prefix and
replaces the first state that fails. Every row has its own pointer, and finished rows leave the batch. The outcome follows the
chain's own law exactly, whatever the drafter says.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from car_spec.chain import Prediction
from car_spec.coupling import log_ratio
from car_spec.gaussian import Gaussian
from car_spec.noise import Noise
from car_spec.verify import Verdict, verify_block, verify_block_equal_std, verify_token_wise

DRAFTERS = ("free", "frozen", "model")


class PredictiveChain(Protocol):
    """A chain whose transitions are affine in the state once a prediction is given: mean = decay[k] * y + (terms without y)."""

    num_steps: int
    num_rows: int
    equal_std: bool  # the std of a transition does not depend on the prediction
    decay: torch.Tensor  # (K,)

    def predict(self, y: torch.Tensor, k: torch.Tensor, rows: torch.Tensor) -> Prediction: ...

    def transition(self, prediction: Prediction, y: torch.Tensor, k: torch.Tensor) -> Gaussian: ...


class NonFiniteError(RuntimeError):
    """A network said NaN or infinity; `rows` holds the indices of the rows it happened to."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows
        super().__init__(f"the network's output is not finite at {rows.tolist()}")


class Path(NamedTuple):
    """Every state of R rows and the law it was drawn from. Steps above a row's start hold zeros. Without record: states[:, 0] only."""

    states: torch.Tensor  # (R, K + 1, D): states[:, k] = y_k
    mean: torch.Tensor  # (R, K, D): law of y_k given y_{k+1}
    log_std: torch.Tensor  # (R, K, D)


@dataclass
class ChainTrace:
    """Calls and rows of the network behind a chain, and what verification did."""

    calls: int = 0
    rows: int = 0
    draft_calls: int = 0
    fallbacks: int = 0
    accepted: list[int] = field(default_factory=list)  # transitions a round and row

    def count(self, rows: int) -> None:
        self.calls += 1
        self.rows += rows


def draft_lengths(num_steps: int, window: int, taper: float) -> torch.Tensor:
    """Transitions drafted from each step k (K,): at most `window`, and at most the share `taper` of the k that have noise.

    The clean sample changes with the logarithm of the steps left: what one prediction is good for shrinks towards the end.
    """
    k = torch.arange(num_steps)
    return (taper * k).ceil().long().clamp_max(window)


MAX_MIXING = 2**24  # entries of the tables below; beyond it, drafts are long enough for a loop


def decay_tables(decay: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For drafts of `window` transitions from step k down: X_{j+1} = first[k, j] X_0 + sum_i mixing[k, j, i] v_i.

    decay (K,) -> first (K, G), mixing (K, G, G) lower triangular, so that a whole draft is one product instead of a loop:
    X_{j+1} = decay[k - j] X_j + v_j.
    """
    steps = torch.arange(len(decay), device=decay.device)[:, None] - torch.arange(window, device=decay.device)  # (K, G): k - j
    factor = decay[steps.clamp_min(0)]
    mixing = torch.eye(window, device=decay.device).expand(len(decay), -1, -1).clone()
    for j in range(1, window):
        mixing[:, j, :j] = factor[:, j, None] * mixing[:, j - 1, :j]
    return factor.cumprod(1), mixing


def autospeculate(
    chain: PredictiveChain,
    y: torch.Tensor,
    noise: Noise,
    *,
    start: torch.Tensor | None = None,
    window: int = 12,
    taper: float = 1.0,
    drafter: str = "free",
    draft_chain: PredictiveChain | None = None,
    token_wise: bool = False,
    trace: ChainTrace | None = None,
    record: bool = True,
) -> Path:
    """Sample all rows of a chain: y (R, D) is the state above step `start` (R,), the next to be taken (default K - 1, the first).

    drafter: `free` re-uses the prediction of the last verification, one call a round; `frozen` asks for a fresh prediction at the
    current state first, two calls a round; `model` lets `draft_chain` draft, one call of it a transition.
    window, taper: `draft_lengths`. record: whether the path between start and end is kept, which for images is a lot of memory.
    """
    if window < 1:
        raise ValueError(f"window {window} is below 1")
    if not 0 < taper <= 1:
        raise ValueError(f"taper {taper} is outside (0, 1]")
    if drafter not in DRAFTERS:
        raise ValueError(f"drafter {drafter!r} is none of {', '.join(DRAFTERS)}")
    if (drafter == "model") != (draft_chain is not None):
        raise ValueError(f"drafter {drafter!r} {'needs' if drafter == 'model' else 'takes no'} draft_chain")
    trace = ChainTrace() if trace is None else trace
    rows_total, dim, num_steps, device = len(y), y.shape[-1], chain.num_steps, y.device
    window = min(window, num_steps)
    lengths = draft_lengths(num_steps, window, taper)  # (K,)
    longest = max(1, int(lengths.max()))
    tables = decay_tables(chain.decay, longest) if num_steps * longest**2 <= MAX_MIXING else None
    kept = num_steps if record else 0
    path = Path(y.new_zeros(rows_total, kept + 1, dim), y.new_zeros(rows_total, kept, dim), y.new_zeros(rows_total, kept, dim))
    rows = torch.arange(rows_total, device=device)  # the rows that are not finished
    k = torch.full((rows_total,), num_steps - 1, device=device) if start is None else start.clone()  # their next step
    if record:
        path.states[rows, k + 1] = y
    columns = torch.arange(window + 1, device=device)
    # what the loop branches on is kept on the host as well, where it costs no wait for the device
    host = _Pointers(k.cpu(), torch.ones(rows_total, dtype=torch.bool), lengths)
    verify = verify_token_wise if token_wise else verify_block_equal_std if chain.equal_std else verify_block
    prediction = chain.predict(y, k, rows)
    trace.count(len(rows))

    while len(rows):
        if drafter == "frozen" and not host.exact.all():
            prediction, host.exact = chain.predict(y, k, rows), torch.ones_like(host.exact)
            trace.count(len(rows))
        length = host.length.to(device)  # (M,): transitions k ... k - length + 1, all of them with noise
        longest = max(1, int(host.length.max()))
        offsets = columns[: longest + 1]
        steps = (k[:, None] - offsets).clamp_min(0)  # (M, G + 1)
        xi = noise.of(rows).normal(window, dim)[:, :longest]  # as many for a row as for any other, whatever its neighbours
        if draft_chain is None:
            mixing = None if tables is None else (tables[0][k, :longest], tables[1][k, :longest, :longest])
            states, draft = _draft(chain, prediction, y, steps[:, :-1], mixing, xi)
        else:
            states, draft = _draft_by_model(draft_chain, y, steps[:, :-1], rows, xi)
            trace.draft_calls += longest

        # the network at every drafted state X_0 ... X_length, unless it is already known at X_0; padding keeps the old prediction
        index = host.asked(longest).to(device)
        flat_states, flat_steps = states.flatten(0, 1), steps.flatten()
        judged = Prediction(*(part.repeat_interleave(longest + 1, 0) for part in prediction))  # (M (G + 1), D)
        if len(index):
            fresh = chain.predict(flat_states[index], flat_steps[index], rows[index // (longest + 1)])
            trace.count(len(index))
            for part, values in zip(judged, fresh):
                part.index_copy_(0, index, values)
        target = chain.transition(judged, flat_states, flat_steps)
        if not target.mean.isfinite().all():
            raise NonFiniteError(rows[~target.mean.view_as(states).isfinite().flatten(1).all(1)])
        target = Gaussian(target.mean.view_as(states), target.log_std.view_as(states))  # (M, G + 1, D)

        inside = offsets[:-1] < length[:, None]
        safe = Gaussian(target.mean[:, :-1], target.log_std[:, :-1].masked_fill(~inside[..., None], 0.0))
        log_ratios = log_ratio(safe, draft, states[:, 1:]).masked_fill(~inside, 0.0)
        verdict: Verdict = verify(log_ratios, length, safe, draft, noise.of(rows))
        tau, complete = verdict.accepted, verdict.accepted == length
        host.tau = tau.cpu()
        trace.fallbacks += verdict.fallbacks
        trace.accepted += host.tau.tolist()

        if record:  # what stands, and the replacement
            after = torch.where((offsets[:-1] == tau[:, None])[..., None], verdict.replacement[:, None], states[:, 1:])  # (M, G, D)
            index = host.decided(longest).to(device)
            where = (rows[index // longest], steps[:, :-1].flatten()[index])
            for whole, values in zip(path, (after, *safe)):
                whole[where] = values.flatten(0, 1)[index]

        here = torch.arange(len(rows), device=device)
        y = torch.where(complete[:, None], states[here, tau], verdict.replacement)
        last = here * (longest + 1) + tau
        prediction = Prediction(*(part[last] for part in judged))
        ended, left = host.advance()
        k = host.k.to(device)
        if len(ended):  # the prediction is that of this very state: the last, deterministic step is known
            ended, left = ended.to(device), left.to(device)
            final = target.mean[ended, tau[ended]]
            path.states[rows[ended], 0] = final
            if record:
                path.mean[rows[ended], 0], path.log_std[rows[ended], 0] = final, -torch.inf
            rows, y = rows[left], y[left]
            prediction = Prediction(prediction.centre[left], prediction.fraction[left])
    return path


@dataclass
class _Pointers:
    """Where M rows are, on the host: their next step k, and whether the prediction was made at their very state."""

    k: torch.Tensor  # (M,)
    exact: torch.Tensor  # (M,) bool
    lengths: torch.Tensor  # (K,) of drafts, by step
    tau: torch.Tensor = field(init=False)  # (M,) transitions that the last verification accepted

    @property
    def length(self) -> torch.Tensor:
        return self.lengths[self.k]

    def asked(self, longest: int) -> torch.Tensor:
        """Indices into (M, G + 1) of X_0 ... X_length, without X_0 where it is known."""
        offsets = torch.arange(longest + 1)
        asked = (offsets <= self.length[:, None]) & ~(self.exact[:, None] & (offsets == 0))
        return asked.flatten().nonzero()[:, 0]

    def decided(self, longest: int) -> torch.Tensor:
        """Indices into (M, G) of the transitions whose outcome is known: those accepted and, where not all are, the one after them."""
        known = self.tau + (self.tau < self.length).long()
        return (torch.arange(longest) < known[:, None]).flatten().nonzero()[:, 0]

    def advance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Move on by what was decided -> the rows that have ended, which are dropped, and those left."""
        complete = self.tau == self.length
        k = self.k - self.tau - (~complete).long()
        ended = complete & (k == 0)
        self.k, self.exact = k[~ended], complete[~ended]
        return ended.nonzero()[:, 0], (~ended).nonzero()[:, 0]


def _draft(chain, prediction: Prediction, y, steps, tables, xi) -> tuple[torch.Tensor, Gaussian]:
    """One prediction re-used at every step (M, G): states X_0 ... X_G (M, G + 1, D) and the laws of X_1 ... X_G."""
    repeated = Prediction(*(part[:, None] for part in prediction))  # (M, 1, D)
    offset, log_std = chain.transition(repeated, y.new_zeros(1), steps)  # (M, G, D): what does not depend on the state
    log_std = log_std.masked_fill((steps == 0)[..., None], 0.0)  # in the padding only
    moved = torch.addcmul(offset, log_std.exp(), xi)
    if tables is None:
        path, decay = [y], chain.decay[steps]  # (M, G)
        for j in range(steps.shape[1]):
            path.append(torch.addcmul(moved[:, j], decay[:, j, None], path[-1]))
        states = torch.stack(path, 1)
    else:
        first, mixing = tables
        states = torch.cat([y[:, None], torch.addcmul(torch.bmm(mixing, moved), first[..., None], y[:, None])], 1)
    mean = torch.addcmul(offset, chain.decay[steps][..., None], states[:, :-1])
    return states, Gaussian(mean, log_std)


def _draft_by_model(draft_chain, y, steps, rows, xi) -> tuple[torch.Tensor, Gaussian]:
    """The other network's chain, one call a step."""
    states, means, log_stds = [y], [], []
    for j in range(steps.shape[1]):
        law = draft_chain.transition(draft_chain.predict(states[-1], steps[:, j], rows), states[-1], steps[:, j])
        log_std = torch.where(steps[:, j, None] > 0, law.log_std, 0.0)
        states.append(torch.addcmul(law.mean, log_std.exp(), xi[:, j]))
        means.append(law.mean)
        log_stds.append(log_std)
    return torch.stack(states, 1), Gaussian(torch.stack(means, 1), torch.stack(log_stds, 1))
