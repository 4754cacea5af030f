"""Photos of any size and mode to a model's pixels, the way timm evaluates.

    upright (EXIF) -> RGB or grey -> shorter side to size / crop_ratio -> centre crop

Geometry and rounding are those of timm's evaluation transform, so published accuracies hold.
Pillow is imported on first use (extra ``vision``).
"""

from __future__ import annotations

import io
import math
import struct
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from fastswin.data.preprocess import Preprocess

if TYPE_CHECKING:
    from PIL import Image

#: What Pillow raises on a damaged file, by format.
_DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error)

#: Grey level of what lies behind a transparent pixel.
BACKGROUND = 255


def require_pillow() -> None:
    """Raise ImportError, naming the extra, unless Pillow is installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError("reading photos needs Pillow: pip install 'fastswin[vision]'") from error


def read_image(path: str | Path, *, grey: bool = False) -> Image.Image:
    """Decode one photo, upright, as RGB or grey.

    Transparency is laid over white, 16-bit images keep their upper 8 bits, the first frame of an
    animation is taken.

    Args:
        path: the file.
        grey: return mode "L" instead of "RGB".

    Raises:
        ImportError: Pillow is not installed.
        FileNotFoundError: no such file.
        ValueError: not an image, or a damaged one; the message names the file.
    """
    require_pillow()
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such image file")
    return _decode(path, str(path), grey)


def _decode(file: Path | BinaryIO, name: str, grey: bool) -> Image.Image:
    """:func:`read_image` of an open file or a path; ``name`` is for messages."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings(), Image.open(file) as image:
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image.load()
            upright = ImageOps.exif_transpose(image)
            return to_mode(upright, grey=grey)
    except UnidentifiedImageError as error:
        raise ValueError(f"{name}: not an image that Pillow can read") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name}: refused, {error}") from error
    except _DECODE_ERRORS as error:
        raise ValueError(f"{name}: damaged image ({error})") from error


def to_mode(image: Image.Image, *, grey: bool) -> Image.Image:
    """An image of any Pillow mode as "RGB", or "L" where ``grey``."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        image = _to_eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (BACKGROUND,) * 3 + (255,))
        image = Image.alpha_composite(white, image)
    image = image.convert("RGB")
    return image.convert("L") if grey else image


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float grey to 8 bits; Pillow's own conversion would clip them."""
    from PIL import Image

    pixels = np.asarray(image).astype(np.float64)
    if image.mode == "F":
        scale = 255.0 if pixels.max(initial=0.0) <= 1.0 else 1.0
    else:  # "I" is what older Pillow makes of 16-bit files
        sixteen_bit = image.mode != "I" or pixels.max(initial=0.0) > 255
        scale = 1 / 257 if sixteen_bit else 1.0
    return Image.fromarray(np.clip(np.rint(pixels * scale), 0, 255).astype(np.uint8))


def resize_and_crop(image: Image.Image, preprocess: Preprocess) -> Image.Image:
    """Resize so that ``image_size / crop_ratio`` is covered, then cut the centre.

    Args:
        image: any size of at least one pixel.
        preprocess: ``image_size``, ``crop_ratio`` and ``interpolation`` are used.

    Returns:
        Image of exactly ``preprocess.image_size``.
    """
    from PIL.Image import Resampling

    height, width = preprocess.image_size
    covered = (
        math.floor(height / preprocess.crop_ratio),
        math.floor(width / preprocess.crop_ratio),
    )
    by_height = covered[0] * image.width >= covered[1] * image.height
    # the binding side is exact, the other truncates, as torchvision's Resize does
    if by_height:
        size = (max(covered[1], covered[0] * image.width // image.height), covered[0])
    else:
        size = (covered[1], max(covered[0], covered[1] * image.height // image.width))
    resampling = {"bicubic": Resampling.BICUBIC, "bilinear": Resampling.BILINEAR}
    if size != image.size:
        image = image.resize(size, resampling[preprocess.interpolation])
    top, left = round((size[1] - height) / 2), round((size[0] - width) / 2)
    return image.crop((left, top, left + width, top + height))


def load_image(path: str | Path, preprocess: Preprocess) -> torch.Tensor:
    """One photo as uint8 ``[channels, height, width]`` of the model's size.

    Raises:
        ImportError, FileNotFoundError, ValueError: as :func:`read_image`.
    """
    return _to_tensor(read_image(path, grey=preprocess.grey), preprocess)


def decode_image(content: bytes, name: str, preprocess: Preprocess) -> torch.Tensor:
    """:func:`load_image` of a file's bytes; ``name`` is for messages.

    Raises:
        ImportError, ValueError: as :func:`read_image`.
    """
    require_pillow()
    return _to_tensor(_decode(io.BytesIO(content), name, preprocess.grey), preprocess)


def _to_tensor(image: Image.Image, preprocess: Preprocess) -> torch.Tensor:
    image = resize_and_crop(image, preprocess)
    pixels = torch.from_numpy(np.asarray(image).copy())
    return pixels[None] if preprocess.grey else pixels.permute(2, 0, 1).contiguous()


def load_images(paths: Iterable[str | Path], preprocess: Preprocess) -> torch.Tensor:
    """Photos as one uint8 batch ``[B, channels, height, width]``.

    Raises:
        ImportError, FileNotFoundError, ValueError: as :func:`read_image`.
    """
    images = [load_image(path, preprocess) for path in paths]
    if not images:
        return torch.empty(0, preprocess.in_channels, *preprocess.image_size, dtype=torch.uint8)
    return torch.stack(images)
