"""MAR: a masked autoregressive transformer over continuous tokens (Li et al. 2024), with the parameter names of its release."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from car_spec.models.diffloss import DiffLoss

LN_EPS = 1e-6


@dataclass(frozen=True)
class MARConfig:
    """Everything that fixes the network. Only `num_heads` cannot be read from tensor shapes."""

    num_tokens: int  # a square grid, in raster order
    token_dim: int  # latent channels times patch size squared
    num_classes: int
    width: int
    encoder_depth: int
    decoder_depth: int
    num_heads: int
    head_width: int
    head_depth: int
    buffer_size: int = 64
    mlp_ratio: float = 4.0

    def __post_init__(self):
        if math.isqrt(self.num_tokens) ** 2 != self.num_tokens:
            raise ValueError(f"num_tokens {self.num_tokens} is not a square: MAR's tokens form a square grid")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")


class PositionTables(NamedTuple):
    """Learned positions of one grid of N tokens; S buffer rows come first where there are any."""

    encoder: torch.Tensor  # (1, S + N, W)
    decoder: torch.Tensor  # (1, S + N, W)
    diffusion: torch.Tensor  # (1, N, W)


class MAR(nn.Module):
    """Masks are 1 at unknown positions and 0 at known ones. Class vectors are rows of `class_emb`, or `fake_latent` (no class)."""

    def __init__(self, config: MARConfig):
        from timm.models.vision_transformer import Block

        super().__init__()
        self.config = config
        width, tokens, slots = config.width, config.num_tokens, config.num_tokens + config.buffer_size

        def blocks(depth: int) -> nn.ModuleList:
            norm = partial(nn.LayerNorm, eps=LN_EPS)
            return nn.ModuleList(Block(width, config.num_heads, config.mlp_ratio, qkv_bias=True, norm_layer=norm) for _ in range(depth))

        self.class_emb = nn.Embedding(config.num_classes, width)
        self.fake_latent = nn.Parameter(torch.zeros(1, width))
        self.z_proj = nn.Linear(config.token_dim, width)
        self.z_proj_ln = nn.LayerNorm(width, eps=LN_EPS)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, slots, width))
        self.encoder_blocks = blocks(config.encoder_depth)
        self.encoder_norm = nn.LayerNorm(width, eps=LN_EPS)
        self.decoder_embed = nn.Linear(width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, slots, width))
        self.decoder_blocks = blocks(config.decoder_depth)
        self.decoder_norm = nn.LayerNorm(width, eps=LN_EPS)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, tokens, width))
        self.diffloss = DiffLoss(config.token_dim, width, config.head_width, config.head_depth)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        learned = [self.fake_latent, self.mask_token, self.class_emb.weight, self.encoder_pos_embed_learned]
        for parameter in [*learned, self.decoder_pos_embed_learned, self.diffusion_pos_embed_learned]:
            nn.init.normal_(parameter, std=0.02)
        self.diffloss.net.init_weights()

    def position_tables(self, grid: tuple[int, int] | None = None) -> PositionTables:
        """The tables as learned, or resized to a grid of (rows, columns): bilinear between the centres of tokens; buffer rows stay."""
        tables = (self.encoder_pos_embed_learned, self.decoder_pos_embed_learned, self.diffusion_pos_embed_learned)
        side, size = math.isqrt(self.config.num_tokens), self.config.buffer_size
        if grid is None or grid == (side, side):
            return PositionTables(*tables)
        if min(grid) < 1:
            raise ValueError(f"grid {grid[0]}x{grid[1]} has no tokens")
        buffers = (tables[0][:, :size], tables[1][:, :size], tables[2][:, :0])
        images = [table[:, -side * side :].unflatten(1, (side, side)).permute(0, 3, 1, 2) for table in tables]  # (1, W, side, side)
        resized = [F.interpolate(x.float(), grid, mode="bilinear").to(x.dtype).flatten(2).mT for x in images]  # (1, N, W)
        return PositionTables(*(torch.cat(parts, 1) for parts in zip(buffers, resized)))

    def forward_mae_encoder(
        self, tokens: torch.Tensor, mask: torch.Tensor, class_vectors: torch.Tensor, positions: PositionTables | None = None
    ) -> torch.Tensor:
        """tokens (B, N, D), mask (B, N), class vectors (B, W) -> (B, S + known, W): buffer slots, then the known tokens in raster order.

        Unknown tokens are dropped; their values do not matter. Rows with fewer known tokens than others are padded at the end, and
        no row attends to padding. positions: those of another grid than the model's own.
        """
        table = (positions or self.position_tables()).encoder
        buffer = class_vectors[:, None].expand(-1, self.config.buffer_size, -1)  # (B, S, W)
        x = torch.cat([buffer, self.z_proj(tokens)], 1)  # (B, S + N, W)
        x = self.z_proj_ln(x + table)
        slots = self._known_slots(mask)  # (B, S + N)
        real = _front(slots)
        known = x.new_zeros(*real.shape, x.shape[-1])  # (B, S + known, W)
        known[real] = x[slots]
        attention_mask = None if real.all() else real[:, None, None]  # (B, 1, 1, S + known)
        for block in self.encoder_blocks:
            known = run_block(block, known, attention_mask)
        return self.encoder_norm(known)

    def forward_mae_decoder(self, encoded: torch.Tensor, mask: torch.Tensor, positions: PositionTables | None = None) -> torch.Tensor:
        """Encoder output, the same mask and positions -> z (B, N, W): the condition of the diffusion head at every position."""
        tables = positions or self.position_tables()
        slots = self._known_slots(mask)  # (B, S + N)
        embedded = self.decoder_embed(encoded)
        x = self.mask_token.to(embedded.dtype).expand(*slots.shape, -1).clone()
        x[slots] = embedded[_front(slots)]
        x = x + tables.decoder
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, self.config.buffer_size :] + tables.diffusion

    def _known_slots(self, mask: torch.Tensor) -> torch.Tensor:
        """(B, N) -> (B, S + N) bool: the buffer always, and the known tokens."""
        buffer = torch.ones(len(mask), self.config.buffer_size, dtype=torch.bool, device=mask.device)
        return torch.cat([buffer, mask == 0], 1)

    def class_vectors(self, labels: torch.Tensor | None, batch_size: int) -> torch.Tensor:
        """Labels (B,), or None for no class, -> (B, W)."""
        return self.fake_latent.expand(batch_size, -1) if labels is None else self.class_emb(labels)

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        generator: torch.Generator,
        *,
        label_drop: float = 0.1,
        repeats: int = 4,
    ) -> torch.Tensor:
        """Training loss of tokens (B, N, D) with labels (B,), averaged over the masked tokens.

        `label_drop` of the rows see `fake_latent`; each token meets `repeats` noise levels for one pass of the backbone.
        """
        mask = random_mask(tokens.shape[0], tokens.shape[1], generator).to(tokens)  # (B, N)
        dropped = torch.rand(len(tokens), 1, generator=generator) < label_drop
        vectors = torch.where(dropped.to(tokens.device), self.fake_latent, self.class_emb(labels))

        z = self.forward_mae_decoder(self.forward_mae_encoder(tokens, mask, vectors), mask)  # (B, N, W)
        return self.denoising_loss(tokens, mask, z, generator, repeats)

    def denoising_loss(
        self, tokens: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, generator: torch.Generator, repeats: int
    ) -> torch.Tensor:
        """The head's loss of the masked tokens, given their conditions z (B, N, W)."""
        chosen = mask.bool()
        target, condition = tokens[chosen].repeat(repeats, 1), z[chosen].repeat(repeats, 1)
        return self.diffloss(target, condition, generator).mean()


def _front(slots: torch.Tensor) -> torch.Tensor:
    """(B, L) bool -> (B, most Trues in a row) bool: as many Trues a row, moved to its front."""
    counts = slots.sum(1)
    return torch.arange(int(counts.max()), device=slots.device) < counts[:, None]


def run_block(block: Any, x: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """A timm block; with a mask by its parts, because older releases of timm take none."""
    if attention_mask is None:
        return block(x)
    attn = block.attn
    q, k, v = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, L, W / heads) each
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
    x = x + attn.proj(attended.transpose(1, 2).flatten(2))
    return x + block.mlp(block.norm2(x))


def random_mask(batch: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """(B, N) of a training step, with as many ones in every row.

    Their share follows a normal law around 1 with std 0.25, cut to [0.7, 1] (Li et al. 2024, section 4.2).
    """
    masked = math.ceil(count * truncated_mask_share(generator))
    order = torch.rand(batch, count, generator=generator).argsort(1)  # a random permutation a row
    return (order < masked).float()


def truncated_mask_share(generator: torch.Generator) -> float:
    """One draw of N(1, 0.25^2) cut to [0.7, 1], by inverting its distribution function."""
    low, high = 0.5 * math.erfc(0.3 / 0.25 / math.sqrt(2)), 0.5  # P(share < 0.7), P(share < 1)
    u = low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64)
    return (1.0 + 0.25 * torch.special.ndtri(u)).item()
