"""Checks of flags that several commands share."""

import importlib.util
from collections.abc import Sequence

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
