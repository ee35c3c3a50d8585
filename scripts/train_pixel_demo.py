"""Train the demo's pixel model on emoji64: an unconditional denoiser of 32x32 images, as a diffusers `DDPMPipeline`.

    python scripts/train_pixel_demo.py train  --data emoji64.npz --out runs/pixel
    python scripts/train_pixel_demo.py export --out runs/pixel

Like the stages of train_demo.py, `train` can be killed and started again. `export` packs the average in float16 for shipping,
with a picture of images 0 to 31 of seed 0 beside the folder.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from train_demo import balanced_weights, demo_classes, fit, load_images, step_generator

UNET_CONFIG = dict(
    sample_size=32,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(32, 64, 128),
    down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    attention_head_dim=32,
    norm_num_groups=16,
)
SCHEDULER_CONFIG = dict(num_train_timesteps=1000, beta_schedule="linear", prediction_type="epsilon", clip_sample=True)
SAMPLES = 32  # in the picture of an evaluation


def pipeline_of(model):
    from diffusers import DDPMPipeline, DDPMScheduler

    pipe = DDPMPipeline(model, DDPMScheduler(**SCHEDULER_CONFIG))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def train(args):
    from diffusers import DDPMScheduler, UNet2DModel

    from car_spec.runs import image_grid

    torch.manual_seed(0)
    names = demo_classes(args.data)
    (images, arrays), (held_out, _) = (load_images(args.data, split, names) for split in (0, 1))
    weights, scheduler = balanced_weights(arrays), DDPMScheduler(**SCHEDULER_CONFIG)
    model = UNet2DModel(**UNET_CONFIG)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(images)} images", flush=True)

    def loss_of(model, x, g):
        noise = torch.randn(x.shape, generator=g)
        t = torch.randint(scheduler.config.num_train_timesteps, (len(x),), generator=g)
        said = model(scheduler.add_noise(x, noise, t), t).sample
        return F.mse_loss(said.float(), noise)

    def loss_fn(model, step):
        g = step_generator(step)
        x = images[torch.multinomial(weights, args.batch_size, replacement=True, generator=g)]
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, x, g)

    evaluations = [0]

    @torch.no_grad()
    def evaluate(model, step):
        if evaluations[0] % 4 == 0 or step == args.steps:
            pictures = pipeline_of(model)(SAMPLES, generator=torch.Generator().manual_seed(0), num_inference_steps=50).images
            image_grid(pictures, columns=8).save(args.out / f"samples-{step:06d}.png")
        evaluations[0] += 1
        return f"held-out loss {loss_of(model, held_out, step_generator(0)):.4f}"

    fit(model, loss_fn, evaluate, args.out, steps=args.steps, lr=args.lr, weight_decay=0.01, ema_decay=0.999, checkpoint_seconds=240)


def export(args):
    from diffusers import UNet2DModel

    from car_spec.pipeline import image_seed
    from car_spec.runs import image_grid

    state = torch.load(args.out / "checkpoint-last.pth", map_location="cpu", weights_only=True)
    model = UNet2DModel(**UNET_CONFIG)
    model.load_state_dict(state["model_ema"])
    generators = [torch.Generator().manual_seed(image_seed(0, i)) for i in range(SAMPLES)]
    pictures = pipeline_of(model.eval())(SAMPLES, generators, num_inference_steps=100).images
    image_grid(pictures, columns=8).save(args.package.parent / "pixel-samples.png")
    pipeline_of(model.half()).save_pretrained(args.package)
    for config in args.package.rglob("*.json"):
        values = json.loads(config.read_text())
        values.pop("_name_or_path", None)  # a path of the machine it was trained on
        config.write_text(json.dumps(values, indent=2) + "\n")
    for path in args.package.rglob("*.safetensors"):
        path.chmod(0o644)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.2f} M parameters, {state['step']} steps, {state['seconds'] / 60:.0f} minutes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("train", "export"))
    parser.add_argument("--data", type=Path, help="emoji64.npz")
    parser.add_argument("--out", default=Path("runs/pixel"), type=Path, help="checkpoints and pictures go here (default: %(default)s)")
    parser.add_argument("--package", default=Path("car_spec/demo/pixel"), type=Path, help="where export writes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4000, help="training steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="images a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=6e-4, help="highest learning rate (default: %(default)s)")
    args = parser.parse_args()
    if args.stage == "train" and args.data is None:
        parser.error("train needs --data")
    torch.set_flush_denormal(True)
    {"train": train, "export": export}[args.stage](args)


if __name__ == "__main__":
    main()
