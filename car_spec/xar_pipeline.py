"""The pipeline of xAR: what differs from MAR's, which is the settings and how the tokens come about."""

from typing import TYPE_CHECKING, Any

import torch

from car_spec.adapters.xar import XARAdapter
from car_spec.asd import NonFiniteError
from car_spec.cells import CellSettings, lossless, sample_cells, sequential
from car_spec.cspd import CSpDSettings, NoiseTable
from car_spec.cspd_cells import CellCSpDSampler
from car_spec.models.xar import from_cells
from car_spec.noise import Noise
from car_spec.pipeline import CSPD_SETTINGS, MARPipeline, NonFiniteImageError
from car_spec.trace import Trace

if TYPE_CHECKING:
    from car_spec.models.xar import XAR

DRAFTERS = {"self": "free", "frozen": "frozen", "model": "model"}  # as in MAR's settings -> as `autospeculate` knows them
CELL_SETTINGS = ("window", "token_wise", "drafter")  # of the lossless sampler


class XARPipeline(MARPipeline):
    """Class-conditional sampling with an xAR network and its autoencoder: an AR step is a cell, of which there are always as many.

    drafter: `self` re-uses the network's last prediction, `frozen` asks for a fresh one first, `model` lets the draft model draft.
    """

    model: "XAR"  # type: ignore[assignment]

    def set_draft(self, draft: MARPipeline) -> None:
        super().set_draft(draft)
        ours, theirs = self.model.config.num_cells, draft.model.config.num_cells  # type: ignore[attr-defined]
        if ours != theirs:
            self.draft = None
            raise ValueError(f"--draft {draft.preset.name} has {theirs} cells, --model {self.preset.name} has {ours}")

    def settings(self, **given) -> dict:
        fixed = {"num_iter": self.model.config.num_cells, "guidance_schedule": "linear", "temperature": 1.0}
        for name, only in fixed.items():
            if given.get(name) not in (None, only):
                raise ValueError(f"{name} {given[name]} is not possible with xAR: {self.preset.name} has {only}")
        return super().settings(**(given | fixed))

    def _lossless_settings(self, own: dict[str, Any]) -> dict[str, Any]:
        for name in own:
            if name not in CELL_SETTINGS:
                raise ValueError(f"{name} {own[name]!r} is not possible with xAR, whose cells are drafted one at a time")
        drafter = own.get("drafter", "self")
        if drafter not in DRAFTERS:
            raise ValueError(f"drafter {drafter!r} is none of {', '.join(DRAFTERS)}")
        if drafter == "model" and self.draft is None:
            raise ValueError("drafter 'model' needs a draft model: load_pipeline(..., draft=...), or --draft")
        window = own.get("window", CellSettings.window)
        if window < 1:
            raise ValueError(f"window {window} is below 1")
        return {"window": window, "token_wise": own.get("token_wise", CellSettings.token_wise), "drafter": drafter}

    def _sample_tokens(self, labels, generators, settings, callback) -> tuple[torch.Tensor, Trace]:
        batch, steps = len(generators), settings["num_inference_steps"]
        noise, trace = Noise(generators, torch.arange(batch, device=self.device)), Trace(batch, self.num_tokens)
        if labels is None:
            labels = torch.full((batch,), self.model.null_class, device=self.device)
        adapter, draft = XARAdapter(self.model, num_inference_steps=steps), None
        if settings.get("drafter") == "model" or settings["sampler"] == "cspd":
            assert self.draft is not None  # `settings` refused it
            draft = XARAdapter(self.draft.model, num_inference_steps=steps)  # type: ignore[arg-type]
        if self.shares is not None and settings["sampler"] == "lossless":
            adapter = self.shares.cells(adapter, trace)
        on_cell = None if callback is None else lambda i, cells: callback(i, _raster(cells))
        problem = (labels, settings["guidance_scale"])
        try:
            if settings["sampler"] == "cspd":
                assert draft is not None
                tables = NoiseTable.draw_both(noise, adapter.num_cells, steps, adapter.cell_dim, settings["aligned"])
                cspd = CSpDSettings(**{name: settings[name] for name in CSPD_SETTINGS})
                cells = CellCSpDSampler(adapter, draft, *problem, noise, *tables, cspd, trace).sample()
            elif settings["sampler"] == "lossless":
                own = CellSettings(settings["window"], token_wise=settings["token_wise"], drafter=DRAFTERS[settings["drafter"]])
                cells = sample_cells(adapter, *problem, lossless(noise, own, trace), draft, trace, on_cell)
            else:
                cells = sample_cells(adapter, *problem, sequential(noise, trace), None, trace, on_cell)
            tokens = _raster(cells)
        except NonFiniteError as error:
            raise NonFiniteImageError(error.rows.tolist()) from None
        trace.draft_calls += trace.chain.draft_calls
        self._check(tokens)
        return tokens, trace


def _raster(cells: torch.Tensor) -> torch.Tensor:
    """Cells (B, cells, T, D) -> tokens (B, N, D) in raster order."""
    return from_cells(cells).flatten(2).transpose(1, 2)
