"""`accelerate(model)`: two lines that give an existing code base a faster sampler, with the method it already calls.

The model is an instance of the authors' own class. It is known by its attributes, none of its code is imported, and its parameters are
shared, not copied: every call looks at them anew, so the sampler follows whatever the model is moved, cast or trained to. Inside
`torch.autocast` the networks run in its dtype, and what is decided from their output in float32.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from car_spec.adapters.harmon import Reading
from car_spec.models.presets import PRESETS, Preset
from car_spec.noise import image_generators
from car_spec.pipeline import SAMPLERS, MARPipeline
from car_spec.schedule import respaced_timesteps
from car_spec.trace import Trace

MARKS = {"harmon": "llm", "mar": "diffloss", "xar": "pred"}  # an attribute that only this kind has, Harmon first: it holds a MAR
TRANSFORMER = (
    "z_proj",
    "z_proj_ln",
    "encoder_pos_embed_learned",
    "encoder_blocks",
    "encoder_norm",
    "decoder_embed",
    "decoder_pos_embed_learned",
    "decoder_blocks",
    "decoder_norm",
)
MAR_ATTRIBUTES = (
    *TRANSFORMER,
    "class_emb",
    "fake_latent",
    "mask_token",
    "diffusion_pos_embed_learned",
    "diffloss.net",
    "encoder_blocks.0.attn.num_heads",
)
ATTRIBUTES = {
    "mar": MAR_ATTRIBUTES,
    "xar": (*TRANSFORMER, "class_emb", "time_embed", "pred", "encoder_blocks.0.attn.num_heads"),
    "harmon": ("llm.config", "proj_in", "proj_out", "decode", *(f"mar.{name}" for name in MAR_ATTRIBUTES)),
}
OPTIONS = tuple(dict.fromkeys(name for names in SAMPLERS.values() for name in names))


def accelerate(
    model: Any,
    *,
    sampler: str | None = None,
    draft: Any = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    num_inference_steps: int | None = None,
    **options: Any,
) -> Any:
    """A sampler for an instance of the authors' MAR, xAR or Harmon class, with the method their code calls.

    MAR: `MARSampler.sample_tokens`. xAR: `XARSampler.sample_tokens`. Harmon: `HarmonSampler.sample`. A diffusers pipeline goes to
    `car_spec.diffusion_pipeline.accelerate_pipeline` with all options.
    sampler and options: as in the pipelines (`lookahead`, `window`, `drafter`, ...; see `MARPipeline.__call__`), for all calls.
    draft: another instance of the same class, for `drafter="model"` and `sampler="cspd"`.
    generator or seed: where the random numbers come from, call after call; with neither, from fresh entropy. torch's global generator is
    left alone unless it is given (`generator=torch.default_generator`).
    num_inference_steps: denoising steps; None takes what the model's own sampler was built with, or the preset of its size.
    Raises ValueError for a model that does not fit, with the missing attribute's name, and TypeError for an option that does not exist.
    """
    if generator is not None and seed is not None:
        raise ValueError(f"generator and seed {seed} are both given; the seed belongs to the generator")
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
    diffusers = sys.modules.get("diffusers")  # not loaded: then the model cannot be one of its pipelines
    if diffusers is not None and isinstance(model, diffusers.DiffusionPipeline):
        from car_spec.diffusion_pipeline import accelerate_pipeline

        given = dict(sampler=sampler, draft=draft, generator=generator, num_inference_steps=num_inference_steps)
        return accelerate_pipeline(model, **{name: value for name, value in given.items() if value is not None}, **options)
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"accelerate() has no option {name!r}; its options are {', '.join(OPTIONS)}")
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    kinds: dict[str, type[_Sampler]] = {"mar": MARSampler, "xar": XARSampler, "harmon": HarmonSampler}
    network = Network(model)
    return kinds[network.kind](network, Network(draft) if draft is not None else None, generator, num_inference_steps, sampler, options)


class Network:
    """A model of the authors' classes, and the same network in ours, which shares its parameters."""

    def __init__(self, model: Any):
        self.model = unwrap(model)
        self.kind = kind_of(self.model)
        self.ours = self._load(None)

    def _state(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        state = {name: value for name, value in self.model.state_dict().items() if not name.startswith("vae.")}
        return state if dtype is None else {name: value.to(dtype) for name, value in state.items()}

    def _load(self, dtype: torch.dtype | None) -> Any:
        from car_spec.models.loading import Checkpoint, load_mar, load_xar

        checkpoint = Checkpoint(Path(type(self.model).__name__), "module", self._state(dtype))
        mar = self.model.mar if self.kind == "harmon" else self.model
        heads = mar.encoder_blocks[0].attn.num_heads
        if self.kind != "harmon":
            return (load_mar if self.kind == "mar" else load_xar)(checkpoint, num_heads=heads)
        from car_spec.models.harmon import build_harmon, infer_harmon_config

        return build_harmon(checkpoint, infer_harmon_config(checkpoint, heads, self.model.llm.config.to_dict()))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def follow(self) -> None:
        """Take the model's parameters as they are now, whatever device and dtype they have.

        They are not copied, unless the caller is inside `torch.autocast`: then the network runs in a copy of autocast's dtype.
        """
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if self.kind == "harmon":
            self.ours = self._load(dtype)  # its language model has buffers that depend on the device
            return
        from car_spec.models.loading import load_strictly

        state = self._state(dtype)
        load_strictly(self.ours, {name: state[name] for name in self.ours.state_dict()}, Path(type(self.model).__name__))

    @property
    def num_inference_steps(self) -> int | None:
        """Denoising steps that the model's own sampler of tokens takes; None where it does not say."""
        head = (self.model.mar if self.kind == "harmon" else self.model).diffloss if self.kind != "xar" else None
        diffusion = getattr(head, "gen_diffusion", None)
        timesteps = getattr(diffusion, "timestep_map", None)
        if timesteps is None:
            return getattr(diffusion, "num_timesteps", None)
        if list(timesteps) != respaced_timesteps(len(timesteps)).tolist():
            raise ValueError(
                f"{type(self.model).__name__}: diffloss.gen_diffusion takes {len(timesteps)} timesteps that are not evenly spaced"
            )
        return len(timesteps)


def unwrap(model: Any) -> Any:
    """The module inside data-parallel wrappers and torch.compile."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(model, nn.Module) and "_orig_mod" in model._modules:
            model = model._orig_mod
        else:
            return model


def kind_of(model: Any) -> str:
    """mar, xar or harmon, by attributes. Raises ValueError that names the first one missing."""
    kind = next((kind for kind, mark in MARKS.items() if hasattr(model, mark)), None)
    name = type(model).__name__
    if kind is None or not isinstance(model, nn.Module):
        marks = ", ".join(f"{mark} ({kind})" for kind, mark in MARKS.items())
        raise ValueError(f"{name} is no model that accelerate knows: it has none of the attributes {marks}")
    for attribute in ATTRIBUTES[kind]:
        try:
            attrgetter(attribute)(model)
        except AttributeError:
            raise ValueError(f"{name} has {MARKS[kind]}, as the class of {kind} does, but no attribute {attribute}") from None
    return kind


class _Sampler:
    """What the samplers share. `trace` tells what the last call took (`Trace`), `settings` all numbers it was sampled with."""

    def __init__(
        self,
        network: Network,
        draft: Network | None,
        generator: torch.Generator,
        num_inference_steps: int | None,
        sampler: str | None,
        options: dict[str, Any],
    ):
        self.network, self.draft, self.generator = network, draft, generator
        self.options = options | {"sampler": sampler}
        self.trace: Trace | None = None
        self.settings: dict[str, Any] = {}
        if draft is not None and draft.kind != network.kind:
            raise ValueError(f"draft is a network of {draft.kind}, the model one of {network.kind}")
        self.steps = num_inference_steps or network.num_inference_steps
        self.pipeline = self._pipeline(network)
        if draft is not None:
            self.pipeline.set_draft(self._pipeline(draft))
        self.pipeline.settings(**self.options)  # an option that cannot be is refused here, not in the first call

    def _preset(self, network: Network) -> Preset:
        config = network.ours.config.mar if network.kind == "harmon" else network.ours.config
        num_iter = config.num_cells if network.kind == "xar" else config.num_tokens
        preset = PRESETS.get((network.kind, config.width)) or Preset(type(network.model).__name__, config.num_heads, num_iter)
        return replace(preset, num_iter=min(preset.num_iter, num_iter), num_inference_steps=self.steps or preset.num_inference_steps)

    def _pipeline(self, network: Network) -> MARPipeline:
        config, patch = network.ours.config, getattr(network.model, "patch_size", 1)
        return MARPipeline(network.ours, None, self._preset(network), latent_channels=config.token_dim // patch**2)

    def _follow(self) -> None:
        for network in (self.network, self.draft):
            if network is not None:
                network.follow()

    def _latents(self, labels: torch.Tensor | Sequence[int] | None, count: int | None, **given: Any) -> torch.Tensor:
        """-> (B, C, h, w) float32, as the network has them: not divided by the autoencoder's scale."""
        self._follow()
        listed = labels.tolist() if isinstance(labels, torch.Tensor) else labels
        with torch.autocast(self.network.device.type, enabled=False):  # states and densities stay in float32
            output = self.pipeline(listed, num_images=count, generator=self.generator, output_type="latent", **self.options, **given)
        self.trace, self.settings = output.trace, output.settings
        return output.images


class MARSampler(_Sampler):
    """In the place of a MAR of Li et al. 2024."""

    def sample_tokens(
        self,
        bsz: int,
        num_iter: int = 64,
        cfg: float = 1.0,
        cfg_schedule: str = "linear",
        labels: torch.Tensor | Sequence[int] | None = None,
        temperature: float = 1.0,
        progress: bool = False,
    ) -> torch.Tensor:
        """Latents (bsz, C, h, w), as the class's own method returns them.

        labels (bsz,) or None for no class. progress: a bar over AR steps where the sampler is sequential; how many rounds a
        speculative one takes is not known beforehand.
        """
        with _bar(num_iter, progress) as callback:
            return self._latents(
                labels,
                bsz,
                num_iter=num_iter,
                guidance_scale=cfg,
                guidance_schedule=cfg_schedule,
                temperature=temperature,
                callback=callback,
            )


class XARSampler(_Sampler):
    """In the place of an xAR of Ren et al. 2025. Arguments go by name."""

    def _pipeline(self, network: Network) -> MARPipeline:
        from car_spec.xar_pipeline import XARPipeline

        return XARPipeline(network.ours, None, self._preset(network))

    def sample_tokens(
        self,
        *,
        cfg: float = 1.0,
        label: torch.Tensor | Sequence[int] | None = None,
        num_steps: int | None = None,
        bsz: int | None = None,
        progress: bool = False,
    ) -> torch.Tensor:
        """Latents (B, C, h, w). label (B,), or None for `bsz` images without a class. cfg: of the last cell; at the first it is 1."""
        with _bar(self.network.ours.config.num_cells, progress) as callback:
            return self._latents(label, bsz, guidance_scale=cfg, num_inference_steps=num_steps, callback=callback)


class HarmonSampler(_Sampler):
    """In the place of a Harmon of Wu et al. 2025. Arguments go by name."""

    def _pipeline(self, network: Network) -> MARPipeline:
        if self.draft is not None:
            raise ValueError("draft is for MAR and xAR: Harmon drafts for itself")
        if self.options.get("lookahead") == "auto":
            raise ValueError("lookahead 'auto' is for MAR: Harmon takes a number")
        from car_spec.harmon_pipeline import HarmonPipeline

        return HarmonPipeline(network.ours, None, None, self._preset(network))

    @torch.no_grad()
    def sample(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        num_iter: int = 64,
        cfg: float = 1.0,
        cfg_schedule: str = "constant",
        temperature: float = 1.0,
        progress: bool = False,
        image_shape: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """What the class's own `decode` makes of the sampled tokens (B, rows, columns, D): images.

        input_ids and attention_mask (B, P), padded on the right; with cfg other than 1 they are (2 B, P), prompts first and then as many
        unconditional ones. image_shape: rows and columns of tokens; None takes the grid that was learned.
        """
        from car_spec.harmon_pipeline import HarmonPipeline, ReadTexts

        rows, guided = len(input_ids), cfg != 1
        if guided and rows % 2:
            raise ValueError(f"cfg {cfg} needs an unconditional prompt for each prompt, but input_ids has {rows} rows, an odd number")
        self._follow()
        harmon, batch = self.network.ours, rows // 2 if guided else rows
        pipeline = HarmonPipeline(harmon, None, None, self.pipeline.preset).sized(*(image_shape or (None, None)))  # a token is a pixel here
        own = torch.arange(batch, device=self.network.device)[:, None]  # (B, 1); the unconditional prompts follow behind
        with torch.autocast(self.network.device.type, enabled=False), _bar(num_iter, progress) as callback:
            labels = ReadTexts([], Reading(harmon.read_prompts(input_ids, attention_mask), own, own + batch))
            self.settings = pipeline.settings(
                **self.options, num_iter=num_iter, guidance_scale=cfg, guidance_schedule=cfg_schedule, temperature=temperature
            )
            generators = image_generators(self.generator, batch)
            tokens, self.trace = pipeline._sample_tokens(labels, generators, self.settings, callback)
        return self.network.model.decode(tokens.unflatten(1, pipeline.grid).to(harmon.proj_in[0].weight.dtype))


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[int, torch.Tensor], object] | None]:
    if not wanted:
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total) as bar:
        yield lambda _step, _tokens: bar.update()
