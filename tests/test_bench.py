"""The comparison of samplers counts, times and judges what it says."""

import json

import pytest
import torch

from car_spec.bench import HEADER, contenders, measure_speed, table_rows
from car_spec.cli import main
from car_spec.eval.distances import energy_test, frechet_distance, principal_components


def test_frechet_distance_of_two_gaussians_is_the_analytic_one():
    g = torch.Generator().manual_seed(0)
    first, second = torch.randn(200_000, 3, generator=g), 2 * torch.randn(200_000, 3, generator=g) + torch.tensor([1.0, 0.0, 0.0])
    assert frechet_distance(first, second) == pytest.approx(1 + 3 * (1 + 4 - 2 * 2), rel=0.02)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)


def test_frechet_distance_of_a_rank_deficient_set_is_finite():
    g = torch.Generator().manual_seed(0)
    value = frechet_distance(torch.randn(4, 8, generator=g), torch.randn(4, 8, generator=g))
    assert 0 < value < 100


def test_energy_test_sees_a_shift_and_not_chance():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 300, 4, generator=g)
    assert energy_test(x[0], x[1]) > 0.01
    assert energy_test(x[0], x[2] + 0.4) <= 0.01
    assert energy_test(x[0], 1.5 * x[2]) <= 0.02


def test_principal_components_are_ordered_and_orthonormal():
    x = torch.randn(500, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 2.0, 0.1, 3.0])
    mean, directions = principal_components(x, 3)
    projected = (x.double() - mean) @ directions
    assert projected.var(0).diff().max() < 0
    torch.testing.assert_close(directions.T @ directions, torch.eye(3, dtype=torch.float64))


def test_every_contender_is_measured_in_turns(tiny_pipeline):
    runs = contenders(tiny_pipeline, {"num_iter": 8, "num_inference_steps": 60}, {"lookahead": 3, "window": 4}, 2)
    names = [run.name for run in runs]
    assert names.pop().startswith("lossless, auto: ")
    assert names == [
        "sequential",
        "sequential, 4 AR steps",
        "sequential, 2 AR steps",
        "sequential, 50 denoising steps",
        "sequential, 25 denoising steps",
        "lossless, token-wise",
        "lossless, block",
    ]
    order = []
    call = tiny_pipeline.__class__.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_pipeline.__class__, "__call__", lambda self, *a, **k: order.append(k.get("sampler")) or call(self, *a, **k))
        measure_speed(tiny_pipeline, runs, batch_size=2, repeats=2, seed=0, on_run=lambda: None)
    assert order == (["sequential"] * 5 + ["lossless"] * 2 + [runs[-1].settings["sampler"]]) * 3
    assert all(len(run.seconds) == len(run.counts) == 2 for run in runs)
    assert runs[0].median_count("sequential calls a batch") == 8 * 61
    assert runs[-2].median_count("sequential calls a batch") < 8 * 61
    assert all(len(row) == len(HEADER) for row in table_rows(runs))


def test_bench_writes_table_figures_and_plot(tiny_file, tmp_path, capsys):
    flags = ["--num-iter", "4", "--num-inference-steps", "5", "--repeats", "1", "--images", "20", "--out", str(tmp_path)]
    assert main(["bench", "--model", str(tiny_file), *flags, "--only", "block", "2 AR steps"]) == 0
    out = capsys.readouterr().out
    assert "lossless, block" in out and "Frechet" in out and "guidance 1, batch 1" in out
    runs = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert [run["name"] for run in runs] == ["sequential", "sequential, 2 AR steps", "lossless, block"]
    assert all(0 < run["p_value"] <= 1 for run in runs)
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--repeats", "0"], "--repeats 0 is below 1"),
        (["--images", "3"], "--images 3 is too few"),
        (["--lookahead", "0"], "lookahead 0 is below 1"),
        (["--num-iter", "99"], "num_iter 99 is outside 1..16"),
    ],
)
def test_bad_bench_flags_are_one_sentence(tiny_file, tmp_path, capsys, flags, sentence):
    assert main(["bench", "--model", str(tiny_file), "--out", str(tmp_path / "x"), *flags]) == 2
    assert sentence in capsys.readouterr().err
