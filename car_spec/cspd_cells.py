"""CSpD (Wang et al. 2024) for xAR: *approximate*, as in cspd.py. The paper does not treat xAR; this is its method carried over.

A draft network makes the next cells, one chain each, from the noise that the target's chains of the same cells use. The target
samples all cells of the window side by side, and every *token* of them is judged. The std of a step does not depend on the network, so
Sigma = 1 and the criterion compares the last means alone. The sampler's last Euler-Maruyama step is deterministic; as with MAR's last step,
which adds no noise either, the criterion takes the std that is stated for that very step, here by its formula sqrt(2 t |dt|). It is 0.057
at any number of steps, where the std of the step before belongs to another mean and grows as the steps get few.

`paper`: cell j of a window is conditioned on the drafted cells before it. Tokens of one cell come from one chain, so none of them
stands behind another: they are judged independently. The first cell with rejected tokens is committed with those replaced, each by a
draw of its own modified distribution given the target's path; the cells behind it were drafted for another cell and are drafted again.
`official`: as the authors' MAR code does, for they have none for xAR. The target sees no cell of the window, rejected tokens of all its
cells are replaced in place and nothing is drafted again; the last step's quadratic is divided by 42^2. Each cell keeps its own
guidance scale.
"""

import torch

from car_spec.adapters.xar import XARAdapter, guidance_of_cells
from car_spec.asd import NonFiniteError
from car_spec.cspd import CSpDSettings, NoiseTable, PathEnd, StatedChain, concatenate, judge, replace, sample_path
from car_spec.models.xar import Cache
from car_spec.noise import Noise
from car_spec.trace import Trace


class CellCSpDSampler:
    """One batch of images, labels (B,). The rows of the tables are cells: `table` is the shared noise, which `draft_table` equals
    unless alignment is switched off. Both adapters have the same cells and steps.
    """

    def __init__(
        self,
        adapter: XARAdapter,
        draft: XARAdapter,
        labels: torch.Tensor,
        guidance_scale: float,
        noise: Noise,
        table: NoiseTable,
        draft_table: NoiseTable,
        settings: CSpDSettings,
        trace: Trace,
    ):
        self.adapter, self.draft, self.labels, self.settings, self.trace = adapter, draft, labels, settings, trace
        self.noise, self.table, self.draft_table = noise, table, draft_table
        self.guidance_scale, self.scales = guidance_scale, guidance_of_cells(guidance_scale, adapter.num_cells)

    def sample(self) -> torch.Tensor:
        """-> images as cells (B, cells, T, channels).

        Images with equally many finished cells go through a round together, those with the fewest first.
        """
        total, prefilled = self.adapter.num_cells, self.settings.prefilled_steps(self.adapter.num_cells)
        images = torch.arange(len(self.labels), device=self.labels.device)
        cells = self.table.initial.new_zeros(len(images), total, *self.adapter.cell_shape)
        cache = None
        for i in range(prefilled):
            cache = self._extend(images, cells[:, i - 1 : i], cache) if i else None
            cells[:, i] = self._target(images, cache, i, 1).y_0.view_as(cells[:, i])
            self._record(images, torch.ones_like(images))
        n = torch.full_like(images, prefilled)  # (B,) finished cells
        while (n < total).any():
            first = int(n.min())
            image = (n == first).nonzero()[:, 0]
            cells[image], committed = self._round(cells[image], image, first)
            n[image] += committed
            self._record(image, committed)
        return cells

    def _round(self, cells: torch.Tensor, image: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cells (R, cells, T, channels) of images (R,) with `first` finished -> the cells with more of them, and how many more (R,)."""
        count, paper = self._length(first), self.settings.variant == "paper"
        window = slice(first, first + count)
        drafted, end = self._drafted(cells, image, first, count)
        known = drafted[:, : first + count - 1] if paper else cells[:, :first]
        target = self._target(image, self._extend(image, known, None), first, count)

        tokens = self.adapter.cell_shape[0]
        noise = self.noise.of(image.repeat_interleave(count * tokens))
        passes = judge(end, target, self.settings.variant, noise, self.trace).view(-1, count, tokens)
        whole = passes.all(-1)  # (R, G)
        intact = whole.long().cumprod(1).sum(1)  # (R,) the cells before the first with a rejection
        committed = (intact + 1).clamp_max(count) if paper else torch.full_like(intact, count)
        inside = (torch.arange(count, device=image.device) < committed[:, None])[..., None]  # (R, G, 1)
        rejected = inside & ~passes
        made = drafted[:, window].clone()
        made[rejected] = replace(end, target, rejected.flatten(), self.settings, noise, self.trace)
        out = cells.clone()
        out[:, window] = made.masked_fill(~inside[..., None], 0.0)
        ahead = torch.arange(count, device=image.device)[:, None].expand_as(passes)
        self.trace.record_acceptance(ahead.flatten(), (inside & passes).flatten())
        return out, committed

    def _length(self, first: int) -> int:
        """Cells of the window from `first` on. The authors' code ends one behind every AR step whose number draft_length divides."""
        length, left = self.settings.draft_length, self.adapter.num_cells - first
        return min(left, length if self.settings.variant == "paper" else -first % length + 1)

    def _drafted(self, cells: torch.Tensor, image: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, PathEnd]:
        """The draft network goes on by `count` cells -> cells with them in place, and the ends of their tokens (R G T)."""
        cells, labels = cells.clone(), self.draft.with_null_rows(self.labels[image], self.guidance_scale)
        cache, parts = None, []
        with self.trace.time("draft"):
            for i in range(first, first + count):
                if i:
                    cache = self.draft.extend(cells[:, :i] if cache is None else cells[:, i - 1 : i], labels, cache)
                    self.trace.draft_calls += 1
                chain = self.draft.window(labels, cache, len(image), i, self.scales[i : i + 1])
                parts.append(self._path(chain, self.draft_table, image, i, 1))
                self.trace.draft_calls += chain.num_steps
                cells[:, i] = parts[-1].y_0.view_as(cells[:, i])
        by_image = torch.arange(count * len(image), device=image.device).view(count, -1).T.flatten()
        return cells, concatenate(parts).at(by_image).split(self.adapter.cell_shape[0])

    def _extend(self, image: torch.Tensor, cells: torch.Tensor, cache: Cache | None) -> Cache | None:
        """Finished or drafted cells (R, m, T, channels) join the target's cache, in one call.

        A round makes its cache anew from all of them, which costs a fraction of a chain and spares the bookkeeping of cuts.
        """
        if not cells.shape[1]:
            return cache
        labels = self.adapter.with_null_rows(self.labels[image], self.guidance_scale)
        self.trace.count_backbone(image, len(labels) // len(image))
        with self.trace.time("verify"):
            return self.adapter.extend(cells, labels, cache)

    def _target(self, image: torch.Tensor, cache: Cache | None, first: int, count: int) -> PathEnd:
        """The target's chains of `count` cells, each given the cached cells before it -> the ends of their tokens (R G T)."""
        labels = self.adapter.with_null_rows(self.labels[image], self.guidance_scale)
        chain = self.adapter.window(labels, cache, len(image), first, self.scales[first : first + count])
        self.trace.chain.calls += chain.num_steps
        self.trace.chain.rows += chain.num_steps * chain.num_rows
        with self.trace.time("verify"):
            return self._path(chain, self.table, image, first, count).split(self.adapter.cell_shape[0])

    def _path(self, chain: StatedChain, table: NoiseTable, image: torch.Tensor, first: int, count: int) -> PathEnd:
        window = slice(first, first + count)
        end = sample_path(chain, table.initial[image, window].flatten(0, 1), table.steps[image, window].flatten(0, 1))
        finite = end.y_0.isfinite().all(-1).view(len(image), -1).all(-1)
        if not finite.all():
            raise NonFiniteError(image[~finite])
        return end

    def _record(self, image: torch.Tensor, committed: torch.Tensor) -> None:
        self.trace.record_round(image, committed * self.adapter.cell_shape[0])
