"""xAR behind the samplers: the chain of a cell, the guidance of each cell, and whole images cell after cell.

A row is a cell: its state is the T tokens of the cell, flattened to D = T x channels numbers. The sampler is Euler-Maruyama on a
fixed grid of times, so the std of every transition is known beforehand and the same for draft and target.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from car_spec.asd import PredictiveChain
from car_spec.chain import Prediction
from car_spec.gaussian import Gaussian
from car_spec.models.xar import XAR, Cache

LAST_TIME = 0.04  # the last transition leads from here to 0 and has no noise


@dataclass(frozen=True)
class FlowSchedule:
    """Coefficients of every transition, float64 on the host; index k leads from time t_k to t_{k-1}, and 0 to the clean sample.

    Of x_t = (1 - t) clean + t noise with diffusion coefficient 2 t, backwards in time (Ren et al. 2025): with velocity v and
    dt = t_{k-1} - t_k < 0, mean = x + ((2 - t) v + x) dt and std = sqrt(2 t |dt|). In the clean sample x - t v that the velocity
    implies, mean = decay x + gain (x - t v).
    """

    times: torch.Tensor  # (K,)
    decay: torch.Tensor  # (K,) 1 + 2 dt / t
    gain: torch.Tensor  # (K,) (2 - t) |dt| / t
    log_std: torch.Tensor  # (K,), -inf at k = 0

    @property
    def num_steps(self) -> int:
        return len(self.times)


def flow_schedule(num_steps: int) -> FlowSchedule:
    """The grid of `num_steps` (2 or more) times from 1 down to LAST_TIME, evenly spaced."""
    if num_steps < 2:
        raise ValueError(f"num_inference_steps {num_steps} is below 2")
    times = torch.linspace(1.0, LAST_TIME, num_steps, dtype=torch.float64).flip(0)
    dt = torch.cat([-times[:1], times[:-1] - times[1:]])
    log_std = 0.5 * (2 * times * -dt).log()
    log_std[0] = -math.inf
    return FlowSchedule(times, 1 + 2 * dt / times, (2 - times) * -dt / times, log_std)


def guidance_of_cells(guidance_scale: float, num_cells: int) -> list[float]:
    """From 1 at the first cell linearly to the whole scale at the last; below 1 there is no guidance, which 1 stands for."""
    return [max(1.0, 1 + (guidance_scale - 1) * c / max(1, num_cells - 1)) for c in range(num_cells)]


class XARAdapter:
    """Binds an xAR network to a grid of times. Rows of labels are those of the images, and with guidance the same count of null rows."""

    def __init__(self, model: XAR, *, num_inference_steps: int = 50):
        self.model, self.schedule = model, flow_schedule(num_inference_steps)
        config = model.config
        self.num_cells, self.cell_shape = config.num_cells, (config.tokens_per_cell, config.token_dim)
        self.cell_dim = math.prod(self.cell_shape)
        weight = model.z_proj.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.time = model.embed_times(self.schedule.times.float().to(weight.device))  # (K, W)
        columns = (self.schedule.times, self.schedule.decay, self.schedule.gain, self.schedule.log_std)
        self.columns = torch.stack(columns, 1).float().to(weight.device)  # (K, 4)

    def with_null_rows(self, labels: torch.Tensor, guidance_scale: float) -> torch.Tensor:
        """Labels (B,) -> (H B,), H = 2 where some cell is guided. Scale 1 never doubles the batch."""
        if guidance_scale <= 1 or self.num_cells == 1:
            return labels
        return torch.cat([labels, torch.full_like(labels, self.model.null_class)])

    def extend(self, cell: torch.Tensor, labels: torch.Tensor, cache: Cache | None) -> Cache | None:
        """A finished cell (B, D) joins the cache of all rows (H B), in one call at time 0."""
        x = cell.to(self.dtype).view(-1, 1, *self.cell_shape).repeat(len(labels) // len(cell), 1, 1, 1)
        conditions = self.model.conditions(labels, x.new_zeros(len(labels), 1))
        return self.model.velocity(x, conditions, cache, keep=1)[1]

    def chain(self, labels: torch.Tensor, cache: Cache | None, num_rows: int, guidance_scale: float = 1.0) -> "CellChain":
        """The chain of the next cell of `num_rows` images, given the cache of (H B) rows of the cells before it."""
        used = num_rows if guidance_scale <= 1 else 2 * num_rows
        return CellChain(self, self.model.class_emb(labels[:used]), cache.first(used) if cache is not None else None, guidance_scale)


class CellChain:
    """The chain of one cell of R images. Only one call of the whole network a transition; the cache of earlier cells stays as it is.

    class_vectors (R, W), or with guidance (2 R, W) and the null rows behind; the cache has as many rows.
    """

    equal_std = True

    def __init__(self, adapter: XARAdapter, class_vectors: torch.Tensor, cache: Cache | None, guidance_scale: float):
        self.adapter, self.class_vectors, self.cache, self.scale = adapter, class_vectors, cache, guidance_scale
        self.guided = guidance_scale > 1
        self.num_rows = len(class_vectors) // (2 if self.guided else 1)
        self.num_steps = adapter.schedule.num_steps
        self.decay = adapter.columns[:, 1]

    def predict(self, y: torch.Tensor, k: int | torch.Tensor, rows: torch.Tensor | None = None) -> Prediction:
        """One network call at y = y_{k+1} (M, D); several states of a row share its part of the cache."""
        adapter = self.adapter
        x = y.to(adapter.dtype).view(-1, 1, *adapter.cell_shape)
        owner = rows
        if self.guided:
            x = torch.cat([x, x])
            owner = torch.cat([rows, rows + self.num_rows]) if rows is not None else None
        time = adapter.time[k]  # (W,) or (M, W)
        if time.dim() == 2 and self.guided:
            time = torch.cat([time, time])
        conditions = (self.class_vectors if owner is None else self.class_vectors[owner]) + time
        v = adapter.model.velocity(x, conditions[:, None], self.cache, owner)[0].flatten(1).float()
        if self.guided:
            v, v_null = v.chunk(2)
            v = v_null + self.scale * (v - v_null)
        return Prediction(y - adapter.columns[k, 0, None] * v, y.new_zeros(len(y), 0))  # the std is known: nothing of it to re-use

    def transition(self, prediction: Prediction, y: torch.Tensor, k: int | torch.Tensor) -> Gaussian:
        """The law of y_k given y = y_{k+1} (M, D) and the clean sample that is predicted, or re-used."""
        _, decay, gain, log_std = self.adapter.columns[k][..., None].unbind(-2)  # (*k.shape, 1) each
        mean = decay * y + gain * prediction.x_0
        return Gaussian(mean, log_std.expand_as(mean))

    def __call__(self, y: torch.Tensor, k: int | torch.Tensor, rows: torch.Tensor | None = None) -> Gaussian:
        return self.transition(self.predict(y, k, rows), y, k)


# (chain of the cell, the draft network's chain of the same cell or None) -> its clean sample (B, D)
CellSampler = Callable[[CellChain, PredictiveChain | None], torch.Tensor]


def sample_cells(
    adapter: XARAdapter, labels: torch.Tensor, guidance_scale: float, sample: CellSampler, draft: XARAdapter | None = None
) -> torch.Tensor:
    """Labels (B,) -> images as cells (B, cells, T, channels) float32, each cell by `sample` given those before it.

    draft: a network of the same cells that is handed to `sample` with a cache of its own.
    """
    networks = [adapter] if draft is None else [adapter, draft]
    rows = [network.with_null_rows(labels, guidance_scale) for network in networks]
    caches: list[Cache | None] = [None for _ in networks]
    cells: list[torch.Tensor] = []
    for scale in guidance_of_cells(guidance_scale, adapter.num_cells):
        if cells:
            caches = [network.extend(cells[-1], own, cache) for network, own, cache in zip(networks, rows, caches)]
        chains = [network.chain(own, cache, len(labels), scale) for network, own, cache in zip(networks, rows, caches)]
        cells.append(sample(chains[0], chains[1] if draft is not None else None))
    return torch.stack(cells, 1).unflatten(2, adapter.cell_shape)
