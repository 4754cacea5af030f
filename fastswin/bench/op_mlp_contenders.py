"""The contenders of the MLP suite, from rows ``[M, C]`` to rows.

    fastswin    one kernel; where it is in clusters, its weights are packed before the call
    parts       LayerNorm, fc1 with GELU, fc2 with the residual (V2: fc2, norm with the residual)
    eager       PyTorch's operators
    compile     torch.compile of those

The first two write to memory that is there already, as the engine's do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from fastswin import ops
from fastswin._triton.available import Impl
from fastswin.bench.op_mlp_problems import EPS, Inputs, MlpProblem, Norm, eager
from fastswin.engine.operators import packed_mlp
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig
from fastswin.ops.cluster_mlp.weights import PackedMlp, pack_weights

VARIANTS = ("fastswin", "parts", "eager", "compile")

#: Variants that are checked, and write to ``Operands.out``.
OURS = ("fastswin", "parts")


@dataclasses.dataclass(frozen=True)
class Operands:
    """What contenders read and write, ready before the call.

    Attributes:
        inputs: in the problem's dtype.
        out: ``[M, C]``.
        fc1_bias, fc2_bias, norm: the inputs' in fp32, as the engine prepares them.
        packed: weights of a kernel in clusters, None of any other.
    """

    inputs: Inputs
    out: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_bias: torch.Tensor
    norm: Norm | None
    packed: PackedMlp | None

    @classmethod
    def make(cls, problem: MlpProblem, device: torch.device, seed: int) -> Operands:
        """Random ones.

        Args:
            problem: which.
            device: where.
            seed: of the inputs.
        """
        inputs = problem.make(device, seed)
        wide = inputs.to(torch.float32)
        packed, tiles = None, problem.tiles(device)
        if isinstance(tiles, ClusterMlpConfig):
            fc1 = inputs.fc1_weight, wide.fc1_bias
            packed = pack_weights(
                fc1, (inputs.fc2_weight, wide.fc2_bias), wide.norm, tiles.programs
            )
        out = torch.empty_like(inputs.x)
        return cls(inputs, out, wide.fc1_bias, wide.fc2_bias, wide.norm, packed)


Function = Callable[[Operands], torch.Tensor]


def implementation(device: torch.device) -> Impl:
    """Kernels on a GPU and nothing else; on a CPU what the operators take there."""
    return "triton" if device.type == "cuda" else "auto"


def one_kernel(problem: MlpProblem, device: torch.device) -> Function:
    """``ops.mlp`` with its tiles, or the kernel in clusters on packed weights."""
    tiles, pdl = problem.tiles(device), problem.launched_ahead(device)
    impl = implementation(device)

    def call(o: Operands) -> torch.Tensor:
        given = o.inputs
        if isinstance(tiles, ClusterMlpConfig) and o.packed is not None:
            return packed_mlp(given.x, o.packed, EPS, tiles, out=o.out, pdl=pdl)
        norm_weight, norm_bias = o.norm or (None, None)
        return ops.mlp(
            given.x, given.fc1_weight, o.fc1_bias, given.fc2_weight, o.fc2_bias,
            norm_weight=norm_weight, norm_bias=norm_bias, eps=EPS, out=o.out, impl=impl,
            config=tiles, pdl=pdl,
        )  # fmt: skip

    return call


def parts(problem: MlpProblem, device: torch.device) -> Function:
    """Separate launches of our operators, each with the tiles that it takes itself."""
    impl, pdl = implementation(device), problem.launched_ahead(device)

    def call(o: Operands) -> torch.Tensor:
        given = o.inputs
        h = given.x if o.norm else ops.layer_norm(given.x, eps=EPS, impl=impl, pdl=pdl)
        h = ops.linear(h, given.fc1_weight, o.fc1_bias, activation="gelu", impl=impl, pdl=pdl)
        if o.norm is None:
            return ops.linear(
                h, given.fc2_weight, o.fc2_bias, residual=given.x, out=o.out, impl=impl, pdl=pdl
            )
        branch = ops.linear(h, given.fc2_weight, o.fc2_bias, impl=impl, pdl=pdl)
        return ops.layer_norm(
            branch, *o.norm, eps=EPS, residual=given.x, out=o.out, impl=impl, pdl=pdl
        )

    return call


def compiled_eager() -> Function:
    """torch.compile of the formula; it is compiled at the first call."""
    compiled = torch.compile(eager, dynamic=False)
    return lambda o: compiled(o.inputs)


def contenders(
    problem: MlpProblem, names: Sequence[str], device: torch.device
) -> dict[str, Function]:
    """Functions of variants.

    Args:
        problem: which.
        names: of :data:`VARIANTS`.
        device: where they will be called.
    """
    made: dict[str, Callable[[], Function]] = {
        "fastswin": lambda: one_kernel(problem, device),
        "parts": lambda: parts(problem, device),
        "eager": lambda: lambda o: eager(o.inputs),
        "compile": compiled_eager,
    }
    return {name: made[name]() for name in names}
