"""CSpD: the authors' recorded numbers, the alignment theorem, and what happens at the edges."""

import copy
import json
import math

import pytest
import torch
from conftest import golden, golden_json, golden_state
from two_sample import shared_noise, smallest_p

from car_spec import load_pipeline
from car_spec.adapters.mar import MARAdapter
from car_spec.cli import main
from car_spec.cspd import (
    CSpDSampler,
    CSpDSettings,
    NoiseTable,
    PathEnd,
    draw_modified,
    log_acceptance,
    residual_acceptance,
)
from car_spec.engine import DraftModel
from car_spec.gaussian import Gaussian
from car_spec.models.mar import MAR
from car_spec.noise import Noise
from car_spec.sequential import sample_sequential
from car_spec.trace import Trace


@pytest.fixture(scope="module")
def cases():
    return golden("cspd_cases")


def ends(cases, prefix):
    """(draft, target) of recorded means, stds and log-std sums."""
    out = []
    for who in ("draft", "target"):
        mean, std = cases[f"{prefix}/{who}_mean"], cases[f"{prefix}/{who}_std"]
        out.append(PathEnd(cases[f"{prefix}/x"], Gaussian(mean, std.log()), cases[f"{prefix}/{who}_logstd_sum"]))
    return out


# --- the recorded formulas


@pytest.mark.parametrize("dim", ["dim4", "dim16"])
def test_official_acceptance_ratios_are_the_recorded_ones(cases, dim):
    ratio, families = cases[f"{dim}/T42/ratio"], golden_json("cspd_cases")["families"]
    ours = log_acceptance(*ends(cases, dim), "official")
    usual = torch.tensor([family != "extreme" for family in families])
    assert ours.isfinite().all()  # also where the naive product overflows
    assert ratio[usual].isfinite().all() and (ratio[usual] > 1e-30).sum() > 30
    compared = usual & (ratio > 1e-30)
    torch.testing.assert_close(ours[compared], ratio[compared].log(), atol=1e-4, rtol=1e-4)
    for value, log_ratio in zip(ratio[~usual], ours[~usual]):  # an infinite ratio is a large one, a zero a small one
        assert value.isnan() or (
            log_ratio > 80 if value.isinf() else log_ratio == pytest.approx(value.log().item(), abs=1e-3) or value == 0
        )


@pytest.mark.parametrize("dim", ["dim4", "dim16"])
def test_official_residual_acceptance_is_the_recorded_one(cases, dim):
    recorded, families = cases[f"{dim}/residual_accept"], golden_json("cspd_cases")["families"]
    ours = residual_acceptance(*ends(cases, dim), cases[f"{dim}/y"], "official")
    compared = torch.tensor([family != "extreme" for family in families]) & recorded.isfinite()
    torch.testing.assert_close(ours[compared], recorded[compared], atol=1e-4, rtol=1e-3)
    assert ((ours >= 0) & (ours <= 1)).all()


def test_a_rejected_token_is_never_zero_where_the_authors_code_leaves_zeros(cases):
    draft, target = ends(cases, "spec")
    rejected = cases["spec/ratio"] <= cases["spec/guess"]
    zeros = (cases["spec/out"] == 0).all(-1)
    assert (rejected & zeros).any()
    index = rejected.nonzero()[:, 0]
    noise = Noise([torch.Generator().manual_seed(0)], torch.zeros(len(index), dtype=torch.int64))
    replaced, fallbacks = draw_modified(draft.at(index), target.at(index), "official", noise, max_tries=100)
    assert fallbacks == zeros.sum() and (replaced != 0).all()


# --- the recorded run of the authors' sampler


@pytest.fixture(scope="module")
def draft_mar(golden_mar, cases):
    model = copy.deepcopy(golden_mar)
    model.load_state_dict(golden_state("mar_tiny") | {k.removeprefix("draft/"): v for k, v in cases.items() if k.startswith("draft/")})
    return model


class RecordedNoise(Noise):
    """The uniforms and normals that the authors' run drew: per verification a guess a token, then tries of the residual loop.

    Recorded in the order of positions; the sampler asks in generation order.
    """

    def __init__(self, cases, prefix, order):
        self.cases, self.prefix, self.order, self.stage, self.tokens = cases, prefix, order, -1, None

    def of(self, sequences):
        other = copy.copy(self)
        if self.tokens is None:  # images, as the sampler counts rows: map them to the recorded tokens
            root = self
            other.root, other.images = root, sequences
        else:
            other.tokens = self.tokens[sequences]
        return other

    def uniform(self):
        if self.tokens is not None:
            return self.cases[f"{self.prefix}/verify{self.stage}/eps"][0][self.tokens]
        self.root.stage += 1
        return self.cases[f"{self.prefix}/verify{self.root.stage}/guess"][self.root.lookup(self.root.stage)]

    def normal(self, dim):
        return self.cases[f"{self.prefix}/verify{self.stage}/noise"][0][self.tokens]

    def lookup(self, stage):
        """Index of each judged row, in generation order, into the recorded (image, position) pairs."""
        pairs = self.cases[f"{self.prefix}/verify{stage}/index"].tolist()
        ranked = sorted(range(len(pairs)), key=lambda i: (pairs[i][0], self.order[pairs[i][0]].tolist().index(pairs[i][1])))
        return torch.tensor(ranked)


class RecordedSampler(CSpDSampler):
    """Hands the recorded draws of a verification to the rejected tokens, and keeps what was judged."""

    def _judge(self, drafted, target):
        self.judged = getattr(self, "judged", [])
        self.judged.append((drafted, target, log_acceptance(drafted.end, target, "official")))
        return super()._judge(drafted, target)

    def _replace(self, drafted, target, rejected):
        recorded = copy.copy(self.noise)
        recorded.tokens = self.noise.lookup(self.noise.stage)[rejected]
        draft, target = drafted.end.at(rejected.nonzero()[:, 0]), target.at(rejected.nonzero()[:, 0])
        out, fallbacks = draw_modified(draft, target, "official", recorded, max_tries=1)
        assert fallbacks == 0
        return out


@pytest.mark.parametrize("name", ["cfg1", "cfg25"])
def test_the_official_variant_repeats_the_authors_run(golden_mar, draft_mar, cases, name):
    run, prefix = golden_json("cspd_cases")["runner"]["runs"][name], f"run/{name}"
    make = lambda model: MARAdapter(model, num_inference_steps=8, temperature=run["temperature"])
    adapter, draft_adapter, labels = make(golden_mar), make(draft_mar), cases["run/labels"]
    steps = adapter.ar_steps(cases["run/orders"], run["num_iter"], run["cfg"], run["schedule"])
    vectors = lambda model: (model.class_vectors(labels, 2), model.class_vectors(None, 2))
    order = torch.cat([step.positions for step in steps], 1)
    table = NoiseTable(cases["run/init_noise"], cases["run/step_noise"])
    settings = CSpDSettings(variant="official", draft_length=run["num_draft"], prefill=run["ratio"])
    noise = RecordedNoise(cases, prefix, order)
    draft = DraftModel(draft_adapter, *vectors(draft_mar))
    sampler = RecordedSampler(adapter, steps, *vectors(golden_mar), noise, table, table, settings, Trace(2), draft)
    tokens = sampler.sample()

    assert len(sampler.judged) == len(cases[f"{prefix}/verify_steps"]) == 4
    for i, (drafted, target, log_ratio) in enumerate(sampler.judged):
        at, recorded = noise.lookup(i), cases[f"{prefix}/verify{i}/ratio"]
        pairs = torch.stack([drafted.image, order[drafted.image, drafted.row]], 1)
        assert torch.equal(pairs, cases[f"{prefix}/verify{i}/index"][at])
        torch.testing.assert_close(drafted.end.y_0, cases[f"{prefix}/verify{i}/draft"][at], atol=2e-2, rtol=0)
        torch.testing.assert_close(target.last.mean, cases[f"{prefix}/verify{i}/target_mean"][at], atol=2e-2, rtol=0)
        torch.testing.assert_close(target.last.log_std.exp(), cases[f"{prefix}/verify{i}/target_std"][at], atol=1e-4, rtol=1e-2)
        torch.testing.assert_close(target.log_std_sum, cases[f"{prefix}/verify{i}/target_logstd_sum"][at], atol=1e-2, rtol=0)
        guess = cases[f"{prefix}/verify{i}/guess"][at]
        assert torch.equal(log_ratio.exp() > guess, recorded[at] > guess)  # every decision
        clear = recorded[at] > 1e-3
        torch.testing.assert_close(log_ratio[clear].exp(), recorded[at][clear], rtol=0.1, atol=0)
    latent = tokens.transpose(1, 2).reshape(2, 4, 4, 4)
    torch.testing.assert_close(latent, cases[f"{prefix}/latent"], atol=2e-2, rtol=0)


# --- the theorem


def test_shared_noise_brings_two_gaussians_closer_by_twice_the_trace_of_the_root():
    count, dim, g = 200_000, 3, torch.Generator().manual_seed(0)
    draft, target = (Gaussian(torch.randn(dim, generator=g), 0.3 * torch.randn(dim, generator=g)) for _ in range(2))
    xi, eta = torch.randn(2, count, dim, generator=g)
    distance = lambda first, second: (draft.sample(first) - target.sample(second)).square().sum(-1)
    independent, shared = distance(xi, eta), distance(xi, xi)
    expected = 2 * (draft.log_std + target.log_std).exp().sum().item()  # 2 tr sqrt(S_d S_t)
    error = math.sqrt((independent.var() + shared.var()).item() / count)
    assert independent.mean().item() - shared.mean().item() == pytest.approx(expected, abs=4 * error)


@pytest.mark.parametrize("variant", ["paper", "official"])
def test_alignment_brings_draft_and_target_of_the_demo_closer(variant):
    pipe = load_pipeline("demo", draft="demo-draft")
    run = lambda aligned: (
        pipe(
            [3] * 4,
            sampler="cspd",
            variant=variant,
            aligned=aligned,
            num_iter=8,
            num_inference_steps=12,
            draft_length=4,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).trace
    )
    aligned, independent = run(True), run(False)
    mean = lambda trace: sum(trace.token_distances) / len(trace.token_distances)
    assert mean(aligned) < 0.8 * mean(independent)


# --- the edges


def sampler(target: MAR, draft: MAR, images=3, seed=0, num_iter=5, guidance_scale=1.0, own=None, **settings):
    make = lambda model: MARAdapter(model, num_inference_steps=6, clip_sample_range=3.0)
    adapter, labels = make(target), torch.arange(images) % 10
    orders = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(seed + i)) for i in range(images)])
    steps = adapter.ar_steps(orders, num_iter, guidance_scale, "linear")
    vectors = lambda model: (model.class_vectors(labels, images), model.class_vectors(None, images))
    noise = Noise([torch.Generator().manual_seed(100 + seed + i) for i in range(images)], torch.arange(images)) if own is None else own
    table = NoiseTable.draw(noise, 16, 6, 4)
    other = table if settings.get("aligned", True) else NoiseTable.draw(noise, 16, 6, 4)
    own_settings, trace, drafter = CSpDSettings(**settings), Trace(images), DraftModel(make(draft), *vectors(draft))
    ours = CSpDSampler(adapter, steps, *vectors(target), noise, table, other, own_settings, trace, drafter)
    sequential = lambda model: sample_sequential(make(model), steps, *vectors(model), table.of_positions)
    return ours, sequential, trace


def test_identical_models_accept_everything(golden_mar):
    ours, sequential, trace = sampler(golden_mar, golden_mar, num_iter=16, draft_length=4, prefill=0.0)
    torch.testing.assert_close(ours.sample(), sequential(golden_mar), atol=1e-3, rtol=0)
    assert trace.rounds.tolist() == [4] * 3 and all(kept == seen for kept, seen in trace.accepted_by_lag.values())


def far(model):
    other = copy.deepcopy(model)
    other.diffloss.net.final_layer.linear.bias.data[:4] += 3.0
    return other


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_far_apart_models_accept_nothing_and_give_draws_around_the_targets_own_tokens(golden_mar, guidance_scale):
    settings = dict(guidance_scale=guidance_scale, num_iter=16, draft_length=3, prefill=0.0)
    ours, sequential, trace = sampler(golden_mar, far(golden_mar), **settings)
    tokens, expected = ours.sample(), sequential(golden_mar)
    assert trace.rounds.tolist() == [16] * 3 and not any(kept for kept, _ in trace.accepted_by_lag.values())
    # one noisy draw of the last law a token instead of its mean, fed on by the later ones
    assert (tokens[:, ours.order[0, 0]] - expected[:, ours.order[0, 0]]).abs().max() < 0.2


def test_what_replaces_a_far_draft_has_the_targets_last_law():
    count = 20_000
    target = PathEnd(torch.zeros(count, 3), Gaussian(torch.full((count, 3), 0.5), torch.full((count, 3), -1.0)), torch.zeros(count, 3))
    draft = target._replace(last=Gaussian(torch.full((count, 3), 40.0), torch.full((count, 3), -1.0)))
    out, fallbacks = draw_modified(draft, target, "paper", shared_noise(count, 0), max_tries=100)
    assert fallbacks == 0 and smallest_p(out, target.last.sample(shared_noise(count, 1).normal(3))) > 0.01


def test_the_modified_distribution_is_the_part_that_the_draft_misses():
    count, shift = 200_000, 0.7
    law = lambda mean: Gaussian(torch.full((count, 1), mean), torch.zeros(count, 1))
    target = PathEnd(torch.zeros(count, 1), law(0.0), torch.zeros(count, 1))
    draft = PathEnd(torch.zeros(count, 1), law(shift), torch.full((count, 1), -0.2))  # Sigma = exp(-0.2)
    out, fallbacks = draw_modified(draft, target, "paper", shared_noise(count, 0), max_tries=1000)
    x = torch.linspace(-8, 8, 20_001, dtype=torch.float64)
    density = (math.exp(-0.2) * torch.exp(-(x**2) / 2) - torch.exp(-((x - shift) ** 2) / 2)).clamp_min(0)
    mean, square = ((density * x**i).sum() / density.sum() for i in (1, 2))
    assert fallbacks == 0
    assert out.mean().item() == pytest.approx(mean.item(), abs=0.01) and out.square().mean().item() == pytest.approx(
        square.item(), abs=0.02
    )


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("prefill, draft_length", [(0.0, 1), (0.0, 99), (0.3, 3), (1.0, 4)])
def test_draft_length_and_prefill_may_be_anything(golden_mar, draft_mar, variant, prefill, draft_length):
    ours, sequential, trace = sampler(golden_mar, draft_mar, num_iter=7, prefill=prefill, draft_length=draft_length, variant=variant)
    tokens = ours.sample()
    assert tokens.isfinite().all() and [sum(rows) for rows in trace.accepted_rows] == [16] * 3
    if prefill == 1.0:
        torch.testing.assert_close(tokens, sequential(golden_mar), atol=1e-5, rtol=0)
        assert trace.draft_calls == 0


def test_a_log_variance_gap_that_overflows_a_product_is_a_decision_all_the_same():
    zero, gap = torch.zeros(2, 4), torch.tensor([[300.0] * 4, [-300.0] * 4])
    law = Gaussian(zero, zero)
    draft, target = PathEnd(zero, law, gap), PathEnd(zero, law, zero)
    assert log_acceptance(draft, target, "paper").tolist() == [1200.0, -1200.0]
    assert residual_acceptance(draft, target, zero, "paper").tolist() == [1.0, 0.0]
    out, fallbacks = draw_modified(draft, target, "paper", shared_noise(2, 0), max_tries=5)
    assert fallbacks == 1 and out.isfinite().all() and (out != 0).all()


def test_an_image_does_not_depend_on_its_batch(golden_mar, draft_mar):
    together, *_ = sampler(golden_mar, draft_mar, images=3, num_iter=8, draft_length=3)
    alone, *_ = sampler(golden_mar, draft_mar, images=1, num_iter=8, draft_length=3)
    torch.testing.assert_close(together.sample()[:1], alone.sample(), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(variant="best"), "variant 'best' is none of paper, official"),
        (dict(draft_length=0), "draft_length 0 is below 1"),
        (dict(prefill=1.5), "prefill 1.5 is outside 0..1"),
        (dict(max_tries=0), "max_tries 0 is below 1"),
    ],
)
def test_bad_settings_are_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        CSpDSettings(**arguments)


# --- pipeline and command line


def test_cspd_runs_from_the_command_line_and_says_that_it_is_approximate(tiny_file, tmp_path, capsys):
    flags = ["--num-iter", "4", "--num-inference-steps", "4", "--num-images", "3", "--sampler", "cspd", "--draft-length", "2"]
    out = tmp_path / "out"
    command = ["generate", "--model", str(tiny_file), "--draft", str(tiny_file), "--out", str(out), *flags]
    assert main([*command, "--no-aligned", "--variant", "official", "--prefill", "0.3", "--verbose"]) == 0
    assert "squared distance of drafts to the target's tokens: " in capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    expected = {"sampler": "cspd", "variant": "official", "draft_length": 2, "prefill": 0.3, "aligned": False}
    assert expected.items() <= manifest["settings"].items()
    assert manifest["environment"]["law of the images"] == "approximate" and "draft_sha256" in manifest["settings"]


def test_a_recipe_can_switch_alignment_off(tiny_file, tmp_path):
    (tmp_path / "own.yaml").write_text("sampler: cspd\naligned: false\nnum_iter: 2\nnum_inference_steps: 3\nnum_images: 1\n")
    files = ["--model", str(tiny_file), "--draft", str(tiny_file), "--out", str(tmp_path / "out")]
    assert main(["generate", "--config", str(tmp_path / "own.yaml"), *files]) == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]["aligned"] is False


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(sampler="cspd"), "sampler 'cspd' needs a draft model"),
        (dict(sampler="lossless", prefill=0.1), "prefill belongs to the cspd sampler, but sampler is 'lossless'"),
        (dict(sampler="sequential", lookahead=3), "lookahead belongs to the lossless sampler, but sampler is 'sequential'"),
    ],
)
def test_settings_of_another_sampler_are_refused(tiny_pipeline, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny_pipeline([0], **arguments)


def test_ablate_prints_tables_and_writes_figures_and_plots(tiny_file, tmp_path, capsys):
    files = ["--model", str(tiny_file), "--draft", str(tiny_file), "--out", str(tmp_path)]
    small = ["--num-iter", "8", "--num-inference-steps", "3", "--images", "2", "--batch-sizes", "1", "3", "--repeats", "1"]
    assert main(["ablate", *files, *small, "--quality-images", "16"]) == 0
    out = capsys.readouterr().out
    assert "draft length 8, independent noise" in out and "pre-fill 15%" in out and "approximate" in out
    content = json.loads((tmp_path / "ablation.json").read_text())
    shared = [m for m in content["measurements"] if "shared noise" in m["setting"]]
    assert {m["variant"] for m in shared} == {"paper", "official"}
    seeing = [m for m in shared if m["variant"] == "paper"]
    assert all(m["accepted"] == 1.0 and m["distance"] < 1e-6 for m in seeing)  # the draft is the target itself
    others = content["comparison"]
    assert list(others) == ["1", "3"] and all(run["p_value"] is None for run in others["1"])
    assert [run["name"] for run in others["3"]] == [
        "sequential",
        "sequential, 4 AR steps",
        "sequential, 2 AR steps",
        "lossless, block",
        "CSpD (approximate), paper",
        "CSpD (approximate), official",
    ]
    assert all(0 < run["p_value"] <= 1 and len(run["seconds"]) == 1 for run in others["3"])
    for name in ("alignment", "batches", "pareto"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_ablate_makes_the_tables_that_are_asked_for(tiny_file, tmp_path):
    out = tmp_path / "out"
    files = ["--model", str(tiny_file), "--draft", str(tiny_file), "--out", str(out)]
    small = ["--num-iter", "4", "--num-inference-steps", "3", "--images", "1"]
    assert main(["ablate", *files, *small, "--tables", "pre-filling", "--variant", "paper"]) == 0
    content = json.loads((out / "ablation.json").read_text())
    assert [m["setting"] for m in content["measurements"]] == ["pre-fill 0%", "pre-fill 5%", "pre-fill 15%"]
    assert content["comparison"] == {} and [path.name for path in out.iterdir()] == ["ablation.json"]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--images", "0"], "--images 0 is below 1"),
        (["--batch-sizes", "4", "0"], "--batch-sizes 0 is below 1"),
        (["--quality-images", "5"], "--quality-images 5 is too few"),
    ],
)
def test_bad_ablate_flags_are_one_sentence(tiny_file, tmp_path, capsys, flags, sentence):
    assert main(["ablate", "--model", str(tiny_file), "--draft", str(tiny_file), "--out", str(tmp_path / "x"), *flags]) == 2
    assert sentence in capsys.readouterr().err
