"""Forms of a layer of few rows: checked, then timed in dependent chains.

A chain is a CUDA graph of launches that each overwrite the same output, every one with weights of
its own, replayed with a cold L2. Programmatic launches wait for the one before whatever they read,
so launches in a row overlap as much as those of a network do.
"""

from __future__ import annotations

import math

import torch

from fastswin.bench.cold_graphs import WEIGHT_BYTES, graph_us
from fastswin.bench.small_batch_layers import Form, Layer, Tensors
from fastswin.testing.tolerance import compare_to_oracle

#: Launches of one chain.
CHAIN = 40


def check(tensors: Tensors, form: Form) -> str | None:
    """What is wrong with a form, None for nothing: gate, three runs, and a chain of launches."""
    oracle, eager = tensors.reference(torch.float64), tensors.reference(torch.float16)
    weight = tensors.weights[0]
    first: torch.Tensor | None = None
    for _ in range(3):
        _poison(tensors)
        tensors.run(form, weight)
        if first is None:
            first = tensors.out.clone()
        elif not torch.equal(first.view(torch.int16), tensors.out.view(torch.int16)):
            return "results differ from run to run"
    assert first is not None
    if not bool(torch.isfinite(first).all()):
        return "an output is not written, or not finite"
    found = first
    if form.kind == "library" and tensors.layer.accumulates:  # the engine adds that bias elsewhere
        oracle, eager = oracle - tensors.bias.double(), eager - tensors.library_bias
    gate = compare_to_oracle(found, eager, oracle, torch.float16)
    if not gate.passed:
        return f"error {gate.max_error:.3g} exceeds {gate.max_bound:.3g}"
    return None


def _poison(tensors: Tensors) -> None:
    if tensors.residual is not None:
        tensors.out.copy_(tensors.residual)
    else:
        tensors.out = torch.full_like(tensors.out, math.nan)


def chain_us(tensors: Tensors, form: Form, flush: torch.Tensor) -> float:
    """Median microseconds of one layer in a chain that starts with a cold L2."""
    if tensors.residual is not None:
        tensors.out.zero_()

    def run() -> None:
        for index in range(CHAIN):
            tensors.run(form, tensors.weights[index % len(tensors.weights)])

    return graph_us(run, flush) / CHAIN


def copies(layer: Layer) -> int:
    """Distinct weights of one chain."""
    _, N, K = layer.shape
    return max(1, min(CHAIN, WEIGHT_BYTES // (2 * N * K)))
