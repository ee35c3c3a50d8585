"""`car-spec diffusion-bench`: whole-image diffusion, windows and churn side by side with sequential sampling.

Two tables, as the papers behind the method have them: windows of the scheduler's own chain (Hu et al. 2025, whose sampler is the frozen
drafter with token-wise verification), and the churned reverse SDE at one window (Soen et al. 2026).
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import car_spec
from car_spec.bench import Contender, measure_quality, measure_speed, write_json
from car_spec.diffusion_pipeline import AcceleratedDDPM, DiffusionSettings, sample_sequentially, sample_speculatively
from car_spec.flags import DTYPES, add_device_flags, check_at_least, check_quality_images, choose_device
from car_spec.noise import Noise
from car_spec.trace import Trace

DEMO = "demo-pixel"
TABLES = ("windows", "churn")
WINDOWS: tuple[int | None, ...] = (2, 4, 6, 8, 16, None)
CHURNS = (0.25, 0.5, 1.0)
CHURN_WINDOW = 7
SAMPLERS = tuple((drafter, verification) for drafter in ("frozen", "free") for verification in ("token", "block"))
WARM_UP_STEPS = 20  # a thousand would be an hour for a long table
QUALITY_BATCH = 8  # images at a time for the quality columns: a verification multiplies them by the window
HEADER = ("sampler", "sequential calls", "rows", "s/image", "faster", "Frechet", "p")


class Sampled(NamedTuple):
    images: torch.Tensor  # (B, C, H, W)
    trace: Trace


class PixelSampler:
    """A DDPMPipeline behind the interface that `measure_speed` and `measure_quality` call."""

    def __init__(self, pipe: Any):
        self.pipe, self.device = pipe, pipe.device

    def examples(self, first: int, count: int) -> range:
        """Nothing is asked for: numbers that only tell how many images."""
        return range(first, first + count)

    @torch.no_grad()
    def __call__(
        self,
        labels: Sequence[int],
        *,
        generator: Sequence[torch.Generator],
        output_type: str,
        steps: int,
        sequential: bool,
        **settings: Any,
    ) -> Sampled:
        """labels only tell how many images; settings are those of `DiffusionSettings`."""
        batch = len(labels)
        own = AcceleratedDDPM(self.pipe, DiffusionSettings(**settings))
        chain, trace = own.image_chain(batch, steps), Trace(batch)
        noise = Noise(generator, torch.arange(batch, device=self.device))
        if sequential:
            images = sample_sequentially(chain, noise, trace.chain)
        else:
            images = sample_speculatively(chain, noise, own.settings, trace.chain)
        trace.record_round(torch.arange(batch), torch.ones(batch, dtype=torch.int64))
        return Sampled(images.unflatten(1, chain.shape), trace)


def window_contenders(steps: int, windows: Sequence[int | None], base: dict[str, Any]) -> list[Contender]:
    """Sequential, then each window: ASD as published, and the free drafter with block verification."""
    base = base | {"steps": steps, "sequential": False}
    runs = [Contender("sequential", base | {"sequential": True})]
    for drafter, verification in (("frozen", "token"), ("free", "block")):
        for window in windows:
            name = f"{drafter}, {verification}, window {'unlimited' if window is None else window}"
            runs.append(Contender(name, base | {"window": window, "drafter": drafter, "verification": verification}))
    return runs


def churn_contenders(steps: int, churn: float, base: dict[str, Any]) -> list[Contender]:
    base = base | {"steps": steps, "sequential": False, "churn": churn, "window": CHURN_WINDOW}
    runs = [Contender("sequential", base | {"sequential": True})]
    return runs + [Contender(f"{d}, {v}, window {CHURN_WINDOW}", base | {"drafter": d, "verification": v}) for d, v in SAMPLERS]


def tables(names: Sequence[str], steps: Sequence[int], windows: Sequence[int | None], base: dict[str, Any]) -> Iterator[tuple[str, list]]:
    """(title, contenders), the first of which is sequential."""
    for count in steps:
        if "windows" in names:
            yield f"the scheduler's chain, {count} steps", window_contenders(count, windows, base)
        if "churn" in names:
            for churn in CHURNS:
                yield f"churned SDE, eps {churn:g}, {count} steps", churn_contenders(count, churn, base)


def table_rows(runs: Sequence[Contender]) -> list[tuple[str, ...]]:
    calls = lambda run: run.median_count("head calls a batch")
    rows = lambda run: run.median_count("head rows an image")
    base = runs[0]
    return [
        (
            run.name,
            f"{calls(run):.0f} ({calls(base) / calls(run):.1f}x fewer)" if run is not base else f"{calls(run):.0f}",
            f"{rows(run) / rows(base):.2f}x",
            f"{run.median_seconds:.2f}",
            f"{base.median_seconds / run.median_seconds:.2f}x",
            "" if run.frechet is None else f"{run.frechet:.3f}",
            "" if run.p_value is None else f"{run.p_value:.3f}",
        )
        for run in runs
    ]


def markdown(title: str, runs: Sequence[Contender]) -> str:
    lines = [f"**{title}**", "", *("| " + " | ".join(row) + " |" for row in (HEADER, ("---",) * len(HEADER), *table_rows(runs)))]
    return "\n".join(lines) + "\n"


def load(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """The shipped pixel model, or a DDPMPipeline of diffusers from a folder or hub id; states are float32 whatever the network is."""
    from diffusers import DDPMPipeline

    path = Path(__file__).parent / "demo" / "pixel" if name == DEMO else name
    pipe = DDPMPipeline.from_pretrained(path, low_cpu_mem_usage=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device, dtype)


def number_or_unlimited(text: str) -> int | None:
    return None if text == "unlimited" else int(text)


def add_parser(commands: Any) -> None:
    bench = commands.add_parser(
        "diffusion-bench",
        help="compare samplers of whole-image diffusion",
        description="Compare sequential sampling of a DDPMPipeline with speculative sampling over windows and churns.",
    )
    bench.add_argument("--model", default=DEMO, help="demo-pixel, or a DDPMPipeline's folder or hub id (default: %(default)s)")
    bench.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="which to make (default: all)")
    bench.add_argument("--steps", nargs="+", type=int, default=[100, 1000], help="denoising steps, a table each (default: 100 1000)")
    bench.add_argument(
        "--windows",
        nargs="+",
        type=number_or_unlimited,
        default=list(WINDOWS),
        help="transitions drafted at a time, or unlimited (default: 2 4 6 8 16 unlimited)",
    )
    bench.add_argument("--spread", type=float, default=DiffusionSettings.spread, help="of clean samples in drafts (default: %(default)s)")
    bench.add_argument("--max-rows", type=int, help="images in one call of the network (default: no limit)")
    bench.add_argument("--batch-size", type=int, default=1, help="images at a time in the timed runs (default: %(default)s)")
    bench.add_argument("--repeats", type=int, default=3, help="timed batches of each sampler, in turns (default: %(default)s)")
    bench.add_argument("--images", type=int, default=64, help="images of each sampler for the quality columns; 0: none (default: 64)")
    bench.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    add_device_flags(bench, "network")
    bench.add_argument("--out", type=Path, default=Path("outputs/diffusion-bench"), help="folder of the tables (default: %(default)s)")
    bench.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    for name, least in (("batch_size", 1), ("repeats", 1), ("images", 0), ("steps", 2)):
        check_at_least(name, getattr(args, name), least)
    check_quality_images("--images", args.images)
    base = {"spread": args.spread, "max_rows": args.max_rows}
    planned = list(tables(args.tables, args.steps, args.windows, base))
    for _, runs in planned:  # refuses a bad value before the long work
        for run in runs:
            DiffusionSettings(**{name: value for name, value in run.settings.items() if name not in ("steps", "sequential")})
    sampler: Any = PixelSampler(load(args.model, choose_device(args.device), DTYPES[args.dtype]))
    args.out.mkdir(parents=True, exist_ok=True)
    machine = f"{sampler.device}, {args.dtype}, {torch.get_num_threads()} threads"
    facts = f"{args.model}, batch {args.batch_size}, {machine}, {args.images} images"
    environment = {"torch": torch.__version__, "car_spec": car_spec.__version__, "images": args.images, "facts": facts}
    batches = -(-args.images // QUALITY_BATCH)
    total = sum(len(runs) * (args.repeats + 1) + (len(runs) + 1) * batches for _, runs in planned)
    parts = [facts + "\n"]
    with tqdm(total=total, desc="diffusion-bench") as bar:
        for title, runs in planned:
            warm_up = {"steps": min(runs[0].settings["steps"], WARM_UP_STEPS)}
            measure_speed(sampler, runs, args.batch_size, args.repeats, args.seed, bar.update, warm_up)
            if args.images:
                measure_quality(sampler, runs, args.images, QUALITY_BATCH, args.seed + 1, bar.update)
            parts.append(markdown(title, runs))
            name = title.replace(",", "").replace("'", "").replace(" ", "-")
            write_json(runs, environment | {"title": title}, args.out / f"{name}.json")
            (args.out / "tables.md").write_text("\n".join(parts))  # after every table, for these runs are long
    print("\n".join(parts))
    print(f"tables: {args.out / 'tables.md'}")
