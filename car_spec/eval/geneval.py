"""GenEval's folder layout: a numbered folder for each of its prompts, which its detector reads (djghosh13/geneval)."""

import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path

from car_spec.eval.folders import image_files, read_manifest

SAMPLES = 4  # images a prompt of the published protocol


def export_geneval(folder: Path, metadata: Path, out: Path) -> tuple[int, int]:
    """Copy a run's images to `out`/00000/samples/0000.png, ... beside metadata.jsonl, the prompt's line of the metadata file.

    A prompt's images keep their order; prompts that stand in several lines share them. -> prompts, images a prompt. Raises ValueError
    before anything is written.
    """
    files, manifest = image_files(folder, "FOLDER"), read_manifest(folder)
    if manifest is None or not all(image.get("prompt") for image in manifest["images"]):
        raise ValueError(f"FOLDER {folder} has no manifest with the prompts of its images, so they cannot be laid out")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty; give another folder")
    if any(file.suffix != ".png" for file in files):
        raise ValueError(f"FOLDER {folder} holds files other than PNG, GenEval reads PNG")
    lines, prompts = zip(*_metadata_lines(metadata))
    images: dict[str, list[str]] = defaultdict(list)
    for image in manifest["images"]:
        images[image["prompt"]].append(image["file"])
    unknown = sorted(set(images) - set(prompts))
    if unknown:
        raise ValueError(f"FOLDER {folder} has images of {unknown[0]!r}, which --metadata {metadata} does not list")
    times, seen = Counter(prompts), Counter[str]()
    shares = []
    for prompt in prompts:
        shares.append(images[prompt][seen[prompt] :: times[prompt]])
        seen[prompt] += 1
    counts = [len(share) for share in shares]
    if min(counts) != max(counts) or counts[0] == 0:
        fewest = prompts[counts.index(min(counts))]
        raise ValueError(f"FOLDER {folder} has {min(counts)} images of {fewest!r} and {max(counts)} of others, each prompt needs as many")
    for i, (line, share) in enumerate(zip(lines, shares)):
        samples = out / f"{i:05d}" / "samples"
        samples.mkdir(parents=True)
        (out / f"{i:05d}" / "metadata.jsonl").write_text(line + "\n", encoding="utf-8")
        for j, name in enumerate(share):
            shutil.copyfile(folder / name, samples / f"{j:04d}.png")
    return len(prompts), counts[0]


def _metadata_lines(path: Path) -> list[tuple[str, str]]:
    """The lines of the metadata file, each with its prompt."""
    if not path.is_file():
        raise ValueError(f"--metadata {path}: there is no such file; GenEval's evaluation_metadata.jsonl is expected")
    lines = []
    for i, line in enumerate(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()):
        try:
            lines.append((line, json.loads(line)["prompt"]))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--metadata {path}: line {i + 1} is no JSON object with a prompt") from None
    if not lines:
        raise ValueError(f"--metadata {path} is empty")
    return lines
