"""Captured contenders of operator suites: a replay touches no memory but its own."""

from __future__ import annotations

import pytest
import torch

from fastswin.bench.captured import captured_candidate
from fastswin.bench.memory import held_mib

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_replays_survive_the_next_contender(backward):
    """held_mib() frees cuBLAS's workspaces; a graph captured before must not write to them."""
    a, b = (torch.randn(2048, 2048, device="cuda", dtype=torch.float16) for _ in range(2))
    a.requires_grad_(backward)
    found = torch.empty_like(a)

    def make_call():
        def call():
            y = a @ b
            found.copy_(torch.autograd.grad(y, a, b)[0] if backward else y)

        return call

    candidate = captured_candidate("product", make_call, calls=2)
    expected = found.clone()
    held_mib()
    torch.cuda.empty_cache()
    canary = torch.full((64, 2**20), 7.0, device="cuda")  # takes what was freed
    for _ in range(3):
        found.zero_()
        candidate.call()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
    assert bool((canary == 7.0).all())
