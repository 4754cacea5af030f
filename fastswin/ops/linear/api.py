"""Public fused linear layer: validation and dispatch."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_no_tensor_cores,
    why_not_triton,
)
from fastswin.ops.cluster_linear.config import (
    ClusterLinearConfig,
    why_no_cluster_linear,
    why_not_aligned,
)
from fastswin.ops.cluster_linear.config import config_blocker as cluster_blocker
from fastswin.ops.hopper_gemm.config import (
    HopperGemmConfig,
    config_blocker,
    why_no_hopper_gemm,
)
from fastswin.ops.hopper_resident.config import (
    ResidentProductConfig,
    product_blocker,
    why_no_resident,
)
from fastswin.ops.linear.config import (
    GemmConfig,
    LayerNormLinearConfig,
    LinearConfig,
    NormLinearConfig,
    OneShotConfig,
    layer_norm_linear_blocker,
    one_shot_blocker,
    why_no_one_shot,
)
from fastswin.ops.linear.operands import prepare_operands
from fastswin.ops.linear.stats import check_stats, write_stats_ref

Activation = Literal["gelu"]

#: How fp32 operands enter tensor cores: cut to TF32, or as the sum of two such parts, which keeps
#: fp32's precision at three products.
InputPrecision = Literal["tf32", "tf32x3"]

#: Kernels of a product without LayerNorm, and of one whose rows are normalised.
PlainConfig = LinearConfig | HopperGemmConfig | ClusterLinearConfig
NormConfig = NormLinearConfig | ClusterLinearConfig


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    layer_norm_eps: float | None = None,
    offset: torch.Tensor | None = None,
    norm_stats: torch.Tensor | None = None,
    weight_sums: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    stats_out: torch.Tensor | None = None,
    impl: Impl = "auto",
    config: PlainConfig | NormConfig | None = None,
    pdl: bool = False,
    input_precision: InputPrecision | None = None,
) -> torch.Tensor:
    """``residual + activation(norm(x) @ weight.T + bias)`` in one kernel.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]`` in x's dtype, as torch.nn.Linear stores it.
        bias: ``[N]`` or None.
        activation: None or "gelu" (erf, to half a half-precision rounding).
        residual: ``[..., N]`` or None; excludes ``layer_norm_eps``.
        layer_norm_eps: normalises each row of x first, without affine (fold it into ``weight``
            and ``bias``); None leaves x as it is.
        offset: ``[K]`` added to every row before that norm; needs ``layer_norm_eps``.
        norm_stats: fp32 ``[2, T, rows]`` that another call wrote of x (``stats_out``): the norm is
            applied to the product, its statistics are not computed again. Needs
            ``layer_norm_eps``, ``weight_sums`` and a :class:`OneShotConfig` or
            :class:`ClusterLinearConfig`; excludes ``offset``.
        weight_sums: fp32 ``[N]``, ``weight.sum(1)``; with ``norm_stats`` only.
        out: contiguous ``[..., N]`` where the result goes; may be ``residual``.
        stats_out: fp32 ``[2, N / block_n, rows]``, written: mean and sum of squared deviations of
            each part of ``block_n`` columns of every row of the result. Needs a
            :class:`OneShotConfig` or :class:`ClusterLinearConfig` whose ``block_n`` divides N.
        impl: "auto", "triton" or "reference".
        config: which kernel and its tiles: a :class:`LayerNormLinearConfig` or, without
            activation, a :class:`ResidentProductConfig` with ``layer_norm_eps``, a
            :class:`GemmConfig` without, or a :class:`HopperGemmConfig` without residual either, a
            :class:`OneShotConfig` with and without, a :class:`ClusterLinearConfig` without or with
            ``norm_stats``; None takes the heuristic.
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes
            ``weight``, ``bias``, ``offset`` or ``weight_sums``.
        input_precision: how fp32 operands enter tensor cores, "tf32" or "tf32x3"; None leaves
            fp32 to the library, whose own switches also decide for the reference. In "tf32" rows
            are rounded to nearest, the weight's last 13 bits are cut off: round it before
            (``engine.prepare.round_to_tf32``). A :class:`HopperGemmConfig` cuts rows off as well:
            ``layer_norm(..., tf32=True)`` writes TF32 numbers.

    Returns:
        ``[..., N]`` in x's dtype; products accumulate in fp32.

    Raises:
        ValueError: a shape or choice does not fit; the message names the argument.
    """
    N, K = weight.shape
    if x.shape[-1] != K:
        raise ValueError(f"x must end in weight's {K} input channels, got {tuple(x.shape)}")
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(f"bias must be [{N}], got {tuple(bias.shape)}")
    if input_precision not in (None, *get_args(InputPrecision)):
        raise ValueError(
            f"input_precision must be None, 'tf32' or 'tf32x3', got {input_precision!r}"
        )
    if activation not in (None, "gelu"):
        raise ValueError(f"activation must be None or 'gelu', got {activation!r}")
    shape = (*x.shape[:-1], N)
    for name, like in (("residual", residual), ("out", out)):
        if like is not None and tuple(like.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(like.shape)}")
    if residual is not None and layer_norm_eps is not None:
        raise ValueError("residual and layer_norm_eps exclude each other")
    if offset is not None and (layer_norm_eps is None or tuple(offset.shape) != (K,)):
        raise ValueError(
            f"offset must be [{K}] and needs layer_norm_eps, got {tuple(offset.shape)}"
        )
    check_stats(x, N, layer_norm_eps, offset, norm_stats, weight_sums, stats_out, config)
    expected = PlainConfig if layer_norm_eps is None else NormConfig
    if config is not None and not isinstance(config, expected):
        names = " or ".join(kind.__name__ for kind in get_args(expected))
        raise ValueError(f"config must be a {names}, got {type(config).__name__}")
    chosen = choose_impl(
        impl,
        "linear",
        [
            why_not_triton(x.device, x.dtype),
            why_no_tensor_cores(x.device, x.dtype, input_precision is not None),
            why_no_gradient(x, weight, bias, residual, offset),
            _why_not_config(x, N, K, layer_norm_eps, activation, residual, config, input_precision),
            _why_not_cluster(x, weight, out, layer_norm_eps, norm_stats, config),
            f"weight is {weight.dtype}, x is {x.dtype}" if weight.dtype != x.dtype else None,
            None if out is None or out.is_contiguous() else "out is not contiguous",
        ],
    )
    if chosen == "reference":
        y = _linear_ref(x, weight, bias, activation, residual, layer_norm_eps, offset, out)
        if stats_out is not None:
            write_stats_ref(y, stats_out)
        return y
    from fastswin.ops.linear import forward, one_shot

    fp32_form = input_precision if x.dtype == torch.float32 else None

    if isinstance(config, OneShotConfig):
        return one_shot.one_shot_linear_fwd(
            x, weight, bias, activation, layer_norm_eps, offset, residual, out, config, pdl,
            norm_stats=norm_stats, weight_sums=weight_sums, stats_out=stats_out,
        )  # fmt: skip
    if isinstance(config, ClusterLinearConfig):
        from fastswin.ops.cluster_linear.launch import cluster_linear_fwd

        given = prepare_operands(x, weight, bias, None, residual, out)
        rows = (given.M, K), (given.M, N)
        cluster_linear_fwd(
            given.x.view(rows[0]), given.weight, given.bias, activation, layer_norm_eps,
            None if given.residual is None else given.residual.view(rows[1]),
            given.out.view(rows[1]), config, pdl, norm_stats, weight_sums, stats_out,
        )  # fmt: skip
        return given.out
    if isinstance(config, LayerNormLinearConfig | ResidentProductConfig) or (
        layer_norm_eps is not None
    ):
        assert layer_norm_eps is not None  # checked with the type of config
        assert not isinstance(config, GemmConfig | HopperGemmConfig)
        # its weights come after the wait: launched ahead it is 0.5 to 1.6 us slower
        return forward.layer_norm_linear_fwd(
            x, weight, bias, activation, layer_norm_eps, offset, out, config,
            input_precision=fp32_form,
        )  # fmt: skip
    return forward.linear_fwd(x, weight, bias, activation, residual, out, config, pdl, fp32_form)


def _why_not_config(
    x: torch.Tensor,
    N: int,
    K: int,
    eps: float | None,
    activation: Activation | None,
    residual: torch.Tensor | None,
    config: PlainConfig | NormConfig | None,
    input_precision: InputPrecision | None,
) -> str | None:
    if isinstance(config, ClusterLinearConfig):
        return None  # _why_not_cluster's
    if isinstance(config, OneShotConfig):
        if x.dtype == torch.float32:
            return "one-shot products hold half-precision operands"
        return why_no_one_shot(x.device) or one_shot_blocker(K)
    if isinstance(config, ResidentProductConfig):
        if activation is not None:
            return "the resident product has no activation"
        return why_no_resident(x.device, x.dtype) or product_blocker(config, N, K)
    if isinstance(config, HopperGemmConfig):
        if residual is not None:
            return "the Hopper product adds no residual"
        blocker = why_no_hopper_gemm(x.device, x.dtype, N, K, input_precision == "tf32")
        return blocker or config_blocker(config, "linear", x.element_size())
    return layer_norm_linear_blocker(K) if eps is not None else None


def _why_not_cluster(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    eps: float | None,
    norm_stats: torch.Tensor | None,
    config: PlainConfig | NormConfig | None,
) -> str | None:
    if not isinstance(config, ClusterLinearConfig):
        return None
    if eps is not None and norm_stats is None:
        return "a product in clusters normalises rows whose statistics are given (norm_stats)"
    N, K = weight.shape
    blocker = why_not_aligned(x, weight, out) or why_no_cluster_linear(x.device, x.dtype)
    return blocker or cluster_blocker(config, x.shape[:-1].numel(), N, K)


def _linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    residual: torch.Tensor | None,
    layer_norm_eps: float | None,
    offset: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    dtype = x.dtype
    if layer_norm_eps is not None:
        compute = torch.promote_types(dtype, torch.float32)
        x = x.to(compute) if offset is None else x.to(compute) + offset.to(compute)
        x = F.layer_norm(x, (x.shape[-1],), eps=layer_norm_eps).to(dtype)
    y = F.linear(x, weight, None if bias is None else bias.to(dtype))
    if activation == "gelu":
        y = F.gelu(y)
    if residual is not None:
        y = (residual + y).to(dtype)
    return y if out is None else out.copy_(y)
