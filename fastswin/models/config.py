"""What a Swin Transformer is made of, as one frozen dataclass.

Everything the model, the checkpoint loaders and the engine need to know follows from
:class:`SwinConfig`: V1 (pre-norm, scaled dot-product scores, bias table) and V2 (post-norm,
cosine scores, bias from a small MLP) differ by ``version`` alone.

Sources: Liu et al. 2021 (V1), Liu et al. 2022 (V2) and the reference implementations named in
:data:`WindowConvention`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

from fastswin.models.geometry import WindowConvention, resolve_window, to_pair

__all__ = ["SwinConfig", "WindowConvention"]

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class SwinConfig:
    """One Swin Transformer.

    Attributes:
        version: 1 or 2.
        image_size: ``(height, width)`` in pixels that fixes the window of each stage; other sizes
            may be run, see :mod:`fastswin.models.geometry`.
        patch_size: side of a patch in pixels.
        in_channels: channels of the image.
        num_classes: width of the head; 0 leaves the head out.
        embed_dim: channels ``C`` of the first stage; stage ``i`` has ``C * 2**i``.
        depths: blocks per stage.
        num_heads: heads per stage.
        window_size: ``(height, width)`` in tokens.
        window_convention: what happens where a window is larger than its map.
        mlp_ratio: hidden channels of the MLP over ``C``.
        qkv_bias: whether the qkv projection has a bias (V2: query and value only).
        qk_scale: multiplies ``q @ k.T`` in V1; None means ``head_dim ** -0.5``.
        drop_rate, attn_drop_rate, drop_path_rate: dropout probabilities, active in training.
        absolute_position_embedding: adds a learned ``[1, tokens, C]`` after the patch embedding.
        patch_norm: LayerNorm after the patch embedding.
        layer_norm_eps: epsilon of every LayerNorm.
        downsample_norm_eps: epsilon of the LayerNorms after the patch embedding and in merging, if
            it differs (Hugging Face fixes it at 1e-5); None means ``layer_norm_eps``.
        pretrained_window_sizes: V2, per stage, the window the bias MLP was trained with; 0 means
            the window itself.

    Raises:
        ValueError: an attribute is out of its legal range; the message names it.
    """

    version: Literal[1, 2] = 1
    image_size: Pair = (224, 224)
    patch_size: int = 4
    in_channels: int = 3
    num_classes: int = 1000
    embed_dim: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    window_size: Pair = (7, 7)
    window_convention: WindowConvention = "timm"
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    qk_scale: float | None = None
    drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    absolute_position_embedding: bool = False
    patch_norm: bool = True
    layer_norm_eps: float = 1e-5
    downsample_norm_eps: float | None = None
    pretrained_window_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "image_size", to_pair(self.image_size, "image_size"))
        set_(self, "window_size", to_pair(self.window_size, "window_size"))
        set_(self, "depths", tuple(self.depths))
        set_(self, "num_heads", tuple(self.num_heads))
        if self.pretrained_window_sizes is not None:
            set_(self, "pretrained_window_sizes", tuple(self.pretrained_window_sizes))
        self._validate()

    def _validate(self) -> None:
        if self.version not in (1, 2):
            raise ValueError(f"version must be 1 or 2, got {self.version!r}")
        if self.window_convention not in get_args(WindowConvention):
            raise ValueError(
                f"window_convention must be one of {get_args(WindowConvention)}, "
                f"got {self.window_convention!r}"
            )
        for name in ("patch_size", "in_channels", "embed_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_classes < 0:
            raise ValueError(f"num_classes must be at least 0, got {self.num_classes}")
        if not self.depths or min(self.depths) < 1:
            raise ValueError(f"depths must hold one positive number per stage, got {self.depths}")
        if len(self.num_heads) != len(self.depths):
            raise ValueError(
                f"num_heads must have one entry per stage ({len(self.depths)}), "
                f"got {self.num_heads}"
            )
        for stage, heads in enumerate(self.num_heads):
            if heads < 1 or self.dim(stage) % heads:
                raise ValueError(
                    f"num_heads[{stage}]={heads} must divide the stage's {self.dim(stage)} channels"
                )
        if self.window_convention == "microsoft" and self.window_size[0] != self.window_size[1]:
            raise ValueError(
                f"window_size {self.window_size} must be square under the 'microsoft' convention; "
                "use window_convention='timm' or 'torchvision' for rectangular windows"
            )
        if self.version == 2 and self.qk_scale is not None:
            raise ValueError("qk_scale has no meaning in version 2, which learns logit_scale")
        sizes = self.pretrained_window_sizes
        if sizes is not None and len(sizes) != len(self.depths):
            raise ValueError(
                f"pretrained_window_sizes must have one entry per stage ({len(self.depths)}), "
                f"got {sizes}"
            )
        for name in ("drop_rate", "attn_drop_rate", "drop_path_rate"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if min(self.image_size) < self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is smaller than one patch ({self.patch_size} px)"
            )

    @property
    def num_stages(self) -> int:
        return len(self.depths)

    @property
    def num_features(self) -> int:
        """Channels of the last stage."""
        return self.dim(self.num_stages - 1)

    @property
    def resample_eps(self) -> float:
        """Epsilon of the LayerNorms after the patch embedding and in merging."""
        eps = self.downsample_norm_eps
        return self.layer_norm_eps if eps is None else eps

    def dim(self, stage: int) -> int:
        """Channels of one stage."""
        return self.embed_dim * 2**stage

    def head_dim(self, stage: int) -> int:
        """Channels of one attention head in one stage."""
        return self.dim(stage) // self.num_heads[stage]

    def hidden_dim(self, stage: int) -> int:
        """Hidden channels of one stage's MLP."""
        return int(self.dim(stage) * self.mlp_ratio)

    def map_size(self, stage: int, image_size: Pair | None = None) -> Pair:
        """Token grid ``(H, W)`` of one stage; merging pads odd sides, so sides halve upwards."""
        height, width = image_size or self.image_size
        if self.window_convention == "torchvision":  # its strided convolution drops the remainder
            side = (height // self.patch_size, width // self.patch_size)
        else:
            side = (math.ceil(height / self.patch_size), math.ceil(width / self.patch_size))
        for _ in range(stage):
            side = ((side[0] + 1) // 2, (side[1] + 1) // 2)
        return side

    def stage_window(self, stage: int) -> Pair:
        """Window ``(height, width)`` that one stage is built with."""
        return resolve_window(
            self.map_size(stage), self.window_size, self.window_convention
        ).window_size

    def pretrained_window_size(self, stage: int) -> int:
        """V2: window the stage's bias MLP was trained with, 0 for its own."""
        return self.pretrained_window_sizes[stage] if self.pretrained_window_sizes else 0

    def replace(self, **changes: Any) -> SwinConfig:
        """A copy with some attributes changed; unknown names raise TypeError."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values, the inverse of :meth:`from_dict`."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SwinConfig:
        """Build from :meth:`to_dict`; an unknown key raises ValueError and is named."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown SwinConfig keys {unknown}; legal keys are {sorted(known)}")
        arguments: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**arguments)
