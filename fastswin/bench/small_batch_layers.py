"""Layers of a stage with few rows: forms x tiles, checked, then timed in dependent chains.

A chain is a CUDA graph of launches that each overwrite the same output, every one with weights of
its own, replayed with a cold L2: at batch 1 a Swin's weights do not survive there from one forward
pass to the next. Programmatic launches wait for the one before whatever they read, so launches in
a row overlap as much as those of a network do.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fastswin import ops
from fastswin._triton.tiles import cdiv
from fastswin.bench.failures import describe
from fastswin.ops.linear.config import (
    GemmConfig,
    OneShotConfig,
    default_gemm_config,
    default_layer_norm_linear_config,
    default_one_shot_config,
    one_shot_blocker,
)
from fastswin.testing.tolerance import compare_to_oracle

EPS = 1e-5

#: Launches of one chain, and the most bytes that their weights may take.
CHAIN, CHAIN_BYTES = 40, 400 << 20

#: Replays of a chain; the median counts.
REPLAYS = 9

#: Written between replays, to push weights out of L2.
FLUSH_BYTES = 96 << 20


@dataclasses.dataclass(frozen=True)
class Layer:
    """One product of a block.

    Attributes:
        name: "qkv", "proj", "fc1", "fc2" or "merge".
        side: tokens along one side of the (input) map.
        batch, C: images and channels of the stage.
    """

    name: str
    batch: int
    side: int
    C: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, output and input channels of the product."""
        M, C = self.batch * self.side**2, self.C
        if self.name == "merge":
            return self.batch * cdiv(self.side, 2) ** 2, 2 * C, 4 * C
        N, K = {"qkv": (3, 1), "proj": (1, 1), "fc1": (4, 1), "fc2": (1, 4)}[self.name]
        return M, N * C, K * C

    @property
    def normalised(self) -> bool:
        return self.name in ("qkv", "fc1", "merge")

    @property
    def accumulates(self) -> bool:
        return self.name in ("proj", "fc2")

    @property
    def parts(self) -> int:
        """Products that a one-shot program makes side by side: one a neighbour, or the one."""
        return 4 if self.name == "merge" else 1


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to run a layer: "library", "tiled", "fused" (LayerNorm inside), and its tiles."""

    kind: str
    config: Any
    pdl: bool

    def __str__(self) -> str:
        values = "" if self.config is None else dataclasses.astuple(self.config)
        short = type(self.config).__name__.removesuffix("Config") if self.config else ""
        return f"{self.kind} {short}{values} {'pdl' if self.pdl else ''}".strip()


class Tensors:
    """Inputs of a layer on a device ("meta" for compiling), with ``copies`` weights."""

    def __init__(self, layer: Layer, device: torch.device, copies: int = 1) -> None:
        M, N, K = layer.shape
        generator = torch.Generator("cpu").manual_seed(M + 7 * N + 31 * K)

        def randn(*shape: int, spread: float = 1.0, to: torch.dtype = torch.float16) -> Any:
            if device.type == "meta":
                return torch.empty(*shape, device=device, dtype=to)
            return (spread * torch.randn(*shape, generator=generator)).to(device, to)

        self.layer = layer
        first = randn(N, K, spread=K**-0.5)
        self.weights = [first, *(first.clone() for _ in range(copies - 1))]
        self.bias = randn(N, spread=0.5, to=torch.float32)
        self.library_bias = self.bias.half()
        self.offset = randn(layer.C, spread=0.5, to=torch.float32) if layer.normalised else None
        width = layer.C if layer.normalised else K
        side = layer.side
        self.x = randn(layer.batch, side, side, width)
        self.residual = randn(M, N) if layer.accumulates else None
        self.out = torch.empty(M, N, device=device, dtype=torch.float16)

    def run(self, form: Form, weight: torch.Tensor) -> None:
        """One layer into ``out``, as the engine has it; ``out`` accumulates for proj and fc2."""
        from fastswin.ops.layer_norm.forward import layer_norm_fwd
        from fastswin.ops.linear.one_shot import one_shot_linear_fwd
        from fastswin.ops.patch_merging.forward import gather_neighbours_fwd

        layer, pdl = self.layer, form.pdl
        if layer.name == "merge" and form.kind == "fused":
            result = one_shot_linear_fwd(
                self.x, weight, self.bias, None, EPS, self.offset, None, None, form.config, pdl,
                gather=True,
            )  # fmt: skip
            self.out = result.view(self.out.shape)
            return
        x = self.x.view(-1, self.x.shape[-1])
        if layer.accumulates:
            if form.kind == "library":
                torch.addmm(self.out, x, weight.t(), out=self.out)
            else:
                _product(form, x, weight, self.bias, None, None, None, self.out, self.out)
            return
        gelu = "gelu" if layer.name == "fc1" else None
        if form.kind == "fused":
            _product(form, x, weight, self.bias, gelu, EPS, self.offset, None, self.out)
            return
        if layer.name == "merge":
            h = gather_neighbours_fwd(self.x, EPS, self.offset, pdl=pdl)
        else:
            h = layer_norm_fwd(x, None, None, EPS, self.offset, None, None, pdl=pdl)
        h = h.view(-1, h.shape[-1])
        if form.kind == "tiled":
            _product(form, h, weight, self.bias, gelu, None, None, None, self.out)
        else:
            torch.addmm(self.library_bias, h, weight.t(), out=self.out)

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """The layer in plain PyTorch, in ``dtype``."""
        x, weight = self.x.to(dtype), self.weights[0].to(dtype)
        offset = None if self.offset is None else self.offset.to(dtype)
        bias = self.bias.to(dtype)
        if self.layer.name == "merge":
            y = ops.merge_neighbours(
                x, weight, bias, layer_norm_eps=EPS, offset=offset, impl="reference"
            )
            return y.view_as(self.out)
        gelu: Any = "gelu" if self.layer.name == "fc1" else None
        residual = None if self.residual is None else self.residual.to(dtype)
        y = ops.linear(
            x.view(-1, x.shape[-1]), weight, bias, activation=gelu, residual=residual,
            layer_norm_eps=EPS if self.layer.normalised else None, offset=offset,
            impl="reference",
        )  # fmt: skip
        return y


def _product(
    form: Form,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    gelu: str | None,
    eps: float | None,
    offset: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One of our GEMMs, past the public function, which refuses tensors without data."""
    from fastswin.ops.linear.forward import layer_norm_linear_fwd, linear_fwd
    from fastswin.ops.linear.one_shot import one_shot_linear_fwd

    config, pdl = form.config, form.pdl
    if isinstance(config, OneShotConfig):
        one_shot_linear_fwd(x, weight, bias, gelu, eps, offset, residual, out, config, pdl)
    elif isinstance(config, GemmConfig):
        linear_fwd(x, weight, bias, gelu, residual, out, config, pdl)
    elif eps is not None:
        layer_norm_linear_fwd(x, weight, bias, gelu, eps, offset, out, config, pdl)


def forms(layer: Layer, most: int, multiprocessors: int = 132) -> Iterator[Form]:
    """The engine's present form without and with programmatic launch, then ``most`` new ones."""
    M, N, K = layer.shape
    capability = (9, 0)
    if layer.name != "fc1":
        yield Form("library", None, False)
        if layer.normalised:
            yield Form("library", None, True)
    gemm = default_gemm_config(M, N, K, multiprocessors, capability)
    if layer.name != "merge":
        if layer.normalised:
            yield Form("tiled", gemm, False)
        yield Form("tiled" if layer.normalised else "fused", gemm, True)
    inside = default_layer_norm_linear_config(M, N, K, multiprocessors, capability)
    if layer.name in ("qkv", "fc1") and inside is not None and K <= 384:
        yield Form("fused", inside, False)
        yield Form("fused", inside, True)
    configs = list(dict.fromkeys(_tiles(layer, multiprocessors)))
    ranked = sorted(configs, key=lambda config: predicted_us(layer, config, multiprocessors))
    per_tile: Counter[tuple] = Counter()
    chosen = configs[:1]  # the heuristic's
    for config in ranked:
        tile = config.block_m, config.block_n
        per_tile[tile] += 1
        if per_tile[tile] <= 3 and config not in chosen and len(chosen) < most:
            chosen.append(config)
    yield from (Form("fused", config, True) for config in chosen)


def _tiles(layer: Layer, multiprocessors: int) -> Iterator[OneShotConfig]:
    M, N, K = layer.shape
    gather = layer.name == "merge"
    if one_shot_blocker(K) is not None:
        return
    yield default_one_shot_config(M, N, K, multiprocessors, gather)
    if not gather and K > 512:
        return
    for block_m, block_n in ((16, 32), (32, 32), (16, 64), (32, 64), (64, 32), (64, 64)):
        programs = cdiv(M, block_m) * cdiv(N, block_n)
        if block_m >= 2 * M or not 40 <= programs <= 4 * multiprocessors:
            continue
        values = block_m * K + block_n * K // 2 + layer.parts * block_m * block_n
        for warps in (4, 8, 16):
            threads = 32 * warps
            room = threads * min(255, 65536 // threads)
            if 0.15 * room <= values <= 1.0 * room:
                yield OneShotConfig(block_m, block_n, warps)


def predicted_us(layer: Layer, config: OneShotConfig, multiprocessors: int) -> float:
    """A launch in a programmatic chain, counted before it was measured.

    1.3 us for release, store and drain; 0.5 for the first bytes from L2; x after the wait at
    60 bytes/ns a multiprocessor, and where programs come in waves the weights of later ones too;
    33 cycles at 1.755 GHz a tensor-core step of the longest chain; 0.3 for statistics, 0.15 for
    the sum over neighbours.
    """
    M, N, K = layer.shape
    programs = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    waves = cdiv(programs, multiprocessors)
    loaded = 2 * K * (waves * config.block_m + (waves - 1) * config.block_n)
    warps_on_tile = max(1, config.num_warps // layer.parts)
    tiles = cdiv(config.block_m * config.block_n, 16 * 8 * warps_on_tile)
    # one chain of K steps for every accumulator; 4 of them hide each other's latency
    steps = K / 16 / layer.parts * max(1.0, tiles / 4)
    inside = 0.3 if layer.normalised else 0.0
    summed = 0.15 if layer.parts > 1 else 0.0
    return 1.8 + loaded / 60e3 + steps * 33 / 1755 + inside + summed


class CompilePool:
    """Processes that put kernels into Triton's cache."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
        self._futures: dict[tuple[Layer, Form], concurrent.futures.Future[str | None]] = {}

    def start(self, layer: Layer, form: Form) -> None:
        self._futures[layer, form] = self._pool.submit(compile_form, layer, form)

    def error(self, layer: Layer, form: Form, timeout_s: float) -> str | None:
        """None once compiled, else why not."""
        try:
            return self._futures[layer, form].result(timeout=max(0.0, timeout_s))
        except concurrent.futures.TimeoutError:
            return "not compiled in time"
        except Exception as error:
            return describe(error).message

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def compile_form(layer: Layer, form: Form) -> str | None:
    """Compile what a form launches, in this process; None, or what went wrong."""
    from fastswin.testing.aot import record_launches

    torch.set_num_threads(1)
    try:
        tensors = Tensors(layer, torch.device("meta"))
        with record_launches() as launches:
            tensors.run(form, tensors.weights[0])
        for launch in launches:
            built = launch.kernel.warmup(**launch.arguments, **launch.options, grid=(1,))
            if built.metadata.shared > 227 * 1024:
                return f"{built.metadata.shared} bytes of shared memory"
            if form.pdl and "griddepcontrol.wait" not in built.asm["ptx"]:
                return "the code does not wait for the previous grid"
    except Exception as error:
        return describe(error).message
    return None


def check(tensors: Tensors, form: Form) -> str | None:
    """What is wrong with a form, None for nothing: gate, three runs, and a chain of launches."""
    oracle, eager = tensors.reference(torch.float64), tensors.reference(torch.float16)
    weight = tensors.weights[0]
    first: torch.Tensor | None = None
    for _ in range(3):
        _poison(tensors)
        tensors.run(form, weight)
        if first is None:
            first = tensors.out.clone()
        elif not torch.equal(first.view(torch.int16), tensors.out.view(torch.int16)):
            return "results differ from run to run"
    assert first is not None
    if not bool(torch.isfinite(first).all()):
        return "an output is not written, or not finite"
    found = first
    if form.kind == "library" and tensors.layer.accumulates:  # the engine adds that bias elsewhere
        oracle, eager = oracle - tensors.bias.double(), eager - tensors.library_bias
    gate = compare_to_oracle(found, eager, oracle, torch.float16)
    if not gate.passed:
        return f"error {gate.max_error:.3g} exceeds {gate.max_bound:.3g}"
    return None


def _poison(tensors: Tensors) -> None:
    if tensors.residual is not None:
        tensors.out.copy_(tensors.residual)
    else:
        tensors.out = torch.full_like(tensors.out, math.nan)


def chain_us(tensors: Tensors, form: Form, flush: torch.Tensor) -> float:
    """Median microseconds of one layer in a chain that starts with a cold L2."""
    if tensors.residual is not None:
        tensors.out.zero_()

    def run() -> None:
        for index in range(CHAIN):
            tensors.run(form, tensors.weights[index % len(tensors.weights)])

    return graph_us(run, flush) / CHAIN


def graph_us(run: Callable[[], None], flush: torch.Tensor | None) -> float:
    """Median microseconds of a captured ``run``, between events inside the stream."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph.capture_begin()
        run()
        graph.capture_end()
    graph.replay()
    times = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        if flush is not None:
            flush.zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[REPLAYS // 2]


def copies(layer: Layer) -> int:
    """Distinct weights of one chain."""
    _, N, K = layer.shape
    return max(1, min(CHAIN, CHAIN_BYTES // (2 * N * K)))


def chain_reference(x: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` LayerNorms one after another, in PyTorch."""
    for _ in range(count):
        x = F.layer_norm(x.float(), (x.shape[-1],), eps=EPS).to(x.dtype)
    return x
