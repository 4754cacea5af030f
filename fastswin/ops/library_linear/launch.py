"""From tensors to a launch: which problem it is, its cached plan, the current stream."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from fastswin._triton.device import on_device
from fastswin.ops.library_linear.plan import Plan, Pointers
from fastswin.ops.library_linear.problem import Problem, Scaling, alignment_of

#: Problems whose plans are kept, least recently used dropped first. A plan takes about 2 KiB.
MAX_PLANS = 1024

_plans: OrderedDict[tuple[int, Problem], Plan] = OrderedDict()
_plans_lock = threading.Lock()


def library_linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    gelu: bool,
    residual: torch.Tensor | None,
    output_inverse: torch.Tensor | None,
    out: torch.Tensor,
    algorithm: int,
) -> torch.Tensor:
    """Launch on the tensors' GPU and its current stream; everything contiguous, ``M > 0``.

    Raises:
        ValueError: ``algorithm`` is beyond the search's list.
        LibraryLinearError: the library has no kernel for this, or its launch failed.
    """
    problem, pointers = describe(
        x, weight, bias, scale, row_scale, gelu, residual, output_inverse, out
    )
    with on_device(x.device):
        plan = plan_for(problem, x.device.index, pointers)
        plan.launch(pointers, torch.cuda.current_stream(x.device).cuda_stream, algorithm)
    return out


def describe(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    gelu: bool,
    residual: torch.Tensor | None,
    output_inverse: torch.Tensor | None,
    out: torch.Tensor,
) -> tuple[Problem, Pointers]:
    """The problem that tensors pose, and where they are."""
    N, K = weight.shape
    pointers = Pointers(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), _address(bias), _address(residual),
        _address(scale), _address(row_scale), _address(output_inverse),
    )  # fmt: skip
    scaling: Scaling = "none"
    if scale is not None:
        scaling = "tensor" if row_scale is None else "channel"
    problem = Problem(
        M=x.numel() // K,
        N=N,
        K=K,
        dtype=x.dtype,
        out_dtype=out.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        gelu=gelu,
        residual=residual is not None,
        scaling=scaling,
        output_scaled=output_inverse is not None,
        alignments=(
            alignment_of(pointers.weight), alignment_of(pointers.x),
            alignment_of(pointers.residual or pointers.out), alignment_of(pointers.out),
            alignment_of(pointers.bias),
        ),
    )  # fmt: skip
    return problem, pointers


def plan_for(problem: Problem, device_index: int, pointers: Pointers) -> Plan:
    """The plan of a problem, from the cache or made now; the device must be current."""
    key = (device_index, problem)
    with _plans_lock:
        plan = _plans.get(key)
        if plan is not None:
            _plans.move_to_end(key)
            return plan
    made = Plan(problem, device_index, pointers)  # outside the lock: a search can take milliseconds
    with _plans_lock:
        plan = _plans.setdefault(key, made)
        while len(_plans) > MAX_PLANS:
            _plans.popitem(last=False)
    return plan


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
