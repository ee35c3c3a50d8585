"""What has to be known of a folder beside its scores, and whether it was made as a recipe says."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import car_spec
from car_spec.eval.folders import check_images_per_class, label_policy

RUN_REPORT = ("images", "sequential calls a batch", "head calls a batch", "tokens a round", "acceptance by AR steps ahead", "fallbacks")


def check_folder(folder: Path, count: int, manifest: dict[str, Any] | None, num_images: int | None, images_per_class: int | None) -> None:
    """Raise ValueError where a folder does not hold what the protocol asks for."""
    if num_images is not None and count != num_images:
        raise ValueError(f"--num-images {num_images}: {folder} holds {count}")
    if images_per_class is not None:
        check_images_per_class(folder, manifest, images_per_class)


def deviations(manifest: dict[str, Any] | None, recipe: dict[str, Any]) -> list[str]:
    """Settings in which a run differs from a recipe, each as a phrase."""
    if manifest is None:
        return ["no manifest, so its settings are unknown"]
    made = manifest["environment"] | manifest["settings"]
    return [
        f"{name} {made[name]} where the recipe has {value}"
        for name, value in recipe.items()
        if name in made and name not in ("classes", "model", "device", "batch_size") and made[name] != value
    ]


def about_folder(count: int, manifest: dict[str, Any] | None) -> dict[str, Any]:
    """Number, labels, law, settings and what sampling took."""
    if manifest is None:
        return {"images": count, "labels": label_policy(None), "law of the images": "unknown", "settings": "unknown"}
    return {
        "images": count,
        "labels": label_policy(manifest),
        "law of the images": manifest["environment"].get("law of the images", "unknown"),
        "settings": {name: value for name, value in manifest["settings"].items() if name not in ("classes", "prompts")},
        "runs": [{name: run[name] for name in RUN_REPORT if name in run} for run in manifest.get("runs", [])],
        "made with": {name: manifest["environment"][name] for name in ("car_spec", "torch") if name in manifest["environment"]},
    }


def versions(*packages: str) -> dict[str, str]:
    """Of what the scores come from."""
    return {"car_spec": car_spec.__version__} | {name: version(name) for name in ("torch", *packages)}
