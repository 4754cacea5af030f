"""One configuration of the feed-forward layer: both directions, compiled ahead, and whether right.

A configuration is checked on rows that fill no tile: output and all gradients against fp64, and the
same bits three times.
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin.bench.failures import describe
from fastswin.bench.op_feed_forward_problems import FeedForwardProblem, Operands, Tensors
from fastswin.ops.feed_forward.config import FeedForwardConfig
from fastswin.testing.tolerance import compare_to_oracle

#: Rows of the correctness check: 24 tiles of 128 and 43 rows more.
CHECK_ROWS = 24 * 128 + 43

NAMES = ("y", "dx", "dfc1", "dbias", "dfc2")
EVERYTHING = [True] * 4

Job = tuple[FeedForwardProblem, FeedForwardConfig, torch.dtype]


def forward(o: Operands, config: FeedForwardConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(y, pre)``; a fused form keeps no pre."""
    from fastswin.ops.feed_forward.forward import feed_forward_fwd
    from fastswin.ops.feed_forward.register import KEEP_NOTHING, KEEP_PRE

    keep = KEEP_NOTHING if config.fused else KEEP_PRE
    y, pre, _ = feed_forward_fwd(o.x, o.fc1, o.bias, o.fc2, keep, config)
    return y, None if config.fused else pre


def backward(o: Operands, pre: torch.Tensor | None, config: FeedForwardConfig) -> Tensors:
    """``(dx, dfc1, dbias, dfc2)``, weight gradients in fp32."""
    from fastswin.ops.feed_forward.backward import feed_forward_bwd

    return feed_forward_bwd(
        o.dy, o.x, pre, None, o.fc1, o.bias, o.fc2, EVERYTHING, torch.float32, config
    )


def both(o: Operands, config: FeedForwardConfig) -> Tensors:
    """``(y, dx, dfc1, dbias, dfc2)``."""
    y, pre = forward(o, config)
    return y, *backward(o, pre, config)


def compile_job(job: Job) -> str:
    """Compile one configuration's kernels into the cache; why it cannot be, or nothing."""
    from fastswin.testing.aot import record_launches

    problem, config, dtype = job
    try:
        torch.set_num_threads(1)
        with record_launches() as launches:
            both(problem.shapes(dtype), config)
        for launch in launches:
            launch.kernel.warmup(grid=(1,), **launch.arguments, **launch.options)
    except Exception as error:
        return describe(error).message
    return ""


@dataclasses.dataclass(frozen=True)
class Judge:
    """Gates of one problem, eager and fp64 evaluated once."""

    operands: Operands
    eager: Tensors
    oracle: Tensors

    @classmethod
    def of(cls, problem: FeedForwardProblem, device: torch.device, dtype: torch.dtype) -> Judge:
        o = problem.make(device, dtype, rows=min(CHECK_ROWS, problem.rows - 1), seed=1)
        return cls(o, o.eager(), o.eager(torch.float64))

    def verdict(self, config: FeedForwardConfig) -> str:
        """What is wrong with a configuration, or nothing."""
        made = both(self.operands, config)
        for name, a, e, truth in zip(NAMES, made, self.eager, self.oracle, strict=True):
            dtype = self.operands.x.dtype
            gate = compare_to_oracle(a.to(dtype), e, truth, dtype)
            if not gate.passed or not bool(torch.isfinite(a).all()):
                return (
                    f"{name}: max error {gate.max_error:.3g} of {gate.max_bound:.3g}, "
                    f"rms {gate.rms_error:.3g} of {gate.rms_bound:.3g}"
                )
        for _ in range(2):
            again = both(self.operands, config)
            if not all(torch.equal(a, b) for a, b in zip(made, again, strict=True)):
                return "not the same bits twice"
        return ""
