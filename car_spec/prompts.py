"""Prompts from a file."""

import json
from pathlib import Path
from typing import Any


def read_prompt_file(path: Path) -> list[str] | dict[str, str]:
    """The prompts of a file in its order; by name, where it names images.

    .json: a list of texts, or of entries with a `prompt` or `caption`; names of images with such an entry each; or COCO's captions
    (`annotations`, each of which counts). .jsonl: such an entry a line. Everything else: a line a prompt. Blank lines are passed over.
    """
    if not path.is_file():
        raise ValueError(f"--prompts {path}: there is no such file")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            prompts = _prompts_of(json.loads(text))
        else:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            prompts = [_prompt_of(json.loads(line)) for line in lines] if path.suffix == ".jsonl" else lines
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--prompts {path} is no list of prompts: {str(error).splitlines()[0]}") from None
    if not prompts:
        raise ValueError(f"--prompts {path} holds no prompt")
    return prompts


def _prompts_of(content: Any) -> list[str] | dict[str, str]:
    if isinstance(content, dict) and "annotations" not in content:
        return {name: _prompt_of(entry) for name, entry in content.items()}
    entries = content["annotations"] if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise TypeError(f"it holds a {type(entries).__name__}")
    return [_prompt_of(entry) for entry in entries]


def _prompt_of(entry: Any) -> str:
    if isinstance(entry, dict):
        known = [entry[name] for name in ("prompt", "caption") if name in entry]
        if not known:
            raise TypeError(f"{json.dumps(entry)[:60]} has neither prompt nor caption")
        entry = known[0]
    if not isinstance(entry, str):
        raise TypeError(f"{json.dumps(entry)[:60]} is no text")
    return entry.strip()
