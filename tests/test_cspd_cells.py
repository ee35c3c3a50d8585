"""CSpD of xAR: its window of chains, what it accepts and what it puts in the place of the rest, and its edges."""

import copy
import json
import math

import pytest
import torch
from conftest import TINY_XAR, random_xar
from two_sample import shared_noise, smallest_p

import car_spec.cspd_cells
from car_spec.adapters.xar import XARAdapter, guidance_of_cells
from car_spec.asd import NonFiniteError
from car_spec.cells import sample_cells
from car_spec.chain import sample_chain
from car_spec.cli import main
from car_spec.cspd import CSpDSettings, NoiseTable, log_acceptance, sample_path
from car_spec.cspd_cells import CellCSpDSampler
from car_spec.noise import Noise
from car_spec.pipeline import NonFiniteImageError
from car_spec.trace import Trace

STEPS = 6
LAST_STD = 0.04 * math.sqrt(2)  # sqrt(2 t |dt|) of the step from t = 0.04 to 0
NETWORK = dict(atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def target_xar():
    return random_xar(TINY_XAR, 0)


@pytest.fixture(scope="module")
def draft_xar():
    return random_xar(TINY_XAR, 5)


def per_image(images, first=0):
    return Noise([torch.Generator().manual_seed(100 + first + i) for i in range(images)], torch.arange(images))


def sampler(target, draft, noise, scale=1.0, **settings):
    """-> CSpD with a table drawn from `noise`, a function of a network that samples sequentially from that table, the trace."""
    images = len(noise.owner)
    adapter, drafting = (XARAdapter(model, num_inference_steps=STEPS) for model in (target, draft))
    labels = torch.arange(images) % TINY_XAR.num_classes
    table = NoiseTable.draw(noise, adapter.num_cells, STEPS, adapter.cell_dim)
    trace = Trace(images)

    def sequential(model):
        cells = iter(range(adapter.num_cells))

        def sample(chain, _draft):
            i = next(cells)
            return sample_chain(chain, table.initial[:, i].contiguous(), table.steps[:, i].contiguous())

        return sample_cells(XARAdapter(model, num_inference_steps=STEPS), labels, scale, sample)

    ours = CellCSpDSampler(adapter, drafting, labels, scale, noise, table, table, CSpDSettings(**settings), trace)
    return ours, sequential, trace


def near(model, size):
    """Another network at a distance that `size` sets."""
    other = random_xar(model.config, 77, size)
    for parameter, ours in zip(other.parameters(), model.parameters()):
        parameter.data += ours
    return other


def far(model):
    other = copy.deepcopy(model)
    other.pred.bias.data += 3.0
    return other


# --- a window of chains


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_chains_side_by_side_say_what_each_says_alone(target_xar, scale):
    adapter = XARAdapter(target_xar, num_inference_steps=STEPS)
    labels, scales = adapter.with_null_rows(torch.tensor([0, 4]), scale), guidance_of_cells(scale, 4)
    g = torch.Generator().manual_seed(1)
    known, y = torch.randn(2, 3, *adapter.cell_shape, generator=g), torch.randn(2, 3, adapter.cell_dim, generator=g)
    window = adapter.window(labels, adapter.extend(known, labels, None), 2, 1, scales[1:])
    assert window.num_rows == 6
    for k in (5, 2, 0):
        law = window(y.flatten(0, 1), k)
        for j in range(3):
            alone = adapter.chain(labels, adapter.extend(known[:, : 1 + j], labels, None), 2, scales[1 + j])(y[:, j], k)
            torch.testing.assert_close(law.mean.view_as(y)[:, j], alone.mean, **NETWORK)
            torch.testing.assert_close(law.log_std.view_as(y)[:, j], alone.log_std)


def test_cells_of_a_window_do_not_see_each_other(target_xar):
    adapter = XARAdapter(target_xar, num_inference_steps=STEPS)
    labels, g = torch.tensor([0, 4]), torch.Generator().manual_seed(1)
    cache = adapter.extend(torch.randn(2, 1, *adapter.cell_shape, generator=g), labels, None)
    chain = adapter.window(labels, cache, 2, 1, [1.0] * 3)
    y, other = torch.randn(2, 2, 3, adapter.cell_dim, generator=g)
    other[:, 1] = y[:, 1]
    first, second = (chain(x.flatten(0, 1), 3).mean.view(2, 3, -1) for x in (y, other))
    torch.testing.assert_close(first[:, 1], second[:, 1], **NETWORK)
    assert (first[:, 0] - second[:, 0]).abs().max() > 0.1


@pytest.mark.parametrize("arguments", [dict(keep=1), dict(owner=torch.tensor([0, 1]))])
def test_cells_side_by_side_are_no_sequence_to_keep(target_xar, arguments):
    x = torch.zeros(2, 1, *XARAdapter(target_xar).cell_shape)
    with pytest.raises(ValueError, match="first 0 goes with neither owner nor keep"):
        target_xar.velocity(x, torch.zeros(2, 1, TINY_XAR.width), first=0, **arguments)


@pytest.mark.parametrize("num_steps", [2, 6, 50])
def test_the_criterion_compares_last_means_at_the_stated_std_of_the_last_step(target_xar, draft_xar, num_steps):
    ends = []
    for model in (draft_xar, target_xar):
        chain = XARAdapter(model, num_inference_steps=num_steps).window(torch.tensor([1, 2]), None, 2, 0, [1.0])
        noise = torch.randn(2, num_steps, chain.dim, generator=torch.Generator().manual_seed(0))
        ends.append(sample_path(chain, noise[:, 0], noise).split(4))
        torch.testing.assert_close(ends[-1].y_0, sample_chain(chain, noise[:, 0], noise).view(8, 2))
        for k in range(1, num_steps):
            prediction = chain.predict(noise[:, 0], k)
            torch.testing.assert_close(chain.stated_log_std(prediction, k), chain.transition(prediction, noise[:, 0], k).log_std)
    draft, target = ends
    torch.testing.assert_close(target.last.log_std.exp(), torch.full((8, 2), LAST_STD))
    gap = (draft.y_0 - target.y_0).square().sum(-1)
    for variant, temperature in (("paper", 1.0), ("official", 42.0)):
        expected = -gap / (2 * (temperature * LAST_STD) ** 2)
        torch.testing.assert_close(log_acceptance(draft, target, variant), expected, rtol=1e-4, atol=1e-3)


# --- what is accepted


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("variant, rounds", [("paper", 2), ("official", 3)])  # official: one cell by the target, then 2 and 1
def test_identical_models_accept_everything(target_xar, variant, rounds, scale):
    ours, sequential, trace = sampler(target_xar, target_xar, per_image(3), scale, variant=variant, draft_length=2, prefill=0.0)
    paper = variant == "paper"
    images, expected = ours.sample(), sequential(target_xar)
    if not paper:  # the target does not see the window, the draft does: equal only where the window is one cell
        images, expected = images[:, :2], expected[:, :2]
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)
    assert trace.rounds.tolist() == [rounds] * 3
    assert not paper or all(kept == seen for kept, seen in trace.accepted_by_lag.values())


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_far_apart_models_accept_nothing_and_follow_the_targets_last_law(target_xar, scale):
    count = 600
    ours, sequential, trace = sampler(target_xar, far(target_xar), shared_noise(count, 0), scale, prefill=0.0)
    images, expected = ours.sample(), sequential(target_xar)
    assert trace.rounds.tolist() == [4] * count and trace.fallbacks == 0
    assert not any(kept for kept, _ in trace.accepted_by_lag.values())
    drawn = (images[:, 0] - expected[:, 0]) / LAST_STD  # around the target's own first cell
    assert smallest_p(drawn, torch.randn(count, *drawn.shape[1:], generator=torch.Generator().manual_seed(1))) > 0.01
    assert smallest_p(2 * drawn, torch.randn(count, *drawn.shape[1:], generator=torch.Generator().manual_seed(1))) < 1e-6


def test_draws_that_find_nothing_are_fallbacks_and_counted(target_xar):
    ours, sequential, trace = sampler(target_xar, near(target_xar, 0.002), per_image(40), max_tries=1)
    images = ours.sample()
    assert trace.fallbacks > 0 and images.isfinite().all()
    assert (images[:, 0] - sequential(target_xar)[:, 0]).abs().max() < 6 * LAST_STD


# --- what is committed


def rejecting(monkeypatch, cell, token):
    """The criterion is replaced: of the first window, one token of one cell fails in every image; everything passes later."""
    calls = []

    def judge(draft, target, variant, noise, trace):
        passes = torch.ones(len(draft.y_0), dtype=torch.bool)
        if not calls:
            passes.view(3, -1, 4)[:, cell, token] = False
        calls.append(len(passes))
        return passes

    monkeypatch.setattr(car_spec.cspd_cells, "judge", judge)
    return calls


def test_a_rejected_token_is_replaced_in_its_cell_and_the_cells_behind_are_drafted_again(target_xar, draft_xar, monkeypatch):
    calls = rejecting(monkeypatch, cell=1, token=2)
    ours, sequential, trace = sampler(target_xar, draft_xar, per_image(3), prefill=0.0)
    images, drafts = ours.sample(), sequential(draft_xar)
    assert trace.accepted_rows == [[8, 8]] * 3 and calls == [3 * 4 * 4, 3 * 2 * 4]
    kept = torch.ones(4, 4, dtype=torch.bool)
    kept[1, 2], kept[2:] = False, False
    torch.testing.assert_close(images[:, kept], drafts[:, kept], atol=1e-4, rtol=0)
    assert ((images - drafts)[:, 1, 2].abs().amax(-1) > 1e-3).all()
    assert ((images - drafts)[:, 2:].abs().amax((1, 2, 3)) > 1e-3).all()  # made for another second cell
    assert trace.accepted_by_lag == {0: [24, 24], 1: [21, 24], 2: [0, 12], 3: [0, 12]}


def test_the_authors_variant_replaces_in_place_and_keeps_what_follows(target_xar, draft_xar, monkeypatch):
    calls = rejecting(monkeypatch, cell=0, token=1)
    ours, _, trace = sampler(target_xar, draft_xar, per_image(3), variant="official", draft_length=4, prefill=0.0)
    seen = []
    monkeypatch.setattr(ours, "_drafted", lambda *a, real=ours._drafted: seen.append(real(*a)[0]) or real(*a))
    images = ours.sample()
    assert trace.accepted_rows == [[4, 12]] * 3 and calls == [3 * 3 * 4]
    kept = torch.ones(4, 4, dtype=torch.bool)
    kept[1, 1] = False
    assert torch.equal(images[:, kept], seen[0][:, kept]) and not torch.equal(images[:, 1, 1], seen[0][:, 1, 1])


@pytest.mark.parametrize("variant, known", [("paper", 4 - 1), ("official", 1)])
def test_the_target_sees_the_drafts_of_a_window_in_the_papers_variant_alone(target_xar, draft_xar, monkeypatch, variant, known):
    ours, _, _ = sampler(target_xar, draft_xar, per_image(2), variant=variant, prefill=0.25 if variant == "paper" else 0.0)
    seen = []
    monkeypatch.setattr(
        ours, "_target", lambda i, cache, *a, real=ours._target: seen.append(cache.num_tokens // 4 if cache else 0) or real(i, cache, *a)
    )
    ours.sample()
    assert seen[:2] == [0, known]  # the pre-filled cell, then the window of the three others


# --- the edges


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("prefill, draft_length", [(0.0, 1), (0.0, 99), (0.5, 2), (1.0, 4)])
def test_draft_length_and_prefill_may_be_anything(target_xar, draft_xar, variant, scale, prefill, draft_length):
    settings = dict(variant=variant, prefill=prefill, draft_length=draft_length)
    ours, sequential, trace = sampler(target_xar, draft_xar, per_image(3), scale, **settings)
    images = ours.sample()
    assert images.isfinite().all() and [sum(rows) for rows in trace.accepted_rows] == [16] * 3
    if prefill == 1.0:
        torch.testing.assert_close(images, sequential(target_xar), atol=1e-5, rtol=0)
        assert trace.draft_calls == 0 and trace.sequential_calls == 4 * STEPS + 3


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_an_image_does_not_depend_on_its_batch(target_xar, variant, scale):
    draft = near(target_xar, 0.003)
    together, _, trace = sampler(target_xar, draft, per_image(5), scale, variant=variant, prefill=0.0, draft_length=3)
    images = together.sample()
    assert variant == "official" or len({tuple(rows) for rows in trace.accepted_rows}) > 2  # they go different ways
    for i in range(5):
        alone, _, own = sampler(target_xar, draft, per_image(1, i), scale, variant=variant, prefill=0.0, draft_length=3)
        alone.labels = torch.tensor([i])
        torch.testing.assert_close(alone.sample()[0], images[i], atol=1e-4, rtol=0)
        assert own.accepted_rows == [trace.accepted_rows[i]]


def test_a_nan_stops_and_names_the_image(target_xar, draft_xar):
    ours, _, _ = sampler(target_xar, draft_xar, per_image(3))
    ours.table.initial[1, 2, 0] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        ours.sample()
    assert caught.value.rows.tolist() == [1]


# --- pipeline and command line


def seeded(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("settings", [{}, dict(variant="official", draft_length=2), dict(aligned=False), dict(prefill=1.0)])
def test_settings_of_an_output_make_the_same_images_again(tiny_xar_pipeline, settings):
    first = tiny_xar_pipeline([0, 9], sampler="cspd", generator=seeded(1, 2), output_type="latent", **settings)
    again = tiny_xar_pipeline([0, 9], generator=seeded(1, 2), output_type="latent", **first.settings)
    assert torch.equal(first.images, again.images) and first.settings["sampler"] == "cspd"
    if settings.get("prefill") == 1.0:
        alone = tiny_xar_pipeline([0, 9], sampler="sequential", generator=seeded(1, 2), output_type="latent")
        torch.testing.assert_close(first.images, alone.images, atol=1e-5, rtol=0)
        assert first.trace.sequential_calls == alone.trace.sequential_calls


def test_without_a_draft_model_it_is_refused(tiny_xar_pipeline):
    tiny_xar_pipeline.draft = None
    with pytest.raises(ValueError, match="sampler 'cspd' needs a draft model"):
        tiny_xar_pipeline([0], sampler="cspd")


def test_an_image_that_is_not_finite_is_named(tiny_xar_pipeline):
    tiny_xar_pipeline.model.class_emb.weight[3] = float("nan")
    with pytest.raises(NonFiniteImageError) as caught:
        tiny_xar_pipeline([1, 3, 3], sampler="cspd", generator=seeded(0, 1, 2))
    assert caught.value.indices == [1, 2]


def test_cspd_of_an_xar_runs_from_the_command_line_and_says_that_it_is_approximate(tiny_xar_file, tmp_path, capsys):
    files = ["--model", str(tiny_xar_file), "--draft", str(tiny_xar_file)]
    command = [
        "generate",
        *files,
        "--sampler",
        "cspd",
        "--num-images",
        "3",
        "--draft-length",
        "2",
        "--verbose",
        "--out",
        str(tmp_path / "a"),
    ]
    assert main(command) == 0
    assert "squared distance of drafts to the target's tokens: " in capsys.readouterr().out
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["environment"]["law of the images"] == "approximate" and manifest["settings"]["draft_length"] == 2
    assert main(["bench", *files, "--repeats", "1", "--only", "CSpD", "--out", str(tmp_path / "b")]) == 0
    names = [run["name"] for run in json.loads((tmp_path / "b" / "bench.json").read_text())["runs"]]
    assert names == ["sequential", "CSpD (approximate), paper", "CSpD (approximate), official"]
    tables = ["--tables", "alignment", "temperature", "--out", str(tmp_path / "c")]
    assert main(["ablate", *files, *tables]) == 2 and "temperature 0.8 is not possible with xAR" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_alignment_brings_draft_and_target_of_the_demo_closer(demo_xar, variant):
    run = lambda aligned: (
        demo_xar(
            [3, 5],
            sampler="cspd",
            variant=variant,
            aligned=aligned,
            num_inference_steps=6,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).trace.token_distances
    )
    mean = lambda distances: sum(distances) / len(distances)
    assert mean(run(True)) < 0.8 * mean(run(False))
