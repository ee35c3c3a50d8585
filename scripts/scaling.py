"""A projection: seconds an image for MAR-H and xAR-H when 1, 2, 4 or 8 GPUs share every verification. No such run was made.

    python scripts/scaling.py [--gpus 1 2 4 8] [--tflops 400] [--link-gbs 300] [--overhead-us 2000] [--calls calls.json]

A call of r rows takes the longest of: its kernel launches, reading the weights once, its arithmetic. Divided among g GPUs it has r / g rows
and an all-gather behind it. What the samplers do between the calls is done by every GPU, so it does not shrink: `--overhead-us`. How many
calls a round makes and how many AR steps it finishes was measured on the demo models, guidance 3 (`car-spec generate --guidance-scale 3
--batch-size 1 --verbose`), whose tokens and cells are smaller. All of these are arguments. `--calls` takes MAR's call times as
`scripts/profile_calls.py` measured them (without guidance, so rows count double here) in place of the estimate.
"""

import argparse
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from car_spec.costmodel import LOOKAHEADS, InnerCost, Link, Times, divided, expected_steps, seconds_a_step

HALVES = 2  # guidance
# MAR-H: width, depth of encoder and decoder each, tokens, buffer; head depth and width; denoising steps
WIDTH, DEPTH, TOKENS, BUFFER, HEAD_DEPTH, HEAD_WIDTH, STEPS, TOKEN_DIM = 1280, 20, 256, 64, 12, 1536, 100, 16
# xAR-H: parameters that a token meets, tokens of a cell, cells, steps of a cell
XAR_PARAMETERS, CELL_TOKENS, CELLS, CELL_STEPS, XAR_LAYERS = 1.15e9, 64, 4, 50, 40
BYTES = 2  # of a weight


@dataclass(frozen=True)
class Device:
    flops: float
    memory: float
    launch: float

    def call(self, rows: float, flops_a_row: float, weights: float, kernels: int) -> float:
        return max(kernels * self.launch, weights * BYTES / self.memory, rows * flops_a_row / self.flops)


def mar_times(device: Device, overhead: float) -> Times:
    """Of MAR-H with guidance: every row and prefix is two."""
    block = 12 * WIDTH**2  # weights of a transformer block
    known = BUFFER + TOKENS / 2  # of the encoder, on average
    backbone_flops = 2 * DEPTH * block * (known + BUFFER + TOKENS)
    blocks, modulations = HEAD_DEPTH * 2 * HEAD_WIDTH**2, (3 * HEAD_DEPTH + 2) * HEAD_WIDTH**2
    backbone = lambda prefixes: device.call(HALVES * prefixes, backbone_flops, 2 * DEPTH * block, 2 * DEPTH * 12)
    head = lambda rows: device.call(HALVES * rows, 2 * blocks, blocks, 5 * HEAD_DEPTH)
    prepare = lambda rows: device.call(HALVES * rows * STEPS, 2 * modulations, modulations, 5)
    judge = lambda rows: device.call(HALVES * rows * STEPS, 2 * (blocks + modulations), blocks + modulations, 5 * HEAD_DEPTH + 5)
    return Times(backbone, head, prepare, judge, lambda rows: prepare(rows) + STEPS * head(rows), overhead)


def measured(path: Path, size: str, overhead: float) -> Times:
    """Straight lines between the sizes that were timed, and beyond them."""
    record = json.loads(path.read_text())
    if size not in record["seconds"]:
        raise SystemExit(f"--calls {path} has {', '.join(record['seconds'])}, not {size}")
    if record["steps"] != STEPS:
        raise SystemExit(f"--calls {path} was made with {record['steps']} steps, but the projection is for {STEPS}")
    tables = {name: sorted((float(rows), seconds) for rows, seconds in table.items()) for name, table in record["seconds"][size].items()}

    def line(name: str, rows: float) -> float:
        points = tables[name]
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        (x0, y0), (x1, y1) = next(((a, b) for a, b in pairwise(points) if rows <= b[0]), (points[-2], points[-1]))
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)

    judge = lambda rows: line("judge", HALVES * rows)
    return Times(
        backbone=lambda prefixes: line("backbone", HALVES * prefixes),
        head=lambda rows: line("head", HALVES * rows),
        prepare=lambda rows: 0.6 * judge(rows),  # its share of the arithmetic
        judge=judge,
        sequential=lambda rows: line("in turn", HALVES * rows),
        overhead=overhead,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--images", type=int, default=1, help="of a batch (default: %(default)s)")
    parser.add_argument("--tflops", type=float, default=400, help="arithmetic that matrix products reach (default: %(default)s)")
    parser.add_argument("--memory-tbs", type=float, default=3.0, help="TB a second from memory (default: %(default)s)")
    parser.add_argument("--launch-us", type=float, default=4, help="of a kernel; about 0.5 in a CUDA graph (default: %(default)s)")
    parser.add_argument("--link-gbs", type=float, default=300, help="GB a second into a GPU (default: %(default)s)")
    parser.add_argument("--latency-us", type=float, default=20, help="of an all-gather (default: %(default)s)")
    parser.add_argument("--overhead-us", type=float, default=2000, help="sampler's work a call in a token or cell (default: %(default)s)")
    parser.add_argument("--num-iter", type=int, default=256, help="MAR's AR steps (default: %(default)s)")
    acceptance = [0.74, 0.53, 0.42, 0.27, 0.22, 0.17, 0.14]
    parser.add_argument("--acceptance", nargs="+", type=float, default=acceptance, help="of a token drafted 1, 2, ... AR steps ahead")
    parser.add_argument("--inner-calls", type=float, default=13, help="of a round, to draft its tokens (default: %(default)s)")
    parser.add_argument("--inner-rows", type=float, default=140, help="states evaluated for each of them (default: %(default)s)")
    parser.add_argument("--cell-calls", type=float, default=13.4, help="xAR: calls a cell (default: %(default)s)")
    parser.add_argument("--cell-rows", type=float, default=113, help="xAR: states evaluated a cell (default: %(default)s)")
    parser.add_argument("--calls", type=Path, help="measured call times of MAR, by profile_calls.py")
    parser.add_argument("--size", default="huge", help="of MAR in --calls (default: %(default)s)")
    args = parser.parse_args()
    device = Device(args.tflops * 1e12, args.memory_tbs * 1e12, args.launch_us * 1e-6)
    link, overhead = Link(args.link_gbs * 1e9, args.latency_us * 1e-6), args.overhead_us * 1e-6

    times = measured(args.calls, args.size, overhead) if args.calls else mar_times(device, overhead)
    inner, rows = InnerCost(args.inner_calls, args.inner_rows), TOKENS / args.num_iter
    prefix_bytes, row_bytes = HALVES * TOKENS * WIDTH * BYTES, 2 * TOKEN_DIM * 4
    sequential = args.num_iter * (times.backbone(args.images) + times.sequential(args.images * rows)) / args.images
    print(
        f"PROJECTION, MAR-H, {args.num_iter} AR steps, guidance, batches of {args.images}; sequential on one GPU {sequential:.2f} s/image"
    )
    print(f"{'GPUs':>5} {'lookahead':>10} {'s/image':>9} {'faster':>8} {'MB a round and GPU':>20}")
    for gpus in args.gpus:
        shared = divided(times, gpus, link, prefix_bytes=prefix_bytes, row_bytes=row_bytes, num_steps=STEPS)
        cost = lambda n, shared=shared: seconds_a_step(n, inner, args.acceptance, shared, images=args.images, rows=rows)
        best = min(LOOKAHEADS, key=cost)
        seconds = args.num_iter * cost(best) / args.images
        states = args.images * rows * (best * args.inner_rows + (best - 1) * STEPS)
        received = (args.images * best * prefix_bytes + states * row_bytes) * (gpus - 1) / gpus
        print(f"{gpus:5} {best:10} {seconds:9.2f} {sequential / seconds:7.1f}x {received / 1e6:20.1f}", end="")
        print(f"   ({expected_steps(args.acceptance, best):.2f} AR steps a round)")

    cell = lambda states: device.call(states, 2 * XAR_PARAMETERS * CELL_TOKENS, XAR_PARAMETERS, XAR_LAYERS * 14)
    one_by_one = CELLS * CELL_STEPS * cell(HALVES * args.images) / args.images
    print(f"PROJECTION, xAR-H, {CELLS} cells of {CELL_STEPS} steps, guidance; sequential on one GPU {one_by_one:.2f} s/image")
    print(f"{'GPUs':>5} {'states a call':>14} {'s/image':>9} {'faster':>8} {'MB a call and GPU':>20}")
    for gpus in args.gpus:
        states = args.images * args.cell_rows / args.cell_calls
        sent = states * CELL_TOKENS * TOKEN_DIM * 4
        seconds = CELLS * args.cell_calls * (cell(max(1, HALVES * states / gpus)) + link.gather(gpus, sent) + overhead) / args.images
        print(f"{gpus:5} {states:14.1f} {seconds:9.2f} {one_by_one / seconds:7.1f}x {sent * (gpus - 1) / gpus / 1e6:20.2f}")


if __name__ == "__main__":
    main()
