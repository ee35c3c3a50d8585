"""xAR: an autoregressive transformer over cells of continuous tokens, each cell sampled by flow matching (Ren et al. 2025).

Parameter names are those of its release. The release also stores an attention mask and rotary tables; here they are functions of
the configuration. A cell is a square of tokens; cells, and tokens within a cell, follow each other in raster order.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from car_spec.models.diffloss import TimestepEmbedder

RMS_EPS = 1e-6
ROTARY_BASE = 10_000
TIME_SCALE = 1000  # the network reads times in [0, 1] as integers in 0..1000


@dataclass(frozen=True)
class XARConfig:
    """Everything that fixes the network."""

    num_tokens: int  # a square grid
    token_dim: int  # latent channels
    num_classes: int  # without the null class, which is the row behind them
    width: int
    encoder_depth: int
    decoder_depth: int
    num_heads: int
    mlp_hidden: int
    num_cells: int = 4  # a square grid of cells

    def __post_init__(self):
        for name in ("num_tokens", "num_cells"):
            if math.isqrt(getattr(self, name)) ** 2 != getattr(self, name):
                raise ValueError(f"{name} {getattr(self, name)} is not a square: xAR's tokens and cells form square grids")
        if math.isqrt(self.num_tokens) % math.isqrt(self.num_cells):
            raise ValueError(f"num_tokens {self.num_tokens} cannot be divided into num_cells {self.num_cells} squares")
        if self.width % (4 * self.num_heads):
            raise ValueError(f"width {self.width} is not a multiple of 4 x num_heads {self.num_heads}, as rotary embedding in 2-D needs")

    @property
    def tokens_per_cell(self) -> int:
        return self.num_tokens // self.num_cells


class Cache(NamedTuple):
    """Keys and values of finished cells for R rows, one entry a block. Keys are rotated already."""

    keys: tuple[torch.Tensor, ...]  # each (R, heads, cells x T, E)
    values: tuple[torch.Tensor, ...]

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[2]

    def first(self, rows: int) -> "Cache":
        """The first rows, without a copy."""
        return Cache(tuple(k[:rows] for k in self.keys), tuple(v[:rows] for v in self.values))


class Groups(NamedTuple):
    """M states, several of which share a row of a cache: laid side by side in their row, so that the cache is not copied for each."""

    rows: torch.Tensor  # (A,) the rows of the cache that have states, ascending
    slot: torch.Tensor  # (M,) place of a state in (A, S), S being the most states of a row
    size: int  # S

    @classmethod
    def of(cls, owner: torch.Tensor) -> "Groups":
        """owner (M,): the row of each state, ascending."""
        rows, counts = owner.unique_consecutive(return_counts=True)
        size = int(counts.max())
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)  # (M,)
        place = torch.arange(len(owner), device=owner.device) - first
        group = torch.arange(len(rows), device=owner.device).repeat_interleave(counts)
        return cls(rows, size * group + place, size)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """(M, heads, L, E) -> (A, heads, S L, E), zeros where a row has fewer states."""
        whole = x.new_zeros(len(self.rows) * self.size, *x.shape[1:])
        whole[self.slot] = x
        return whole.unflatten(0, (-1, self.size)).transpose(1, 2).flatten(2, 3)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `join`."""
        return x.unflatten(2, (self.size, -1)).transpose(1, 2).flatten(0, 1)[self.slot]

    def mask(self, length: int, cached: int) -> torch.Tensor:
        """(S L, cached + S L) bool: a state sees the cache and itself."""
        state = torch.arange(self.size * length, device=self.slot.device) // length
        return F.pad(state[:, None] == state, (cached, 0), value=True)


def cell_order(num_tokens: int, num_cells: int) -> torch.Tensor:
    """Sequence index -> raster index in the grid of tokens, (N,)."""
    side, grid = math.isqrt(num_tokens), math.isqrt(num_cells)
    return torch.arange(num_tokens).view(grid, side // grid, grid, side // grid).transpose(1, 2).flatten()


def to_cells(latents: torch.Tensor, num_cells: int) -> torch.Tensor:
    """Latents (B, C, H, W) -> cells (B, cells, T, C)."""
    order = cell_order(latents.shape[2] * latents.shape[3], num_cells).to(latents.device)
    return latents.flatten(2)[..., order].transpose(1, 2).unflatten(1, (num_cells, -1))


def from_cells(cells: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_cells` on a square grid."""
    tokens = cells.flatten(1, 2).transpose(1, 2)  # (B, C, N)
    side = math.isqrt(tokens.shape[2])
    order = cell_order(tokens.shape[2], cells.shape[1]).to(tokens.device)
    return tokens[..., order.argsort()].unflatten(2, (side, side))


def rotary_table(order: torch.Tensor, side: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Raster indices (L,) -> cosines and sines (L, E / 2): the first half of the pairs turns with the row, the other with the column."""
    rates = ROTARY_BASE ** (-torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=order.device) / (head_dim // 2))  # (E / 4,)
    angles = torch.cat([(order // side)[:, None] * rates, (order % side)[:, None] * rates], 1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (..., L, E), whose neighbouring entries form pairs, turned by the angles (L, E / 2)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def attend(q, k, v, past: tuple[torch.Tensor, torch.Tensor] | None, groups: Groups | None, mask: torch.Tensor | None) -> torch.Tensor:
    """q, k, v (M, heads, L, E) and the past of their rows (R, heads, P, E) -> (M, heads, L, E)."""
    if groups is not None:
        q, k, v = (groups.join(x) for x in (q, k, v))
    if past is not None:
        if groups is not None and len(groups.rows) < len(past[0]):
            past = (past[0][groups.rows], past[1][groups.rows])
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if groups is None else groups.split(out)


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (M, L, W) -> queries, keys and values (M, heads, L, E), the first two rotated."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v


class GatedMLP(nn.Module):
    """Gated by GELU, although the release calls it SwiGLU."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1_g = nn.Linear(width, hidden)
        self.fc1_x = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1_g(x)) * self.fc1_x(x))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, mlp_hidden: int):
        super().__init__()
        self.attn = Attention(width, num_heads)
        self.mlp = GatedMLP(width, mlp_hidden)
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(
        self,
        x: torch.Tensor,
        condition: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        past: tuple[torch.Tensor, torch.Tensor] | None = None,
        groups: Groups | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (M, m, T, W), condition (M, m, W) -> x, and the keys and values of its tokens."""
        gamma_1, gamma_2, scale_1, scale_2, shift_1, shift_2 = self.ada_lin(condition)[:, :, None].chunk(6, -1)
        h = F.rms_norm(x, x.shape[-1:], eps=RMS_EPS) * (1 + scale_1) + shift_1
        q, k, v = self.attn.project(h.flatten(1, 2), *table)
        attended = attend(q, k, v, past, groups, mask).transpose(1, 2).flatten(2)  # (M, m T, W)
        x = x + gamma_1 * self.attn.proj(attended).view_as(x)
        h = F.rms_norm(x, x.shape[-1:], eps=RMS_EPS) * (1 + scale_2) + shift_2
        return x + gamma_2 * self.mlp(h), k, v


class XAR(nn.Module):
    """x_t = (1 - t) clean + t noise; the network says the velocity, noise - clean. Attention is causal from cell to cell."""

    def __init__(self, config: XARConfig):
        super().__init__()
        self.config = config
        width, tokens = config.width, config.num_tokens

        def blocks(depth: int) -> nn.ModuleList:
            return nn.ModuleList(Block(width, config.num_heads, config.mlp_hidden) for _ in range(depth))

        self.class_emb = nn.Embedding(config.num_classes + 1, width)
        self.time_embed = TimestepEmbedder(width)
        self.z_proj = nn.Linear(config.token_dim, width)
        self.z_proj_ln = nn.RMSNorm(width, eps=RMS_EPS)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, tokens, width))
        self.encoder_blocks = blocks(config.encoder_depth)
        self.encoder_norm = nn.RMSNorm(width, eps=RMS_EPS)
        self.decoder_embed = nn.Linear(width, width)
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, tokens, width))
        self.decoder_blocks = blocks(config.decoder_depth)
        self.decoder_norm = nn.RMSNorm(width, eps=RMS_EPS)
        self.pred = nn.Linear(width, config.token_dim)

    def init_weights(self) -> None:
        """Every block starts as the identity, and the velocity as zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for parameter in (self.class_emb.weight, self.encoder_pos_embed_learned, self.decoder_pos_embed_learned):
            nn.init.normal_(parameter, std=0.02)
        for last in (*(block.ada_lin[1] for block in (*self.encoder_blocks, *self.decoder_blocks)), self.pred):
            nn.init.zeros_(last.weight)

    @property
    def null_class(self) -> int:
        return self.class_emb.num_embeddings - 1

    def embed_times(self, times: torch.Tensor) -> torch.Tensor:
        """Times (...) -> (..., W). They are cut to integers in float32, as in the release."""
        return self.time_embed((times.float() * TIME_SCALE).long().flatten()).view(*times.shape, -1)

    def conditions(self, labels: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Labels (M,) and times in [0, 1] of m cells (M, m) -> (M, m, W)."""
        return self.class_emb(labels)[:, None] + self.embed_times(times)

    def velocity(
        self,
        x: torch.Tensor,
        conditions: torch.Tensor,
        cache: Cache | None = None,
        owner: torch.Tensor | None = None,
        keep: int = 0,
        first: int | None = None,
    ) -> tuple[torch.Tensor, Cache | None]:
        """The m cells behind the cached ones, x (M, m, T, D) -> their velocities, and the cache with the first `keep` of them added.

        conditions (M, m, W). owner (M,) ascending: the row of the cache that each state goes with; None: state i with row i. Several
        states of one row share it without a copy for each; then m is 1. first: x are the cells from this one on, whatever is cached,
        and each sees the cached cells before it and itself alone, so that several cells are sampled side by side.
        """
        config, cells, count = self.config, *x.shape[1:3]
        if owner is not None and cells > 1:
            raise ValueError(f"owner goes with one cell, but x holds {cells}")
        if first is not None and (owner is not None or keep):
            raise ValueError(f"first {first} goes with neither owner nor keep {keep}: cells side by side are no sequence")
        cached = cache.num_tokens if cache is not None else 0
        start = cached if first is None else first * count
        span = slice(start, start + cells * count)
        order = cell_order(config.num_tokens, config.num_cells)[span].to(x.device)
        table = rotary_table(order, math.isqrt(config.num_tokens), config.width // config.num_heads)
        groups = Groups.of(owner) if owner is not None and cache is not None else None
        mask = None
        if groups is not None:
            mask = groups.mask(count, cached)
        elif first is not None and (cells > 1 or cached > start):
            mask = side_by_side_mask(first, cells, count, cached, x.device)
        elif cells > 1:
            mask = causal_mask(cells, count, cached, x.device)
        position = lambda embed: embed[0, span].unflatten(0, (cells, count))

        h = self.z_proj_ln(self.z_proj(x) + position(self.encoder_pos_embed_learned))
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i, block in enumerate((*self.encoder_blocks, *self.decoder_blocks)):
            if i == len(self.encoder_blocks):
                h = self.decoder_embed(self.encoder_norm(h)) + position(self.decoder_pos_embed_learned)
            past = (cache.keys[i], cache.values[i]) if cache is not None else None
            h, k, v = block(h, conditions, table, past, groups, mask)
            if keep:
                new = (k[:, :, : keep * count], v[:, :, : keep * count])
                kept.append(new if past is None else (torch.cat([past[0], new[0]], 2), torch.cat([past[1], new[1]], 2)))
        out = self.pred(self.decoder_norm(h))
        return out, Cache(*zip(*kept)) if keep else cache

    def forward(self, cells: torch.Tensor, labels: torch.Tensor, generator: torch.Generator, *, label_drop: float = 0.1) -> torch.Tensor:
        """Training loss of clean cells (B, cells, T, D) with labels (B,): flow matching with noisy context.

        Every cell is at a time of its own, uniform in [0, 1], and is seen like that by the cells behind it (Ren et al.
        2025), so that sampling may condition on imperfect cells. `label_drop` of the rows see the null class.
        """
        batch, count = cells.shape[:2]
        times = torch.rand(batch, count, generator=generator).to(cells.device)
        noise = torch.randn(cells.shape, generator=generator).to(cells.device)
        dropped = (torch.rand(batch, generator=generator) < label_drop).to(cells.device)
        t = times[..., None, None]
        said, _ = self.velocity(torch.lerp(cells, noise, t), self.conditions(labels.masked_fill(dropped, self.null_class), times))
        return F.mse_loss(said.float(), noise - cells)


def causal_mask(cells: int, count: int, cached: int, device: torch.device) -> torch.Tensor:
    """(cells x T, cached + cells x T) bool: a token sees the cache, its own cell and those before it."""
    cell = torch.arange(cells * count, device=device) // count
    return F.pad(cell[:, None] >= cell, (cached, 0), value=True)


def side_by_side_mask(first: int, cells: int, count: int, cached: int, device: torch.device) -> torch.Tensor:
    """(cells x T, cached + cells x T) bool: a token of the cells from `first` on sees the cached cells before its own, and its own."""
    cell, before = first + torch.arange(cells * count, device=device) // count, torch.arange(cached, device=device) // count
    return torch.cat([before < cell[:, None], cell[:, None] == cell], 1)
