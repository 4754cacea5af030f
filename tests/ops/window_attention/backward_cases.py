"""Shapes, gradients and their gate that the tests of attention's backward share."""

from __future__ import annotations

import torch
from attention_cases import Case, arguments, eager

from fastswin import ops
from fastswin.testing.tolerance import assert_close_to_oracle

HALF = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


DTYPES = [torch.float32, *HALF]  # the interpreter's bf16 products are garbage (Triton 3.8)


SHARED = ("bias", "logit_scale", "qkv_bias")


#: Small enough for the interpreter; each one a way to be wrong. Above 64 tokens in tiles.
CASES = [
    Case("n49-shifted", (7, 14), (7, 7), (0, 3), num_heads=1, batch=1),
    Case("n16-shifted-padded", (7, 5), (4, 4), (2, 2), num_heads=1),
    Case("n64-cosine-shifted", (8, 8), (8, 8), (4, 4), cosine=True, num_heads=1, batch=1),
    Case("rectangular-cosine-padded", (7, 3), (5, 3), (2, 1), cosine=True, batch=1),
    Case("window-of-one", (2, 3), (1, 1), num_heads=1, batch=1),
    Case("window-wider-than-map", (3, 4), (5, 5), num_heads=1, batch=1),
    Case("head-dim-24", (4, 4), (4, 4), (0, 2), head_dim=24),
    Case("n72-tiles-padded", (7, 10), (8, 9), (0, 4), num_heads=1, batch=1),
    Case("n81-tiles-cosine-shifted", (9, 9), (9, 9), (4, 4), num_heads=1, batch=1, cosine=True),
    Case("n150-tiles", (10, 15), (10, 15), num_heads=1, batch=1),
]


LARGE = [
    Case("swin-t-stage1", (56, 56), (7, 7), (3, 3), 3, 32, batch=16),
    Case("swin-t-stage4", (7, 7), (7, 7), (0, 0), 24, 32, batch=64),
    Case("swin-b-384", (48, 48), (12, 12), (6, 6), 4, 32, batch=8),
    Case("swinv2-w8", (64, 64), (8, 8), (4, 4), 3, 32, cosine=True, batch=8),
    Case("swinv2-w16", (32, 32), (16, 16), (8, 8), 4, 32, cosine=True, batch=8),
    Case("swinv2-w24", (48, 48), (24, 24), (12, 12), 4, 32, cosine=True, batch=4),
    Case("detection-padded", (100, 167), (7, 7), (3, 3), 3, 32, batch=2),
]


def with_leaves(made: dict, dtype: torch.dtype | None = None) -> dict:
    """Fresh leaves of every tensor, in ``dtype`` where one is given."""
    return {
        k: v.detach().to(dtype or v.dtype).requires_grad_() if isinstance(v, torch.Tensor) else v
        for k, v in made.items()
    }


def gradients(attend, made: dict, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and every gradient; zeros where eager never touched a tensor."""
    names = ["qkv", *(n for n in SHARED if n in made)]
    out = attend(made)
    found = torch.autograd.grad(
        out, [made[n] for n in names], upstream.to(out.dtype), materialize_grads=True
    )
    return {"out": out, **dict(zip(names, found, strict=True))}


def triton(made: dict) -> torch.Tensor:
    return ops.window_attention(**made, impl="triton")


def reference(made: dict) -> torch.Tensor:
    return ops.window_attention(**made, impl="reference")


def output_shape(case: Case) -> tuple[int, ...]:
    return case.batch, *case.map_size, case.num_heads * case.head_dim


def check(case: Case, dtype: torch.dtype, randn, options: dict | None = None) -> None:
    made = arguments(case, randn, dtype) | (options or {})
    upstream = randn(*output_shape(case), dtype=dtype)
    ours = gradients(triton, with_leaves(made), upstream)
    oracle = gradients(reference, with_leaves(made, torch.float64), upstream)
    framework = reference if options else eager  # only the reference draws the same weights
    theirs = gradients(framework, with_leaves(made, dtype), upstream)
    for name, truth in oracle.items():
        kept = ours[name].dtype
        if name == "logit_scale":
            error = (ours[name].double() - truth).abs()
            assert bool((error <= temperature_rounding(made, upstream)).all())
            continue
        assert_close_to_oracle(ours[name], theirs[name].to(kept), truth, kept)


def temperature_rounding(made: dict, upstream: torch.Tensor) -> torch.Tensor:
    """What rounding may do to dlogit_scale, nH numbers that are sums of terms of both signs.

    A rounded score of size t (cosine 1 at temperature t) moves its weight by eps * t, and each
    image's term with it; eager's own error on so few numbers is a matter of luck.
    """
    leaves = with_leaves(made, torch.float64)
    out = reference(leaves)
    terms = torch.zeros_like(leaves["logit_scale"])
    for image in range(out.shape[0]):
        for row in range(out.shape[1]):
            part = torch.zeros_like(out)
            part[image, row] = upstream[image, row]
            (term,) = torch.autograd.grad(out, leaves["logit_scale"], part, retain_graph=True)
            terms += term.abs()
    temperature = leaves["logit_scale"].detach().exp().clamp(max=100.0)
    return 2 * torch.finfo(made["qkv"].dtype).eps * (1 + temperature) * terms
