"""The ways to build a layer from launches, so that the fastest can be told from their times.

    qkv   fused     LayerNorm inside our GEMM            tiled    LayerNorm, our tiled GEMM
          library   LayerNorm, the library's GEMM
    mlp   fused     one kernel                           split    LayerNorm inside fc1, then fc2
          library   LayerNorm, our fc1 with GELU, the library's fc2
          unfused   LayerNorm, the library's fc1, GELU, the library's fc2

V2 normalises after the branch: no LayerNorm in front, one behind, and no form with LayerNorm inside
a GEMM. The names are those of the engine's plan.
"""

from __future__ import annotations

import dataclasses

from fastswin.ops.linear.config import layer_norm_linear_blocker
from fastswin.ops.mlp.api import HIDDEN_STEP
from fastswin.ops.mlp.config import mlp_blocker
from fastswin.tuning.problem import KernelProblem, make_problem

#: Widest stage for which LayerNorm inside qkv's GEMM is tried: at 384 channels and from 1,568 rows
#: up its best tiles took 1.3 to 1.8 times the other forms' (docs/performance.md).
MAX_FUSED_QKV = 256

#: The same for fc1, and the rows below which the fused MLP leaves the card idle: above, the split
#: MLP lost to it at 96 and 192 channels by 1.1 to 1.6.
MAX_SPLIT_MLP, MAX_SPLIT_ROWS = 256, 6000

#: Rows up to which both are tried at any width, by one-shot kernels (ops/linear/one_shot.py).
FEW_ROWS = 200

#: Legal choices of each layer, and the numbers that identify it beside the rows.
CHOICES: dict[str, tuple[str, ...]] = {
    "qkv": ("fused", "library", "tiled"),
    "mlp": ("fused", "split", "library", "unfused"),
}
LAYER_FIELDS: dict[str, tuple[str, ...]] = {
    "qkv": ("C", "post_norm"),
    "mlp": ("C", "hidden", "post_norm"),
}


@dataclasses.dataclass(frozen=True)
class LayerProblem:
    """A layer whose form is to be chosen.

    Attributes:
        layer: "qkv" or "mlp".
        dtype: "fp16" or "bf16"; fp32 products are the library's.
        rows: tokens of the batch.
        shape: one number for each of :data:`LAYER_FIELDS`.
    """

    layer: str
    dtype: str
    rows: int
    shape: tuple[int, ...]

    @property
    def dims(self) -> dict[str, int]:
        """The shape by name."""
        return dict(zip(LAYER_FIELDS[self.layer], self.shape, strict=True))

    def forms(self) -> dict[str, list[KernelProblem]]:
        """Launches of every form that the kernels can take, by its name."""
        return _qkv_forms(self) if self.layer == "qkv" else _mlp_forms(self)

    def __str__(self) -> str:
        dims = " ".join(f"{name}={value}" for name, value in self.dims.items())
        return f"layer {self.layer} {self.dtype} rows={self.rows} {dims}"


def qkv_layer(dtype: str, rows: int, channels: int, post_norm: bool) -> LayerProblem:
    """The qkv projection of ``rows`` tokens of ``channels``."""
    return LayerProblem("qkv", dtype, rows, (channels, int(post_norm)))


def mlp_layer(dtype: str, rows: int, channels: int, hidden: int, post_norm: bool) -> LayerProblem:
    """The MLP half of a block."""
    return LayerProblem("mlp", dtype, rows, (channels, hidden, int(post_norm)))


def tiled_qkv(dtype: str, rows: int, channels: int) -> KernelProblem:
    """Our GEMM as qkv projection."""
    return _linear(dtype, rows, 3 * channels, channels)


def fused_qkv(dtype: str, rows: int, channels: int) -> KernelProblem:
    """LayerNorm inside the qkv projection."""
    return make_problem("layer_norm_linear", dtype, rows, N=3 * channels, K=channels, gelu=0)


def fused_mlp(dtype: str, rows: int, channels: int, hidden: int, post_norm: bool) -> KernelProblem:
    """The MLP as one kernel."""
    return make_problem("mlp", dtype, rows, C=channels, hidden=hidden, post_norm=post_norm)


def tiled_fc1(dtype: str, rows: int, channels: int, hidden: int) -> KernelProblem:
    """fc1 and GELU in our GEMM."""
    return _linear(dtype, rows, hidden, channels, gelu=1)


def split_fc1(dtype: str, rows: int, channels: int, hidden: int) -> KernelProblem:
    """LayerNorm, fc1 and GELU in one kernel."""
    return make_problem("layer_norm_linear", dtype, rows, N=hidden, K=channels, gelu=1)


def split_fc2(dtype: str, rows: int, channels: int, hidden: int) -> KernelProblem:
    """fc2 and the residual in our GEMM."""
    return _linear(dtype, rows, channels, hidden, residual=1)


def _linear(
    dtype: str, rows: int, N: int, K: int, gelu: int = 0, residual: int = 0
) -> KernelProblem:
    return make_problem("linear", dtype, rows, N=N, K=K, gelu=gelu, residual=residual)


def _qkv_forms(layer: LayerProblem) -> dict[str, list[KernelProblem]]:
    dtype, rows, C = layer.dtype, layer.rows, layer.dims["C"]
    library = make_problem("library_linear", dtype, rows, N=3 * C, K=C)
    forms = {"library": [library], "tiled": [tiled_qkv(dtype, rows, C)]}
    if layer.dims["post_norm"]:
        return forms
    norm = make_problem("layer_norm", dtype, rows, C=C, residual=0)
    forms = {name: [norm, *launches] for name, launches in forms.items()}
    widest = C <= MAX_FUSED_QKV or rows <= FEW_ROWS
    if widest and layer_norm_linear_blocker(C) is None:
        forms["fused"] = [fused_qkv(dtype, rows, C)]
    return forms


def _mlp_forms(layer: LayerProblem) -> dict[str, list[KernelProblem]]:
    dtype, rows = layer.dtype, layer.rows
    C, hidden, post_norm = layer.shape
    sized = (dtype, rows, C, hidden)
    norm = make_problem("layer_norm", dtype, rows, C=C, residual=post_norm)
    last = "library_linear" if post_norm else "library_accumulate"
    fc2 = make_problem(last, dtype, rows, N=C, K=hidden)
    library_fc1 = make_problem("library_linear", dtype, rows, N=hidden, K=C)
    gelu = make_problem("gelu", dtype, rows, C=hidden)
    forms = {
        "library": [norm, tiled_fc1(*sized), fc2],
        "unfused": [norm, library_fc1, gelu, fc2],
    }
    if mlp_blocker(C, hidden, HIDDEN_STEP) is None:
        forms["fused"] = [fused_mlp(*sized, bool(post_norm))]
    narrow = (C <= MAX_SPLIT_MLP and rows <= MAX_SPLIT_ROWS) or rows <= FEW_ROWS
    if not post_norm and narrow and layer_norm_linear_blocker(C) is None:
        forms["split"] = [split_fc1(*sized), split_fc2(*sized)]
    return forms
