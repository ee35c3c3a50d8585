"""Pictures of what was measured. Needs matplotlib, which the extra `bench` brings."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from car_spec.trace import Trace

if TYPE_CHECKING:
    from car_spec.ablation import Measurement
    from car_spec.bench import Contender


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_pareto(runs: Sequence["Contender"], path: Path) -> None:
    """Quality over time of the samplers of a bench: down and left is better."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for run in runs:
        if run.frechet is not None:
            kind = "C1" if run.name.startswith("lossless") else "C0"
            axes.scatter(run.median_seconds, run.frechet, color=kind, s=50)
            axes.annotate(run.name, (run.median_seconds, run.frechet), xytext=(6, 4), textcoords="offset points", fontsize=9)
    axes.set(xlabel="seconds an image (median)", ylabel="Fréchet distance to the sequential sampler (latents)")
    axes.margins(x=0.3, y=0.15)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_alignment(measurements: Sequence["Measurement"], path: Path) -> None:
    """Acceptance and token distance over draft length, with shared and with independent noise."""
    pyplot = _pyplot()
    figure, (accepted, distance) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    shown = [m for m in measurements if m.table == "alignment"]
    for variant, kind in dict.fromkeys((m.variant, m.setting.split(", ")[1]) for m in shown):
        chosen = [m for m in shown if m.variant == variant and kind in m.setting]
        lengths = [int(m.setting.split(",")[0].removeprefix("draft length ")) for m in chosen]
        style = "o-" if variant == "paper" else "s--"
        accepted.plot(lengths, [m.accepted for m in chosen], style, label=f"{variant}, {kind}")
        distance.plot(lengths, [m.distance for m in chosen], style, label=f"{variant}, {kind}")
    accepted.set(xlabel="draft length, AR steps", ylabel="share of drafted tokens accepted", ylim=(0, None))
    distance.set(xlabel="draft length, AR steps", ylabel="squared distance, draft to target token", ylim=(0, None))
    for axes in (accepted, distance):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_batches(comparison: dict[int, list["Contender"]], path: Path) -> None:
    """Seconds an image over the batch size, a line a sampler."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for i, run in enumerate(next(iter(comparison.values()))):
        style = {"lossless": "o-", "CSpD": "s--"}.get(run.name.split()[0].rstrip(","), "x:")
        axes.plot(list(comparison), [runs[i].median_seconds for runs in comparison.values()], style, label=run.name)
    axes.set(xscale="log", yscale="log", xlabel="images at a time", ylabel="seconds an image (median)")
    axes.set_xticks(list(comparison), [str(size) for size in comparison])
    axes.xaxis.set_minor_locator(pyplot.NullLocator())
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_trace(traces: Sequence[Trace], path: Path) -> None:
    """Tokens committed a round over the generation; how stale the condition was that drafted each token; rows that stood by lag."""
    pyplot = _pyplot()
    figure, (over_time, over_image, by_lag) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for trace in traces:
        for rows in trace.accepted_rows:
            known = torch.tensor([0, *rows]).cumsum(0)[:-1]
            over_time.plot(known, rows, ".-", color="C0", alpha=max(0.05, 1 / len(trace.accepted_rows)))
    over_time.set(xlabel="tokens known", ylabel="tokens committed in the round", title="over the generation")

    lag = torch.cat([trace.lag for trace in traces]).float().mean(0)  # (N,)
    side = round(len(lag) ** 0.5)
    shown = over_image.imshow(lag.view(side, side), cmap="viridis")
    figure.colorbar(shown, ax=over_image, label="AR steps ahead of the exact condition")
    over_image.set(title="how far ahead each token was accepted, mean", xticks=[], yticks=[])

    lags = sorted({lag for trace in traces for lag in trace.accepted_by_lag})
    share = [
        sum(trace.accepted_by_lag[lag][0] for trace in traces) / max(1, sum(trace.accepted_by_lag[lag][1] for trace in traces))
        for lag in lags
    ]
    by_lag.bar(lags, share)
    by_lag.set(xlabel="AR steps ahead", ylabel="share of drafted tokens that stood", ylim=(0, 1), title="acceptance by lag")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
