"""How a softmax problem is cut up for the kernels: rows, tiles, integer arguments; no Triton here.

Everything but the tensors themselves follows from shapes, strides and alignment, so it is worked
out once per such signature and kept (:func:`forward_layout`, :func:`backward_layout`): a repeated
call costs microseconds. Row strides are passed in units of the largest power of two (up to 16
bytes) that divides them all, so that the compiler can prove alignment without a new compilation
for every row length.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fastswin.ops.masked_softmax.config import Form, SoftmaxConfig, default_config, is_long
from fastswin.ops.masked_softmax.forms import Operand, Shape, choose_form, cut, tiles
from fastswin.ops.masked_softmax.rows import RowPlan, Strides, plan_rows, power_of_2_divisor

#: Rows are numbered in 32 bits; elements in 64.
MAX_ROWS = 2**31 - 2**16

#: Largest grid: one axis only, so 65535 limits nothing.
MAX_PROGRAMS = 2**31 - 1

#: Signatures whose layout is kept.
CACHED_LAYOUTS = 4096

NONE: Strides = (0, 0, 0, 0)


class Layout(NamedTuple):
    """A launch without its tensors."""

    plan: RowPlan
    numbers: tuple[int, ...]
    constants: dict[str, object]
    programs: int
    num_warps: int
    form: Form
    runs: int


def why_not_planned(
    x: torch.Tensor, tensors: Sequence[torch.Tensor | None], causal: bool, lens: bool
) -> str | None:
    """None where the kernels can address this problem, else the reason."""
    operands = tuple((tuple(t.shape), t.stride()) for t in tensors if t is not None)
    return _why_not_planned(tuple(x.shape), operands, causal, lens)


@functools.lru_cache(CACHED_LAYOUTS)
def _why_not_planned(
    shape: Shape, operands: tuple[tuple[Shape, Shape], ...], causal: bool, lens: bool
) -> str | None:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    if rows > MAX_ROWS:
        return f"{rows} rows exceed {MAX_ROWS}"
    strides: dict[str, Shape] = {"x": contiguous_strides(shape)}
    strides |= {str(i): expanded(own, steps, shape) for i, (own, steps) in enumerate(operands)}
    strides |= _position_strides(shape, causal, lens)
    pinned = [n for n in strides if n != "x"] if operands else []
    long = any(is_long(shape[-1], d, causal or lens) for d in ("forward", "backward"))
    if _plan(shape, strides, pinned, long) is None:
        return f"the broadcast pattern leaves more than three row axes in x's shape {shape}"
    return None


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor of ``shape``."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def expanded(own: Shape, strides: Shape, shape: Shape) -> Shape:
    """Strides of a tensor of shape ``own`` as a broadcast view of ``shape``: 0 where broadcast."""
    lead = len(shape) - len(own)
    steps = zip(own, strides, shape[lead:], strict=True)
    return (0,) * lead + tuple(0 if n == 1 and full != 1 else s for n, s, full in steps)


def _position_strides(shape: Shape, causal: bool, lens: bool) -> dict[str, Shape]:
    """Query index and sample index as operands: they pin the axes that they depend on."""
    axes = len(shape)
    strides = {}
    if causal or lens:
        strides["query"] = tuple(1 if axis == axes - 2 else 0 for axis in range(axes))
    if lens:
        strides["lens"] = tuple(1 if axis == 0 else 0 for axis in range(axes))
    return strides


def _plan(
    shape: Shape, strides: Mapping[str, Sequence[int]], pinned: Sequence[str], long: bool
) -> RowPlan | None:
    leading = {name: s[:-1] for name, s in strides.items()}
    plan = plan_rows(shape[:-1], leading, pinned)
    if plan is not None and long and plan.without_loop() is None:
        return None
    return plan


def _alignment(strides: Sequence[int], key_stride: int, itemsize: int) -> int:
    """Elements, up to 16 bytes, that divide every row stride."""
    if key_stride != 1:
        return 1
    return power_of_2_divisor(strides, max(1, 16 // itemsize))


def _vector(operand: Operand, n_align: int) -> int:
    """Elements of one load: what rows, row length and the tensor's start allow."""
    if not operand.aligned:
        return 1
    steps = [s for n, s in zip(operand.shape[:-1], operand.strides[:-1], strict=True) if n > 1]
    return min(_alignment(steps, operand.strides[-1], operand.itemsize), n_align)


def _units(strides: Strides, align: int) -> tuple[int, ...]:
    return tuple(s // align for s in strides)


def _check_programs(programs: int) -> int:
    if programs > MAX_PROGRAMS:
        raise ValueError(f"{programs} programs exceed the grid limit {MAX_PROGRAMS}; split x")
    return programs


@functools.lru_cache(CACHED_LAYOUTS)
def forward_layout(
    x: Operand,
    out: Operand,
    bias: Operand | None,
    mask: Operand | None,
    mask_kind: int,
    causal: bool,
    lens: bool,
    config: SoftmaxConfig | None,
    multiprocessors: int,
) -> Layout | None:
    """Row plan, tiles and integer arguments; None where the rows cannot be folded."""
    constants: dict[str, object]
    numbers: tuple[int, ...]
    shape, keys = x.shape, x.shape[-1]
    operands = {n: t for n, t in (("bias", bias), ("mask", mask)) if t is not None}
    n_align = power_of_2_divisor((keys,), 16)
    vector = _vector(x, n_align)
    prefix = causal or lens
    default = default_config(keys, vector, x.itemsize, "forward", prefix, bool(operands))
    strides = {"x": x.strides, "out": out.strides}
    broadcast = {n: expanded(t.shape, t.strides, shape) for n, t in operands.items()}
    strides |= broadcast | _position_strides(shape, causal, lens)
    pinned = [n for n in strides if n not in ("x", "out")] if operands else []
    folded = _plan(shape, strides, pinned, (config or default).long)
    if folded is None:
        return None
    rows = {"x": x, "out": out}
    config, plan = choose_form(folded, rows, keys, prefix, "forward", config, default)
    blocks, steps, runs = cut(plan, config, multiprocessors)

    key = {n: s[-1] for n, s in broadcast.items()} | {"x": x.strides[-1], "out": out.strides[-1]}
    moves = {n: plan.strides.get(n, NONE) for n in ("x", "out", "bias", "mask", "query", "lens")}
    align = {
        n: _alignment(moves[n], key[n], t.itemsize)
        for n, t in {"x": x, "out": out, **operands}.items()
    }
    for name in operands:  # wider bias or mask vectors than x's would cost a layout change
        align[name] = min(align[name], align["x"])
    units = {n: _units(s, align.get(n, 1)) for n, s in moves.items()}
    programs = _check_programs(blocks * runs)
    if config.paired:
        numbers = (
            plan.rows // 2, blocks, plan.sizes[1], plan.sizes[2], plan.loop, steps,
            moves["x"][0] // 2, moves["out"][0] // 2, *units["bias"][1:], *units["mask"][1:],
            key.get("bias", 0), key.get("mask", 0),
        )  # fmt: skip
        constants = {
            "BIAS_ALIGN": align.get("bias", 1), "MASK_ALIGN": align.get("mask", 1),
            "HAS_BIAS": bias is not None, "MASK": mask_kind, **tiles(config, keys, vector),
        }  # fmt: skip
        return Layout(plan, numbers, constants, programs, config.num_warps, config.form, runs)
    numbers = (
        plan.rows, blocks, plan.sizes[1], plan.sizes[2], keys // n_align, plan.loop, steps,
        *units["x"], *units["out"], *units["bias"][1:], *units["mask"][1:],
        *units["query"][1:], *units["lens"][1:],
        key["x"], key["out"], key.get("bias", 0), key.get("mask", 0),
    )  # fmt: skip
    constants = {
        "X_ALIGN": align["x"], "OUT_ALIGN": align["out"], "BIAS_ALIGN": align.get("bias", 1),
        "MASK_ALIGN": align.get("mask", 1), "N_ALIGN": n_align,
        "HAS_BIAS": bias is not None, "MASK": mask_kind, "CAUSAL": causal, "HAS_LENS": lens,
        **tiles(config, keys, vector),
    }  # fmt: skip
    return Layout(plan, numbers, constants, programs, config.num_warps, config.form, runs)


@functools.lru_cache(CACHED_LAYOUTS)
def backward_layout(
    grad: Operand,
    y: Operand,
    needs_dx: bool,
    summed: tuple[tuple[str, Shape], ...],
    causal: bool,
    lens: bool,
    config: SoftmaxConfig | None,
    multiprocessors: int,
) -> Layout | None:
    """Row plan, tiles and integer arguments; None where the rows cannot be folded."""
    constants: dict[str, object]
    numbers: tuple[int, ...]
    shape, keys = y.shape, y.shape[-1]
    n_align = power_of_2_divisor((keys,), 16)
    vector = min(_vector(y, n_align), _vector(grad, n_align))
    prefix = causal or lens
    default = default_config(keys, vector, y.itemsize, "backward", prefix, bool(summed))
    strides = {"y": y.strides, "g": grad.strides, "dx": contiguous_strides(shape)}
    # gradients are laid out by shape: where a bias is itself expanded, each element has its own
    strides |= {n: expanded(own, contiguous_strides(own), shape) for n, own in summed}
    strides |= _position_strides(shape, causal, lens)
    pinned = [n for n in strides if n not in ("y", "g", "dx")] if summed else []
    folded = _plan(shape, strides, pinned, (config or default).long)
    if folded is None:
        return None
    packed = Operand(shape, contiguous_strides(shape), y.itemsize, aligned=True)
    rows = {"y": y, "g": grad, "dx": packed}
    config, plan = choose_form(folded, rows, keys, prefix, "backward", config, default)
    blocks, steps, runs = cut(plan, config, multiprocessors)
    programs = _check_programs(blocks * runs)
    moves = {n: plan.strides.get(n, NONE) for n in ("y", "g", "dx", "query", "lens")}
    if config.paired:
        numbers = (
            plan.rows // 2, blocks, plan.loop, steps, *(moves[n][0] // 2 for n in ("y", "g", "dx")),
        )  # fmt: skip
        constants = {
            "NEEDS_DX": needs_dx, "NEEDS_SUM": bool(summed), **tiles(config, keys, vector),
        }  # fmt: skip
        return Layout(plan, numbers, constants, programs, config.num_warps, config.form, runs)
    align = {
        "y": _alignment(moves["y"], y.strides[-1], y.itemsize),
        "g": _alignment(moves["g"], grad.strides[-1], grad.itemsize),
        "dx": _alignment(moves["dx"], 1, y.itemsize),
    }
    units = {n: _units(s, align.get(n, 1)) for n, s in moves.items()}
    numbers = (
        plan.rows, blocks, plan.sizes[1], plan.sizes[2], keys // n_align, plan.loop, steps,
        *units["y"], *units["g"], *units["dx"], *units["query"][1:], *units["lens"][1:],
        y.strides[-1], grad.strides[-1],
    )  # fmt: skip
    constants = {
        "Y_ALIGN": align["y"], "G_ALIGN": align["g"], "DX_ALIGN": align["dx"],
        "N_ALIGN": n_align, "CAUSAL": causal, "HAS_LENS": lens,
        "NEEDS_DX": needs_dx, "NEEDS_SUM": bool(summed), **tiles(config, keys, vector),
    }  # fmt: skip
    return Layout(plan, numbers, constants, programs, config.num_warps, config.form, runs)
