"""`car-spec ablate`: what alignment, draft length, pre-filling, guidance and temperature do to CSpD, and what it is worth beside others."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from car_spec.bench import Contender, cspd, fewer_ar_steps, generators
from car_spec.pipeline import MARPipeline, synchronise

TABLES = ("alignment", "pre-filling", "guidance", "temperature", "comparison")
DRAFT_LENGTHS = (4, 8, 16, 32)
PREFILLS = (0.0, 0.05, 0.15)
GUIDANCE_SCALES = (1.0, 2.0, 3.0)
TEMPERATURES = (0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Measurement:
    """One setting of CSpD on the same images as the others."""

    table: str
    variant: str
    setting: str
    accepted: float  # share of the judged tokens that were kept
    distance: float  # mean squared distance of a drafted token to the target's token of the same noise
    calls: float  # sequential calls a batch, of both networks
    target_calls: float
    seconds: float  # an image


def settings_of(base: dict[str, Any], num_iter: int, variant: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(table, setting, arguments of the pipeline): one thing changed at a time."""
    base = base | {"variant": variant}
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


def compared(base: dict[str, Any], num_iter: int, variants: Sequence[str]) -> list[Contender]:
    """CSpD beside sequential sampling, plain fewer AR steps, and the lossless sampler."""
    base = base | {"sampler": "sequential"}
    lossless = Contender("lossless, block", base | {"sampler": "lossless"})
    return [Contender("sequential", base), *fewer_ar_steps(base, num_iter), lossless, *(cspd(base, variant) for variant in variants)]


def measure(
    pipeline: MARPipeline, runs: Sequence[tuple[str, str, dict[str, Any]]], images: int, seed: int, on_run: Callable[[], object]
) -> list[Measurement]:
    out = []
    for table, setting, arguments in runs:
        start = time.perf_counter()
        trace = pipeline(
            pipeline.examples(0, images), generator=generators(seed, 0, images), sampler="cspd", output_type="latent", **arguments
        ).trace
        synchronise(pipeline.device)
        seconds = (time.perf_counter() - start) / images
        kept, seen = (sum(counts[i] for counts in trace.accepted_by_lag.values()) for i in (0, 1))
        distance = sum(trace.token_distances) / max(1, len(trace.token_distances))
        target_calls = trace.backbone_calls + trace.chain.calls
        numbers = kept / max(1, seen), distance, trace.sequential_calls, target_calls, seconds
        out.append(Measurement(table, arguments["variant"], setting, *numbers))
        on_run()
    return out


def print_tables(measurements: Sequence[Measurement]) -> None:
    from rich.console import Console
    from rich.table import Table

    for variant, name in dict.fromkeys((m.variant, m.table) for m in measurements):
        table = Table(title=f"{name}, {variant}", title_justify="left")
        for i, column in enumerate(("setting", "accepted", "distance", "calls", "of the target", "s/image")):
            table.add_column(column, justify="left" if i == 0 else "right")
        for m in measurements:
            if (m.variant, m.table) == (variant, name):
                numbers = (f"{m.accepted:.1%}", f"{m.distance:.3f}", f"{m.calls:.0f}", f"{m.target_calls:.0f}", f"{m.seconds:.2f}")
                table.add_row(m.setting, *numbers)
        Console(width=120).print(table)


def write_json(measurements: Sequence[Measurement], comparison: dict[int, list[Contender]], title: str, path: Path) -> None:
    """comparison: contenders by batch size."""
    content = {
        "title": title,
        "measurements": [asdict(m) for m in measurements],
        "comparison": {size: [asdict(run) | {"median_seconds": run.median_seconds} for run in runs] for size, runs in comparison.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
