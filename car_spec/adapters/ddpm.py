"""Whole images behind the samplers: any denoiser under a stochastic scheduler of diffusers, as a chain of Gaussian transitions.

A row is an image (or any array), its state flattened to D numbers; a transition is a call of the whole network. Three samplers are
known: DDPMScheduler, DDIMScheduler with eta > 0, and the churned reverse SDE on the grid of either.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from car_spec.asd import NonFiniteError
from car_spec.chain import Prediction
from car_spec.gaussian import Gaussian

# states (M, C, ...), timesteps (M,) and rows (M,) of the chain -> the network's output (M, C, ...), guided where there is guidance;
# (M, 2 C, ...) where the variance is learned
Denoiser = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

NOTHING_RANDOM = "nothing random is left to speculate on"
NO_NOISE = 1e-10  # std that diffusers writes where it means 0: below the resolution of float32 states
VARIANCES = ("fixed", "learned", "learned_range")


@dataclass(frozen=True)
class ReverseSchedule:
    """Coefficients of every transition y_{k+1} -> y_k, float32 (K,), index 0 next to the data and without noise.

    clean = of_state y + of_output output, then clipped or thresholded as the scheduler does: kept;
    mean = of_kept kept + of_clean clean + of_y y; log std between `min_log_std` and `max_log_std`, equal where the variance is fixed.
    """

    variance: str  # one of VARIANCES
    keep: Callable[[torch.Tensor], torch.Tensor]  # clip or threshold of clean samples (M, C, ...)
    timesteps: torch.Tensor  # int64, what the denoiser is called with; -1: a transition without a call
    of_state: torch.Tensor
    of_output: torch.Tensor
    of_kept: torch.Tensor
    of_clean: torch.Tensor  # DDIM only: its direction follows the network's own noise, not the clipped one
    of_y: torch.Tensor
    min_log_std: torch.Tensor
    max_log_std: torch.Tensor
    signal: torch.Tensor  # cumulative product of alphas at the state


def reverse_schedule(scheduler: Any, *, eta: float = 0.0, churn: float | None = None) -> ReverseSchedule:
    """The transitions of a scheduler whose timesteps are set.

    eta: of DDIMScheduler, as its `step` takes it, in (0, 1]. churn: in (0, 1]; takes the scheduler's grid and prediction type, but
    the transitions of `churned_coefficients`.
    """
    from diffusers import DDIMScheduler, DDPMScheduler

    name = type(scheduler).__name__
    if not isinstance(scheduler, (DDIMScheduler, DDPMScheduler)):
        raise ValueError(
            f"{name} is no stochastic scheduler known here: {NOTHING_RANDOM} in a deterministic one; "
            "use DDPMScheduler.from_config(pipe.scheduler.config), or DDIMScheduler with eta above 0"
        )
    if churn is not None:
        if churn == 0:
            raise ValueError(f"churn 0 is the probability flow: {NOTHING_RANDOM}")
        if not 0 < churn <= 1:
            raise ValueError(f"churn {churn} is outside (0, 1]")
        return _assemble(scheduler, churned_coefficients(scheduler, churn))
    if isinstance(scheduler, DDIMScheduler):
        if eta == 0:
            raise ValueError(f"{name} with eta 0 is deterministic: {NOTHING_RANDOM}; give eta above 0, or use DDPMScheduler")
        if not 0 < eta <= 1:
            raise ValueError(f"eta {eta} is outside (0, 1]")
        return _assemble(scheduler, ddim_coefficients(scheduler, eta))
    kind = scheduler.config.variance_type
    return _assemble(scheduler, ddpm_coefficients(scheduler), kind if kind in VARIANCES else "fixed")


def _assemble(scheduler: Any, coefficients: tuple[torch.Tensor, ...], variance: str = "fixed") -> ReverseSchedule:
    """Coefficients in the order of the scheduler's timesteps, noise first, -> the schedule, with a last transition that has no noise."""
    timesteps = scheduler.timesteps.cpu()
    signal = scheduler.alphas_cumprod.cpu()[timesteps]
    noise, rest = (1 - signal) ** 0.5, signal**0.5
    one, zero = torch.ones_like(signal), torch.zeros_like(signal)
    prediction_type = scheduler.config.prediction_type
    if prediction_type == "epsilon":
        of_state, of_output = 1 / rest, -noise / rest
    elif prediction_type == "v_prediction":
        of_state, of_output = rest, -noise
    elif prediction_type == "sample":
        of_state, of_output = zero, one
    else:
        raise ValueError(f"prediction_type {prediction_type!r} is none of epsilon, v_prediction, sample")
    of_kept, of_clean, of_y, min_std, max_std = coefficients
    columns = [of_state, of_output, of_kept, of_clean, of_y, min_std.log(), max_std.log(), signal]
    columns, timesteps = [column.float().flip(0) for column in columns], timesteps.flip(0)  # now the data comes first
    if timesteps[0] > 0 and max_std[-1] > 2 * NO_NOISE:  # the scheduler's last step has noise: one more transition, which changes nothing
        identity = (0.0, 0.0, 0.0, 0.0, 1.0, -torch.inf, -torch.inf, 1.0)
        columns = [torch.cat([torch.tensor([value]), column]) for value, column in zip(identity, columns)]
        timesteps = torch.cat([torch.tensor([-1]), timesteps])
    return ReverseSchedule(variance, _keep(scheduler), timesteps, *columns)


def _keep(scheduler: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    config = scheduler.config
    if config.thresholding:
        return scheduler._threshold_sample  # of each state apart
    if config.clip_sample:
        return lambda clean: clean.clamp(-config.clip_sample_range, config.clip_sample_range)
    return lambda clean: clean


# Each returns of_kept, of_clean, of_y, smallest and largest std, all (K,) in the order of the scheduler's timesteps. The first two
# compute in float32 as the schedulers do, in their order: a beta of 1e-4 comes out of a subtraction from one, so another order
# differs from them in the fourth digit.


def ddpm_coefficients(scheduler: Any) -> tuple[torch.Tensor, ...]:
    """Ho et al. 2020, eq. 6-7; learned variances of Nichol & Dhariwal 2021, eq. 15.

    variance_type fixed_large_log is taken as the log of fixed_large, as its name says; diffusers takes the root of that log, NaN.
    """
    alphas_cumprod, timesteps = scheduler.alphas_cumprod.cpu(), scheduler.timesteps.cpu()
    previous = torch.tensor([int(scheduler.previous_timestep(t)) for t in scheduler.timesteps])
    signal = alphas_cumprod[timesteps]
    signal_previous = torch.where(previous >= 0, alphas_cumprod[previous], 1.0)
    alpha = signal / signal_previous
    beta = 1 - alpha
    of_kept = signal_previous**0.5 * beta / (1 - signal)
    of_y = alpha**0.5 * (1 - signal_previous) / (1 - signal)
    small = ((1 - signal_previous) / (1 - signal) * beta).clamp_min(NO_NOISE**2) ** 0.5
    large = beta**0.5
    bounds = {"fixed_small": (small, small), "fixed_large": (large, large)}
    low, high = bounds.get(scheduler.config.variance_type.removesuffix("_log"), (small, large))
    return of_kept, torch.zeros_like(of_kept), of_y, low, high


def ddim_coefficients(scheduler: Any, eta: float) -> tuple[torch.Tensor, ...]:
    """Song et al. 2021, eq. 12 and 16."""
    alphas_cumprod, timesteps = scheduler.alphas_cumprod.cpu(), scheduler.timesteps.cpu()
    previous = timesteps - scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    signal = alphas_cumprod[timesteps]
    signal_previous = torch.where(previous >= 0, alphas_cumprod[previous], scheduler.final_alpha_cumprod.cpu())
    std = eta * ((1 - signal_previous) / (1 - signal) * (1 - signal / signal_previous)) ** 0.5
    direction = (1 - signal_previous - std**2) ** 0.5  # times the network's noise, (y - sqrt(signal) clean) / sqrt(1 - signal)
    of_y = direction / (1 - signal) ** 0.5
    return signal_previous**0.5, -of_y * signal**0.5, of_y, std, std


def churned_coefficients(scheduler: Any, churn: float) -> tuple[torch.Tensor, ...]:
    """The reverse SDE with its noise scaled by `churn` and its score by (1 + churn^2) / 2 (churn 1: DDPM, to 0: probability flow).

    Between two times of the grid it is solved exactly for a fixed clean sample: with x = y / sqrt(signal) and s the noise over the
    signal, x' - clean = (x - clean) (s' / s)^(1 + churn^2) + s' sqrt(1 - (s' / s)^(2 churn^2)) xi. The last transition returns the
    clean sample.
    """
    signal = scheduler.alphas_cumprod.cpu().double()[scheduler.timesteps.cpu()]
    signal_next = torch.cat([signal[1:], signal.new_ones(1)])
    power = 1 + churn**2
    squared_next = (1 - signal_next) / signal_next  # s'^2
    factor = (squared_next * signal / (1 - signal)) ** (power / 2)
    # factor / sqrt(signal), which stays finite where the signal is 0
    of_y = signal_next**0.5 * squared_next ** (power / 2) * signal ** (churn**2 / 2) / (1 - signal) ** (power / 2)
    std = ((1 - signal_next) * (1 - (squared_next * signal / (1 - signal)) ** (churn**2))) ** 0.5
    return signal_next**0.5 * (1 - factor), torch.zeros_like(signal), of_y, std, std


class DenoisingChain:
    """The chain of R images under a denoiser; one network call a transition.

    What drafts re-use is a `centre`: the clean sample that the network said at y, unless `spread` is above 0. Then clean samples are
    taken to be N(centre, spread^2) given all that is known, and the guess follows the state as in `HoistedHead`. Any spread leaves the
    network's own transitions as they are. shape: of an image, without the batch. max_rows: states in one call of the denoiser; more
    go through it in chunks.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        schedule: ReverseSchedule,
        shape: tuple[int, ...],
        num_rows: int,
        *,
        device: torch.device | None = None,
        spread: float = 0.0,
        max_rows: int | None = None,
    ):
        if spread < 0:
            raise ValueError(f"spread {spread} is negative")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows {max_rows} is below 1")
        self.denoiser, self.schedule, self.shape, self.num_rows, self.max_rows = denoiser, schedule, tuple(shape), num_rows, max_rows
        self.num_steps, self.equal_std = len(schedule.timesteps), schedule.variance == "fixed"
        s = schedule
        root = s.signal.sqrt()
        share = spread**2 * root / (spread**2 * s.signal + 1 - s.signal).clamp_min(torch.finfo(root.dtype).tiny)
        rest = 1 - share * root
        gain = s.of_kept + s.of_clean
        # centre = kept_share kept + clean_share clean + y_share y; mean = gain centre + decay y. At step 0, where nothing is drafted
        # from it, the centre is the mean itself
        kept_share, clean_share, y_share = s.of_kept / (gain * rest), s.of_clean / (gain * rest), -share / rest
        gain, decay = gain * rest, s.of_y + gain * share
        kept_share[0], clean_share[0], y_share[0], gain[0], decay[0] = s.of_kept[0], s.of_clean[0], s.of_y[0], 1.0, 0.0
        columns = [s.of_state, s.of_output, kept_share, clean_share, y_share, gain, decay, s.min_log_std, s.max_log_std - s.min_log_std]
        columns[-2][0], columns[-1][0] = -torch.inf, 0.0
        self._columns = torch.stack(columns, 1).to(device)  # (K, 9)
        self._timesteps, self._skips = schedule.timesteps.to(device), bool(schedule.timesteps[0] < 0)
        self.decay = self._columns[:, 6]

    def _coefficients(self, k: int | torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._columns[k].split(1, -1)

    def predict(self, y: torch.Tensor, k: int | torch.Tensor, rows: torch.Tensor | None = None) -> Prediction:
        """One network call at y = y_{k+1} (M, D); transitions without a call are left out of it."""
        steps = torch.full((len(y),), k, device=y.device) if isinstance(k, int) else k
        rows = torch.arange(self.num_rows, device=y.device) if rows is None else rows
        timesteps = self._timesteps[steps]
        called = timesteps >= 0
        if not self._skips or called.all():
            return self._predict(y, steps, timesteps, rows)
        parts = self._predict(y[called], steps[called], timesteps[called], rows[called]) if called.any() else None
        width = 0 if self.equal_std else y.shape[1]
        whole = Prediction(y.clone(), y.new_zeros(len(y), width))  # the transition is the identity, so its centre is the state
        for part, values in zip(whole, parts or ()):
            part[called] = values
        return whole

    def _predict(self, y: torch.Tensor, steps: torch.Tensor, timesteps: torch.Tensor, rows: torch.Tensor) -> Prediction:
        size = self.max_rows or len(y)
        x = y.unflatten(1, self.shape)
        parts = [self.denoiser(*chunk) for chunk in zip(x.split(size), timesteps.split(size), rows.split(size))]
        out = torch.cat(parts).to(y.dtype)  # (M, C, ...)
        channels = self.shape[0] * (1 if self.equal_std else 2)
        if out.shape[1] != channels:
            raise ValueError(f"the denoiser's output has {out.shape[1]} channels, a {self.schedule.variance} variance needs {channels}")
        of_state, of_output, kept_share, clean_share, y_share, _, _, low, width = self._coefficients(steps)
        clean = of_state * y + of_output * out[:, : self.shape[0]].flatten(1)
        kept = self.schedule.keep(clean.unflatten(1, self.shape)).flatten(1)
        centre = kept_share * kept + clean_share * clean + y_share * y
        if self.equal_std:
            return Prediction(centre, y.new_zeros(len(y), 0))  # the std is known: nothing of it to re-use
        said = out[:, self.shape[0] :].flatten(1)
        if self.schedule.variance == "learned_range":
            return Prediction(centre, 0.5 * (said + 1))
        log_std = 0.5 * said.log()  # the network said the variance itself; as a share of the range it can be re-used at other steps
        broken = ~log_std.isfinite().all(1) & (steps > 0)
        if broken.any():
            raise NonFiniteError(rows[broken])
        return Prediction(centre, torch.where(width > 0, (log_std - low) / width, 0.0))

    def transition(self, prediction: Prediction, y: torch.Tensor, k: int | torch.Tensor) -> Gaussian:
        """The law of y_k given y = y_{k+1} (M, D) and a prediction, new or re-used."""
        *_, gain, decay, low, width = self._coefficients(k)
        mean = torch.addcmul(decay * y, gain, prediction.centre)
        log_std = low if self.equal_std else torch.addcmul(low, width, prediction.fraction)
        return Gaussian(mean, log_std.expand_as(mean))

    def __call__(self, y: torch.Tensor, k: int | torch.Tensor, rows: torch.Tensor | None = None) -> Gaussian:
        return self.transition(self.predict(y, k, rows), y, k)
