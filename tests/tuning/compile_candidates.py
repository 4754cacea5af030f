"""Compile a sample of candidates for an H100, and describe the binaries of two row counts.

A program of its own: Triton decides once per process whether kernels are interpreted.
"""

from __future__ import annotations

import json

import torch

from fastswin.bench.tune_launch import make_bench
from fastswin.testing import aot
from fastswin.tuning.card import H100
from fastswin.tuning.problem import make_problem
from fastswin.tuning.space import candidates

#: Operator, rows of a large and of a small problem, shape.
SAMPLE = [
    ("linear", 6272, 25088, {"N": 384, "K": 96, "gelu": 1, "residual": 0}),
    ("layer_norm_linear", 6272, 25088, {"N": 288, "K": 96, "gelu": 0}),
    ("mlp", 6272, 25088, {"C": 96, "hidden": 384, "post_norm": 0}),
    ("window_attention", 512, 2048,
     {"window_h": 7, "window_w": 7, "heads": 3, "head_dim": 32, "cosine": 0}),
]  # fmt: skip


def record(problem, config):
    with aot.record_launches() as launches:
        make_bench(problem, torch.device("meta")).launch(config)
    (launch,) = launches
    return launch


def main() -> None:
    found = {}
    for op, rows, more_rows, dims in SAMPLE:
        problem, larger = (make_problem(op, "fp16", n, **dims) for n in (rows, more_rows))
        last = candidates(problem, H100)[-1]
        launch, other = record(problem, last), record(larger, last)
        compiled = aot.compile_launch(launch, 90)
        found[op] = {
            "shared_bytes": compiled.shared_bytes,
            "limit": H100.shared_bytes,
            "one_binary": aot._describe(launch) == aot._describe(other),
            "config": str(last),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
