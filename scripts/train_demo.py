"""Train the demo models on emoji64: a small autoencoder, then a MAR target and draft, and an xAR target and draft, over its latents.

    python scripts/train_demo.py vae    --data emoji64.npz --out runs/demo
    python scripts/train_demo.py target --data emoji64.npz --out runs/demo
    python scripts/train_demo.py draft  --data emoji64.npz --out runs/demo
    python scripts/train_demo.py export --data emoji64.npz --out runs/demo

and for xAR, with the autoencoder that `export` packed, xar-target, xar-draft and xar-export. `reference` writes the real images that
samples of the demo are scored against, and a recipe for such samples (docs/evaluation.md).

Every stage can be killed and started again: it continues from `<out>/<stage>/checkpoint-last.pth`, which is rewritten
every few minutes together with a picture of reconstructions or samples. `export` packs the averages for shipping.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

VAE_CONFIG = dict(
    in_channels=3,
    out_channels=3,
    latent_channels=8,
    block_out_channels=(32, 64, 64),
    layers_per_block=1,
    norm_num_groups=16,
    down_block_types=("DownEncoderBlock2D",) * 3,
    up_block_types=("UpDecoderBlock2D",) * 3,
    sample_size=32,
)
MAR_SIZES = dict(
    target=dict(width=160, encoder_depth=4, decoder_depth=4, num_heads=5, head_width=192, head_depth=3),
    draft=dict(width=80, encoder_depth=2, decoder_depth=3, num_heads=4, head_width=96, head_depth=2),
)
XAR_SIZES = {
    "xar-target": dict(width=192, encoder_depth=3, decoder_depth=3, num_heads=6, mlp_hidden=512),
    "xar-draft": dict(width=96, encoder_depth=2, decoder_depth=2, num_heads=3, mlp_hidden=256),
}
DEMO_PRESET = dict(num_iter=64, num_inference_steps=100, guidance_scale=3.0, guidance_schedule="constant")
XAR_PRESET = dict(num_iter=4, num_inference_steps=50, guidance_scale=3.0)
CLIP_SAMPLE_RANGE = 4.0  # in latent standard deviations
# All 99 subcategories are too many for this size and training time; these keep about half of the emoji.
DEMO_CATEGORIES = ("Smileys & Emotion", "Animals & Nature", "Food & Drink", "Flags")
DEMO_SUBCATEGORIES = ("person", "person-role", "geometric")
GRID_CLASSES = ("face-smiling", "heart", "animal-mammal", "food-fruit", "country-flag", "cat-face", "face-affection", "person-role")
KL_WEIGHT = 1e-3  # leaves a posterior std of about a tenth of the latents' own, so that the decoder forgives small errors


def load_images(path, split, classes=None):
    """-> images (N, 3, 32, 32) in [-1, 1], each the 2x2 mean of the 64-pixel original, and the npz's other arrays.

    classes: names of the subcategories to keep; None keeps all.
    """
    data = np.load(path)
    keep = data["split"] == split
    if classes is not None:
        keep &= np.isin(data["subcategory_names"][data["subcategory"]], classes)
    pixels = torch.from_numpy(data["image"][keep]).permute(0, 3, 1, 2)  # (N, 3, 64, 64) uint8
    images = F.avg_pool2d(pixels.float(), 2) / 127.5 - 1  # (N, 3, 32, 32)
    arrays = {k: data[k][keep] if len(data[k]) == len(keep) else data[k] for k in data.files if k != "image"}
    return images, arrays


def step_generator(step):
    """The randomness of one training step is a function of its number, so a resumed run continues the same run."""
    return torch.Generator().manual_seed(1_000_003 * step + 17)


def save_atomically(obj, path):
    temporary = path.with_suffix(".tmp")
    torch.save(obj, temporary)
    os.replace(temporary, path)


def fit(model, loss_fn, evaluate, out, *, steps, lr, weight_decay, ema_decay, checkpoint_seconds=180):
    """Train `model`; loss_fn(model, step) -> loss; evaluate(ema_model, step) -> one line, and pictures as it likes.

    The rate rises over 200 steps, stays, and falls to zero over the last fifth. The checkpoint has the layout of MAR's
    trainer: `model`, `model_ema`, `optimizer`, and the step instead of the epoch.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "checkpoint-last.pth"
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(ema_decay), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    step, seconds = 0, 0.0
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        ema.module.load_state_dict(state["model_ema"])
        ema.n_averaged.fill_(1)
        optimizer.load_state_dict(state["optimizer"])
        step, seconds = state["step"], state["seconds"]
        print(f"continuing at step {step} of {steps}", flush=True)

    last_save, since, shown, running = time.time(), time.time(), step, []
    while step < steps:
        rate = lr * min(1.0, (step + 1) / 200, max(0.0, (steps - step) / (0.2 * steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_fn(model, step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step <= 1000:  # before the average means something, follow the weights
            ema.n_averaged.zero_()
        ema.update_parameters(model)
        running.append(loss.item())
        if not math.isfinite(running[-1]):
            raise SystemExit(f"loss is {running[-1]} at step {step}; the last good state is {path}")
        if step % 100 == 0:
            pace = (step - shown) / (time.time() - since)
            print(f"step {step}/{steps}  loss {np.mean(running):.4f}  {pace:.2f} steps/s", flush=True)
            seconds, since, shown, running = seconds + time.time() - since, time.time(), step, []
        if time.time() - last_save > checkpoint_seconds or step == steps:
            save_atomically(
                dict(
                    model=model.state_dict(),
                    model_ema=ema.module.state_dict(),
                    optimizer=optimizer.state_dict(),
                    step=step,
                    seconds=seconds,
                ),
                path,
            )
            print(f"step {step}: {evaluate(ema.module.eval(), step)}", flush=True)
            last_save = time.time()
    return ema.module.eval()


def train_vae(args):
    from diffusers import AutoencoderKL

    from car_spec.pipeline import to_pixels
    from car_spec.runs import image_grid

    torch.manual_seed(0)
    images, _ = load_images(args.data, split=0)
    held_out, _ = load_images(args.data, split=1)
    model = AutoencoderKL(**VAE_CONFIG)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(images)} images", flush=True)

    def losses(model, x, generator):
        posterior = model.encode(x).latent_dist
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        noise = torch.randn(mean.shape, generator=generator)
        decoded = model.decode(mean + (0.5 * log_variance).exp() * noise).sample.float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
        return decoded, (decoded - x).abs().mean(), kl.mean()

    def loss_fn(model, step):
        g = step_generator(step)
        x = images[torch.randint(len(images), (args.batch_size or 32,), generator=g)]
        flip = torch.rand(len(x), generator=g) < 0.5
        x = torch.where(flip[:, None, None, None], x.flip(3), x)
        dy, dx = torch.randint(-2, 3, (2,), generator=g).tolist()
        x = F.pad(x, (2, 2, 2, 2), value=1.0)[:, :, 2 + dy : 34 + dy, 2 + dx : 34 + dx]  # the ground is white
        with torch.autocast("cpu", torch.bfloat16):
            _, l1, kl = losses(model, x, g)
        return l1 + KL_WEIGHT * kl

    @torch.no_grad()
    def evaluate(model, step):
        x = held_out[:256]
        decoded, l1, kl = losses(model, x, step_generator(0))
        posterior = model.encode(x).latent_dist
        psnr = 10 * torch.log10(4 / (decoded.clamp(-1, 1) - x).square().mean())
        pairs = torch.stack([x[:256:8], decoded[:256:8]], 1).flatten(0, 1)  # an image, then its reconstruction
        pictures = to_pixels((0.5 * pairs + 0.5).clamp(0, 1), "pil")
        image_grid(pictures, columns=16).save(args.out / "vae" / "reconstructions.png")
        spread = f"latent std {posterior.mean.std():.3f}, posterior std {posterior.std.mean():.3f}"
        return f"held-out PSNR {psnr:.2f} dB, L1 {l1:.4f}, KL {kl:.3f}, {spread}"

    model = fit(model, loss_fn, evaluate, args.out / "vae", steps=args.steps or 5500, lr=1e-3, weight_decay=0.0, ema_decay=0.999)
    model.save_pretrained(args.out / "vae" / "ema")


def encode_all(vae, images):
    """images (N, 3, 32, 32) -> posterior mean and std, each (N, C, 8, 8)."""
    with torch.no_grad():
        posteriors = [vae.encode(batch).latent_dist for batch in images.split(128)]
    return torch.cat([p.mean for p in posteriors]), torch.cat([p.std for p in posteriors])


def demo_classes(path):
    """The class names of the demo: subcategories of the iconic categories, and a few more."""
    data = np.load(path)
    category_of = dict(zip(data["subcategory"].tolist(), data["category_names"][data["category"]].tolist()))
    names = data["subcategory_names"].tolist()
    return [name for i, name in enumerate(names) if category_of[i] in DEMO_CATEGORIES or name in DEMO_SUBCATEGORIES]


def balanced_weights(arrays):
    """Every emoji of a vendor counts once, however many skin tones it has; without this, people are 57 % of the images."""
    _, group, counts = np.unique(
        [f"{v} {n.split(',')[0]}" for v, n in zip(arrays["vendor"], arrays["name"])], return_inverse=True, return_counts=True
    )
    return torch.from_numpy(1.0 / counts[group])


class DemoLatents(NamedTuple):
    """The demo's classes as the autoencoder's posteriors, before scaling."""

    names: list[str]  # of the classes
    mean: torch.Tensor  # (N, C, 8, 8) of the training images
    std: torch.Tensor
    labels: torch.Tensor  # (N,)
    weights: torch.Tensor  # (N,), see `balanced_weights`
    held_mean: torch.Tensor  # of the held-out images
    held_labels: torch.Tensor

    def batch(self, scale, size, g):
        """A random batch of scaled latents, drawn from their posteriors, and its labels."""
        chosen = torch.multinomial(self.weights, size, replacement=True, generator=g)
        noise = torch.randn(size, *self.mean.shape[1:], generator=g)
        return scale * (self.mean[chosen] + self.std[chosen] * noise), self.labels[chosen]


def demo_latents(path, vae):
    names = demo_classes(path)
    (images, train), (held_images, held) = (load_images(path, split, names) for split in (0, 1))
    rank = torch.tensor([names.index(n) if n in names else -1 for n in train["subcategory_names"]])
    labels, held_labels = (rank[torch.from_numpy(arrays["subcategory"]).long()] for arrays in (train, held))
    return DemoLatents(names, *encode_all(vae, images), labels, balanced_weights(train), encode_all(vae, held_images)[0], held_labels)


def train_mar(args):
    from diffusers import AutoencoderKL

    from car_spec.adapters.mar import patchify
    from car_spec.models.mar import MAR, MARConfig
    from car_spec.models.presets import Preset
    from car_spec.pipeline import MARPipeline
    from car_spec.runs import image_grid

    torch.manual_seed(0)
    out = args.out / args.stage
    vae = AutoencoderKL.from_pretrained(args.out / "vae" / "ema").eval()
    data = demo_latents(args.data, vae)
    names, held_labels = data.names, data.held_labels
    scale = 1 / (data.mean.square() + data.std.square()).mean().sqrt().item()
    vae.register_to_config(scaling_factor=scale)
    vae.save_pretrained(args.out / "vae" / "ema")

    config = MARConfig(num_tokens=64, token_dim=data.mean.shape[1], num_classes=len(names), buffer_size=4, **MAR_SIZES[args.stage])
    model = MAR(config)
    model.init_weights()
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(data.mean)} images, scale {scale:.4f}",
        flush=True,
    )

    def loss_fn(model, step):
        g = step_generator(step)
        latents, labels = data.batch(scale, args.batch_size or 64, g)
        # the plain attention kernel: at 68 tokens its backward pass is twice as fast on a CPU as the fused one's
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            return model(patchify(latents, 1), labels, g, repeats=2)

    @torch.no_grad()
    def held_out_loss(model):
        g, tokens = step_generator(0), patchify(scale * data.held_mean, 1)
        return np.mean([model(tokens, held_labels, g, label_drop=0.0, repeats=2).item() for _ in range(4)])

    preset = Preset(name=args.stage, num_heads=config.num_heads, **DEMO_PRESET)

    def samples(model, classes):
        pipeline = MARPipeline(model, vae, preset, clip_sample_range=CLIP_SAMPLE_RANGE)
        generators = [torch.Generator().manual_seed(i) for i in range(len(classes))]
        return pipeline(classes, num_iter=32, guidance_scale=2.0, generator=generators).images

    evaluations = [0]

    def evaluate(model, step):
        if evaluations[0] % 4 == 0 or step == steps:
            shown = [names.index(n) for n in GRID_CLASSES]
            image_grid(samples(model, [c for c in shown for _ in range(4)]), columns=8).save(out / f"samples-{step:06d}.png")
        evaluations[0] += 1
        return f"held-out loss {held_out_loss(model):.4f}"

    steps = args.steps or {"target": 9000, "draft": 3300}[args.stage]
    fit(
        model,
        loss_fn,
        evaluate,
        out,
        steps=steps,
        lr=args.lr or {"target": 1e-3, "draft": 2e-3}[args.stage],
        weight_decay=0.02,
        ema_decay=0.9995,
        checkpoint_seconds=240,
    )


def train_xar(args):
    """Target and draft over the latents of the shipped autoencoder, whose scale is kept."""
    from diffusers import AutoencoderKL

    from car_spec.models.xar import XAR, XARConfig, to_cells

    torch.manual_seed(0)
    vae = AutoencoderKL.from_pretrained(args.package / "vae").eval()
    data, scale = demo_latents(args.data, vae), vae.config.scaling_factor
    config = XARConfig(num_tokens=64, token_dim=data.mean.shape[1], num_classes=len(data.names), **XAR_SIZES[args.stage])
    model = XAR(config)
    model.init_weights()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(data.mean)} images", flush=True)

    def loss_fn(model, step):
        g = step_generator(step)
        latents, labels = data.batch(scale, args.batch_size or 64, g)
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            return model(to_cells(latents, config.num_cells), labels, g)

    @torch.no_grad()
    def evaluate(model, step):
        g, cells = step_generator(0), to_cells(scale * data.held_mean, config.num_cells)
        loss = np.mean([model(cells, data.held_labels, g, label_drop=0.0).item() for _ in range(8)])
        return f"held-out loss {loss:.4f}"

    fit(
        model,
        loss_fn,
        evaluate,
        args.out / args.stage,
        steps=args.steps or 4000,
        lr=args.lr or 1e-3,
        weight_decay=0.02,
        ema_decay=0.999,
        checkpoint_seconds=240,
    )


def pack(args, stage, name, metadata, without=()):
    """The average of a stage as it ships: float16 safetensors whose header holds what shapes cannot tell. without: keys left out."""
    from safetensors.torch import save_file

    from car_spec.models.loading import METADATA_KEY

    state = torch.load(args.out / stage / "checkpoint-last.pth", map_location="cpu", weights_only=True)
    weights = {key: value.half() for key, value in state["model_ema"].items() if key not in without}
    metadata = dict(copy="model_ema", **metadata)
    path = args.package / f"{name}.safetensors"
    save_file(weights, path, {METADATA_KEY: json.dumps(metadata)})
    path.chmod(0o644)
    count = sum(value.numel() for value in weights.values())
    print(f"{name}: {count / 1e6:.2f} M parameters, {state['step']} steps, {state['seconds'] / 60:.0f} minutes")


def export_xar(args):
    for stage, name in (("xar-target", "xar"), ("xar-draft", "xar-draft")):
        heads = XAR_SIZES[stage]["num_heads"]
        preset = dict(name="demo-xar" if stage == "xar-target" else "demo-xar-draft", num_heads=heads, **XAR_PRESET)
        pack(args, stage, name, dict(class_names=demo_classes(args.data), num_heads=heads, num_cells=4, preset=preset))


def export(args):
    """The two MAR, and the autoencoder."""
    from diffusers import AutoencoderKL

    for stage, name in (("target", "mar"), ("draft", "mar-draft")):
        heads = MAR_SIZES[stage]["num_heads"]
        preset = dict(name="demo" if stage == "target" else "demo-draft", num_heads=heads, **DEMO_PRESET)
        metadata = dict(class_names=demo_classes(args.data), num_heads=heads, clip_sample_range=CLIP_SAMPLE_RANGE, preset=preset)
        pack(args, stage, name, metadata)
    AutoencoderKL.from_pretrained(args.out / "vae" / "ema").save_pretrained(args.package / "vae")
    config = args.package / "vae" / "config.json"
    values = json.loads(config.read_text())
    values.pop("_name_or_path", None)  # a path of the machine it was trained on
    config.write_text(json.dumps(values, indent=2) + "\n")
    for path in (args.package / "vae").rglob("*.safetensors"):
        path.chmod(0o644)


def write_reference(args):
    """Real images as the demo models saw them: every training emoji of a vendor once, in one of its skin tones.

    -> `<out>/reference` with a manifest of labels; `<out>/quality.yaml` and, for Harmon, `<out>/quality-harmon.yaml`, recipes whose labels
    and captions are as frequent as the reference's.
    """
    from car_spec.pipeline import to_pixels
    from car_spec.runs import RunFolder, image_spec, sha256_of

    names = demo_classes(args.data)
    images, arrays = load_images(args.data, 0, names)
    emoji = np.array([f"{v} {n.split(',')[0]}" for v, n in zip(arrays["vendor"], arrays["name"])])
    chance = np.random.default_rng(0)
    order = chance.permutation(len(emoji))
    chosen = chance.permutation(order[np.unique(emoji[order], return_index=True)[1]])  # images that come twice are of all kinds
    labels = [names.index(name) for name in arrays["subcategory_names"][arrays["subcategory"][chosen]]]
    captions = [f"{arrays['name'][i]}, {arrays['vendor_names'][arrays['vendor'][i]]}" for i in chosen]

    folder = RunFolder(args.out / "reference", {"images": "real", "data_sha256": sha256_of(args.data)})
    folder.open()
    specs = [image_spec(i, labels, 0) for i in range(len(chosen))]
    for spec, picture in zip(specs, to_pixels((images[torch.from_numpy(chosen)] + 1) / 2, "pil")):
        folder.write_image(spec, picture)
    folder.write_manifest(specs, names, {"law of the images": "real"})
    for name, asked in (("quality", f"classes: {labels}"), ("quality-harmon", f"prompt: {json.dumps(captions)}")):
        (args.out / f"{name}.yaml").write_text(
            "# Samples of the demo for scores: asked for as often as in the training images, no guidance, which would change the law.\n"
            f"num_images: 2048\nbatch_size: 64\nguidance_scale: 1.0\n{asked}\n"
            "evaluate:\n  extractor: efficientnet-lite0\n  metrics: fid,is,kid,prc\n"
        )
    print(f"{len(specs)} real images: {folder.path}\nrecipes: {args.out}/quality.yaml, {args.out}/quality-harmon.yaml")


def main():
    stages = {
        "vae": train_vae,
        "target": train_mar,
        "draft": train_mar,
        "xar-target": train_xar,
        "xar-draft": train_xar,
        "export": export,
        "xar-export": export_xar,
        "reference": write_reference,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--data", required=True, type=Path, help="emoji64.npz")
    parser.add_argument("--out", default=Path("runs/demo"), type=Path, help="checkpoints and pictures go here")
    parser.add_argument("--package", default=Path("car_spec/demo"), type=Path, help="where export writes")
    parser.add_argument("--steps", type=int, help="training steps; each stage has its own default")
    parser.add_argument("--batch-size", type=int, help="images a step; each stage has its own default")
    parser.add_argument("--lr", type=float, help="highest learning rate; each stage has its own default")
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    stages[args.stage](args)


if __name__ == "__main__":
    main()
