"""Runs any batch and image size on static graphs: parts of a batch, one compiled program a part.

    batch 13, 4 images a part -> 4 + 4 + 4 + 1

A CPU gains nothing from large batches: Swin-T at 224 px takes 10 to 20 % longer per image at 8
images than at 1, since the activations leave the cache. So a part holds only as many images as
fill a program with work, and its size is a power of two, so that few programs serve all batches.

Images that are not finite, or so large that fp32 would overflow in them, take the PyTorch path:
kernels that clamp exponents would turn their NaN into numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fastswin.engine.backends.graph import emit_swin
from fastswin.engine.prepared import PreparedModel
from fastswin.models.config import SwinConfig
from fastswin.models.swin import pad_to_patches
from fastswin.quant.ranges import LayerRange

Pair = tuple[int, int]
Program = Callable[[np.ndarray], list[np.ndarray]]

#: Tokens of the first stage that keep two cores busy; larger parts fall out of the cache.
PART_TOKENS = 4096

#: Compiled programs hold a copy of the weights each: at most this many, and this many bytes.
MAX_PROGRAMS, MAX_PROGRAM_BYTES = 16, 2 << 30

#: Pixels beyond which a square overflows fp32; far beyond any normalised image.
LARGEST_PIXEL = 1e15


class GraphRunner:
    """One model on one runtime.

    Args:
        runtime: :class:`~fastswin.engine.backends.openvino.OpenVino` or
            :class:`~fastswin.engine.backends.onnxruntime.OnnxRuntime`.
        config, weights: the model, prepared in fp32 on the CPU.
        position: position embedding of a map size ``[1, H, W, C]``, or None without one.
        exact: logits or features of images by PyTorch, for those that are not finite.
        dtype: of the results.
        ranges: int8 ranges by layer name; None keeps floats.
    """

    def __init__(
        self,
        runtime: Any,
        config: SwinConfig,
        weights: PreparedModel,
        *,
        position: Callable[[Pair], torch.Tensor | None],
        exact: Callable[[str, torch.Tensor], list[torch.Tensor]],
        dtype: torch.dtype,
        ranges: Mapping[str, LayerRange] | None = None,
    ) -> None:
        self.runtime, self.config, self.weights = runtime, config, weights
        self._position, self._exact = position, exact
        self._dtype, self._ranges = dtype, ranges
        self._programs: OrderedDict[tuple[str, int, Pair], Program] = OrderedDict()
        fitting = MAX_PROGRAM_BYTES // max(weights.num_bytes, 1)
        self._max_programs = min(max(fitting, 2), MAX_PROGRAMS)

    @property
    def programs(self) -> tuple[tuple[str, int, Pair], ...]:
        """Compiled programs as (kind, images, image size), least recently used first."""
        return tuple(self._programs)

    def __call__(self, kind: str, images: torch.Tensor) -> list[torch.Tensor]:
        """Outputs for ``[B, channels, h, w]``, B at least 1.

        Args:
            kind: "logits" or "features".
            images: any float dtype and strides.

        Returns:
            New tensors: logits ``[B, classes]``, or maps ``[B, H_i, W_i, C_i]``.

        Raises:
            ValueError: a stage's map is smaller than its window.
        """
        pixels = self._pixels(images)
        # written so that a NaN, which compares false, counts as unfit
        fit = pixels.abs().flatten(1).amax(dim=1) <= LARGEST_PIXEL
        pieces: list[list[torch.Tensor]] = []
        for start, stop in parts(len(pixels), part_images(self.config, pixels.shape[2:])):
            program = self._program(kind, stop - start, (pixels.shape[2], pixels.shape[3]))
            found = program(pixels[start:stop].numpy())
            pieces.append([torch.from_numpy(array).to(self._dtype, copy=True) for array in found])
        outputs = [p[0] if len(p) == 1 else torch.cat(p) for p in zip(*pieces, strict=True)]
        if not bool(fit.all()):
            for output, exact in zip(outputs, self._exact(kind, images[~fit]), strict=True):
                output[~fit] = exact.to(self._dtype)
        return outputs

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Contiguous float32 images of whole patches."""
        patch = self.config.patch_size
        if self.config.window_convention == "torchvision":  # drops the remainder, never pads
            h, w = (side // patch * patch for side in images.shape[2:])
            images = images[:, :, :h, :w]
        return pad_to_patches(images.float(), self.config).contiguous()

    def _program(self, kind: str, count: int, size: Pair) -> Program:
        key = (kind, count, size)
        if key not in self._programs:
            while len(self._programs) >= self._max_programs:
                self._programs.popitem(last=False)
            self._programs[key] = self._compile(kind, count, size)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _compile(self, kind: str, count: int, size: Pair) -> Program:
        emitter = self.runtime.emitter()
        position = self._position(self.config.map_size(0, size))
        outputs = emit_swin(
            emitter, self.config, self.weights, count, size, kind, position, self._ranges
        )
        return self.runtime.compile(emitter, outputs)


def part_images(config: SwinConfig, image_size: Pair | torch.Size) -> int:
    """Most images of one part: the power of two that comes to :data:`PART_TOKENS` at most."""
    rows, cols = config.map_size(0, (image_size[0], image_size[1]))
    return 1 << max((PART_TOKENS // (rows * cols)).bit_length() - 1, 0)


def parts(batch: int, most: int) -> list[tuple[int, int]]:
    """``[start, stop)`` of each part, powers of two, the largest first."""
    found, start = [], 0
    while start < batch:
        size = min(most, 1 << ((batch - start).bit_length() - 1))
        found.append((start, start + size))
        start += size
    return found
