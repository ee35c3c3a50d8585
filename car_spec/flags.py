"""Flags that several commands share, and their checks."""

import argparse
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from car_spec.pipeline import MARPipeline, load_pipeline

PROBLEM = ("num_iter", "num_inference_steps", "guidance_scale")  # what comparisons may change of a model's preset
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_device_flags(parser: Any, network: str = "transformer") -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, ... (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=f"of the {network} (default: %(default)s)")


def model_flags(default: str | None) -> argparse.ArgumentParser:
    """A parent of commands. Each default has a parent of its own, because the commands of one parent share its defaults."""
    flags = argparse.ArgumentParser(add_help=False)
    group = flags.add_argument_group("model")
    group.add_argument(
        "--model", default=default, help="a demo (demo, demo-xar, demo-harmon), a checkpoint, its folder, or a hub id (default: demo)"
    )
    group.add_argument("--vae", help="autoencoder: kl16.ckpt or a diffusers folder (default: what lies beside the model)")
    group.add_argument("--weights", choices=["model_ema", "model"], help="copy of the weights (default: model_ema where there is one)")
    group.add_argument("--num-heads", type=int, help="attention heads, needed for sizes without a preset only")
    group.add_argument("--tokenizer", help="Harmon: the folder of tokenizer.json (default: the model's)")
    group.add_argument("--base", help="Harmon: the whole model under a --model that holds some of its parameters")
    return flags


def add_problem_flags(parser: Any, guidance: str = "") -> None:
    """Those of `PROBLEM`; guidance: what else to say of the scale."""
    parser.add_argument("--num-iter", type=int, help="AR steps (default: the model's preset)")
    parser.add_argument("--num-inference-steps", type=int, help="denoising steps a token (default: the model's preset)")
    parser.add_argument("--guidance-scale", type=float, help=f"{guidance}(default: the model's preset)")


def add_execution_flags(parser: Any) -> None:
    parser.add_argument("--compile", action="store_true", help="torch.compile of the head and of the backbone's blocks")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay small calls of MAR's head as CUDA graphs; needs a CUDA device")


def load(args: argparse.Namespace, device: torch.device, **more: Any) -> MARPipeline:
    """The pipeline of a command's model flags."""
    flags = {name: getattr(args, name) for name in ("vae", "weights", "num_heads", "tokenizer", "base", "draft")}
    return load_pipeline(args.model, device=device, **flags, **more)


def given_flags(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the flags that were given."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def require(what: str, *packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{what} needs the package {package}: pip install 'car-spec[bench]'")


def check_at_least(name: str, given: int | Sequence[int], least: int) -> None:
    for value in [given] if isinstance(given, int) else given:
        if value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} is below {least}")


def check_quality_images(flag: str, images: int) -> None:
    if 0 < images < 16:
        raise ValueError(f"{flag} {images} is too few for a comparison: give 0 or at least 16")


def choose_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if "," in name:
        raise ValueError(f"--device {name} names several devices, but a process uses one: start one for each with torchrun")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name} is no device of this torch") from None
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from None
    return device
