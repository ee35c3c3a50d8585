"""Accelerated pipelines of diffusers: the same images from the same noise, the same class of output, the same law in fewer calls."""

import copy
import json
from functools import partial

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from processes import share_images, start
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from car_spec import diffusion_pipeline
from car_spec.asd import ChainTrace
from car_spec.diffusion_pipeline import accelerate_pipeline, sample_sequentially
from car_spec.eval.distances import energy_test
from car_spec.parallel import Ranks, Shares

STEPS = 8
VAE = dict(
    latent_channels=4,
    block_out_channels=(8, 8),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    norm_num_groups=4,
    sample_size=16,
)


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def lively(network):
    """Random weights, none zero, so that every layer acts."""
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data = 0.15 * torch.randn(parameter.shape, generator=generator)
    return network.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def unet():
    blocks = dict(down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    shape = dict(sample_size=4, in_channels=1, out_channels=1, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4)
    return lively(UNet2DModel(**shape, **blocks, attention_head_dim=4))


@pytest.fixture
def ddpm(unet):
    return quiet(DDPMPipeline(unet, DDPMScheduler(variance_type="fixed_large")))


@pytest.fixture(scope="module")
def dit_parts():
    transformer = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
    )
    return lively(transformer), lively(AutoencoderKL(**VAE))


@pytest.fixture(scope="module")
def text_parts(tmp_path_factory):
    """A text encoder and a tokenizer that knows single letters."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    network = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    vae, encoder = lively(AutoencoderKL(**VAE)), lively(CLIPTextModel(config))
    return dict(vae=vae, text_encoder=encoder, tokenizer=tokenizer, unet=lively(network))


@pytest.fixture
def stable_diffusion(text_parts):
    rest = dict(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    scheduler = DDPMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1)
    return quiet(StableDiffusionPipeline(**text_parts, scheduler=scheduler, **rest))


class Replay:
    """The same noise for diffusers' loop and for ours: entry 0 starts, the others follow step by step."""

    def __init__(self, shape, monkeypatch):
        self.noise = torch.randn(STEPS + 1, *shape, generator=torch.Generator().manual_seed(5))
        self.drawn = 0
        for module in ("schedulers.scheduling_ddpm", "schedulers.scheduling_ddim", "pipelines.ddpm.pipeline_ddpm"):
            monkeypatch.setattr(f"diffusers.{module}.randn_tensor", self.randn)
        for module in ("dit.pipeline_dit", "stable_diffusion.pipeline_stable_diffusion"):
            monkeypatch.setattr(f"diffusers.pipelines.{module}.randn_tensor", self.randn)
        monkeypatch.setattr(diffusion_pipeline, "sample_speculatively", self.sequentially)

    def randn(self, shape, **_):
        self.drawn += 1
        noise = self.noise[self.drawn - 1]
        return noise if len(noise) == shape[0] else torch.cat([noise, noise])

    def sequentially(self, chain, noise, settings, trace, initial):
        table = iter(self.noise.flatten(2))
        noise.normal = lambda dim: next(table)
        return sample_sequentially(chain, noise, trace)


def test_ddpm_makes_the_pipelines_images_from_the_same_noise(ddpm, monkeypatch):
    Replay((3, 1, 4, 4), monkeypatch)
    theirs = ddpm(3, num_inference_steps=STEPS, output_type="np")
    ours = accelerate_pipeline(ddpm)(3, num_inference_steps=STEPS, output_type="np")
    assert type(ours) is type(theirs)
    torch.testing.assert_close(torch.from_numpy(ours.images), torch.from_numpy(theirs.images), atol=1e-4, rtol=0)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_dit_makes_the_pipelines_images_from_the_same_noise(dit_parts, guidance_scale, monkeypatch):
    pipe = quiet(DiTPipeline(*dit_parts, DDPMScheduler(clip_sample=False)))
    Replay((2, 4, 8, 8), monkeypatch)
    call = dict(class_labels=[3, 700], guidance_scale=guidance_scale, num_inference_steps=STEPS, output_type="np")
    theirs, ours = pipe(**call), accelerate_pipeline(pipe)(**call)
    assert type(ours) is type(theirs)
    torch.testing.assert_close(torch.from_numpy(ours.images), torch.from_numpy(theirs.images), atol=1e-4, rtol=0)


@pytest.mark.parametrize("settings", [dict(guidance_scale=1.0), dict(guidance_scale=5.0, negative_prompt="b"), dict(guidance_rescale=0.7)])
def test_stable_diffusion_makes_the_pipelines_images_from_the_same_noise(stable_diffusion, settings, monkeypatch):
    Replay((4, 4, 8, 8), monkeypatch)
    negative = settings.pop("negative_prompt", None)
    call = dict(prompt=["a cat", "zebra"], num_images_per_prompt=2, num_inference_steps=STEPS, output_type="np", **settings)
    call["negative_prompt"] = None if negative is None else [negative] * 2
    theirs, ours = stable_diffusion(**call), accelerate_pipeline(stable_diffusion)(**call)
    assert type(ours) is type(theirs) and ours.nsfw_content_detected is None
    torch.testing.assert_close(torch.from_numpy(ours.images), torch.from_numpy(theirs.images), atol=1e-4, rtol=0)


def test_stable_diffusion_under_ddim_takes_eta_in_the_call(stable_diffusion, monkeypatch):
    stable_diffusion.scheduler = DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1)
    Replay((1, 4, 8, 8), monkeypatch)
    call = dict(prompt="a", num_inference_steps=STEPS, output_type="latent", eta=0.6)
    theirs, ours = stable_diffusion(**call), accelerate_pipeline(stable_diffusion, eta=1.0)(**call)
    torch.testing.assert_close(ours.images, theirs.images, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [dict(), dict(window=None, drafter="frozen"), dict(verification="token", max_rows=100)])
def test_images_have_the_pipelines_law_in_fewer_calls(ddpm, options):
    count, trace = 300, ChainTrace()
    theirs = ddpm(count, torch.Generator().manual_seed(0), num_inference_steps=20, output_type="pt").images.flatten(1)
    ours = accelerate_pipeline(ddpm, **options)(count, torch.Generator().manual_seed(1), 20, "pt", trace=trace).images.flatten(1)
    assert energy_test(ours, theirs) > 0.01
    assert energy_test(ours + 0.3 * ours.std(), theirs) < 0.01  # what the test would notice
    assert trace.fallbacks == 0 and max(trace.accepted) > 1


def test_a_lone_image_takes_fewer_calls_than_steps(ddpm):
    trace = ChainTrace()
    accelerate_pipeline(ddpm)(1, torch.Generator().manual_seed(0), 100, trace=trace)
    assert trace.calls < 60


def test_an_image_does_not_depend_on_its_batch(ddpm):
    fast = accelerate_pipeline(ddpm)
    make = lambda ids: [torch.Generator().manual_seed(i) for i in ids]
    together = fast(3, make([0, 1, 2]), STEPS, "pt").images
    torch.testing.assert_close(fast(1, make([1]), STEPS, "pt").images[0], together[1], atol=1e-4, rtol=0)


def test_processes_that_share_each_call_make_the_images_of_one(ddpm, tmp_path):
    ddpm.save_pretrained(tmp_path / "pipe")
    run = lambda name, seeds: partial(share_images, tmp_path / "pipe", seeds, tmp_path / name)
    start(2, [(name, run(name, seeds)) for name, seeds in (("same", (3, 3)), ("none", None), ("others", (3, 4)))], tmp_path)
    load = lambda name, rank: torch.load(tmp_path / f"{name}.{rank}.pth")
    assert run("alone", (3,))() == 0
    assert torch.equal(load("same", 0), load("same", 1)) and torch.equal(load("same", 0), load("alone", 0))
    assert torch.equal(load("none", 0), load("none", 1)) and not torch.equal(load("none", 0), load("same", 0))
    assert "rank 1 has noise with the digest" in (tmp_path / "others.0").read_text()  # before the first call of the network


@pytest.mark.parametrize("chunk", [None, 2])
def test_shares_of_an_image_chain_say_what_the_whole_says(ddpm, chunk):
    chain, g = accelerate_pipeline(ddpm, max_rows=chunk).image_chain(2, STEPS), torch.Generator().manual_seed(0)
    shared = Shares(Ranks(), 3).images(chain)
    rows, y, k = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.randn(7, 16, generator=g), torch.tensor([7, 6, 5, 4, 7, 6, 5])
    for arguments in ((y, k, rows), (y[:2], 3), (y[:1], k[:1], rows[:1])):
        for ours, expected in zip(shared(*arguments), chain(*arguments)):
            torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    assert shared.exchange.rows == [10]


def test_the_generator_of_the_settings_goes_on_from_call_to_call(ddpm):
    run = lambda fast: [fast(1, num_inference_steps=STEPS, output_type="pt").images for _ in range(2)]
    first, second = run(accelerate_pipeline(ddpm, generator=torch.Generator().manual_seed(3)))
    again, _ = run(accelerate_pipeline(ddpm, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_a_learned_variance_of_a_dit_is_used(dit_parts):
    pipe = quiet(DiTPipeline(*dit_parts, DDPMScheduler(variance_type="learned_range", clip_sample=False)))
    trace = ChainTrace()
    images = accelerate_pipeline(pipe)([5], guidance_scale=2.0, num_inference_steps=STEPS, output_type="pil", trace=trace).images
    assert images[0].size == (16, 16) and trace.calls <= STEPS


def test_half_precision_networks_keep_float32_states(unet):
    pipe = quiet(DDPMPipeline(copy.deepcopy(unet).bfloat16(), DDPMScheduler()))
    images = accelerate_pipeline(pipe)(2, torch.Generator().manual_seed(0), STEPS, "pt").images
    assert images.dtype == torch.float32 and images.isfinite().all()


@pytest.mark.parametrize(
    "scheduler, options, sentence",
    [
        (DDIMScheduler(), {}, "DDIMScheduler with eta 0 is deterministic: nothing random is left"),
        (DDPMScheduler(), dict(churn=0.0), "churn 0 is the probability flow: nothing random is left"),
        (DDPMScheduler(), dict(window=0), "window 0 is below 1"),
        (DDPMScheduler(), dict(drafter="model"), "drafter 'model' is none of free, frozen"),
        (DDPMScheduler(), dict(verification="both"), "verification 'both' is none of block, token"),
        (DDPMScheduler(), dict(max_rows=0), "max_rows 0 is below 1"),
        (DDPMScheduler(), dict(spread=-1.0), "spread -1.0 is negative"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_call(unet, scheduler, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        accelerate_pipeline(DDPMPipeline(unet, scheduler), **options)


def test_other_pipelines_and_options_are_named(unet):
    with pytest.raises(ValueError, match="DDIMPipeline is none of the pipelines known here: DDPMPipeline, DiTPipeline"):
        accelerate_pipeline(DDIMPipeline(unet, DDIMScheduler()))
    with pytest.raises(TypeError, match="no option 'lookahead'"):
        accelerate_pipeline(DDPMPipeline(unet, DDPMScheduler()), lookahead=3)
