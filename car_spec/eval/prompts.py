"""The prompt of every image of a folder: from its manifest, or for a foreign folder from a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from car_spec.prompts import read_prompt_file
from car_spec.runs import MANIFEST


def prompts_of(folder: Path, files: Sequence[Path], manifest: dict[str, Any] | None, file: Path | None) -> list[str]:
    """One prompt for each of `files`, in their order. file: `--prompts`, for folders whose manifest has none."""
    listed = {image["file"]: image.get("prompt") for image in manifest["images"]} if manifest is not None else {}
    known = [listed.get(image.name) for image in files]
    if all(known):
        if file is not None:
            raise ValueError(f"--prompts {file}: {folder} has prompts in its {MANIFEST} already")
        return [str(prompt) for prompt in known]
    if file is None:
        what = "the manifest lists none" if manifest is not None else f"it has no {MANIFEST}"
        raise ValueError(f"--metrics clipscore needs the prompts of {folder}: {what}; give --prompts FILE, or leave clipscore out")
    return _match(read_prompt_file(file), [image.relative_to(folder) for image in files], file, folder)


def _match(prompts: list[str] | dict[str, str], names: Sequence[Path], file: Path, folder: Path) -> list[str]:
    if isinstance(prompts, list):
        if len(prompts) != len(names):
            raise ValueError(f"--prompts {file} has {len(prompts)} prompts, {folder} has {len(names)} images")
        return prompts
    found = [prompts.get(str(name), prompts.get(name.name, prompts.get(name.stem))) for name in names]
    for name, prompt in zip(names, found):
        if prompt is None:
            raise ValueError(f"--prompts {file} has no prompt for {name} of {folder}")
    return [prompt for prompt in found if prompt is not None]
