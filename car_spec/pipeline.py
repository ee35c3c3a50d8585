"""`load_pipeline(...)` and the pipeline it returns, in the style of diffusers' pipelines."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from car_spec.adapters.mar import GUIDANCE_SCHEDULES, ARStep, MARAdapter, remaining_after_each_step, unpatchify
from car_spec.asd import NonFiniteError
from car_spec.costmodel import PILOT_IMAGES, WINDOWS, tune
from car_spec.cspd import CSpDSampler, CSpDSettings, NoiseTable
from car_spec.engine import DraftModel, LosslessSampler, LosslessSettings
from car_spec.execution import Execution
from car_spec.models.presets import PRESETS, Preset
from car_spec.noise import Noise, image_generators
from car_spec.parallel import Shares
from car_spec.sequential import noise_from_generators, sample_sequential
from car_spec.trace import Trace

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

    from car_spec.models.loading import Checkpoint
    from car_spec.models.mar import MAR

DEMO_FOLDER = Path(__file__).parent / "demo"
DEMO_MODELS = {
    "demo": "mar.safetensors",
    "demo-draft": "mar-draft.safetensors",
    "demo-xar": "xar.safetensors",
    "demo-xar-draft": "xar-draft.safetensors",
    "demo-harmon": "harmon",
    "demo-harmon-draft": "harmon-draft",
}
PROBLEM_SETTINGS = ("num_iter", "num_inference_steps", "guidance_scale", "guidance_schedule", "temperature")
LOSSLESS_SETTINGS = ("lookahead", "window", "final_tolerance", "token_wise", "drafter")
CSPD_SETTINGS = ("variant", "draft_length", "prefill", "aligned")
SAMPLERS = {"lossless": LOSSLESS_SETTINGS, "sequential": (), "cspd": CSPD_SETTINGS}  # and the settings that only they know
SETTINGS = (*PROBLEM_SETTINGS, "sampler", *LOSSLESS_SETTINGS, *CSPD_SETTINGS)
LAWS = {"lossless": "the model's own", "sequential": "the model's own", "cspd": "approximate"}
DEFAULT_SAMPLER = "lossless"
OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class NonFiniteImageError(RuntimeError):
    """Some images of a batch hold NaN or infinity; `indices` says which, counted within the batch."""

    def __init__(self, indices: list[int]):
        self.indices = indices
        super().__init__(f"images {indices} of the batch are not finite; float16 overflows easily, try bfloat16 or float32")


@dataclass
class ImagePipelineOutput:
    """images: a list of PIL images, or an array (B, H, W, 3) in [0, 1], or a tensor: images (B, 3, H, W) in [0, 1], or scaled latents.
    trace: how many network calls it took, and what verification did. settings: all numbers it was sampled with; given back with the
    same generators they make the same images.
    """

    images: Any
    trace: Trace
    settings: dict[str, Any]


@dataclass(frozen=True)
class WeightsSource:
    """The files that a pipeline was loaded from, and which copy of the weights was taken."""

    model: Path
    copy: str
    vae: Path
    tokenizer: Path | None = None
    base: Path | None = None


def image_seed(seed: int, image_id: int) -> int:
    """The seed of one image's generator: a function of the run's seed and the image's number alone (63 bits)."""
    digest = hashlib.sha256(f"{seed}/{image_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class MARPipeline:
    """Class-conditional sampling with a MAR network and its autoencoder.

    vae: None for a pipeline of latents only (`output_type="latent"`), whose channels are `latent_channels`.
    """

    def __init__(
        self,
        model: "MAR",
        vae: "AutoencoderKL | None",
        preset: Preset,
        *,
        latent_channels: int | None = None,
        clip_sample_range: float | None = None,
        class_names: Sequence[str] | None = None,
        source: WeightsSource | None = None,
    ):
        self.source = source
        self.model, self.vae, self.preset = model, vae, preset
        self.clip_sample_range = clip_sample_range
        config = self.mar.config
        self.num_classes = config.num_classes
        self.class_names = list(class_names) if class_names else None
        self.num_tokens, token_dim = config.num_tokens, config.token_dim
        channels = vae.config.latent_channels if vae is not None else latent_channels or token_dim
        self.draft: MARPipeline | None = None  # drafts where `drafter="model"`
        self.execution = Execution()
        self.shares: Shares | None = None  # divide the lossless sampler's verification among processes
        self.tuned: dict[tuple, dict[str, Any]] = {}  # what `tune` found, by batch size and settings
        self.patch_size = math.isqrt(token_dim // channels)
        if self.patch_size == 0 or channels * self.patch_size**2 != token_dim:
            raise ValueError(f"--vae has {channels} latent channels, which do not fit the {token_dim} numbers a token of --model")
        scaling = 2 ** (len(vae.config.block_out_channels) - 1) if vae is not None else 1
        self.stride = self.patch_size * scaling  # pixels a token side
        self.grid = (math.isqrt(self.num_tokens),) * 2  # rows and columns of tokens

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> "MARPipeline":
        """Move the networks. dtype is that of the transformer and its head; the autoencoder stays in float32, as do densities."""
        self.tuned.clear()
        self.model.to(device=device, dtype=dtype)
        if self.vae is not None:
            self.vae.to(device=device)
        if self.draft is not None:
            self.draft.to(device, dtype)
        return self

    def set_execution(self, execution: Execution) -> None:
        """Run the networks, and the draft's, as `Execution` says."""
        execution.check(self.device)
        self.execution = execution
        execution.prepare(self.model)
        if self.draft is not None:
            self.draft.set_execution(execution)

    def set_draft(self, draft: "MARPipeline") -> None:
        """Let another model draft for `drafter="model"`. It must speak the same tokens; what differs is named with both values."""
        pairs = {
            "as kind of network": (type(self.model).__name__, type(draft.model).__name__),
            "tokens": (self.num_tokens, draft.num_tokens),
            "numbers a token": (self.mar.config.token_dim, draft.mar.config.token_dim),
            "classes": (self.num_classes, draft.num_classes),
            "as clip_sample_range": (self.clip_sample_range, draft.clip_sample_range),
            "as latent scale": (self.latent_scale, draft.latent_scale),
        }
        for name, (ours, theirs) in pairs.items():
            if ours != theirs:
                raise ValueError(f"--draft {draft.preset.name} has {theirs} {name}, --model {self.preset.name} has {ours}")
        if self.class_names != draft.class_names:
            raise ValueError(
                f"--draft {draft.preset.name} and --model {self.preset.name} name their {self.num_classes} classes differently"
            )
        self.draft = draft

    @property
    def latent_scale(self) -> float | None:
        return self.vae.config.scaling_factor if self.vae is not None else None

    @property
    def mar(self) -> "MAR":
        """The network of tokens, where `model` holds more than that."""
        return self.model

    @property
    def device(self) -> torch.device:
        return self.mar.z_proj.weight.device

    @property
    def image_size(self) -> int:
        """Height in pixels, and width where the grid of tokens is square."""
        return self.grid[0] * self.stride

    def examples(self, first: int, count: int) -> list[Any]:
        """What images `first`, `first` + 1, ... of a benchmark show: the classes in turn."""
        return [i % self.num_classes for i in range(first, first + count)]

    def _pilot(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self.device) * (self.num_classes // count)

    def class_ids(self, class_labels: Sequence[int | str]) -> list[int]:
        """Ids or names -> ids, checked on the host before any kernel sees them."""
        return [self._class_id(label) for label in class_labels]

    def _class_id(self, label: int | str) -> int:
        if isinstance(label, str) and not label.lstrip("-").isdigit():
            names = self.class_names or []
            if label in names:
                return names.index(label)
            close = [n for n in names if label.lower() in n.lower()]
            if len(close) == 1:
                return names.index(close[0])
            hint = f"; did you mean {', '.join(close[:5])}?" if close else f", which knows {', '.join(names[:5])}, ..." if names else ""
            raise ValueError(f"class {label!r} is no class name of this model{hint}")
        if not 0 <= int(label) < self.num_classes:
            raise ValueError(f"label {label} is outside 0..{self.num_classes - 1}")
        return int(label)

    def settings(self, **given) -> dict:
        """Sampling settings: what is given (not None), the preset's value otherwise; checked, all of them.

        With the lossless sampler they include its own, `LOSSLESS_SETTINGS`.
        """
        settings = {name: getattr(self.preset, name) if given.get(name) is None else given[name] for name in PROBLEM_SETTINGS}
        remaining_after_each_step(self.num_tokens, settings["num_iter"])
        if not 2 <= settings["num_inference_steps"] <= 1000:
            raise ValueError(f"num_inference_steps {settings['num_inference_steps']} is outside 2..1000")
        if settings["guidance_schedule"] not in GUIDANCE_SCHEDULES:
            raise ValueError(f"guidance_schedule {settings['guidance_schedule']!r} is none of {', '.join(GUIDANCE_SCHEDULES)}")
        for name in ("guidance_scale", "temperature"):
            if not (math.isfinite(settings[name]) and settings[name] >= 0):
                raise ValueError(f"{name} {settings[name]} is not a finite number of at least 0")
        settings["sampler"] = given.get("sampler") or DEFAULT_SAMPLER
        if settings["sampler"] not in SAMPLERS:
            raise ValueError(f"sampler {settings['sampler']!r} is none of {', '.join(SAMPLERS)}")
        own = {}
        for sampler, names in SAMPLERS.items():
            known = {name: given[name] for name in names if given.get(name) is not None}
            if sampler == settings["sampler"]:
                own = known
            elif known:
                raise ValueError(f"{', '.join(known)} belongs to the {sampler} sampler, but sampler is {settings['sampler']!r}")
        if settings["sampler"] == "lossless":
            settings |= self._lossless_settings(own)
        elif settings["sampler"] == "cspd":
            if self.draft is None:
                raise ValueError("sampler 'cspd' needs a draft model: load_pipeline(..., draft=...), or --draft")
            chosen = CSpDSettings(**own)
            settings |= {name: getattr(chosen, name) for name in CSPD_SETTINGS}
        return settings

    def _lossless_settings(self, own: dict[str, Any]) -> dict[str, Any]:
        """Complete; `auto` stays where `tune` is to choose."""
        drafts = own.get("drafter", LosslessSettings.drafter)
        lookahead = own.get("lookahead", LosslessSettings.lookahead)
        if lookahead == "auto" and drafts == "model":
            raise ValueError("lookahead 'auto' conflicts with drafter 'model': it measures the model's own drafts only")
        chosen = LosslessSettings(**{name: value for name, value in own.items() if value != "auto"})
        if drafts == "model" and self.draft is None:
            raise ValueError("drafter 'model' needs a draft model: load_pipeline(..., draft=...), or --draft")
        settings = {name: getattr(chosen, name) for name in LOSSLESS_SETTINGS}
        if lookahead == "auto":
            settings |= {"lookahead": "auto", "window": own.get("window", "auto")}
        return settings

    @torch.no_grad()
    def tune(self, batch_size: int, settings: dict) -> dict:
        """Complete settings with `auto` among them -> the same with the numbers that are fastest here for such a batch.

        They may say `sequential`: where the device is already full, speculation does not pay. Measures for a second or more, once
        for a batch size and settings.
        """
        if settings.get("lookahead") != "auto" or settings["temperature"] == 0:
            return settings | {name: getattr(LosslessSettings, name) for name in LOSSLESS_SETTINGS if settings.get(name) == "auto"}
        key = (batch_size, *sorted(settings.items()))
        if key not in self.tuned:
            pilot = self._pilot(PILOT_IMAGES)
            adapter, steps = self._problem([torch.Generator().manual_seed(i) for i in range(PILOT_IMAGES)], settings, pilot)
            best = tune(
                adapter,
                steps,
                *self._vectors(pilot, PILOT_IMAGES),
                LosslessSettings(**{name: settings[name] for name in LOSSLESS_SETTINGS if settings[name] != "auto"}),
                batch_size,
                WINDOWS if settings["window"] == "auto" else (settings["window"],),
                lambda: synchronise(self.device),
            )
            if best is None:
                self.tuned[key] = {name: value for name, value in settings.items() if name not in LOSSLESS_SETTINGS}
                self.tuned[key]["sampler"] = "sequential"
            else:
                self.tuned[key] = settings | {"lookahead": best.lookahead, "window": best.window}
        return self.tuned[key]

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str] | None = None,
        *,
        num_images: int | None = None,
        num_iter: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_schedule: str | None = None,
        temperature: float | None = None,
        sampler: str | None = None,
        lookahead: int | str | None = None,
        window: int | None = None,
        final_tolerance: float | None = None,
        token_wise: bool | None = None,
        drafter: str | None = None,
        variant: str | None = None,
        draft_length: int | None = None,
        prefill: float | None = None,
        aligned: bool | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "pil",
        callback: Callable[[int, torch.Tensor], None] | None = None,
    ) -> ImagePipelineOutput:
        """Sample one image a label.

        class_labels: ids or names; None samples `num_images` images without a class.
        num_iter: AR steps, 1..tokens. num_inference_steps: denoising steps a token. guidance_scale: 1 is no guidance.
        guidance_schedule: linear or constant over AR steps. temperature: multiplies the noise of every denoising step.
        sampler: lossless (default): the same law as sequential in far fewer sequential calls; lookahead (AR steps), window (denoising
        steps), final_tolerance and token_wise are its settings (see `LosslessSettings`). lookahead `auto` measures this machine once,
        see `tune`; images depend on what it picks, so give the numbers (the output's `settings`) to make the same ones again.
        drafter: `self`, the model's own stale condition, or `model`, the network given to `load_pipeline` as draft. cspd is the
        published *approximate* method: its images follow another law than the model's; variant, draft_length, prefill and aligned are
        its settings (see `CSpDSettings`). At temperature 0 nothing is random and all samplers are the sequential one.
        generator: one for the whole batch, or one an image (then an image does not depend on the others). None seeds itself.
        output_type: pil, np, pt or latent. callback(i, tokens (B, N, D)) is called after AR step i of the
        sequential sampler.
        Whatever is None takes the model's preset. Raises ValueError for a setting out of range and NonFiniteImageError.
        """
        settings = self.settings(
            num_iter=num_iter,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            guidance_schedule=guidance_schedule,
            temperature=temperature,
            sampler=sampler,
            lookahead=lookahead,
            window=window,
            final_tolerance=final_tolerance,
            token_wise=token_wise,
            drafter=drafter,
            variant=variant,
            draft_length=draft_length,
            prefill=prefill,
            aligned=aligned,
        )
        if class_labels is None:
            labels, batch = None, 1 if num_images is None else num_images
            settings["guidance_scale"] = 1.0  # both halves would be the same
        else:
            listed = [class_labels] if isinstance(class_labels, int | str) else list(class_labels)
            labels, batch = torch.tensor(self.class_ids(listed), dtype=torch.int64, device=self.device), len(listed)
            if num_images not in (None, batch):
                raise ValueError(f"num_images {num_images} differs from the {batch} class_labels given")
        if batch < 1:
            raise ValueError(
                "there is nothing to sample: class_labels is empty" if labels is not None else f"num_images {batch} is below 1"
            )
        return self._sample(labels, batch, settings, generator, output_type, callback)

    def _sample(self, labels: Any, batch: int, settings: dict, generator, output_type: str, callback) -> ImagePipelineOutput:
        """The images of a batch. labels: what `_vectors` takes, classes (B,) or None."""
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type {output_type!r} is none of {', '.join(OUTPUT_TYPES)}")
        if self.vae is None and output_type != "latent":
            raise ValueError(f"output_type {output_type!r} needs an autoencoder, and this pipeline has none")
        settings = self.tune(batch, settings)
        tokens, trace = self._sample_tokens(labels, image_generators(generator, batch), settings, callback)
        latents = unpatchify(tokens, self.patch_size, self.grid[0])  # (B, C, h, w)
        return ImagePipelineOutput(latents if output_type == "latent" else self._finish(latents, output_type), trace, settings)

    def _sample_tokens(self, labels, generators, settings, callback) -> tuple[torch.Tensor, Trace]:
        batch = len(generators)
        adapter, steps = self._problem(generators, settings, labels)
        vectors, nulls = self._vectors(labels, batch)
        trace = Trace(batch, self.num_tokens)
        noise = Noise(generators, torch.arange(batch, device=self.device))
        sampler = settings["sampler"] if settings["temperature"] > 0 else "sequential"
        own = {name: settings[name] for name in SAMPLERS[sampler]}
        draft = self._draft_model(labels, batch, settings) if sampler == "cspd" or own.get("drafter") == "model" else None
        try:
            if sampler == "lossless":
                if self.shares is not None:
                    adapter = self.shares.adapter(adapter, trace)
                tokens = LosslessSampler(adapter, steps, vectors, nulls, noise, LosslessSettings(**own), trace, draft).sample()
            elif sampler == "cspd":
                assert draft is not None  # `settings` refused it
                tables = NoiseTable.draw_both(noise, self.num_tokens, adapter.head.num_steps, adapter.token_dim, settings["aligned"])
                tokens = CSpDSampler(adapter, steps, vectors, nulls, noise, *tables, CSpDSettings(**own), trace, draft).sample()
            else:
                source = noise_from_generators(generators, adapter.head.num_steps, adapter.token_dim, self.device)
                tokens = sample_sequential(adapter, steps, vectors, nulls, source, callback, trace)  # (B, N, D)
        except NonFiniteError as error:
            raise NonFiniteImageError(error.rows.tolist()) from None
        self._check(tokens)
        return tokens, trace

    def _check(self, tokens: torch.Tensor) -> None:
        self._check_finite(tokens)
        if self.shares is not None:
            self.shares.require_agreement(tokens)

    def _vectors(self, labels: Any, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the adapter's `conditions` takes for a label, and for none, a row an image: class vectors (B, W)."""
        return self.mar.class_vectors(labels, batch), self.mar.class_vectors(None, batch)

    def _draft_model(self, labels: Any, batch: int, settings: dict) -> DraftModel:
        assert self.draft is not None  # `settings` refused it
        return DraftModel(self.draft._adapter(settings, labels), *self.draft._vectors(labels, batch))

    def _adapter(self, settings: dict, labels: Any) -> MARAdapter:
        return MARAdapter(self.mar, **self._chain_settings(settings))

    def _chain_settings(self, settings: dict) -> dict[str, Any]:
        own = {name: settings[name] for name in ("num_inference_steps", "temperature")}
        return own | {"clip_sample_range": self.clip_sample_range, "run": self.execution.run_head}

    def _problem(self, generators: list[torch.Generator], settings: dict, labels: Any) -> tuple[MARAdapter, list[ARStep]]:
        """The adapter of a run, and the AR steps of a batch with an order drawn for each image."""
        orders = torch.stack([torch.randperm(self.num_tokens, generator=g) for g in generators]).to(self.device)
        adapter = self._adapter(settings, labels)
        return adapter, adapter.ar_steps(orders, settings["num_iter"], settings["guidance_scale"], settings["guidance_schedule"])

    @staticmethod
    def _check_finite(values: torch.Tensor) -> None:
        finite = values.flatten(1).isfinite().all(1)
        if not finite.all():
            raise NonFiniteImageError((~finite).nonzero()[:, 0].tolist())

    def _finish(self, latents: torch.Tensor, output_type: str):
        from car_spec.models.vae import decode_latents

        assert self.vae is not None  # `__call__` refused it
        images = decode_latents(self.vae, latents)  # (B, 3, H, W)
        self._check_finite(images)
        images = (0.5 * images + 0.5).clamp(0, 1)
        return images if output_type == "pt" else to_pixels(images, output_type)


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read on the host means something."""
    module = getattr(torch, device.type)
    if hasattr(module, "synchronize"):
        module.synchronize()


def to_pixels(images: torch.Tensor, output_type: str):
    """Images (B, 3, H, W) in [0, 1] -> an array (B, H, W, 3), or PIL images of 8 bits, rounded to nearest."""
    array = images.permute(0, 2, 3, 1).float().cpu().numpy()
    if output_type == "np":
        return array
    from PIL import Image

    return [Image.fromarray(picture) for picture in (array * 255).round().astype("uint8")]


def load_pipeline(
    model: str | Path = "demo",
    *,
    vae: str | Path | None = None,
    weights: str | None = None,
    num_heads: int | None = None,
    image_size: int | None = None,
    draft: str | Path | None = None,
    tokenizer: str | Path | None = None,
    base: str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> MARPipeline:
    """Load a model, MAR, xAR or Harmon, and its autoencoder -> `MARPipeline`, `XARPipeline` or `HarmonPipeline`.

    model: one of `DEMO_MODELS`, a checkpoint file, a folder with one, or a hub id (organisation/name, or with /file behind it).
    vae: the same for the autoencoder (`kl16.ckpt`, or a folder saved by diffusers). None looks for `vae` and `kl16.ckpt`
    beside the model, and in the two folders above it. weights: `model_ema` (taken when None, where there is one) or `model`.
    num_heads: only for sizes without a preset. image_size: refused where it is not the model's; Harmon makes any that is made of whole
    tokens. draft: a model of the same tokens that may draft (`drafter="model"`). dtype: of the transformers and their heads.
    tokenizer and base are Harmon's: the folder of `tokenizer.json` (None: that of the model or its base), and a whole model under one that
    holds some of the parameters. Raises CheckpointError (a ValueError) in one sentence.
    """
    from car_spec.models.loading import identify, load_mar, load_xar, read_checkpoint, resolve
    from car_spec.models.vae import load_vae
    from car_spec.xar_pipeline import XARPipeline

    file = model_file(model)
    checkpoint = read_checkpoint(file, weights)
    kind = identify(checkpoint.state)
    pipeline: MARPipeline
    if kind == "harmon" or base is not None:
        from car_spec.harmon_pipeline import load_harmon_pipeline

        pipeline = load_harmon_pipeline(checkpoint, base=base, vae=vae, tokenizer=tokenizer, num_heads=num_heads, image_size=image_size)
    else:
        if tokenizer is not None:
            raise ValueError(f"--tokenizer {tokenizer} is for Harmon, but {file} holds a network of {kind or 'no known kind'}")
        network: Any = (load_xar if kind == "xar" else load_mar)(checkpoint, num_heads=num_heads)
        own_num_iter = network.config.num_cells if kind == "xar" else network.config.num_tokens
        vae_path = resolve(vae, "--vae") if vae is not None else vae_beside(file)
        pipeline = (XARPipeline if kind == "xar" else MARPipeline)(
            network,
            load_vae(vae_path),
            preset_of(checkpoint, kind or "mar", network.config, own_num_iter),
            clip_sample_range=checkpoint.metadata.get("clip_sample_range"),
            class_names=checkpoint.metadata.get("class_names") or imagenet_class_names(network.config.num_classes),
            source=WeightsSource(file, checkpoint.copy, vae_path),
        )
        if image_size not in (None, pipeline.image_size):
            raise ValueError(f"--image-size {image_size}: {pipeline.preset.name} makes {pipeline.image_size} only")
    if draft is not None:
        assert pipeline.source is not None  # set above
        size = pipeline.image_size if kind == "harmon" or base is not None else None
        pipeline.set_draft(load_pipeline(draft, vae=pipeline.source.vae, num_heads=num_heads, image_size=size))
    return pipeline.to(device, dtype)


def model_file(model: str | Path, flag: str = "--model") -> Path:
    """The name of a demo, a file, a folder or a hub id -> the file."""
    from car_spec.models.loading import find_file, resolve

    return find_file(DEMO_FOLDER / DEMO_MODELS[str(model)] if str(model) in DEMO_MODELS else resolve(model, flag))


def preset_of(checkpoint: "Checkpoint", kind: str, config: Any, num_iter: int) -> Preset:
    """From the file's own metadata, or the table of released sizes, or plain defaults. config: of the network of tokens."""
    own = Preset(name=checkpoint.path.stem, num_heads=config.num_heads, num_iter=num_iter)
    return known_preset(checkpoint, kind, config.width) or own


def known_preset(checkpoint: "Checkpoint", kind: str, width: int) -> Preset | None:
    stored = checkpoint.metadata.get("preset")
    return Preset(**stored) if stored else PRESETS.get((kind, width))


def vae_beside(file: Path) -> Path:
    """The autoencoder that lies with a checkpoint, as MAR's own folders have it (mar/mar_base/..., vae/kl16.ckpt)."""
    for folder in list(file.resolve().parents)[:3]:
        for name in ("vae", "kl16.ckpt"):
            if (folder / name).exists():
                return folder / name
    raise ValueError(f"--vae is missing: neither vae nor kl16.ckpt lies beside {file} or in the two folders above it")


def imagenet_class_names(num_classes: int) -> list[str] | None:
    """The names of ImageNet's 1000 classes, in the order of their ids; None for another number of classes."""
    if num_classes != 1000:
        return None
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return [info.index_to_description(i) for i in range(num_classes)]
