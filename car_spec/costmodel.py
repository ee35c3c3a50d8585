"""`lookahead="auto"`: which settings finish a batch soonest here, from measured call times and the acceptance of a pilot.

Speculation trades sequential calls for rows. What that is worth depends on how the time of a call grows with its rows, which no
table knows: it is measured. The choice is made once, before sampling, and only from a pilot with its own noise, so that the
chosen numbers can be written down and an image stays a function of settings and seed.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from car_spec.adapters.mar import ARStep, MARAdapter
from car_spec.asd import ChainTrace, autospeculate
from car_spec.engine import LosslessSampler, LosslessSettings
from car_spec.noise import Noise
from car_spec.sequential import guidance_halves
from car_spec.trace import Trace

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
WINDOWS = (4, 8, 12, 16, 24)
PILOT_IMAGES = 2
MARGIN = 0.97  # speculation has to promise this share of the sequential time, or it is not worth its risk


@dataclass(frozen=True)
class InnerCost:
    """Autospeculation of a row with one window: calls a row group, rows evaluated a row, seconds a call beyond the network's own."""

    calls: float
    rows: float
    overhead: float


class CallTimes:
    """Seconds of a call at any number of rows: measured at powers of two when first asked for, straight lines between.

    Where doubling the rows (almost) doubles the time, the machine is full: larger calls are not measured but follow in proportion.
    """

    FULL = 1.8

    def __init__(self, call: Callable[[int], object], synchronise: Callable[[], None], repeats: int = 3):
        self._call, self._synchronise, self._repeats = call, synchronise, repeats
        self._known: dict[int, float] = {}

    def _measure(self, rows: int) -> float:
        if rows not in self._known:
            half, quarter = self._known.get(rows // 2), self._known.get(rows // 4)
            if half and quarter and half > self.FULL * quarter:
                self._known[rows] = 2 * half
            else:
                self._known[rows] = statistics.median(self._timed(rows) for _ in range(self._repeats))
        return self._known[rows]

    def _timed(self, rows: int) -> float:
        start = time.perf_counter()
        self._call(rows)
        self._synchronise()
        return time.perf_counter() - start

    def __call__(self, rows: float) -> float:
        low = 1
        while 2 * low <= rows:
            self._measure(low)
            low *= 2
        share = rows / low - 1
        return self._measure(low) if share <= 0 else (1 - share) * self._measure(low) + share * self._measure(2 * low)


def expected_steps(acceptance: Sequence[float], lookahead: int) -> float:
    """AR steps that a round finishes: the exact one, and each later one with the share of pilot rows that stood at its lag."""
    last = acceptance[-1] if acceptance else 0.0
    known = list(acceptance[: lookahead - 1])
    decay = last / acceptance[-2] if len(acceptance) > 1 and acceptance[-2] > 0 else last
    while len(known) < lookahead - 1:  # beyond the pilot's lags
        known.append((known[-1] if known else 1.0) * min(decay, 1.0))
    return 1 + sum(known)


def seconds_a_step(
    lookahead: int,
    inner: InnerCost,
    acceptance: Sequence[float],
    backbone: Callable,
    head: Callable,
    *,
    images: int,
    rows: float,
    steps: int,
) -> float:
    """Expected seconds an AR step of `rows` tokens takes a batch, with K = `steps` denoising steps."""
    drafted = images * rows * lookahead
    draft = inner.calls * (head(drafted * inner.rows / inner.calls) + inner.overhead)
    judged = images * rows * (lookahead - 1) * steps
    verify = judged / 4096 * head(4096) if judged > 4096 else head(judged) if judged else 0.0
    return (backbone(images * lookahead) + draft + verify) / expected_steps(acceptance, lookahead)


def choose(
    acceptance: Sequence[float],
    inner: dict[int, InnerCost],
    backbone: Callable,
    head: Callable,
    *,
    images: int,
    rows: float,
    steps: int,
    num_iter: int,
) -> tuple[int, int] | None:
    """The best (lookahead, window), or None where plain sequential sampling is as good."""
    sequential = backbone(images) + steps * head(images * rows)
    cost = lambda pair: seconds_a_step(pair[0], inner[pair[1]], acceptance, backbone, head, images=images, rows=rows, steps=steps)
    pairs = [(lookahead, window) for lookahead in LOOKAHEADS if lookahead <= num_iter for window in inner]
    best = min(pairs, key=cost)
    return best if cost(best) < MARGIN * sequential else None


def tune(
    adapter: MARAdapter,
    steps: Sequence[ARStep],
    class_vectors: torch.Tensor,
    null_vectors: torch.Tensor,
    settings: LosslessSettings,
    synchronise: Callable[[], None] = lambda: None,
) -> LosslessSettings | None:
    """The best lookahead and window for a batch like this one, or None for sequential sampling; the other settings stay.

    steps, class and null vectors (B, W): those of the batch. Costs a pilot of two images and some timed calls.
    """
    images, num_steps, device = len(class_vectors), adapter.head.num_steps, class_vectors.device
    vectors = guidance_halves(steps, class_vectors, null_vectors)  # (B, H, W)
    scale = steps[-1].guidance_scale
    rows_a_step = adapter.num_tokens / len(steps)
    tokens = torch.zeros(1, adapter.num_tokens, adapter.token_dim, device=device)
    z = adapter.conditions(tokens, torch.ones_like(tokens[..., 0]), vectors[:1])  # (1, H, N, W)
    chain = adapter.chain(z[0].transpose(0, 1), scale)  # N rows
    half_known = (torch.arange(adapter.num_tokens, device=device) % 2).float()[None]

    def backbone_call(prefixes: int) -> None:
        adapter.conditions(tokens.expand(prefixes, -1, -1), half_known.expand(prefixes, -1), vectors[:1].expand(prefixes, -1, -1))

    def head_call(rows: int) -> None:
        index = torch.arange(rows, device=device)
        chain(tokens.new_zeros(rows, adapter.token_dim), index % num_steps, index % adapter.num_tokens)

    backbone, head = CallTimes(backbone_call, synchronise), CallTimes(head_call, synchronise)

    pilot_size, trace = min(images, PILOT_IMAGES), Trace(min(images, PILOT_IMAGES))
    noise = Noise([torch.Generator().manual_seed(i) for i in range(pilot_size)], torch.arange(pilot_size, device=device))
    pilot_steps = [ARStep(step.positions[:pilot_size], step.guidance_scale) for step in steps]
    pilot = replace(settings, lookahead=min(8, len(steps)), window=12, drafter="self")
    LosslessSampler(adapter, pilot_steps, class_vectors[:pilot_size], null_vectors[:pilot_size], noise, pilot, trace).sample()
    lags = sorted(trace.accepted_by_lag)
    acceptance = [trace.accepted_by_lag[lag][0] / trace.accepted_by_lag[lag][1] for lag in lags]

    inner, size = {}, min(8, adapter.num_tokens)
    few = adapter.chain(z[0, :, :size].transpose(0, 1), scale)
    for window in WINDOWS:
        one = Noise([torch.Generator().manual_seed(0)], torch.zeros(size, dtype=torch.int64, device=device))
        counted, start = ChainTrace(), time.perf_counter()
        autospeculate(few, one.normal(adapter.token_dim), one, window=window, token_wise=settings.token_wise, trace=counted)
        synchronise()
        network = counted.calls * head(counted.rows / counted.calls)
        overhead = max(0.0, time.perf_counter() - start - network) / counted.calls
        inner[window] = InnerCost(counted.calls, counted.rows / size, overhead)

    best = choose(acceptance, inner, backbone, head, images=images, rows=rows_a_step, steps=num_steps, num_iter=len(steps))
    return None if best is None else replace(settings, lookahead=best[0], window=best[1])
