"""Which configurations are worth compiling for a problem, and which can run at all.

The engine's own choice first, then those of proposals.py that are legal and whose pipelined
operands fit into shared memory. Estimates only prune; what a kernel really takes is read from the
compiler.
"""

from __future__ import annotations

from fastswin._triton.tiles import MIN_DOT, cdiv, next_power_of_2
from fastswin.ops.hopper_gemm.config import (
    Form,
    HopperGemmConfig,
    chosen_config,
    config_blocker,
    gluon_blocker,
    shape_blocker,
)
from fastswin.ops.hopper_resident.config import (
    ResidentMlpConfig,
    ResidentProductConfig,
    default_resident_mlp,
    default_resident_product,
    mlp_blocker,
    product_blocker,
)
from fastswin.ops.hopper_resident.config import gluon_blocker as resident_gluon_blocker
from fastswin.ops.linear.config import (
    GemmConfig,
    LayerNormLinearConfig,
    OneShotConfig,
    default_gemm_config,
    default_layer_norm_linear_config,
    one_shot_blocker,
)
from fastswin.ops.mlp.config import MlpConfig, default_mlp_config
from fastswin.ops.streamed_mlp.config import StreamedMlpConfig, default_streamed_mlp_config
from fastswin.ops.streamed_mlp.config import config_blocker as streamed_mlp_blocker
from fastswin.ops.streamed_mlp.config import gluon_blocker as streamed_gluon_blocker
from fastswin.ops.window_attention.config import (
    MAX_RUN_WINDOW,
    default_config,
    key_tiles,
)
from fastswin.tuning.card import Card
from fastswin.tuning.problem import KernelProblem, LaunchConfig
from fastswin.tuning.proposals import PROPOSALS


def default_for(problem: KernelProblem, card: Card) -> LaunchConfig | None:
    """What the engine takes without a table; None where there is nothing to choose."""
    d, rows = problem.dims, problem.rows
    if problem.op == "linear":
        if (hopper := _default_hopper(problem, card)) is not None:
            return hopper
        return default_gemm_config(rows, d["N"], d["K"], card.multiprocessors, card.capability)
    kept = _default_resident(problem, card) or _default_streamed(problem, card)
    if kept is not None:
        return kept
    if problem.op == "layer_norm_linear":
        return default_layer_norm_linear_config(
            rows, d["N"], d["K"], card.multiprocessors, card.capability
        )
    if problem.op == "mlp":
        return default_mlp_config(d["C"], card.capability)
    if problem.op == "window_attention":
        # as forward.py asks it for windows without mask, padding or dropout
        return default_config(
            rows, d["window_h"] * d["window_w"], d["heads"], d["head_dim"], problem.itemsize,
            card.multiprocessors, card.capability, runs=not d["cosine"],
            tensor_cores=problem.dtype != "fp32", tf32=problem.dtype == "tf32",
        )  # fmt: skip
    return None


def candidates(problem: KernelProblem, card: Card) -> list[LaunchConfig]:
    """Configurations to try, the heuristic's first; empty where there is nothing to choose."""
    default = default_for(problem, card)
    if default is None:
        return []
    found = PROPOSALS[problem.op](problem, card)
    legal = (c for c in found if why_invalid(problem, c, card.capability) is None)
    fits = (c for c in legal if operand_bytes(problem, c) <= card.shared_bytes)
    return list(dict.fromkeys([default, *fits]))


def why_invalid(
    problem: KernelProblem, config: LaunchConfig, capability: tuple[int, int]
) -> str | None:
    """Reason why a configuration cannot run a problem, None where it can."""
    if getattr(config, "tma", False) and capability < (9, 0):
        return f"tma needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    d = problem.dims
    if isinstance(config, GemmConfig):
        sides = {"block_m": config.block_m, "block_n": config.block_n, "block_k": config.block_k}
        if config.tma and (d["K"] % 8 or d["N"] % 8):
            return f"tma needs N and K to be multiples of 8, got {d['N']} and {d['K']}"
        if config.persistent < 0 or (config.persistent and not config.tma):
            return f"persistent={config.persistent} needs tma"
    elif isinstance(config, HopperGemmConfig):
        if blocker := _hopper_blocker(problem, config, capability):
            return blocker
        sides = {"block_m": config.block_m, "block_n": config.block_n, "block_k": config.block_k}
    elif isinstance(config, ResidentProductConfig | ResidentMlpConfig):
        return _resident_blocker(problem, config, capability)
    elif isinstance(config, StreamedMlpConfig):
        return _streamed_blocker(problem, config, capability)
    elif isinstance(config, LayerNormLinearConfig):
        sides = {"block_m": config.block_m, "block_n": config.block_n}
        steps = cdiv(d["N"], config.block_n)
        if not 1 <= config.column_splits <= steps:
            return f"column_splits={config.column_splits} is not in [1, {steps}]"
    elif isinstance(config, OneShotConfig):
        sides = {"block_m": config.block_m, "block_n": config.block_n}
        if blocker := one_shot_blocker(d["K"]):
            return blocker
    elif isinstance(config, MlpConfig):
        sides = {"block_m": config.block_m, "block_h": config.block_h}
        if d["hidden"] % config.block_h:
            return f"block_h={config.block_h} does not divide {d['hidden']} hidden channels"
    else:
        sides = {"block_q": config.block_q, "block_k": config.block_k}
        tokens = d["window_h"] * d["window_w"]
        if config.heads_per_program < 1 or d["heads"] % config.heads_per_program:
            return f"heads_per_program={config.heads_per_program} does not divide {d['heads']}"
        if config.key_tiles and config.key_tiles != key_tiles(tokens):
            return f"key_tiles={config.key_tiles} do not hold {tokens} keys"
        if not config.key_tiles and (config.heads_per_program, config.query_splits) != (1, 1):
            return "the online form has one head and query tile a program"
        if config.programs < 0 or (config.programs and tokens > MAX_RUN_WINDOW):
            return f"programs={config.programs} need windows of at most {MAX_RUN_WINDOW} tokens"
        if not 1 <= config.query_splits <= cdiv(tokens, max(1, config.block_q)):
            return f"query_splits={config.query_splits} exceed the tiles of {tokens} queries"
    for name, side in sides.items():
        if side < MIN_DOT or side & (side - 1):
            return f"{name}={side} is no power of two of at least {MIN_DOT}"
    warps = config.warps if isinstance(config, HopperGemmConfig) else config.num_warps
    if warps not in (1, 2, 4, 8, 16, 32):
        return f"num_warps={warps} is no power of two in [1, 32]"
    return None if getattr(config, "num_stages", 1) >= 1 else "num_stages must be at least 1"


def operand_bytes(problem: KernelProblem, config: LaunchConfig) -> int:
    """Shared memory that pipelined operands take at least, in bytes; for pruning."""
    d, size = problem.dims, problem.itemsize
    if isinstance(config, GemmConfig):
        return (config.block_m + config.block_n) * config.block_k * size * config.num_stages
    if isinstance(config, HopperGemmConfig):
        return config.shared_bytes(size)
    if isinstance(config, ResidentProductConfig):
        return config.shared_bytes(d["N"], d["K"])
    if isinstance(config, ResidentMlpConfig):
        return config.shared_bytes(d["hidden"], d["C"])
    if isinstance(config, StreamedMlpConfig):
        return config.shared_bytes(d["C"], d["hidden"], bool(d["post_norm"]))
    if isinstance(config, OneShotConfig):  # operands lie in registers, exchanged part by part
        return (config.block_m + config.block_n) * 32 * size
    if isinstance(config, LayerNormLinearConfig):
        return config.block_n * d["K"] * size * config.num_stages
    if isinstance(config, MlpConfig):
        return 2 * config.block_h * d["C"] * size * config.num_stages
    width = max(MIN_DOT, next_power_of_2(d["head_dim"]))
    keys = sum(config.key_tiles) or 64
    return 2 * keys * width * size * max(1, config.num_stages - 1)


def _default_hopper(problem: KernelProblem, card: Card) -> HopperGemmConfig | None:
    """The Hopper product where the engine takes it, for fc1 as ops.linear decides and for qkv."""
    d = problem.dims
    if d["residual"] or problem.itemsize != 2 or card.capability[0] != 9:
        return None
    if shape_blocker(d["N"], d["K"], problem.itemsize) or gluon_blocker():
        return None
    form: Form = "linear" if d["gelu"] else "plain"
    return chosen_config(form, problem.rows, d["N"], d["K"], problem.itemsize, card.multiprocessors)


def _hopper_blocker(
    problem: KernelProblem, config: HopperGemmConfig, capability: tuple[int, int]
) -> str | None:
    d = problem.dims
    if capability[0] != 9:
        return f"the Hopper product needs compute capability 9.0, this is {capability}"
    if problem.itemsize != 2:
        return f"the Hopper product takes half precision, the problem is {problem.dtype}"
    if d["residual"]:
        return "the Hopper product adds no residual"
    fits = shape_blocker(d["N"], d["K"], problem.itemsize)
    return fits or config_blocker(config, "linear", problem.itemsize) or gluon_blocker()


def _default_resident(
    problem: KernelProblem, card: Card
) -> ResidentProductConfig | ResidentMlpConfig | None:
    """The kernels that keep their weights, where the operators take them."""
    d, rows = problem.dims, problem.rows
    if problem.itemsize != 2 or card.capability[0] != 9 or resident_gluon_blocker():
        return None
    if problem.op == "layer_norm_linear" and not d["gelu"]:
        return default_resident_product(rows, d["N"], d["K"], card.multiprocessors)
    if problem.op == "mlp":
        return default_resident_mlp(rows, d["hidden"], d["C"], card.multiprocessors)
    return None


def _not_half_on_hopper(
    what: str, problem: KernelProblem, capability: tuple[int, int]
) -> str | None:
    if capability[0] != 9:
        return f"{what} need compute capability 9.0, this is {capability}"
    if problem.itemsize != 2:
        return f"{what} are in half precision, the problem is {problem.dtype}"
    return None


def _default_streamed(problem: KernelProblem, card: Card) -> StreamedMlpConfig | None:
    """The MLP past whose rows weights stream, where ``ops.mlp`` takes it."""
    d = problem.dims
    if problem.op != "mlp" or problem.itemsize != 2 or card.capability[0] != 9:
        return None
    if streamed_gluon_blocker():
        return None
    return default_streamed_mlp_config(problem.rows, d["hidden"], d["C"], card.multiprocessors)


def _streamed_blocker(
    problem: KernelProblem, config: StreamedMlpConfig, capability: tuple[int, int]
) -> str | None:
    d = problem.dims
    if blocker := _not_half_on_hopper("streamed MLPs", problem, capability):
        return blocker
    blocker = streamed_mlp_blocker(config, problem.rows, d["C"], d["hidden"])
    return blocker or streamed_gluon_blocker()


def _resident_blocker(
    problem: KernelProblem,
    config: ResidentProductConfig | ResidentMlpConfig,
    capability: tuple[int, int],
) -> str | None:
    d = problem.dims
    if blocker := _not_half_on_hopper("resident weights", problem, capability):
        return blocker
    if isinstance(config, ResidentMlpConfig):
        return mlp_blocker(config, d["hidden"], d["C"]) or resident_gluon_blocker()
    if d["gelu"]:
        return "the resident product has no activation"
    return product_blocker(config, d["N"], d["K"]) or resident_gluon_blocker()
