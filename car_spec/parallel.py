"""Many processes, started by torchrun: images divided among them, and the rows of a verification.

Every process that takes part in a verification runs the same sampler on the same random numbers and holds the same state (SPMD). The
networks' calls are what it divides: each process evaluates its share of the rows, or of the prefixes, and an all-gather gives all
of them everything. So a sampler does not know that it is not alone, and no process serves another.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from car_spec.chain import Prediction, Steps
from car_spec.gaussian import Gaussian
from car_spec.trace import Exchange, Trace

MODES = ("images", "verification", "both")
BACKENDS = "cpu:gloo,cuda:nccl"
PATIENCE = timedelta(days=1)  # a process may wait hours for the others' last images; one that is gone is noticed at once
MEETING = timedelta(minutes=10)  # until all processes are there
FAILURE = "car_spec/failure"
T = TypeVar("T")


class RankError(RuntimeError):
    """Another process of the run failed; the message is its own."""


@dataclass(frozen=True)
class Ranks:
    """Processes that act together, as seen by one of them. Without torchrun there is one, and nothing is ever sent."""

    rank: int = 0
    size: int = 1
    first: int = 0  # rank in the whole run of this group's rank 0
    group: Any = None
    store: Any = None  # where a process that fails leaves its message

    def once(self, call: Callable[[], T]) -> T:
        """Rank 0 calls, all get its result or its error."""
        if self.size == 1:
            return call()
        answer: list[Any] = [None, None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                answer[0] = call()
            except Exception as caught:
                error, answer[1] = caught, f"rank {self.first} failed: {caught}"
        self._together(lambda: dist.broadcast_object_list(answer, src=self.first, group=self.group))
        if error is not None:
            raise error
        if answer[1] is not None:
            raise RankError(answer[1])
        return answer[0]

    def gather_objects(self, value: T) -> list[T]:
        """The value of every rank, on all ranks; waits for all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._together(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """own (counts[rank], ...), counts known to all -> the rows of all ranks in their order, bit by bit."""
        longest = max(counts)
        if self.size == 1 or longest == 0:
            return own
        rows = own.flatten(1).contiguous().view(torch.uint8)  # (m, bytes): every backend carries bytes
        padded = rows.new_zeros(longest, rows.shape[1])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        self._together(lambda: dist.all_gather(parts, padded, group=self.group))
        return torch.cat([part[:count] for part, count in zip(parts, counts)]).view(own.dtype).view(-1, *own.shape[1:])

    def divide(self, parts: int) -> "Ranks":
        """The group of this process when the ranks are divided evenly into so many, neighbours together."""
        size = self.size // parts
        if self.size % parts:
            raise ValueError(f"{self.size} processes cannot be divided into {parts} groups")
        if parts == 1:
            return self
        if size == 1:
            return Ranks(0, 1, self.rank, None, self.store)
        groups = [dist.new_group(list(range(i * size, (i + 1) * size)), timeout=PATIENCE) for i in range(parts)]
        return Ranks(self.rank % size, size, self.rank // size * size, groups[self.rank // size], self.store)

    def require_equal(self, what: dict[str, Any]) -> None:
        """Raise RankError where ranks differ, with the two values."""
        values = self.gather_objects(what)
        for rank, other in enumerate(values):
            for name in what:
                if other[name] != values[0][name]:
                    raise RankError(f"rank {rank} has {name} {other[name]}, rank 0 has {values[0][name]}: they cannot hold the same state")

    def check(self) -> None:
        """Raise RankError if a process of the run has failed meanwhile."""
        if self.store is not None and self.store.check([FAILURE]):
            raise RankError(self.store.get(FAILURE).decode())

    def _together(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            self._wait_for_message()
            raise RankError(f"another process is gone: {str(error).splitlines()[0]}") from None

    def _wait_for_message(self) -> None:
        """A peer that fails leaves its message before it closes its connections; where it was killed there is none."""
        try:
            self.store.wait([FAILURE], timedelta(seconds=2))
        except Exception:  # no message, or its keeper is gone as well
            return
        self.check()


@contextmanager
def started_by_torchrun(device: torch.device) -> Iterator[Ranks]:
    """All processes of the run; one that leaves by an exception tells the others why."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, size = next(dist.rendezvous("env://", timeout=MEETING))
    dist.init_process_group(BACKENDS if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield Ranks(rank, size, 0, dist.group.WORLD, store)
    except BaseException as error:
        if not isinstance(error, RankError):
            store.set(FAILURE, f"rank {rank} failed: {str(error) or type(error).__name__}")
        raise
    finally:
        dist.destroy_process_group()


def groups_of(mode: str, num_ranks: int, num_batches: int) -> int:
    """How many groups the ranks form; a group makes one batch at a time and divides its verification.

    images: every rank is a group. verification: all are one. both: as many groups as have a batch to make.
    """
    if mode not in MODES:
        raise ValueError(f"parallel {mode!r} is none of {', '.join(MODES)}")
    if mode == "images":
        return num_ranks
    most = 1 if mode == "verification" else num_batches
    return max(parts for parts in range(1, num_ranks + 1) if num_ranks % parts == 0 and parts <= max(most, 1))


class Shares:
    """A verification batch in `count` shares, each evaluated by a call of its own; every rank has as many of them.

    Float32 roundings depend on the size of a call. A run with as many shares therefore gives the same bits however many processes
    (of one kind of device) evaluate them.
    """

    def __init__(self, ranks: Ranks, count: int | None = None):
        self.ranks, self.count = ranks, ranks.size if count is None else count
        if self.count < 1 or self.count % ranks.size:
            raise ValueError(f"--shares {self.count} cannot be divided among the {ranks.size} processes of a verification")

    def even(self, total: int) -> list[int]:
        """Where the shares of `total` rows begin, and the end."""
        return [total * i // self.count for i in range(self.count + 1)]

    def evaluate(
        self, bounds: Sequence[int], call: Callable[[int, int, int], torch.Tensor], empty: torch.Tensor, exchange: Exchange
    ) -> tuple[torch.Tensor, list[int]]:
        """call(share, start, stop) -> (stop - start, ...) for every share that is not empty, here or elsewhere.

        -> all rows, and how many each rank evaluated. empty (0, ...): shape and dtype of a row.
        """
        each = self.count // self.ranks.size
        mine = range(self.ranks.rank * each, (self.ranks.rank + 1) * each)
        parts = [call(i, bounds[i], bounds[i + 1]).to(empty.dtype) for i in mine if bounds[i] < bounds[i + 1]]
        by_rank = [stop - start for start, stop in pairwise(bounds[::each])]
        exchange.record(max(by_rank) * math.prod(empty.shape[1:]) * empty.element_size())
        return self.ranks.gather(torch.cat(parts) if parts else empty, by_rank), by_rank

    def require_agreement(self, values: torch.Tensor, what: str = "tokens") -> None:
        """Raise RankError unless all ranks hold the same bits: a sampler that has parted from the others must not write images."""
        digest = hashlib.sha256(values.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]
        self.ranks.require_equal({f"{what} with the digest": digest})

    def adapter(self, adapter: Any, trace: Trace) -> Any:
        """MAR's or Harmon's adapter with its prefixes and rows divided."""
        return _SharedAdapter(adapter, self, self._exchange(trace))

    def cells(self, adapter: Any, trace: Trace) -> Any:
        """xAR's adapter with the states of a call divided."""
        return _SharedCells(adapter, self, self._exchange(trace))

    def images(self, chain: Any) -> Any:
        """A chain of whole images with the states of a call divided."""
        return _StateShares(chain, self, Exchange(self.ranks.size))

    def _exchange(self, trace: Trace) -> Exchange:
        if trace.exchange is None:
            trace.exchange = Exchange(self.ranks.size)
        return trace.exchange


class _Shared:
    """What is not divided is asked of the one inside."""

    def __init__(self, inside: Any, shares: Shares, exchange: Exchange):
        self.inside, self.shares, self.exchange = inside, shares, exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)


class _SharedAdapter(_Shared):
    def conditions(self, tokens: torch.Tensor, mask: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """(P, H, N, W), as the adapter's own."""
        empty = tokens.new_zeros(0, vectors.shape[1], self.num_tokens, self.condition_dim, dtype=self.dtype)
        call = lambda _, start, stop: self.inside.conditions(tokens[start:stop], mask[start:stop], vectors[start:stop])
        z, by_rank = self.shares.evaluate(self.shares.even(len(tokens)), call, empty, self.exchange)
        self.exchange.prefixes = [known + new for known, new in zip(self.exchange.prefixes, by_rank)]
        return z

    def chain(self, conditions: torch.Tensor, guidance_scale: float | torch.Tensor = 1.0) -> Any:
        return _RowShares(self, conditions, guidance_scale)


class _Chain(_Shared):
    def predict(self, y: torch.Tensor, k: Steps, rows: torch.Tensor | None = None) -> Prediction:
        raise NotImplementedError

    def __call__(self, y: torch.Tensor, k: Steps, rows: torch.Tensor | None = None) -> Gaussian:
        return self.inside.transition(self.predict(y, k, rows), y, k)

    def _evaluate(self, bounds: Sequence[int], y: torch.Tensor, call: Callable[[int, int, int], Prediction]) -> Prediction:
        """Centre and fraction travel side by side; where the std is known there is no fraction."""
        sizes = [y.shape[-1], 0 if self.equal_std else y.shape[-1]]
        empty = y.new_zeros(0, *y.shape[1:-1], sum(sizes))
        together = lambda *share: torch.cat(call(*share), -1)
        said, by_rank = self.shares.evaluate(bounds, together, empty, self.exchange)
        each = math.prod(y.shape[1:-1])  # rows at each of S steps, where steps are divided
        self.exchange.rows = [known + each * new for known, new in zip(self.exchange.rows, by_rank)]
        return Prediction(*said.split(sizes, -1))


class _RowShares(_Chain):
    """A chain whose rows are divided, so that what is taken out of its loop is prepared for a rank's own rows only."""

    def __init__(self, adapter: _SharedAdapter, conditions: torch.Tensor, guidance_scale: float | torch.Tensor):
        super().__init__(adapter.inside.chain(conditions, guidance_scale), adapter.shares, adapter.exchange)
        self.adapter, self.conditions, self.scale = adapter.inside, conditions, guidance_scale
        self.of_rows = self.shares.even(len(conditions))
        self.chains: dict[int, Any] = {}

    def _share(self, i: int) -> Any:
        if i not in self.chains:
            span = slice(self.of_rows[i], self.of_rows[i + 1])
            scale = self.scale[span] if isinstance(self.scale, torch.Tensor) else self.scale
            self.chains[i] = self.adapter.chain(self.conditions[span], scale)
        return self.chains[i]

    def predict(self, y: torch.Tensor, k: Steps, rows: torch.Tensor | None = None) -> Prediction:
        """As the chain's own; rows (M,) ascend."""
        if isinstance(k, torch.Tensor) and k.dim() == 2:  # all rows at each of S steps, used once: the steps are divided
            return self._evaluate(self.shares.even(len(k)), y, lambda _, start, stop: self.inside.predict(y[start:stop], k[start:stop]))
        first = self.of_rows
        step = lambda start, stop: k if isinstance(k, int) else k[start:stop]
        if rows is None:
            return self._evaluate(first, y, lambda i, start, stop: self._share(i).predict(y[start:stop], step(start, stop)))
        bounds = torch.searchsorted(rows, torch.tensor(first, device=rows.device)).tolist()
        call = lambda i, start, stop: self._share(i).predict(y[start:stop], step(start, stop), rows[start:stop] - first[i])
        return self._evaluate(bounds, y, call)


class _SharedCells(_Shared):
    def chain(self, *arguments: Any) -> Any:
        return _StateShares(self.inside.chain(*arguments), self.shares, self.exchange)


class _StateShares(_Chain):
    """A chain of cells or of whole images: few rows with many states each, so the states are divided, also those of one row."""

    def predict(self, y: torch.Tensor, k: Steps, rows: torch.Tensor | None = None) -> Prediction:
        """As the chain's own; rows (M,) ascend, or are all."""
        rows = torch.arange(len(y), device=y.device) if rows is None else rows
        step = lambda start, stop: k if isinstance(k, int) else k[start:stop]
        call = lambda _, start, stop: self.inside.predict(y[start:stop], step(start, stop), rows[start:stop])
        return self._evaluate(self.shares.even(len(y)), y, call)
