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
    image_size: int | None = None  # pixels a side; None: what the position tables were learned for


# Li et al. 2024 and Ren et al. 2025 (xAR), READMEs of the releases: the settings of their tables of results;
# and Wu et al. 2025 (Harmon), keyed by the width of its MAR: the settings of its scripts
PRESETS = {
    ("mar", 768): Preset("mar_base", num_heads=12, num_iter=256, guidance_scale=2.9),
    ("mar", 1024): Preset("mar_large", num_heads=16, num_iter=256, guidance_scale=3.0),
    ("mar", 1280): Preset("mar_huge", num_heads=16, num_iter=256, guidance_scale=3.2),
    ("xar", 768): Preset("xar_base", num_heads=12, num_iter=4, num_inference_steps=40, guidance_scale=2.7),
    ("xar", 1024): Preset("xar_large", num_heads=16, num_iter=4, num_inference_steps=50, guidance_scale=2.3),
    ("xar", 1280): Preset("xar_huge", num_heads=16, num_iter=4, num_inference_steps=50, guidance_scale=2.2),
    ("harmon", 768): Preset("harmon_0.5b", num_heads=12, num_iter=64, guidance_scale=3.0, guidance_schedule="constant", image_size=512),
    ("harmon", 1280): Preset("harmon_1.5b", num_heads=16, num_iter=64, guidance_scale=3.0, guidance_schedule="constant", image_size=512),
}

# Attention heads of Qwen2.5-0.5B and 1.5B by hidden size, from their public configurations
QWEN_HEADS = {896: 14, 1536: 12}
