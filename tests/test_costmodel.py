"""The choice of lookahead follows the shape of the machine's call times and the acceptance of the pilot."""

import json

import pytest

from car_spec.cli import main
from car_spec.costmodel import CallTimes, InnerCost, Times, choose, expected_steps

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
