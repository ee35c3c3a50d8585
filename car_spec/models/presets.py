"""What checkpoints do not store: one table, keyed by kind of model and width (never by the path)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """Sampling defaults of one released model."""

    name: str
    num_heads: int | None
    num_iter: int  # AR steps
    num_inference_steps: int = 100  # denoising steps a token
    guidance_scale: float = 1.0
    guidance_schedule: str = "linear"
    temperature: float = 1.0


# Li et al. 2024 and Ren et al. 2025, READMEs of the releases: the settings of their tables of results
PRESETS = {
    ("mar", 768): Preset("mar_base", num_heads=12, num_iter=256, guidance_scale=2.9),
    ("mar", 1024): Preset("mar_large", num_heads=16, num_iter=256, guidance_scale=3.0),
    ("mar", 1280): Preset("mar_huge", num_heads=16, num_iter=256, guidance_scale=3.2),
    ("xar", 768): Preset("xar_base", num_heads=12, num_iter=4, num_inference_steps=40, guidance_scale=2.7),
    ("xar", 1024): Preset("xar_large", num_heads=16, num_iter=4, num_inference_steps=50, guidance_scale=2.3),
    ("xar", 1280): Preset("xar_huge", num_heads=16, num_iter=4, num_inference_steps=50, guidance_scale=2.2),
}
