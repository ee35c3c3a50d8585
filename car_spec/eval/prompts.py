"""The prompt of every image of a folder: from its manifest, or for a foreign folder from a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def read_prompt_file(path: Path) -> list[str] | dict[str, str]:
    """A line a prompt; .jsonl: `prompt` of each line; .json: a list of prompts, or names of images with a prompt each."""
    if not path.is_file():
        raise ValueError(f"--prompts {path}: there is no such file")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        if path.suffix == ".jsonl":
            return [_prompt(json.loads(line)) for line in lines]
        if path.suffix == ".json":
            content = json.loads("\n".join(lines))
            return {name: _prompt(value) for name, value in content.items()} if isinstance(content, dict) else [_prompt(v) for v in content]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--prompts {path} is no list of prompts: {error!r}") from None
    return lines


def _prompt(value: Any) -> str:
    prompt = value if isinstance(value, str) else value["prompt"]
    if not isinstance(prompt, str):
        raise TypeError(f"{prompt!r} is no text")
    return prompt


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
