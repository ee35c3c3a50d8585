"""The command line: generate, bench, ablate and info; evaluate, stats and export-geneval are in eval/cli.py.

Plain results on stdout, progress and warnings on stderr.
"""

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import car_spec
from car_spec.ablation import TABLES as ABLATIONS
from car_spec.adapters.mar import GUIDANCE_SCHEDULES
from car_spec.cspd import VARIANTS, CSpDSettings
from car_spec.diffusion_bench import add_parser as add_diffusion_parser
from car_spec.engine import DRAFTERS, LosslessSettings
from car_spec.eval.cli import add_parsers as add_evaluation_parsers
from car_spec.execution import Execution
from car_spec.flags import DTYPES, check_at_least, check_quality_images, choose_device, require
from car_spec.harmon_pipeline import HarmonPipeline
from car_spec.parallel import MODES, RankError, Ranks, Shares, groups_of, started_by_torchrun
from car_spec.pipeline import DEFAULT_SAMPLER, LAWS, SAMPLERS, SETTINGS, MARPipeline, load_pipeline, model_file, vae_beside
from car_spec.prompts import read_prompt_file
from car_spec.recipes import recipe_flags
from car_spec.runs import ImageSpec, Part, RunError, RunFolder, generate_images, image_spec, sha256_of
from car_spec.trace import exchanged, report, summary

LOSSLESS_CHOICES = ("sampler", "lookahead", "window")  # what `--lookahead auto` decides
CPU_HINT = (
    "a CPU is full with a few images at a time: --lookahead auto measures what is fastest, at the price of other images on other machines"
)
QUALITY_BATCH = 64  # images at a time for the quality columns
SAMPLING = tuple(name for name in SETTINGS if name != "token_wise")  # which is for comparisons, and has no flag


def model_flags(default: str | None) -> argparse.ArgumentParser:
    """A parent of commands. Each default has a parent of its own, because the commands of one parent share its defaults."""
    flags = argparse.ArgumentParser(add_help=False)
    group = flags.add_argument_group("model")
    group.add_argument(
        "--model", default=default, help="a demo (demo, demo-xar, demo-harmon), a checkpoint, its folder, or a hub id (default: demo)"
    )
    group.add_argument("--vae", help="autoencoder: kl16.ckpt or a diffusers folder (default: what lies beside the model)")
    group.add_argument("--weights", choices=["model_ema", "model"], help="copy of the weights (default: model_ema where there is one)")
    group.add_argument("--num-heads", type=int, help="attention heads, needed for sizes without a preset only")
    group.add_argument("--tokenizer", help="Harmon: the folder of tokenizer.json (default: the model's)")
    group.add_argument("--base", help="Harmon: the whole model under a --model that holds some of its parameters")
    return flags


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="car-spec", description="Fast sampling of continuous autoregressive image models.")
    parser.add_argument("--version", action="version", version=f"car-spec {car_spec.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    model = model_flags("demo")

    generate = commands.add_parser(
        "generate",
        parents=[model],
        help="make images",
        description="Make images into a folder. A killed run goes on where it stopped when it is started again.",
    )
    generate.add_argument("--config", help="a recipe: a YAML file, or the name of one that is shipped; flags override it")
    what = generate.add_argument_group("what to make")
    what.add_argument("--classes", nargs="+", metavar="CLASS", help="ids or names; images go round them (default: all classes)")
    what.add_argument("--prompt", action="append", metavar="TEXT", help="Harmon: what to show; may be given again, images go round them")
    what.add_argument("--prompts", type=Path, metavar="FILE", help="Harmon: prompts, a line each; or .json, .jsonl, COCO's captions")
    what.add_argument("--num-images", type=int, help="how many images (default: one a prompt, or one a class and at most 16)")
    what.add_argument("--image-ids", metavar="IDS", help="make only these of the images, for instance 7 or 0-3,7")
    what.add_argument("--image-size", type=int, help="pixels a side; only Harmon has a choice, others refuse all sizes but their own")
    what.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    how = generate.add_argument_group("how (default: the model's preset)")
    how.add_argument("--num-iter", type=int, help="AR steps, 1 to the number of tokens")
    how.add_argument("--num-inference-steps", type=int, help="denoising steps a token, 2 to 1000")
    how.add_argument("--guidance-scale", type=float, help="classifier-free guidance; 1 is none and never doubles the batch")
    how.add_argument("--guidance-schedule", choices=GUIDANCE_SCHEDULES, help="over AR steps")
    how.add_argument("--temperature", type=float, help="multiplies the noise of every denoising step")
    how.add_argument(
        "--sampler",
        choices=SAMPLERS,
        help=f"lossless: the model's law in far fewer sequential calls; cspd: approximate, needs --draft (default: {DEFAULT_SAMPLER})",
    )
    how.add_argument(
        "--lookahead",
        type=number_or_auto,
        help=f"lossless: AR steps drafted at a time; auto: what is fastest here, measured (default: {LosslessSettings.lookahead})",
    )
    how.add_argument("--window", type=int, help=f"lossless: denoising steps drafted at a time (default: {LosslessSettings.window})")
    how.add_argument(
        "--final-tolerance",
        type=float,
        help=f"lossless: largest rms gap of a token's last, noiseless step (default: {LosslessSettings.final_tolerance})",
    )
    how.add_argument(
        "--drafter",
        choices=(*DRAFTERS, "frozen"),
        help="lossless: who drafts, the model itself or --draft; frozen: the model with a fresh call a draft, xAR only (default: self)",
    )
    how.add_argument("--draft", help="a model of the same tokens for `--drafter model` and cspd, for instance demo-draft")
    how.add_argument("--variant", choices=VARIANTS, help=f"cspd: as derived or as in the authors' code (default: {CSpDSettings.variant})")
    how.add_argument("--draft-length", type=int, help=f"cspd: AR steps drafted at a time (default: {CSpDSettings.draft_length})")
    how.add_argument("--prefill", type=float, help=f"cspd: share of AR steps that --model makes first (default: {CSpDSettings.prefill})")
    how.add_argument("--aligned", action=argparse.BooleanOptionalAction, help="cspd: share the noise of draft and target (default: yes)")
    where = generate.add_argument_group("where")
    where.add_argument("--out", type=Path, default=Path("outputs"), help="folder of the images (default: %(default)s)")
    where.add_argument("--batch-size", type=int, default=16, help="images at a time (default: %(default)s)")
    where.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, ... (default: %(default)s)")
    where.add_argument("--dtype", choices=DTYPES, default="float32", help="of the transformer (default: %(default)s)")
    add_execution_flags(where)
    where.add_argument(
        "--parallel",
        choices=MODES,
        help="with torchrun: processes share images, or each verification (lossless), or both where batches are few (default: images)",
    )
    where.add_argument(
        "--shares",
        type=int,
        help="parts of a verification, a call each (default: one a process); equal parts give equal bytes on any number of processes",
    )
    where.add_argument("--verbose", action="store_true", help="say how many network calls it took, and what verification did")
    where.add_argument("--plot", action="store_true", help="draw what verification accepted into speculation.png (lossless; matplotlib)")
    where.add_argument("--columns", type=int, help="of the grid (default: the number of classes or prompts, at most 8)")
    generate.set_defaults(run=run_generate)

    bench = commands.add_parser(
        "bench",
        parents=[model],
        help="compare the samplers",
        description="Compare the samplers side by side in one process. Needs the extra `bench` (rich, matplotlib).",
    )
    bench.add_argument("--batch-size", type=int, default=1, help="images at a time in the timed runs (default: %(default)s)")
    bench.add_argument("--repeats", type=int, default=5, help="timed batches of each sampler, in turns (default: %(default)s)")
    bench.add_argument("--images", type=int, default=0, help="images of each sampler for the quality columns; 0: none (default)")
    bench.add_argument("--draft", help="a model of the same tokens; brings CSpD into the comparison")
    bench.add_argument("--only", nargs="+", metavar="TEXT", help="only samplers whose name holds one of these; sequential always runs")
    bench.add_argument("--num-iter", type=int, help="AR steps (default: the model's preset)")
    bench.add_argument("--num-inference-steps", type=int, help="denoising steps a token (default: the model's preset)")
    bench.add_argument("--guidance-scale", type=float, help="(default: the model's preset)")
    bench.add_argument("--lookahead", type=int, help=f"of the lossless samplers but the tuned one (default: {LosslessSettings.lookahead})")
    bench.add_argument("--window", type=int, help=f"of the lossless samplers but the tuned one (default: {LosslessSettings.window})")
    bench.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    bench.add_argument("--device", default="auto", help="(default: %(default)s)")
    bench.add_argument("--dtype", choices=DTYPES, default="float32", help="of the transformer (default: %(default)s)")
    add_execution_flags(bench)
    bench.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder of bench.json and pareto.png (default: %(default)s)")
    bench.set_defaults(run=run_bench)

    ablate = commands.add_parser(
        "ablate",
        parents=[model],
        help="what alignment, draft length, pre-filling, guidance and temperature do to CSpD",
        description="Run CSpD with one setting changed at a time on the same images, then beside other samplers at several batch sizes. "
        "Needs the extra `bench` (rich, matplotlib).",
    )
    ablate.add_argument("--draft", default="demo-draft", help="the draft model (default: %(default)s)")
    ablate.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="one or several (default: both)")
    ablate.add_argument("--tables", nargs="+", choices=ABLATIONS, default=list(ABLATIONS), help="which to make (default: all)")
    ablate.add_argument("--images", type=int, default=16, help="images of each setting, one batch (default: %(default)s)")
    ablate.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 8, 64], help="of the comparison with other samplers (default: 1 8 64)"
    )
    ablate.add_argument("--repeats", type=int, default=3, help="timed batches of each sampler in the comparison (default: %(default)s)")
    ablate.add_argument("--quality-images", type=int, default=256, help="of each sampler in the comparison; 0: none (default: %(default)s)")
    ablate.add_argument("--guidance-scale", type=float, help="but in the table about it (default: the model's preset)")
    ablate.add_argument("--num-iter", type=int, help="AR steps (default: the model's preset)")
    ablate.add_argument("--num-inference-steps", type=int, help="denoising steps a token (default: the model's preset)")
    ablate.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    ablate.add_argument("--device", default="auto", help="(default: %(default)s)")
    ablate.add_argument(
        "--out", type=Path, default=Path("outputs/ablate"), help="folder of the figures and the plot (default: %(default)s)"
    )
    ablate.set_defaults(run=run_ablate)

    add_diffusion_parser(commands)
    add_evaluation_parsers(commands)

    info = commands.add_parser(
        "info",
        parents=[model_flags(None)],
        help="say what a checkpoint is, and which samplers fit it",
        description="Say what a checkpoint is, and which samplers fit it.",
    )
    info.add_argument("checkpoint", nargs="?", metavar="MODEL", help="as --model")
    info.add_argument("--draft", help="also look whether this model can draft for it")
    info.set_defaults(run=run_info)
    return parser


def load(args: argparse.Namespace, device: torch.device, **more: Any) -> MARPipeline:
    """The pipeline of a command's model flags."""
    flags = {name: getattr(args, name) for name in ("vae", "weights", "num_heads", "tokenizer", "base", "draft")}
    return load_pipeline(args.model, device=device, **flags, **more)


def given_flags(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the flags that were given."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def add_execution_flags(parser: Any) -> None:
    parser.add_argument("--compile", action="store_true", help="torch.compile of the head and of the backbone's blocks")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay small calls of MAR's head as CUDA graphs; needs a CUDA device")


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags over recipe over defaults. A recipe's values pass the same checks as flags: they are parsed as flags."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if getattr(args, "config", None):
        recipe = recipe_flags(args.config, args.command, set(vars(args)) - {"command", "run", "config", "folders"})
        given = list(sys.argv[1:] if argv is None else argv)
        own = args
        args = parser.parse_args([given[0], *recipe, *given[1:]])
        if args.command == "generate" and (own.prompt or own.prompts):  # a flag that may be repeated would add to the recipe's
            args.prompt, args.prompts = own.prompt, own.prompts
    return args


def parse_ids(text: str) -> list[int]:
    """`0-3,7` -> [0, 1, 2, 3, 7]."""
    ids: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise ValueError(f"--image-ids {text}: {part!r} is neither a number nor a range like 0-3")
        ids += range(int(first), int(last or first) + 1)
    return sorted(set(ids))


def device_of_process(device: torch.device) -> torch.device:
    """Under torchrun, the GPU of the process's own: that of its local rank."""
    local, processes = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type != "cuda" or processes == 1:
        return device
    if device.index is not None:
        raise ValueError(f"--device {device} would serve {processes} processes: give --device cuda, and each takes its own")
    if local >= torch.cuda.device_count():
        raise ValueError(f"--device cuda: torchrun started {processes} processes here, but there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", local)


def machine(device: torch.device) -> dict[str, Any]:
    """What has to be equal for equal calls to give equal bits."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device)}
    return {"device": f"{device.type} ({platform.machine()})", "threads": torch.get_num_threads()}


def choose_labels(args: argparse.Namespace, pipeline: MARPipeline) -> Sequence[int | str]:
    """The classes of the run, or its prompts."""
    given = "--prompt" if args.prompt else "--prompts" if args.prompts else None
    name = pipeline.preset.name
    if not isinstance(pipeline, HarmonPipeline):
        if given:
            raise ValueError(f"{given} is for Harmon, --model {name} takes --classes")
        return pipeline.class_ids(args.classes) if args.classes else list(range(pipeline.num_classes))
    if args.classes:
        raise ValueError(f"--classes {' '.join(args.classes)}: --model {name} has no classes, give --prompt or --prompts")
    if args.prompt and args.prompts:
        raise ValueError(f"--prompt and --prompts {args.prompts} are both given, but images follow one list")
    if not given:
        raise ValueError(f"--model {name} needs --prompt TEXT or --prompts FILE")
    prompts = args.prompt or read_prompt_file(args.prompts)
    return pipeline.check_prompts(list(prompts.values()) if isinstance(prompts, dict) else prompts)


def choose_images(args: argparse.Namespace, pipeline: MARPipeline) -> tuple[Sequence[int | str], list[ImageSpec]]:
    """-> the classes or prompts of the run, and the images to make."""
    labels = choose_labels(args, pipeline)
    default = len(labels) if isinstance(pipeline, HarmonPipeline) else min(len(labels), 16)
    count = args.num_images if args.num_images is not None else default
    if count < 1:
        raise ValueError(f"--num-images {count} is below 1")
    ids = parse_ids(args.image_ids) if args.image_ids is not None else list(range(count))
    if args.image_ids is not None and args.num_images is not None and ids[-1] >= count:
        raise ValueError(f"--image-ids {args.image_ids} goes beyond --num-images {count}")
    return labels, [image_spec(i, labels, args.seed) for i in ids]


def what_is_shown(pipeline: MARPipeline, labels: Sequence[int | str]) -> dict[str, Any]:
    """For the manifest: the classes, or the prompts with what decides beside the model how they are read, and the image size."""
    if not isinstance(pipeline, HarmonPipeline):
        return {"classes": labels}
    assert pipeline.source is not None  # load_pipeline sets it
    files = {"tokenizer": pipeline.source.tokenizer, "base": pipeline.source.base}
    own = {f"{name}_sha256": sha256_of(file) for name, file in files.items() if file is not None}
    return {"prompts": labels, **own, "image_size": pipeline.image_size}


def run_generate(args: argparse.Namespace) -> None:
    check_at_least("batch_size", args.batch_size, 1)
    if args.plot:
        require("--plot", "matplotlib")
    if args.parallel and "WORLD_SIZE" not in os.environ:
        raise ValueError(f"--parallel {args.parallel} needs processes: torchrun --nproc-per-node N -m car_spec.cli generate ...")
    device = device_of_process(choose_device(args.device))
    execution = Execution(args.compile, args.cuda_graphs)
    execution.check(device)
    with started_by_torchrun(device) as ranks:
        generate(args, device, execution, ranks)


def generate(args: argparse.Namespace, device: torch.device, execution: Execution, ranks: Ranks) -> None:
    from tqdm import tqdm

    pipeline = load(args, device, image_size=args.image_size, dtype=DTYPES[args.dtype])
    pipeline.set_execution(execution)
    sampling = pipeline.settings(**{name: getattr(args, name) for name in SAMPLING})
    labels, specs = choose_images(args, pipeline)
    part = divide_work(args, pipeline, sampling, ranks, -(-len(specs) // args.batch_size))
    if sampling.get("lookahead") == "auto":
        size = min(args.batch_size, len(specs))
        before = lambda: RunFolder.chosen_before(args.out, LOSSLESS_CHOICES, sampling)
        sampling = ranks.once(lambda: before() or pipeline.tune(size, sampling))
        chosen = ", ".join(f"{name} {sampling[name]}" for name in LOSSLESS_CHOICES if name in sampling)
        say(ranks, f"--lookahead auto: {chosen}")
    elif "lookahead" in sampling and device.type == "cpu" and min(args.batch_size, len(specs)) > 2:
        say(ranks, CPU_HINT)
    assert pipeline.source is not None  # load_pipeline sets it
    settings = {
        "model": pipeline.preset.name,
        "model_sha256": sha256_of(pipeline.source.model),
        "weights": pipeline.source.copy,
        **({"draft_sha256": sha256_of(pipeline.draft.source.model)} if pipeline.draft and pipeline.draft.source else {}),
        "vae_sha256": sha256_of(pipeline.source.vae),
        **what_is_shown(pipeline, labels),
        "seed": args.seed,
        **sampling,
        "dtype": args.dtype,
        **({"shares": pipeline.shares.count} if pipeline.shares else {}),
        **{name: True for name in ("compile", "cuda_graphs") if getattr(args, name)},
    }
    environment = {
        "car_spec": car_spec.__version__,
        "torch": torch.__version__,
        "device": str(device),
        "processes": ranks.size,
        "batch_size": args.batch_size,
        "image_size": pipeline.image_size,
        "law of the images": LAWS[sampling["sampler"]],
    }
    ranks.require_equal(settings)
    folder = RunFolder(args.out, settings)

    def open_folder() -> None:
        folder.open()
        folder.write_manifest(specs, pipeline.class_names, environment)

    ranks.once(open_folder)
    with tqdm(total=len(specs), unit="image", desc=pipeline.preset.name, file=sys.stderr, disable=ranks.rank > 0) as bar:
        own = generate_images(pipeline, folder, specs, args.batch_size, sampling, lambda n: bar.update(n * part.count), part)
    everyone = ranks.gather_objects(own)
    if ranks.rank > 0:
        return
    made, traces = sum(count for count, _ in everyone), [trace for _, batch in everyone for trace in batch]
    if traces:
        took = report(traces)
        folder.add_report(took)
    grid = folder.write_grid(specs, args.columns or min(len(labels), len(specs), 8))
    already = f", {len(specs) - made} were there already" if made < len(specs) else ""
    print(f"{made} images made{already}: {args.out}\ngrid: {grid}")
    if args.plot and traces:
        from car_spec.plots import plot_trace

        plot_trace(traces, args.out / "speculation.png")
        print(f"plot: {args.out / 'speculation.png'}")
    if args.verbose and traces:
        print("\n".join(f"{name}: {value:g}" for name, value in summary(traces).items()))
        for name, value in took.items():
            if isinstance(value, dict):
                print(f"{name}: " + ", ".join(f"{key} {number:g}" for key, number in value.items()))
        for name, value in exchanged(traces).items():
            print(f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else f'{value:g}'}")


def say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, file=sys.stderr)


def divide_work(args: argparse.Namespace, pipeline: MARPipeline, sampling: dict[str, Any], ranks: Ranks, num_batches: int) -> Part:
    """What this process does; where a verification is divided, the pipeline learns how."""
    groups = groups_of(args.parallel or "images", ranks.size, num_batches)
    part = Part(ranks.rank * groups // ranks.size, groups, ranks.divide(groups))
    if part.ranks.size > 1 or args.shares is not None:
        flag = f"--shares {args.shares}" if args.shares is not None else f"--parallel {args.parallel}"
        if sampling["sampler"] != "lossless":
            raise ValueError(f"{flag} divides the lossless sampler's verification, but --sampler is {sampling['sampler']}")
        if sampling.get("lookahead") == "auto":
            raise ValueError(f"{flag} conflicts with --lookahead auto, which measures one process: give a number")
        part.ranks.require_equal({"torch": torch.__version__, **machine(pipeline.device)})
        pipeline.shares = Shares(part.ranks, args.shares)
    if num_batches < groups:
        say(
            ranks,
            f"{num_batches} batches of --batch-size {args.batch_size} leave {groups - num_batches} of {ranks.size} processes without work; "
            "a smaller --batch-size or --parallel both occupies them",
        )
    return part


def run_bench(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    require("bench", "rich", "matplotlib")
    from car_spec import bench
    from car_spec.plots import plot_pareto

    for name, least in (("batch_size", 1), ("repeats", 1), ("images", 0)):
        check_at_least(name, getattr(args, name), least)
    check_quality_images("--images", args.images)
    device = choose_device(args.device)
    execution = Execution(args.compile, args.cuda_graphs)
    execution.check(device)
    pipeline = load(args, device, dtype=DTYPES[args.dtype])
    pipeline.set_execution(execution)
    base = given_flags(args, "num_iter", "num_inference_steps", "guidance_scale")
    own = given_flags(args, "lookahead", "window")
    runs = bench.contenders(pipeline, base, own, args.batch_size)
    if args.only:
        runs = runs[:1] + [run for run in runs[1:] if any(text in run.name for text in args.only)]
    quality_batches = -(-args.images // QUALITY_BATCH)
    with tqdm(total=len(runs) * (args.repeats + 1) + (len(runs) + 1) * quality_batches, desc="bench", file=sys.stderr) as bar:
        bench.measure_speed(pipeline, runs, args.batch_size, args.repeats, args.seed, bar.update)
        if args.images:
            bench.measure_quality(pipeline, runs, args.images, QUALITY_BATCH, args.seed + 1, bar.update)
    settings = pipeline.settings(**base)
    title = (
        f"{pipeline.preset.name}: {settings['num_iter']} AR steps, {settings['num_inference_steps']} denoising steps, "
        f"guidance {settings['guidance_scale']:g}, batch {args.batch_size}, {device}, {torch.get_num_threads()} threads"
    )
    bench.print_table(runs, title)
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {"title": title, "torch": torch.__version__, "car_spec": car_spec.__version__, "dtype": args.dtype, "images": args.images}
    bench.write_json(runs, environment, args.out / "bench.json")
    print(f"figures: {args.out / 'bench.json'}")
    if args.images:
        plot_pareto(runs, args.out / "pareto.png")
        print(f"plot: {args.out / 'pareto.png'}")


def run_ablate(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    require("ablate", "rich", "matplotlib")
    from car_spec import ablation, bench
    from car_spec.plots import plot_alignment, plot_batches, plot_pareto

    for name, least in (("images", 1), ("repeats", 1), ("batch_sizes", 1), ("quality_images", 0)):
        check_at_least(name, getattr(args, name), least)
    check_quality_images("--quality-images", args.quality_images)
    pipeline = load(args, choose_device(args.device))
    base = given_flags(args, "num_iter", "num_inference_steps", "guidance_scale")
    whole = pipeline.settings(sampler="cspd", **base)
    runs = [run for variant in args.variant for run in ablation.settings_of(base, whole["num_iter"], variant) if run[0] in args.tables]
    sizes = sorted(set(args.batch_sizes)) if "comparison" in args.tables else []
    comparison = {size: ablation.compared(base, whole["num_iter"], args.variant) for size in sizes}
    for settings in [run[-1] for run in runs] + [run.settings for others in comparison.values() for run in others]:
        pipeline.settings(**({"sampler": "cspd"} | settings))  # refuses what the model cannot do before the long work
    title = (
        f"CSpD (approximate), {pipeline.preset.name} with {pipeline.draft.preset.name if pipeline.draft else ''}: "
        f"{whole['num_iter']} AR steps, {whole['num_inference_steps']} denoising steps, guidance {whole['guidance_scale']:g}, "
        f"{args.images} images a setting, {torch.get_num_threads()} threads"
    )
    contenders = len(comparison[sizes[-1]]) if sizes else 0
    quality_batches = -(-args.quality_images // QUALITY_BATCH)
    total = len(runs) + contenders * len(sizes) * (args.repeats + 1) + (contenders + 1 if sizes else 0) * quality_batches
    with tqdm(total=total, desc="ablate", file=sys.stderr) as bar:
        print(title)
        measured = ablation.measure(pipeline, runs, args.images, args.seed, bar.update)
        ablation.print_tables(measured)
        args.out.mkdir(parents=True, exist_ok=True)
        done: dict[int, list[bench.Contender]] = {}
        for size, others in comparison.items():  # shown and written as they come: the next size may take an hour
            bench.measure_speed(pipeline, others, size, args.repeats, args.seed, bar.update)
            bench.print_table(others, f"comparison, batch {size}")
            done[size] = others
            ablation.write_json(measured, done, title, args.out / "ablation.json")
        if sizes and args.quality_images:
            bench.measure_quality(pipeline, comparison[sizes[-1]], args.quality_images, QUALITY_BATCH, args.seed + 1, bar.update)
            bench.print_table(comparison[sizes[-1]], f"comparison with quality, batch {sizes[-1]}")
    ablation.write_json(measured, comparison, title, args.out / "ablation.json")
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


def run_info(args: argparse.Namespace) -> None:
    from car_spec.info import bare_pipeline, describe, samplers
    from car_spec.models.loading import identify, read_checkpoint, resolve
    from car_spec.models.vae import load_vae

    if args.checkpoint is not None and args.model is not None:
        raise ValueError(f"info takes one model, but {args.checkpoint} and --model {args.model} are given")
    file = model_file(args.checkpoint or args.model or "demo")
    checkpoint = read_checkpoint(file, args.weights)
    print(f"file: {file}\nsha256: {sha256_of(file)}")
    for name, text in describe(checkpoint, args.num_heads):
        print(f"{name}: {text}")
    if identify(checkpoint.state) == "vae":
        return
    try:
        inside = any(name.startswith("vae.") for name in checkpoint.state)  # a Harmon's
        vae_path = resolve(args.vae, "--vae") if args.vae else file if inside else vae_beside(file)
    except ValueError as missing:
        vae_path = None
        print(f"autoencoder: {missing}")
    else:
        print(f"autoencoder: {vae_path}")
    pipeline = bare_pipeline(checkpoint, args.num_heads, load_vae(vae_path) if vae_path else None)
    assert pipeline is not None  # `describe` refused what is no model
    if pipeline.vae is not None:
        print(f"image size: {pipeline.image_size}")
    if args.draft:
        draft = bare_pipeline(read_checkpoint(model_file(args.draft, "--draft")), args.num_heads, pipeline.vae)
        if draft is None:
            raise ValueError(f"--draft {args.draft} holds no model that can draft")
        pipeline.set_draft(draft)
    for name, text in samplers(pipeline):
        print(f"{name}: {text}")
    if names := checkpoint.metadata.get("class_names"):
        print("classes: " + ", ".join(f"{i} {name}" for i, name in enumerate(names)))


def main(argv: Sequence[str] | None = None) -> int:
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        args = parse(argv)
        args.run(args)
    except (ValueError, RunError, RankError, OSError) as error:
        rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        print(f"car-spec: error: {rank}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ncar-spec: stopped; what was made is kept, start the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
