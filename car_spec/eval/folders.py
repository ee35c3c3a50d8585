"""The images of a folder, checked against its manifest before anything is scored."""

import json
from pathlib import Path
from typing import Any

from car_spec.runs import GRID, MANIFEST

PLOTS = (GRID, "speculation.png")  # pictures that a run writes beside its images


def image_files(folder: Path, flag: str) -> list[Path]:
    """All images of a folder, by name. One with a manifest must hold exactly the images the manifest lists."""
    if not folder.is_dir():
        raise ValueError(f"{flag} {folder} is no folder")
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in (".png", ".jpg", ".jpeg") and f.name not in PLOTS)
    manifest = read_manifest(folder)
    if manifest is not None:
        listed, found = {image["file"] for image in manifest["images"]}, {file.name for file in files}
        for problem, names in (("lacks", listed - found), ("holds", found - listed)):
            if names:
                end = "which its manifest lists" if problem == "lacks" else "which its manifest does not list"
                raise ValueError(f"{flag} {folder} {problem} {len(names)} of {len(listed)} images, {min(names)} first, {end}")
    if len(files) < 2:
        raise ValueError(f"{flag} {folder} holds {len(files)} images, at least 2 are needed")
    return files


def read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        manifest["images"], manifest["settings"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no manifest of car_spec") from None
    return manifest


def label_policy(manifest: dict[str, Any] | None) -> str:
    """How labels are spread over the images."""
    if manifest is None:
        return "unknown, the folder has no manifest"
    labels = [image.get("label") for image in manifest["images"]]
    counts = [labels.count(label) for label in set(labels)]
    each = f"{counts[0]}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{len(counts)} classes, {each} images each"
