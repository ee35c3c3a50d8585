"""xAR: the network and its sampler against numbers of the release, and lossless sampling of whole images."""

import argparse
import copy
import json
from dataclasses import replace

import pytest
import torch
from conftest import GOLDEN, TINY_XAR, TINY_XAR_PIPELINE, golden, golden_json, golden_keys, golden_state, random_xar
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves
from two_sample import largest_z, shared_noise, smallest_p

import car_spec.asd
from car_spec.adapters.xar import XARAdapter, flow_schedule, guidance_of_cells
from car_spec.asd import NonFiniteError
from car_spec.cells import CellSettings, lossless, sample_cells, sequential
from car_spec.chain import sample_chain
from car_spec.cli import SAMPLING, main, parse
from car_spec.coupling import residual_equal_std
from car_spec.eval.distances import energy_test, principal_components
from car_spec.models.loading import METADATA_KEY, Checkpoint, CheckpointError, infer_xar_config, load_xar, read_checkpoint
from car_spec.models.presets import PRESETS
from car_spec.models.xar import XAR, XARConfig, cell_order, from_cells, rotary_table, rotate, to_cells
from car_spec.noise import Noise
from car_spec.pipeline import NonFiniteImageError, load_pipeline
from car_spec.runs import RunFolder, generate_images, image_spec
from car_spec.trace import Trace
from car_spec.xar_pipeline import XARPipeline

NETWORK = dict(atol=2e-5, rtol=0)  # one float32 pass, another order of operations
GOLDEN_CONFIG = XARConfig(
    num_tokens=256,
    token_dim=16,
    num_classes=1000,
    width=32,
    encoder_depth=1,
    decoder_depth=1,
    num_heads=2,
    mlp_hidden=85,
)


@pytest.fixture(scope="module")
def numbers():
    return golden("xar_tiny")


@pytest.fixture(scope="module")
def golden_xar():
    return load_xar(Checkpoint(GOLDEN / "xar_tiny.safetensors", "flat", golden_state("xar_tiny")))


def test_cells_have_the_order_of_the_release(numbers):
    order = cell_order(256, 4)
    assert torch.equal(torch.stack([order // 16, order % 16], 1), numbers["order/row_col"])
    assert torch.equal(to_cells(numbers["order/latent"], 4).flatten(1, 2), numbers["order/tokens"])
    assert torch.equal(from_cells(numbers["order/tokens"].unflatten(1, (4, 64))), numbers["order/latent"])


def test_rotary_embedding_reproduces_the_release(numbers):
    x = numbers["piece/rope_in"]
    torch.testing.assert_close(rotate(x, *rotary_table(cell_order(256, 4), 16, 16)), numbers["piece/rope_out"], **NETWORK)


def test_time_embedding_reproduces_the_release(golden_xar, numbers):
    torch.testing.assert_close(golden_xar.time_embed(numbers["piece/t"]), numbers["piece/t_emb"], **NETWORK)


def test_block_reproduces_the_release(golden_xar, numbers):
    x = numbers["piece/block_x"].unflatten(1, (2, 64))
    condition = numbers["piece/block_cond"].unflatten(0, (2, 2)).transpose(0, 1)  # (row, cell, W)
    mask = torch.arange(128)[:, None] // 64 >= torch.arange(128) // 64
    out, _, _ = golden_xar.encoder_blocks[0](x, condition, rotary_table(cell_order(256, 4)[:128], 16, 16), mask=mask)
    torch.testing.assert_close(out.flatten(1, 2), numbers["piece/block_out"], **NETWORK)


def test_calls_and_their_cache_reproduce_the_release(golden_xar, numbers):
    """The first call of a cell also takes in the finished cell before it, at time 0; later calls leave the cache alone."""
    labels, cache = numbers["call/labels"], None
    for c in range(4):
        first = numbers[f"call/cell{c}/first_in"].unflatten(1, (-1, 64))
        times = torch.tensor([[1.0], [0.0, 1.0]][c > 0]).expand(2, -1)
        out, cache = golden_xar.velocity(first, golden_xar.conditions(labels, times), cache, keep=int(c > 0))
        torch.testing.assert_close(out[:, -1], numbers[f"call/cell{c}/first_out"], **NETWORK)
        later = numbers[f"call/cell{c}/later_in"][:, None]
        out, same = golden_xar.velocity(later, golden_xar.conditions(labels, torch.full((2, 1), 0.68)), cache)
        torch.testing.assert_close(out[:, 0], numbers[f"call/cell{c}/later_out"], **NETWORK)
        assert same is cache and (cache is None or cache.num_tokens == 64 * c)
        for name, block, kind in (("encoder0_k", 0, "keys"), ("encoder0_v", 0, "values"), ("decoder0_k", 1, "keys")):
            if f"call/cell{c}/cache_{name}" in numbers:
                torch.testing.assert_close(getattr(cache, kind)[block], numbers[f"call/cell{c}/cache_{name}"], **NETWORK)


# --- sampler


def recorded_sampler(numbers, num_steps, states=None):
    """Samples cell after cell from the recorded noise; `states` collects (K, B, D) of each cell: before each step, then the end."""
    initial = numbers["sample/init_noise"].flatten(2)  # (cells, B, D)
    noise = numbers["sample/step_noise"][:, : num_steps - 1].flatten(3).flip(1)  # index k - 1 is used at step k
    cells = iter(range(len(initial)))

    def sample(chain, _draft):
        c = next(cells)
        y = sample_chain(chain, initial[c], torch.nn.functional.pad(noise[c], (0, 0, 0, 0, 1, 0)).transpose(0, 1))
        if states is not None:
            states.append(y)
        return y

    return sample


@pytest.mark.parametrize("num_steps", [4, 6, 40, 50])
def test_grid_of_times_equals_the_release(golden_xar, numbers, num_steps):
    schedule = flow_schedule(num_steps)
    torch.testing.assert_close(schedule.times.flip(0), numbers[f"grid/{num_steps}/t"][:-1], rtol=1e-12, atol=0)
    integers = (schedule.times.flip(0).float() * 1000).long()
    assert torch.equal(integers, numbers[f"grid/{num_steps}/t_int"])


@pytest.mark.parametrize("name", ["steps4_cfg1", "steps4_cfg2", "steps6_cfg1", "steps6_cfg2"])
def test_sequential_sampler_reproduces_the_recorded_runs(golden_xar, numbers, name):
    run = golden_json("xar_tiny")["runs"][name]
    assert guidance_of_cells(run["cfg"], 4) == pytest.approx(run["cell_cfg"])
    states: list[torch.Tensor] = []
    adapter = XARAdapter(golden_xar, num_inference_steps=run["num_steps"])
    cells = sample_cells(adapter, numbers["sample/labels"], run["cfg"], recorded_sampler(numbers, run["num_steps"], states))
    torch.testing.assert_close(from_cells(cells), numbers[f"sample/{name}/latent"], **NETWORK)
    if name == "steps4_cfg2":
        for c in range(4):
            torch.testing.assert_close(states[c].view(2, 64, 16), numbers[f"sample/{name}/states"][c, -1], **NETWORK)


@pytest.mark.parametrize("mistake", ["no drift correction", "last step to the clean sample", "constant guidance", "context at time 1"])
def test_recorded_run_notices_a_wrong_sampler(golden_xar, numbers, monkeypatch, mistake):
    adapter = XARAdapter(golden_xar, num_inference_steps=6)
    of_state, of_velocity, *_ = adapter.columns.T  # the velocity is (of_state x - centre) / of_velocity
    times = adapter.schedule.times.float()
    if mistake == "no drift correction":  # the drift of the noiseless flow, v alone
        dt = times - times.roll(1)
        dt[0] = times[0]
        adapter.columns[:, 2], adapter.columns[:, 3] = 1 - dt * of_state / of_velocity, dt / of_velocity
    elif mistake == "last step to the clean sample":
        adapter.columns[0, 2], adapter.columns[0, 3] = (1 - times * of_state / of_velocity)[0], (times / of_velocity)[0]
    elif mistake == "constant guidance":
        monkeypatch.setattr("car_spec.cells.guidance_of_cells", lambda scale, cells: [1.0] + [scale] * (cells - 1))
    else:
        conditions = golden_xar.conditions
        monkeypatch.setattr(golden_xar, "conditions", lambda labels, times: conditions(labels, times + 1))
    cells = sample_cells(adapter, numbers["sample/labels"], 2.0, recorded_sampler(numbers, 6))
    assert (from_cells(cells) - numbers["sample/steps6_cfg2/latent"]).abs().max() > 100 * NETWORK["atol"]


# --- checkpoints


@pytest.mark.parametrize("name", ["xar_base", "xar_large", "xar_huge"])
def test_full_size_xar_has_the_names_and_shapes_of_the_release(name, tmp_path):
    keys = golden_keys(name)
    state = {key: torch.empty(shape, device="meta") for key, shape in keys.items()}
    with torch.device("meta"):
        model = XAR(infer_xar_config(Checkpoint(tmp_path, "flat", state)))
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == keys


def test_golden_weights_have_the_architecture_that_is_inferred(golden_xar):
    assert golden_xar.config == GOLDEN_CONFIG


def test_buffers_of_a_file_are_never_used(golden_xar, numbers, tmp_path):
    state = golden_state("xar_tiny")
    for name in state:
        if name == "mask" or ".rope." in name:
            state[name] = torch.full_like(state[name], float("nan"))
    torch.save(state, tmp_path / "xAR-T.pth")
    model = load_xar(read_checkpoint(tmp_path / "xAR-T.pth"))
    assert model.config == GOLDEN_CONFIG and set(model.state_dict()) == {n for n in state if n != "mask" and ".rope." not in n}
    x, labels = numbers["call/cell0/first_in"][:, None], numbers["call/labels"]
    run = lambda model: model.velocity(x, model.conditions(labels, torch.ones(2, 1)))[0]
    assert torch.equal(run(model), run(golden_xar))


@pytest.mark.parametrize("num_cells", [4, 16])
def test_cells_come_from_the_mask_or_the_files_own_header(tmp_path, num_cells):
    config = replace(TINY_XAR, num_tokens=64, num_cells=num_cells)
    state = XAR(config).state_dict()
    save_file(state, tmp_path / "a.safetensors", {METADATA_KEY: json.dumps(dict(num_heads=2, num_cells=num_cells))})
    assert load_xar(read_checkpoint(tmp_path / "a.safetensors")).config == config
    cell = torch.arange(64) // config.tokens_per_cell
    state["mask"] = torch.zeros(1, 1, 64, 64).masked_fill(cell[:, None] < cell, -torch.inf)
    state["encoder_blocks.0.attn.rope.freqs_cos"] = torch.zeros(64, 8)
    assert infer_xar_config(Checkpoint(tmp_path, "flat", state)) == config


@pytest.mark.parametrize(
    "change, arguments, sentence",
    [
        (dict(), dict(num_heads=4), "--num-heads 4: .* has rotary tables for 2 heads"),
        (dict(), dict(encoder_depth=2), "encoder_depth 2 was asked for, but .* holds encoder_depth 1"),
        ({"pred.weight": None}, dict(), "holds no known model: 0 of its .* keys matched xAR's"),
        ({"z_proj.bias": None}, dict(), "it lacks 1: z_proj.bias"),
    ],
)
def test_a_wrong_checkpoint_is_one_sentence(tmp_path, change, arguments, sentence):
    state = {name: value for name, value in (golden_state("xar_tiny") | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=sentence):
        load_xar(Checkpoint(tmp_path / "x.pth", "flat", state), **arguments)


def test_p02_a_trainers_file_with_a_namespace_loads_its_average(tmp_path):
    state = random_xar(TINY_XAR, 0).state_dict()
    content = dict(model={name: torch.zeros_like(value) for name, value in state.items()}, model_ema=state, optimizer={}, epoch=3)
    torch.save(content | dict(scaler={}, args=argparse.Namespace(a=1)), tmp_path / "checkpoint-last.pth")
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.copy == "model_ema" and torch.equal(load_xar(checkpoint, num_heads=2).pred.weight, state["pred.weight"])


def test_p05_prefixes_of_a_compiled_and_wrapped_xar_are_stripped(tmp_path):
    state = random_xar(TINY_XAR, 0).state_dict()
    torch.save({"state_dict": {f"module._orig_mod.{name}": value for name, value in state.items()}}, tmp_path / "a.pth")
    loaded = load_xar(read_checkpoint(tmp_path / "a.pth"), num_heads=2).state_dict()
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)


# --- states that share a cache


def cached(adapter, labels, cells, seed=3):
    """The cache after `cells` cells of noise (H B rows), H = 2."""
    g, cache = torch.Generator().manual_seed(seed), None
    for _ in range(cells):
        cache = adapter.extend(torch.randn(len(labels) // 2, adapter.cell_dim, generator=g), labels, cache)
    return cache


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("cells", [0, 2])
def test_states_that_share_a_cache_say_what_each_says_alone(tiny_xar, scale, cells):
    adapter = XARAdapter(tiny_xar, num_inference_steps=5)
    labels = adapter.with_null_rows(torch.tensor([0, 1, 2]), 3.0)
    cache = cached(adapter, labels, cells)
    chain = adapter.chain(labels, cache, 3, scale)
    rows, k = torch.tensor([0, 0, 0, 2, 2]), torch.tensor([4, 0, 2, 3, 3])  # unequal counts, and a row that has none
    y = torch.randn(5, adapter.cell_dim, generator=torch.Generator().manual_seed(1))
    together = chain(y, k, rows)
    for i in range(5):
        alone = adapter.chain(labels, cache, 3, scale)(y[i].expand(3, -1), int(k[i]))
        torch.testing.assert_close(together.mean[i], alone.mean[rows[i]], **NETWORK)
        torch.testing.assert_close(together.log_std[i], alone.log_std[rows[i]])


def test_a_call_leaves_the_cache_alone_and_copies_it_once_a_row_at_most(tiny_xar, monkeypatch):
    adapter = XARAdapter(tiny_xar, num_inference_steps=5)
    labels = adapter.with_null_rows(torch.tensor([0, 1]), 3.0)
    cache = cached(adapter, labels, 2)
    before = [keys.clone() for keys in cache.keys]
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **kw: seen.append(k.shape) or attention(q, k, v, **kw)
    )
    rows = torch.arange(2).repeat_interleave(6)
    adapter.chain(labels, cache, 2, 3.0).predict(torch.zeros(12, adapter.cell_dim), torch.zeros(12, dtype=torch.int64), rows)
    assert all(torch.equal(a, b) for a, b in zip(before, cache.keys))
    own, count = TINY_XAR.tokens_per_cell, len(labels)
    assert set(seen) == {(count, TINY_XAR.num_heads, 2 * own + 6 * own, TINY_XAR.width // TINY_XAR.num_heads)}


def test_the_network_keeps_nothing_between_calls(tiny_xar):
    """Two caches of one network in turns, one longer than the other: each call says what it says alone."""
    adapter, y = XARAdapter(tiny_xar, num_inference_steps=5), torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    labels = adapter.with_null_rows(torch.tensor([1]), 3.0)
    chains = [adapter.chain(labels, cached(adapter, labels, cells, seed), 1, 3.0) for cells, seed in ((1, 3), (3, 4))]
    alone = [chain(y, 2).mean for chain in chains]
    assert torch.equal(chains[0](y, 2).mean, alone[0]) and torch.equal(chains[1](y, 2).mean, alone[1])
    assert all(set(vars(module)) == set(vars(fresh)) for module, fresh in zip(tiny_xar.modules(), XAR(TINY_XAR).modules()))
    assert not list(tiny_xar.buffers())


def test_owner_goes_with_one_cell(tiny_xar):
    x, conditions = torch.zeros(2, 2, 4, 2), torch.zeros(2, 2, 16)
    with pytest.raises(ValueError, match="owner goes with one cell, but x holds 2"):
        tiny_xar.velocity(x, conditions, owner=torch.tensor([0, 0]))


# --- lossless sampling of whole images

COUNT, STEPS = 4_000, 6


@pytest.fixture(scope="module")
def law(tiny_xar):
    """-> guidance scale, sequential images of one class (COUNT, cells, T, C)."""
    adapter = XARAdapter(tiny_xar, num_inference_steps=STEPS)
    return 3.0, sample_cells(adapter, torch.full((COUNT,), 2), 3.0, sequential(shared_noise(COUNT, 1)))


@pytest.mark.parametrize(
    "settings",
    [
        CellSettings(window=4),
        CellSettings(window=50),
        CellSettings(window=4, taper=0.5, drafter="frozen"),
        CellSettings(window=3, token_wise=True),
        CellSettings(window=3, drafter="model"),
    ],
    ids=["free", "free, whole chain", "frozen, tapered", "token-wise", "draft model"],
)
def test_lossless_images_have_the_sequential_law(tiny_xar, tiny_xar_draft, law, settings):
    scale, expected = law
    adapter, trace = XARAdapter(tiny_xar, num_inference_steps=STEPS), Trace(COUNT)
    draft = XARAdapter(tiny_xar_draft, num_inference_steps=STEPS) if settings.drafter == "model" else None
    sampler = lossless(shared_noise(COUNT, 2), settings, trace)
    images = sample_cells(adapter, torch.full((COUNT,), 2), scale, sampler, draft, trace)
    assert smallest_p(images, expected) > 0.01
    assert largest_z(images, expected) < 4.5  # of 528 moments
    assert energy_test(images[:1000].flatten(1), expected[:1000].flatten(1)) > 0.01
    assert trace.backbone_calls == 3 and trace.fallbacks == 0
    assert 0 < sum(trace.chain.accepted) < 0.9 * COUNT * 4 * (STEPS - 1)  # drafts are neither hopeless nor perfect


def test_a_lenient_verification_is_noticed(tiny_xar, law, monkeypatch):
    scale, expected = law
    verify = car_spec.asd.verify_block_equal_std
    monkeypatch.setattr("car_spec.asd.verify_block_equal_std", lambda log_ratios, *rest: verify(log_ratios / 4, *rest))
    adapter = XARAdapter(tiny_xar, num_inference_steps=STEPS)
    images = sample_cells(adapter, torch.full((COUNT,), 2), scale, lossless(shared_noise(COUNT, 2), CellSettings(window=4)))
    assert smallest_p(images, expected) < 1e-4


# A case in which small mistakes show: one cell of one token, many images, and a draft that pulls away by a constant velocity.
SHARP = dict(count=30_000, steps=8)
LONELY_XAR = replace(TINY_XAR, num_tokens=1, num_cells=1, width=8, mlp_hidden=8)


@pytest.fixture(scope="module")
def sharp():
    """-> a function that samples losslessly without guidance, drafting with the other network; sequential images (B, 1, 1, 2)."""
    model = random_xar(LONELY_XAR, 0, 0.4)
    drifting = copy.deepcopy(model)
    drifting.pred.bias += 2.0
    adapter, draft = (XARAdapter(network, num_inference_steps=SHARP["steps"]) for network in (model, drifting))
    problem = adapter, torch.full((SHARP["count"],), 2), 1.0

    def run():
        trace, settings = Trace(SHARP["count"]), CellSettings(window=SHARP["steps"] - 1, drafter="model")
        images = sample_cells(*problem, lossless(shared_noise(SHARP["count"], 2), settings, trace), draft, trace)
        assert 0.5 < sum(trace.chain.accepted) / len(trace.chain.accepted) < 2.0
        return images

    return run, sample_cells(*problem, sequential(shared_noise(SHARP["count"], 1)))


def test_a_draft_that_pulls_away_leaves_the_law_as_it_is(sharp):
    run, expected = sharp
    images = run()
    assert smallest_p(images, expected) > 0.01 and largest_z(images, expected) < 4.5


def test_a_residual_without_alpha_is_noticed(sharp, monkeypatch):
    """Planted bias: r_1, the token-wise residual, where block verification asks for r_alpha."""
    run, expected = sharp
    verify = car_spec.asd.verify_block_equal_std

    def with_r_1(log_ratios, lengths, target, draft, noise):
        verdict = verify(log_ratios, lengths, target, draft, noise)
        laws = [law.at((torch.arange(len(lengths)), verdict.accepted.clamp_max(log_ratios.shape[1] - 1))) for law in (target, draft)]
        zeros, dim = torch.zeros(len(lengths)), target.mean.shape[-1]
        return verdict._replace(replacement=residual_equal_std(*laws, zeros, noise.uniform(1)[:, 0], noise.normal(dim)))

    monkeypatch.setattr("car_spec.asd.verify_block_equal_std", with_r_1)
    assert smallest_p(run(), expected) < 1e-6


def test_noise_of_a_rejected_draft_used_again_is_noticed(sharp, monkeypatch):
    """Planted bias: the noise of a step, which the decision has looked at, comes back when the step is drafted again."""
    run, expected = sharp
    table = torch.randn(SHARP["count"], SHARP["steps"], 2, generator=torch.Generator().manual_seed(3))
    draft = car_spec.asd._draft_by_model
    with_old_noise = lambda chain, y, steps, rows, xi: draft(chain, y, steps, rows, table[rows[:, None], steps])
    monkeypatch.setattr("car_spec.asd._draft_by_model", with_old_noise)
    assert smallest_p(run(), expected) < 1e-6


@pytest.mark.parametrize("drafter", ["free", "frozen", "model"])
def test_image_of_a_batch_equals_its_own_run(tiny_xar, tiny_xar_draft, drafter):
    adapter = XARAdapter(tiny_xar, num_inference_steps=9)
    draft = XARAdapter(tiny_xar_draft, num_inference_steps=9) if drafter == "model" else None

    def run(ids):
        noise = Noise([torch.Generator().manual_seed(i) for i in ids])
        return sample_cells(adapter, torch.tensor(ids) % 5, 2.0, lossless(noise, CellSettings(drafter=drafter)), draft)

    together = run([3, 4, 5, 6])
    for i, image in enumerate(together):
        torch.testing.assert_close(run([3 + i])[0], image, atol=1e-4, rtol=0)


def test_a_nan_stops_and_names_the_image(tiny_xar):
    class Broken(XARAdapter):
        def extend(self, cell, labels, cache):
            return super().extend(cell.index_fill(0, torch.tensor([1]), float("nan")), labels, cache)

    noise = Noise([torch.Generator().manual_seed(i) for i in range(3)])
    with pytest.raises(NonFiniteError) as caught:
        sample_cells(Broken(tiny_xar, num_inference_steps=4), torch.tensor([0, 1, 2]), 2.0, lossless(noise))
    assert caught.value.rows.tolist() == [1]


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
def test_what_is_reused_leaves_the_transition_as_it_is(spread):
    schedule, plain = flow_schedule(12, spread), flow_schedule(12, 0.0)
    x, v = torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = lambda s: s.decay * x + s.gain * (s.of_state * x - s.of_velocity * v)
    torch.testing.assert_close(mean(schedule), mean(plain), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(plain.of_state * x - plain.of_velocity * v, x - plain.times * v)
    assert torch.equal(schedule.log_std, plain.log_std)


# --- pipeline, and the pitfalls that name xAR


def seeded(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("sampler", [dict(sampler="sequential"), {}, dict(drafter="frozen"), dict(drafter="model"), dict(token_wise=True)])
def test_settings_of_an_output_make_the_same_images_again(tiny_xar_pipeline, sampler):
    first = tiny_xar_pipeline([0, 9], generator=seeded(1, 2), output_type="latent", **sampler)
    again = tiny_xar_pipeline([0, 9], generator=seeded(1, 2), output_type="latent", **first.settings)
    assert torch.equal(first.images, again.images)
    assert (first.trace.draft_calls > 0) == ("model" in sampler.values())
    assert first.trace.backbone_calls == 3 and first.trace.rounds.tolist() == [4, 4]


def test_the_callback_sees_cells_grow_into_the_image(tiny_xar_pipeline):
    seen = []
    output = tiny_xar_pipeline([1], generator=seeded(0), output_type="latent", callback=lambda i, tokens: seen.append((i, tokens)))
    assert [i for i, _ in seen] == [0, 1, 2, 3]
    assert [int((tokens != 0).all(-1).sum()) for _, tokens in seen] == [4, 8, 12, 16]
    assert torch.equal(seen[-1][1].transpose(1, 2).unflatten(2, (4, 4)), output.images)


def test_an_xar_file_loads_as_an_xar_pipeline_and_generates_from_the_command_line(tiny_xar_file, tmp_path, capsys):
    assert isinstance(load_pipeline(tiny_xar_file), XARPipeline)
    assert main(["generate", "--model", str(tiny_xar_file), "--num-images", "3", "--out", str(tmp_path / "out"), "--verbose"]) == 0
    assert "backbone calls a batch: 3" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("*.png"))) == 4  # and the grid
    assert (
        main(["generate", "--model", str(tiny_xar_file), "--num-images", "1", "--drafter", "frozen", "--out", str(tmp_path / "frozen")])
        == 0
    )
    assert json.loads((tmp_path / "frozen" / "manifest.json").read_text())["settings"]["drafter"] == "frozen"


def test_bench_compares_the_samplers_of_an_xar(tiny_xar_file, tmp_path, capsys):
    assert main(["bench", "--model", str(tiny_xar_file), "--repeats", "1", "--window", "3", "--out", str(tmp_path / "bench")]) == 0
    out = capsys.readouterr().out
    assert "lossless, token-wise" in out and "lossless, frozen" in out and "AR steps," in out
    assert "lossless, block" in (tmp_path / "bench" / "bench.json").read_text()


def test_a_mar_cannot_draft_for_an_xar(tiny_xar_pipeline, tiny_pipeline):
    with pytest.raises(ValueError, match="--draft tiny has MAR as kind of network, --model tiny-xar has XAR"):
        tiny_xar_pipeline.set_draft(tiny_pipeline)


def test_a_draft_with_other_cells_is_refused(tiny_xar_pipeline, tiny_vae):
    other = XARPipeline(random_xar(replace(TINY_XAR_PIPELINE, num_cells=16), 1), tiny_vae, replace(tiny_xar_pipeline.preset, name="small"))
    with pytest.raises(ValueError, match="--draft small has 16 cells, --model tiny-xar has 4"):
        tiny_xar_pipeline.set_draft(other)


@pytest.mark.parametrize("label", [10, -1])
def test_p04_the_null_class_is_the_last_row_and_no_label(tiny_xar_pipeline, label):
    assert tiny_xar_pipeline.model.null_class == 10 and tiny_xar_pipeline.num_classes == 10
    with pytest.raises(ValueError, match=rf"label {label} is outside 0..9"):
        tiny_xar_pipeline([label])
    unlabelled = tiny_xar_pipeline(None, generator=seeded(0), output_type="latent")
    assert unlabelled.settings["guidance_scale"] == 1.0 and unlabelled.images.isfinite().all()


ALL_SAMPLERS = [
    dict(sampler="sequential"),
    dict(sampler="lossless"),
    dict(drafter="model"),
    dict(token_wise=True),
    dict(sampler="cspd"),
    dict(sampler="cspd", variant="official"),
]


@pytest.mark.parametrize("sampler", [dict(sampler="sequential"), dict(sampler="lossless"), dict(sampler="cspd")])
def test_p13_a_nan_stops_the_run_names_the_image_and_writes_nothing_of_it(tiny_xar_pipeline, tmp_path, sampler):
    folder = RunFolder(tmp_path / "out", {})
    folder.open()
    specs = [image_spec(i, range(10), 0) for i in range(5)]
    generate_images(tiny_xar_pipeline, folder, specs[:2], 2, sampler)
    tiny_xar_pipeline.model.class_emb.weight[3] = float("nan")
    with pytest.raises(ValueError, match=r"^image 3 is not finite, so nothing of its batch was written; 0 images of this run are kept"):
        generate_images(tiny_xar_pipeline, folder, specs, 2, sampler)
    assert sorted(path.name for path in folder.path.glob("*.png")) == ["000000.png", "000001.png"]


def test_p13_a_nan_of_one_token_names_its_image(tiny_xar_pipeline):
    def at_one_token(_module, _args, out):  # of the second image
        out[1, 0, 2] = float("nan")

    tiny_xar_pipeline.model.pred.register_forward_hook(at_one_token)
    with pytest.raises(NonFiniteImageError) as caught:
        tiny_xar_pipeline([0, 1, 2], sampler="sequential", generator=seeded(0, 1, 2))
    assert caught.value.indices == [1]


@pytest.mark.parametrize("drafter, bound", [("free", 0.1), ("model", 0.1)])
def test_p13_half_precision_accepts_as_much_as_single_precision(tiny_xar, tiny_xar_draft, drafter, bound):
    """The mean length that stands, over 2,000 chains: its own error is about 0.03 transitions."""

    def accepted(dtype):
        target, draft = (XARAdapter(copy.deepcopy(model).to(dtype), num_inference_steps=STEPS) for model in (tiny_xar, tiny_xar_draft))
        trace, labels = Trace(2000), torch.full((2000,), 2)
        settings = CellSettings(window=4, drafter=drafter)
        other = draft.chain(labels, None, 2000) if drafter == "model" else None
        first = lossless(shared_noise(2000, 2), settings, trace)(target.chain(labels, None, 2000), other)
        assert first.dtype == torch.float32
        return sum(trace.chain.accepted) / len(trace.chain.accepted)

    assert abs(accepted(torch.bfloat16) - accepted(torch.float32)) < bound


@pytest.mark.parametrize("sampler", ALL_SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_p14_a_whole_xar_in_half_precision_samples_finite_values(tiny_xar_pipeline, dtype, sampler):
    output = tiny_xar_pipeline.to(dtype=dtype)([0, 1], generator=seeded(0, 1), output_type="latent", **sampler)
    assert output.images.isfinite().all() and output.images.dtype == torch.float32


class Host(torch.Tensor):
    """A tensor that was brought to the host; it cannot meet one that was not. Whole numbers may have been made on the host."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs or {})):
            device = isinstance(x, torch.Tensor) and not isinstance(x, cls) and x.is_floating_point() and x.dim() > 0
            assert not device, f"{func.__name__} of host and device"
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("sampler", ALL_SAMPLERS)
def test_p15_no_float64_where_the_device_has_none(tiny_xar_pipeline, monkeypatch, sampler):
    """The CPU plays a device without float64: what `cpu()` did not fetch is never widened, moved as float64 or mixed with what it did."""
    cpu, double, to = torch.Tensor.cpu, torch.Tensor.double, torch.Tensor.to
    fetched = []

    def guarded_double(x):
        assert isinstance(x, Host), "float64 on a device without it"
        return double(x)

    def guarded_to(x, *args, **kwargs):
        plain = x.as_subclass(torch.Tensor)
        out = to(plain, *args, **kwargs)
        assert out.dtype != torch.float64, "float64 moved to a device without it"
        return out

    def guarded_cpu(x):
        fetched.extend([x.shape] if x.is_floating_point() else [])
        return cpu(x).as_subclass(Host)

    monkeypatch.setattr("car_spec.coupling.has_float64", lambda device: False)
    for name, guarded in (("cpu", guarded_cpu), ("double", guarded_double), ("to", guarded_to)):
        monkeypatch.setattr(torch.Tensor, name, guarded)
    output = tiny_xar_pipeline([0, 1], generator=seeded(0, 1), output_type="latent", **sampler)
    assert output.images.dtype == torch.float32 and type(output.images) is torch.Tensor
    assert bool(fetched) == (output.settings["sampler"] == "lossless" and not output.settings["token_wise"])


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_p19_shapes_hold_at_every_batch_size(golden_xar, tiny_xar_pipeline, batch, guidance_scale):
    for sampler in ALL_SAMPLERS:
        latents = tiny_xar_pipeline([0] * batch, guidance_scale=guidance_scale, output_type="latent", **sampler).images
        assert latents.shape == (batch, 4, 4, 4)
    adapter = XARAdapter(golden_xar, num_inference_steps=2)
    cells = sample_cells(adapter, torch.zeros(batch, dtype=torch.int64), guidance_scale, sequential(Noise(seeded(*range(batch)))))
    assert from_cells(cells).shape == (batch, 16, 16, 16)
    loss = golden_xar(cells, torch.zeros(batch, dtype=torch.int64), torch.Generator().manual_seed(0))
    assert loss.shape == () and loss.isfinite()


@pytest.mark.parametrize("sampler", ["sequential", "lossless", "cspd"])
@pytest.mark.parametrize("scale, expected", [(1.0, {3}), (3.0, {3, 6})])
def test_p20_guidance_of_one_never_doubles_the_batch(tiny_xar_pipeline, monkeypatch, scale, expected, sampler):
    """With guidance the first cell is not guided yet, so its calls are not doubled either."""
    seen, velocity = [], XAR.velocity

    def spy(model, x, conditions, cache=None, owner=None, keep=0, first=None):
        seen.append(len(conditions) if owner is None else 6 if (owner >= 3).any() else 3)
        return velocity(model, x, conditions, cache, owner, keep, first)

    monkeypatch.setattr(XAR, "velocity", spy)
    tiny_xar_pipeline([0, 1, 2], num_inference_steps=4, guidance_scale=scale, sampler=sampler, generator=seeded(0, 1, 2))
    assert set(seen) == expected and seen[0] == 3
    assert sampler != "sequential" or len(seen) == 4 * 4 + 3


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(num_inference_steps=1), "num_inference_steps 1 is outside 2..1000"),
        (dict(num_iter=256), "num_iter 256 is not possible with xAR: tiny-xar has 4"),
        (dict(temperature=0.9), "temperature 0.9 is not possible with xAR: tiny-xar has 1.0"),
        (dict(guidance_schedule="constant"), "guidance_schedule constant is not possible with xAR: tiny-xar has linear"),
        (dict(lookahead=4), "lookahead 4 is not possible with xAR, whose cells are drafted one at a time"),
        (dict(sampler="cspd", temperature=0.0), "temperature 0.0 is not possible with xAR: tiny-xar has 1.0"),
        (dict(sampler="cspd", draft_length=0), "draft_length 0 is below 1"),
        (dict(window=0), "window 0 is below 1"),
        (dict(drafter="oracle"), "drafter 'oracle' is none of self, frozen, model"),
    ],
)
def test_p21_arguments_are_checked_before_any_work(tiny_xar_pipeline, monkeypatch, arguments, sentence):
    monkeypatch.setattr(XAR, "velocity", None)
    with pytest.raises(ValueError, match=sentence):
        tiny_xar_pipeline([0], **arguments)


def test_p21_two_steps_and_no_label_are_fine(tiny_xar_pipeline):
    for sampler in ALL_SAMPLERS:
        assert tiny_xar_pipeline(None, num_images=2, num_inference_steps=2, output_type="latent", **sampler).images.isfinite().all()
    with pytest.raises(ValueError, match="num_inference_steps 1 is below 2"):
        XARAdapter(tiny_xar_pipeline.model, num_inference_steps=1)


def test_p26_a_size_the_model_cannot_make_is_one_sentence(tiny_xar_file, capsys):
    assert main(["generate", "--model", str(tiny_xar_file), "--image-size", "512"]) == 2
    assert "--image-size 512: tiny-xar makes 8 only" in capsys.readouterr().err


def test_p31_equal_settings_write_one_folder_and_other_networks_another(tiny_xar_file, tmp_path, capsys):
    """The manifest names model, steps and seed; a folder made with others is refused."""
    arguments = ["generate", "--model", str(tiny_xar_file), "--num-images", "4", "--batch-size", "2", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert len(list((tmp_path / "out").glob("0*.png"))) == 4  # no batch too many where it divides evenly
    before = (tmp_path / "out" / "000001.png").read_bytes()
    (tmp_path / "out" / "000001.png").unlink()
    assert main(arguments) == 0 and (tmp_path / "out" / "000001.png").read_bytes() == before
    other = tmp_path / "other.safetensors"
    metadata = {METADATA_KEY: json.dumps({"num_heads": 2, "num_cells": 4, "preset": {"name": "tiny-xar", "num_heads": 2, "num_iter": 4}})}
    save_file(random_xar(TINY_XAR_PIPELINE, 3).state_dict(), other, metadata)
    changed = (["--num-inference-steps", "5"], ["--seed", "1"], ["--model", str(other), "--vae", str(tiny_xar_file.parent / "vae")])
    for flags in changed:
        assert main([*arguments, *flags]) == 2 and "was made with" in capsys.readouterr().err


@pytest.mark.parametrize("name, width", [("base", 768), ("large", 1024), ("huge", 1280)])
def test_recipes_of_the_released_sizes_say_what_the_presets_say(tiny_vae, name, width):
    args, preset = parse(["generate", "--config", f"xar-{name}"]), PRESETS["xar", width]
    with torch.device("meta"):
        network = XAR(replace(TINY_XAR_PIPELINE, width=width, num_heads=preset.num_heads))
    whole = XARPipeline(network, tiny_vae, preset)
    given = {name: getattr(args, name) for name in SAMPLING}
    assert whole.settings(**given) == whole.settings() and args.image_size == 256
    assert parse(["generate", "--config", f"xar-{name}-50k"]).num_images == 50_000


# --- the shipped weights


def test_target_and_draft_have_the_promised_sizes(demo_xar, demo):
    count = lambda pipeline: sum(parameter.numel() for parameter in pipeline.model.parameters())
    assert 4e6 <= count(demo_xar) <= 6e6 and count(demo_xar.draft) <= count(demo_xar) / 5
    assert demo_xar.image_size == 32 and demo_xar.model.config.num_cells == 4
    assert demo_xar.class_names == demo.class_names and len(demo.class_names) == demo_xar.num_classes


@pytest.mark.parametrize("arguments", [dict(sampler="sequential"), dict(sampler="lossless"), dict(drafter="model")])
def test_the_shipped_model_makes_emoji_of_its_classes_on_a_white_ground(demo_xar, arguments):
    output = demo_xar(
        ["face-smiling"] * 4 + ["country-flag"] * 4, generator=seeded(*range(8)), output_type="pt", num_inference_steps=20, **arguments
    )
    corners = output.images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.mean() > 0.9
    middle = output.images[:4, :, 6:26, 6:26].mean((0, 2, 3))
    assert middle[0] > 0.75 and middle[1] > 0.55 and middle[2] < 0.55  # yellow
    height = lambda images: images.mean(1).lt(0.9).any(2).float().sum(1).mean()  # rows that are not blank
    assert height(output.images[4:]) < height(output.images[:4])  # flags are lower than faces


def test_the_lossless_sampler_takes_a_fraction_of_the_calls(demo_xar):
    output = demo_xar(["face-smiling"], generator=seeded(0), output_type="latent")
    assert output.trace.sequential_calls < 203 / 2.5 and output.trace.chain.fallbacks == 0


def corner(model: XAR, tokens: int) -> XAR:
    """The trained network on the first tokens of each cell: real weights, at a size that affords many images."""
    config = model.config
    per_cell = tokens // config.num_cells
    kept = (torch.arange(config.num_cells)[:, None] * config.tokens_per_cell + torch.arange(per_cell)).flatten()
    state = {name: value[:, kept] if "pos_embed" in name else value for name, value in model.state_dict().items()}
    small = XAR(replace(config, num_tokens=tokens))
    small.load_state_dict(state)
    return small.eval()


@pytest.mark.parametrize("name, images", [("demo-xar-draft", 300), pytest.param("demo-xar", 1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@torch.no_grad()
def test_lossless_sampling_keeps_the_law_of_the_shipped_networks(name, images, guidance_scale):
    adapter = XARAdapter(corner(load_pipeline(name).model, 16), num_inference_steps=6)
    problem, trace = (adapter, torch.full((images,), 3), guidance_scale), Trace(images)
    expected = sample_cells(*problem, sequential(shared_noise(images, 1)))
    ours = sample_cells(*problem, lossless(shared_noise(images, 2), CellSettings(window=5), trace), None, trace)
    assert sum(trace.chain.accepted) > 0.5 * len(trace.chain.accepted) and trace.fallbacks == 0  # it did speculate
    mean, directions = principal_components(expected.flatten(1), 24)
    ours, expected = ((x.flatten(1).double() - mean) @ directions for x in (ours, expected))
    assert smallest_p(ours, expected) > 0.01
    assert largest_z(ours, expected) < 5
    assert energy_test(ours[:1000], expected[:1000]) > 0.01
