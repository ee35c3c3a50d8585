"""`lookahead="auto"`: which settings finish a batch soonest here, from measured call times and the acceptance of a pilot.

Speculation trades sequential calls for rows. What that is worth depends on how the time of a call grows with its rows, which no
table knows: it is measured. The choice is made once, before sampling, and only from a pilot with its own noise, so that the
chosen numbers can be written down and an image stays a function of settings and seed.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from car_spec.adapters.mar import ARStep, MARAdapter
from car_spec.asd import ChainTrace, autospeculate
from car_spec.chain import DiffusionChain, sample_chain
from car_spec.engine import LosslessSampler, LosslessSettings
from car_spec.noise import Noise
from car_spec.sequential import guidance_halves
from car_spec.trace import Trace

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
WINDOWS = (8, 12, 16, 24, 32)
PILOT_IMAGES = 2
MARGIN = 0.9  # speculation has to promise this share of the sequential time, or it is not worth its risk


@dataclass(frozen=True)
class InnerCost:
    """Autospeculation of a row with one window: calls of a group of rows, rows evaluated for each of them."""

    calls: float
    rows: float


@dataclass(frozen=True)
class Times:
    """Seconds, as functions of a number of rows (prefixes for the backbone)."""

    backbone: Callable[[float], float]
    head: Callable[[float], float]  # one call inside autospeculation
    prepare: Callable[[float], float]  # a chain, with what it takes out of its loop
    judge: Callable[[float], float]  # the law of every transition of the rows, once
    sequential: Callable[[float], float]  # the rows sampled sequentially
    overhead: float = 0.0  # of one round of autospeculation, beyond the head's call


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
                self._timed(rows)  # the first call of a size is slower than those that follow
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


@dataclass(frozen=True)
class Link:
    """Between the processes that share a verification."""

    bandwidth: float  # bytes a second, into a process
    latency: float  # seconds of an all-gather of nothing

    def gather(self, ranks: int, total: float) -> float:
        """Seconds of an all-gather of `total` bytes, those of all ranks together."""
        return self.latency + total * (ranks - 1) / ranks / self.bandwidth if ranks > 1 else 0.0


def divided(times: Times, ranks: int, link: Link, *, prefix_bytes: float, row_bytes: float, num_steps: int) -> Times:
    """The same calls when `ranks` processes divide their rows evenly and gather what comes out (`parallel.py`).

    The sampler's own work (`overhead`) is done by every rank, and sequential sampling by one. prefix_bytes, row_bytes: sent for a
    prefix of the backbone and for a state of the head.
    """
    share = lambda rows: max(1.0, rows / ranks)
    return Times(
        backbone=lambda prefixes: times.backbone(math.ceil(prefixes / ranks)) + link.gather(ranks, prefixes * prefix_bytes),
        head=lambda rows: times.head(share(rows)) + link.gather(ranks, rows * row_bytes),
        prepare=lambda rows: times.prepare(share(rows)),
        judge=lambda rows: times.judge(rows / ranks) + link.gather(ranks, rows * num_steps * row_bytes),
        sequential=times.sequential,
        overhead=times.overhead,
    )


def expected_steps(acceptance: Sequence[float], lookahead: int) -> float:
    """AR steps that a round finishes: the exact one, and each later one with the share of pilot rows that stood at its lag."""
    known = list(acceptance[: lookahead - 1])
    ratio = acceptance[-1] ** (1 / len(acceptance)) if acceptance else 0.0  # a step, beyond the pilot's lags
    while len(known) < lookahead - 1:
        known.append((known[-1] if known else 1.0) * ratio)
    return 1 + sum(known)


def seconds_a_step(lookahead: int, inner: InnerCost, acceptance: Sequence[float], times: Times, *, images: int, rows: float) -> float:
    """Expected seconds that a batch takes for an AR step of `rows` tokens."""
    drafted = images * rows * lookahead
    draft = times.prepare(drafted) + inner.calls * (times.head(drafted * inner.rows / inner.calls) + times.overhead)
    judged = images * rows * (lookahead - 1)
    verify = times.judge(judged) if judged else 0.0
    return (times.backbone(images * lookahead) + draft + verify) / expected_steps(acceptance, lookahead)


def choose(
    acceptance: Sequence[float], inner: dict[int, InnerCost], times: Times, *, images: int, rows: float, num_iter: int
) -> tuple[int, int] | None:
    """The best (lookahead, window), or None where plain sequential sampling is as good."""
    sequential = times.backbone(images) + times.sequential(images * rows)
    cost = lambda pair: seconds_a_step(pair[0], inner[pair[1]], acceptance, times, images=images, rows=rows)
    best = min(((lookahead, window) for lookahead in LOOKAHEADS if lookahead <= num_iter for window in inner), key=cost)
    return best if cost(best) < MARGIN * sequential else None


def tune(
    adapter: MARAdapter,
    steps: Sequence[ARStep],
    class_vectors: torch.Tensor,
    null_vectors: torch.Tensor,
    settings: LosslessSettings,
    images: int,
    windows: Sequence[int] = WINDOWS,
    synchronise: Callable[[], None] = lambda: None,
) -> LosslessSettings | None:
    """The best lookahead and window for batches of `images`, or None for sequential sampling; the other settings stay.

    steps, class and null vectors (B, W): those of a pilot batch, which is sampled to see what is accepted. Then some calls are timed.
    """
    pilot_size, num_steps, device = len(class_vectors), adapter.head.num_steps, class_vectors.device
    trace = Trace(pilot_size)
    noise = Noise([torch.Generator().manual_seed(i) for i in range(pilot_size)], torch.arange(pilot_size, device=device))
    pilot = replace(settings, lookahead=min(8, len(steps)))
    LosslessSampler(adapter, steps, class_vectors, null_vectors, noise, pilot, trace).sample()
    acceptance = [kept / seen for _, (kept, seen) in sorted(trace.accepted_by_lag.items())]

    vectors = guidance_halves(steps, class_vectors, null_vectors)[:1]  # (1, H, W)
    tokens = torch.zeros(1, adapter.num_tokens, adapter.token_dim, device=device)
    z = adapter.conditions(tokens, torch.ones_like(tokens[..., 0]), vectors)[0].transpose(0, 1)  # (N, H, W)
    half_known = (torch.arange(adapter.num_tokens, device=device) % 2).float()[None]
    every_step = torch.arange(num_steps, device=device)[:, None]

    def chain_of(rows: int) -> DiffusionChain:
        return adapter.chain(z[torch.arange(rows, device=device) % len(z)], steps[-1].guidance_scale)

    def backbone_call(prefixes: int) -> None:
        adapter.conditions(tokens.expand(prefixes, -1, -1), half_known.expand(prefixes, -1), vectors.expand(prefixes, -1, -1))

    rows_a_step = adapter.num_tokens / len(steps)
    group = min(len(z), round(4 * images * rows_a_step))  # rows that autospeculate together
    few = chain_of(group)

    def head_call(rows: int) -> None:
        index = torch.arange(rows, device=device)
        few(tokens.new_zeros(rows, adapter.token_dim), index % num_steps, index % group)

    def sequential_call(rows: int) -> None:
        noise = tokens.new_zeros(rows, num_steps, adapter.token_dim)
        sample_chain(chain_of(rows), noise[:, 0], noise)

    def inner_call(window: int) -> tuple[ChainTrace, float]:
        one = Noise([torch.Generator().manual_seed(0)], torch.zeros(group, dtype=torch.int64, device=device))
        counted, start = ChainTrace(), time.perf_counter()
        y, taper, token_wise = one.normal(adapter.token_dim), settings.taper, settings.token_wise
        autospeculate(few, y, one, window=window, taper=taper, token_wise=token_wise, trace=counted)
        synchronise()
        return counted, time.perf_counter() - start

    measured = lambda call: CallTimes(call, synchronise)
    times = Times(
        backbone=measured(backbone_call),
        head=measured(head_call),
        prepare=measured(lambda rows: chain_of(rows).hoisted),
        judge=measured(lambda rows: chain_of(rows)(tokens.new_zeros(num_steps, rows, adapter.token_dim), every_step)),
        sequential=measured(sequential_call),
    )
    inner, overheads = {}, []
    for window in windows:
        counted, seconds = inner_call(window)
        inner[window] = InnerCost(counted.calls, counted.rows / group)
        overheads.append(max(0.0, seconds / counted.calls - times.head(counted.rows / counted.calls)))
    times = replace(times, overhead=statistics.median(overheads))
    best = choose(acceptance, inner, times, images=images, rows=rows_a_step, num_iter=len(steps))
    return None if best is None else replace(settings, lookahead=best[0], window=best[1])
