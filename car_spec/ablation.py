"""`car-spec ablate`: what alignment, draft length, pre-filling, guidance and temperature do to CSpD."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from car_spec.bench import generators, labels
from car_spec.pipeline import MARPipeline, synchronise

DRAFT_LENGTHS = (4, 8, 16, 32)
PREFILLS = (0.0, 0.05, 0.15)
GUIDANCE_SCALES = (1.0, 2.0, 3.0)
TEMPERATURES = (0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Measurement:
    """One setting of CSpD on the same images as the others."""

    table: str
    setting: str
    accepted: float  # share of the judged tokens that were kept
    distance: float  # mean squared distance of a drafted token to the target's token of the same noise
    calls: float  # sequential calls a batch, of both networks
    target_calls: float
    seconds: float  # an image


def settings_of(base: dict[str, Any], num_iter: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(table, setting, arguments of the pipeline): one thing changed at a time."""
    lengths = [length for length in DRAFT_LENGTHS if length <= num_iter]
    for aligned in (True, False):
        for length in lengths:
            name = f"draft length {length}, {'shared' if aligned else 'independent'} noise"
            yield "alignment", name, base | {"draft_length": length, "aligned": aligned}
    for prefill in PREFILLS:
        yield "pre-filling", f"pre-fill {prefill:.0%}", base | {"prefill": prefill}
    for scale in GUIDANCE_SCALES:
        yield "guidance", f"guidance {scale:g}", base | {"guidance_scale": scale}
    for temperature in TEMPERATURES:
        yield "temperature", f"temperature {temperature:g}", base | {"temperature": temperature}


def measure(
    pipeline: MARPipeline, runs: Sequence[tuple[str, str, dict[str, Any]]], images: int, seed: int, on_run: Callable[[], object]
) -> list[Measurement]:
    out = []
    for table, setting, arguments in runs:
        start = time.perf_counter()
        trace = pipeline(
            labels(pipeline, 0, images), generator=generators(seed, 0, images), sampler="cspd", output_type="latent", **arguments
        ).trace
        synchronise(pipeline.device)
        seconds = (time.perf_counter() - start) / images
        kept, seen = (sum(counts[i] for counts in trace.accepted_by_lag.values()) for i in (0, 1))
        distance = sum(trace.token_distances) / max(1, len(trace.token_distances))
        target_calls = trace.backbone_calls + trace.chain.calls
        out.append(Measurement(table, setting, kept / max(1, seen), distance, trace.sequential_calls, target_calls, seconds))
        on_run()
    return out


def print_tables(measurements: Sequence[Measurement], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    console.print(title)
    for name in dict.fromkeys(m.table for m in measurements):
        table = Table(title=name, title_justify="left")
        for i, column in enumerate(("setting", "accepted", "distance", "calls", "of the target", "s/image")):
            table.add_column(column, justify="left" if i == 0 else "right")
        for m in measurements:
            if m.table == name:
                numbers = (f"{m.accepted:.1%}", f"{m.distance:.3f}", f"{m.calls:.0f}", f"{m.target_calls:.0f}", f"{m.seconds:.2f}")
                table.add_row(m.setting, *numbers)
        console.print(table)


def write_json(measurements: Sequence[Measurement], title: str, path: Path) -> None:
    path.write_text(json.dumps({"title": title, "measurements": [asdict(m) for m in measurements]}, indent=1) + "\n")
