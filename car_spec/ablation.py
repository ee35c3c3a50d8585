"""`car-spec ablate`: what alignment, draft length, pre-filling, guidance and temperature do to CSpD, and what it is worth beside others."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from car_spec import flags
from car_spec.bench import QUALITY_BATCH, Contender, cspd, fewer_ar_steps, generators, measure_quality, measure_speed, print_table
from car_spec.cspd import VARIANTS
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


def add_parser(commands: Any) -> None:
    ablate = commands.add_parser(
        "ablate",
        parents=[flags.model_flags("demo")],
        help="what alignment, draft length, pre-filling, guidance and temperature do to CSpD",
        description="Run CSpD with one setting changed at a time on the same images, then beside other samplers at several batch sizes. "
        "Needs the extra `bench` (rich, matplotlib).",
    )
    ablate.add_argument("--draft", default="demo-draft", help="the draft model (default: %(default)s)")
    ablate.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="one or several (default: both)")
    ablate.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="which to make (default: all)")
    ablate.add_argument("--images", type=int, default=16, help="images of each setting, one batch (default: %(default)s)")
    ablate.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 8, 64], help="of the comparison with other samplers (default: 1 8 64)"
    )
    ablate.add_argument("--repeats", type=int, default=3, help="timed batches of each sampler in the comparison (default: %(default)s)")
    ablate.add_argument("--quality-images", type=int, default=256, help="of each sampler in the comparison; 0: none (default: %(default)s)")
    flags.add_problem_flags(ablate, "but in the table about it ")
    ablate.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    flags.add_device_flags(ablate)
    ablate.add_argument(
        "--out", type=Path, default=Path("outputs/ablate"), help="folder of the figures and the plot (default: %(default)s)"
    )
    ablate.set_defaults(run=run_ablate)


def run_ablate(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    flags.require("ablate", "rich", "matplotlib")
    from car_spec.plots import plot_alignment, plot_batches, plot_pareto

    for name, least in (("images", 1), ("repeats", 1), ("batch_sizes", 1), ("quality_images", 0)):
        flags.check_at_least(name, getattr(args, name), least)
    flags.check_quality_images("--quality-images", args.quality_images)
    pipeline = flags.load(args, flags.choose_device(args.device), dtype=flags.DTYPES[args.dtype])
    base = flags.given_flags(args, *flags.PROBLEM)
    whole = pipeline.settings(sampler="cspd", **base)
    runs = [run for variant in args.variant for run in settings_of(base, whole["num_iter"], variant) if run[0] in args.tables]
    sizes = sorted(set(args.batch_sizes)) if "comparison" in args.tables else []
    comparison = {size: compared(base, whole["num_iter"], args.variant) for size in sizes}
    for settings in [run[-1] for run in runs] + [run.settings for others in comparison.values() for run in others]:
        pipeline.settings(**({"sampler": "cspd"} | settings))  # refuses what the model cannot do before the long work
    title = (
        f"CSpD (approximate), {pipeline.preset.name} with {pipeline.draft.preset.name if pipeline.draft else ''}: "
        f"{whole['num_iter']} AR steps, {whole['num_inference_steps']} denoising steps, guidance {whole['guidance_scale']:g}, "
        f"{args.images} images a setting, {args.dtype}, {torch.get_num_threads()} threads"
    )
    contenders = len(comparison[sizes[-1]]) if sizes else 0
    quality_batches = -(-args.quality_images // QUALITY_BATCH)
    total = len(runs) + contenders * len(sizes) * (args.repeats + 1) + (contenders + 1 if sizes else 0) * quality_batches
    with tqdm(total=total, desc="ablate", file=sys.stderr) as bar:
        print(title)
        measured = measure(pipeline, runs, args.images, args.seed, bar.update)
        print_tables(measured)
        args.out.mkdir(parents=True, exist_ok=True)
        done: dict[int, list[Contender]] = {}
        for size, others in comparison.items():  # shown and written as they come: the next size may take an hour
            measure_speed(pipeline, others, size, args.repeats, args.seed, bar.update)
            print_table(others, f"comparison, batch {size}")
            done[size] = others
            write_json(measured, done, title, args.out / "ablation.json")
        if sizes and args.quality_images:
            measure_quality(pipeline, comparison[sizes[-1]], args.quality_images, QUALITY_BATCH, args.seed + 1, bar.update)
            print_table(comparison[sizes[-1]], f"comparison with quality, batch {sizes[-1]}")
    write_json(measured, comparison, title, args.out / "ablation.json")
    print(f"figures: {args.out / 'ablation.json'}")
    plots: list[tuple[str, Callable[[Path], None]]] = []
    if "alignment" in args.tables:
        plots.append(("alignment.png", partial(plot_alignment, measured)))
    if sizes:
        plots.append(("batches.png", partial(plot_batches, comparison)))
        if args.quality_images:
            plots.append(("pareto.png", partial(plot_pareto, comparison[sizes[-1]])))
    for name, draw in plots:
        draw(args.out / name)
        print(f"plot: {args.out / name}")
