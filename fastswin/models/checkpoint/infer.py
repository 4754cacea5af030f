"""A configuration from nothing but official names and shapes.

Everything that has a shape is read: widths, depths, heads, window, MLP ratio, classes. What has
none (qk_scale, epsilon, dropout) takes the published default; pass ``config=`` if it differs.
"""

from __future__ import annotations

import math
import re

import torch

from fastswin.models.checkpoint.errors import CheckpointError
from fastswin.models.checkpoint.layout import State, is_v2
from fastswin.models.checkpoint.windows import attention_window, coords_pretrained_window
from fastswin.models.config import SwinConfig, WindowConvention

Pair = tuple[int, int]

_BLOCK = re.compile(r"^layers\.(\d+)\.blocks\.(\d+)\.")
_HINT = "pass config= or model_name="


def infer_config(state: State, convention: WindowConvention) -> SwinConfig:
    """Configuration of a checkpoint.

    Args:
        state: official names, derived buffers included where the file had them.
        convention: what the source framework does with small maps. Rectangular windows, which
            'microsoft' cannot have, take 'timm'.

    Raises:
        CheckpointError: something that the shapes do not tell; the message asks for ``config=``
            or ``model_name=``.
    """
    proj = _need(state, "patch_embed.proj.weight")
    if proj.ndim != 4 or proj.shape[2] != proj.shape[3]:
        raise CheckpointError(
            f"patch_embed.proj.weight has shape {tuple(proj.shape)}, expected [C, channels, p, p]"
        )
    embed_dim, in_channels, patch = proj.shape[:3]
    version = 2 if is_v2(state) else 1
    depths = _depths(state)
    stems = [f"layers.{stage}.blocks.0." for stage in range(len(depths))]
    windows = _windows(state, stems, version)
    window = (max(w[0] for w in windows), max(w[1] for w in windows))
    if convention == "microsoft" and window[0] != window[1]:
        convention = "timm"
    fc1 = _need(state, stems[0] + "mlp.fc1.weight")
    head = state.get("head.weight")
    config = SwinConfig(
        version=version,  # type: ignore[arg-type]
        image_size=_image_size(state, windows, window, patch),
        patch_size=patch,
        in_channels=in_channels,
        num_classes=0 if head is None else head.shape[0],
        embed_dim=embed_dim,
        depths=depths,
        num_heads=tuple(_heads(state, stem, version) for stem in stems),
        window_size=window,
        window_convention=convention,
        mlp_ratio=fc1.shape[0] / fc1.shape[1],
        qkv_bias=stems[0] + ("attn.qkv.bias" if version == 1 else "attn.q_bias") in state,
        absolute_position_embedding="absolute_pos_embed" in state,
        patch_norm="patch_embed.norm.weight" in state,
        pretrained_window_sizes=_pretrained_windows(state, stems),
    )
    built = [config.stage_window(stage) for stage in range(len(depths))]
    if built != windows:
        raise CheckpointError(f"no image size explains the windows {windows} per stage; {_HINT}")
    return config


def _need(state: State, name: str) -> torch.Tensor:
    if name not in state:
        raise CheckpointError(f"the configuration cannot be told without {name}; {_HINT}")
    return state[name]


def _depths(state: State) -> tuple[int, ...]:
    blocks: dict[int, set[int]] = {}
    for name in state:
        if found := _BLOCK.match(name):
            blocks.setdefault(int(found[1]), set()).add(int(found[2]))
    gaps = sorted(blocks) != list(range(len(blocks))) or any(
        sorted(b) != list(range(len(b))) for b in blocks.values()
    )
    if gaps or not blocks:
        raise CheckpointError(f"stages or blocks are missing from the checkpoint; {_HINT}")
    return tuple(len(blocks[stage]) for stage in sorted(blocks))


def _heads(state: State, stem: str, version: int) -> int:
    if version == 2:
        return _need(state, stem + "attn.logit_scale").numel()
    return _need(state, stem + "attn.relative_position_bias_table").shape[1]


def _windows(state: State, stems: list[str], version: int) -> list[Pair]:
    windows = []
    for stem in stems:
        window = attention_window(state, stem + "attn.")
        if window is None and version == 2:
            raise CheckpointError(
                "the window size of this V2 checkpoint is not stored in it (V2 has no bias table "
                f"and relative_coords_table is absent); {_HINT}"
            )
        if window is None:
            rows = _need(state, stem + "attn.relative_position_bias_table").shape[0]
            raise CheckpointError(
                f"{stem}attn.relative_position_bias_table has {rows} rows, which fits no square "
                f"window, and no relative_position_index tells the sides; {_HINT}"
            )
        windows.append(window)
    return windows


def _image_size(state: State, windows: list[Pair], window: Pair, patch: int) -> Pair:
    """An image size that builds these windows; the exact one where position embeddings tell it."""
    position = state.get("absolute_pos_embed")
    if position is not None:
        tokens = position.shape[1]
        side = math.isqrt(tokens)
        if side * side != tokens:
            raise CheckpointError(
                f"absolute_pos_embed has {tokens} tokens, which is no square map; {_HINT}"
            )
        return patch * side, patch * side
    return tuple(  # type: ignore[return-value]
        patch * _map_side([w[axis] for w in windows], window[axis]) for axis in (0, 1)
    )


def _map_side(sides: list[int], window: int) -> int:
    """First stage's map side for windows ``sides``; merging rounds up, so several may fit."""
    scale = 2 ** (len(sides) - 1)
    for side in range(sides[-1] * scale, (sides[-1] - 1) * scale, -1):
        maps = [-(-side // 2**stage) for stage in range(len(sides))]
        if [min(m, window) for m in maps] == sides:
            return side
    raise CheckpointError(f"no image size explains the windows {sides} per stage; {_HINT}")


def _pretrained_windows(state: State, stems: list[str]) -> tuple[int, ...] | None:
    """V2's pretrained windows, told from the coordinate tables where they were saved."""
    coords = [state.get(stem + "attn.relative_coords_table") for stem in stems]
    if any(c is None or c.ndim != 4 for c in coords):
        return None
    windows = tuple(coords_pretrained_window(c) for c in coords if c is not None)
    return windows if any(windows) else None
