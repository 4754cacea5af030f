"""From tensors to kernel arguments, for both directions; no Triton here, so it is unit-tested.

Row strides are passed in units of the largest power of two (up to 16 bytes) that divides them
all, so that the compiler can prove alignment without a new compilation for every row length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from fastswin._triton.device import multiprocessor_count
from fastswin.ops.masked_softmax.config import (
    PROGRAMS_PER_MULTIPROCESSOR,
    Direction,
    SoftmaxConfig,
    default_config,
    is_long,
)
from fastswin.ops.masked_softmax.rows import RowPlan, Strides, plan_rows, power_of_2_divisor

#: Rows are numbered in 32 bits; elements in 64.
MAX_ROWS = 2**31 - 2**16

#: Largest grid: one axis only, so 65535 limits nothing.
MAX_PROGRAMS = 2**31 - 1

_MASK_KIND = {torch.bool: 1, torch.uint8: 1}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One launch: the kernel's positional arguments, its constants and its grid."""

    device: torch.device
    plan: RowPlan
    arguments: tuple[object, ...]
    constants: dict[str, object]
    programs: int
    num_warps: int
    long: bool
    partial: torch.Tensor


def why_not_planned(
    x: torch.Tensor, tensors: Sequence[torch.Tensor | None], causal: bool, lens: bool
) -> str | None:
    """None where the kernels can address this problem, else the reason."""
    rows = x[..., 0].numel() if x.shape[-1] else 0
    if rows > MAX_ROWS:
        return f"{rows} rows exceed {MAX_ROWS}"
    shape = tuple(x.shape)
    strides = {"x": contiguous_strides(shape)}
    operands = [t for t in tensors if t is not None]
    strides |= {str(i): broadcast_strides(t, shape) for i, t in enumerate(operands)}
    strides |= _position_strides(shape, causal, lens)
    pinned = [n for n in strides if n != "x"] if operands else []
    leading = {name: s[:-1] for name, s in strides.items()}
    plan = plan_rows(shape[:-1], leading, pinned)
    long = any(is_long(x.shape[-1], d, causal or lens) for d in ("forward", "backward"))
    if plan is None or (long and plan.without_loop() is None):
        return f"the broadcast pattern leaves more than three row axes in x's shape {shape}"
    return None


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of ``shape``."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def broadcast_strides(t: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of ``t`` as a broadcast view of ``shape``; no memory is touched."""
    return t.expand(tuple(shape)).stride()


def _shape_strides(like: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides that ``like`` would have if contiguous, as a broadcast view of ``shape``."""
    own = contiguous_strides(like.shape)
    lead = len(shape) - like.ndim
    moves = [0] * lead + [0 if like.shape[axis] == 1 else own[axis] for axis in range(like.ndim)]
    return tuple(moves)


def _position_strides(shape: Sequence[int], causal: bool, lens: bool) -> dict[str, tuple[int, ...]]:
    """Query index and sample index as operands: they pin the axes that they depend on."""
    axes = len(shape)
    strides = {}
    if causal or lens:
        strides["query"] = tuple(1 if axis == axes - 2 else 0 for axis in range(axes))
    if lens:
        strides["lens"] = tuple(1 if axis == 0 else 0 for axis in range(axes))
    return strides


def _row_aligned(t: torch.Tensor) -> torch.Tensor:
    """``t`` with keys one element apart (or broadcast); a copy where they are not."""
    return t if t.shape[-1] == 1 or t.stride(-1) in (0, 1) else t.contiguous()


def _alignment(strides: Strides, key_stride: int, itemsize: int) -> int:
    """Elements, up to 16 bytes, that divide every row stride."""
    if key_stride != 1:
        return 1
    return power_of_2_divisor(strides, max(1, 16 // itemsize))


def _units(strides: Strides, align: int) -> tuple[int, ...]:
    return tuple(s // align for s in strides)


def _vector(t: torch.Tensor, align: int, n_align: int) -> int:
    """Elements of one load: what rows, row length and the tensor's start allow."""
    vector = min(align, n_align)
    return vector if t.data_ptr() % 16 == 0 else 1


def _cut(
    plan: RowPlan, config: SoftmaxConfig, device: torch.device
) -> tuple[RowPlan, int, int, int]:
    """Plan, row blocks, loop steps per program and runs for one config."""
    if config.long:
        flat = plan.without_loop()
        if flat is None:
            raise RuntimeError("the two-pass kernel needs a plan with a free row axis")
        return flat, flat.rows, 1, 1
    plan = plan.fill_blocks(config.block_rows)
    blocks = -(-plan.rows // config.block_rows)
    steps = config.steps
    if steps == 0:
        wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessor_count(device)
        runs = min(plan.loop, max(1, -(-wanted // blocks)))
        steps = -(-plan.loop // runs)
    return plan, blocks, steps, -(-plan.loop // steps)


def _plan(
    shape: torch.Size, strides: Mapping[str, Sequence[int]], pinned: Sequence[str], long: bool
) -> RowPlan | None:
    leading = {name: s[:-1] for name, s in strides.items()}
    plan = plan_rows(shape[:-1], leading, pinned)
    if plan is not None and long and plan.without_loop() is None:
        return None
    return plan


def _tiles(config: SoftmaxConfig, keys: int, vector: int) -> dict[str, object]:
    if config.long:
        lanes = max(1, vector)
        return {"P": config.block_keys // lanes, "V": lanes, "KEPT": config.kept}
    return {
        "EVEN": keys % config.block_keys == 0,
        "R": config.block_rows,
        "L": config.block_keys,
        "CHUNKS": -(-keys // config.block_keys),
    }


def _configure(
    config: SoftmaxConfig | None,
    keys: int,
    vector: int,
    itemsize: int,
    direction: Direction,
    prefix: bool,
    looped: bool,
) -> SoftmaxConfig:
    if config is None:
        return default_config(keys, vector, itemsize, direction, prefix, looped)
    return config


def _check_programs(programs: int) -> int:
    if programs > MAX_PROGRAMS:
        raise ValueError(f"{programs} programs exceed the grid limit {MAX_PROGRAMS}; split x")
    return programs


def forward_problem(
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    config: SoftmaxConfig | None,
) -> Problem:
    """Everything that the forward launch needs; ``out`` is contiguous or ``x`` itself."""
    shape, keys = x.shape, x.shape[-1]
    x = _row_aligned(x) if out is not x else x
    operands = {n: t for n, t in (("bias", bias), ("mask", mask)) if t is not None}
    n_align = power_of_2_divisor((keys,), 16)
    prefix = causal or seq_lens is not None

    def planned(x: torch.Tensor, long: bool) -> RowPlan | None:
        strides: dict[str, Sequence[int]] = {"x": x.stride(), "out": out.stride()}
        strides |= {n: broadcast_strides(t, shape) for n, t in operands.items()}
        strides |= _position_strides(shape, causal, seq_lens is not None)
        pinned = [n for n in strides if n not in ("x", "out")] if operands else []
        return _plan(shape, strides, pinned, long)

    x_align = power_of_2_divisor(x.stride()[:-1] if x.ndim > 1 else (0,), 16 // x.element_size())
    vector = _vector(x, x_align, n_align)
    config = _configure(config, keys, vector, x.element_size(), "forward", prefix, bool(operands))
    plan = planned(x, config.long)
    if plan is None and out is not x:
        x = x.contiguous()
        plan = planned(x, config.long)
    if plan is None:
        raise RuntimeError(f"more than three row axes remain in x's shape {tuple(shape)}")
    plan, blocks, steps, runs = _cut(plan, config, x.device)

    key = {n: broadcast_strides(t, shape)[-1] for n, t in operands.items()}
    key |= {"x": x.stride(-1), "out": out.stride(-1)}
    none: Strides = (0, 0, 0, 0)
    steps_of = {n: plan.strides.get(n, none) for n in ("x", "out", "bias", "mask", "query", "lens")}
    align = {
        n: _alignment(steps_of[n], key.get(n, 0), t.element_size())
        for n, t in {"x": x, "out": out, **operands}.items()
    }
    for name in operands:  # wider bias or mask vectors than x's would cost a layout change
        align[name] = min(align[name], align["x"])
    units = {n: _units(s, align.get(n, 1)) for n, s in steps_of.items()}
    placeholder = x
    arguments = (
        x, out,
        placeholder if bias is None else bias,
        placeholder if mask is None else _bytes(mask),
        placeholder if seq_lens is None else seq_lens,
        scale, plan.rows, blocks, plan.sizes[1], plan.sizes[2], keys // n_align, plan.loop, steps,
        *units["x"], *units["out"], *units["bias"][1:], *units["mask"][1:],
        *units["query"][1:], *units["lens"][1:],
        key["x"], key["out"], key.get("bias", 0), key.get("mask", 0),
    )  # fmt: skip
    constants: dict[str, object] = {
        "X_ALIGN": align["x"], "OUT_ALIGN": align["out"], "BIAS_ALIGN": align.get("bias", 1),
        "MASK_ALIGN": align.get("mask", 1), "N_ALIGN": n_align,
        "HAS_BIAS": bias is not None,
        "MASK": 0 if mask is None else _MASK_KIND.get(mask.dtype, 2),
        "CAUSAL": causal, "HAS_LENS": seq_lens is not None,
        **_tiles(config, keys, vector),
    }  # fmt: skip
    programs = _check_programs(blocks * runs)
    return Problem(x.device, plan, arguments, constants, programs, config.num_warps, config.long, x)


def backward_problem(
    grad: torch.Tensor,
    y: torch.Tensor,
    dx: torch.Tensor | None,
    summed: Mapping[str, torch.Tensor],
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    config: SoftmaxConfig | None,
) -> Problem:
    """Everything that the backward launch needs; ``summed`` names the wanted sums of ds."""
    shape, keys = y.shape, y.shape[-1]
    grad = _row_aligned(grad)
    y = _row_aligned(y)
    n_align = power_of_2_divisor((keys,), 16)
    prefix = causal or seq_lens is not None
    pinned_sums = {n: _shape_strides(t, shape) for n, t in summed.items()}

    def planned(grad: torch.Tensor, y: torch.Tensor, long: bool) -> RowPlan | None:
        strides: dict[str, Sequence[int]] = {"y": y.stride(), "g": grad.stride()}
        strides["dx"] = contiguous_strides(shape)
        strides |= pinned_sums
        strides |= _position_strides(shape, causal, seq_lens is not None)
        pinned = [n for n in strides if n not in ("y", "g", "dx")] if summed else []
        return _plan(shape, strides, pinned, long)

    def alignment_of(t: torch.Tensor) -> int:
        if t.stride(-1) != 1:
            return 1
        return power_of_2_divisor(t.stride()[:-1] if t.ndim > 1 else (0,), 16 // t.element_size())

    vector = min(_vector(y, alignment_of(y), n_align), _vector(grad, alignment_of(grad), n_align))
    config = _configure(config, keys, vector, y.element_size(), "backward", prefix, bool(summed))
    plan = planned(grad, y, config.long)
    if plan is None:
        grad, y = grad.contiguous(), y.contiguous()
        plan = planned(grad, y, config.long)
    if plan is None:
        raise RuntimeError(f"more than three row axes remain in y's shape {tuple(shape)}")
    plan, blocks, steps, runs = _cut(plan, config, y.device)

    partial = y
    if summed:
        partial = torch.empty(runs, *plan.sizes, keys, dtype=torch.float32, device=y.device)
    none: Strides = (0, 0, 0, 0)
    steps_of = {n: plan.strides.get(n, none) for n in ("y", "g", "dx", "query", "lens")}
    align = {
        "y": _alignment(steps_of["y"], y.stride(-1), y.element_size()),
        "g": _alignment(steps_of["g"], grad.stride(-1), grad.element_size()),
        "dx": _alignment(steps_of["dx"], 1, y.element_size()),
    }
    units = {n: _units(s, align.get(n, 1)) for n, s in steps_of.items()}
    arguments = (
        y, grad, y if dx is None else dx, partial, y if seq_lens is None else seq_lens,
        scale, plan.rows, blocks, plan.sizes[1], plan.sizes[2], keys // n_align, plan.loop, steps,
        *units["y"], *units["g"], *units["dx"], *units["query"][1:], *units["lens"][1:],
        y.stride(-1), grad.stride(-1),
    )  # fmt: skip
    constants: dict[str, object] = {
        "Y_ALIGN": align["y"], "G_ALIGN": align["g"], "DX_ALIGN": align["dx"],
        "N_ALIGN": n_align, "CAUSAL": causal, "HAS_LENS": seq_lens is not None,
        "NEEDS_DX": dx is not None, "NEEDS_SUM": bool(summed),
        **_tiles(config, keys, vector),
    }  # fmt: skip
    programs = _check_programs(blocks * runs)
    return Problem(
        y.device, plan, arguments, constants, programs, config.num_warps, config.long, partial
    )


def _bytes(mask: torch.Tensor) -> torch.Tensor:
    """A bool mask as bytes, the same memory."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask
