"""Pipelines of diffusers whose denoising loop is autospeculated: called as before, they return the same class of output.

What surrounds the loop (prompts, guidance, decoding) is done by the pipeline's own components and methods. The images follow the
scheduler's law exactly; they are other images than the pipeline's own for the same seed, since random numbers are used in another order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from car_spec.adapters.ddpm import Denoiser, DenoisingChain, reverse_schedule
from car_spec.asd import ChainTrace, autospeculate
from car_spec.noise import Noise, image_generators
from car_spec.parallel import Shares

DRAFTERS = ("free", "frozen")
VERIFICATIONS = ("block", "token")
Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True)
class DiffusionSettings:
    """How images are sampled.

    window: transitions drafted before one verification; None: all that are left. taper: see `draft_lengths`.
    drafter: `free` re-uses the last verification's prediction, `frozen` asks for a fresh one first, two calls a round.
    verification: `block`, or `token`-wise. spread: of clean samples, see `DenoisingChain`.
    eta: of DDIMScheduler, in (0, 1]. churn: None for the scheduler's own transitions, see `churned_coefficients`.
    max_rows: images in one call of the network; a verification batch beyond it goes through in chunks. None: no limit.
    """

    window: int | None = 8
    taper: float = 1.0
    drafter: str = "free"
    verification: str = "block"
    spread: float = 0.0
    eta: float = 0.0
    churn: float | None = None
    max_rows: int | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} is below 1")
        if not 0 < self.taper <= 1:
            raise ValueError(f"taper {self.taper} is outside (0, 1]")
        for name, allowed in (("drafter", DRAFTERS), ("verification", VERIFICATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is none of {', '.join(allowed)}")
        if self.spread < 0:
            raise ValueError(f"spread {self.spread} is negative")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows {self.max_rows} is below 1")


def sample_speculatively(
    chain: DenoisingChain, noise: Noise, settings: DiffusionSettings, trace: ChainTrace | None = None, initial: torch.Tensor | None = None
) -> torch.Tensor:
    """All rows of a chain -> (R, D), in few sequential calls, from `initial` (R, D) or fresh noise."""
    path = autospeculate(
        chain,
        noise.normal(math.prod(chain.shape)) if initial is None else initial,
        noise,
        window=chain.num_steps if settings.window is None else settings.window,
        taper=settings.taper,
        drafter=settings.drafter,
        token_wise=settings.verification == "token",
        trace=trace,
        record=False,
    )
    return path.states[:, 0]


def sample_sequentially(chain: DenoisingChain, noise: Noise, trace: ChainTrace | None = None) -> torch.Tensor:
    """The reference: one call a transition, noise drawn as it is needed -> (R, D)."""
    dim = math.prod(chain.shape)
    y = noise.normal(dim)
    for k in reversed(range(chain.num_steps)):
        law = chain(y, k)
        y = law.sample(noise.normal(dim)) if k else law.mean
        if trace is not None:
            trace.count(len(y))
    return y


class AcceleratedPipeline:
    """A pipeline of diffusers with its loop replaced. `pipe` is the pipeline, looked at anew in every call."""

    def __init__(self, pipe: Any, settings: DiffusionSettings, generator: Generators = None, shares: Shares | None = None):
        self.pipe, self.settings, self.generator, self.shares = pipe, settings, generator, shares
        self._schedule(len(pipe.scheduler.timesteps), settings.eta)  # refuses what is not random before the first call

    @property
    def network(self) -> Any:
        return self.pipe.unet

    @property
    def device(self) -> torch.device:
        return self.pipe._execution_device

    def _schedule(self, num_inference_steps: int, eta: float):
        self.pipe.scheduler.set_timesteps(num_inference_steps)
        return reverse_schedule(self.pipe.scheduler, eta=eta, churn=self.settings.churn)

    def chain(
        self, denoiser: Denoiser, shape: tuple[int, ...], num_rows: int, num_inference_steps: int, eta: float | None = None
    ) -> DenoisingChain:
        own = self.settings
        schedule = self._schedule(num_inference_steps, own.eta if eta is None else eta)
        return DenoisingChain(denoiser, schedule, shape, num_rows, device=self.device, spread=own.spread, max_rows=own.max_rows)

    def _sample(self, chain: DenoisingChain, generator: Generators, trace: ChainTrace | None, latents: torch.Tensor | None = None):
        """-> images or latents (B, *shape) float32."""
        noise = Noise(self._generators(generator, chain.num_rows), torch.arange(chain.num_rows, device=self.device))
        if latents is None:
            initial = noise.normal(math.prod(chain.shape))
        else:
            initial = latents.to(self.device).float().flatten(1)
        if self.shares is None:
            return sample_speculatively(chain, noise, self.settings, trace, initial).unflatten(1, chain.shape)
        self.shares.require_agreement(initial, "noise")
        out = sample_speculatively(self.shares.images(chain), noise, self.settings, trace, initial)
        self.shares.require_agreement(out, "images")
        return out.unflatten(1, chain.shape)

    def _generators(self, generator: Generators, count: int) -> list[torch.Generator]:
        """Of a call, or of all calls, or from fresh entropy, which processes that share a verification have to share as well."""
        generator = self.generator if generator is None else generator
        if generator is None and self.shares is not None:
            generator = torch.Generator().manual_seed(self.shares.ranks.once(lambda: torch.Generator().seed()))
        return image_generators(generator, count)

    def _finish(self, images: torch.Tensor, output_type: str) -> Any:
        """Images (B, C, H, W) in [-1, 1] as diffusers' image pipelines give them out."""
        images = (images / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return images
        array = images.cpu().permute(0, 2, 3, 1).float().numpy()
        return self.pipe.numpy_to_pil(array) if output_type == "pil" else array


class AcceleratedDDPM(AcceleratedPipeline):
    """DDPMPipeline: an unconditional network on pixels."""

    @property
    def shape(self) -> tuple[int, ...]:
        config = self.network.config
        size = config.sample_size
        return (config.in_channels, *((size, size) if isinstance(size, int) else size))

    def image_chain(self, batch_size: int, num_inference_steps: int) -> DenoisingChain:
        network = self.network
        denoiser: Denoiser = lambda x, t, rows: network(x.to(network.dtype), t).sample
        return self.chain(denoiser, self.shape, batch_size, num_inference_steps)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        generator: Generators = None,
        num_inference_steps: int = 1000,
        output_type: str | None = "pil",
        return_dict: bool = True,
        trace: ChainTrace | None = None,
    ) -> Any:
        """As DDPMPipeline is called; trace receives the counts of calls and rows."""
        from diffusers import ImagePipelineOutput

        images = self._sample(self.image_chain(batch_size, num_inference_steps), generator, trace)
        images = self._finish(images, output_type or "np")
        self.pipe.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)


class AcceleratedDiT(AcceleratedPipeline):
    """DiTPipeline: a class-conditional transformer on latents.

    Where the scheduler learns its variance, the network's is used, that of the conditional half (Peebles & Xie 2023); diffusers' own
    loop always drops it.
    """

    @property
    def network(self) -> Any:
        return self.pipe.transformer

    @torch.no_grad()
    def __call__(
        self,
        class_labels: list[int],
        guidance_scale: float = 4.0,
        generator: Generators = None,
        num_inference_steps: int = 50,
        output_type: str | None = "pil",
        return_dict: bool = True,
        trace: ChainTrace | None = None,
    ) -> Any:
        """As DiTPipeline is called; trace receives the counts of calls and rows."""
        from diffusers import ImagePipelineOutput

        network, config, vae = self.network, self.network.config, self.pipe.vae
        channels, guided = config.in_channels, guidance_scale > 1
        learned = str(self.pipe.scheduler.config.get("variance_type")).startswith("learned") and self.settings.churn is None
        labels = torch.tensor(class_labels, device=self.device).reshape(-1)
        null = config.num_embeds_ada_norm  # the row of the embedding behind the classes

        def denoiser(x: torch.Tensor, t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            x, classes = x.to(network.dtype), labels[rows]
            if guided:
                x, t, classes = torch.cat([x, x]), torch.cat([t, t]), torch.cat([classes, torch.full_like(classes, null)])
            out = network(x, timestep=t, class_labels=classes).sample
            eps, variance = out[:, :channels], out[:, channels:]
            if guided:
                eps = guide(eps, guidance_scale, unconditional_first=False)
            return torch.cat([eps, variance[: len(eps)]], 1) if learned else eps

        shape = (channels, config.sample_size, config.sample_size)
        latents = self._sample(self.chain(denoiser, shape, len(labels), num_inference_steps), generator, trace)
        images = vae.decode((latents / vae.config.scaling_factor).to(vae.dtype)).sample
        images = self._finish(images, output_type or "np")
        self.pipe.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)


class AcceleratedStableDiffusion(AcceleratedPipeline):
    """StableDiffusionPipeline: a text-conditional network on latents. IP adapters and callbacks are not taken over."""

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float | None = None,
        generator: Generators = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        guidance_rescale: float = 0.0,
        clip_skip: int | None = None,
        trace: ChainTrace | None = None,
    ) -> Any:
        """As StableDiffusionPipeline is called; eta None is that of the settings; trace receives the counts of calls and rows."""
        from diffusers.pipelines.stable_diffusion.pipeline_output import StableDiffusionPipelineOutput
        from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

        pipe, network, vae = self.pipe, self.network, self.pipe.vae
        if network.config.time_cond_proj_dim is not None:
            raise ValueError("the network takes its guidance scale as an input (guidance-distilled), which is not supported")
        size = network.config.sample_size
        sides = (size, size) if isinstance(size, int) else size
        height, width = height or sides[0] * pipe.vae_scale_factor, width or sides[1] * pipe.vae_scale_factor
        pipe.check_inputs(prompt, height, width, None, negative_prompt, prompt_embeds, negative_prompt_embeds)
        guided = guidance_scale > 1
        embeds, null_embeds = pipe.encode_prompt(
            prompt,
            self.device,
            num_images_per_prompt,
            guided,
            negative_prompt,
            prompt_embeds=prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds,
            clip_skip=clip_skip,
        )

        def denoiser(x: torch.Tensor, t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            x, context = x.to(network.dtype), embeds[rows]
            if guided:
                x, t, context = torch.cat([x, x]), torch.cat([t, t]), torch.cat([null_embeds[rows], context])
            out = network(x, t, encoder_hidden_states=context).sample
            if not guided:
                return out
            eps = guide(out, guidance_scale, unconditional_first=True)
            return rescale_noise_cfg(eps, out.chunk(2)[1], guidance_rescale) if guidance_rescale > 0 else eps

        shape = (network.config.in_channels, height // pipe.vae_scale_factor, width // pipe.vae_scale_factor)
        images = self._sample(self.chain(denoiser, shape, len(embeds), num_inference_steps, eta), generator, trace, latents)
        images, unsafe = images.to(vae.dtype), None
        if output_type != "latent":
            images = vae.decode(images / vae.config.scaling_factor).sample
            images, unsafe = pipe.run_safety_checker(images, self.device, embeds.dtype)
        safe = [True] * len(images) if unsafe is None else [not flag for flag in unsafe]
        images = pipe.image_processor.postprocess(images, output_type=output_type, do_denormalize=safe)
        pipe.maybe_free_model_hooks()
        if not return_dict:
            return images, unsafe
        return StableDiffusionPipelineOutput(images=images, nsfw_content_detected=unsafe)


def guide(out: torch.Tensor, scale: float, *, unconditional_first: bool) -> torch.Tensor:
    """Classifier-free guidance (Ho & Salimans 2021): the two halves (2 M, ...) of a batch -> (M, ...)."""
    first, second = out.chunk(2)
    conditional, unconditional = (second, first) if unconditional_first else (first, second)
    return unconditional + scale * (conditional - unconditional)


KINDS: dict[str, Callable[..., AcceleratedPipeline]] = {
    "DDPMPipeline": AcceleratedDDPM,
    "DiTPipeline": AcceleratedDiT,
    "StableDiffusionPipeline": AcceleratedStableDiffusion,
}


def accelerate_pipeline(pipe: Any, *, generator: Generators = None, shares: Shares | None = None, **options: Any) -> AcceleratedPipeline:
    """A pipeline of diffusers, called like `pipe` and with the same class of output, that samples its law in far fewer sequential calls.

    pipe: a DDPMPipeline, DiTPipeline or StableDiffusionPipeline with a stochastic scheduler. options: `DiffusionSettings`.
    generator: for calls that are given none; one for the batch, or a list with one an image.
    shares: divide each call of the network among processes that all make this call with the same random numbers (`car_spec.parallel`).
    Raises ValueError for another pipeline, for a deterministic scheduler, with the reason, and for options out of their range; RankError
    where processes differ.
    """
    for name in options:
        if name not in DiffusionSettings.__dataclass_fields__:
            known = ", ".join(DiffusionSettings.__dataclass_fields__)
            raise TypeError(f"accelerate_pipeline() has no option {name!r}; its options are generator, shares, {known}")
    settings = DiffusionSettings(**options)
    kind = next((KINDS[c.__name__] for c in type(pipe).__mro__ if c.__name__ in KINDS), None)
    if kind is None:
        raise ValueError(f"{type(pipe).__name__} is none of the pipelines known here: {', '.join(KINDS)}")
    return kind(pipe, settings, generator, shares)
