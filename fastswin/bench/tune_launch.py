"""Run one tuning problem: seeded inputs, a launch under a configuration, and what is right.

Inputs hold distinct content in every row; biases are of the size of the products. Weights, bias
tables and offsets are those of the engine's layouts, so that a kernel compiled here is the kernel
that the engine launches.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F

from fastswin import ops
from fastswin.bench.problems import PRECISIONS
from fastswin.ops.linear.config import OneShotConfig
from fastswin.ops.window_attention.packing import LOG2_E, pack_bias, pack_head_scale
from fastswin.ops.window_attention.reference import window_attention_ref
from fastswin.tuning.problem import KernelProblem, LaunchConfig

EPS = 1e-5

#: Largest grid of windows of one image; small maps of real models have fewer.
GRID = 8

#: Rows on which the fp64 reference is computed: enough to fill a card, far from filling memory.
CHECKED_ROWS = 16384

Tensors = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Bench:
    """A problem with its inputs and its output, which every launch overwrites."""

    problem: KernelProblem
    inputs: Tensors
    out: torch.Tensor

    def launch(self, config: LaunchConfig | None) -> torch.Tensor:
        """One launch into ``out``; None takes the heuristic (or the library, which has none)."""
        return launch(self.problem, self.inputs, self.out, config)

    def checked(self, out: torch.Tensor) -> torch.Tensor:
        """The part of a result that :meth:`reference` computes."""
        return out[: _checked_count(self.problem, self.inputs)]

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """The formula in plain PyTorch on the first rows, in ``dtype``."""
        count = _checked_count(self.problem, self.inputs)
        scalable = _SCALABLE[self.problem.op]
        inputs = {
            name: value[:count] if name in scalable and value is not None else value
            for name, value in self.inputs.items()
        }
        return reference(self.problem, inputs, dtype)


#: Inputs whose first axis grows with the rows.
_SCALABLE = {
    "linear": {"x", "residual"},
    "layer_norm_linear": {"x"},
    "mlp": {"x"},
    "layer_norm": {"x", "residual"},
    "window_attention": {"qkv"},
}


def make_bench(problem: KernelProblem, device: torch.device, seed: int = 0) -> Bench:
    """Inputs of a problem on a device; "meta" has shapes and no data, for compiling."""
    dtype = PRECISIONS[problem.dtype][0]
    generator = torch.Generator(device if device.type != "meta" else "cpu").manual_seed(seed)

    def randn(*shape: int, spread: float = 1.0, to: torch.dtype = dtype) -> torch.Tensor:
        if device.type == "meta":
            return torch.empty(*shape, device=device, dtype=to)
        return (spread * torch.randn(*shape, device=device, generator=generator)).to(to)

    def vector(n: int) -> torch.Tensor:
        return randn(n, spread=0.5, to=torch.float32)

    d, M = problem.dims, problem.rows
    if problem.op == "window_attention":
        return _attention_bench(problem, randn, vector)
    if problem.op == "mlp":
        C, hidden = d["C"], d["hidden"]
        x = randn(M, C)
        inputs = {
            "x": x, "fc1": randn(hidden, C, spread=C**-0.5), "fc1_bias": vector(hidden),
            "fc2": randn(C, hidden, spread=hidden**-0.5), "fc2_bias": vector(C),
            "weight": vector(C) if d["post_norm"] else None,
            "bias": vector(C) if d["post_norm"] else None,
            "offset": None if d["post_norm"] else vector(C),
        }  # fmt: skip
        return Bench(problem, inputs, torch.empty_like(x))
    if problem.op in ("layer_norm", "gelu"):
        x = randn(M, d["C"])
        inputs = {"x": x}
        if problem.op == "layer_norm":  # V2: affine and residual; V1: an offset, affine folded away
            post_norm = bool(d["residual"])
            inputs |= {
                "weight": vector(d["C"]) if post_norm else None,
                "bias": vector(d["C"]) if post_norm else None,
                "residual": randn(M, d["C"]) if post_norm else None,
                "offset": None if post_norm else vector(d["C"]),
            }
        return Bench(problem, inputs, torch.empty_like(x))
    N, K = d["N"], d["K"]
    inputs = {
        "x": randn(M, K), "weight": randn(N, K, spread=K**-0.5), "bias": vector(N),
        "library_bias": randn(N), "residual": randn(M, N) if d.get("residual") else None,
        "offset": vector(K) if problem.op == "layer_norm_linear" else None,
    }  # fmt: skip
    out = torch.zeros(M, N, device=device, dtype=dtype)
    return Bench(problem, inputs, out)


def launch(
    problem: KernelProblem, inputs: Tensors, out: torch.Tensor, config: LaunchConfig | None
) -> torch.Tensor:
    """Run a problem once, as the engine does."""
    d, i, op = problem.dims, inputs, problem.op
    gelu = "gelu" if d.get("gelu") else None
    if op == "linear":
        from fastswin.ops.linear.forward import linear_fwd
        from fastswin.ops.linear.one_shot import one_shot_linear_fwd

        operands = (i["x"], i["weight"], i["bias"], gelu)
        if isinstance(config, OneShotConfig):
            return one_shot_linear_fwd(*operands, None, None, i["residual"], out, config)
        return linear_fwd(*operands, i["residual"], out, config)  # type: ignore[arg-type]
    if op == "layer_norm_linear":
        from fastswin.ops.linear.forward import layer_norm_linear_fwd
        from fastswin.ops.linear.one_shot import one_shot_linear_fwd

        if isinstance(config, OneShotConfig):
            return one_shot_linear_fwd(
                i["x"], i["weight"], i["bias"], gelu, EPS, i["offset"], None, out, config
            )
        return layer_norm_linear_fwd(
            i["x"],
            i["weight"],
            i["bias"],
            gelu,
            EPS,
            i["offset"],
            out,
            config,  # type: ignore[arg-type]
        )
    if op == "mlp":
        from fastswin.ops.mlp.forward import mlp_fwd

        weights = (i["fc1"], i["fc1_bias"], i["fc2"], i["fc2_bias"], i["weight"], i["bias"])
        return mlp_fwd(i["x"], *weights, i["offset"], EPS, out, config)  # type: ignore[arg-type]
    if op == "window_attention":
        from fastswin.ops.window_attention.forward import window_attention_fwd

        return window_attention_fwd(
            i["qkv"], i["packed"], i["head_scale"], None, i["scale"], d["heads"],
            (d["window_h"], d["window_w"]), i["shift"], problem.dtype == "tf32", out=out,
            config=config,  # type: ignore[arg-type]
        )  # fmt: skip
    if op == "layer_norm":
        from fastswin.ops.layer_norm.forward import layer_norm_fwd

        return layer_norm_fwd(i["x"], i["weight"], i["bias"], EPS, i["offset"], i["residual"], out)
    if op == "library_linear":
        return F.linear(i["x"], i["weight"], i["library_bias"])
    if op == "library_accumulate":  # the stream grows from call to call; its speed does not change
        return torch.addmm(out, i["x"], i["weight"].t(), out=out)
    return F.gelu(i["x"])


def reference(problem: KernelProblem, inputs: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """The formula of a problem with a configuration, in ``dtype`` throughout."""
    d, op = problem.dims, problem.op
    i: Tensors = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    if op == "window_attention":
        return window_attention_ref(
            i["qkv"], i["dense"], d["heads"], (d["window_h"], d["window_w"]), i["shift"],
            i["scale"], i["logit_scale"], None,
        )  # fmt: skip
    if op == "mlp":
        return ops.mlp(
            i["x"], i["fc1"], i["fc1_bias"], i["fc2"], i["fc2_bias"], norm_weight=i["weight"],
            norm_bias=i["bias"], offset=i["offset"], eps=EPS, impl="reference",
        )  # fmt: skip
    if op == "layer_norm":
        return ops.layer_norm(
            i["x"], i["weight"], i["bias"], eps=EPS, offset=i["offset"], residual=i["residual"],
            impl="reference",
        )  # fmt: skip
    return ops.linear(
        i["x"], i["weight"], i["bias"], activation="gelu" if d["gelu"] else None,
        residual=i["residual"], layer_norm_eps=EPS if op == "layer_norm_linear" else None,
        offset=i["offset"], impl="reference",
    )  # fmt: skip


def _attention_bench(problem: KernelProblem, randn: Any, vector: Any) -> Bench:
    """Shifted windows in image order, all of them whole: up to 8 x 8 of them an image."""
    d = problem.dims
    heads, head_dim, window = d["heads"], d["head_dim"], (d["window_h"], d["window_w"])
    grid = window_grid(problem.rows)
    shift = (window[0] // 2, window[1] // 2) if grid > 1 else (0, 0)
    H, W, C = grid * window[0], grid * window[1], heads * head_dim
    B, tokens = problem.rows // (grid * grid), window[0] * window[1]
    qkv = randn(B, H, W, 3 * C)
    logit_scale = vector(heads) + math.log(10.0) if d["cosine"] else None
    # the table is fp16 where engine/prepared.py stores it so; a bias that fits it exactly leaves
    # only the kernel's own errors
    dense = (LOG2_E * randn(heads, tokens, tokens, to=torch.float32)).half().float() / LOG2_E
    packed = pack_bias(dense, heads, window, shift, qkv.device)
    if problem.itemsize == 2 and not d["cosine"]:
        packed = packed.half()
    inputs = {
        "qkv": qkv, "packed": packed, "dense": dense, "logit_scale": logit_scale,
        "head_scale": pack_head_scale(logit_scale), "scale": head_dim**-0.5, "shift": shift,
    }  # fmt: skip
    return Bench(problem, inputs, qkv.new_empty(B, H, W, C))


def window_grid(windows: int) -> int:
    """Windows on a side of each image of a problem, as large as whole images allow."""
    return next(g for g in range(GRID, 0, -1) if windows % (g * g) == 0)


def _checked_count(problem: KernelProblem, inputs: Tensors) -> int:
    """Rows (images, for attention) that the reference covers."""
    if problem.op != "window_attention":
        return min(problem.rows, CHECKED_ROWS)
    B, H, W, _ = inputs["qkv"].shape
    return max(1, min(B, CHECKED_ROWS // (H * W)))
