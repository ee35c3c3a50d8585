"""Train the demo Harmon on emoji64: a tokenizer of the captions, then a target and a draft that start from the demo's MAR.

    python scripts/train_harmon_demo.py tokenizer --data emoji64.npz --out runs/harmon
    python scripts/train_harmon_demo.py target    --data emoji64.npz --out runs/harmon
    python scripts/train_harmon_demo.py draft     --data emoji64.npz --out runs/harmon
    python scripts/train_harmon_demo.py export    --data emoji64.npz --out runs/harmon

They share images, autoencoder and training loop with `train_demo.py`, whose `export` must have run. Stages go on where they were stopped.
"""

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_demo import CLIP_SAMPLE_RANGE, demo_classes, demo_latents, fit, load_images, pack, step_generator

from car_spec.schedule import cosine_schedule

CONTEXT = 256
VOCABULARY = 1536
LLM = dict(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, rope_theta=1e4)
LLM_SIZES = dict(
    target=dict(hidden_size=160, intermediate_size=448, num_hidden_layers=4, num_attention_heads=5, num_key_value_heads=5),
    draft=dict(hidden_size=80, intermediate_size=224, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4),
)
WARM_STARTS = dict(target="mar", draft="mar-draft")
PRESET = dict(num_iter=64, num_inference_steps=100, guidance_scale=3.0, guidance_schedule="constant")
DISTILLED_STEPS = 800  # in which the language model learns to say what the class says to the decoder of the class-conditional MAR
NOISY_TIMESTEPS, JUDGED = (600, 900), 16  # of `clean_error`, and how many tokens of an image it looks at
PROMPT_DROP = 0.1
SHOWN = (  # captions of the grid, and whether their emoji were held out; None: a caption that the data do not have
    ("red heart", None),
    ("grinning cat", None),
    ("blue heart, google", False),
    ("grinning face, google", False),
    ("grinning face, twitter", False),
    ("cat face", False),
    ("red apple", False),
    ("banana", False),
    ("penguin", False),
    ("japan flag", False),
    ("france flag, google", False),
    ("large blue circle", False),
    ("hamburger", False),
    ("crying face", False),
    ("rabbit face", False),
    ("woman: red hair, google", False),
    ("pink heart", True),
    ("large red circle", True),
    ("large green square", True),
    ("germany flag", True),
    ("sleeping face", True),
    ("panda face", True),
    ("thinking face", True),
    ("woman judge", True),
)


def demo_captions(path, split):
    """Names and vendors of the images of `demo_latents`, in its order."""
    _, arrays = load_images(path, split, demo_classes(path))
    return list(zip(arrays["name"].tolist(), arrays["vendor_names"][arrays["vendor"]].tolist()))


def varied_caption(name, vendor, chance):
    """The vendor is named half of the time, and three captions in ten lose words, so that prompts need not be whole captions."""
    words = name.split()
    if chance.random() < 0.3:
        words = [word for word in words if chance.random() < 0.7] or [chance.choice(words)]
    return " ".join(words).strip(",:") + (f", {vendor}" if chance.random() < 0.5 else "")


def train_tokenizer(args):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from car_spec.models.harmon import NULL_REQUEST, REQUEST, TEMPLATE

    texts = [REQUEST.format(prompt=f"{name}, {vendor}") for name, vendor in demo_captions(args.data, 0)] + [NULL_REQUEST]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEMPLATE.format(request=text) for text in texts], trainer)
    folder = args.out / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=CONTEXT
    ).save_pretrained(folder)
    print(f"{tokenizer.get_vocab_size()} tokens; 'red heart': {tokenizer.encode('Generate an image: red heart').tokens}")


def initial_harmon(args):
    """Harmon whose MAR is the demo's, and that MAR.

    The last layer of proj_out is zero, so that it starts as the MAR without a class. The MAR's encoder and head stay as they are: neither
    has to know the prompt.
    """
    from car_spec.models.harmon import Harmon, HarmonConfig, QwenConfig
    from car_spec.models.loading import load_mar, read_checkpoint

    teacher = load_mar(read_checkpoint(args.package / f"{WARM_STARTS[args.stage]}.safetensors")).float()
    llm = QwenConfig(**LLM, **LLM_SIZES[args.stage])
    model = Harmon(HarmonConfig(teacher.config, llm))
    for module in [*model.llm.modules(), *model.proj_in, *model.proj_out]:
        if isinstance(module, nn.Linear) and module is not model.llm.lm_head:
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.normal_(model.llm.model.embed_tokens.weight, std=0.3)
    for layer in model.llm.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data.mul_(0.5)
    nn.init.zeros_(model.proj_out[-1].weight)
    model.mar.load_state_dict(teacher.state_dict())
    model.mar.requires_grad_(False)
    for part in (model.mar.decoder_embed, model.mar.decoder_blocks, model.mar.decoder_norm):
        part.requires_grad_(True)
    for table in (model.mar.mask_token, model.mar.decoder_pos_embed_learned, model.mar.diffusion_pos_embed_learned):
        table.requires_grad_(True)
    return model, teacher.requires_grad_(False)


def clean_error(net, x_0, condition, generator):
    """Squared error of the tokens (..., D) that the head makes of much noise, where they are guessed from the condition (..., Z).

    In MAR's loss, which weighs the noise's error, a whole caption is worth a hundredth; here it is worth most.
    """
    alphas_cumprod = cosine_schedule().alphas_cumprod
    timesteps = torch.randint(*NOISY_TIMESTEPS, x_0.shape[:-1], generator=generator).flatten()
    x_0, condition = x_0.flatten(0, -2), condition.flatten(0, -2)
    signal = alphas_cumprod[timesteps, None].float()
    noise = torch.randn(x_0.shape, generator=generator)
    predicted = net(signal.sqrt() * x_0 + (1 - signal).sqrt() * noise, timesteps, condition).float()[:, : x_0.shape[1]]
    return ((1 - signal) / signal * (predicted - noise).square()).mean()


def train(args):
    from diffusers import AutoencoderKL

    from car_spec.adapters.mar import patchify
    from car_spec.harmon_pipeline import HarmonPipeline
    from car_spec.models.harmon import NULL_REQUEST, REQUEST, load_tokenizer, pad_right, tokenize
    from car_spec.models.mar import random_mask
    from car_spec.models.presets import Preset

    torch.manual_seed(0)
    out = args.out / args.stage
    vae = AutoencoderKL.from_pretrained(args.package / "vae").eval()
    data, scale = demo_latents(args.data, vae), vae.config.scaling_factor
    captions, held_captions = (demo_captions(args.data, split) for split in (0, 1))
    tokenizer = load_tokenizer(args.out / "tokenizer", VOCABULARY)
    model, teacher = initial_harmon(args)
    preset = Preset(name=args.stage, num_heads=teacher.config.num_heads, **PRESET)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(captions)} images", flush=True)

    def decoder_input(model, tokens, mask, requests):
        with torch.no_grad():
            encoded = model.encode(tokens, mask)
        return model.continue_texts(encoded, mask, *pad_right(tokenize(tokenizer, requests)))

    def loss_fn(model, step):
        g, chance = step_generator(step), random.Random(step)
        chosen = torch.multinomial(data.weights, args.batch_size, replacement=True, generator=g)
        noise = torch.randn(args.batch_size, *data.mean.shape[1:], generator=g)
        tokens = patchify(scale * (data.mean[chosen] + data.std[chosen] * noise), 1)
        dropped = torch.rand(len(chosen), generator=g) < PROMPT_DROP
        texts = [REQUEST.format(prompt=varied_caption(*captions[i], chance)) for i in chosen]
        requests = [NULL_REQUEST if drop else text for drop, text in zip(dropped, texts)]
        mask = random_mask(*tokens.shape[:2], g)
        if step >= DISTILLED_STEPS and step % 4:
            mask = torch.ones_like(mask)  # the caption has to tell everything
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            encoded = decoder_input(model, tokens, mask, requests)
            if step < DISTILLED_STEPS:
                vectors = torch.where(dropped[:, None], teacher.fake_latent, teacher.class_emb(data.labels[chosen]))
                return (encoded.float() - teacher.forward_mae_encoder(tokens, mask, vectors).float()).square().mean()
            z = model.mar.forward_mae_decoder(encoded, mask)
            if step % 4 == 0:
                return model.mar.denoising_loss(tokens, mask, z, g, 2)
            image = torch.arange(len(tokens))[:, None]
            position = torch.rand(mask.shape, generator=g).argsort(1)[:, :JUDGED]
            return clean_error(model.mar.diffloss.net, tokens[image, position], z[image, position], g)

    @torch.no_grad()
    def held_out_loss(model, step):
        g, tokens = step_generator(0), patchify(scale * data.held_mean, 1)
        requests, losses = [REQUEST.format(prompt=f"{name}, {vendor}") for name, vendor in held_captions], []
        for _ in range(1 if step < args.steps else 8):
            mask = random_mask(*tokens.shape[:2], g)
            z = model.mar.forward_mae_decoder(decoder_input(model, tokens, mask, requests), mask)
            losses.append(model.mar.denoising_loss(tokens, mask, z, g, 2).item())
        return np.mean(losses)

    evaluations = [0]

    def evaluate(model, step):
        if evaluations[0] % 2 == 1 or step == args.steps:
            pipeline = HarmonPipeline(model, vae, tokenizer, preset, clip_sample_range=CLIP_SAMPLE_RANGE)
            captioned_grid(pipeline, num_iter=16, num_inference_steps=50).save(out / f"samples-{step:06d}.png")
        evaluations[0] += 1
        return f"held-out loss {held_out_loss(model, step):.4f}"

    fit(model, loss_fn, evaluate, out, steps=args.steps, lr=args.lr, weight_decay=0.02, ema_decay=args.ema, checkpoint_seconds=180)


def captioned_grid(pipeline, columns=8, size=96, margin=40, **settings):
    """Image i of seed i for each of `SHOWN`, over its caption; a star: held out, a plus: a caption that the data do not have."""
    import textwrap

    from PIL import Image, ImageDraw

    generators = [torch.Generator().manual_seed(i) for i in range(len(SHOWN))]
    pictures = pipeline([caption for caption, _ in SHOWN], generator=generators, sampler="sequential", **settings).images
    grid = Image.new("RGB", (columns * size, -(-len(pictures) // columns) * (size + margin)), "white")
    draw = ImageDraw.Draw(grid)
    for i, (picture, (caption, held_out)) in enumerate(zip(pictures, SHOWN)):
        x, y = i % columns * size, i // columns * (size + margin)
        grid.paste(picture.resize((size - 4, size - 4), Image.Resampling.BICUBIC), (x + 2, y + 2))
        mark = {True: " *", None: " +", False: ""}[held_out]
        draw.text((x + 2, y + size), "\n".join(textwrap.wrap(caption + mark, 15)), fill="black", spacing=1)
    return grid


def export(args):
    """Folders in transformers' layout: weights, config.json with the language model's numbers, tokenizer. And the card's picture."""
    import shutil

    from car_spec.models.harmon import LM_HEAD, QwenConfig
    from car_spec.models.loading import read_checkpoint
    from car_spec.pipeline import load_pipeline

    for stage, name in (("target", "harmon"), ("draft", "harmon-draft")):
        folder = args.package / name
        folder.mkdir(exist_ok=True)
        heads = read_checkpoint(args.package / f"{WARM_STARTS[stage]}.safetensors").metadata["num_heads"]
        preset = dict(name=f"demo-{name}", num_heads=heads, **PRESET)
        metadata = dict(num_heads=heads, clip_sample_range=CLIP_SAMPLE_RANGE, preset=preset)
        pack(args, stage, f"{name}/model", metadata, without=(LM_HEAD,))  # tied to the embedding
        llm = {"model_type": "qwen2"} | asdict(QwenConfig(**LLM, **LLM_SIZES[stage]))
        (folder / "config.json").write_text(json.dumps({"model_type": "harmon", "llm": llm}, indent=2) + "\n")
        for file in (args.out / "tokenizer").iterdir():
            shutil.copy(file, folder)
            (folder / file.name).chmod(0o644)
    captioned_grid(load_pipeline(args.package / "harmon")).save(args.package / "harmon-samples.png")


def main():
    stages = {"tokenizer": train_tokenizer, "target": train, "draft": train, "export": export}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--data", required=True, type=Path, help="emoji64.npz")
    parser.add_argument("--out", default=Path("runs/harmon"), type=Path, help="checkpoints and pictures go here")
    parser.add_argument("--package", default=Path("car_spec/demo"), type=Path, help="the demo weights: read by training, written by export")
    parser.add_argument("--steps", type=int, default=4000, help="training steps")
    parser.add_argument("--batch-size", type=int, default=32, help="images a step")
    parser.add_argument("--lr", type=float, default=8e-4, help="highest learning rate")
    parser.add_argument("--ema", type=float, default=0.999, help="decay of the average of the weights, a step")
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    stages[args.stage](args)


if __name__ == "__main__":
    main()
