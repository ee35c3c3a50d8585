"""The sequential sampler: AR step after AR step, denoising step after denoising step. The reference for law and speed."""

from collections.abc import Callable, Sequence

import torch

from car_spec.adapters.mar import ARStep, MARAdapter
from car_spec.chain import sample_chain

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
) -> torch.Tensor:
    """Class vectors and null vectors (B, W) -> tokens (B, N, D) float32. on_step(i, tokens) is called after AR step i.

    Source: Li et al. 2024, section 3; one backbone call an AR step, K head calls inside it. Guidance scale 1 in all steps
    never runs the unconditional half.
    """
    batch = len(class_vectors)
    guided = any(step.guidance_scale != 1 for step in steps)
    vectors = torch.cat([class_vectors, null_vectors]) if guided else class_vectors  # (H B, W), H = 2 or 1
    tokens = class_vectors.new_zeros(batch, adapter.num_tokens, adapter.token_dim, dtype=torch.float32)
    mask = tokens.new_ones(batch, adapter.num_tokens)
    for i, step in enumerate(steps):
        seen, hidden = (torch.cat([tokens, tokens]), torch.cat([mask, mask])) if guided else (tokens, mask)
        z = adapter.conditions(seen, hidden, vectors)  # (H B, N, W)
        index = step.positions[..., None].expand(-1, -1, z.shape[-1])  # (B, n, W)
        condition = z[:batch].gather(1, index).flatten(0, 1)  # (B n, W)
        unconditional = z[batch:].gather(1, index).flatten(0, 1) if guided else None
        chain = adapter.chain(condition, unconditional, step.guidance_scale)
        initial, step_noise = noise(step.positions)
        y = sample_chain(chain, initial.flatten(0, 1), step_noise.flatten(0, 1))  # (B n, D)
        y = y.view(batch, -1, adapter.token_dim)
        tokens = tokens.scatter(1, step.positions[..., None].expand_as(y), y)
        mask = mask.scatter(1, step.positions, 0.0)
        if on_step is not None:
            on_step(i, tokens)
    return tokens
