"""The sampler of `accelerate` in the place of the authors' own, on stand-ins with the attributes and signatures of their classes."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import HARMON_LLM, golden, golden_json, golden_state
from einops import rearrange
from test_golden import RUNS, RUNS_100, RecordedRun
from test_harmon import RUNS as HARMON_RUNS
from test_xar import recorded_sampler
from torch import nn
from two_sample import largest_z, smallest_p

import car_spec
from car_spec import accelerate
from car_spec.accelerate import OPTIONS
from car_spec.models.xar import cell_order
from car_spec.schedule import respaced_timesteps


def module_of(state: dict[str, torch.Tensor]) -> nn.Module:
    """A tree of modules with these parameters, lists where names are numbers."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    leaves = {}
    for name, value in state.items():
        first, _, rest = name.partition(".")
        if rest:
            groups.setdefault(first, {})[rest] = value
        else:
            leaves[name] = value
    if groups and not leaves and all(name.isdigit() for name in groups):
        return nn.ModuleList(module_of(groups.get(str(i), {})) for i in range(1 + max(map(int, groups))))
    module = nn.Module()
    for name, value in leaves.items():
        module.register_parameter(name, nn.Parameter(value.clone()))
    for name, inside in groups.items():
        module.add_module(name, module_of(inside))
    return module


class Authors(nn.Module):
    """As the authors' classes look from outside: attributes by name, and a sampler of their own."""

    def __init__(self, state: dict[str, torch.Tensor], num_heads: int):
        super().__init__()
        for name, child in module_of(state)._modules.items():
            self.add_module(name, child)
        for name, value in state.items():
            if "." not in name:
                self.register_parameter(name, nn.Parameter(value.clone()))
        for block in getattr(self, "encoder_blocks", ()):
            block.attn.num_heads = num_heads


class AuthorsMAR(Authors):
    def __init__(self, num_sampling_steps: int = 8):
        super().__init__(golden_state("mar_tiny"), 4)
        self.patch_size, self.vae_embed_dim, self.seq_len, self.buffer_size = 1, 4, 16, 4
        self.diffloss.gen_diffusion = SimpleNamespace(timestep_map=respaced_timesteps(num_sampling_steps).tolist())

    def sample_tokens(self, bsz, num_iter=64, cfg=1.0, cfg_schedule="linear", labels=None, temperature=1.0, progress=False):
        raise AssertionError("the authors' own sampler ran")


class AuthorsXAR(Authors):
    def __init__(self):
        super().__init__(golden_state("xar_tiny"), 2)


class AuthorsHarmon(Authors):
    def __init__(self):
        super().__init__(golden_state("harmon_tiny"), 4)
        for block in self.mar.encoder_blocks:
            block.attn.num_heads = 4
        self.mar.diffloss.gen_diffusion = SimpleNamespace(timestep_map=respaced_timesteps(8).tolist())
        self.llm.config = SimpleNamespace(to_dict=lambda: HARMON_LLM)

    def decode(self, x):
        x /= 0.2325  # in place, as theirs
        return rearrange(x, "b m n c -> b c m n")


def replay_orders(monkeypatch, orders):
    """The generation orders of a recorded run in place of drawn ones."""
    rows = iter(orders)
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: next(rows))


# --- speculation off: the recorded runs of the authors' code


@pytest.mark.parametrize("name", [*RUNS, *RUNS_100])
def test_sample_tokens_of_mar_returns_the_recorded_latents(mar_golden, mar_runs, monkeypatch, name):
    run = RecordedRun(mar_golden, mar_runs, name)
    replay_orders(monkeypatch, mar_golden["sample/orders"])
    monkeypatch.setattr("car_spec.pipeline.noise_from_generators", lambda *_: run.noise)
    fast = accelerate(AuthorsMAR(run.num_steps), sampler="sequential")
    own = {name: run.settings[name] for name in ("num_iter", "cfg", "cfg_schedule", "temperature")}
    labels = None if run.settings["labels"] is None else torch.tensor(run.settings["labels"])
    latents = fast.sample_tokens(bsz=3, labels=labels, progress=False, **own)
    torch.testing.assert_close(latents, mar_golden[f"{run.prefix}/latent"], atol=run.tolerance, rtol=0)
    assert fast.trace.chain.calls == run.num_steps * own["num_iter"]


@pytest.mark.parametrize("name", ["steps4_cfg1", "steps6_cfg2"])
def test_sample_tokens_of_xar_returns_the_recorded_latents(monkeypatch, name):
    numbers, run = golden("xar_tiny"), golden_json("xar_tiny")["runs"][name]
    monkeypatch.setattr("car_spec.xar_pipeline.sequential", lambda *_: recorded_sampler(numbers, run["num_steps"]))
    fast = accelerate(AuthorsXAR(), sampler="sequential")
    latents = fast.sample_tokens(cfg=run["cfg"], label=numbers["sample/labels"], num_steps=run["num_steps"])
    torch.testing.assert_close(latents, numbers[f"sample/{name}/latent"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["s44_cfg1_two", "s44_cfg3_linear", "s46_cfg3_two"])
def test_sample_of_harmon_returns_the_recorded_images(harmon_golden, monkeypatch, name):
    run, ids = HARMON_RUNS[name], golden_json("harmon_tiny")["prompts"]
    shape = "x".join(map(str, run["image_shape"]))
    rows = [ids[prompt] for prompt in run["prompts"]]
    mask = torch.tensor([[1] * len(row) + [0] * (7 - len(row)) for row in rows])
    padded = torch.tensor([row + [127] * (7 - len(row)) for row in rows])

    def noise(positions):
        index = torch.arange(len(positions))[:, None]
        return harmon_golden[f"noise/{shape}/init"][index, positions], harmon_golden[f"noise/{shape}/step"][index, positions]

    replay_orders(monkeypatch, harmon_golden[f"noise/{shape}/orders"])
    monkeypatch.setattr("car_spec.pipeline.noise_from_generators", lambda *_: noise)
    own = {key: run[key] for key in ("num_iter", "cfg", "cfg_schedule", "temperature", "image_shape")}
    images = accelerate(AuthorsHarmon(), sampler="sequential").sample(input_ids=padded, attention_mask=mask, **own)
    torch.testing.assert_close(images, harmon_golden[f"sample/{name}/decoded"], atol=1e-1, rtol=0)


# --- speculation on


@pytest.mark.parametrize("cfg", [1.0, 2.5])
def test_speculation_has_the_law_of_the_sequential_sampler(cfg):
    model, labels = AuthorsMAR(4), torch.full((600,), 3)
    latents = [
        accelerate(model, sampler=sampler, seed=seed, **options).sample_tokens(600, 4, cfg, "linear", labels)
        for seed, (sampler, options) in enumerate([("sequential", {}), ("lossless", {"lookahead": 3, "window": 3})])
    ]
    # the first of four steps multiplies roundings by 2e4; ranks do not mind its scale, moments would
    assert smallest_p(latents[0], latents[1]) > 0.01
    bounded = [torch.tanh(x.flatten(1)) for x in latents]
    assert largest_z(*bounded) < 5


def test_speculation_of_xar_and_harmon_takes_fewer_calls():
    fast = accelerate(AuthorsXAR(), seed=0)
    latents = fast.sample_tokens(label=torch.tensor([5]), num_steps=20)
    assert latents.shape == (1, 16, 16, 16) and latents.isfinite().all()
    assert fast.settings["sampler"] == "lossless" and fast.trace.chain.calls < 4 * 20
    fast = accelerate(AuthorsHarmon(), seed=0, lookahead=4)
    ids = torch.tensor([[5, 17, 99], [11, 90, 6]])
    images = fast.sample(input_ids=ids, attention_mask=torch.ones_like(ids), num_iter=8, cfg=2.0)
    assert images.shape == (1, 4, 4, 4) and images.isfinite().all()
    assert fast.trace.chain.calls < 8 * 8


def test_a_draft_of_the_same_class_drafts():
    other = AuthorsMAR()
    fast = accelerate(AuthorsMAR(), draft=other, sampler="cspd", draft_length=2, seed=0)
    assert fast.sample_tokens(2, 8, labels=[1, 2]).shape == (2, 4, 4, 4)
    assert fast.trace.draft_calls > 0
    with pytest.raises(ValueError, match="draft is a network of xar, the model one of mar"):
        accelerate(AuthorsMAR(), draft=AuthorsXAR())


# --- the model's parameters


def test_parameters_are_shared_and_followed():
    model = AuthorsMAR()
    fast = accelerate(model, seed=0)
    pointer = lambda: fast.pipeline.model.z_proj.weight.data_ptr()
    assert pointer() == model.z_proj.weight.data_ptr()
    fast.sample_tokens(1, 4)
    model.to(torch.bfloat16)  # replaces every parameter
    assert fast.sample_tokens(1, 4).dtype == torch.float32
    assert pointer() == model.z_proj.weight.data_ptr() and fast.pipeline.model.z_proj.weight.dtype == torch.bfloat16
    assert all(parameter.requires_grad for parameter in model.parameters())  # the model can go on training


def test_training_between_two_calls_changes_the_samples():
    model = AuthorsMAR()
    sample = lambda: accelerate(model, seed=0).sample_tokens(1, 4)
    fast = accelerate(model, seed=0)
    before = sample()
    with torch.no_grad():
        model.mask_token += 0.5
    assert torch.equal(fast.sample_tokens(1, 4), sample()) and not torch.equal(before, sample())


def test_inside_autocast_networks_run_in_its_dtype_and_states_in_float32():
    model = AuthorsMAR()
    fast, cast = accelerate(model, seed=0), accelerate(copy.deepcopy(model).bfloat16(), seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        inside = fast.sample_tokens(2, 4, labels=[1, 2])
        assert torch.is_autocast_enabled("cpu")
    assert inside.dtype == torch.float32 and torch.equal(inside, cast.sample_tokens(2, 4, labels=[1, 2]))
    assert model.z_proj.weight.dtype == torch.float32
    plain = accelerate(model, seed=0).sample_tokens(2, 4, labels=[1, 2])
    assert torch.equal(fast.sample_tokens(2, 4, labels=[1, 2]).isfinite(), plain.isfinite()) and not torch.equal(inside, plain)
    ids = torch.tensor([[5, 17, 99]])
    with torch.autocast("cpu", torch.bfloat16):
        assert accelerate(AuthorsHarmon(), seed=0).sample(input_ids=ids, attention_mask=torch.ones_like(ids), num_iter=4).isfinite().all()


def test_wrapped_models_are_unwrapped():
    model = AuthorsMAR()
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        assert accelerate(wrapped).network.model is model


def test_a_seed_repeats_and_global_generators_are_left_alone():
    state = torch.get_rng_state()
    first, second = (accelerate(AuthorsMAR(), seed=3).sample_tokens(2, 4) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    third = accelerate(AuthorsMAR(), generator=torch.default_generator).sample_tokens(2, 4)
    torch.manual_seed(0)
    assert torch.equal(third, accelerate(AuthorsMAR(), generator=torch.default_generator).sample_tokens(2, 4))


def test_a_pipeline_of_diffusers_is_handed_on_with_its_options(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    given = []
    module = SimpleNamespace(accelerate_pipeline=lambda pipe, **options: given.append((pipe, options)) or "fast")
    monkeypatch.setitem(sys.modules, "car_spec.diffusion_pipeline", module)
    pipe = diffusers.DDPMPipeline(nn.Identity(), diffusers.DDPMScheduler())
    assert accelerate(pipe, window=4, seed=7) == "fast"
    (received, options), *_ = given
    assert received is pipe and options["window"] == 4 and set(options) == {"window", "generator"}
    assert options["generator"].initial_seed() == 7


# --- refusals


@pytest.mark.parametrize(
    "make, attribute",
    [
        (AuthorsMAR, "fake_latent"),
        (AuthorsMAR, "diffloss.net"),
        (AuthorsXAR, "time_embed"),
        (AuthorsHarmon, "proj_out"),
        (AuthorsHarmon, "mar.mask_token"),
    ],
)
def test_a_missing_attribute_is_named(make, attribute):
    model = make()
    parent, _, name = attribute.rpartition(".")
    delattr(model.get_submodule(parent), name)
    with pytest.raises(ValueError, match=rf"^{make.__name__} has \w+, as the class of \w+ does, but no attribute {attribute}$"):
        accelerate(model)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), SimpleNamespace(diffloss=None), None])
def test_an_unknown_model_is_refused_with_the_attributes_that_tell(model):
    with pytest.raises(ValueError, match=r"is no model that accelerate knows: .* llm \(harmon\), diffloss \(mar\), pred \(xar\)$"):
        accelerate(model)


def test_parameters_that_are_not_the_classes_are_named():
    model = AuthorsMAR()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"unknown 2: extra\.bias, extra\.weight"):
        accelerate(model)


@pytest.mark.parametrize(
    "options, error, sentence",
    [
        (dict(lookahed=4), TypeError, f"no option 'lookahed'; its options are {', '.join(OPTIONS)}"),
        (dict(lookahead=0), ValueError, "lookahead 0 is below 1"),
        (dict(sampler="fast"), ValueError, "sampler 'fast' is none of lossless"),
        (dict(sampler="cspd"), ValueError, "needs a draft model"),
        (dict(sampler="sequential", window=4), ValueError, "window belongs to the lossless sampler"),
        (dict(seed=1, generator=torch.Generator()), ValueError, "generator and seed 1 are both given"),
    ],
)
def test_options_are_checked_when_the_sampler_is_made(options, error, sentence):
    with pytest.raises(error, match=sentence):
        accelerate(AuthorsMAR(), **options)


def test_a_strided_schedule_is_refused():
    model = AuthorsMAR()
    model.diffloss.gen_diffusion.timestep_map = list(range(0, 1000, 20))
    with pytest.raises(ValueError, match="takes 50 timesteps that are not evenly spaced"):
        accelerate(model)


def test_harmon_needs_pairs_of_prompts_for_guidance():
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"cfg 3\.0 needs an unconditional prompt for each prompt, but input_ids has 1 rows"):
        accelerate(AuthorsHarmon()).sample(input_ids=ids, attention_mask=torch.ones_like(ids), cfg=3.0)
    with pytest.raises(ValueError, match="draft is for MAR and xAR"):
        accelerate(AuthorsHarmon(), draft=AuthorsHarmon())


def test_cells_of_the_stand_in_are_those_of_its_mask():
    assert torch.equal(cell_order(256, 4), cell_order(256, accelerate(copy.deepcopy(AuthorsXAR())).network.ours.config.num_cells))


def test_car_spec_exports_accelerate():
    assert car_spec.accelerate is accelerate and "accelerate" in car_spec.__all__
