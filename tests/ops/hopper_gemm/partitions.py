"""The Hopper product's own source on a CPU; gluon_threads.py says how."""

from __future__ import annotations

from typing import Any

import torch
from gluon_threads import Descriptor, Pointer, run_source

__all__ = ["Descriptor", "Pointer", "run_kernel"]


def _widen(tile: torch.Tensor, layout: Any) -> torch.Tensor:
    return torch.cat([tile, torch.full_like(tile, float("nan"))], 1)


def run_kernel(programs: int, *arguments: Any, **constants: Any) -> None:
    """Run ``_hopper_gemm_kernel`` program by program; see its launcher for the arguments."""
    from fastswin.ops.hopper_gemm import kernel

    run_source(
        kernel, "_hopper_gemm_kernel", programs, arguments, constants,
        _split=lambda tile, parts: tile.chunk(parts, 1), _widen=_widen,
    )  # fmt: skip
