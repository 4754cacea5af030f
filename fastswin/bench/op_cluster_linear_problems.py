"""Products of blocks in clusters and by other launches: shapes, operands, forms, their check.

fc1, qkv   LayerNorm behind the product, of statistics     LayerNorm, then ours or the library's
fc2        onto the stream, whose statistics it leaves     cut along K, joined by LayerNorm
proj       the same                                        one-shot, with statistics as well
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
import torch.nn.functional as F

from fastswin import ops
from fastswin._triton.device import multiprocessor_count
from fastswin._triton.tiles import cdiv
from fastswin.bench.cold_graphs import graph_us
from fastswin.engine.small_batch import small_stage
from fastswin.ops.cluster_linear.choice import default_cluster_linear_config
from fastswin.ops.cluster_linear.config import (
    ClusterLinearConfig,
    config_blocker,
    ring_slots,
)
from fastswin.ops.linear.config import OneShotConfig, default_one_shot_config
from fastswin.ops.linear.stats import write_stats_ref
from fastswin.testing.tolerance import assert_close_to_oracle

EPS = 1e-5

#: Output and input channels of a layer over those of its stage.
LAYERS = {"fc1": (4, 1), "fc2": (1, 4), "proj": (1, 1), "qkv": (3, 1)}

#: Rows and channels of stages at batch 1.
STAGES = (
    (784, 192), (784, 256), (784, 384), (196, 384), (196, 512), (196, 768), (576, 512), (49, 768),
    (49, 1024), (49, 1536),
)  # fmt: skip

#: Most and fewest products of a chain, and the bytes that its weights may take in between.
MOST, FEWEST, CHAIN_BYTES = 20, 3, 100 << 20

#: Least part of a program's steps that a candidate's ring holds; least and most programs.
LEAST_RING, PROGRAMS = 0.6, (20, 420)

#: Tiles of rows and of columns of a cluster, for the operator's own tile, and slots of its ring.
SHARES = ((1, 1), (2, 1), (2, 2), (2, 4), (1, 4))
RINGS = (3, 4, 5, 6, 8)

#: Most that a statistic may be off: a mean, and squared deviations over the true ones.
MEAN_ERROR, SQUARES_ERROR = 1e-5, 1e-4


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer of a stage of so many rows and channels."""

    layer: str
    rows: int
    channels: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, output and input channels of the product."""
        outputs, inputs = LAYERS[self.layer]
        return self.rows, outputs * self.channels, inputs * self.channels

    @property
    def normalised(self) -> bool:
        """Whether a LayerNorm is in front; a product without one adds to the stream."""
        return self.layer in ("fc1", "qkv")

    def __str__(self) -> str:
        return f"{self.layer} {self.rows}x{self.channels}"


#: Tiles of the product in clusters, or a word of :func:`others`.
Form = ClusterLinearConfig | str
Job = tuple[Shape, Form]


def programs(shape: Shape, config: ClusterLinearConfig) -> int:
    """Of a launch."""
    M, N, _ = shape.sizes
    return cdiv(M, config.block_m) * (N // config.block_n) * config.splits


def candidates(shape: Shape) -> list[ClusterLinearConfig]:
    """Tiles that the kernel takes, their rings as long as they get: about 30 a shape.

    Rings of few of their steps, few programs and many are slow, and left out; the operator's own
    choice never is, and comes in clusters of several sizes and with shorter rings.
    """
    M, N, K = shape.sizes
    low, high = PROGRAMS
    own = default_cluster_linear_config(M, N, K)
    found = []
    for block_m, block_n, splits, block_k in itertools.product(
        (16, 32, 64, 128), (64, 128), (1, 2, 4, 8), (64, 128, 256)
    ):
        slots = ring_slots(block_m, block_n, splits, K, block_k=block_k)
        config = ClusterLinearConfig(block_m, block_n, splits, slots, block_k)
        if config_blocker(config, M, N, K) is None and (
            config == own
            or (low <= programs(shape, config) <= high and slots >= LEAST_RING * config.steps(K))
        ):
            found.append(config)
    if own is not None:
        changed = [
            dataclasses.replace(own, share_rows=rows, share_columns=columns)
            for rows, columns in SHARES
        ]
        changed += [dataclasses.replace(own, slots=slots) for slots in RINGS]
        for config in changed:
            if config_blocker(config, M, N, K) is None and config not in found:
                found.append(config)
    return found


def others(shape: Shape) -> tuple[str, ...]:
    """Launches that do the same without clusters."""
    if shape.normalised:
        return "layer_norm + linear", "layer_norm + library"
    return ("split_k + join",) if shape.layer == "fc2" else ("one-shot",)


def forms(shape: Shape) -> list[Form]:
    """All forms of a shape, those without clusters first."""
    return [*others(shape), *candidates(shape)]


def told(shape: Shape, form: Form) -> str:
    """A form in a line."""
    if isinstance(form, str):
        return form
    shared = f", {form.share_rows} x {form.share_columns} tiles share"
    return (
        f"{form.block_m}x{form.block_n} splits {form.splits}, steps of {form.block_k}, ring "
        f"{form.slots} of {form.steps(shape.sizes[2])}, {programs(shape, form)} programs"
        f"{shared if form.share_rows * form.share_columns > 1 else ''}"
    )


def one_shot_tiles(shape: Shape, processors: int) -> OneShotConfig:
    """The engine's for proj of few rows, else the heuristic."""
    M, N, K = shape.sizes
    C = shape.channels
    own = small_stage({}, {}, 1, M, C, 4 * C, processors).get("proj")
    return own if isinstance(own, OneShotConfig) else default_one_shot_config(M, N, K, processors)


class Product:
    """Operands of a shape on a device, and its forms."""

    def __init__(self, shape: Shape, device: torch.device, copies: int) -> None:
        M, N, K = shape.sizes
        generator = torch.Generator(device).manual_seed(M + 7 * N + 31 * K)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=device, generator=generator)

        self.shape = shape
        self.x = (randn(M, K) + 0.5).half()
        self.weights = [(randn(N, K) * K**-0.5).half() for _ in range(copies)]
        self.bias = randn(N)
        self.library_bias = self.bias.half()
        self.residual = None if shape.normalised else randn(M, N).half()
        self.weight_sums = [weight.double().sum(1).float() for weight in self.weights]
        self.norm_stats = torch.empty(2, K // 64, M, device=device)
        write_stats_ref(self.x, self.norm_stats)
        self.one_shot = one_shot_tiles(shape, multiprocessor_count(device))
        self.reset(None)

    def reset(self, form: Form | None) -> None:
        """What a form writes anew, all of it poisoned but the stream."""
        M, N, _ = self.shape.sizes
        nan = float("nan")
        if self.residual is None:
            self.out = torch.full((M, N), nan, device=self.x.device, dtype=self.x.dtype)
        else:
            self.out = self.residual.clone()
        self.stats: torch.Tensor | None = None
        self.normed: torch.Tensor | None = None
        tiles = self.one_shot if form == "one-shot" else form
        if isinstance(tiles, ClusterLinearConfig | OneShotConfig) and not self.shape.normalised:
            self.stats = torch.full((2, N // tiles.block_n, M), nan, device=self.x.device)

    def run(self, form: Form, index: int) -> None:
        """One product by the weights of a number, into ``out``, ``stats`` and ``normed``."""
        weight, fc1 = self.weights[index], self.shape.layer == "fc1"
        if isinstance(form, ClusterLinearConfig) and self.shape.normalised:
            ops.linear(
                self.x, weight, self.bias, activation="gelu" if fc1 else None, layer_norm_eps=EPS,
                norm_stats=self.norm_stats, weight_sums=self.weight_sums[index], out=self.out,
                impl="triton", config=form, pdl=True,
            )  # fmt: skip
        elif isinstance(form, ClusterLinearConfig) or form == "one-shot":
            ops.linear(
                self.x, weight, self.bias, residual=self.out, out=self.out, stats_out=self.stats,
                impl="triton", config=self.one_shot if isinstance(form, str) else form, pdl=True,
            )  # fmt: skip
        elif form == "split_k + join":
            partials = ops.split_k_linear(self.x, weight, impl="triton", pdl=True)
            self.normed = ops.add_split_k(
                partials, self.out, self.bias, norm="pre", eps=EPS, impl="triton", pdl=True
            )
        else:
            h = ops.layer_norm(self.x, eps=EPS, impl="triton", pdl=True)
            if form == "layer_norm + linear":
                ops.linear(
                    h, weight, self.bias, activation="gelu" if fc1 else None, out=self.out,
                    impl="triton", pdl=True,
                )  # fmt: skip
            else:
                y = F.linear(h, weight, self.library_bias)
                self.out = F.gelu(y) if fc1 else y

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """What the first weights should give, in plain PyTorch in ``dtype``."""
        x = self.x.to(dtype)
        if self.shape.normalised:
            x = F.layer_norm(x, (x.shape[1],), eps=EPS)
        y = F.linear(x, self.weights[0].to(dtype), self.bias.to(dtype))
        if self.shape.layer == "fc1":
            y = F.gelu(y)
        return y if self.residual is None else self.residual.to(dtype) + y

    def check(self, form: Form) -> str:
        """What is wrong with a form, "" if nothing."""
        runs = []
        for _ in range(3):
            self.reset(form)
            self.run(form, 0)
            runs.append([t for t in (self.out, self.stats, self.normed) if t is not None])
        oracle, eager = self.reference(torch.float64), self.reference(self.x.dtype)
        try:
            assert_close_to_oracle(self.out, eager, oracle, self.x.dtype)
            if self.normed is not None:
                width = (oracle.shape[1],)
                normed, truth = (F.layer_norm(t, width, eps=EPS) for t in (eager, oracle))
                assert_close_to_oracle(self.normed, normed, truth, self.x.dtype)
        except AssertionError as error:
            return str(error)
        if why := self.wrong_stats():
            return why
        for other in runs[1:]:
            if not all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True)):
                return "runs differ"
        return ""

    def wrong_stats(self) -> str:
        """What is wrong with the statistics of ``out``, "" if nothing or where there are none."""
        if self.stats is None:
            return ""
        truth = torch.empty_like(self.stats, dtype=torch.float64)
        write_stats_ref(self.out, truth)
        mean = (self.stats[0] - truth[0]).abs().max().item()
        squares = ((self.stats[1] - truth[1]) / truth[1]).abs().max().item()
        right = mean <= MEAN_ERROR and squares <= SQUARES_ERROR  # not so of NaN
        return "" if right else f"statistics are off by {mean:.1e} and {squares:.1e}"

    def latency_us(self, form: Form, flush: torch.Tensor) -> float:
        """Median microseconds of a product in a chain that starts with a cold L2."""
        self.reset(form)
        count = len(self.weights)

        def chain() -> None:
            for index in range(count):
                self.run(form, index)

        return graph_us(chain, flush) / count


def copies(shape: Shape) -> int:
    """Products of a chain, each with weights of its own."""
    _, N, K = shape.sizes
    return max(FEWEST, min(MOST, CHAIN_BYTES // (2 * N * K)))
