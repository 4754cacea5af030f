"""What is measured: a model, a precision and a batch, with weights that no default hides behind.

There is no hub at hand, so weights are random with a fixed seed, and none is left at a default
that would make a mistake invisible (norms of 1 and 0, zero biases, zero position tables).
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Sequence

import torch

from fastswin.engine.precision import QUANTIZED
from fastswin.models import SwinConfig, find_variant

#: Per precision: dtype of images and results, and whether fp32 products run in TF32. Quantised
#: precisions take half-precision images on a GPU (:meth:`Problem.image_dtype`).
PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
    **{name: (torch.float32, False) for name in QUANTIZED},
}

#: Models of each suite, small ones first so that a deadline cuts the dear ones.
SUITES: dict[str, tuple[str, ...]] = {
    "model": (
        "swin_tiny_patch4_window7_224",
        "swin_small_patch4_window7_224",
        "swin_base_patch4_window7_224",
        "swin_large_patch4_window12_384",
    ),
    "model_v2": (
        "swinv2_tiny_window8_256",
        "swinv2_small_window8_256",
        "swinv2_base_window16_256",
        "swinv2_base_window12to24_192to384",
    ),
    "quant": (
        "swin_tiny_patch4_window7_224",
        "swin_small_patch4_window7_224",
        "swin_base_patch4_window7_224",
        "swin_large_patch4_window7_224",
    ),
}

DEFAULT_DTYPES = ("fp16", "bf16")
DEFAULT_BATCHES = (1, 8, 32, 64)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row of a benchmark table.

    Attributes:
        model: name of a variant, the ``case`` of the record.
        dtype: key of :data:`PRECISIONS`.
        batch: images per call.
        config: the model itself, for models that are no named variant; None looks ``model`` up.
        checkpoint: path of a state dict; None means seeded random weights.

    Raises:
        ValueError: unknown model or dtype, or a batch below 1; the message names it.
    """

    model: str
    dtype: str = "fp16"
    batch: int = 1
    config: SwinConfig | None = None
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in PRECISIONS:
            raise ValueError(f"dtype must be one of {sorted(PRECISIONS)}, got {self.dtype!r}")
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")
        if self.config is None:
            find_variant(self.model)

    @property
    def swin_config(self) -> SwinConfig:
        return self.config or find_variant(self.model)

    @property
    def torch_dtype(self) -> torch.dtype:
        return PRECISIONS[self.dtype][0]

    @property
    def quantized(self) -> bool:
        """Whether it needs a calibrated model."""
        return self.dtype in QUANTIZED

    def image_dtype(self, device: torch.device) -> torch.dtype:
        """Of the images that contenders are given on a device."""
        return torch.float16 if self.quantized and device.type == "cuda" else self.torch_dtype

    @property
    def tf32(self) -> bool:
        return PRECISIONS[self.dtype][1]

    def __str__(self) -> str:
        return f"{self.model} {self.dtype} batch {self.batch}"


def make_problems(
    suite: str = "model",
    models: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    checkpoint: str | None = None,
) -> list[Problem]:
    """Every combination, all batches of a model and dtype together.

    Args:
        suite: key of :data:`SUITES`; gives the models where ``models`` is None.
        models, dtypes, batches: None takes the suite's, fp16 and bf16, and 1 to 64.
        checkpoint: path of a state dict for a single model.

    Raises:
        ValueError: an unknown suite, model or dtype, a bad batch, or a checkpoint with several
            models.
    """
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {sorted(SUITES)}, got {suite!r}")
    names = tuple(models) if models else SUITES[suite]
    if checkpoint is not None and len(names) != 1:
        raise ValueError(f"checkpoint fits one model, but models names {len(names)}")
    return [
        Problem(model, dtype, batch, checkpoint=checkpoint)
        for model, dtype, batch in itertools.product(
            names, dtypes or DEFAULT_DTYPES, batches or DEFAULT_BATCHES
        )
    ]


def parse_names(text: str, legal: Sequence[str], argument: str) -> list[str]:
    """Comma-separated names, each of which must be legal; ValueError lists what is near."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise ValueError(f"{argument} must name at least one of {', '.join(legal)}")
    for name in names:
        if name not in legal:
            near = difflib.get_close_matches(name, legal, n=3, cutoff=0.3) or list(legal)
            raise ValueError(f"{argument}: unknown {name!r}; nearest: {', '.join(near)}")
    return list(dict.fromkeys(names))


def parse_batches(text: str, argument: str = "batches") -> list[int]:
    """Comma-separated batch sizes, at least 1 each."""
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{argument} must be positive integers separated by commas, got {text!r}")
    return list(dict.fromkeys(sizes))


def seeded_images(problem: Problem, count: int, device: torch.device, seed: int) -> torch.Tensor:
    """``[count, channels, h, w]`` standard normal images in the problem's dtype, all distinct."""
    config = problem.swin_config
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, config.in_channels, *config.image_size, generator=generator)
    return images.to(device, problem.image_dtype(device))
