"""Compile every kernel for one GPU generation and print what the assembler says, as JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

import dataclasses
import json
import sys

import torch

from fastswin.ops.masked_softmax.backward import masked_softmax_bwd
from fastswin.ops.masked_softmax.forward import masked_softmax_fwd
from fastswin.testing.aot import compile_launch, record_launches


def empty(*shape, dtype=torch.float16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches(dtype, capability):
    """The bench problems and the two-pass form, forward and backward.

    Causal rows of even length with lengths but no bias, whose binaries hold less than those with
    one and take as long, are compiled for Hopper alone.
    """
    window, bias, fill = (
        empty(192, 64, 4, 49, 49, dtype=dtype),
        empty(4, 49, 49),
        empty(64, 1, 49, 49),
    )
    wide = empty(64, 64, 4, 144, 144, dtype=dtype)
    scores, hide = (
        empty(32, 16, 1024, 1024, dtype=dtype),
        empty(32, 1, 1024, 1024, dtype=torch.bool),
    )
    tril, lens = empty(12, 64, 500, 500, dtype=torch.float32), empty(12, dtype=torch.int64)
    even, shorter = empty(4, 3, 1024, 1024, dtype=dtype), empty(4, dtype=torch.int64)
    row, long = empty(64, 16384, dtype=dtype), empty(64, 131072, dtype=dtype)
    odd = empty(64, 20001, dtype=dtype)
    every = (True, True, False)
    only_x = (True, False, False)
    with record_launches() as recorded:
        masked_softmax_fwd(window, bias, fill, None, 1.0, False)
        masked_softmax_bwd(window, window, bias, None, None, 1.0, False, every)
        masked_softmax_fwd(wide, empty(4, 144, 144), None, None, 1.0, False)
        masked_softmax_bwd(wide, wide, empty(4, 144, 144), None, None, 1.0, False, every)
        masked_softmax_fwd(scores, None, hide, None, 0.125, False)
        masked_softmax_bwd(scores, scores, None, None, None, 0.125, False, only_x)
        masked_softmax_fwd(tril, None, None, lens, 1.0, True)
        masked_softmax_bwd(tril, tril, None, None, lens, 1.0, True, only_x)
        if capability == 90:
            masked_softmax_fwd(even, None, None, shorter, 1.0, True)
            masked_softmax_bwd(even, even, None, None, shorter, 1.0, True, only_x)
        masked_softmax_fwd(even, empty(1024, 1024), None, shorter, 1.0, True)
        masked_softmax_bwd(even, even, empty(1024, 1024), None, shorter, 1.0, True, every)
        masked_softmax_fwd(row, None, None, None, 1.0, False)
        masked_softmax_bwd(odd, odd, None, None, None, 1.0, False, only_x)
        masked_softmax_fwd(long, None, None, None, 1.0, False)
        masked_softmax_bwd(long, long, None, None, None, 1.0, False, only_x)
    return recorded


if __name__ == "__main__":
    target = int(sys.argv[1])
    for launch in launches(getattr(torch, sys.argv[2]), target):
        print(json.dumps(dataclasses.asdict(compile_launch(launch, target))), flush=True)
