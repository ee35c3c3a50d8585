"""CLIPScore through transformers: the cosine of a CLIP model's embeddings of an image and its prompt (Hessel et al. 2021)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from car_spec.eval.features import check_finite, open_image

DEFAULT_MODEL = "openai/clip-vit-base-patch32"
CONVENTION = "100 x cosine, negative ones kept, no prefix before the prompt"


class Clip(NamedTuple):
    model: Any  # CLIPModel
    processor: Any  # CLIPProcessor
    name: str

    @property
    def longest(self) -> int:
        """Text tokens it can read, the two at the ends among them."""
        return self.model.config.text_config.max_position_embeddings


def load_clip(name: str, device: torch.device) -> Clip:
    """A hub id or a folder in transformers' format. Raises ValueError in one sentence."""
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--metrics clipscore needs the package transformers: pip install 'car-spec[eval]'")
    from transformers import CLIPModel, CLIPProcessor

    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"--clip-model {name} holds no config.json: a CLIP model saved by transformers is expected")
    try:
        model, loaded = CLIPModel.from_pretrained(name, output_loading_info=True)
        processor = CLIPProcessor.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--clip-model {name} cannot be loaded: {str(error).strip().splitlines()[0]}") from None
    if loaded["missing_keys"]:  # transformers would leave them random
        raise ValueError(
            f"--clip-model {name} lacks {len(loaded['missing_keys'])} weights of a CLIP model, {min(loaded['missing_keys'])} first"
        )
    return Clip(model.to(device).eval(), processor, name)


def overlong(clip: Clip, prompts: Sequence[str]) -> int:
    """How many prompts have more tokens than the model reads."""
    return sum(len(ids) > clip.longest for ids in clip.processor.tokenizer(list(prompts), verbose=False)["input_ids"])


@torch.no_grad()
def cosines(
    clip: Clip,
    images: Sequence[Path] | Sequence[np.ndarray],
    prompts: Sequence[str],
    batch_size: int,
    on_images: Callable[[int], object] = lambda count: None,
) -> torch.Tensor:
    """Of each image's embedding with its prompt's -> (N,). Prompts are cut where the model's context ends."""
    parts, device = [], clip.model.device
    for start in range(0, len(images), batch_size):
        pictures = [open_image(image) for image in images[start : start + batch_size]]
        texts = list(prompts[start : start + batch_size])
        pixels = clip.processor.image_processor(pictures, return_tensors="pt")
        tokens = clip.processor.tokenizer(texts, padding=True, truncation=True, max_length=clip.longest, return_tensors="pt")
        out = clip.model(
            pixel_values=pixels["pixel_values"].to(device),
            input_ids=tokens["input_ids"].to(device),
            attention_mask=tokens["attention_mask"].to(device),
        )
        parts.append((out.image_embeds * out.text_embeds).sum(1).float().cpu())  # both have length 1
        on_images(len(pictures))
    values = torch.cat(parts)
    check_finite("CLIP embeddings", values[:, None], images)
    return values
