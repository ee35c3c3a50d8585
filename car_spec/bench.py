"""`car-spec bench`: the samplers side by side in one process, in turns, with calls, rows, wall-clock and quality apart."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import car_spec
from car_spec import flags
from car_spec.cspd import VARIANTS
from car_spec.engine import LosslessSettings
from car_spec.eval.distances import energy_test, frechet_distance, principal_components
from car_spec.execution import Execution
from car_spec.pipeline import MARPipeline, image_seed, synchronise
from car_spec.trace import summary
from car_spec.xar_pipeline import XARPipeline

CELL_CONTENDERS: dict[str, dict[str, Any]] = {
    "lossless, token-wise": {"token_wise": True},
    "lossless, frozen": {"drafter": "frozen"},
    "lossless, block": {},
}
COMPONENTS = 32  # of the latents, for the quality columns
QUALITY_BATCH = 64  # images at a time for the quality columns


@dataclass
class Contender:
    """One sampler with its settings, and what was measured of it."""

    name: str
    settings: dict[str, Any]
    seconds: list[float] = field(default_factory=list)  # an image, one entry a repeat
    counts: list[dict[str, float]] = field(default_factory=list)
    frechet: float | None = None  # to the reference set of the sequential sampler
    p_value: float | None = None  # energy test against it

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    def median_count(self, name: str) -> float:
        return statistics.median(count[name] for count in self.counts)


def contenders(pipeline: MARPipeline, base: dict[str, Any], lossless: dict[str, Any], batch_size: int) -> list[Contender]:
    """Sequential first; its cheaper versions, which change the law; the lossless ones, which do not; CSpD where there is a draft model."""
    base = base | {"sampler": "sequential"}
    whole = pipeline.settings(**base)
    num_steps = whole["num_inference_steps"]
    out = [Contender("sequential", base)]
    cells = isinstance(pipeline, XARPipeline)  # an xAR has one number of AR steps
    if not cells:
        out += fewer_ar_steps(base, whole["num_iter"])
    for fewer in (50, 25):
        if fewer < num_steps:
            out.append(Contender(f"sequential, {fewer} denoising steps", base | {"num_inference_steps": fewer}))
    if cells:
        out += [Contender(name, base | lossless | {"sampler": "lossless"} | own) for name, own in CELL_CONTENDERS.items()]
        if pipeline.draft is not None:
            out.append(Contender("lossless, draft model", base | lossless | {"sampler": "lossless", "drafter": "model"}))
    else:
        out += _token_contenders(pipeline, base, lossless, batch_size)
    if pipeline.draft is not None:
        out += [cspd(base, variant) for variant in VARIANTS]
    for run in out:
        pipeline.settings(**run.settings)  # refuses a bad value before the long work
    return out


def _token_contenders(pipeline: MARPipeline, base: dict[str, Any], lossless: dict[str, Any], batch_size: int) -> list[Contender]:
    fixed = base | {name: getattr(LosslessSettings, name) for name in ("lookahead", "window")} | lossless | {"sampler": "lossless"}
    out = [Contender("lossless, token-wise", fixed | {"token_wise": True})]
    out.append(Contender("lossless, block", fixed))
    tuned = pipeline.tune(batch_size, pipeline.settings(**(base | {"sampler": "lossless", "lookahead": "auto"})))
    choice = "sequential" if tuned["sampler"] == "sequential" else f"lookahead {tuned['lookahead']}, window {tuned['window']}"
    out.append(Contender(f"lossless, auto: {choice}", tuned))
    return out


def fewer_ar_steps(base: dict[str, Any], num_iter: int) -> list[Contender]:
    """The sequential sampler with a half and a quarter of the AR steps: another law, with no draft model."""
    counts = [num_iter // divisor for divisor in (2, 4) if num_iter >= divisor]
    return [Contender(f"sequential, {count} AR steps", base | {"num_iter": count}) for count in counts]


def cspd(base: dict[str, Any], variant: str) -> Contender:
    return Contender(f"CSpD (approximate), {variant}", base | {"sampler": "cspd", "variant": variant})


def generators(seed: int, first: int, count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(image_seed(seed, i)) for i in range(first, first + count)]


def measure_speed(
    pipeline: MARPipeline,
    runs: Sequence[Contender],
    batch_size: int,
    repeats: int,
    seed: int,
    on_run: Callable[[], object],
    warm_up: dict[str, Any] | None = None,
) -> None:
    """Alternate the contenders, one batch each a repeat, after one warm-up of each that does not count; warm_up: its own settings."""
    for repeat in range(-1, repeats):
        for run in runs:
            first = max(repeat, 0) * batch_size
            labels, settings = pipeline.examples(first, batch_size), run.settings | (warm_up or {} if repeat < 0 else {})
            start = time.perf_counter()
            output = pipeline(labels, generator=generators(seed, first, batch_size), output_type="pt", **settings)
            synchronise(pipeline.device)
            if repeat >= 0:
                run.seconds.append((time.perf_counter() - start) / batch_size)
                run.counts.append(summary([output.trace]))
            on_run()


def measure_quality(
    pipeline: MARPipeline, runs: Sequence[Contender], images: int, batch_size: int, seed: int, on_run: Callable[[], object]
) -> None:
    """Frechet distance and energy test of each contender's latents against an own set of sequential ones, on principal components.

    The sequential contender is compared too, with other seeds: its figures are what no difference looks like.
    """

    def sample(settings: dict[str, Any], first: int) -> torch.Tensor:
        parts = []
        for start in range(0, images, batch_size):
            size = min(batch_size, images - start)
            parts.append(
                pipeline(
                    pipeline.examples(start, size),
                    generator=generators(seed, first + start, size),
                    output_type="latent",
                    **settings,
                ).images.flatten(1)
            )
            on_run()
        return torch.cat(parts).cpu()

    reference = sample(runs[0].settings, 0)
    mean, directions = principal_components(reference, min(COMPONENTS, images - 1))
    project = lambda x: (x.double() - mean) @ directions
    for i, run in enumerate(runs):
        latents = sample(run.settings, (i + 1) * images)
        run.frechet = frechet_distance(project(latents), project(reference))
        run.p_value = energy_test(project(latents), project(reference))


HEADER = ("sampler", "calls", "backbone", "head", "rows", "s/image", "faster", "Frechet", "p")


def table_rows(runs: Sequence[Contender]) -> list[tuple[str, ...]]:
    base = runs[0]
    rows: list[tuple[str, ...]] = []
    for run in runs:
        calls, head_rows = run.median_count("sequential calls a batch"), run.median_count("head rows an image")
        rows.append(
            (
                run.name,
                f"{calls:.0f} ({base.median_count('sequential calls a batch') / calls:.1f}x)",
                f"{run.median_count('backbone calls a batch'):.0f}",
                f"{run.median_count('head calls a batch'):.0f}",
                f"{head_rows / base.median_count('head rows an image'):.2f}x",
                f"{run.median_seconds:.3f}",
                f"{base.median_seconds / run.median_seconds:.2f}x",
                "" if run.frechet is None else f"{run.frechet:.3f}",
                "" if run.p_value is None else f"{run.p_value:.3f}",
            )
        )
    return rows


def print_table(runs: Sequence[Contender], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(HEADER):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i > 0)
    for row in table_rows(runs):
        table.add_row(*row)
    Console(width=140).print(table)


def write_json(runs: Sequence[Contender], environment: dict[str, Any], path: Path) -> None:
    content = {"environment": environment, "runs": [asdict(run) | {"median_seconds": run.median_seconds} for run in runs]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def add_parser(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        parents=[flags.model_flags("demo")],
        help="compare the samplers",
        description="Compare the samplers side by side in one process. Needs the extra `bench` (rich, matplotlib).",
    )
    bench.add_argument("--batch-size", type=int, default=1, help="images at a time in the timed runs (default: %(default)s)")
    bench.add_argument("--repeats", type=int, default=5, help="timed batches of each sampler, in turns (default: %(default)s)")
    bench.add_argument("--images", type=int, default=0, help="images of each sampler for the quality columns; 0: none (default)")
    bench.add_argument("--draft", help="a model of the same tokens; brings CSpD into the comparison")
    bench.add_argument("--only", nargs="+", metavar="TEXT", help="only samplers whose name holds one of these; sequential always runs")
    flags.add_problem_flags(bench)
    bench.add_argument("--lookahead", type=int, help=f"of the lossless samplers but the tuned one (default: {LosslessSettings.lookahead})")
    bench.add_argument("--window", type=int, help=f"of the lossless samplers but the tuned one (default: {LosslessSettings.window})")
    bench.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    flags.add_device_flags(bench)
    flags.add_execution_flags(bench)
    bench.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder of bench.json and pareto.png (default: %(default)s)")
    bench.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    flags.require("bench", "rich", "matplotlib")
    from car_spec.plots import plot_pareto

    for name, least in (("batch_size", 1), ("repeats", 1), ("images", 0)):
        flags.check_at_least(name, getattr(args, name), least)
    flags.check_quality_images("--images", args.images)
    device = flags.choose_device(args.device)
    execution = Execution(args.compile, args.cuda_graphs)
    execution.check(device)
    pipeline = flags.load(args, device, dtype=flags.DTYPES[args.dtype])
    pipeline.set_execution(execution)
    base = flags.given_flags(args, *flags.PROBLEM)
    own = flags.given_flags(args, "lookahead", "window")
    runs = contenders(pipeline, base, own, args.batch_size)
    if args.only:
        runs = runs[:1] + [run for run in runs[1:] if any(text in run.name for text in args.only)]
    quality_batches = -(-args.images // QUALITY_BATCH)
    with tqdm(total=len(runs) * (args.repeats + 1) + (len(runs) + 1) * quality_batches, desc="bench", file=sys.stderr) as bar:
        measure_speed(pipeline, runs, args.batch_size, args.repeats, args.seed, bar.update)
        if args.images:
            measure_quality(pipeline, runs, args.images, QUALITY_BATCH, args.seed + 1, bar.update)
    settings = pipeline.settings(**base)
    title = (
        f"{pipeline.preset.name}: {settings['num_iter']} AR steps, {settings['num_inference_steps']} denoising steps, "
        f"guidance {settings['guidance_scale']:g}, batch {args.batch_size}, {device}, {torch.get_num_threads()} threads"
    )
    print_table(runs, title)
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {"title": title, "torch": torch.__version__, "car_spec": car_spec.__version__, "dtype": args.dtype, "images": args.images}
    write_json(runs, environment, args.out / "bench.json")
    print(f"figures: {args.out / 'bench.json'}")
    if args.images:
        plot_pareto(runs, args.out / "pareto.png")
        print(f"plot: {args.out / 'pareto.png'}")
