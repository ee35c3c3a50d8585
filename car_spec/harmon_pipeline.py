"""The pipeline of Harmon: what differs from MAR's, which is that an image has a prompt in the place of a class, and any size."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from car_spec.adapters.harmon import HarmonAdapter, Reading, grid_of, read_texts, tokenize_texts
from car_spec.engine import DraftModel
from car_spec.models.harmon import TOKENIZER_FILE, Harmon, check_prompts, load_harmon, load_tokenizer
from car_spec.models.loading import Checkpoint, find_file, read_checkpoint, resolve
from car_spec.models.vae import load_vae
from car_spec.pipeline import SETTINGS, ImagePipelineOutput, MARPipeline, WeightsSource, preset_of, vae_beside

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

    from car_spec.models.mar import MAR
    from car_spec.models.presets import Preset

EXAMPLES = ("red heart", "cat face", "banana", "large blue circle", "grinning face", "penguin", "green apple", "france flag")


class ReadTexts(NamedTuple):
    """One text an image, for a draft to read in its own tokens, and how the language model has read them."""

    texts: list[str]
    reading: Reading


class HarmonPipeline(MARPipeline):
    """Sampling from prompts with Harmon and its autoencoder. image_size: pixels a side; None takes the preset's, or what was learned."""

    model: Harmon  # type: ignore[assignment]

    def __init__(
        self,
        model: Harmon,
        vae: "AutoencoderKL | None",
        tokenizer: Any,
        preset: "Preset",
        *,
        image_size: int | None = None,
        clip_sample_range: float | None = None,
        source: WeightsSource | None = None,
    ):
        super().__init__(model, vae, preset, clip_sample_range=clip_sample_range, source=source)  # type: ignore[arg-type]
        self.tokenizer = tokenizer
        size = image_size or preset.image_size
        if size is not None and vae is not None:
            self._set_size((size, size))

    def _set_size(self, image_size: tuple[int, int]) -> None:
        self.grid = grid_of(image_size, self.stride)
        self.num_tokens = math.prod(self.grid)

    def sized(self, height: int | None, width: int | None) -> "HarmonPipeline":
        """This pipeline at another image size, with the same networks."""
        own = (self.grid[0] * self.stride, self.grid[1] * self.stride)
        size = (height or own[0], width or own[1])
        if size == own:
            return self
        other = copy.copy(self)
        other.tuned = {}
        other._set_size(size)
        if isinstance(self.draft, HarmonPipeline):
            other.draft = self.draft.sized(*size)
        return other

    @property
    def mar(self) -> "MAR":
        return self.model.mar

    def examples(self, first: int, count: int) -> list[str]:
        return [EXAMPLES[i % len(EXAMPLES)] for i in range(first, first + count)]

    def check_prompts(self, prompts: str | Sequence[str]) -> list[str]:
        """The prompts as a list, all of which can be read. Raises ValueError for the first that is empty, too long or no text."""
        texts = check_prompts(prompts)
        tokenize_texts(self.model, self.tokenizer, texts, self.grid)
        return texts

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self,
        prompt: str | Sequence[str],
        *,
        num_images_per_prompt: int = 1,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "pil",
        callback: Callable[[int, torch.Tensor], None] | None = None,
        **settings: Any,
    ) -> ImagePipelineOutput:
        """Sample an image for each prompt, or several in a row.

        prompt: one text or a list. height and width: pixels, of whole tokens; None is the pipeline's own size. settings (`num_iter`,
        `guidance_scale`, `sampler`, `lookahead`, ...), generator, output_type and callback are those of `MARPipeline.__call__`.
        Raises ValueError for a prompt that is empty, no text or too long for the context, and for a setting out of range;
        NonFiniteImageError.
        """
        for name in settings:
            if name not in SETTINGS:
                raise TypeError(f"HarmonPipeline has no argument {name!r}; its settings are {', '.join(SETTINGS)}")
        if num_images_per_prompt < 1:
            raise ValueError(f"num_images_per_prompt {num_images_per_prompt} is below 1")
        pipeline = self.sized(height, width)
        complete = pipeline.settings(**settings)
        texts = [text for text in check_prompts(prompt) for _ in range(num_images_per_prompt)]
        return pipeline._sample(pipeline._read(texts), len(texts), complete, generator, output_type, callback)

    def _read(self, texts: list[str]) -> ReadTexts:
        return ReadTexts(texts, read_texts(self.model, self.tokenizer, texts, self.grid))

    def _pilot(self, count: int) -> ReadTexts:  # type: ignore[override]
        return self._read(self.examples(0, count))

    def _vectors(self, labels: ReadTexts, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return labels.reading.rows, labels.reading.null_rows

    def _adapter(self, settings: dict, labels: ReadTexts) -> HarmonAdapter:
        return HarmonAdapter(self.model, labels.reading.prompts, self.grid, **self._chain_settings(settings))

    def _draft_model(self, labels: ReadTexts, batch: int, settings: dict) -> DraftModel:
        """The draft's language model reads the prompts itself, in its own tokens."""
        assert isinstance(self.draft, HarmonPipeline)  # `set_draft` refused other networks
        own = self.draft._read(labels.texts)
        return DraftModel(self.draft._adapter(settings, own), *self.draft._vectors(own, batch))


def load_harmon_pipeline(
    checkpoint: Checkpoint,
    *,
    base: str | Path | None = None,
    vae: str | Path | None = None,
    tokenizer: str | Path | None = None,
    num_heads: int | None = None,
    image_size: int | None = None,
) -> HarmonPipeline:
    """See `load_pipeline`. Without `vae`, the autoencoder inside the checkpoint or its base comes first, then what lies beside it."""
    below = read_checkpoint(find_file(resolve(base, "--base"))) if base is not None else None
    model = load_harmon(checkpoint, base=below, num_heads=num_heads)
    files = [checkpoint.path] + ([below.path] if below else [])
    if vae is not None:
        vae_path = resolve(vae, "--vae")
    else:
        inside = [c.path for c in (checkpoint, below) if c is not None and any(name.startswith("vae.") for name in c.state)]
        vae_path = inside[0] if inside else vae_beside(files[-1])
    folders = [file.resolve().parent for file in files]
    beside = next((folder for folder in folders if (folder / TOKENIZER_FILE).exists()), folders[0])
    tokenizer_path = resolve(tokenizer, "--tokenizer") if tokenizer is not None else beside
    if tokenizer_path.is_dir():
        tokenizer_path /= TOKENIZER_FILE
    config = model.config.mar
    checkpoint = replace(checkpoint, metadata=(below.metadata if below else {}) | checkpoint.metadata)
    return HarmonPipeline(
        model,
        load_vae(vae_path),
        load_tokenizer(tokenizer_path, model.config.llm.vocab_size),
        preset_of(checkpoint, "harmon", config, min(64, config.num_tokens)),
        image_size=image_size,
        clip_sample_range=checkpoint.metadata.get("clip_sample_range"),
        source=WeightsSource(checkpoint.path, checkpoint.copy, vae_path, tokenizer_path, below.path if below else None),
    )
