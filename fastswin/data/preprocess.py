"""How pixels become a model's input, as plain values that travel with the weights.

    x = enlarge((pixel / 255 - mean) / std)        per channel, fp32

:class:`Preprocess` is stored as JSON in a checkpoint's metadata (key ``fastswin_preprocess``,
class names beside it in ``fastswin_classes``), so that weights and their preprocessing cannot be
mixed up. The defaults are ImageNet's, with timm's crop ratios: 0.9 at 224 px, 1.0 at 384 px.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from fastswin.models import SwinConfig

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

PREPROCESS_KEY = "fastswin_preprocess"
CLASSES_KEY = "fastswin_classes"


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """Geometry and normalisation of a model's input.

    Attributes:
        image_size: ``(height, width)`` in pixels that the model takes.
        mean, std: per channel, on a 0-1 pixel scale; one entry means grey images.
        crop_ratio: part of the shorter side that the centre crop keeps.
        interpolation: "bicubic" or "bilinear".
        enlarge_factor: the model takes images this many times larger, enlarged bicubically after
            normalisation: a patch of an enlarged image sees its pixels' neighbours.

    Raises:
        ValueError: an attribute is out of its legal range; the message names it.
    """

    image_size: tuple[int, int] = (224, 224)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop_ratio: float = 0.9
    interpolation: str = "bicubic"
    enlarge_factor: int = 1

    def __post_init__(self) -> None:
        for name in ("image_size", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise ValueError(f"image_size must be two positive integers, got {self.image_size}")
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std):
            raise ValueError(
                f"mean and std must both have 1 or 3 entries, got {len(self.mean)} and "
                f"{len(self.std)}"
            )
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {self.std}")
        if not 0.0 < self.crop_ratio <= 1.0:
            raise ValueError(f"crop_ratio must lie in (0, 1], got {self.crop_ratio}")
        if self.interpolation not in ("bicubic", "bilinear"):
            raise ValueError(
                f"interpolation must be 'bicubic' or 'bilinear', got {self.interpolation!r}"
            )

        if not isinstance(self.enlarge_factor, int) or self.enlarge_factor < 1:
            raise ValueError(f"enlarge_factor must be at least 1, got {self.enlarge_factor!r}")

    @property
    def in_channels(self) -> int:
        return len(self.mean)

    @property
    def grey(self) -> bool:
        """Whether images are read as one grey channel."""
        return self.in_channels == 1

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """The model's input: :meth:`enlarge` of :meth:`normalise`; raises as that does."""
        return self.enlarge(self.normalise(pixels))

    def enlarge(self, images: torch.Tensor) -> torch.Tensor:
        """Normalised ``[B, channels, h, w]`` to ``[B, channels, f * h, f * w]``, bicubically."""
        if self.enlarge_factor == 1:
            return images
        return F.interpolate(
            images, scale_factor=self.enlarge_factor, mode="bicubic", align_corners=False
        )

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        """``(pixels / 255 - mean) / std`` in fp32.

        Args:
            pixels: uint8 ``[B, channels, height, width]``, or ``[B, height, width]`` for grey.

        Returns:
            float32 ``[B, channels, height, width]`` on the same device.

        Raises:
            TypeError: pixels are not uint8.
            ValueError: another rank or number of channels.
        """
        if pixels.dtype != torch.uint8:
            raise TypeError(f"pixels must be uint8, got {pixels.dtype}")
        if pixels.ndim == 3 and self.grey:
            pixels = pixels[:, None]
        if pixels.ndim != 4 or pixels.shape[1] != self.in_channels:
            raise ValueError(
                f"pixels must be [B, {self.in_channels}, height, width], "
                f"got shape {tuple(pixels.shape)}"
            )
        if self.grey:  # plain numbers: a tensor would wait for the GPU on every batch
            return (pixels.float() / 255 - self.mean[0]) / self.std[0]
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        return (pixels.float() / 255 - mean) / std

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, the inverse of :meth:`from_dict`."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Any) -> Preprocess:
        """Build from :meth:`to_dict`; ValueError on malformed or unknown content."""
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"{PREPROCESS_KEY}: {error}") from error

    @classmethod
    def for_config(cls, config: SwinConfig) -> Preprocess:
        """ImageNet's preprocessing at a model's image size.

        Raises:
            ValueError: the model takes neither 1 nor 3 channels.
        """
        if config.in_channels not in (1, 3):
            raise ValueError(
                f"in_channels must be 1 or 3 to read photos, the model has {config.in_channels}"
            )
        values: dict[str, Any] = {"image_size": config.image_size}
        values["crop_ratio"] = 1.0 if min(config.image_size) >= 384 else 0.9
        if config.in_channels == 1:
            values |= {"mean": (0.449,), "std": (0.226,)}  # averages of the RGB constants
        return cls(**values)


def metadata_for(preprocess: Preprocess, class_names: list[str]) -> dict[str, Any]:
    """``extra_metadata`` for :func:`fastswin.models.checkpoint.save_checkpoint`."""
    return {PREPROCESS_KEY: preprocess.to_dict(), CLASSES_KEY: class_names}


def from_metadata(metadata: dict[str, Any]) -> tuple[Preprocess | None, list[str] | None]:
    """Preprocessing and class names out of a checkpoint's metadata, None where absent.

    Raises:
        ValueError: they are there but malformed.
    """
    values, names = metadata.get(PREPROCESS_KEY), metadata.get(CLASSES_KEY)
    if names is not None and not isinstance(names, list):
        raise ValueError(f"{CLASSES_KEY} must be a list of names, got {type(names).__name__}")
    return (
        None if values is None else Preprocess.from_dict(values),
        None if names is None else [str(name) for name in names],
    )
