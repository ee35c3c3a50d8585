"""The KL autoencoder of MAR, xAR and Harmon as diffusers' AutoencoderKL, and the names of its parameters in `kl16.ckpt`."""

import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from car_spec.models.loading import Checkpoint, CheckpointError, find_file, identify, load_strictly, read_checkpoint

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

# One over the standard deviation of the ImageNet latents under kl16.ckpt: what MAR, xAR and Harmon multiply latents with.
# The file does not store it.
KL16_SCALING_FACTOR = 0.2325
KL16_RESOLUTION = 256

SANE_STD = (0.2, 5.0)  # of scaled latents; anything outside was scaled twice, or not at all, or is no image

# released name -> diffusers' name, apart from the block indices
_PLAIN = {"norm_out": "conv_norm_out", "nin_shortcut": "conv_shortcut"}
_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def _name_table(num_levels: int, num_blocks: int, attention_levels: tuple[int, ...]) -> dict[str, str]:
    """Module prefixes: released -> diffusers. Decoder levels are numbered from the finest in the one, the coarsest in the other."""
    table = {}
    for side, level_name, blocks_name in (("encoder", "down", "down_blocks"), ("decoder", "up", "up_blocks")):
        for level in range(num_levels):
            ours = level if side == "encoder" else num_levels - 1 - level
            released, target = f"{side}.{level_name}.{level}", f"{side}.{blocks_name}.{ours}"
            for i in range(num_blocks + (side == "decoder")):
                table[f"{released}.block.{i}"] = f"{target}.resnets.{i}"
                if side == "encoder" and level in attention_levels:
                    table[f"{released}.attn.{i}"] = f"{target}.attentions.{i}"
            sampling = "downsample" if side == "encoder" else "upsample"
            table[f"{released}.{sampling}"] = f"{target}.{sampling}rs.0"
        table[f"{side}.mid.block_1"] = f"{side}.mid_block.resnets.0"
        table[f"{side}.mid.block_2"] = f"{side}.mid_block.resnets.1"
        table[f"{side}.mid.attn_1"] = f"{side}.mid_block.attentions.0"
    return table


def _structure(shapes: Mapping[str, torch.Tensor]) -> tuple[int, int, tuple[int, ...]]:
    """Released names -> levels, residual blocks a level, levels with attention in the encoder."""
    found = [re.match(r"encoder\.down\.(\d+)\.(block|attn)\.(\d+)\.", name) for name in shapes]
    matches = [(int(m[1]), m[2], int(m[3])) for m in found if m]
    if not matches:
        raise CheckpointError("the autoencoder has no encoder.down.*.block.*")
    levels, blocks = 1 + max(m[0] for m in matches), 1 + max(m[2] for m in matches)
    return levels, blocks, tuple(sorted({m[0] for m in matches if m[1] == "attn"}))


def kl16_to_diffusers(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters under the released names -> under diffusers' names. Attention's 1x1 convolutions become linear layers."""
    table = _name_table(*_structure(state))
    converted = {}
    for name, value in state.items():
        prefix, layer, kind = _split(name)
        if prefix in table and ".attn" in prefix:
            converted[f"{table[prefix]}.{_ATTENTION[layer]}.{kind}"] = value.flatten(1) if value.ndim == 4 else value
        else:
            parts = [p for p in (table.get(prefix, prefix), _PLAIN.get(layer, layer), kind) if p]
            converted[".".join(parts)] = value
    return converted


def diffusers_to_kl16(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `kl16_to_diffusers`."""
    levels = 1 + max(int(m[1]) for m in (re.match(r"encoder\.down_blocks\.(\d+)\.", n) for n in state) if m)
    blocks = 1 + max(int(m[1]) for m in (re.match(r"encoder\.down_blocks\.0\.resnets\.(\d+)\.", n) for n in state) if m)
    attention = {int(m[1]) for m in (re.match(r"encoder\.down_blocks\.(\d+)\.attentions\.", n) for n in state) if m}
    table = {target: released for released, target in _name_table(levels, blocks, tuple(attention)).items()}
    plain, attention_layers = ({b: a for a, b in names.items()} for names in (_PLAIN, _ATTENTION))
    converted = {}
    for name, value in state.items():
        prefix = next((p for p in sorted(table, key=len, reverse=True) if name.startswith(p + ".")), None)
        *layer, kind = name[len(prefix) + 1 if prefix else 0 :].split(".")
        if prefix and ".attentions." in prefix:
            is_matrix = value.ndim == 2
            converted[f"{table[prefix]}.{attention_layers['.'.join(layer)]}.{kind}"] = value[..., None, None] if is_matrix else value
        else:
            converted[".".join([*([table[prefix]] if prefix else []), *(plain.get(part, part) for part in layer), kind])] = value
    return converted


def _split(name: str) -> tuple[str, str, str]:
    """`encoder.mid.attn_1.q.weight` -> module prefix, layer, weight or bias."""
    *prefix, layer, kind = name.split(".")
    return ".".join(prefix), layer, kind


def kl16_config(state: Mapping[str, torch.Tensor]) -> dict:
    """Arguments of `AutoencoderKL` for parameters under the released names, every size read from the shapes."""
    levels, blocks, attention = _structure(state)
    if attention not in ((), (levels - 1,)):
        raise CheckpointError(f"the autoencoder has attention at encoder levels {attention}, expected none or the last ({levels - 1})")
    widths = tuple(state[f"encoder.down.{i}.block.0.conv1.weight"].shape[0] for i in range(levels))
    last_down = "AttnDownEncoderBlock2D" if attention else "DownEncoderBlock2D"
    return dict(
        in_channels=state["encoder.conv_in.weight"].shape[1],
        out_channels=state["decoder.conv_out.weight"].shape[0],
        latent_channels=state["post_quant_conv.weight"].shape[0],
        block_out_channels=widths,
        layers_per_block=blocks,
        down_block_types=("DownEncoderBlock2D",) * (levels - 1) + (last_down,),
        up_block_types=("UpDecoderBlock2D",) * levels,
        norm_num_groups=32,
        sample_size=KL16_RESOLUTION,
        scaling_factor=KL16_SCALING_FACTOR,
    )


def build_kl16(state: Mapping[str, torch.Tensor], path: Path) -> "AutoencoderKL":
    """The autoencoder from parameters under the released names."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(**kl16_config(state))
    load_strictly(vae, kl16_to_diffusers(state), path)
    return vae.eval().requires_grad_(False)


def load_vae(path: Path) -> "AutoencoderKL":
    """A file in the released format (`kl16.ckpt`, or the same keys in safetensors), or a folder that diffusers saved."""
    from diffusers import AutoencoderKL

    if path.is_dir() and (path / "config.json").exists():
        vae = AutoencoderKL.from_pretrained(path, local_files_only=True, low_cpu_mem_usage=False)
        return vae.eval().requires_grad_(False)
    checkpoint = read_checkpoint(find_file(path))
    return build_kl16(vae_state(checkpoint), checkpoint.path)


def vae_state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Its parameters from a file of its own, or from a Harmon file that holds it under `vae.`."""
    kind = identify(checkpoint.state)
    inside = {name.removeprefix("vae."): value for name, value in checkpoint.state.items() if name.startswith("vae.")}
    if kind == "harmon" and inside:
        return inside
    if kind != "vae":
        found = f"a {kind} checkpoint" if kind else f"none of the autoencoder's keys: 0 of {len(checkpoint.state)} keys matched"
        raise CheckpointError(f"--vae {checkpoint.path} holds {found}")
    return checkpoint.state


def encode_images(vae: "AutoencoderKL", images: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Images (B, 3, H, W) in [-1, 1] -> scaled latents (B, C, h, w): the posterior's mean, or a sample from given noise."""
    posterior = vae.encode(images).latent_dist
    latents = posterior.mean if noise is None else posterior.mean + posterior.std * noise
    return latents * vae.config.scaling_factor


def decode_latents(vae: "AutoencoderKL", latents: torch.Tensor) -> torch.Tensor:
    """Scaled latents (B, C, h, w), left unchanged, -> images (B, 3, H, W), about [-1, 1]."""
    std = latents.std().item()
    if math.isfinite(std) and not SANE_STD[0] <= std <= SANE_STD[1]:
        warnings.warn(f"latents have standard deviation {std:.3g}, expected about 1: was the scaling factor applied once?", stacklevel=2)
    return vae.decode(latents / vae.config.scaling_factor).sample
