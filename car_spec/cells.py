"""Whole images of xAR, cell after cell: the sequential sampler, and the lossless one, in which every cell is autospeculated."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from car_spec.adapters.xar import CellChain, XARAdapter, guidance_of_cells
from car_spec.asd import autospeculate
from car_spec.chain import sample_chain
from car_spec.models.xar import Cache
from car_spec.noise import Noise
from car_spec.trace import Trace

# (chain of a cell, the draft network's chain of the same cell or None) -> its clean sample (B, D)
CellSampler = Callable[[CellChain, CellChain | None], torch.Tensor]


@dataclass(frozen=True)
class CellSettings:
    """Of the lossless sampler. window and taper: see `draft_lengths`; drafter: see `autospeculate`."""

    window: int = 12
    taper: float = 1.0
    token_wise: bool = False
    drafter: str = "free"


def sample_cells(
    adapter: XARAdapter,
    labels: torch.Tensor,
    guidance_scale: float,
    sample: CellSampler,
    draft: XARAdapter | None = None,
    trace: Trace | None = None,
    on_cell: Callable[[int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Labels (B,) -> images as cells (B, cells, T, channels) float32, each cell by `sample` given those before it.

    draft: a network of the same cells that is handed to `sample` with a cache of its own. on_cell(i, cells) is called after cell i,
    with zeros for what is not sampled yet.
    """
    networks = [adapter] if draft is None else [adapter, draft]
    rows = [network.with_null_rows(labels, guidance_scale) for network in networks]
    caches: list[Cache | None] = [None for _ in networks]
    images = torch.arange(len(labels), device=labels.device)
    cells: list[torch.Tensor] = []
    together = lambda: torch.stack(cells, 1).unflatten(2, adapter.cell_shape)
    for i, scale in enumerate(guidance_of_cells(guidance_scale, adapter.num_cells)):
        if cells:
            caches = [network.extend(cells[-1], own, cache) for network, own, cache in zip(networks, rows, caches)]
            if trace is not None:
                trace.count_backbone(images, len(rows[0]) // len(labels))
                trace.draft_calls += draft is not None
        chains = [network.chain(own, cache, len(labels), scale) for network, own, cache in zip(networks, rows, caches)]
        cells.append(sample(chains[0], chains[1] if draft is not None else None))
        if trace is not None:
            trace.record_round(images, torch.full_like(images, adapter.cell_shape[0]))
        if on_cell is not None:
            on_cell(i, F.pad(together(), (0, 0, 0, 0, 0, adapter.num_cells - len(cells))))
    return together()


def sequential(noise: Noise, trace: Trace | None = None) -> CellSampler:
    """One call a transition. The noise of image b comes from its own generator."""

    def sample(chain: CellChain, _draft: CellChain | None) -> torch.Tensor:
        if trace is not None:
            trace.chain.calls += chain.num_steps
            trace.chain.rows += chain.num_steps * chain.num_rows
        table = noise.normal(chain.num_steps, chain.dim)  # (B, K, D)
        return sample_chain(chain, table[:, 0], table)  # step 0 is deterministic, so its entry is free for the initial noise

    return sample


def lossless(noise: Noise, settings: CellSettings | None = None, trace: Trace | None = None) -> CellSampler:
    """The same law in fewer calls (`autospeculate`)."""
    own, counts = settings or CellSettings(), trace.chain if trace is not None else None

    def sample(chain: CellChain, draft: CellChain | None) -> torch.Tensor:
        path = autospeculate(
            chain,
            noise.normal(chain.dim),
            noise,
            window=own.window,
            taper=own.taper,
            drafter=own.drafter,
            draft_chain=draft,
            token_wise=own.token_wise,
            trace=counts,
        )
        return path.states[:, 0]

    return sample
