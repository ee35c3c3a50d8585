"""A folder of generated images that survives being killed: which images it must hold, what it holds, how it is written."""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from car_spec.models.loading import INDEX_NAMES, shards_of
from car_spec.parallel import Ranks
from car_spec.pipeline import MARPipeline, NonFiniteImageError, image_seed
from car_spec.trace import Trace

if TYPE_CHECKING:
    from PIL.Image import Image

MANIFEST = "manifest.json"
GRID = "grid.png"
GRID_IMAGES = 64  # at most; a picture of 50,000 would not fit into memory


class RunError(ValueError):
    """A run that cannot start or go on, in one sentence."""


@dataclass(frozen=True)
class ImageSpec:
    """One image of a run. Label and seed are functions of the id alone, so it can be made again by itself."""

    id: int
    label: int | str  # the class, or the prompt
    seed: int

    @property
    def file(self) -> str:
        return f"{self.id:06d}.png"


def image_spec(image_id: int, classes: Sequence[int | str], seed: int) -> ImageSpec:
    """Labels go round the classes (or prompts), so that N images hold each N / len(classes) times, the first ones once more."""
    return ImageSpec(image_id, classes[image_id % len(classes)], image_seed(seed, image_id))


def sha256_of(path: Path) -> str:
    """Of a file, of an index and the files that it lists, or of all files of a folder in the order of their names."""
    digest, files = hashlib.sha256(), [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
    elif path.name in INDEX_NAMES:
        files += [path.parent / name for name in shards_of(path)]
    for file in files:
        with open(file, "rb") as content:
            while chunk := content.read(2**24):
                digest.update(chunk)
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Under a temporary name first: whoever finds the file finds all of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def png_bytes(image: "Image") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


class RunFolder:
    """An output folder with its manifest. `settings` holds everything that can change a pixel, and nothing else."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.settings = path, json.loads(json.dumps(settings))  # as it will be read back

    def open(self) -> None:
        """Create the folder, or check that what it holds was made with the same settings."""
        manifest = self.path / MANIFEST
        if manifest.exists():
            try:
                held = json.loads(manifest.read_text())["settings"]
            except (ValueError, KeyError, TypeError):
                raise RunError(f"--out {self.path}: its {MANIFEST} is no manifest of car_spec") from None
            for name in [*self.settings, *held]:
                if held.get(name) != self.settings.get(name):
                    raise RunError(
                        f"--out {self.path} was made with {name} {_short(held.get(name))}, this run has {_short(self.settings.get(name))}; "
                        "give another folder"
                    )
            return
        if self.path.is_dir() and any(self.path.glob("*.png")):
            raise RunError(f"--out {self.path} holds PNG files but no {MANIFEST}; give another folder")
        self.path.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def chosen_before(path: Path, names: Sequence[str], settings: dict[str, Any]) -> dict[str, Any] | None:
        """Settings with the values that an earlier run of the folder chose for `names`; None where there is none to follow."""
        try:
            held = json.loads((path / MANIFEST).read_text())["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if held.get("sampler") == "sequential":
            return {name: value for name, value in settings.items() if name in held} | {"sampler": "sequential"}
        return settings | {name: held[name] for name in names if name in held}

    def missing(self, specs: Sequence[ImageSpec]) -> list[ImageSpec]:
        return [spec for spec in specs if not (self.path / spec.file).exists()]

    def write_manifest(self, specs: Sequence[ImageSpec], names: Sequence[str] | None, environment: dict[str, Any]) -> None:
        """List the images of this run next to those that earlier runs of the folder left."""
        manifest = self.path / MANIFEST
        earlier = json.loads(manifest.read_text()) if manifest.exists() else {}
        images = {image["id"]: image for image in earlier.get("images", [])}
        for spec in specs:
            if isinstance(spec.label, str):
                shown: dict[str, Any] = {"prompt": spec.label}
            else:
                shown = {"label": spec.label} | ({"class": names[spec.label]} if names else {})
            images[spec.id] = {"id": spec.id, "file": spec.file, **shown, "seed": spec.seed}
        content = {"settings": self.settings, "environment": environment, "images": [images[i] for i in sorted(images)]}
        self._write_manifest(content | {"runs": earlier.get("runs", [])})

    def add_report(self, report: dict[str, Any]) -> None:
        """Keep in the manifest what a finished run took."""
        content = json.loads((self.path / MANIFEST).read_text())
        content["runs"].append(report)
        self._write_manifest(content)

    def _write_manifest(self, content: dict[str, Any]) -> None:
        write_atomically(self.path / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())

    def write_image(self, spec: ImageSpec, image: "Image") -> None:
        write_atomically(self.path / spec.file, png_bytes(image))

    def write_grid(self, specs: Sequence[ImageSpec], columns: int) -> Path:
        """The first images of a run in one picture."""
        from PIL import Image

        grid = image_grid([Image.open(self.path / spec.file) for spec in specs[:GRID_IMAGES]], columns)
        write_atomically(self.path / GRID, png_bytes(grid))
        return self.path / GRID


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def image_grid(images: Sequence["Image"], columns: int, gap: int = 2) -> "Image":
    """One picture of many, in rows of `columns`; small ones are magnified to at least 64 pixels, pixel by pixel."""
    from PIL import Image

    width, height = images[0].size
    factor = max(1, -(-64 // max(width, height)))
    width, height = width * factor + gap, height * factor + gap
    rows = -(-len(images) // columns)
    canvas = Image.new("RGB", (columns * width - gap, rows * height - gap), "white")
    for i, image in enumerate(images):
        tile = image.resize((width - gap, height - gap), Image.Resampling.NEAREST) if factor > 1 else image
        canvas.paste(tile, (i % columns * width, i // columns * height))
    return canvas


@dataclass(frozen=True)
class Part:
    """What one process does of a run: the batches `index`, `index` + `count`, ..., together with the ranks of its group, of which rank 0
    writes the files.
    """

    index: int = 0
    count: int = 1
    ranks: Ranks = field(default_factory=Ranks)


def batches(specs: Sequence[ImageSpec], batch_size: int) -> Iterator[list[ImageSpec]]:
    for start in range(0, len(specs), batch_size):
        yield list(specs[start : start + batch_size])


def generate_images(
    pipeline: MARPipeline,
    folder: RunFolder,
    specs: Sequence[ImageSpec],
    batch_size: int,
    settings: dict[str, Any],
    on_images: Callable[[int], object] = lambda count: None,
    part: Part | None = None,
) -> tuple[int, list[Trace]]:
    """Make the images that the folder lacks, or this process's part of them -> how many were made, and the traces of their batches.

    A batch is always made of the same images: one that misses a few is made whole again and only the missing ones are written,
    because rounding depends on the size of a batch and a resumed run shall give the same bytes. For the same reason processes take
    whole batches in turn.
    """
    part = part or Part()
    made, traces = 0, []
    for batch in list(batches(specs, batch_size))[part.index :: part.count]:
        part.ranks.check()
        missing = part.ranks.once(lambda batch=batch: folder.missing(batch))  # type: ignore[misc]
        if not missing:
            on_images(len(batch))
            continue
        generators = [torch.Generator().manual_seed(spec.seed) for spec in batch]
        try:
            output = pipeline([spec.label for spec in batch], generator=generators, **settings)
        except NonFiniteImageError as error:
            bad = [batch[i].id for i in error.indices]
            raise RunError(
                f"image {', '.join(map(str, bad))} is not finite, so nothing of its batch was written; "
                f"{made} images of this run are kept; try --dtype float32 or bfloat16"
            ) from error
        for spec, image in zip(batch, output.images):
            if spec in missing and part.ranks.rank == 0:
                folder.write_image(spec, image)
        if part.ranks.rank == 0:
            made += len(missing)
            traces.append(output.trace)
        on_images(len(batch))
    return made, traces
