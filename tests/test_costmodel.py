"""The choice of lookahead follows the shape of the machine's call times and the acceptance of the pilot."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from car_spec.cli import main
from car_spec.costmodel import CallTimes, InnerCost, Link, Times, choose, divided, expected_steps, seconds_a_step

INNER = {8: InnerCost(calls=20, rows=135), 16: InnerCost(calls=14, rows=160)}
STEPS = 100


def best(backbone, head, acceptance=(0.9, 0.85, 0.8, 0.75), images=1):
    judge, sequential = lambda rows: head(STEPS * rows), lambda rows: STEPS * head(rows)
    times = Times(backbone, head, prepare=lambda rows: 0.0, judge=judge, sequential=sequential)
    return choose(acceptance, INNER, times, images=images, rows=1, num_iter=64)


def test_a_machine_that_waits_drafts_far_ahead():
    lookahead, window = best(lambda rows: 1.0, lambda rows: 1.0)
    assert lookahead >= 8 and window == 16


def test_a_full_machine_samples_sequentially():
    assert best(lambda rows: float(rows), lambda rows: float(rows)) is None


def test_between_them_the_lookahead_shrinks_as_batches_grow():
    head = lambda rows: 1 + rows / 200
    backbone = lambda rows: 1 + rows
    small, large = best(backbone, head), best(backbone, head, images=64)
    assert small is not None and (large is None or large[0] < small[0])


def test_poor_acceptance_drafts_less():
    head, backbone = lambda rows: 1 + rows / 500, lambda rows: 1 + rows / 2
    assert best(backbone, head, (0.3, 0.1, 0.02))[0] < best(backbone, head, (0.95, 0.93, 0.92))[0]


def test_expected_steps_go_on_beyond_the_pilots_lags():
    assert expected_steps([0.9, 0.8], 1) == 1
    assert expected_steps([0.9, 0.8], 3) == pytest.approx(2.7)
    assert expected_steps([0.5, 0.25], 5) == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)
    assert expected_steps([], 3) == 1


def test_call_times_are_interpolated_and_stop_measuring_where_the_machine_is_full(monkeypatch):
    asked = []
    times = CallTimes(lambda rows: None, lambda: None, repeats=1)
    monkeypatch.setattr(times, "_timed", lambda rows: asked.append(rows) or (1.0 if rows <= 4 else rows / 4))
    assert times(3) == 1.0
    assert times(6) == pytest.approx(1.5)
    assert times(1024) == 256.0
    assert max(asked) <= 16


def test_auto_writes_what_it_chose_and_a_resumed_run_follows(tiny_file, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    flags = ["generate", "--model", str(tiny_file), "--out", str(out), "--num-inference-steps", "4", "--lookahead", "auto"]
    assert main([*flags, "--num-images", "2"]) == 0
    settings = json.loads((out / "manifest.json").read_text())["settings"]
    assert settings["sampler"] == "sequential" or isinstance(settings["lookahead"], int)
    monkeypatch.setattr("car_spec.pipeline.tune", None)  # measuring again would fail on this
    assert main([*flags, "--num-images", "3"]) == 0
    assert "1 images made, 2 were there already" in capsys.readouterr().out


def test_auto_measures_once_and_says_what_it_chose(tiny_pipeline, monkeypatch):
    run = lambda: tiny_pipeline([0, 1], num_inference_steps=4, lookahead="auto", output_type="latent")
    output = run()
    assert output.images.shape == (2, 4, 4, 4) and output.images.isfinite().all()
    assert "auto" not in output.settings.values()
    monkeypatch.setattr("car_spec.pipeline.tune", None)  # measuring again would fail on this
    assert run().settings == output.settings


def test_auto_keeps_a_window_that_was_given(tiny_pipeline, monkeypatch):
    seen = []
    monkeypatch.setattr("car_spec.pipeline.tune", lambda *args: seen.append(args[6]))
    settings = tiny_pipeline.settings(lookahead="auto", window=4)
    assert settings["lookahead"] == "auto" and tiny_pipeline.tune(3, settings)["sampler"] == "sequential"
    assert seen == [(4,)]


def test_auto_refuses_a_draft_model(tiny_pipeline):
    with pytest.raises(ValueError, match="lookahead 'auto' conflicts with drafter 'model'"):
        tiny_pipeline.settings(lookahead="auto", drafter="model")


LINEAR = Times(
    backbone=lambda p: 1.0 * p, head=lambda r: 1.0 * r, prepare=lambda r: 0.0, judge=lambda r: 10.0 * r, sequential=lambda r: 100.0 * r
)
FREE = Link(bandwidth=float("inf"), latency=0.0)


def test_processes_divide_a_calls_rows_and_pay_for_the_link():
    by_four = divided(LINEAR, 4, FREE, prefix_bytes=1, row_bytes=1, num_steps=10)
    assert (by_four.backbone(8), by_four.head(8), by_four.judge(8), by_four.sequential(8)) == (2, 2, 20, 800)
    assert by_four.backbone(5) == 2 and by_four.head(1) == 1  # a prefix or a row is not divided further
    slow = divided(LINEAR, 4, Link(bandwidth=10.0, latency=0.5), prefix_bytes=40, row_bytes=4, num_steps=10)
    assert slow.backbone(8) == pytest.approx(2 + 0.5 + 8 * 40 * 0.75 / 10)
    assert slow.judge(8) == pytest.approx(20 + 0.5 + 8 * 10 * 4 * 0.75 / 10)
    assert divided(LINEAR, 1, Link(1.0, 9.0), prefix_bytes=1, row_bytes=1, num_steps=10).backbone(8) == 8


def test_what_is_not_divided_limits_the_gain():
    cost = lambda overhead, ranks: seconds_a_step(
        8,
        INNER[8],
        (0.9,) * 7,
        divided(Times(**{**vars(LINEAR), "overhead": overhead}), ranks, FREE, prefix_bytes=1, row_bytes=1, num_steps=10),
        images=1,
        rows=4,
    )
    assert cost(0.0, 1) / cost(0.0, 8) == pytest.approx(8, rel=0.05)
    assert cost(100.0, 1) / cost(100.0, 8) < 3


def project(capsys, monkeypatch, *flags):
    script = Path(__file__).parents[1] / "scripts" / "scaling.py"
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, flags)])
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    titles = [i for i, line in enumerate(lines) if line.startswith("PROJECTION, ")]
    return [[float(line.split()[2]) for line in lines[start + 2 : stop]] for start, stop in zip(titles, [*titles[1:], len(lines)])]


def test_the_projection_gains_from_gpus_and_loses_by_a_slow_link(capsys, monkeypatch):
    mar, xar = project(capsys, monkeypatch)
    assert len(mar) == len(xar) == 4 and mar == sorted(mar, reverse=True) and xar == sorted(xar, reverse=True)
    slow, _ = project(capsys, monkeypatch, "--link-gbs", 0.1)
    assert slow[0] == mar[0] and slow[-1] > mar[-1]


def test_the_projection_takes_measured_call_times(capsys, monkeypatch, tmp_path):
    flat = {"head": {"1": 0.001, "8": 0.001}, "in turn": {"1": 0.1}, "judge": {"1": 0.01}, "backbone": {"1": 0.02}}
    (tmp_path / "calls.json").write_text(json.dumps({"steps": 100, "seconds": {"huge": flat}}))
    flags = ["--calls", tmp_path / "calls.json", "--gpus", 1, "--overhead-us", 0, "--acceptance", 1]
    (one,), _ = project(capsys, monkeypatch, *flags)
    draft, verify = 0.006 + 13 * 0.001, 0.01
    assert one == pytest.approx(256 * (0.02 + draft + verify) / 32, abs=0.01)  # the longest lookahead, all of it accepted
    with pytest.raises(SystemExit, match="has huge, not base"):
        project(capsys, monkeypatch, *flags, "--size", "base")
