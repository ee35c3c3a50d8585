"""`car-spec info`: what a checkpoint is, and which samplers fit it."""

import argparse
from collections.abc import Iterator
from typing import Any

from car_spec.flags import model_flags
from car_spec.harmon_pipeline import HarmonPipeline
from car_spec.models.harmon import HarmonConfig, infer_harmon_config, load_harmon, qwen_values
from car_spec.models.loading import (
    Checkpoint,
    CheckpointError,
    identify,
    infer_mar_config,
    infer_xar_config,
    load_mar,
    load_xar,
    read_checkpoint,
    resolve,
)
from car_spec.models.mar import MARConfig
from car_spec.models.vae import load_vae
from car_spec.models.xar import XARConfig
from car_spec.pipeline import DEFAULT_SAMPLER, LAWS, SAMPLERS, MARPipeline, known_preset, model_file, preset_of, vae_beside
from car_spec.runs import sha256_of
from car_spec.xar_pipeline import XARPipeline

NAMES = {
    "mar": "MAR (Li et al. 2024)",
    "xar": "xAR (Ren et al. 2025)",
    "harmon": "Harmon (Wu et al. 2025)",
    "vae": "an autoencoder in the release's format; give it as --vae",
}


def describe(checkpoint: Checkpoint, num_heads: int | None = None) -> Iterator[tuple[str, str]]:
    """What tensors and presets tell, as (name, text). Nothing is computed with the weights."""
    kind = identify(checkpoint.state)
    yield "network", NAMES[kind] if kind else "no known one"
    if kind is None:
        raise CheckpointError(f"{checkpoint.path} holds no model that car_spec knows: {', '.join(sorted(checkpoint.state)[:3])} ...")
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in checkpoint.state.values()})
    yield "weights", f"{checkpoint.copy}, {' and '.join(dtypes)}"
    yield "parameters", f"{sum(value.numel() for value in checkpoint.state.values()) / 1e6:.2f} M in {len(checkpoint.state)} tensors"
    if kind == "mar":
        config = infer_mar_config(checkpoint, num_heads)
        yield from _mar(config)
        yield from _defaults(checkpoint, kind, config.width)
    elif kind == "xar":
        yield from _xar(cells := infer_xar_config(checkpoint, num_heads))
        yield from _defaults(checkpoint, kind, cells.width)
    elif kind == "harmon":
        harmon = infer_harmon_config(checkpoint, num_heads, qwen_values(checkpoint.path.parent))
        yield from _harmon(harmon)
        yield from _defaults(checkpoint, kind, harmon.mar.width)


def _mar(config: MARConfig) -> Iterator[tuple[str, str]]:
    yield "tokens", f"{config.num_tokens} of {config.token_dim} numbers; {config.num_classes} classes"
    yield "backbone", f"width {config.width}, {config.num_heads} heads, {config.encoder_depth} + {config.decoder_depth} blocks"
    yield "head", f"width {config.head_width}, {config.head_depth} blocks"


def _xar(config: XARConfig) -> Iterator[tuple[str, str]]:
    cells = f"{config.num_cells} cells of {config.tokens_per_cell} tokens of {config.token_dim} numbers"
    yield "cells", f"{cells}; {config.num_classes} classes"
    yield "transformer", f"width {config.width}, {config.num_heads} heads, {config.encoder_depth} + {config.decoder_depth} blocks"


def _harmon(config: HarmonConfig) -> Iterator[tuple[str, str]]:
    yield from _mar(config.mar)
    llm = config.llm
    yield (
        "language model",
        f"width {llm.hidden_size}, {llm.num_attention_heads} heads, {llm.num_hidden_layers} blocks, {llm.vocab_size} words",
    )


def _defaults(checkpoint: Checkpoint, kind: str, width: int) -> Iterator[tuple[str, str]]:
    preset = known_preset(checkpoint, kind, width)
    if preset is None:
        yield "defaults", f"no preset has width {width}: one AR step a token, no guidance"
        return
    steps = f"{preset.num_iter} AR steps, {preset.num_inference_steps} denoising steps"
    guidance = f"guidance {preset.guidance_scale:g} ({preset.guidance_schedule})"
    yield "defaults", f"{preset.name}: {steps}, {guidance}, temperature {preset.temperature:g}"


def samplers(pipeline: MARPipeline) -> Iterator[tuple[str, str]]:
    """Every sampler, and whether the pipeline takes it; if not, why."""
    choices: list[dict[str, Any]] = [{"sampler": name} for name in SAMPLERS]
    choices.insert(1, {"sampler": "lossless", "drafter": "model"})
    for given in choices:
        name = given["sampler"] + (" --drafter model" if "drafter" in given else "")
        try:
            pipeline.settings(**given)
        except ValueError as reason:
            yield f"--sampler {name}", f"no: {reason}"
        else:
            default = ", the default" if name == DEFAULT_SAMPLER else ""
            yield f"--sampler {name}", f"yes{default}; law of the images: {LAWS[given['sampler']]}"


def bare_pipeline(checkpoint: Checkpoint, num_heads: int | None = None, vae: Any = None) -> MARPipeline | None:
    """A pipeline to ask which settings it takes, with an autoencoder or without; None for what is no model."""
    kind = identify(checkpoint.state)
    clip = checkpoint.metadata.get("clip_sample_range")
    if kind == "harmon":
        harmon = load_harmon(checkpoint, num_heads=num_heads)
        mar = harmon.config.mar
        return HarmonPipeline(harmon, vae, None, preset_of(checkpoint, kind, mar, mar.num_tokens), clip_sample_range=clip)
    if kind not in ("mar", "xar"):
        return None
    network: Any = (load_xar if kind == "xar" else load_mar)(checkpoint, num_heads=num_heads)
    preset = preset_of(checkpoint, kind, network.config, network.config.num_tokens)
    return (XARPipeline if kind == "xar" else MARPipeline)(network, vae, preset, clip_sample_range=clip)


def add_parser(commands: Any) -> None:
    info = commands.add_parser(
        "info",
        parents=[model_flags(None)],
        help="say what a checkpoint is, and which samplers fit it",
        description="Say what a checkpoint is, and which samplers fit it.",
    )
    info.add_argument("checkpoint", nargs="?", metavar="MODEL", help="as --model")
    info.add_argument("--draft", help="also look whether this model can draft for it")
    info.set_defaults(run=run_info)


def run_info(args: argparse.Namespace) -> None:
    if args.checkpoint is not None and args.model is not None:
        raise ValueError(f"info takes one model, but {args.checkpoint} and --model {args.model} are given")
    file = model_file(args.checkpoint or args.model or "demo")
    checkpoint = read_checkpoint(file, args.weights)
    print(f"file: {file}\nsha256: {sha256_of(file)}")
    for name, text in describe(checkpoint, args.num_heads):
        print(f"{name}: {text}")
    if identify(checkpoint.state) == "vae":
        return
    try:
        inside = any(name.startswith("vae.") for name in checkpoint.state)  # a Harmon's
        vae_path = resolve(args.vae, "--vae") if args.vae else file if inside else vae_beside(file)
    except ValueError as missing:
        vae_path = None
        print(f"autoencoder: {missing}")
    else:
        print(f"autoencoder: {vae_path}")
    pipeline = bare_pipeline(checkpoint, args.num_heads, load_vae(vae_path) if vae_path else None)
    assert pipeline is not None  # `describe` refused what is no model
    if pipeline.vae is not None:
        print(f"image size: {pipeline.image_size}")
    if args.draft:
        draft = bare_pipeline(read_checkpoint(model_file(args.draft, "--draft")), args.num_heads, pipeline.vae)
        if draft is None:
            raise ValueError(f"--draft {args.draft} holds no model that can draft")
        pipeline.set_draft(draft)
    for name, text in samplers(pipeline):
        print(f"{name}: {text}")
    if names := checkpoint.metadata.get("class_names"):
        print("classes: " + ", ".join(f"{i} {name}" for i, name in enumerate(names)))
