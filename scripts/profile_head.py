"""What hoisting gains: a call of the diffusion head as the chain makes it, beside the same network written plainly.

    python scripts/profile_head.py [--model demo] [--images 1] [--guidance-scale 1]

Both are timed in turns in one process; the figures are medians. `plain` is one call of the network module with its timestep and
condition, `hoisted` the same values from the chain's modulations; `set-up` is what hoisting costs once an AR step. The last
lines profile the sampling of one image.
"""

import argparse
import statistics
import time

import torch

from car_spec import load_pipeline
from car_spec.adapters.mar import MARAdapter


def timed(call):
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--images", type=int, default=1, help="rows of the chain, one token an image")
    parser.add_argument("--repeats", type=int, default=400)
    args = parser.parse_args()

    pipeline = load_pipeline(args.model)
    adapter, net, rows = MARAdapter(pipeline.model), pipeline.model.diffloss.net, args.images
    generator = torch.Generator().manual_seed(0)
    condition = torch.randn(rows, pipeline.model.config.width, generator=generator)
    y = torch.randn(rows, adapter.token_dim, generator=generator)
    timesteps = adapter.head.schedule.timestep_map

    with torch.inference_mode():
        chain = adapter.chain(condition[:, None])
        calls = {
            "plain": lambda k: net(y, timesteps[k].expand(rows), condition),
            "hoisted": lambda k: adapter.head(net.input_proj(y), chain.hoisted[k]),
            "transition": lambda k: chain(y, k),
            "set-up": lambda k: adapter.chain(condition[:, None]),
        }
        torch.testing.assert_close(calls["plain"](50), calls["hoisted"](50), atol=1e-4, rtol=1e-4)
        times = {name: [] for name in calls}
        for i in range(args.repeats):
            for name, call in calls.items():
                times[name].append(timed(lambda call=call, i=i: call(1 + i % 99)))
        median = {name: statistics.median(values) for name, values in times.items()}
        steps = adapter.head.num_steps
        share = median["hoisted"] + median["set-up"] / steps
        print(f"{rows} rows, medians of {args.repeats}, {torch.get_num_threads()} threads")
        print(f"plain head call         {median['plain']:8.1f} us")
        print(f"hoisted head call       {median['hoisted']:8.1f} us")
        print(f"set-up an AR step       {median['set-up']:8.1f} us, {median['set-up'] / steps:.1f} us a call over {steps} steps")
        print(f"hoisted, set-up shared  {share:8.1f} us: {median['plain'] / share:.2f} times as fast as plain")
        print(f"whole transition        {median['transition']:8.1f} us (guidance aside: head, clean sample, mean, std)")

        labels = [0] * args.images
        pipeline(labels, output_type="latent", num_iter=4, generator=generator)
        with torch.profiler.profile() as profile:
            pipeline(labels, output_type="latent", num_iter=4, generator=generator)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=40))


if __name__ == "__main__":
    main()
