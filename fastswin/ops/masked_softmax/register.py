"""Schema, fake kernel and dispatch of the masked-softmax operators; imports no Triton.

The choice between Triton and the reference is made inside the operator, on real tensors, so a
compiled graph holds one opaque node whatever runs it. Outputs are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastswin._triton.available import choose_impl, why_not_triton
from fastswin.ops.masked_softmax.autograd import register_gradients
from fastswin.ops.masked_softmax.layout import why_not_planned
from fastswin.ops.masked_softmax.reference import masked_softmax_bwd_ref, masked_softmax_ref

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_TAGS = (torch.Tag.pt2_compliant_tag,)
_OPERANDS = "Tensor? bias, Tensor? mask, Tensor? seq_lens, float scale, bool causal"

torch.library.define(
    "fastswin::masked_softmax_fwd", f"(Tensor x, {_OPERANDS}, str impl) -> Tensor", tags=_TAGS
)
torch.library.define(
    "fastswin::masked_softmax_inplace", f"(Tensor(a!) x, {_OPERANDS}, str impl) -> ()", tags=_TAGS
)
torch.library.define(
    "fastswin::masked_softmax_bwd",
    f"(Tensor grad, Tensor y, {_OPERANDS}, bool[3] needs, str impl) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _implementation(
    op: str,
    impl: str,
    x: torch.Tensor,
    operands: list[torch.Tensor | None],
    seq_lens: torch.Tensor | None,
    causal: bool,
) -> str:
    reason = why_not_triton(x.device, x.dtype)
    if reason is None:
        reason = why_not_planned(x, operands, causal, seq_lens is not None)
    return choose_impl(impl, op, [reason])


@torch.library.impl("fastswin::masked_softmax_fwd", "default")
def _fwd(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    impl: str,
) -> torch.Tensor:
    chosen = _implementation("masked_softmax", impl, x, [bias, mask], seq_lens, causal)
    if chosen == "reference":
        return masked_softmax_ref(x, scale, bias, mask, causal, seq_lens).contiguous()
    from fastswin.ops.masked_softmax.forward import masked_softmax_fwd

    return masked_softmax_fwd(x, bias, mask, seq_lens, scale, causal)


@torch.library.register_fake("fastswin::masked_softmax_fwd")
def _fwd_fake(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    impl: str,
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.impl("fastswin::masked_softmax_inplace", "default")
def _inplace(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    impl: str,
) -> None:
    chosen = _implementation("masked_softmax_", impl, x, [bias, mask], seq_lens, causal)
    if chosen == "reference":
        x.copy_(masked_softmax_ref(x, scale, bias, mask, causal, seq_lens))
        return
    from fastswin.ops.masked_softmax.forward import masked_softmax_fwd

    if x.is_contiguous():
        masked_softmax_fwd(x, bias, mask, seq_lens, scale, causal, out=x)
    else:
        x.copy_(masked_softmax_fwd(x, bias, mask, seq_lens, scale, causal))


@torch.library.register_fake("fastswin::masked_softmax_inplace")
def _inplace_fake(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    impl: str,
) -> None:
    return None


@torch.library.impl("fastswin::masked_softmax_bwd", "default")
def _bwd(
    grad: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    needs: Sequence[bool],
    impl: str,
) -> Tensors3:
    wanted = (needs[0], needs[1], needs[2])
    summed = [t for t, needed in ((bias, needs[1]), (mask, needs[2])) if needed]
    chosen = _implementation("masked_softmax backward", impl, y, summed, seq_lens, causal)
    if chosen == "reference":
        return masked_softmax_bwd_ref(grad, y, scale, bias, mask, wanted)
    from fastswin.ops.masked_softmax.backward import masked_softmax_bwd

    return masked_softmax_bwd(grad, y, bias, mask, seq_lens, scale, causal, wanted)


@torch.library.register_fake("fastswin::masked_softmax_bwd")
def _bwd_fake(
    grad: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    needs: Sequence[bool],
    impl: str,
) -> Tensors3:
    def like(t: torch.Tensor | None, needed: bool) -> torch.Tensor:
        if not needed or t is None:
            return y.new_empty(0)
        return torch.empty_like(t, memory_format=torch.contiguous_format)

    return like(y, needs[0]), like(bias, needs[1]), like(mask, needs[2])


masked_softmax_fwd = torch.ops.fastswin.masked_softmax_fwd
masked_softmax_bwd = torch.ops.fastswin.masked_softmax_bwd
masked_softmax_inplace = torch.ops.fastswin.masked_softmax_inplace

register_gradients()
