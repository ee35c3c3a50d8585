"""What a device makes of the calls that speculation changes: many small ones in turn, or one wide one.

    python scripts/profile_calls.py --sizes base large huge --device cuda --dtype bfloat16 --json calls.json

For MAR of the released sizes with random weights, medians in seconds:
- the head, for some tokens: `--steps` calls in turn, as sequential sampling makes them, and one call with all steps, as verification does;
- the backbone: one prefix, and several in one call.
The JSON goes to `scripts/scaling.py --calls`, in place of its estimates.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from car_spec.adapters.mar import MARAdapter
from car_spec.execution import Execution, machine
from car_spec.flags import DTYPES, add_device_flags, add_execution_flags, choose_device
from car_spec.models.mar import MAR, MARConfig
from car_spec.models.presets import PRESETS
from car_spec.pipeline import synchronise

SIZES = {"base": (768, 12, 6, 1024), "large": (1024, 16, 8, 1280), "huge": (1280, 20, 12, 1536)}  # width, depth, head depth and width


def random_mar(size: str, device: torch.device, dtype: torch.dtype) -> MAR:
    width, depth, head_depth, head_width = SIZES[size]
    config = MARConfig(
        num_tokens=256,
        token_dim=16,
        num_classes=1000,
        width=width,
        encoder_depth=depth,
        decoder_depth=depth,
        num_heads=PRESETS["mar", width].num_heads or 0,
        head_width=head_width,
        head_depth=head_depth,
    )
    with torch.device("meta"):
        model = MAR(config)
    model = model.to_empty(device=device).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.eval().requires_grad_(False)


def median_seconds(call, device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):  # the first call of a size is slower than those that follow
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@torch.inference_mode()
def measure(model: MAR, args: argparse.Namespace, execution: Execution, device: torch.device) -> dict[str, dict[int, float]]:
    """-> seconds by number of rows (head) and prefixes (backbone); guidance doubles neither here."""
    adapter = MARAdapter(model, num_inference_steps=args.steps, run=execution.run_head)
    steps, every_step = list(range(args.steps)), torch.arange(args.steps, device=device)[:, None]
    seconds_of = lambda call: median_seconds(call, device, args.repeats)

    def of_head(rows: int) -> tuple[float, float, float]:
        chain = adapter.chain(torch.randn(rows, 1, model.config.width, device=device))
        states = torch.randn(args.steps, rows, 16, device=device)
        return (
            seconds_of(lambda: chain.predict(states[0], steps[-1])),
            seconds_of(lambda: [chain.predict(states[k], k) for k in steps]),
            seconds_of(lambda: chain.predict(states, every_step)),
        )

    def of_backbone(prefixes: int) -> float:
        tokens, vectors = torch.randn(prefixes, 256, 16, device=device), model.class_emb.weight[:prefixes, None]
        mask = (torch.arange(256, device=device) % 2).float().expand(prefixes, -1)
        return seconds_of(lambda: adapter.conditions(tokens, mask, vectors))

    head = {rows: of_head(rows) for rows in args.rows}
    seconds = {name: {rows: times[i] for rows, times in head.items()} for i, name in enumerate(("head", "in turn", "judge"))}
    return seconds | {"backbone": {prefixes: of_backbone(prefixes) for prefixes in args.prefixes}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="tokens of a head call (default: %(default)s)")
    parser.add_argument("--prefixes", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="of a backbone call (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="denoising steps (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls (default: %(default)s)")
    add_device_flags(parser, "networks")
    parser.add_argument("--json", type=Path, help="write the figures there")
    add_execution_flags(parser)
    args = parser.parse_args()
    device, execution = choose_device(args.device), Execution(args.compile, args.cuda_graphs)
    execution.check(device)
    record = {"torch": torch.__version__, "dtype": args.dtype, "steps": args.steps, **machine(device), "seconds": {}}
    for size in args.sizes:
        model = random_mar(size, device, DTYPES[args.dtype])
        execution.prepare(model)
        record["seconds"][size] = seconds = measure(model, args, execution, device)
        print(f"MAR {size}, {args.dtype}, {machine(device)}, ms")
        print(f"{'tokens':>8} {'one head call':>14} {f'{args.steps} in turn':>14} {'one wide call':>14} {'faster':>8}")
        for rows, wide in seconds["judge"].items():
            one, turn = seconds["head"][rows], seconds["in turn"][rows]
            print(f"{rows:8} {1e3 * one:14.3f} {1e3 * turn:14.3f} {1e3 * wide:14.3f} {turn / wide:7.1f}x")
        print(f"{'prefixes':>8} {'one call':>14} {'as many calls':>14} {'faster':>8}")
        for prefixes, together in seconds["backbone"].items():
            alone = prefixes * seconds["backbone"][min(seconds["backbone"])] / min(seconds["backbone"])
            print(f"{prefixes:8} {1e3 * together:14.3f} {1e3 * alone:14.3f} {alone / together:7.1f}x")
        del model
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
