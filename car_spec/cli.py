"""The command line: generate, and the parsers of the other commands, which lie beside what they run.

Plain results on stdout, progress and warnings on stderr.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import car_spec
from car_spec import ablation, bench, diffusion_bench, flags, info
from car_spec.adapters.mar import GUIDANCE_SCHEDULES
from car_spec.cspd import VARIANTS, CSpDSettings
from car_spec.engine import DRAFTERS, LosslessSettings
from car_spec.eval.cli import add_parsers as add_evaluation_parsers
from car_spec.execution import Execution, machine
from car_spec.harmon_pipeline import HarmonPipeline
from car_spec.parallel import MODES, RankError, Ranks, Shares, groups_of, started_by_torchrun
from car_spec.pipeline import DEFAULT_SAMPLER, LAWS, SAMPLERS, SETTINGS, MARPipeline
from car_spec.prompts import read_prompt_file
from car_spec.recipes import recipe_flags
from car_spec.runs import ImageSpec, Part, RunError, RunFolder, generate_images, image_spec, sha256_of
from car_spec.trace import exchanged, report, summary

LOSSLESS_CHOICES = ("sampler", "lookahead", "window")  # what `--lookahead auto` decides
CPU_HINT = (
    "a CPU is full with a few images at a time: --lookahead auto measures what is fastest, at the price of other images on other machines"
)
SAMPLING = tuple(name for name in SETTINGS if name != "token_wise")  # which is for comparisons, and has no flag


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="car-spec", description="Fast sampling of continuous autoregressive image models.")
    parser.add_argument("--version", action="version", version=f"car-spec {car_spec.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    generate = commands.add_parser(
        "generate",
        parents=[flags.model_flags("demo")],
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
    flags.add_device_flags(where)
    flags.add_execution_flags(where)
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

    for add in (bench.add_parser, ablation.add_parser, diffusion_bench.add_parser, add_evaluation_parsers, info.add_parser):
        add(commands)
    return parser


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
    flags.check_at_least("batch_size", args.batch_size, 1)
    if args.plot:
        flags.require("--plot", "matplotlib")
    if args.parallel and "WORLD_SIZE" not in os.environ:
        raise ValueError(f"--parallel {args.parallel} needs processes: torchrun --nproc-per-node N -m car_spec.cli generate ...")
    device = device_of_process(flags.choose_device(args.device))
    execution = Execution(args.compile, args.cuda_graphs)
    execution.check(device)
    with started_by_torchrun(device) as ranks:
        generate(args, device, execution, ranks)


def generate(args: argparse.Namespace, device: torch.device, execution: Execution, ranks: Ranks) -> None:
    from tqdm import tqdm

    pipeline = flags.load(args, device, image_size=args.image_size, dtype=flags.DTYPES[args.dtype])
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


def main(argv: Sequence[str] | None = None) -> int:
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        args = parse(argv)
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
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
