"""`car-spec evaluate`, `stats` and `export-geneval`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from car_spec.eval import clip
from car_spec.eval.features import EXTRACTORS, Features, check_extractor, create_extractor, extract, weights_file
from car_spec.eval.folders import image_files, pairing, read_manifest, real_images
from car_spec.eval.geneval import SAMPLES, export_geneval
from car_spec.eval.intervals import FLOOR, SUBSETS, compare, subset_size
from car_spec.eval.prompts import prompts_of
from car_spec.eval.protocol import about_folder, check_folder, deviations, versions
from car_spec.eval.report import as_json, print_tables
from car_spec.eval.scores import FULL, METRICS, count_warning, names, score
from car_spec.eval.statistics import Statistics, load_statistics, save_statistics
from car_spec.flags import check_at_least, choose_device
from car_spec.recipes import read_recipe
from car_spec.runs import sha256_of

Images = Sequence[Path] | Sequence[np.ndarray]


def add_parsers(commands) -> None:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--extractor",
        choices=EXTRACTORS,
        default="inception",
        help="inception: the field's; the other needs no download (default: inception)",
    )
    shared.add_argument("--inception-weights", type=Path, help="torch-fidelity's Inception file (default: where torch keeps downloads)")
    shared.add_argument(
        "--resize", type=int, help="make the short side of all images this long (bicubic) and cut out the centre (default: as they are)"
    )
    shared.add_argument("--batch-size", type=int, default=64, help="images at a time; scores do not depend on it (default: %(default)s)")
    shared.add_argument("--device", default="auto", help="(default: %(default)s)")

    evaluate = commands.add_parser(
        "evaluate",
        parents=[shared],
        help="score folders of images",
        description="Score folders of images side by side. Needs the extra `eval`.",
    )
    evaluate.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    evaluate.add_argument("--config", help="the recipe that the folders were made with: its section `evaluate`, and checks of the folders")
    evaluate.add_argument("--reference", type=Path, help="statistics (.npz with mu and sigma) or a folder of real images, for fid")
    evaluate.add_argument(
        "--real-images", type=Path, help="real images for kid, prc and the floor: a folder or ADM batch (default: --reference if a folder)"
    )
    evaluate.add_argument("--metrics", default="fid,is", help=f"of {','.join(METRICS)} (default: %(default)s)")
    evaluate.add_argument("--num-images", type=int, help="refuse folders with another number of images")
    evaluate.add_argument("--images-per-class", type=int, help="refuse folders with another number of any class")
    evaluate.add_argument("--clip-model", default=clip.DEFAULT_MODEL, help="hub id or folder of transformers (default: %(default)s)")
    evaluate.add_argument("--prompts", type=Path, help="prompts of a folder whose manifest has none: a line an image, .json or .jsonl")
    evaluate.add_argument("--subsets", type=int, default=SUBSETS, help="random draws for the intervals (default: %(default)s)")
    evaluate.add_argument("--subset-size", type=int, help="images of a draw (default: half of the smallest set)")
    evaluate.add_argument("--force", action="store_true", help="score fid of fewer images than make sense")
    evaluate.add_argument("--out", type=Path, help="write the report as JSON")
    evaluate.set_defaults(run=run_evaluate)

    stats = commands.add_parser(
        "stats", parents=[shared], help="make reference statistics", description="Mean and covariance of the features of a folder, as .npz."
    )
    stats.add_argument("folder", type=Path, metavar="FOLDER")
    stats.add_argument("-o", "--out", type=Path, required=True, help="the .npz file")
    stats.set_defaults(run=run_stats)

    export = commands.add_parser(
        "export-geneval",
        help="lay a run out as GenEval's detector reads it",
        description="Copy a run's images to GenEval's layout, a numbered folder for each line of its evaluation_metadata.jsonl.",
    )
    export.add_argument("folder", type=Path, metavar="FOLDER", help="a run with prompts")
    export.add_argument("--metadata", type=Path, required=True, help="GenEval's evaluation_metadata.jsonl")
    export.add_argument("-o", "--out", type=Path, required=True, help="a new or empty folder")
    export.set_defaults(run=run_export)


class _Reader:
    """What scores are calculated from, with one extractor or CLIP model, and a progress bar each."""

    def __init__(self, args: argparse.Namespace, extractor: bool = True, clip_model: bool = False):
        self.batch_size, self.device, self.resize = args.batch_size, choose_device(args.device), args.resize
        self.clip = clip.load_clip(args.clip_model, self.device) if clip_model else None
        self.module = create_extractor(args.extractor, args.inception_weights, self.device) if extractor else None

    def __call__(self, images: Images, name: str, prompts: Sequence[str] | None = None) -> Features:
        from tqdm import tqdm

        out = Features(None, None)
        if self.module is not None:
            with tqdm(total=len(images), unit="image", desc=name, file=sys.stderr) as bar:
                out = extract(self.module, images, self.device, self.batch_size, bar.update, self.resize)
        if self.clip is not None and prompts is not None:
            with tqdm(total=len(images), unit="image", desc=f"{name}, CLIP", file=sys.stderr) as bar:
                out = out._replace(cosines=clip.cosines(self.clip, images, prompts, self.batch_size, bar.update))
        return out


def check_reading(args: argparse.Namespace) -> None:
    for name in ("batch_size", "resize"):
        if getattr(args, name) is not None:
            check_at_least(name, getattr(args, name), 1)


def run_stats(args: argparse.Namespace) -> None:
    check_reading(args)
    check_extractor(args.extractor, args.inception_weights)
    files = real_images(args.folder, "FOLDER")
    features = _Reader(args)(files, str(args.folder)).features
    assert features is not None
    save_statistics(Statistics.of(features), args.out, extractor=args.extractor, resize=str(args.resize), images=len(files))
    print(f"statistics of {len(files)} images ({args.extractor}): {args.out}\nsha256: {sha256_of(args.out)}")


def run_export(args: argparse.Namespace) -> None:
    prompts, each = export_geneval(args.folder, args.metadata, args.out)
    if each != SAMPLES:
        print(f"warning: {each} images a prompt, published scores use {SAMPLES}", file=sys.stderr)
    print(f"{prompts} prompts, {each} images each: {args.out}")


def run_evaluate(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    metrics = check_flags(args)
    folders = list(dict.fromkeys(args.folders))
    needs_features, real_path = metrics != ["clipscore"], None
    if needs_features:
        check_extractor(args.extractor, args.inception_weights)
        real_path = args.real_images or (args.reference if is_images(args.reference) else None)
    files = {str(folder): image_files(folder, "FOLDER") for folder in folders}
    manifests = {str(folder): read_manifest(folder) for folder in folders}
    recipe = read_protocol(args.config)
    for folder in folders:
        check_folder(folder, len(files[str(folder)]), manifests[str(folder)], args.num_images, args.images_per_class)
        for deviation in deviations(manifests[str(folder)], recipe) if recipe else []:
            print(f"warning: {folder} deviates from --config {args.config}: {deviation}", file=sys.stderr)
        warning = count_warning(len(files[str(folder)]), metrics, args.force, recipe.get("num_images", FULL))
        if warning:
            print(f"warning: {folder}: {warning}", file=sys.stderr)
    prompts = {
        str(folder): prompts_of(folder, files[str(folder)], manifests[str(folder)], args.prompts) if "clipscore" in metrics else None
        for folder in folders
    }
    real_files = real_images(real_path, "--real-images" if args.real_images else "--reference") if real_path is not None else None
    counts = {name: len(own) for name, own in files.items()}
    size = subset_size(args.subset_size, list(counts.values()), len(real_files) if real_files is not None else None)
    if "prc" in metrics and size < 4:
        raise ValueError(f"--metrics prc needs subsets of at least 4 images, these have {size}")
    num_features = EXTRACTORS[args.extractor].num_features
    reference, called = None, names(EXTRACTORS[args.extractor])
    if "fid" in metrics and not is_images(args.reference):
        reference = load_statistics(args.reference, num_features, extractor=args.extractor, resize=str(args.resize))

    read = _Reader(args, needs_features, "clipscore" in metrics)
    context = describe(args, metrics, manifests, counts, recipe)
    if read.clip is not None:
        context["CLIP"] = describe_clip(read.clip, [prompt for own in prompts.values() for prompt in own or []])
    real = read(real_files, str(real_path)) if real_files is not None else None
    reference_is_real = is_images(args.reference) and real_path == args.reference
    if "fid" in metrics and reference is None:
        of = real if reference_is_real else read(real_images(args.reference, "--reference"), str(args.reference))
        assert of is not None and of.features is not None
        reference = Statistics.of(of.features)
    sets = {name: read(files[name], name, prompts[name]) for name in counts}
    scores = {name: score(made, reference, real.features if real else None, metrics, called) for name, made in sets.items()}
    with tqdm(total=args.subsets, desc="subsets", file=sys.stderr) as bar:
        comparison = compare(
            sets,
            {str(folder): pairing(folder, files[str(folder)], manifests[str(folder)]) for folder in folders},
            counts | ({FLOOR: len(real_files)} if real_files is not None else {}),
            reference,
            real,
            metrics,
            called,
            size,
            args.subsets,
            reference_is_real,
            bar.update,
        )
    print_tables(scores, counts, comparison, context)
    if args.out is not None:
        args.out.write_text(json.dumps(as_json(scores, counts, comparison, context), indent=1) + "\n")
        print(f"report: {args.out}")


def is_images(reference: Path | None) -> bool:
    """Whether --reference is a folder of images; otherwise it is a file of statistics."""
    return reference is not None and reference.is_dir()


def check_flags(args: argparse.Namespace) -> list[str]:
    """What can be refused without looking at any file -> the metrics."""
    metrics = args.metrics.split(",")
    check_reading(args)
    check_at_least("subsets", args.subsets, 2)
    for metric in metrics:
        if metric not in METRICS:
            raise ValueError(f"--metrics {metric} is none of {', '.join(METRICS)}")
    if "fid" in metrics and args.reference is None:
        raise ValueError("--metrics fid needs --reference: statistics (.npz) or a folder of real images")
    for metric in ("kid", "prc"):
        if metric in metrics and args.real_images is None and not is_images(args.reference):
            raise ValueError(f"--metrics {metric} needs --real-images, or a folder as --reference")
    if args.prompts is not None and "clipscore" not in metrics:
        raise ValueError(f"--prompts {args.prompts} is for clipscore, --metrics has {args.metrics}")
    return metrics


def read_protocol(config: str | None) -> dict[str, Any]:
    """How a recipe makes images, without its section about scores."""
    return {name: value for name, value in read_recipe(config).items() if name != "evaluate"} if config else {}


def describe(
    args: argparse.Namespace,
    metrics: list[str],
    manifests: dict[str, dict[str, Any] | None],
    counts: dict[str, int],
    recipe: dict[str, Any],
) -> dict[str, Any]:
    """What has to be printed with a score."""
    context: dict[str, Any] = {}
    if metrics != ["clipscore"]:
        chosen = EXTRACTORS[args.extractor]
        context["extractor"] = f"{chosen.name} (torch-fidelity), layer {chosen.features}"
        context["extractor weights sha256"] = sha256_of(weights_file(args.extractor, args.inception_weights))
        context["images resized to"] = f"{args.resize} (short side, bicubic), centre cut out" if args.resize else "what the extractor takes"
    for name, path in (("reference", args.reference), ("real images", args.real_images)):
        if path is not None:
            context[name], context[f"{name} sha256"] = str(path), sha256_of(path)
    if args.config:
        context["recipe"] = args.config
    if args.prompts is not None:
        context["prompts"], context["prompts sha256"] = str(args.prompts), sha256_of(args.prompts)
    for name, manifest in manifests.items():
        context[name] = about_folder(counts[name], manifest)
        if recipe:
            context[name]["differs from the recipe in"] = deviations(manifest, recipe)
    packages = ["torch-fidelity"] if metrics != ["clipscore"] else []
    context["versions"] = versions(*packages, *(["transformers"] if "clipscore" in metrics else []))
    return context


def describe_clip(model: clip.Clip, prompts: list[str]) -> dict[str, Any]:
    """Name and scale, without which a CLIPScore is not comparable; warns of prompts that are cut."""
    cut = clip.overlong(model, prompts)
    if cut:
        print(f"warning: {cut} of {len(prompts)} prompts are cut, --clip-model reads {model.longest} text tokens", file=sys.stderr)
    return {"model": model.name, "scale": clip.CONVENTION, "prompts cut": f"{cut} of {len(prompts)}, to {model.longest} tokens"}
