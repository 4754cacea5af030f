"""Whether a way through an attention half is right: fp64 oracle, poisoned outputs, three runs."""

from __future__ import annotations

import torch

from fastswin import ops
from fastswin.bench.attention_half_cases import Case, Model
from fastswin.bench.attention_half_problems import Half
from fastswin.testing.poison import PoisonEmpty
from fastswin.testing.tolerance import compare_to_oracle


def reference(
    model: Model, half: Half, case: Case, x: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The half in plain PyTorch, fp64 or eager half precision."""
    block, stage, C = model.block(half), case.stage, half.channels
    qkv, proj, norm = block.qkv, block.proj, block.norm1
    table = torch.float64 if dtype == torch.float64 else torch.float32

    def vector(v: torch.Tensor | None) -> torch.Tensor | None:
        return None if v is None else v.to(table)

    assert x.shape[3] == C
    x = x.to(dtype)
    if case.unjoined is not None:
        joined = case.unjoined.partials.to(table).sum(0)
        if case.unjoined.bias is not None:
            joined = joined + case.unjoined.bias.to(table)
        x = (x.to(table) + joined).to(dtype)
    return ops.attention_half(
        x, qkv.weight.to(dtype), vector(qkv.bias), num_heads=stage.num_heads,
        window_size=stage.window_size,
        shift_size=stage.shift_size if block.shifted else (0, 0), bias=vector(block.bias),
        pad_qkv=None if block.pad_qkv is None else block.pad_qkv.to(dtype),
        scale=None if norm is not None else block.scale, logit_scale=vector(block.logit_scale),
        norm_first=norm is None, offset=vector(case.offsets.norm1),
        proj_weight=proj.weight.to(dtype), proj_bias=vector(proj.bias),
        norm_weight=None if norm is None else vector(norm.weight),
        norm_bias=None if norm is None else vector(norm.bias), impl="reference",
    )  # fmt: skip


def check(model: Model, half: Half, case: Case, x: torch.Tensor) -> str:
    """What is wrong with a way, "" for nothing: the gate, and three runs bitwise."""
    first: torch.Tensor | None = None
    for _ in range(3):
        stream = x.clone()
        with PoisonEmpty():
            model.forward.attention_half(
                stream, model.block(half), case.stage, case.offsets, case.unjoined
            )
        if first is None:
            first = stream
        elif not torch.equal(first, stream):
            return "results differ from run to run"
    assert first is not None
    if not bool(torch.isfinite(first).all()):
        return "not finite"
    pending = case.offsets.norm2  # what the stream lacks until its next reader
    found = first.float() if pending is None else first.float() + pending
    oracle = reference(model, half, case, x, torch.float64)
    eager = reference(model, half, case, x, torch.float16)
    gate = compare_to_oracle(found, eager, oracle, torch.float16)
    if not gate.passed:
        return (
            f"max error {gate.max_error:.3g} (bound {gate.max_bound:.3g}), "
            f"rms {gate.rms_error:.3g} ({gate.rms_bound:.3g})"
        )
    return ""
