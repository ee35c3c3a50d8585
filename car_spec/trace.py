"""What happened in a run: sequential calls, rows, rounds, accepted lengths, gaps, seconds."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from car_spec.asd import ChainTrace


@dataclass
class Exchange:
    """What processes that share a verification sent each other, and what each of them evaluated."""

    num_ranks: int
    gathers: int = 0
    bytes: int = 0  # received by a rank from the others, padding included
    rows: list[int] = field(init=False)  # states of the head, a rank
    prefixes: list[int] = field(init=False)  # of the backbone, a rank

    def __post_init__(self):
        self.rows, self.prefixes = [0] * self.num_ranks, [0] * self.num_ranks

    def record(self, largest: int) -> None:
        """An all-gather to which every rank gives as many bytes as the largest share has."""
        if largest and self.num_ranks > 1:
            self.gathers += 1
            self.bytes += (self.num_ranks - 1) * largest


def _kept_and_seen() -> list[int]:
    return [0, 0]


@dataclass
class Trace:
    """Counts of one batch. A sequential call is one call of a network, however many rows go through it."""

    num_images: int
    num_tokens: int = 0
    backbone_calls: int = 0
    backbone_rows: int = 0
    draft_calls: int = 0  # calls of a draft network, backbone and head
    chain: ChainTrace = field(default_factory=ChainTrace)  # calls and rows of the head
    rounds: torch.Tensor = field(init=False)  # (B,)
    accepted_rows: list[list[int]] = field(init=False)  # an image: rows committed in each round
    lag: torch.Tensor = field(init=False)  # (B, N) AR steps between a token and the exact condition when it was drafted
    largest_gap: float = 0.0  # rms gap of the last transition among accepted rows
    corrections: int = 0  # rows that took the target's own last mean
    fallbacks: int = 0
    token_distances: list[float] = field(default_factory=list)  # squared distance of a draft to the target's token of the same noise
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    accepted_by_lag: dict[int, list[int]] = field(default_factory=lambda: defaultdict(_kept_and_seen))  # AR steps ahead: kept, seen
    exchange: Exchange | None = None  # where several processes share the verification

    def __post_init__(self):
        self.rounds = torch.zeros(self.num_images, dtype=torch.int64)
        self.accepted_rows = [[] for _ in range(self.num_images)]
        self.lag = torch.zeros(self.num_images, self.num_tokens, dtype=torch.int64)

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def count_backbone(self, prefixes: torch.Tensor, halves: int) -> None:
        self.backbone_calls += 1
        self.backbone_rows += len(prefixes) * halves

    def record_round(self, image: torch.Tensor, committed: torch.Tensor) -> None:
        for i, count in zip(image.tolist(), committed.tolist()):
            self.rounds[i] += 1
            self.accepted_rows[i].append(count)

    def record_lag(self, image: torch.Tensor, position: torch.Tensor, ahead: torch.Tensor) -> None:
        if self.num_tokens:
            self.lag[image.cpu(), position.cpu()] = ahead.cpu()

    def record_verification(self, ahead: torch.Tensor, stands: torch.Tensor, gap: torch.Tensor, corrections: int, fallbacks: int) -> None:
        """S speculative rows: AR steps ahead of the exact condition, whether the row stands as drafted, rms gap of its last mean."""
        self.fallbacks += fallbacks
        self.corrections += corrections
        self.record_acceptance(ahead, stands)
        if stands.any():
            self.largest_gap = max(self.largest_gap, gap[stands].max().item())

    def record_acceptance(self, ahead: torch.Tensor, stands: torch.Tensor) -> None:
        for lag, kept in zip(ahead.tolist(), stands.tolist()):
            self.accepted_by_lag[lag][0] += kept
            self.accepted_by_lag[lag][1] += 1

    @property
    def sequential_calls(self) -> int:
        return self.backbone_calls + self.draft_calls + self.chain.calls


def summary(traces: Sequence[Trace]) -> dict[str, float]:
    """Of the batches of a run: averages a batch for calls, an image for rounds and rows; the worst for gaps."""
    batches, images = len(traces), sum(trace.num_images for trace in traces)
    rounds = sum(int(trace.rounds.sum()) for trace in traces)
    kept = sum(sum(rows) for trace in traces for rows in trace.accepted_rows)
    return {
        "images": images,
        "sequential calls a batch": sum(trace.sequential_calls for trace in traces) / batches,
        "backbone calls a batch": sum(trace.backbone_calls for trace in traces) / batches,
        "draft network calls a batch": sum(trace.draft_calls for trace in traces) / batches,
        "head calls a batch": sum(trace.chain.calls for trace in traces) / batches,
        "backbone rows an image": sum(trace.backbone_rows for trace in traces) / images,
        "head rows an image": sum(trace.chain.rows for trace in traces) / images,
        "rounds an image": rounds / images,
        "tokens a round": kept / rounds,
        "largest last-step gap": max(trace.largest_gap for trace in traces),
        "corrected last steps": sum(trace.corrections for trace in traces),
        "fallbacks": sum(trace.fallbacks + trace.chain.fallbacks for trace in traces),
    } | _distance([distance for trace in traces for distance in trace.token_distances])


def exchanged(traces: Sequence[Trace]) -> dict[str, Any]:
    """What shared verifications sent, and what each rank of a group evaluated: averages a batch and a round of a batch; {} without any."""
    known = [trace.exchange for trace in traces if trace.exchange is not None]
    if not known:
        return {}
    rounds = sum(int(trace.rounds.max()) for trace in traces if trace.exchange is not None)
    total = lambda name: [sum(values) for values in zip(*(getattr(exchange, name) for exchange in known))]
    return {
        "processes a verification": known[0].num_ranks,
        "all-gathers a batch": sum(exchange.gathers for exchange in known) / len(known),
        "bytes received a rank and round": sum(exchange.bytes for exchange in known) / rounds,
        "head rows of each rank": total("rows"),
        "prefixes of each rank": total("prefixes"),
    }


def _distance(distances: Sequence[float]) -> dict[str, float]:
    return {"squared distance of drafts to the target's tokens": sum(distances) / len(distances)} if distances else {}


def report(traces: Sequence[Trace]) -> dict[str, Any]:
    """The summary with its distributions: how many rounds an image took, how often a round accepted how much, acceptance by lag."""
    by_lag: dict[int, list[int]] = defaultdict(_kept_and_seen)
    seconds: dict[str, float] = defaultdict(float)
    for trace in traces:
        for lag, (kept, seen) in trace.accepted_by_lag.items():
            by_lag[lag] = [by_lag[lag][0] + kept, by_lag[lag][1] + seen]
        for phase, spent in trace.seconds.items():
            seconds[phase] += spent
    return summary(traces) | {
        "rounds of each image": [int(rounds) for trace in traces for rounds in trace.rounds],
        "tokens a round, histogram": _histogram(count for trace in traces for rows in trace.accepted_rows for count in rows),
        "denoising steps accepted at once, histogram": _histogram(count for trace in traces for count in trace.chain.accepted),
        "acceptance by AR steps ahead": {lag: round(kept / seen, 4) for lag, (kept, seen) in sorted(by_lag.items())},
        "seconds by phase": {phase: round(spent, 3) for phase, spent in seconds.items()},
        **exchanged(traces),
    }


def _histogram(counts: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(counts).items()))
