"""The lossless engine: block autospeculation over AR steps and denoising steps, with the model as its own drafter.

Everything MAR knows after n tokens predicts every masked token, so the condition of the current prefix drafts the next AR
steps. One batched backbone call over the drafted prefixes verifies them, and the condition of the last accepted prefix drafts the
next round. The images follow the model's own law; the one stated tolerance is that of the last, noiseless transition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from car_spec.adapters.mar import ARStep, MARAdapter
from car_spec.asd import NonFiniteError, Path, autospeculate
from car_spec.chain import DiffusionChain
from car_spec.gaussian import Gaussian
from car_spec.noise import Noise
from car_spec.sequential import guidance_halves
from car_spec.trace import Trace
from car_spec.verify import verify_block, verify_token_wise

DRAFTERS = ("self", "model")


@dataclass(frozen=True)
class LosslessSettings:
    """lookahead: AR steps drafted before one verification. window: denoising steps drafted inside a row. final_tolerance: largest
    rms gap, a coordinate, between the drafted and the target's last mean; beyond it the target's own value is taken.
    token_wise: stop at the first transition that fails, for comparison; block verification never accepts less. drafter: `self`, the
    model's own stale condition, or `model`, a smaller network.
    """

    lookahead: int = 8
    window: int = 24
    taper: float = 0.5
    final_tolerance: float = 1e-3
    token_wise: bool = False
    drafter: str = "self"
    max_rows: int = 4096  # rows of one head call in a verification; more are cut into chunks

    def __post_init__(self):
        for name in ("lookahead", "window", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")
        if self.drafter not in DRAFTERS:
            raise ValueError(f"drafter {self.drafter!r} is none of {', '.join(DRAFTERS)}")
        if not 0 < self.taper <= 1:
            raise ValueError(f"taper {self.taper} is outside (0, 1]")
        if not self.final_tolerance >= 0:
            raise ValueError(f"final_tolerance {self.final_tolerance} is not a number of at least 0")


@dataclass(frozen=True)
class DraftModel:
    """Another network that drafts, AR step after AR step, in place of the target's own stale condition."""

    adapter: MARAdapter
    class_vectors: torch.Tensor  # (B, W) of the draft network
    null_vectors: torch.Tensor  # (B, W)


@dataclass
class _State:
    """A images that are not finished, n of whose rows (tokens in generation order) are committed."""

    image: torch.Tensor  # (A,) index into the batch
    tokens: torch.Tensor  # (A, N, D) by raster position
    n: torch.Tensor  # (A,)
    z: torch.Tensor  # (A, H, N, W): exact for the AR step of row n, stale for later ones
    resumed: torch.Tensor  # (A, D) state of row n, where verification stopped inside it
    start: torch.Tensor  # (A,) its next step; K - 1 for a row that starts afresh

    def keep(self, mask: torch.Tensor) -> "_State":
        return _State(*(getattr(self, name)[mask] for name in ("image", "tokens", "n", "z", "resumed", "start")))


@dataclass(frozen=True)
class _Draft:
    """R drafted rows of all images, image by image in generation order."""

    a: torch.Tensor  # (R,) image, as an index into the state
    row: torch.Tensor  # (R,)
    position: torch.Tensor  # (R,)
    ahead: torch.Tensor  # (R,) AR steps between the row and its image's exact condition; 0: drafted exactly
    path: Path


@dataclass(frozen=True)
class _Verified:
    """What verification leaves of a draft."""

    lead: torch.Tensor  # (A,) rows that were drafted exactly
    rows: torch.Tensor  # (A,) speculative rows that stand
    transitions: torch.Tensor  # (A,) transitions that stand of the row after them
    complete: torch.Tensor  # (A,) bool: everything that was judged stands
    corrected: torch.Tensor  # (A,) bool: the last row that stands took the target's own value
    replacement: torch.Tensor  # (A, D) the state after `transitions`, where not complete
    y_0: torch.Tensor  # (R, D) values of the drafted rows

    @classmethod
    def nothing(cls, lead: torch.Tensor, y_0: torch.Tensor, like: torch.Tensor) -> "_Verified":
        no, yes = torch.zeros_like(lead, dtype=torch.bool), torch.ones_like(lead, dtype=torch.bool)
        return cls(lead, torch.zeros_like(lead), torch.zeros_like(lead), yes, no, torch.zeros_like(like), y_0)


class SpeculativeSampler:
    """One batch of images in rows: row r of an image is its r-th token in generation order. All images share the AR steps' sizes."""

    def __init__(
        self,
        adapter: MARAdapter,
        steps: Sequence[ARStep],
        class_vectors: torch.Tensor,
        null_vectors: torch.Tensor,
        trace: Trace,
        draft: DraftModel | None,
    ):
        device = class_vectors.device
        self.adapter, self.trace, self.draft_model = adapter, trace, draft
        self.vectors = guidance_halves(steps, class_vectors, null_vectors)  # (B, H, W)
        if draft is not None:
            self.draft_vectors = torch.stack([draft.class_vectors, draft.null_vectors][: self.vectors.shape[1]], 1)  # (B, H, W')
        self.order = torch.cat([step.positions for step in steps], 1)  # (B, N): position of each row
        sizes = torch.tensor([step.positions.shape[1] for step in steps], device=device)
        self.num_steps = len(steps)
        self.group = torch.arange(self.num_steps, device=device).repeat_interleave(sizes)  # (N,): AR step of each row
        self.scale = torch.tensor([step.guidance_scale for step in steps], device=device)[self.group]  # (N,)
        self.chain_steps = adapter.head.num_steps  # K

    def _conditions(self, image: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Prefixes (P, N, D) of the images (P,) -> (P, H, N, W): one backbone call."""
        with self.trace.time("backbone"):
            z = self.adapter.conditions(tokens, mask, self.vectors[image])
        self.trace.count_backbone(image, self.vectors.shape[1])
        return z

    def _draft_conditions(self, image: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The same of the draft network."""
        assert self.draft_model is not None
        with self.trace.time("draft"):
            z = self.draft_model.adapter.conditions(tokens, mask, self.draft_vectors[image])
        self.trace.draft_calls += 1
        return z

    def _mask(self, image: torch.Tensor, unknown: torch.Tensor) -> torch.Tensor:
        """unknown (P, N) by row of the images (P,) -> the same by raster position."""
        return torch.zeros_like(unknown).scatter_(1, self.order[image], unknown)

    def _prefixes(
        self, image: torch.Tensor, n: torch.Tensor, drafted: torch.Tensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Conditions after `start` up to `stop` - 1 drafted AR steps of the images (A,), of whose rows n (A,) are committed.

        -> (P, H, N, W), and where they are, (A, stop) (-1: nowhere).
        """
        first = self.group[n]
        j = torch.arange(stop, device=first.device)
        needed = (j >= start) & (first[:, None] + j < self.num_steps)  # (A, stop)
        index = torch.where(needed, needed.flatten().cumsum(0).view_as(needed) - 1, -1)
        a, j = needed.nonzero().T
        if not len(a):
            return drafted.new_zeros(0), index
        unknown = (self.group >= (first[a] + j)[:, None]).to(drafted)  # (P, N) by row
        return self._conditions(image[a], drafted[a], self._mask(image[a], unknown)), index

    def _chain(self, adapter: MARAdapter, conditions: torch.Tensor, row: torch.Tensor) -> DiffusionChain:
        """Conditions (R, H, W) of rows (R,), each with the guidance scale of its AR step."""
        return adapter.chain(conditions, self.scale[row] if self.vectors.shape[1] == 2 else 1.0)


class LosslessSampler(SpeculativeSampler):
    """Every image has its own pointer and generator."""

    def __init__(
        self,
        adapter: MARAdapter,
        steps: Sequence[ARStep],
        class_vectors: torch.Tensor,
        null_vectors: torch.Tensor,
        noise: Noise,
        settings: LosslessSettings,
        trace: Trace,
        draft: DraftModel | None = None,
    ):
        if (settings.drafter == "model") != (draft is not None):
            raise ValueError(f"drafter {settings.drafter!r} {'needs a' if draft is None else 'takes no'} draft model")
        super().__init__(adapter, steps, class_vectors, null_vectors, trace, draft)
        self.settings, self.noise = settings, noise  # one sequence of noise an image

    def sample(self) -> torch.Tensor:
        """-> tokens (B, N, D)."""
        batch, device = len(self.order), self.order.device
        tokens = torch.zeros(batch, self.adapter.num_tokens, self.adapter.token_dim, device=device)
        done = torch.zeros_like(tokens)
        image = torch.arange(batch, device=device)
        z = self._conditions(image, tokens, torch.ones_like(tokens[..., 0]))
        top = torch.full((batch,), self.chain_steps - 1, device=device)
        state = _State(image, tokens, torch.zeros_like(image), z, torch.zeros_like(tokens[:, 0]), top)
        while len(state.image):
            draft = self._draft(state)
            drafted = state.tokens.index_put((draft.a, draft.position), draft.path.states[:, 0])  # (A, N, D)
            conditions, where = self._prefixes(state.image, state.n, drafted, 1, self.settings.lookahead + 1)
            verified = self._verify(state, draft, conditions, where)
            state = self._commit(state, draft, verified, conditions, where)
            finished = state.n == self.adapter.num_tokens
            done[state.image[finished]] = state.tokens[finished]
            state = state.keep(~finished)
        return done

    def _draft(self, state: _State) -> _Draft:
        """Sample the rows of the next `lookahead` AR steps under the condition at hand, every transition on record."""
        first = self.group[state.n]  # (A,)
        ahead = self.group - first[:, None]  # (A, N)
        rows = torch.arange(len(self.group), device=ahead.device)
        a, row = ((rows >= state.n[:, None]) & (ahead < self.settings.lookahead)).nonzero().T
        position = self.order[state.image[a], row]
        ahead = ahead[a, row]
        if self.draft_model is None:
            return _Draft(a, row, position, ahead, self._sample(state, self._chain(self.adapter, state.z[a, :, position], row), a, row))
        return _Draft(a, row, position, ahead, self._draft_by_model(state, self.draft_model, a, row, position, ahead))

    def _sample(self, state: _State, chain: DiffusionChain, a: torch.Tensor, row: torch.Tensor) -> Path:
        """The rows of a chain, each from its start or from where verification stopped inside it."""
        noise = self.noise.of(state.image[a])
        resumed = (row == state.n[a]) & (state.start[a] < self.chain_steps - 1)
        y = torch.where(resumed[:, None], state.resumed[a], noise.normal(self.adapter.token_dim))
        start = torch.where(resumed, state.start[a], self.chain_steps - 1)
        own = self.settings
        try:
            with self.trace.time("draft"):
                return autospeculate(
                    chain,
                    y,
                    noise,
                    start=start,
                    window=own.window,
                    taper=own.taper,
                    token_wise=own.token_wise,
                    trace=self.trace.chain,
                )
        except NonFiniteError as error:
            raise NonFiniteError(state.image[a[error.rows]].unique()) from None

    def _draft_by_model(self, state: _State, draft: DraftModel, a, row, position, ahead) -> Path:
        """The current AR step under the target's exact condition; each later one under the draft network's, given the drafts before."""
        tokens, path = state.tokens.clone(), None
        for j in range(int(ahead.max()) + 1):
            rows = (ahead == j).nonzero()[:, 0]
            if j == 0:
                chain = self._chain(self.adapter, state.z[a[rows], :, position[rows]], row[rows])
            else:
                unknown = (self.group >= self.group[state.n][:, None] + j).to(tokens)  # (A, N) by row
                z = self._draft_conditions(state.image, tokens, self._mask(state.image, unknown))
                chain = self._chain(draft.adapter, z[a[rows], :, position[rows]], row[rows])
            part = self._sample(state, chain, a[rows], row[rows])
            if path is None:
                path = Path(*(values.new_zeros(len(row), *values.shape[1:]) for values in part))
            for whole, values in zip(path, part):
                whole[rows] = values
            tokens[a[rows], position[rows]] = part.states[:, 0]
        assert path is not None  # there is always a current AR step
        return path

    def _verify(self, state: _State, draft: _Draft, conditions: torch.Tensor, where: torch.Tensor) -> _Verified:
        """Judge the speculative rows of every image as one sequence of transitions, in the order they are generated."""
        size, noisy = len(state.image), self.chain_steps - 1  # noisy transitions a row
        lead = torch.bincount(draft.a[draft.ahead == 0], minlength=size)  # (A,) rows drafted exactly
        result = _Verified.nothing(lead, draft.path.states[:, 0].clone(), state.resumed)
        spec = (draft.ahead > 0).nonzero()[:, 0]  # (S,) speculative rows
        if not len(spec):
            return result
        a, row, ahead = draft.a[spec], draft.row[spec], draft.ahead[spec]
        with self.trace.time("verify"):
            law = self._laws(
                self._chain(self.adapter, conditions[where[a, ahead], :, draft.position[spec]], row), draft.path.states[spec, 1:]
            )

        # the last, noiseless transition: the first row whose gap is too large ends the sequence
        q = row - state.n[a] - lead[a]  # (S,) place of the row in its image's sequence
        gap = (law.mean[:, 0] - result.y_0[spec]).square().mean(-1).sqrt()  # (S,)
        bad = gap > self.settings.final_tolerance
        count = torch.bincount(a, minlength=size)
        last = torch.full_like(count, len(self.group)).scatter_reduce(0, a[bad], q[bad], "amin")
        used = torch.where(last < count, last + 1, count)

        judged = used.nonzero()[:, 0]  # images with something to judge; the others must draw nothing
        inside = q < used[a]
        place = (torch.searchsorted(judged, a[inside]), q[inside])
        shape = (len(judged), int(used.max()), noisy, self.adapter.token_dim)
        states = lay_out(draft.path.states[spec, 1:-1][inside], place, shape)  # (J, G, D)
        target = Gaussian(*(lay_out(part[inside, 1:], place, shape) for part in law))
        drafted = Gaussian(*(lay_out(part[spec, 1:][inside], place, shape) for part in (draft.path.mean, draft.path.log_std)))
        lengths = used[judged] * noisy
        ratios = target.log_prob(states) - drafted.log_prob(states)  # (J, G)
        ratios = torch.where(torch.arange(ratios.shape[1], device=a.device) < lengths[:, None], ratios, 0.0)
        verify = verify_token_wise if self.settings.token_wise else verify_block
        with self.trace.time("decide"):
            verdict = verify(ratios, lengths, target, drafted, self.noise.of(state.image[judged]))

        result.complete[judged], result.replacement[judged] = verdict.accepted == lengths, verdict.replacement
        result.rows[judged], result.transitions[judged] = verdict.accepted // noisy, verdict.accepted % noisy
        result.corrected.copy_((last < count) & result.complete)
        ends = result.corrected[a] & (q == last[a])
        result.y_0[spec[ends]] = law.mean[ends, 0]  # the target's own last mean
        self.trace.record_verification(ahead, (q < result.rows[a]) & ~ends, gap, int(ends.sum()), verdict.fallbacks)
        return result

    def _commit(self, state: _State, draft: _Draft, verified: _Verified, conditions: torch.Tensor, where: torch.Tensor) -> _State:
        """Rows that stand become tokens; the row where verification stopped keeps its new state and step."""
        n = state.n + verified.lead + verified.rows
        stands = draft.row < n[draft.a]
        tokens = state.tokens.index_put((draft.a[stands], draft.position[stands]), verified.y_0[stands])
        start = torch.where(verified.complete, self.chain_steps - 1, self.chain_steps - 2 - verified.transitions)
        self.trace.record_round(state.image, n - state.n)
        self.trace.record_lag(state.image[draft.a[stands]], draft.position[stands], draft.ahead[stands])
        z = self._next_conditions(state, tokens, n, conditions, where, verified.corrected)
        return _State(state.image, tokens, n, z, verified.replacement, start)

    def _next_conditions(self, state, tokens, n, conditions, where, corrected) -> torch.Tensor:
        """The condition of the AR step of row n, already computed unless a corrected token changed its prefix."""
        going = n < len(self.group)
        group = self.group[n.clamp_max(len(self.group) - 1)]
        z = state.z.clone()
        index = where.gather(1, (group - self.group[state.n])[:, None])[:, 0]
        z[going] = conditions[index[going]] if going.any() else z[going]
        stale = going & corrected & (group != self.group[(n - 1)])
        if stale.any():
            a = stale.nonzero()[:, 0]
            unknown = (torch.arange(len(self.group), device=n.device) >= n[a, None]).to(tokens)
            z[a] = self._conditions(state.image[a], tokens[a], self._mask(state.image[a], unknown))
        return z

    def _laws(self, chain: DiffusionChain, states: torch.Tensor) -> Gaussian:
        """The target's law of every transition of S rows, given the states above them (S, K, D), in chunks of steps."""
        size, num_steps, _ = states.shape
        parts = []
        for k in torch.arange(num_steps, device=states.device).split(max(1, self.settings.max_rows // size)):
            parts.append(chain(states[:, k].transpose(0, 1), k[:, None]))  # (steps, S, D)
            self.trace.chain.count(size * len(k))
        return Gaussian(*(torch.cat(part).transpose(0, 1) for part in zip(*parts)))


def lay_out(values: torch.Tensor, place: tuple[torch.Tensor, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Transitions of rows, step ascending, (S, T, D) at (image, row) of shape (J, rows, T, D) -> sequences (J, rows * T, D).

    A sequence follows generation: row after row, and inside a row from the noisiest step down. Zero where there is no row.
    """
    out = values.new_zeros(shape)
    out[place] = values.flip(1)
    return out.flatten(1, 2)
