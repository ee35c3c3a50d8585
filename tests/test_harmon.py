"""Harmon against numbers of the authors' implementation, its files and prompts, and the samplers on it."""

from types import SimpleNamespace

import pytest
import torch
from conftest import golden_json, golden_keys

from car_spec.adapters.harmon import HarmonAdapter
from car_spec.adapters.mar import unpatchify
from car_spec.models.harmon import Harmon, extend, infer_harmon_config, pad_right, rollback
from car_spec.models.loading import Checkpoint

NETWORK = dict(atol=2e-5, rtol=0)  # one float32 pass, another order of operations
GRIDS = {"full44": (4, 4), "part44": (4, 4), "all44": (4, 4), "part46": (4, 6), "full66": (6, 6)}
RUNS = golden_json("harmon_tiny")["runs"] | {"sample100": golden_json("harmon_tiny")["sample100"]}
IDS = golden_json("harmon_tiny")["prompts"]  # A of 7 tokens, B of 4, U of 3


@pytest.fixture(scope="module")
def prompts(golden_harmon):
    """A, B and U, read once."""
    return golden_harmon.read_prompts(*pad_right([IDS["A"], IDS["B"], IDS["U"]]))


# --- networks


def test_prompts_are_read_as_in_the_release(golden_harmon, harmon_golden):
    ids, mask = harmon_golden["prompt/ids"], harmon_golden["prompt/mask"].bool()
    padded, ours = pad_right([IDS["A"], IDS["B"]])
    assert torch.equal(ours, mask) and torch.equal(padded[mask], ids[mask])
    hidden = golden_harmon.llm.model(input_ids=padded).last_hidden_state
    torch.testing.assert_close(hidden[mask], harmon_golden["prompt/hidden"][mask], **NETWORK)


@pytest.mark.parametrize("case", GRIDS)
def test_encoder_and_decoder_reproduce_the_release(golden_harmon, harmon_golden, prompts, case):
    expected = lambda name: harmon_golden[f"encode/{case}/{name}"]
    tokens = expected("x").flatten(1, 2)  # (2, N, 4)
    mask = torch.zeros(tokens.shape[:2]) if case.startswith("full") else expected("mask")
    positions, calls = golden_harmon.mar.position_tables(GRIDS[case]), []
    hook = golden_harmon.llm.model.register_forward_pre_hook(lambda _, args: calls.append(args))
    encoded = golden_harmon.encode(tokens, mask, positions)
    out = golden_harmon.continue_prompts(encoded, mask, prompts, torch.tensor([0, 1]))
    hook.remove()
    torch.testing.assert_close(encoded, expected("x_enc"), **NETWORK)
    _, attention_mask, position_ids, _, read = calls[0]
    torch.testing.assert_close(read, expected("z_enc"), **NETWORK)
    assert torch.equal(position_ids, expected("position_ids"))
    if case == "part46":
        assert torch.equal(attention_mask, expected("attention_mask").long())
    torch.testing.assert_close(out, expected("x_out"), **NETWORK)
    torch.testing.assert_close(golden_harmon.mar.forward_mae_decoder(out, mask, positions), expected("z"), **NETWORK)


def test_reading_prompt_and_image_in_one_pass_gives_the_same(golden_harmon, harmon_golden, prompts):
    """Each row alone, without cache, padding or masks."""
    tokens, mask = harmon_golden["encode/part44/x"].flatten(1, 2), harmon_golden["encode/part44/mask"]
    encoded = golden_harmon.encode(tokens, mask)
    out = golden_harmon.continue_prompts(encoded, mask, prompts, torch.tensor([1, 2]))
    for i, name in enumerate("BU"):
        words = golden_harmon.llm.model.embed_tokens(torch.tensor([IDS[name]]))
        read = golden_harmon.proj_in(encoded[i : i + 1].roll(-4, 1))  # the buffer's 4 slots go last
        hidden = golden_harmon.llm.model(inputs_embeds=torch.cat([words, read], 1)).last_hidden_state[:, len(IDS[name]) :]
        torch.testing.assert_close(out[i], (encoded[i] + golden_harmon.proj_out(hidden.roll(4, 1)))[0], **NETWORK)


def test_rows_with_different_numbers_of_known_tokens_do_not_disturb_each_other(golden_harmon, prompts):
    tokens = torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 16)
    mask[0, [3, 7, 8]] = 0
    mask[2, ::2] = 0
    rows = torch.tensor([2, 0, 1])
    together = golden_harmon.mar.forward_mae_decoder(golden_harmon.forward_mae_encoder(tokens, mask, prompts, rows), mask)
    for i in range(3):
        one = (tokens[i : i + 1], mask[i : i + 1])
        alone = golden_harmon.mar.forward_mae_decoder(golden_harmon.forward_mae_encoder(*one, prompts, rows[i : i + 1]), one[1])
        torch.testing.assert_close(together[i], alone[0], **NETWORK)


@pytest.mark.parametrize("shape", ["4x6", "6x6", "3x2"])
def test_position_tables_are_interpolated_as_in_the_release(golden_harmon, harmon_golden, shape):
    tables = golden_harmon.mar.position_tables(tuple(map(int, shape.split("x"))))
    for name, table in tables._asdict().items():
        torch.testing.assert_close(table, harmon_golden[f"pos/{shape}/{name}"], **NETWORK)


def test_the_learned_grid_takes_the_tables_untouched(golden_harmon):
    assert golden_harmon.mar.position_tables((4, 4)).encoder is golden_harmon.mar.encoder_pos_embed_learned


def test_head_reproduces_the_release(golden_harmon, harmon_golden):
    x, t, c = (harmon_golden[f"head/{name}"] for name in "xtc")
    torch.testing.assert_close(golden_harmon.mar.diffloss.net(x, t, c), harmon_golden["head/out"], **NETWORK)


@pytest.mark.parametrize("name, heads, layers", [("harmon_0.5b", (12, 14, 2), 24), ("harmon_1.5b", (16, 12, 2), 28)])
def test_full_size_harmon_has_the_names_and_shapes_of_the_release(name, heads, layers, tmp_path):
    keys = golden_keys(name)
    state = {key: torch.empty(shape, device="meta") for key, shape in keys.items()}
    config = infer_harmon_config(Checkpoint(tmp_path / "renamed.pth", "flat", state))
    with torch.device("meta"):
        model = Harmon(config)
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == keys
    assert (config.mar.num_heads, config.llm.num_attention_heads, config.llm.num_key_value_heads) == heads
    assert config.llm.num_hidden_layers == layers


# --- sequential sampling


def problem(model, prompts, run, settings, adapter_class=HarmonAdapter):
    """-> adapter, AR steps, rows and null rows of a recorded run."""
    images = [name for name in run["prompts"] if name != "U"]
    adapter = adapter_class(model, prompts, tuple(run["image_shape"]), temperature=run.get("temperature", 1.0), **settings)
    rows = torch.tensor([["ABU".index(name)] for name in images])
    return adapter, rows, torch.full_like(rows, 2)


def run_recorded(model, prompts, numbers, name, adapter_class=HarmonAdapter):
    """-> AR steps, tokens after each of them (K, B, N, D)."""
    from car_spec.sequential import sample_sequential

    run, hundred = RUNS[name], name == "sample100"
    adapter, rows, nulls = problem(model, prompts, run, dict(num_inference_steps=100 if hundred else 8), adapter_class)
    shape = "{}x{}".format(*run["image_shape"])
    batch = torch.arange(len(rows))[:, None]
    step_noise = numbers["sample100/step_noise" if hundred else f"noise/{shape}/step"]
    noise = lambda positions: (numbers[f"noise/{shape}/init"][batch, positions], step_noise[batch, positions])
    steps = adapter.ar_steps(numbers[f"noise/{shape}/orders"][: len(rows)], run["num_iter"], run["cfg"], run["cfg_schedule"])
    seen: list[torch.Tensor] = []
    sample_sequential(adapter, steps, rows, nulls, noise, lambda i, tokens: seen.append(tokens))
    return steps, torch.stack(seen)


@pytest.mark.parametrize("name", RUNS)
def test_sequential_sampler_reproduces_the_recorded_runs(golden_harmon, harmon_golden, prompts, name):
    steps, tokens = run_recorded(golden_harmon, prompts, harmon_golden, name)
    prefix, tolerance = ("sample100", 1e-3) if name == "sample100" else (f"sample/{name}", 2e-2)
    torch.testing.assert_close(tokens, harmon_golden[f"{prefix}/tokens"], atol=tolerance, rtol=0)
    decoded = unpatchify(tokens[-1], 1, RUNS[name]["image_shape"][0]) / 0.2325
    torch.testing.assert_close(decoded, harmon_golden[f"{prefix}/decoded"], atol=5 * tolerance, rtol=0)
    if name != "sample100":
        predicted = torch.zeros(tokens.shape[:3], dtype=torch.uint8)
        for i, step in enumerate(steps):
            predicted[i].scatter_(1, step.positions, 1)
        assert torch.equal(predicted, harmon_golden[f"{prefix}/predicted"])
        assert [step.guidance_scale for step in steps] == pytest.approx(RUNS[name]["cfg_iter"])


def test_conditions_of_a_guided_run_are_reproduced_at_every_step(golden_harmon, harmon_golden, prompts):
    seen = []

    class Recording(HarmonAdapter):
        def conditions(self, *args):
            seen.append(super().conditions(*args))
            return seen[-1]

    run_recorded(golden_harmon, prompts, harmon_golden, "s44_cfg3_two", Recording)
    z = torch.stack(seen).transpose(1, 2).flatten(1, 2)  # (K, H B, N, W)
    # tokens differ by what the first step makes of a rounding, see the tolerance of the tokens
    torch.testing.assert_close(z, harmon_golden["sample/s44_cfg3_two/z"], atol=5e-3, rtol=0)
    torch.testing.assert_close(z[0], harmon_golden["sample/s44_cfg3_two/z"][0], **NETWORK)


def positions_after_the_padding(prompts):
    return lambda rows: SimpleNamespace(cache=prompts.of(rows).cache, mask=torch.ones_like(prompts.of(rows).mask))


def wrong_unconditional_prompt(prompts):
    return lambda rows: prompts.of(rows.where(rows != 2, torch.tensor(1)))


@pytest.mark.parametrize("mistake", [positions_after_the_padding, wrong_unconditional_prompt])
def test_recorded_run_notices_wrong_prompts(golden_harmon, harmon_golden, prompts, mistake):
    wrong = SimpleNamespace(of=mistake(prompts))
    _, tokens = run_recorded(golden_harmon, wrong, harmon_golden, "sample100")
    assert (tokens - harmon_golden["sample100/tokens"]).abs().max() > 1e-3


# --- the cache


def test_p11_rollback_leaves_a_prefix_that_goes_on_like_a_fresh_one(golden_harmon):
    from transformers import DynamicCache

    llm, ids = golden_harmon.llm.model, torch.tensor([[5, 17, 99, 3, 64]])
    read = lambda ids, cache: extend(llm, cache, ids=ids)
    for keep in (5, 3, 0):
        cache, fresh = DynamicCache(), DynamicCache()
        read(ids, cache)
        rollback(cache, keep)
        assert cache.get_seq_length() == keep
        if keep:
            read(ids[:, :keep], fresh)
        torch.testing.assert_close(read(ids[:, :2] + 1, cache), read(ids[:, :2] + 1, fresh), **NETWORK)


class FakeCache:
    def __init__(self, length):
        self.length, self.crops = length, []

    def get_seq_length(self):
        return self.length


class LengthToKeep(FakeCache):
    """transformers 4: the length to keep, or minus the number to drop."""

    def crop(self, length):
        self.length = min(self.length, length) if length >= 0 else self.length + length


class NumberToDrop(FakeCache):
    """transformers 5: minus the number to drop."""

    def crop(self, number):
        if number > 0:
            raise ValueError("positive")
        self.length += number


@pytest.mark.parametrize("kind", [LengthToKeep, NumberToDrop])
@pytest.mark.parametrize("keep", [5, 3, 0])
def test_p11_rollback_holds_for_both_meanings_of_crop(kind, keep):
    cache = kind(5)
    rollback(cache, keep)
    assert cache.length == keep


def test_p11_a_rollback_that_cannot_be_is_one_sentence():
    for keep in (6, -1):
        with pytest.raises(ValueError, match=rf"^keep {keep} is outside 0\.\.5, the tokens in the cache$"):
            rollback(NumberToDrop(5), keep)
    stubborn = FakeCache(5)
    stubborn.crop = lambda number: None
    with pytest.raises(RuntimeError, match="the cache holds 5 tokens after a roll-back to 3"):
        rollback(stubborn, 3)
