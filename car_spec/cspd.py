"""Continuous speculative decoding (CSpD, Wang et al. 2024): the published acceleration by a draft model. It is *approximate*.

Draft and target denoise a token from the same noise (trajectory alignment), so their values are close; a criterion that compares the
last Gaussian of both paths accepts or replaces each drafted token. The result does not follow the target's law, only comes near it:
use the lossless sampler where that matters.

Two variants. `paper` follows the derivation: the target sees the drafts, and what was drafted behind a rejected token is thrown
away. `official` does what the authors' code does: the target predicts a whole window at once without seeing its drafts, rejected tokens are
replaced in place, the last step's quadratic is divided by 42^2, and the ratio of the earlier steps' stds is inverted.

This file is MAR's sampler and the criterion; cspd_cells.py is xAR's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from car_spec.adapters.mar import ARStep, MARAdapter
from car_spec.asd import NonFiniteError
from car_spec.chain import Prediction
from car_spec.engine import DraftModel, SpeculativeSampler
from car_spec.gaussian import Gaussian
from car_spec.noise import Noise
from car_spec.trace import Trace

VARIANTS = ("paper", "official")
LAST_STEP_TEMPERATURE = {"paper": 1.0, "official": 42.0}  # widens both last Gaussians in the acceptance test, not in the residual


@dataclass(frozen=True)
class CSpDSettings:
    """variant: see above. draft_length: AR steps drafted before a verification. prefill: share of the AR steps that the target makes
    first. aligned: draft and target share their noise; False is for comparison. max_tries: proposals for a rejected token before it
    becomes a fresh draw of the target's last Gaussian.
    """

    variant: str = "paper"
    draft_length: int = 8
    prefill: float = 0.05
    aligned: bool = True
    max_tries: int = 100

    def __post_init__(self):
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r} is none of {', '.join(VARIANTS)}")
        for name in ("draft_length", "max_tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")
        if not 0 <= self.prefill <= 1:
            raise ValueError(f"prefill {self.prefill} is outside 0..1")

    def prefilled_steps(self, num_iter: int) -> int:
        """AR steps that the target makes before drafting starts; the authors' code counts one more than the share says."""
        if self.variant == "official":
            return min(int(num_iter * self.prefill) + 1, num_iter)
        return round(num_iter * self.prefill)


class NoiseTable(NamedTuple):
    """One draw for every image and position, whichever network uses it and whenever."""

    initial: torch.Tensor  # (B, N, D)
    steps: torch.Tensor  # (B, N, K, D), index k used at step k > 0

    @classmethod
    def draw(cls, noise: Noise, num_tokens: int, num_steps: int, token_dim: int) -> "NoiseTable":
        table = noise.normal(num_tokens, num_steps, token_dim)  # (B, N, K, D)
        return cls(table[:, :, 0], table)  # step 0 is deterministic, so its entry is free for the initial noise

    @classmethod
    def draw_both(cls, noise: Noise, num_tokens: int, num_steps: int, token_dim: int, aligned: bool) -> tuple["NoiseTable", "NoiseTable"]:
        """The target's table and the draft's, which are one where they share their noise."""
        table = cls.draw(noise, num_tokens, num_steps, token_dim)
        return table, table if aligned else cls.draw(noise, num_tokens, num_steps, token_dim)

    def of_positions(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (B, n) -> initial (B, n, D), steps (B, n, K, D): the source that sequential sampling takes."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        return self.initial[rows, positions], self.steps[rows, positions]


class PathEnd(NamedTuple):
    """What the criterion needs of a denoised path."""

    y_0: torch.Tensor  # (R, D) the token
    last: Gaussian  # (R, D) law of the last step, with the std that the network states although no noise is added
    log_std_sum: torch.Tensor  # (R, D) log stds of all earlier steps, without the temperature

    def at(self, index: torch.Tensor) -> "PathEnd":
        return PathEnd(self.y_0[index], self.last.at(index), self.log_std_sum[index])

    def split(self, count: int) -> "PathEnd":
        """Rows of `count` tokens (R, count D) -> their tokens (R count, D), row by row."""
        tokens = lambda x: x.unflatten(-1, (count, -1)).flatten(0, 1)
        return PathEnd(tokens(self.y_0), Gaussian(tokens(self.last.mean), tokens(self.last.log_std)), tokens(self.log_std_sum))


class StatedChain(Protocol):
    """A chain that says the std of every step, that of the last one too, although sampling adds no noise there."""

    num_steps: int
    log_temperature: float

    def __call__(self, y: torch.Tensor, k: int) -> Gaussian: ...

    def predict(self, y: torch.Tensor, k: int) -> Prediction: ...

    def transition(self, prediction: Prediction, y: torch.Tensor, k: int) -> Gaussian: ...

    def stated_log_std(self, prediction: Prediction, k: int) -> torch.Tensor: ...


def sample_path(chain: StatedChain, initial: torch.Tensor, steps: torch.Tensor) -> PathEnd:
    """Sequential sampling of all rows, initial (R, D) and steps (R, K, D), that remembers what the criterion asks for."""
    y, log_std_sum = initial, torch.zeros_like(initial)
    for k in reversed(range(1, chain.num_steps)):
        law = chain(y, k)
        log_std_sum += law.log_std - chain.log_temperature
        y = law.sample(steps[:, k])
    prediction = chain.predict(y, 0)
    mean = chain.transition(prediction, y, 0).mean
    return PathEnd(mean, Gaussian(mean, chain.stated_log_std(prediction, 0) + chain.log_temperature), log_std_sum)


def log_sigma(draft: PathEnd, target: PathEnd, variant: str) -> torch.Tensor:
    """log of the product over earlier steps of draft std / target std (R,); the authors' code has it upside down."""
    gap = (draft.log_std_sum - target.log_std_sum).sum(-1)
    return gap if variant == "paper" else -gap


def log_acceptance(draft: PathEnd, target: PathEnd, variant: str) -> torch.Tensor:
    """log of Sigma N(x_0; target's last law) / N(x_0; draft's last law) at the drafted tokens x_0 (R,); accept if log u is below it."""
    temperature = LAST_STEP_TEMPERATURE[variant]

    def log_density(law: Gaussian) -> torch.Tensor:
        standardised = (draft.y_0 - law.mean) * (-law.log_std).exp() / temperature
        return (-0.5 * standardised.square() - law.log_std).sum(-1)

    return log_sigma(draft, target, variant) + log_density(target.last) - log_density(draft.last)


def residual_acceptance(draft: PathEnd, target: PathEnd, y: torch.Tensor, variant: str) -> torch.Tensor:
    """alpha_s = max(0, Sigma target - draft) / (Sigma target) at proposals y (R, D) of the target's last law (R,)."""
    return -torch.expm1(draft.last.log_prob(y) - target.last.log_prob(y) - log_sigma(draft, target, variant)).clamp_max(0.0)


def draw_modified(draft: PathEnd, target: PathEnd, variant: str, noise: Noise, max_tries: int) -> tuple[torch.Tensor, int]:
    """R draws of the modified distribution max(0, Sigma target - draft) / Z (R, D), and how many gave up.

    Acceptance-rejection with the target's last law as proposal and bound 1 / Z, so that Z cancels. A row without success in
    `max_tries` becomes a fresh draw of that law.
    """
    out = torch.zeros_like(target.y_0)
    active = torch.arange(len(out), device=out.device)
    for _ in range(max_tries):
        if not len(active):
            break
        drawn = noise.of(active)
        proposal = target.last.at(active).sample(drawn.normal(out.shape[-1]))
        taken = drawn.uniform() < residual_acceptance(draft.at(active), target.at(active), proposal, variant)
        out[active[taken]] = proposal[taken]
        active = active[~taken]
    out[active] = target.last.at(active).sample(noise.of(active).normal(out.shape[-1]))
    return out, len(active)


def judge(draft: PathEnd, target: PathEnd, variant: str, noise: Noise, trace: Trace) -> torch.Tensor:
    """-> whether each drafted token passes the criterion (R,)."""
    trace.token_distances += (draft.y_0 - target.y_0).square().sum(-1).tolist()
    return noise.uniform().log() < log_acceptance(draft, target, variant)


def replace(draft: PathEnd, target: PathEnd, rejected: torch.Tensor, settings: CSpDSettings, noise: Noise, trace: Trace) -> torch.Tensor:
    """Draws for the tokens in the mask `rejected` (R,), in their order."""
    index = rejected.nonzero()[:, 0]
    out, fallbacks = draw_modified(draft.at(index), target.at(index), settings.variant, noise.of(index), settings.max_tries)
    trace.fallbacks += fallbacks
    return out


class _Rows(NamedTuple):
    """R drafted rows, image by image in generation order."""

    image: torch.Tensor  # (R,)
    row: torch.Tensor  # (R,)
    ahead: torch.Tensor  # (R,) AR steps since the last verification
    end: PathEnd


class CSpDSampler(SpeculativeSampler):
    """One batch of images. `table` is the shared noise; `draft_table` equals it unless alignment is switched off."""

    def __init__(
        self,
        adapter: MARAdapter,
        steps: Sequence[ARStep],
        class_vectors: torch.Tensor,
        null_vectors: torch.Tensor,
        noise: Noise,
        table: NoiseTable,
        draft_table: NoiseTable,
        settings: CSpDSettings,
        trace: Trace,
        draft: DraftModel,
    ):
        super().__init__(adapter, steps, class_vectors, null_vectors, trace, draft)
        self.draft_adapter, self.settings = draft.adapter, settings
        self.noise, self.table, self.draft_table = noise, table, draft_table
        self.images = torch.arange(len(self.order), device=self.order.device)

    def sample(self) -> torch.Tensor:
        """-> tokens (B, N, D)."""
        tokens = self.table.initial.new_zeros(len(self.order), self.adapter.num_tokens, self.adapter.token_dim)
        prefilled = self.settings.prefilled_steps(self.num_steps)
        for step in range(prefilled):
            z = self._conditions(self.images, tokens, self._mask(self.images, self._unknown(tokens, step)))
            image, row = self._rows_of_step(step)
            tokens = self._write(tokens, image, row, self._target_path(z[image], image, row).y_0)
            self.trace.record_round(self.images, (self.group == step).sum().expand(len(self.images)))
        return self._by_truncation(tokens, prefilled) if self.settings.variant == "paper" else self._in_place(tokens, prefilled)

    def _unknown(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        """(B, N) by row: everything from an AR step on."""
        return (self.group >= step).to(tokens).expand(len(tokens), -1)

    def _rows_of_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """-> image and row (R,) of an AR step, of all images."""
        row = (self.group == step).nonzero()[:, 0]
        return self.images.repeat_interleave(len(row)), row.repeat(len(self.images))

    def _write(self, tokens: torch.Tensor, image: torch.Tensor, row: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return tokens.index_put((image, self.order[image, row]), values)

    def _path(self, adapter: MARAdapter, table: NoiseTable, z: torch.Tensor, image, row, guided_as) -> PathEnd:
        """Conditions of all positions (R, H, N, W) -> the rows' paths; guided_as (R,): rows whose guidance scale they take."""
        position, index = self.order[image, row], torch.arange(len(row), device=row.device)
        chain = self._chain(adapter, z[index, :, position], guided_as)
        end = sample_path(chain, table.initial[image, position], table.steps[image, position])
        finite = end.y_0.isfinite().all(-1)
        if not finite.all():
            raise NonFiniteError(image[~finite].unique())
        return end

    def _target_path(self, z: torch.Tensor, image: torch.Tensor, row: torch.Tensor, guided_as: torch.Tensor | None = None) -> PathEnd:
        self.trace.chain.calls += self.chain_steps
        self.trace.chain.rows += self.chain_steps * len(row)
        with self.trace.time("verify"):
            return self._path(self.adapter, self.table, z, image, row, row if guided_as is None else guided_as)

    def _draft_path(self, z: torch.Tensor, image: torch.Tensor, row: torch.Tensor) -> PathEnd:
        self.trace.draft_calls += self.chain_steps
        with self.trace.time("draft"):
            return self._path(self.draft_adapter, self.draft_table, z, image, row, row)

    def _judge(self, drafted: _Rows, target: PathEnd) -> torch.Tensor:
        return judge(drafted.end, target, self.settings.variant, self.noise.of(drafted.image), self.trace)

    def _replace(self, drafted: _Rows, target: PathEnd, rejected: torch.Tensor) -> torch.Tensor:
        return replace(drafted.end, target, rejected, self.settings, self.noise.of(drafted.image), self.trace)

    # --- the paper: verify with the drafts as context, cut at the first rejection

    def _by_truncation(self, tokens: torch.Tensor, prefilled: int) -> torch.Tensor:
        total = len(self.group)
        n = (self.group < prefilled).sum().repeat(len(tokens))  # (B,) rows committed
        while (n < total).any():
            image = (n < total).nonzero()[:, 0]  # (A,)
            drafted, with_drafts = self._draft(tokens, n, image)
            z, where = self._prefixes(image, n[image], with_drafts[image], 0, self.settings.draft_length)
            a = torch.searchsorted(image, drafted.image)
            target = self._target_path(z[where[a, drafted.ahead]], drafted.image, drafted.row)
            passes = self._judge(drafted, target)

            q = drafted.row - n[drafted.image]  # place of the row in its image's window
            count = torch.bincount(drafted.image, minlength=len(n))
            stop = count.clone().scatter_reduce(0, drafted.image[~passes], q[~passes], "amin")  # (B,) the first rejection
            stands, rejected = q < stop[drafted.image], q == stop[drafted.image]
            tokens = self._write(tokens, drafted.image[stands], drafted.row[stands], drafted.end.y_0[stands])
            tokens = self._write(tokens, drafted.image[rejected], drafted.row[rejected], self._replace(drafted, target, rejected))
            committed = (stop + 1).minimum(count)
            n = n + committed
            self.trace.record_round(image, committed[image])
            self.trace.record_acceptance(drafted.ahead, stands)
        return tokens

    def _draft(self, tokens: torch.Tensor, n: torch.Tensor, image: torch.Tensor) -> tuple[_Rows, torch.Tensor]:
        """The draft network goes on by `draft_length` AR steps -> its rows, and the tokens with them in place."""
        first = self.group[n[image]]  # (A,)
        ahead = self.group - first[:, None]  # (A, N)
        rows = torch.arange(len(self.group), device=ahead.device)
        a, row = ((rows >= n[image, None]) & (ahead < self.settings.draft_length)).nonzero().T
        ahead = ahead[a, row]
        parts, order = [], []
        for j in range(int(ahead.max()) + 1):
            here = (ahead == j).nonzero()[:, 0]
            unknown = (self.group >= first[:, None] + j).to(tokens)  # (A, N)
            z = self._draft_conditions(image, tokens[image], self._mask(image, unknown))
            part = self._draft_path(z[a[here]], image[a[here]], row[here])
            tokens = self._write(tokens, image[a[here]], row[here], part.y_0)
            parts.append(part)
            order.append(here)
        return _Rows(image[a], row, ahead, concatenate(parts).at(torch.cat(order).argsort())), tokens

    # --- the authors' code: one target step for a window, rejected tokens replaced where they are

    def _in_place(self, tokens: torch.Tensor, prefilled: int) -> torch.Tensor:
        known, pending, first = tokens, [], prefilled
        for step in range(prefilled, self.num_steps):
            image, row = self._rows_of_step(step)
            z = self._draft_conditions(self.images, tokens, self._mask(self.images, self._unknown(tokens, step)))
            part = self._draft_path(z[image], image, row)
            tokens = self._write(tokens, image, row, part.y_0)
            pending.append(_Rows(image, row, torch.full_like(row, step - first), part))
            if step < self.num_steps - 1 and step % self.settings.draft_length:
                continue
            drafted = in_order(pending)
            z = self._conditions(self.images, known, self._mask(self.images, self._unknown(known, first)))
            target = self._target_path(z[drafted.image], drafted.image, drafted.row, guided_as=row[:1].expand(len(drafted.row)))
            passes = self._judge(drafted, target)
            replaced = self._replace(drafted, target, ~passes)
            tokens = self._write(tokens, drafted.image[~passes], drafted.row[~passes], replaced)
            self.trace.record_round(self.images, torch.bincount(drafted.image, minlength=len(self.images)))
            self.trace.record_acceptance(drafted.ahead, passes)
            known, pending, first = tokens, [], step + 1
        return tokens


def concatenate(ends: Sequence[PathEnd]) -> PathEnd:
    laws = Gaussian(torch.cat([end.last.mean for end in ends]), torch.cat([end.last.log_std for end in ends]))
    return PathEnd(torch.cat([end.y_0 for end in ends]), laws, torch.cat([end.log_std_sum for end in ends]))


def in_order(parts: Sequence[_Rows]) -> _Rows:
    """The rows of several AR steps, image by image."""
    image = torch.cat([part.image for part in parts])
    order = image.argsort(stable=True)
    row, ahead = (torch.cat([getattr(part, name) for part in parts])[order] for name in ("row", "ahead"))
    return _Rows(image[order], row, ahead, concatenate([part.end for part in parts]).at(order))
