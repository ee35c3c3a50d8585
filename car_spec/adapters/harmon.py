"""Harmon behind the four questions that samplers ask of a model: MAR's core, with a prompt in the place of a class.

Samplers hand over a vector an image and a null vector (`class_vectors`, `null_vectors`). For MAR they are embeddings of classes; here
they hold one number, the row of a prompt that the language model has read beforehand, so that all prefixes of a verification share it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from car_spec.adapters.mar import MARAdapter
from car_spec.chain import HeadRunner
from car_spec.execution import run_head
from car_spec.models.harmon import NULL_REQUEST, REQUEST, Harmon, Prompts, check_prompts, pad_right, tokenize


class HarmonAdapter(MARAdapter):
    """Binds Harmon, the prompts of a batch and a grid of tokens (rows, columns) to the settings of one run. None: the grid it learned."""

    def __init__(
        self,
        model: Harmon,
        prompts: Prompts,
        grid: tuple[int, int] | None = None,
        *,
        num_inference_steps: int = 100,
        temperature: float = 1.0,
        clip_sample_range: float | None = None,
        run: HeadRunner = run_head,
    ):
        super().__init__(
            model.mar,
            num_inference_steps=num_inference_steps,
            temperature=temperature,
            clip_sample_range=clip_sample_range,
            run=run,
        )
        self.harmon, self.prompts = model, prompts
        self.positions = model.mar.position_tables(grid)
        self.num_tokens = self.positions.diffusion.shape[1]
        check_room(model, self.num_tokens, prompts.mask.shape[1], f"the longest prompt has {prompts.mask.shape[1]} tokens")

    def conditions(self, tokens: torch.Tensor, mask: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """As MAR's; vectors (P, H, 1): the row of the prompt, and with guidance (H = 2) that of the unconditional prompt.

        MAR's encoder sees no prompt, so one pass of it serves both halves.
        """
        halves = vectors.shape[1]
        encoded = self.harmon.encode(tokens.to(self.head.dtype), mask, self.positions)  # (P, S + known, W)
        encoded, mask = (x.repeat_interleave(halves, 0) for x in (encoded, mask))
        encoded = self.harmon.continue_prompts(encoded, mask, self.prompts, vectors.flatten())
        return self.model.forward_mae_decoder(encoded, mask, self.positions).unflatten(0, (-1, halves))


def check_room(model: Harmon, num_tokens: int, length: int, what: str) -> None:
    context, room = model.config.llm.max_position_embeddings, model.room(num_tokens)
    if length > room:
        raise ValueError(f"{what}, but the context of {context} leaves {room} beside an image of {num_tokens}")


class Reading(NamedTuple):
    """A batch of prompts as the language model has read them, with the rows of its B images."""

    prompts: Prompts
    rows: torch.Tensor  # (B, 1)
    null_rows: torch.Tensor  # (B, 1)


def tokenize_texts(model: Harmon, tokenizer: Any, texts: Sequence[str], grid: tuple[int, int] | None = None) -> list[list[int]]:
    """Token ids of the different ones of some texts, in the order in which they come, and behind them the unconditional prompt's.

    Raises ValueError for a text that leaves no room for the image in the model's context.
    """
    different = list(dict.fromkeys(texts))
    ids = tokenize(tokenizer, [*(REQUEST.format(prompt=text) for text in different), NULL_REQUEST])
    num_tokens = math.prod(grid) if grid else model.config.mar.num_tokens
    numbers = {text: i for i, text in reversed(list(enumerate(texts)))}
    for text, row in zip([*different, NULL_REQUEST], ids):
        check_room(model, num_tokens, len(row), f"prompt {numbers.get(text, 'of guidance')} has {len(row)} tokens, its template included")
    return ids


def read_texts(model: Harmon, tokenizer: Any, texts: str | Sequence[str], grid: tuple[int, int] | None = None) -> Reading:
    """One text an image. Each different text is read once, and so is the unconditional prompt, which all images share.

    Raises ValueError for a text that is empty or none, and for one that leaves no room for the image in the model's context.
    """
    texts = check_prompts(texts)
    ids = tokenize_texts(model, tokenizer, texts, grid)
    device = model.mar.mask_token.device
    prompts = model.read_prompts(*(x.to(device) for x in pad_right(ids)))
    row_of = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    rows = torch.tensor([[row_of[text]] for text in texts], device=device)
    return Reading(prompts, rows, torch.full_like(rows, len(row_of)))


def grid_of(image_size: tuple[int, int], stride: int) -> tuple[int, int]:
    """Height and width in pixels, and pixels a token side -> rows and columns of tokens."""
    if min(image_size) < stride or any(size % stride for size in image_size):
        raise ValueError(f"image_size {image_size[0]}x{image_size[1]} is not made of whole tokens of {stride} pixels a side")
    return image_size[0] // stride, image_size[1] // stride
