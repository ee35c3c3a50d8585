"""Harmon: MAR whose encoder output passes through a language model that has read the prompt (Wu et al. 2025).

The networks carry the parameter names of the release: `llm.*` (Qwen2.5), `mar.*`, `proj_in.*`, `proj_out.*`. The autoencoder is MAR's.
"""

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from car_spec.models.loading import Checkpoint, CheckpointError, count_layers, identify, infer_mar_config, load_strictly
from car_spec.models.mar import MAR, MARConfig, PositionTables
from car_spec.models.presets import QWEN_HEADS

# A user's turn in Qwen's chat format, and the two requests that Harmon was trained on
TEMPLATE = "<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
REQUEST = "Generate an image: {prompt}"
NULL_REQUEST = "Generate an image."  # the unconditional prompt of guidance

TOKENIZER_FILE = "tokenizer.json"
EMBEDDING, LM_HEAD = "llm.model.embed_tokens.weight", "llm.lm_head.weight"


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError("Harmon needs the package transformers: pip install 'car-spec[harmon]'") from None
    return transformers


@dataclass(frozen=True)
class QwenConfig:
    """What fixes the language model, under transformers' names. The last four defaults are those of all Qwen2.5 models up to 3B."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class HarmonConfig:
    mar: MARConfig
    llm: QwenConfig


@dataclass(frozen=True)
class Prompts:
    """U prompts that the language model has read, padded at the end to P tokens. No call changes them."""

    cache: Any  # transformers' DynamicCache of U rows
    mask: torch.Tensor  # (U, P) bool, True at real tokens

    def of(self, rows: torch.Tensor) -> "Prompts":
        """The prompts of rows (B,), repeats allowed, with a cache of their own and no more padding than they need."""
        mask = self.mask[rows]
        longest = int(mask.sum(1).max())
        cache = copy.deepcopy(self.cache)
        cache.batch_select_indices(rows)
        rollback(cache, longest)
        return Prompts(cache, mask[:, :longest])


def rollback(cache: Any, keep: int) -> None:
    """Cut a DynamicCache back to its first `keep` tokens.

    Older releases of transformers take the length to keep, and newer ones refuse it; all take minus the number of tokens to drop. 0 would
    drop everything in the older and nothing in the newer ones, so it never reaches them.
    """
    surplus = cache.get_seq_length() - keep
    if surplus:
        if surplus < 0 or keep < 0:
            raise ValueError(f"keep {keep} is outside 0..{cache.get_seq_length()}, the tokens in the cache")
        cache.crop(-surplus)
    if cache.get_seq_length() != keep:
        raise RuntimeError(
            f"the cache holds {cache.get_seq_length()} tokens after a roll-back to {keep}: this release of transformers differs"
        )


def extend(
    transformer: Any,
    cache: Any,
    *,
    ids: torch.Tensor | None = None,
    embeddings: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read ids (B, L), or embeddings (B, L, H), behind what the cache holds, and add them to it -> last hidden states (B, L, H)."""
    # by place, because the cache's argument has two names in the releases of transformers
    return transformer(ids, attention_mask, positions, cache, embeddings, use_cache=True).last_hidden_state


class Harmon(nn.Module):
    """Masks of tokens are 1 at unknown positions, as in MAR; masks of prompts are True at real tokens."""

    def __init__(self, config: HarmonConfig):
        transformers = import_transformers()
        super().__init__()
        self.config = config
        width, hidden = config.mar.width, config.llm.hidden_size
        self.llm = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**asdict(config.llm), attn_implementation="sdpa"))
        self.mar = MAR(config.mar)
        self.proj_in = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.proj_out = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, width))

    def _apply(self, fn, recurse=True):
        """Every move or cast of the module comes through here. The frequencies of the rotary embedding are computed anew after it: cast to
        bfloat16, they would be off by a radian at position 1000, and on the meta device they have no values.
        """
        super()._apply(fn, recurse)
        self.renew_rotary_embeddings()
        return self

    def room(self, num_tokens: int) -> int:
        """How many tokens a prompt may have, template included, beside an image of so many."""
        return self.config.llm.max_position_embeddings - num_tokens - self.config.mar.buffer_size

    def renew_rotary_embeddings(self) -> None:
        device = self.proj_in[0].weight.device
        for parent in list(self.llm.modules()):
            if hasattr(parent, "rotary_emb"):
                parent.rotary_emb = type(parent.rotary_emb)(config=self.llm.config).to(device)

    @torch.no_grad()
    def read_prompts(self, ids: torch.Tensor, mask: torch.Tensor) -> Prompts:
        """Token ids (U, P) and their mask (U, P), padded at the end -> the prompts, read once.

        Real tokens never see the padding behind them, because attention is causal; with padding in front they would.
        """
        mask = mask.bool()
        if not mask[:, 0].all() or (mask[:, 1:] & ~mask[:, :-1]).any():
            raise ValueError("the prompts' mask has padding before real tokens (or no real token): pad them on the right")
        cache = import_transformers().DynamicCache()
        extend(self.llm.model, cache, ids=ids)
        return Prompts(cache, mask)

    def continue_prompts(self, encoded: torch.Tensor, mask: torch.Tensor, prompts: Prompts, rows: torch.Tensor) -> torch.Tensor:
        """Output (B, S + known, W) of MAR's encoder, its mask (B, N) and the prompts' rows (B,) -> the decoder's input, as large.

        The language model reads the known tokens in raster order and then the buffer; positions go on after the prompt's real tokens. Rows
        with fewer known tokens are padded at the end, which causal attention keeps out of sight.
        """
        own = prompts.of(rows)
        order, read = self._to_read(encoded, mask)  # (B, L, 1), (B, L, H)
        attended = torch.cat([own.mask, torch.ones_like(order[..., 0], dtype=torch.bool)], 1).long()  # (B, P + L)
        positions = own.mask.sum(1, keepdim=True) + torch.arange(read.shape[1], device=read.device)  # (B, L)
        output = extend(self.llm.model, own.cache, embeddings=read, attention_mask=attended, positions=positions)
        return self._add_what_was_read(encoded, order, output)

    def continue_texts(self, encoded: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor, text_mask: torch.Tensor) -> torch.Tensor:
        """`continue_prompts` of prompts that are read in the same pass, which lets gradients through: ids (B, P) and their mask, padded at
        the end, one prompt a row.
        """
        order, read = self._to_read(encoded, mask)
        words, length = self.llm.model.embed_tokens(ids), torch.arange(read.shape[1], device=read.device)
        attended = torch.cat([text_mask.bool(), torch.ones_like(order[..., 0], dtype=torch.bool)], 1).long()  # (B, P + L)
        positions = torch.cat([torch.arange(ids.shape[1], device=ids.device).expand_as(ids), text_mask.sum(1, keepdim=True) + length], 1)
        both = torch.cat([words.to(read.dtype), read], 1)
        output = self.llm.model(inputs_embeds=both, attention_mask=attended, position_ids=positions, use_cache=False)
        return self._add_what_was_read(encoded, order, output.last_hidden_state[:, ids.shape[1] :])

    def _to_read(self, encoded: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> where the language model's inputs lie in `encoded` (B, L, 1), and the inputs (B, L, H)."""
        order = self._buffer_last(encoded.shape[1], mask)[..., None]
        read = self.proj_in(encoded)
        return order, read.gather(1, order.expand_as(read))

    def _add_what_was_read(self, encoded: torch.Tensor, order: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros_like(output).scatter(1, order.expand_as(output), output)  # buffer first again
        return encoded + self.proj_out(hidden)

    def _buffer_last(self, length: int, mask: torch.Tensor) -> torch.Tensor:
        """Where the language model's j-th input lies in the encoder's output (B, length), which has the buffer first."""
        known, size = (mask == 0).sum(1, keepdim=True), self.config.mar.buffer_size
        j = torch.arange(length, device=mask.device).expand(len(mask), -1)
        return torch.where(j < known, j + size, torch.where(j < known + size, j - known, j))

    def forward_mae_encoder(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        prompts: Prompts,
        rows: torch.Tensor,
        positions: PositionTables | None = None,
    ) -> torch.Tensor:
        """tokens (B, N, D), mask (B, N) and the prompt of each, as a row (B,) -> what MAR's decoder takes (B, S + known, W)."""
        return self.continue_prompts(self.encode(tokens, mask, positions), mask, prompts, rows)

    def encode(self, tokens: torch.Tensor, mask: torch.Tensor, positions: PositionTables | None = None) -> torch.Tensor:
        """MAR's own encoder (B, S + known, W). It knows no classes: its buffer always holds `fake_latent`."""
        return self.mar.forward_mae_encoder(tokens, mask, self.mar.class_vectors(None, len(tokens)), positions)


def load_tokenizer(path: Path, vocab_size: int) -> Any:
    """The tokenizer of `tokenizer.json` (Hugging Face's tokenizers), a file or in a folder. It holds data and no code.

    Padding and truncation that it may bring are switched off: `pad_right` pads, and no prompt is cut silently.
    """
    import_transformers()  # brings tokenizers, and its absence is the sentence a user can act on
    from tokenizers import Tokenizer

    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(f"--tokenizer {path}: there is no {file.name}; the folders of Qwen2.5-Instruct and Harmon have it")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare exceptions
        raise CheckpointError(f"--tokenizer {file} cannot be read ({str(error).splitlines()[0]})") from error
    if tokenizer.get_vocab_size() > vocab_size:
        raise CheckpointError(f"--tokenizer {file} has {tokenizer.get_vocab_size()} tokens, but the model's table has {vocab_size}")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenize(tokenizer: Any, requests: Sequence[str]) -> list[list[int]]:
    """Requests in the chat template of the release -> their token ids."""
    return [tokenizer.encode(TEMPLATE.format(request=request)).ids for request in requests]


def check_prompts(prompts: Any) -> list[str]:
    """One text, or a list of them -> the list; whatever else is one sentence."""
    prompts = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
    if not prompts:
        raise ValueError("there is nothing to sample: prompts is empty")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise ValueError(f"prompt {i} is of type {type(prompt).__name__}, not text")
        if not prompt.strip():
            raise ValueError(f"prompt {i} is empty")
    return prompts


def pad_right(ids: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of U prompts -> (U, P) and their mask (U, P) bool. Padding is id 0: no real token ever sees it."""
    mask = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.bool)
    padded = torch.zeros(mask.shape, dtype=torch.int64)
    for i, row in enumerate(ids):
        padded[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return padded, mask


def merge_checkpoints(tuned: Checkpoint, base: Checkpoint) -> Checkpoint:
    """A file that holds some of the parameters, over one that holds all."""
    unknown = {name for name in set(tuned.state) - set(base.state) - {LM_HEAD} if not name.startswith("vae.")}
    if unknown:
        raise CheckpointError(f"{tuned.path} has {len(unknown)} parameters that --base {base.path} lacks: {', '.join(sorted(unknown)[:3])}")
    return Checkpoint(tuned.path, tuned.copy, base.state | tuned.state, base.metadata | tuned.metadata)


def infer_harmon_config(checkpoint: Checkpoint, num_heads: int | None = None, qwen: Mapping[str, Any] | None = None) -> HarmonConfig:
    """The architecture from tensor shapes. num_heads: of the MAR. qwen: values of Qwen's configuration, as in its `config.json`; what it
    does not say comes from the file's metadata, from the presets, and from what all small Qwen2.5 models share.
    """
    state, path = checkpoint.state, checkpoint.path
    inside = {name.removeprefix("mar."): value for name, value in state.items() if name.startswith("mar.")}
    mar = infer_mar_config(Checkpoint(path, checkpoint.copy, inside, checkpoint.metadata), num_heads)
    try:
        vocab_size, hidden_size = state[EMBEDDING].shape
        intermediate_size = state["llm.model.layers.0.mlp.gate_proj.weight"].shape[0]
        key_rows = state["llm.model.layers.0.self_attn.k_proj.weight"].shape[0]
    except KeyError as missing:
        raise CheckpointError(f"{path} looks like a Harmon checkpoint but has no {missing.args[0]}") from None
    values = checkpoint.metadata.get("llm", {}) | dict(qwen or {})
    if values.get("hidden_size", hidden_size) != hidden_size:
        raise CheckpointError(f"{path} has a language model of width {hidden_size}, but its configuration says {values['hidden_size']}")
    heads = values.get("num_attention_heads") or QWEN_HEADS.get(hidden_size)
    if heads is None:
        raise CheckpointError(
            f"{path} has a language model of width {hidden_size}, which is no preset's, and tensors do not tell its number of heads: "
            "put the config.json of its Qwen2.5 beside it"
        )
    rope = values.get("rope_parameters") or values  # its place in newer configurations
    given = {name: values[name] for name in ("max_position_embeddings", "rms_norm_eps") if name in values}
    given |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    llm = QwenConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=count_layers(state, "llm.model.layers."),
        num_attention_heads=heads,
        num_key_value_heads=key_rows * heads // hidden_size,
        **given,
    )
    return HarmonConfig(mar, llm)


def qwen_values(folder: Path) -> dict[str, Any]:
    """What a folder's `config.json` says of the language model, at its top (Qwen's own) or one level below (Harmon's); {} without one."""
    file = folder / "config.json"
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError:
        raise CheckpointError(f"{file} is not JSON") from None
    sections = [content, *content.values()] if isinstance(content, dict) else []
    return next((section for section in sections if isinstance(section, dict) and "num_attention_heads" in section), {})


def load_harmon(checkpoint: Checkpoint, *, base: Checkpoint | None = None, num_heads: int | None = None) -> Harmon:
    """The networks with the checkpoint's weights, on the CPU in their dtype (the widest of several). `vae.*` is left to `load_vae`.

    base: has what the checkpoint lacks, as files of Harmon's trainer may. A `config.json` beside the base (or the checkpoint) is read.
    """
    folder = (base or checkpoint).path.parent
    checkpoint = merge_checkpoints(checkpoint, base) if base else checkpoint
    kind = identify(checkpoint.state)
    if kind != "harmon":
        found = f"a {kind} checkpoint" if kind else f"no known model: 0 of its {len(checkpoint.state)} keys matched Harmon's"
        raise CheckpointError(f"{checkpoint.path} holds {found}, where a Harmon checkpoint is expected")
    return build_harmon(checkpoint, infer_harmon_config(checkpoint, num_heads, qwen_values(folder)))


def build_harmon(checkpoint: Checkpoint, config: HarmonConfig) -> Harmon:
    """The networks of a configuration, taking over the checkpoint's tensors."""
    state = {name: value for name, value in checkpoint.state.items() if not name.startswith("vae.")}
    state[LM_HEAD] = state[EMBEDDING]  # tied, so a file may leave it out; sampling an image never uses it
    with torch.device("meta"):
        model = Harmon(config)
    load_strictly(model, state, checkpoint.path)
    dtype = functools.reduce(torch.promote_types, {parameter.dtype for parameter in model.parameters()})
    return model.to(dtype).eval().requires_grad_(False)
