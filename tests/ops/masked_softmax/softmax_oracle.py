"""One call of the operator against the fp64 oracle and against eager in the same dtype."""

import math

import torch

from fastswin.ops.masked_softmax import masked_softmax
from fastswin.ops.masked_softmax.reference import masked_softmax_ref, visible
from fastswin.testing.tolerance import assert_close_to_oracle


def eager(x, scale=1.0, bias=None, mask=None, causal=False, seq_lens=None):
    """The formula in x's own dtype, as people write it."""
    scores = x * scale
    if bias is not None:
        scores = scores + bias.to(x.dtype)
    if mask is not None and mask.dtype.is_floating_point:
        scores = scores + mask.to(x.dtype)
    keep = visible(x, mask, causal, seq_lens)
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def leaves(x, bias, mask, dtype=None):
    """Fresh leaves in ``dtype`` (their own when None); only floats can need a gradient."""

    def fresh(t, wanted):
        if t is None or not t.dtype.is_floating_point:
            return t
        own = t.detach().clone() if t.is_contiguous() else t.detach()
        return (own if dtype is None else own.to(dtype)).requires_grad_(wanted)

    needs = [t is not None and t.requires_grad for t in (x, bias, mask)]
    return [fresh(t, n) for t, n in zip((x, bias, mask), needs, strict=True)]


def check_against_oracle(x, *, grad=None, impl="triton", op=masked_softmax, **options):
    """Forward and every requested gradient inside the gate; returns the output and gradients.

    ``x``, ``bias`` and ``mask`` say by requires_grad which gradients are wanted.
    """
    bias, mask = options.pop("bias", None), options.pop("mask", None)
    names = [n for n, t in zip("xbm", (x, bias, mask), strict=True) if needs_grad(t)]
    own = leaves(x, bias, mask)
    y = op(own[0], bias=own[1], mask=own[2], impl=impl, **options)
    if grad is None:
        rng = torch.Generator().manual_seed(11)
        grad = torch.randn(y.shape, generator=rng).to(y.dtype).to(y.device)
    results = []
    for formula, dtype in ((masked_softmax_ref, torch.float64), (eager, x.dtype)):
        other = leaves(x, bias, mask, dtype)
        out = formula(other[0], bias=other[1], mask=other[2], **options)
        wanted = [t for t in other if needs_grad(t)]
        found = torch.autograd.grad(out, wanted, grad.to(out.dtype)) if wanted else ()
        results.append([out.detach(), *found])
    oracle, plain = results
    assert_close_to_oracle(y.detach(), plain[0], oracle[0], x.dtype)
    assert y.is_contiguous()
    wanted = [t for t in own if needs_grad(t)]
    found = torch.autograd.grad(y, wanted, grad) if wanted else ()
    for name, ours, theirs, truth in zip(names, found, plain[1:], oracle[1:], strict=True):
        dtype = {"x": x, "b": bias, "m": mask}[name].dtype
        assert_close_to_oracle(ours, theirs, truth, dtype)
    return y.detach(), found


def needs_grad(t):
    return t is not None and t.requires_grad
