"""car_spec: fast sampling of continuous autoregressive image models. Importing it needs torch alone."""

__version__ = "0.1.0"

from car_spec.accelerate import accelerate
from car_spec.pipeline import load_pipeline

__all__ = ["__version__", "accelerate", "load_pipeline"]
