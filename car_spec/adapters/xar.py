"""xAR behind the samplers: the chain of a cell, and the guidance of each cell.

A row is a cell: its state is the T tokens of the cell, flattened to D = T x channels numbers. The sampler is Euler-Maruyama on a
fixed grid of times, so the std of every transition is known beforehand and the same for draft and target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from car_spec.chain import Prediction
from car_spec.gaussian import Gaussian
from car_spec.models.xar import XAR, Cache

LAST_TIME = 0.04  # the last transition leads from here to 0 and has no noise
LAST_LOG_STD = 0.5 * math.log(2 * LAST_TIME**2)  # what its formula, sqrt(2 t |dt|), says all the same
SPREAD = 0.3  # in latent stds; see `FlowSchedule`


@dataclass(frozen=True)
class FlowSchedule:
    """Coefficients of every transition, float64 on the host; index k leads from time t_k to t_{k-1}, and 0 to the clean sample.

    Of x_t = (1 - t) clean + t noise with diffusion coefficient 2 t, backwards in time (Ren et al. 2025): with velocity v and
    dt = t_{k-1} - t_k < 0, mean = x + ((2 - t) v + x) dt and std = sqrt(2 t |dt|).

    What the network says at one state is re-used at the next as a `centre`. If clean samples had, given all that is known, mean c and
    std s, the best guess of the clean sample would be x - t v = c + share (x - (1 - t) c) with share = s^2 (1 - t) / (s^2 (1 - t)^2 + t^2):
    it follows the state, c does not. Any s leaves the transition as it is and concerns drafts only; s = 0 re-uses the clean sample itself.
    """

    times: torch.Tensor  # (K,)
    of_state: torch.Tensor  # (K,) centre = of_state x - of_velocity v
    of_velocity: torch.Tensor  # (K,)
    decay: torch.Tensor  # (K,) mean = decay x + gain centre
    gain: torch.Tensor  # (K,)
    log_std: torch.Tensor  # (K,), -inf at k = 0

    @property
    def num_steps(self) -> int:
        return len(self.times)


def flow_schedule(num_steps: int, spread: float = SPREAD) -> FlowSchedule:
    """The grid of `num_steps` (2 or more) times from 1 down to LAST_TIME, evenly spaced."""
    if num_steps < 2:
        raise ValueError(f"num_inference_steps {num_steps} is below 2")
    times = torch.linspace(1.0, LAST_TIME, num_steps, dtype=torch.float64).flip(0)
    dt = torch.cat([-times[:1], times[:-1] - times[1:]])
    share = spread**2 * (1 - times) / (spread**2 * (1 - times) ** 2 + times**2)
    of_state, of_velocity = (1 - share) / (1 - share * (1 - times)), times / (1 - share * (1 - times))
    log_std = 0.5 * (2 * times * -dt).log()
    log_std[0] = -math.inf
    per_velocity = (2 - times) * dt / of_velocity  # the velocity is (of_state x - centre) / of_velocity
    return FlowSchedule(times, of_state, of_velocity, 1 + dt + per_velocity * of_state, -per_velocity, log_std)


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
        s = self.schedule
        columns = torch.stack([s.of_state, s.of_velocity, s.decay, s.gain, s.log_std], 1)
        self.columns = columns.float().to(weight.device)  # (K, 5)

    def coefficients(self, k: int | torch.Tensor) -> tuple[torch.Tensor, ...]:
        """of_state, of_velocity, decay, gain and log_std at k, each (*k.shape, 1)."""
        return self.columns[k].split(1, -1)

    def with_null_rows(self, labels: torch.Tensor, guidance_scale: float) -> torch.Tensor:
        """Labels (B,) -> (H B,), H = 2 where some cell is guided. Scale 1 never doubles the batch."""
        if guidance_scale <= 1 or self.num_cells == 1:
            return labels
        return torch.cat([labels, torch.full_like(labels, self.model.null_class)])

    def extend(self, cells: torch.Tensor, labels: torch.Tensor, cache: Cache | None) -> Cache | None:
        """Finished cells (B, D), or m of them (B, m, T, channels), join the cache of all rows (H B), in one call at time 0."""
        x = cells.to(self.dtype).reshape(len(cells), -1, *self.cell_shape).repeat(len(labels) // len(cells), 1, 1, 1)
        conditions = self.model.conditions(labels, x.new_zeros(x.shape[:2]))
        return self.model.velocity(x, conditions, cache, keep=x.shape[1])[1]

    def chain(self, labels: torch.Tensor, cache: Cache | None, num_rows: int, guidance_scale: float = 1.0) -> "CellChain":
        """The chain of the next cell of `num_rows` images, given the cache of (H B) rows of the cells before it."""
        used = num_rows if guidance_scale <= 1 else 2 * num_rows
        return CellChain(self, self.model.class_emb(labels[:used]), cache.first(used) if cache is not None else None, guidance_scale)

    def window(self, labels: torch.Tensor, cache: Cache | None, num_images: int, first: int, scales: Sequence[float]) -> "WindowChain":
        """The chains of the cells from `first` on, side by side, one for each of `scales`, each given the cached cells before it."""
        used = num_images if max(scales) <= 1 else 2 * num_images
        return WindowChain(self, self.model.class_emb(labels[:used]), cache.first(used) if cache is not None else None, first, scales)


class CellChain:
    """The chain of one cell of R images. Only one call of the whole network a transition; the cache of earlier cells stays as it is.

    class_vectors (R, W), or with guidance (2 R, W) and the null rows behind; the cache has as many rows.
    """

    equal_std = True
    log_temperature = 0.0

    def __init__(self, adapter: XARAdapter, class_vectors: torch.Tensor, cache: Cache | None, guidance_scale: float):
        self.adapter, self.class_vectors, self.cache = adapter, class_vectors, cache
        self.scale: float | torch.Tensor = guidance_scale
        self.guided = guidance_scale > 1
        self.num_rows = len(class_vectors) // (2 if self.guided else 1)
        self.num_steps, self.dim = adapter.schedule.num_steps, adapter.cell_dim
        self.decay = adapter.columns[:, 2]

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
        v = adapter.model.velocity(x, conditions[:, None], self.cache, owner)[0]
        return self._prediction(y, v.flatten(1).float(), k)

    def _prediction(self, y: torch.Tensor, v: torch.Tensor, k: int | torch.Tensor) -> Prediction:
        """States y (M, D) and what the network said of them, v (H M, D)."""
        if self.guided:
            v, v_null = v.chunk(2)
            v = v_null + self.scale * (v - v_null)
        of_state, of_velocity, *_ = self.adapter.coefficients(k)
        return Prediction(of_state * y - of_velocity * v, y.new_zeros(len(y), 0))  # the std is known: nothing of it to re-use

    def transition(self, prediction: Prediction, y: torch.Tensor, k: int | torch.Tensor) -> Gaussian:
        """The law of y_k given y = y_{k+1} (M, D) and a prediction, new or re-used."""
        *_, decay, gain, log_std = self.adapter.coefficients(k)
        mean = decay * y + gain * prediction.centre
        return Gaussian(mean, log_std.expand_as(mean))

    def __call__(self, y: torch.Tensor, k: int | torch.Tensor, rows: torch.Tensor | None = None) -> Gaussian:
        return self.transition(self.predict(y, k, rows), y, k)

    def stated_log_std(self, prediction: Prediction, k: int) -> torch.Tensor:
        """The scheme's own sqrt(2 t |dt|); for step 0 too, which adds no noise when sampling (M, D)."""
        log_std = self.adapter.coefficients(k)[-1] if k > 0 else prediction.centre.new_tensor([LAST_LOG_STD])
        return log_std.expand_as(prediction.centre)


class WindowChain(CellChain):
    """The chains of m cells side by side: rows (R m), image by image, all of them in every call, each given the cached cells before it."""

    def __init__(self, adapter: XARAdapter, class_vectors: torch.Tensor, cache: Cache | None, first: int, scales: Sequence[float]):
        super().__init__(adapter, class_vectors, cache, max(scales))
        self.first, self.cells = first, len(scales)
        self.scale = torch.tensor(scales, device=adapter.device).repeat(self.num_rows)[:, None]  # (R m, 1)
        self.num_rows *= self.cells

    def predict(self, y: torch.Tensor, k: int | torch.Tensor, rows: torch.Tensor | None = None) -> Prediction:
        """One network call at y = y_{k+1} (R m, D), one k for all; `rows` is for chains of one cell."""
        x = y.to(self.adapter.dtype).view(-1, self.cells, *self.adapter.cell_shape)
        conditions = (self.class_vectors + self.adapter.time[k])[:, None].expand(-1, self.cells, -1)
        v = self.adapter.model.velocity(torch.cat([x, x]) if self.guided else x, conditions, self.cache, first=self.first)[0]
        return self._prediction(y, v.flatten(0, 1).flatten(1).float(), k)
