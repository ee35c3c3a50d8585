"""The images of a folder, checked against its manifest before anything is scored."""

import json
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from car_spec.runs import GRID, MANIFEST

PLOTS = (GRID, "speculation.png")  # pictures that a run writes beside its images
SUFFIXES = (".png", ".jpg", ".jpeg")
LEAST_IMAGES = 4  # two halves with a covariance each


def image_files(folder: Path, flag: str) -> list[Path]:
    """All images of a folder, by name; of its subfolders where itself holds none.

    A folder with a manifest must hold exactly the images the manifest lists.
    """
    if not folder.is_dir():
        raise ValueError(f"{flag} {folder} is no folder")
    manifest = read_manifest(folder)
    files = _images(folder.iterdir())
    if manifest is not None:
        listed, found = {image["file"] for image in manifest["images"]}, {file.name for file in files}
        for problem, names, end in (("lacks", listed - found, "lists"), ("holds", found - listed, "does not list")):
            if names:
                raise ValueError(
                    f"{flag} {folder} {problem} {len(names)} images, {min(names)} first, which its manifest of {len(listed)} {end}"
                )
    elif not files:
        files = _images(folder.rglob("*"))
    _check_count(len(files), f"{flag} {folder}")
    return files


def _images(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if path.suffix.lower() in SUFFIXES and path.name not in PLOTS)


def _check_count(count: int, name: str) -> None:
    if count < LEAST_IMAGES:
        raise ValueError(f"{name} holds {count} images, at least {LEAST_IMAGES} are needed")


def real_images(path: Path, flag: str) -> Sequence[Path] | Sequence[np.ndarray]:
    """A folder's files, or the pixels (H, W, 3) inside a reference batch of the ADM suite (.npz with arr_0)."""
    if path.is_dir() or path.suffix != ".npz":
        return image_files(path, flag)
    try:
        with np.load(path, allow_pickle=False) as file:
            if "arr_0" not in file.files:
                raise ValueError(f"it has no arr_0, it has {', '.join(file.files)}")
            pixels = file["arr_0"]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{flag} {path} is no batch of images: {error}") from None
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
        raise ValueError(f"{flag} {path} has arr_0 of {pixels.dtype} {pixels.shape}, uint8 of shape (N, H, W, 3) is needed")
    _check_count(len(pixels), f"{flag} {path}")
    return list(pixels)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        manifest["settings"], manifest["environment"], [image["file"] for image in manifest["images"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no manifest of car_spec") from None
    return manifest


def label_policy(manifest: dict[str, Any] | None) -> str:
    """How labels or prompts are spread over the images."""
    if manifest is None:
        return "unknown, the folder has no manifest"
    key, what = ("prompt", "prompts") if any("prompt" in image for image in manifest["images"]) else ("label", "classes")
    counts = Counter(image.get(key) for image in manifest["images"]).values()
    each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{len(counts)} {what}, {each} images each"


def check_images_per_class(folder: Path, manifest: dict[str, Any] | None, each: int) -> None:
    """Every class of the folder must have `each` images."""
    if manifest is None:
        raise ValueError(f"--images-per-class {each}: {folder} has no {MANIFEST}, so its labels are unknown")
    counts = Counter(image.get("label") for image in manifest["images"])
    for label, count in sorted(counts.items(), key=str):
        if count != each:
            raise ValueError(f"--images-per-class {each}: {folder} has {count} images of class {label}")


def pairing(folder: Path, files: Sequence[Path], manifest: dict[str, Any] | None) -> tuple:
    """Folders with the same value hold the same images but for sampler and seed: names, labels and prompts agree one by one."""
    if manifest is None:
        return tuple(str(file.relative_to(folder)) for file in files)
    return tuple(sorted((image["file"], image.get("label"), image.get("prompt")) for image in manifest["images"]))
