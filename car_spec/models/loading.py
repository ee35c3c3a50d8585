"""Reading checkpoints: where they lie, what is inside, which network fits. Nothing here ever unpickles code."""

import argparse
import json
import math
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import nn

from car_spec.models.mar import MAR, MARConfig
from car_spec.models.presets import PRESETS
from car_spec.models.xar import XAR, XARConfig, causal_mask

SUFFIXES = (".safetensors", ".pth", ".ckpt", ".pt", ".bin")
INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")  # of a checkpoint cut into several files
USUAL_NAMES = ("checkpoint-last.pth", "model.safetensors")  # taken where a folder holds several files
COPIES = ("model_ema", "model", "state_dict")  # in this order of preference
WRAPPER_PREFIXES = ("module.", "_orig_mod.")  # left behind by data-parallel training and by torch.compile
PICKLED_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1", "LONG", "INT")
ITEM_BYTES = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1}  # others: 4
METADATA_KEY = "car_spec"  # of a safetensors header: JSON with what tensor shapes cannot tell


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, in one sentence that names the file."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    copy: str  # which copy of the weights: model_ema, model, state_dict or flat
    state: dict[str, torch.Tensor]
    metadata: dict = field(default_factory=dict)


def resolve(source: str | Path, flag: str = "--model") -> Path:
    """A local file or folder, or a hub id `organisation/name[/file]`, -> a local path, downloaded if need be."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    parts = str(source).split("/")
    if len(parts) < 2 or not all(re.fullmatch(r"[\w.-]+", part) for part in parts):
        raise CheckpointError(f"{flag} {source}: there is no such file or folder, and it is not a hub id (organisation/name)")
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(f"{flag} {source}: there is no such file or folder, and hub ids need the package huggingface_hub") from None
    repository, file = "/".join(parts[:2]), "/".join(parts[2:])
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file))
        patterns = [f"*{suffix}" for suffix in SUFFIXES] + ["*.json"]
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises its HTTP library's errors, which differ between its releases
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{flag} {source}: there is no such file or folder, it is not in the hub's local cache, "
            f"and the hub could not be reached or does not have it ({type(error).__name__}: {reason})"
        ) from error


def find_file(path: Path) -> Path:
    """The checkpoint file of a folder; a file is its own."""
    if not path.is_dir():
        return path
    for index in INDEX_NAMES:
        if (path / index).exists():
            return path / index
    files = sorted(f for f in path.iterdir() if f.suffix in SUFFIXES)
    usual = [f for f in files if f.name in USUAL_NAMES]
    if len(files) == 1 or usual:
        return (usual or files)[0]
    if not files:
        raise CheckpointError(f"{path} holds no checkpoint (none of {', '.join(SUFFIXES)})")
    raise CheckpointError(f"{path} holds {len(files)} checkpoints, name one of them: {', '.join(f.name for f in files)}")


def read_checkpoint(path: Path, weights: str | None = None) -> Checkpoint:
    """Read one file, or the files that an index names, mapped and not copied.

    weights: the copy to take, `model_ema` or `model`; None takes the average where the file has one, and says so if it
    is empty. Wrapping prefixes are stripped. Pickled code is refused, `argparse.Namespace` excepted.
    """
    path = find_file(Path(path))
    if path.name in INDEX_NAMES:
        return _read_shards(path, weights)
    if path.suffix == ".safetensors":
        return _read_safetensors(path, weights)
    content = _read_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors")
    copy, state = _choose_copy(path, content, weights)
    tensors = {_strip(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors (its keys: {', '.join(map(str, list(content)[:6]))})")
    return Checkpoint(path, copy, tensors)


def shards_of(index: Path) -> list[str]:
    """The names of the files that an index lists."""
    try:
        return sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is no index of a checkpoint: it has no weight_map") from None


def _read_shards(index: Path, weights: str | None) -> Checkpoint:
    names = shards_of(index)
    state: dict[str, torch.Tensor] = {}
    for name in names:
        if Path(name).name != name or Path(name).suffix not in SUFFIXES or not (index.parent / name).exists():
            raise CheckpointError(f"{index} names {name}, which does not lie beside it")
        part = read_checkpoint(index.parent / name, weights)
        state |= part.state
    if not names:
        raise CheckpointError(f"{index} names no file")
    return Checkpoint(index, part.copy, state)


def _strip(name: str) -> str:
    while name.startswith(WRAPPER_PREFIXES):
        name = name[len(next(p for p in WRAPPER_PREFIXES if name.startswith(p))) :]
    return name


def _choose_copy(path: Path, content: Mapping, weights: str | None) -> tuple[str, Mapping]:
    present = [name for name in COPIES if isinstance(content.get(name), Mapping)]
    if weights is not None:
        if weights not in present:
            raise CheckpointError(f"--weights {weights}: {path} holds {', '.join(present) or 'one flat copy'} only")
        return weights, content[weights]
    if "model_ema" in content and "model_ema" not in present and present:
        warnings.warn(f"{path}: model_ema is empty, so the raw weights ({present[0]}) are used; expect worse images", stacklevel=4)
    return (present[0], content[present[0]]) if present else ("flat", content)


def _read_safetensors(path: Path, weights: str | None) -> Checkpoint:
    from safetensors import safe_open

    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(64)
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        header = file.read(length) if length <= size else b""
    try:
        entries = json.loads(header)
    except ValueError:
        raise CheckpointError(f"{path} is not a safetensors file{_looks_like(start)} ({size:,} bytes)") from None
    needed = 8 + length + max((e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"), default=0)
    if size < needed:
        raise CheckpointError(f"{path} is cut short: {size:,} bytes where its header announces {needed:,}; download it again")
    with safe_open(str(path), framework="pt") as reader:
        metadata = json.loads((reader.metadata() or {}).get(METADATA_KEY, "{}"))
        state = {_strip(name): reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  safe_open is no mapping
    copy = metadata.get("copy", "flat")
    if weights not in (None, copy):
        raise CheckpointError(f"--weights {weights}: {path} holds {'one flat copy' if copy == 'flat' else copy} only")
    return Checkpoint(path, copy, state, metadata)


def _read_pickle(path: Path):
    with open(path, "rb") as file:
        start = file.read(64)
    size = path.stat().st_size
    zipped = start.startswith(b"PK\x03\x04")
    if zipped and not zipfile.is_zipfile(path):
        needed = _announced_bytes(path)
        expected = f"where its tensors alone take about {needed:,}" if needed else "and not even its table of contents is whole"
        raise CheckpointError(f"{path} is cut short: {size:,} bytes {expected}; download it again")
    if not zipped and not start.startswith(b"\x80"):  # b"\x80": a pickle of torch's format before 1.6
        raise CheckpointError(f"{path} is not a PyTorch file{_looks_like(start)} ({size:,} bytes)")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        # torch's own message advises to switch its protection off; ours must not
        found = re.search(r"(?:GLOBAL|class|global) `?([\w.]+)", str(error))
        what = f"it holds pickled code ({found.group(1)}), which is never run" if found else f"it cannot be read ({type(error).__name__})"
        raise CheckpointError(f"{path} ({size:,} bytes) is refused: {what}") from error


def _looks_like(start: bytes) -> str:
    text = start.lstrip().lower()
    tag = next((t for t in (b"<!doctype html", b"<html", b"<?xml", b"version https://git-lfs") if text.startswith(t)), None)
    return f" (starts with {tag.decode()}: a web page or a pointer was saved in place of the file)" if tag else ""


def _announced_bytes(path: Path) -> int | None:
    """How many bytes the tensors of a zip checkpoint take, from the pickle at its start, without running it."""
    with open(path, "rb") as file:
        start = file.read(2**24)
    name, extra = struct.unpack("<HH", start[26:30])  # of the first entry, which is the pickle
    storage, count, total = "", 0, 0
    try:
        for opcode, argument, _ in pickletools.genops(start[30 + name + extra :]):
            if opcode.name == "GLOBAL" and str(argument).endswith("Storage"):
                storage = str(argument).split()[-1].removesuffix("Storage")
            elif opcode.name in PICKLED_INTEGERS:
                count = int(argument or 0)
            elif opcode.name == "BINPERSID":  # ends (storage, type, key, location, number of elements)
                total += count * ITEM_BYTES.get(storage, 4)
    except Exception:  # the cut lies inside the pickle itself
        return None
    return total or None


def identify(state: Iterable[str]) -> str | None:
    """Key names -> mar, xar, harmon, vae, or None."""
    names = list(state)
    starts = lambda prefix: any(n.startswith(prefix) for n in names)
    if starts("mar.") and starts("llm."):
        return "harmon"
    if starts("diffloss.net."):
        return "mar"
    if "pred.weight" in names and any(n.endswith("mlp.fc1_g.weight") for n in names):
        return "xar"
    if starts("quant_conv.") and starts("encoder."):
        return "vae"
    return None


def count_layers(names: Iterable[str], prefix: str) -> int:
    """One more than the highest number behind a prefix."""
    return 1 + max((int(n[len(prefix) :].split(".")[0]) for n in names if n.startswith(prefix)), default=-1)


def infer_mar_config(checkpoint: Checkpoint, num_heads: int | None = None) -> MARConfig:
    """The architecture from tensor shapes; the number of heads from the argument, the file's own metadata, or the presets."""
    state = checkpoint.state
    try:
        classes, width = state["class_emb.weight"].shape
        tokens = state["diffusion_pos_embed_learned"].shape[1]
        head_width, token_dim = state["diffloss.net.input_proj.weight"].shape
        buffer_size = state["encoder_pos_embed_learned"].shape[1] - tokens
        hidden = state["encoder_blocks.0.mlp.fc1.weight"].shape[0]
    except KeyError as missing:
        raise CheckpointError(f"{checkpoint.path} looks like a MAR checkpoint but has no {missing.args[0]}") from None
    heads = _num_heads(checkpoint, "mar", width, num_heads)
    return MARConfig(
        num_tokens=tokens,
        token_dim=token_dim,
        num_classes=classes,
        width=width,
        encoder_depth=count_layers(state, "encoder_blocks."),
        decoder_depth=count_layers(state, "decoder_blocks."),
        num_heads=heads,
        head_width=head_width,
        head_depth=count_layers(state, "diffloss.net.res_blocks."),
        buffer_size=buffer_size,
        mlp_ratio=hidden / width,
    )


def _num_heads(checkpoint: Checkpoint, kind: str, width: int, given: int | None) -> int:
    """From the argument, the file's own metadata, or the presets."""
    preset = PRESETS.get((kind, width))
    heads = given or checkpoint.metadata.get("num_heads") or (preset.num_heads if preset else None)
    if heads is None:
        raise CheckpointError(
            f"{checkpoint.path} has width {width}, which is no preset's, and files do not store the number of heads: give --num-heads"
        )
    return heads


def infer_xar_config(checkpoint: Checkpoint, num_heads: int | None = None) -> XARConfig:
    """The architecture from tensor shapes; heads also from the width of the release's rotary tables, cells from its mask.

    Both are only looked at: where they are absent or damaged, heads come from elsewhere and there are 4 cells.
    """
    state = checkpoint.state
    try:
        rows, width = state["class_emb.weight"].shape
        tokens = state["encoder_pos_embed_learned"].shape[1]
        token_dim = state["pred.weight"].shape[0]
        hidden = state["encoder_blocks.0.mlp.fc2.weight"].shape[1]
    except KeyError as missing:
        raise CheckpointError(f"{checkpoint.path} looks like an xAR checkpoint but has no {missing.args[0]}") from None
    table = state.get("encoder_blocks.0.attn.rope.freqs_cos")
    stored = width // table.shape[-1] if table is not None and 0 < table.shape[-1] <= width else None
    if None not in (num_heads, stored) and num_heads != stored:
        raise CheckpointError(f"--num-heads {num_heads}: {checkpoint.path} has rotary tables for {stored} heads")
    return XARConfig(
        num_tokens=tokens,
        token_dim=token_dim,
        num_classes=rows - 1,
        width=width,
        encoder_depth=count_layers(state, "encoder_blocks."),
        decoder_depth=count_layers(state, "decoder_blocks."),
        num_heads=_num_heads(checkpoint, "xar", width, num_heads or stored),
        mlp_hidden=hidden,
        num_cells=checkpoint.metadata.get("num_cells") or _cells_of_mask(state.get("mask"), tokens) or 4,
    )


def _cells_of_mask(mask: torch.Tensor | None, tokens: int) -> int | None:
    """The number of cells whose mask (1, 1, N, N), 0 where a token may look, this is; None if it is none's."""
    if mask is None or mask.shape[-2:] != (tokens, tokens):
        return None
    may_look = (mask == 0).view(tokens, tokens)
    squares = [n**2 for n in range(2, math.isqrt(tokens) + 1) if tokens % n**2 == 0]
    return next((n for n in squares if torch.equal(may_look, causal_mask(n, tokens // n, 0, mask.device))), None)


def load_strictly(module: nn.Module, state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Every parameter from the file, and nothing else in it. The module may be on the meta device; tensors are taken over, not copied."""
    wanted, have = module.state_dict(), set(state)
    matched = have & set(wanted)
    if not matched:
        raise CheckpointError(f"{path}: 0 of {len(wanted)} keys matched (the file has {', '.join(sorted(have)[:3])} ...)")
    for problem, names in (("lacks", set(wanted) - have), ("has unknown", have - set(wanted))):
        if names:
            raise CheckpointError(
                f"{path}: {len(matched)} of {len(wanted)} keys matched; it {problem} {len(names)}: {', '.join(sorted(names)[:3])}"
            )
    for name in sorted(matched):
        if state[name].shape != wanted[name].shape:
            raise CheckpointError(f"{path}: {name} has shape {tuple(state[name].shape)}, expected {tuple(wanted[name].shape)}")
    module.load_state_dict(dict(state), assign=True)


def load_mar(checkpoint: Checkpoint, *, num_heads: int | None = None, **expected: int) -> MAR:
    """A MAR network with the checkpoint's weights, on the CPU in their dtype.

    expected: values of `MARConfig` that the file must agree with, for instance head_depth=6.
    """
    _require_kind(checkpoint, "mar", "MAR")
    config = infer_mar_config(checkpoint, num_heads)
    _require_agreement(config, expected, checkpoint.path)
    with torch.device("meta"):
        model = MAR(config)
    load_strictly(model, checkpoint.state, checkpoint.path)
    return model.eval().requires_grad_(False)


def load_xar(checkpoint: Checkpoint, *, num_heads: int | None = None, **expected: int) -> XAR:
    """The same for xAR. The mask and the rotary tables of the file are left out: the network makes its own."""
    _require_kind(checkpoint, "xar", "xAR")
    config = infer_xar_config(checkpoint, num_heads)
    _require_agreement(config, expected, checkpoint.path)
    with torch.device("meta"):
        model = XAR(config)
    parameters = {name: value for name, value in checkpoint.state.items() if name != "mask" and ".attn.rope." not in name}
    load_strictly(model, parameters, checkpoint.path)
    return model.eval().requires_grad_(False)


def _require_kind(checkpoint: Checkpoint, kind: str, name: str) -> None:
    found = identify(checkpoint.state)
    if found != kind:
        what = f"a {found} checkpoint" if found else f"no known model: 0 of its {len(checkpoint.state)} keys matched {name}'s"
        raise CheckpointError(f"{checkpoint.path} holds {what}, where a {name} checkpoint is expected")


def _require_agreement(config: MARConfig | XARConfig, expected: Mapping[str, int], path: Path) -> None:
    unknown = set(expected) - {f.name for f in fields(config)}
    if unknown:
        raise TypeError(f"{', '.join(sorted(unknown))}: no such value of {type(config).__name__}")
    for name, asked in expected.items():
        if getattr(config, name) != asked:
            raise CheckpointError(f"{name} {asked} was asked for, but {path} holds {name} {getattr(config, name)}")
