"""`car-spec evaluate` and `car-spec stats`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import car_spec
from car_spec.eval.features import EXTRACTORS, Features, check_extractor, create_extractor, extract
from car_spec.eval.folders import image_files, label_policy, read_manifest
from car_spec.eval.scores import METRICS, Scores, count_warning, floor, report, score
from car_spec.eval.statistics import Statistics, load_statistics, save_statistics
from car_spec.runs import sha256_of


def add_parsers(commands) -> None:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--extractor",
        choices=EXTRACTORS,
        default="inception",
        help="inception: the field's; the other needs no download (default: inception)",
    )
    shared.add_argument("--inception-weights", type=Path, help="torch-fidelity's Inception file (default: where torch keeps downloads)")
    shared.add_argument("--batch-size", type=int, default=64, help="images at a time; scores do not depend on it (default: %(default)s)")
    shared.add_argument("--device", default="auto", help="(default: %(default)s)")

    evaluate = commands.add_parser(
        "evaluate",
        parents=[shared],
        help="score folders of images",
        description="Score folders of images side by side. Needs the extra `eval`.",
    )
    evaluate.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    evaluate.add_argument("--reference", type=Path, help="statistics (.npz with mu and sigma) or a folder of real images, for fid")
    evaluate.add_argument("--real-images", type=Path, help="a folder of real images, for kid and prc (default: --reference if a folder)")
    evaluate.add_argument("--metrics", default="fid,is", help=f"of {','.join(METRICS)} (default: %(default)s)")
    evaluate.add_argument("--force", action="store_true", help="score fid of fewer images than make sense")
    evaluate.add_argument("--out", type=Path, help="write the report as JSON")
    evaluate.set_defaults(run=run_evaluate)

    stats = commands.add_parser(
        "stats", parents=[shared], help="make reference statistics", description="Mean and covariance of the features of a folder, as .npz."
    )
    stats.add_argument("folder", type=Path, metavar="FOLDER")
    stats.add_argument("-o", "--out", type=Path, required=True, help="the .npz file")
    stats.set_defaults(run=run_stats)


class _Reader:
    """Features of folders with one extractor and a progress bar each."""

    def __init__(self, args: argparse.Namespace):
        from car_spec.cli import choose_device

        if args.batch_size < 1:
            raise ValueError(f"--batch-size {args.batch_size} is below 1")
        check_extractor(args.extractor, args.inception_weights)
        self.batch_size, self.device = args.batch_size, choose_device(args.device)
        self.module = create_extractor(args.extractor, args.inception_weights, self.device)

    def __call__(self, files: list[Path], name: str) -> Features:
        from tqdm import tqdm

        with tqdm(total=len(files), unit="image", desc=name, file=sys.stderr) as bar:
            return extract(self.module, files, self.device, self.batch_size, bar.update)


def run_stats(args: argparse.Namespace) -> None:
    files = image_files(args.folder, "FOLDER")
    features = _Reader(args)(files, str(args.folder)).features
    save_statistics(Statistics.of(features), args.out)
    print(f"statistics of {len(files)} images ({args.extractor}): {args.out}\nsha256: {sha256_of(args.out)}")


def run_evaluate(args: argparse.Namespace) -> None:
    metrics, extractor = args.metrics.split(","), EXTRACTORS[args.extractor]
    for metric in metrics:
        if metric not in METRICS:
            raise ValueError(f"--metrics {metric} is none of {', '.join(METRICS)}")
    check_extractor(args.extractor, args.inception_weights)
    reference_is_folder = args.reference is not None and args.reference.is_dir()
    real_folder = args.real_images or (args.reference if reference_is_folder else None)
    if "fid" in metrics and args.reference is None:
        raise ValueError("--metrics fid needs --reference: statistics (.npz) or a folder of real images")
    for metric in ("kid", "prc"):
        if metric in metrics and real_folder is None:
            raise ValueError(f"--metrics {metric} needs --real-images, or a folder as --reference")
    files = {folder: image_files(folder, "FOLDER") for folder in args.folders}
    real_files = image_files(real_folder, "--real-images" if args.real_images else "--reference") if real_folder is not None else []
    for folder in args.folders:
        warning = count_warning(len(files[folder]), metrics, args.force)
        if warning:
            print(f"warning: {folder}: {warning}", file=sys.stderr)
    reference = None
    if "fid" in metrics and not reference_is_folder:
        reference = load_statistics(args.reference, extractor.num_features)

    read = _Reader(args)
    real = read(real_files, str(real_folder)).features if real_files else None
    if "fid" in metrics and reference_is_folder:
        everything = real if real_folder == args.reference else read(image_files(args.reference, "--reference"), "reference").features
        assert everything is not None
        reference = Statistics.of(everything)
    results = [score(str(folder), read(files[folder], str(folder)), reference, real, metrics, extractor) for folder in args.folders]
    context = describe(args, files)
    if real is not None and "fid" in metrics:
        distance, size = floor(real, min(result.count for result in results))
        context["floor"] = f"{distance:.4f} between two disjoint sets of {size} real images"
    print_results(results, context)
    if args.out is not None:
        args.out.write_text(json.dumps(report(results, context), indent=1) + "\n")
        print(f"report: {args.out}")


def describe(args: argparse.Namespace, files: dict[Path, list[Path]]) -> dict[str, Any]:
    """What has to be printed with a score."""
    context: dict[str, Any] = {"extractor": args.extractor}
    if args.inception_weights is not None:
        context["extractor weights sha256"] = sha256_of(args.inception_weights)
    if args.reference is not None:
        context["reference"] = str(args.reference)
        context["reference sha256"] = sha256_of(args.reference)
    for folder in args.folders:
        manifest = read_manifest(folder)
        settings = manifest["settings"] if manifest else {}
        shown = {name: value for name, value in settings.items() if name != "classes" and not name.endswith("sha256")}
        law = manifest["environment"].get("law of the images", "unknown") if manifest else "unknown"
        context[str(folder)] = {
            "images": len(files[folder]),
            "labels": label_policy(manifest),
            "law of the images": law,
            "settings": shown,
        }
    context["versions"] = {"car_spec": car_spec.__version__, "torch": torch.__version__}
    return context


def print_results(results: list[Scores], context: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(results[0].values)
    table = Table(title="scores, with their standard deviation over random halves of the images", title_justify="left")
    for i, column in enumerate(("folder", "images", *names)):
        table.add_column(column, justify="left" if i == 0 else "right")
    for result in results:
        cells = []
        for name in names:
            spread = f" ± {result.spread[name]:.3f}" if name in result.spread else ""
            cells.append(f"{result.values[name]:.4f}{spread}")
        table.add_row(result.folder, str(result.count), *cells)
    console = Console(width=140)
    console.print(table)
    for name, value in context.items():
        console.print(f"{name}: {value}", highlight=False)
