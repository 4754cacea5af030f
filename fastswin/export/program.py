"""torch.export and AOTInductor: a Swin as one file that runs without the package's model code.

    save_program      .pt2 of torch.export; ``torch.export.load(path).module()`` runs it
    compile_program   .pt2 of AOTInductor, compiled for one kind of device;
                      ``torch._inductor.aoti_load_package(path)`` runs it

With ``attention="fastswin"`` a block's attention is the registered operator
``fastswin::window_attention_fwd`` with its packed tables as constants, so a process that loads the
program needs ``fastswin.ops.window_attention.register`` and nothing else of the package.
With ``"plain"`` it holds PyTorch's own operators only and needs no import of ours.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn

from fastswin.data.atomic import replacing
from fastswin.export.graph_map import MapBlock, MapSwin
from fastswin.export.graph_model import GraphSwin
from fastswin.export.half import to_half
from fastswin.export.source import Source, open_model
from fastswin.models.geometry import to_pair
from fastswin.models.swin import SwinTransformerBlock
from fastswin.ops.window_attention.packing import pack_bias, pack_head_scale
from fastswin.ops.window_attention.register import window_attention_fwd

Pair = tuple[int, int]
ProgramAttention = Literal["plain", "fastswin"]
ProgramPrecision = Literal["fp32", "fp16"]


class RegisteredBlock(MapBlock):
    """A block whose attention is PyTorch's registered operator."""

    def __init__(self, block: SwinTransformerBlock, shift_size: Pair, padded: bool) -> None:
        super().__init__(block, shift_size, padded)
        attn, device = self.attn, self.attn.bias.device
        table = pack_bias(attn.bias, attn.num_heads, attn.window_size, self.shift_size, device)
        self.table = nn.Buffer(table)
        scale = pack_head_scale(getattr(block.attn, "logit_scale", None))
        self.head_scale = None if scale is None else nn.Buffer(scale.detach())

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        attn = self.attn
        out = window_attention_fwd(
            attn.qkv(x), self.table, self.head_scale, attn.qkv.bias if self.padded else None,
            attn.scale, attn.num_heads, attn.window_size, self.shift_size, False,
        )  # fmt: skip
        return attn.proj(out)


def export_program(
    source: Source,
    *,
    image_size: int | Pair | None = None,
    attention: ProgramAttention = "plain",
    precision: ProgramPrecision = "fp32",
    device: str | torch.device = "cpu",
    features: bool = False,
    pretrained: bool = True,
) -> torch.export.ExportedProgram:
    """A ``torch.export`` program with a dynamic batch axis and a fixed image size.

    Args:
        source: a shipped or published name, a checkpoint's path, or a live model.
        image_size: ``(height, width)`` in pixels, or one number for both; None is the model's.
        attention: ``"plain"`` PyTorch, or ``"fastswin"`` for the registered operator, which runs
            where its kernel does.
        precision: type of weights and products; images and outputs are fp32 (half.py).
        device: where the program runs.
        features: return the stages' maps instead of the logits.
        pretrained: whether a published name gets its weights or random ones.

    Returns:
        The program; its input is ``images [batch, C, h, w]``, batch at least 1.

    Raises:
        ValueError: an argument is out of its legal range; the message names it.
    """
    if attention not in get_args(ProgramAttention):
        raise ValueError(
            f"attention must be one of {get_args(ProgramAttention)}, got {attention!r}"
        )
    if precision not in get_args(ProgramPrecision):
        raise ValueError(
            f"precision must be one of {get_args(ProgramPrecision)}, got {precision!r}"
        )
    model, _, _ = open_model(source, pretrained=pretrained)
    size = model.config.image_size if image_size is None else to_pair(image_size, "image_size")
    with torch.no_grad():
        graph: nn.Module
        if attention == "plain":
            graph = GraphSwin(model.float(), size, features=features)
        else:
            graph = MapSwin(model.float(), size, features=features, block_type=RegisteredBlock)
        if precision == "fp16":
            to_half(graph)
        graph = graph.eval().to(device)
        images = torch.zeros(2, model.config.in_channels, *size, device=device)
        batch = {"images": {0: torch.export.Dim("batch", min=1)}}
        return torch.export.export(graph, (images,), dynamic_shapes=batch)


def save_program(program: torch.export.ExportedProgram, path: str | os.PathLike) -> Path:
    """Write a program as ``.pt2``, whole or not at all, and return its path."""
    path = _pt2(path)
    with replacing(path) as temporary:
        torch.export.save(program, temporary)
    return path


def compile_program(program: torch.export.ExportedProgram, path: str | os.PathLike) -> Path:
    """Compile a program with AOTInductor into a ``.pt2`` package, whole or not at all.

    Args:
        program: what :func:`export_program` returned; its device is the package's.
        path: the file to write.

    Raises:
        RuntimeError: there is no C++ compiler, which AOTInductor's wrapper needs.
    """
    path = _pt2(path)
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        raise RuntimeError(
            f"AOTInductor needs a C++ compiler, {compiler} is not there: install g++ or set CXX; "
            "save_program needs none"
        )
    with replacing(path) as temporary:
        torch._inductor.aoti_compile_and_package(program, package_path=str(temporary))
    return path


def _pt2(path: str | os.PathLike) -> Path:
    if Path(path).suffix != ".pt2":
        raise ValueError(f"path must end in .pt2, got {Path(path).name!r}")
    return Path(path)
