"""Public fused MLP: validation and dispatch."""

from __future__ import annotations

from typing import Literal

import torch

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_no_tensor_cores,
    why_not_triton,
)
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig, why_no_cluster_mlp
from fastswin.ops.cluster_mlp.config import config_blocker as cluster_blocker
from fastswin.ops.hopper_resident.config import ResidentMlpConfig, why_no_resident
from fastswin.ops.hopper_resident.config import mlp_blocker as resident_mlp_blocker
from fastswin.ops.mlp.config import MlpConfig, mlp_blocker
from fastswin.ops.mlp.reference import mlp_ref
from fastswin.ops.streamed_mlp.config import StreamedMlpConfig, why_no_streamed_mlp
from fastswin.ops.streamed_mlp.config import config_blocker as streamed_blocker

#: Every configuration's hidden step divides this.
HIDDEN_STEP = 128

Config = MlpConfig | ResidentMlpConfig | ClusterMlpConfig | StreamedMlpConfig


def mlp(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    impl: Impl = "auto",
    config: Config | None = None,
    pdl: bool = False,
    input_precision: Literal["tf32"] | None = None,
) -> torch.Tensor:
    """The MLP half of a block, LayerNorm and residual included.

    Without ``norm_weight`` (V1, norm first, its affine folded into fc1):
    ``x + fc2(gelu(fc1(norm(x))))``. With it (V2, norm last): ``x + norm(fc2(gelu(fc1(x))))``.

    Args:
        x: ``[..., C]``, contiguous rows.
        fc1_weight, fc1_bias: ``[hidden, C]`` in x's dtype and ``[hidden]``.
        fc2_weight, fc2_bias: ``[C, hidden]`` in x's dtype and ``[C]``.
        norm_weight, norm_bias: ``[C]``, V2's LayerNorm; both or neither.
        offset: ``[C]`` added to every row of x first; None adds nothing.
        eps: LayerNorm epsilon.
        out: ``[..., C]`` where the result goes; may be ``x``.
        impl: "auto", "triton" or "reference".
        config: which kernel and its tiles: a :class:`MlpConfig`; in half precision on Hopper a
            :class:`ResidentMlpConfig` of 96 channels, a :class:`StreamedMlpConfig` of 128 to 256,
            or a :class:`ClusterMlpConfig` of 256 and more, for which weights are packed at each
            call; None takes the heuristic.
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes a
            weight.
        input_precision: "tf32" cuts fp32 operands to TF32; None leaves fp32 to the library, whose
            own switches also decide for the reference. Weights are to be rounded before, as
            ``ops.linear`` says.

    Returns:
        ``[..., C]`` in x's dtype.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
    """
    C = x.shape[-1]
    hidden = fc1_weight.shape[0]
    expected = {
        "fc1_weight": (fc1_weight, (hidden, C)),
        "fc1_bias": (fc1_bias, (hidden,)),
        "fc2_weight": (fc2_weight, (C, hidden)),
        "fc2_bias": (fc2_bias, (C,)),
        "norm_weight": (norm_weight, (C,)),
        "norm_bias": (norm_bias, (C,)),
        "offset": (offset, (C,)),
        "out": (out, tuple(x.shape)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}")
    if input_precision not in (None, "tf32"):
        raise ValueError(f"input_precision must be None or 'tf32', got {input_precision!r}")
    if (norm_weight is None) != (norm_bias is None):
        raise ValueError("give norm_weight and norm_bias together or not at all")
    chosen = choose_impl(
        impl,
        "mlp",
        [
            why_not_triton(x.device, x.dtype),
            why_no_tensor_cores(x.device, x.dtype, input_precision is not None),
            why_no_gradient(
                x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, norm_weight, norm_bias, offset
            ),
            _why_not_config(config, x, hidden),
            None if out is None or out.is_contiguous() else "out is not contiguous",
        ],
    )
    weights = (fc1_weight, fc1_bias, fc2_weight, fc2_bias, norm_weight, norm_bias)
    if chosen == "reference":
        y = mlp_ref(x, *weights, offset, eps)
        return y if out is None else out.copy_(y)
    if isinstance(config, ClusterMlpConfig):
        from fastswin.ops.cluster_mlp.weights import mlp_of_plain_weights

        norm = None
        if norm_weight is not None and norm_bias is not None:
            norm = norm_weight, norm_bias
        fc1, fc2 = (fc1_weight, fc1_bias), (fc2_weight, fc2_bias)
        return mlp_of_plain_weights(x, fc1, fc2, norm, offset, eps, out, config, pdl)
    from fastswin.ops.mlp.forward import mlp_fwd

    return mlp_fwd(x, *weights, offset, eps, out, config, pdl)


def _why_not_config(config: Config | None, x: torch.Tensor, hidden: int) -> str | None:
    """Reason why the kernel of these tiles does not take ``x``, None where it does."""
    C = x.shape[-1]
    rows = x.numel() // max(C, 1)
    if isinstance(config, ClusterMlpConfig):
        return why_no_cluster_mlp(x.device, x.dtype) or cluster_blocker(config, rows, C, hidden)
    blocker = None
    if isinstance(config, StreamedMlpConfig):
        blocker = why_no_streamed_mlp(x.device, x.dtype)
        blocker = blocker or streamed_blocker(config, rows, C, hidden)
    elif isinstance(config, ResidentMlpConfig):
        blocker = why_no_resident(x.device, x.dtype) or resident_mlp_blocker(config, hidden, C)
    return blocker or mlp_blocker(C, hidden, HIDDEN_STEP)
