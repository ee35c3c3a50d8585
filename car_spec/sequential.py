"""The sequential sampler: AR step after AR step, denoising step after denoising step. The reference for law and speed."""

from collections.abc import Callable, Sequence

import torch

from car_spec.adapters.mar import ARStep, MARAdapter
from car_spec.chain import sample_chain
from car_spec.trace import Trace

# positions (B, n) -> initial noise (B, n, D) and step noise (B, n, K, D); step noise index k is used at step k > 0
NoiseSource = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def noise_from_generators(generators: Sequence[torch.Generator], num_steps: int, token_dim: int, device: torch.device) -> NoiseSource:
    """Standard normal noise, that of image b from generators[b] alone: an image does not depend on the batch it is in.

    Generators live on the CPU, so that a seed means the same image on every device.
    """

    def draw(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (positions.shape[1], num_steps, token_dim)
        noise = torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)  # (B, n, K, D)
        return noise[:, :, 0], noise  # step 0 is deterministic, so its entry is free for the initial noise

    return draw


def sample_sequential(
    adapter: MARAdapter,
    steps: Sequence[ARStep],
    class_vectors: torch.Tensor,
    null_vectors: torch.Tensor,
    noise: NoiseSource,
    on_step: Callable[[int, torch.Tensor], None] | None = None,
    trace: Trace | None = None,
) -> torch.Tensor:
    """Class vectors and null vectors (B, W), or whatever rows the adapter's `conditions` takes, -> tokens (B, N, D) float32.

    on_step(i, tokens) is called after AR step i.

    Source: Li et al. 2024, section 3; one backbone call an AR step, K head calls inside it. Guidance scale 1 in all steps
    never runs the unconditional half.
    """
    batch = len(class_vectors)
    vectors = guidance_halves(steps, class_vectors, null_vectors)  # (B, H, W)
    tokens = class_vectors.new_zeros(batch, adapter.num_tokens, adapter.token_dim, dtype=torch.float32)
    mask = tokens.new_ones(batch, adapter.num_tokens)
    rows = torch.arange(batch, device=tokens.device)[:, None]
    for i, step in enumerate(steps):
        z = adapter.conditions(tokens, mask, vectors)  # (B, H, N, W)
        if trace is not None:
            trace.count_backbone(rows[:, 0], vectors.shape[1])
            trace.chain.calls += adapter.head.num_steps
            trace.chain.rows += adapter.head.num_steps * step.positions.numel()
            trace.record_round(rows[:, 0], torch.full((batch,), step.positions.shape[1]))
        conditions = z.transpose(1, 2)[rows, step.positions].flatten(0, 1)  # (B n, H, W)
        initial, step_noise = noise(step.positions)
        y = sample_chain(adapter.chain(conditions, step.guidance_scale), initial.flatten(0, 1), step_noise.flatten(0, 1))
        tokens = tokens.index_put((rows, step.positions), y.unflatten(0, (batch, -1)))
        mask = mask.index_put((rows, step.positions), mask.new_zeros(()))
        if on_step is not None:
            on_step(i, tokens)
    return tokens


def guidance_halves(steps: Sequence[ARStep], class_vectors: torch.Tensor, null_vectors: torch.Tensor) -> torch.Tensor:
    """(B, W) each -> (B, H, W): with the null vectors only where some AR step is guided. Scale 1 never doubles the batch."""
    guided = any(step.guidance_scale != 1 for step in steps)
    return torch.stack([class_vectors, null_vectors] if guided else [class_vectors], 1)
