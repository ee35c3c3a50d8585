"""Harmon against numbers of the authors' implementation, its files and prompts, and the samplers on it."""

import ast
import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import HARMON_LLM, TINY, golden_json, golden_keys, golden_state
from safetensors.torch import save_file
from two_sample import largest_z, shared_noise, smallest_p

import car_spec
from car_spec.adapters.harmon import HarmonAdapter, grid_of, read_texts
from car_spec.adapters.mar import unpatchify
from car_spec.engine import LosslessSampler, LosslessSettings
from car_spec.models.harmon import (
    Harmon,
    HarmonConfig,
    Prompts,
    QwenConfig,
    extend,
    infer_harmon_config,
    load_harmon,
    load_tokenizer,
    pad_right,
    rollback,
)
from car_spec.models.loading import Checkpoint, CheckpointError, read_checkpoint
from car_spec.models.presets import PRESETS
from car_spec.models.vae import load_vae
from car_spec.noise import Noise
from car_spec.sequential import noise_from_generators, sample_sequential
from car_spec.trace import Trace

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


def test_texts_read_in_one_pass_with_the_image_give_the_same_with_gradients(golden_harmon, prompts):
    ids, text_mask = pad_right([IDS["A"], IDS["B"], IDS["U"]])
    tokens = torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 16)
    mask[0, [3, 7, 8]] = 0
    mask[2, ::2] = 0
    encoded = golden_harmon.encode(tokens, mask).requires_grad_()
    out = golden_harmon.continue_texts(encoded, mask, ids, text_mask)
    real = torch.arange(out.shape[1]) < 4 + (mask == 0).sum(1, keepdim=True)
    torch.testing.assert_close(out[real], golden_harmon.continue_prompts(encoded, mask, prompts, torch.arange(3))[real], **NETWORK)
    (gradient,) = torch.autograd.grad(out[real].sum(), encoded)
    assert gradient[real].abs().amin(-1).gt(0).any() and gradient.isfinite().all()


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
    preset = PRESETS["harmon", config.mar.width]
    assert (preset.name, preset.num_heads, preset.num_iter, preset.guidance_scale) == (name, heads[0], 64, 3.0)
    assert (preset.guidance_schedule, preset.num_inference_steps, preset.temperature) == ("constant", 100, 1.0)


# --- sequential sampling


def problem(model, prompts, run, settings, adapter_class=HarmonAdapter):
    """-> adapter, AR steps, rows and null rows of a recorded run."""
    images = [name for name in run["prompts"] if name != "U"]
    adapter = adapter_class(model, prompts, tuple(run["image_shape"]), temperature=run.get("temperature", 1.0), **settings)
    rows = torch.tensor([["ABU".index(name)] for name in images])
    return adapter, rows, torch.full_like(rows, 2)


def run_recorded(model, prompts, numbers, name, adapter_class=HarmonAdapter):
    """-> AR steps, tokens after each of them (K, B, N, D)."""
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


class PositionsAfterThePadding(Prompts):
    def of(self, rows):
        own = super().of(rows)
        return Prompts(own.cache, torch.ones_like(own.mask))


class WrongUnconditionalPrompt(Prompts):
    def of(self, rows):
        return super().of(rows.where(rows != 2, torch.tensor(1)))


@pytest.mark.parametrize("mistake", [PositionsAfterThePadding, WrongUnconditionalPrompt])
def test_recorded_run_notices_wrong_prompts(golden_harmon, harmon_golden, prompts, mistake):
    _, tokens = run_recorded(golden_harmon, mistake(prompts.cache, prompts.mask), harmon_golden, "sample100")
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


# --- files


@pytest.fixture
def flat_file(tmp_path):
    """As in the release: one flat file; the configuration of its Qwen2.5 lies beside it."""
    torch.save(golden_state("harmon_tiny"), tmp_path / "harmon_tiny.pth")
    (tmp_path / "config.json").write_text(json.dumps(QWEN_JSON))
    return tmp_path / "harmon_tiny.pth"


QWEN_JSON = {"model_type": "qwen2", "hidden_size": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e6} | HARMON_LLM


def same_weights(model, state):
    ours = model.state_dict()
    return all(torch.equal(ours[name], value) for name, value in state.items())


def test_a_flat_file_loads_with_everything_that_shapes_tell(flat_file, golden_harmon):
    model = load_harmon(read_checkpoint(flat_file), num_heads=4)
    assert model.config == golden_harmon.config
    assert same_weights(model, golden_state("harmon_tiny"))


def test_a_transformers_folder_loads_without_its_code(tmp_path, golden_harmon):
    state = {name: value.bfloat16() for name, value in golden_state("harmon_tiny").items() if name != "llm.lm_head.weight"}
    halves = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for i, (name, value) in enumerate(state.items()):
        list(halves.values())[i % 2][name] = value
    for name, part in halves.items():
        save_file(part, tmp_path / name)
    index = {"weight_map": {key: name for name, part in halves.items() for key in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "harmon", "auto_map": {"AutoModel": "modeling_harmon.HarmonModel"}, "llm": QWEN_JSON}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_harmon.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    model = load_harmon(read_checkpoint(tmp_path), num_heads=4)
    assert model.config == golden_harmon.config and same_weights(model, state)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json names model-00002-of-00002\.safetensors, which does not lie beside it"):
        read_checkpoint(tmp_path)


def test_a_folder_with_one_safetensors_file_loads(tmp_path, golden_harmon):
    save_file(golden_state("harmon_tiny"), tmp_path / "model.safetensors")
    newer = {name: value for name, value in QWEN_JSON.items() if name != "rope_theta"} | {"rope_parameters": {"rope_theta": 1e6}}
    (tmp_path / "config.json").write_text(json.dumps(newer))
    assert load_harmon(read_checkpoint(tmp_path), num_heads=4).config == golden_harmon.config


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": "../x.pth"}}'])
def test_a_broken_index_is_one_sentence(tmp_path, content):
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.pth")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"^\S+index\.json (is no index of a checkpoint|names (no file|\.\./x\.pth))"):
        read_checkpoint(tmp_path / "folder")


def test_a_tuned_file_lies_over_its_base_in_the_wider_dtype(tmp_path, flat_file, golden_harmon):
    tuned = {"module.mar.mask_token": torch.full((1, 1, 24), 0.5, dtype=torch.float64)}
    torch.save({"state_dict": tuned}, tmp_path / "tuned.pth")
    over, base = read_checkpoint(tmp_path / "tuned.pth"), read_checkpoint(flat_file)
    model = load_harmon(over, base=base, num_heads=4)
    assert model.mar.mask_token.eq(0.5).all()
    assert torch.equal(model.proj_in[0].weight, golden_harmon.proj_in[0].weight.double())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    with pytest.raises(CheckpointError, match=r"tuned\.pth holds no known model: 0 of its 1 keys matched Harmon's"):
        load_harmon(over)
    torch.save({"mar.other": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"other\.pth has 1 parameters that --base .*harmon_tiny\.pth lacks: mar\.other"):
        load_harmon(read_checkpoint(tmp_path / "other.pth"), base=base)


def test_the_autoencoder_inside_a_harmon_file_loads(tmp_path, golden_harmon):
    inside = {f"vae.{name}": value for name, value in golden_state("kl16_tiny").items()}
    torch.save(golden_state("harmon_tiny") | inside, tmp_path / "whole.pth")
    (tmp_path / "config.json").write_text(json.dumps(QWEN_JSON))
    assert load_harmon(read_checkpoint(tmp_path / "whole.pth"), num_heads=4).config == golden_harmon.config
    assert load_vae(tmp_path / "whole.pth").config.latent_channels == 4


def test_p05_what_is_missing_or_unknown_in_a_file_is_named(flat_file):
    state = golden_state("harmon_tiny")
    for change, sentence in (
        ({"proj_in.0.bias": None}, r"it lacks 1: proj_in\.0\.bias"),
        ({"extra": torch.zeros(1)}, r"it has unknown 1: extra"),
        ({"proj_in.0.bias": torch.zeros(3)}, r"proj_in\.0\.bias has shape \(3,\), expected \(32,\)"),
        ({"llm.model.embed_tokens.weight": None}, r"looks like a Harmon checkpoint but has no llm\.model\.embed_tokens\.weight"),
    ):
        torch.save({name: value for name, value in (state | change).items() if value is not None}, flat_file)
        with pytest.raises(CheckpointError, match=sentence):
            load_harmon(read_checkpoint(flat_file), num_heads=4)


def test_the_tied_output_layer_may_be_absent(flat_file):
    state = golden_state("harmon_tiny")
    del state["llm.lm_head.weight"]
    torch.save(state, flat_file)
    model = load_harmon(read_checkpoint(flat_file), num_heads=4)
    assert torch.equal(model.llm.lm_head.weight, model.llm.model.embed_tokens.weight)


def test_a_language_model_of_unknown_heads_or_another_width_is_one_sentence(flat_file):
    config = flat_file.parent / "config.json"
    config.write_text(json.dumps(QWEN_JSON | {"hidden_size": 64}))
    with pytest.raises(CheckpointError, match=r"has a language model of width 32, but its configuration says 64"):
        load_harmon(read_checkpoint(flat_file), num_heads=4)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"width 32, which is no preset's, .*put the config\.json of its Qwen2\.5 beside it"):
        load_harmon(read_checkpoint(flat_file), num_heads=4)


def test_other_models_are_named(tmp_path, tiny_mar):
    torch.save(tiny_mar.state_dict(), tmp_path / "mar.pth")
    with pytest.raises(CheckpointError, match="holds a mar checkpoint, where a Harmon checkpoint is expected"):
        load_harmon(read_checkpoint(tmp_path / "mar.pth"))


# --- prompts


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file):
    return load_tokenizer(tokenizer_file.parent, 128)


def test_prompts_stand_in_the_template_of_the_release_without_padding_or_cuts(golden_harmon, tokenizer):
    asked = []
    recording = SimpleNamespace(encode=lambda text: asked.append(text) or tokenizer.encode(text))
    read = read_texts(golden_harmon, recording, ["a red cat", "a dog", "a red cat"])
    assert asked == [
        "<|im_start|>user\nGenerate an image: a red cat<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nGenerate an image: a dog<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nGenerate an image.<|im_end|>\n<|im_start|>assistant\n",
    ]
    # a token a letter, but one for each of the three marks of 12, 10 and 12 letters
    assert read.prompts.mask.sum(1).tolist() == [len(text) - 34 + 3 for text in asked]
    assert read.rows.tolist() == [[0], [1], [0]] and read.null_rows.tolist() == [[2]] * 3


@pytest.mark.parametrize(
    "texts, sentence",
    [
        ("", "prompt 0 is empty"),
        (["a cat", " \n"], "prompt 1 is empty"),
        ([], "there is nothing to sample: prompts is empty"),
        (None, "prompt 0 is of type NoneType, not text"),
        (7, "prompt 0 is of type int, not text"),
        (b"a cat", "prompt 0 is of type bytes, not text"),
        (["a cat", ["a dog"]], "prompt 1 is of type list, not text"),
        (
            ["a cat", "a" * 500],
            "prompt 1 has 538 tokens, its template included, but the context of 512 leaves 492 beside an image of 16",
        ),
    ],
)
def test_prompts_that_cannot_be_read_are_one_sentence_before_any_work(golden_harmon, tokenizer, monkeypatch, texts, sentence):
    monkeypatch.setattr(type(golden_harmon.llm.model), "forward", None)
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        read_texts(golden_harmon, tokenizer, texts)


def test_the_longest_prompt_that_fits_the_context_is_read_and_a_larger_image_leaves_less(golden_harmon, tokenizer):
    reading = read_texts(golden_harmon, tokenizer, "a" * 454)
    assert reading.prompts.mask.sum(1).tolist()[0] == 492
    with pytest.raises(ValueError, match=r"^the longest prompt has 492 tokens, but the context of 512 leaves 472 beside an image of 36$"):
        HarmonAdapter(golden_harmon, reading.prompts, (6, 6))
    with pytest.raises(ValueError, match=r"^prompt 0 has 492 tokens, .* leaves 472 beside an image of 36$"):
        read_texts(golden_harmon, tokenizer, "a" * 454, (6, 6))


def test_a_tokenizer_that_is_missing_broken_or_too_large_is_one_sentence(tmp_path, tokenizer_file):
    with pytest.raises(CheckpointError, match=r"^--tokenizer .*: there is no tokenizer\.json"):
        load_tokenizer(tmp_path, 128)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"^--tokenizer .*tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path, 128)
    with pytest.raises(CheckpointError, match=r"^--tokenizer .* has 98 tokens, but the model's table has 64$"):
        load_tokenizer(tokenizer_file, 64)


def test_padding_in_front_of_a_prompt_is_refused(golden_harmon):
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for mask in ([[1, 1, 1], [0, 1, 1]], [[1, 0, 1], [1, 1, 1]], [[1, 1, 1], [0, 0, 0]]):
        with pytest.raises(ValueError, match="pad them on the right"):
            golden_harmon.read_prompts(ids, torch.tensor(mask))


# --- pitfalls of devices, versions and sampling

HIDDEN = "timm diffusers einops huggingface_hub safetensors numpy PIL yaml tqdm transformers tokenizers flash_attn"


def run_without(packages, program):
    refusing = f"""
import sys, torch
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages.split()!r}:
            raise ModuleNotFoundError(name)
for name in [n for n in sys.modules if n.split(".")[0] in {packages.split()!r}]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuse())
"""
    return subprocess.run([sys.executable, "-c", refusing + program], capture_output=True, text=True)


def test_p09_importing_harmon_needs_torch_alone():
    done = run_without(HIDDEN, "import car_spec.models.harmon, car_spec.adapters.harmon; print('imported')")
    assert done.stdout == "imported\n", done.stderr


def test_p09_without_transformers_one_sentence_names_the_extra():
    done = run_without("transformers", "from car_spec.models.harmon import Harmon\nHarmon(None)")
    assert done.stderr.splitlines()[-1] == "ImportError: Harmon needs the package transformers: pip install 'car-spec[harmon]'"


def test_p09_attention_is_torchs_own_and_flash_attn_is_never_imported(golden_harmon):
    assert golden_harmon.llm.config._attn_implementation == "sdpa"
    assert "flash_attn" not in sys.modules


def tiny_config(**mar):
    llm = QwenConfig(96, 32, 48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    return HarmonConfig(dataclasses.replace(TINY, **mar), llm)


def tiny_harmon(**mar):
    generator = torch.Generator().manual_seed(0)
    model = Harmon(tiny_config(**mar))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model.eval().requires_grad_(False)


def sample(adapter, rows, nulls, seed=0, num_iter=4, guidance_scale=3.0, orders=None):
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(rows))]
    orders = torch.stack([torch.randperm(adapter.num_tokens, generator=g) for g in generators])
    steps = adapter.ar_steps(orders, num_iter, guidance_scale, "constant")
    noise = noise_from_generators(generators, adapter.head.num_steps, adapter.token_dim, rows.device)
    return sample_sequential(adapter, steps, rows, nulls, noise)


@pytest.mark.parametrize("buffer_size", [4, 1])
def test_p10_a_qwen_of_one_layer_samples_with_public_methods_of_the_cache(buffer_size):
    model = tiny_harmon(buffer_size=buffer_size)
    prompts = model.read_prompts(*pad_right([[1, 2, 3], [4], [5, 6]]))
    adapter = HarmonAdapter(model, prompts, (3, 5), num_inference_steps=4, clip_sample_range=3.0)
    tokens = sample(adapter, torch.tensor([[0], [1]]), torch.tensor([[2], [2]]))
    assert tokens.shape == (2, 15, 4) and tokens.isfinite().all()


def test_p10_no_private_part_of_the_cache_is_touched():
    for path in Path(car_spec.__file__).parent.rglob("harmon.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"from_legacy_cache", "to_legacy_cache", "key_cache", "value_cache", "layers"}, path


def test_the_prompt_is_read_once_and_its_cache_stays_as_it_was(golden_harmon, tokenizer, monkeypatch):
    lengths, forward = [], golden_harmon.llm.model.forward
    monkeypatch.setattr(golden_harmon.llm.model, "forward", lambda *args, **kw: lengths.append(args) or forward(*args, **kw))
    reading = read_texts(golden_harmon, tokenizer, ["a red cat", "a dog", "a red cat"])
    before = copy.deepcopy(reading.prompts.cache)
    adapter = HarmonAdapter(golden_harmon, reading.prompts, num_inference_steps=4, clip_sample_range=3.0)
    steps = adapter.ar_steps(torch.arange(16).expand(3, -1), 8, 3.0, "constant")
    settings, trace = LosslessSettings(lookahead=4, window=3), Trace(3)
    LosslessSampler(adapter, steps, reading.rows, reading.null_rows, shared_noise(3, 0), settings, trace).sample()
    assert lengths[0][0].shape == (3, 47)  # the two different texts and the unconditional one
    assert all(args[0] is None and args[4].shape[1] <= 16 + 4 for args in lengths[1:])  # image tokens only
    assert len(lengths) == 1 + trace.backbone_calls
    after = reading.prompts.cache
    assert after.get_seq_length() == before.get_seq_length()
    rows = torch.arange(3)
    mask = torch.ones(3, 16)
    again = lambda cache: golden_harmon.forward_mae_encoder(torch.zeros(3, 16, 4), mask, Prompts(cache, reading.prompts.mask), rows)
    assert torch.equal(again(after), again(before))


def test_p14_rotary_frequencies_stay_in_single_precision():
    model = tiny_harmon().to(torch.bfloat16)
    exact = 1e6 ** -(torch.arange(4) / 4)
    torch.testing.assert_close(model.llm.model.rotary_emb.inv_freq, exact, rtol=1e-6, atol=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_p14_a_whole_harmon_in_half_precision_follows_single_precision(dtype):
    def run(model):
        prompts = model.read_prompts(*pad_right([[1, 2, 3] * 60, [4], [5, 6]]))
        adapter = HarmonAdapter(model, prompts, num_inference_steps=6, clip_sample_range=3.0)
        return sample(adapter, torch.tensor([[0], [1]]), torch.tensor([[2], [2]]), num_iter=2)

    model = tiny_harmon()
    single = run(model)
    half = run(model.to(dtype))
    assert half.dtype == torch.float32 and half.isfinite().all()
    assert (half - single).abs().mean() < 0.05  # a few bf16 roundings (4e-3) of values about 1


@pytest.mark.parametrize("grid, tokens", [(None, 16), ((4, 6), 24)])
def test_p18_more_iterations_than_tokens_is_one_sentence(golden_harmon, prompts, grid, tokens):
    adapter = HarmonAdapter(golden_harmon, prompts, grid)
    assert len(adapter.ar_steps(torch.arange(tokens)[None], tokens, 1.0, "constant")) == tokens
    with pytest.raises(ValueError, match=rf"^num_iter {tokens + 1} is outside 1\.\.{tokens}, the number of tokens"):
        adapter.ar_steps(torch.arange(tokens)[None], tokens + 1, 1.0, "constant")


@pytest.mark.parametrize("scale, expected", [(1.0, 3), (3.0, 6)])
def test_p20_three_prompts_make_three_rows_without_guidance_and_six_with_it(golden_harmon, tokenizer, monkeypatch, scale, expected):
    reading = read_texts(golden_harmon, tokenizer, ["a cat", "a dog", "a bird"])
    seen, forward = [], golden_harmon.llm.model.forward
    monkeypatch.setattr(golden_harmon.llm.model, "forward", lambda *args, **kw: seen.append(len(args[4])) or forward(*args, **kw))
    hook = golden_harmon.mar.encoder_norm.register_forward_hook(lambda module, args, out: seen.append(3 * len(out)))
    adapter = HarmonAdapter(golden_harmon, reading.prompts, num_inference_steps=3, clip_sample_range=3.0)
    sample(adapter, reading.rows, reading.null_rows, guidance_scale=scale)
    hook.remove()
    assert set(seen) == {expected, 9} and len(seen) == 8  # MAR's encoder, which sees no prompt, has three rows in both cases


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_p25_an_image_does_not_depend_on_the_other_prompts_of_its_batch(golden_harmon, tokenizer, guidance_scale):
    texts = ["a cat", "a dog that is as long as its prompt", "a cat"]

    def run(chosen, seed):
        reading = read_texts(golden_harmon, tokenizer, chosen)
        adapter = HarmonAdapter(golden_harmon, reading.prompts, num_inference_steps=8, clip_sample_range=3.0)
        return sample(adapter, reading.rows, reading.null_rows, seed, guidance_scale=guidance_scale)

    together = run(texts, 0)
    for i, text in enumerate(texts):
        torch.testing.assert_close(run(text, i)[0], together[i], atol=2e-2, rtol=0)  # as of the recorded runs with 8 steps
    assert (together[0] - together[2]).abs().max() > 0.1  # one prompt, two seeds


@pytest.mark.parametrize("size", [(500, 512), (512, 500), (0, 512), (-16, 16), (8, 8)])
def test_p26_image_sizes_that_are_not_whole_tokens_are_one_sentence(size):
    with pytest.raises(ValueError, match=rf"^image_size {size[0]}x{size[1]} is not made of whole tokens of 16 pixels a side$"):
        grid_of(size, 16)


def test_p26_other_sizes_are_sampled_on_interpolated_tables(golden_harmon, prompts):
    assert grid_of((512, 768), 16) == (32, 48)
    adapter = HarmonAdapter(golden_harmon, prompts, grid_of((32, 96), 16), num_inference_steps=3, clip_sample_range=3.0)
    assert unpatchify(sample(adapter, torch.tensor([[0]]), torch.tensor([[2]])), 1, rows=2).shape == (1, 4, 2, 6)
    with pytest.raises(ValueError, match=r"^grid 0x4 has no tokens$"):
        HarmonAdapter(golden_harmon, prompts, (0, 4))


# --- lossless sampling


IMAGES, STEPS = 2000, 6
CASES = [(5, 1.0), (6, 2.5, (2, 5))]  # AR steps, guidance scale, grid if not the learned one


class MildAdapter(HarmonAdapter):
    """The golden networks with their prefix felt less, so that a stale condition is a fair draft, as it is in a trained model."""

    def conditions(self, tokens, mask, vectors):
        z = super().conditions(tokens, mask, vectors)
        blank, unknown = tokens.new_zeros(3, *tokens.shape[1:]), mask.new_ones(3, mask.shape[1])  # behind each of the three prompts
        typical = super().conditions(blank, unknown, torch.arange(3)[:, None, None])[vectors[..., 0], 0]  # (P, H, N, W)
        return typical + 0.15 * (z - typical)


def mixed_problem(model, prompts, images, num_iter, guidance_scale, grid=None):
    """Images of prompt A and of the shorter prompt B in turns; U is the unconditional one."""
    adapter = MildAdapter(model, prompts, grid, num_inference_steps=STEPS, clip_sample_range=3.0)
    order = torch.randperm(adapter.num_tokens, generator=torch.Generator().manual_seed(3)).expand(images, -1)
    rows = torch.arange(images)[:, None] % 2
    return adapter, adapter.ar_steps(order, num_iter, guidance_scale, "constant"), rows, torch.full_like(rows, 2)


def sequential(model, prompts, *case, seed):
    noise = shared_noise(IMAGES, seed)
    draw = lambda positions: (noise.normal(positions.shape[1], 4), noise.normal(positions.shape[1], STEPS, 4))
    return sample_sequential(*mixed_problem(model, prompts, IMAGES, *case), draw)


def lossless(model, prompts, noise, *case, sampler=LosslessSampler, **settings):
    images = len(noise.owner)
    trace, settings = Trace(images), LosslessSettings(**({"lookahead": 4, "window": 3} | settings))
    return sampler(*mixed_problem(model, prompts, images, *case), noise, settings, trace).sample(), trace


@pytest.fixture(scope="module")
def references(golden_harmon, prompts):
    return {case: sequential(golden_harmon, prompts, *case, seed=4) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_images_of_two_prompts_have_the_sequential_law(golden_harmon, prompts, references, case):
    tokens, trace = lossless(golden_harmon, prompts, shared_noise(IMAGES, 5), *case)
    for prompt in (0, 1):
        ours, reference = tokens[prompt::2], references[case][prompt::2]
        assert smallest_p(ours, reference) > 1e-3  # four such comparisons; the planted bias below gives 1e-200
        assert largest_z(ours, reference) < 5  # of up to 4096 moments
    assert trace.fallbacks == trace.chain.fallbacks == 0
    assert trace.rounds.double().mean() < 0.95 * case[0]  # it did speculate


class WrongPromptInVerification(LosslessSampler):
    """Planted bias: verification reads the drafted prefixes behind the other image's prompt."""

    def _prefixes(self, *args):
        self.vectors = self.vectors.flip(0)
        result = super()._prefixes(*args)
        self.vectors = self.vectors.flip(0)
        return result


def test_a_verification_behind_the_wrong_prompt_is_noticed(golden_harmon, prompts, references):
    case = CASES[1]
    tokens, _ = lossless(golden_harmon, prompts, shared_noise(IMAGES, 5), *case, sampler=WrongPromptInVerification)
    ours, reference = tokens[::2], references[case][::2]
    assert smallest_p(ours, reference) < 1e-4 or largest_z(ours, reference) > 7


@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
def test_p24_a_lossless_image_does_not_depend_on_its_batch(golden_harmon, guidance_scale):
    # in float64, because a float32 rounding of the first step, amplified 2e4 times, can tip a decision
    model = copy.deepcopy(golden_harmon).double()
    prompts = model.read_prompts(*pad_right([IDS["A"], IDS["B"], IDS["U"]]))
    adapter, steps, rows, nulls = mixed_problem(model, prompts, 4, 8, guidance_scale)

    def run(ids):
        noise = Noise([torch.Generator().manual_seed(i) for i in ids])
        own = [step._replace(positions=step.positions[ids]) for step in steps]
        settings = LosslessSettings(lookahead=4, window=3)
        return LosslessSampler(adapter, own, rows[ids], nulls[ids], noise, settings, Trace(len(ids))).sample()

    together = run([0, 1, 2, 3])
    for i in (0, 3):
        torch.testing.assert_close(run([i])[0], together[i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lookahead, window", [(1, 1), (3, 4), (50, 3)])
@pytest.mark.parametrize("num_iter", [1, 3, 16])
def test_any_settings_finish_every_image_of_a_batch_with_finite_tokens(golden_harmon, prompts, num_iter, lookahead, window):
    noise = Noise([torch.Generator().manual_seed(i) for i in range(3)])
    tokens, trace = lossless(golden_harmon, prompts, noise, num_iter, 2.0, lookahead=lookahead, window=window)
    assert tokens.isfinite().all() and tokens.abs().amax(-1).min() > 0
    assert [sum(rows) for rows in trace.accepted_rows] == [16, 16, 16]
    assert trace.rounds.max() <= num_iter
