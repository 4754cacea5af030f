"""The attention half as one kernel against the engine's separate launches, on the card.

    PYTHONPATH=. python3 -m fastswin.bench.attention_half --deadline-s 90 --out DIR

For stages of Swin-T, B and L and SwinV2-T at batches 1 to 64: what the plan launches today against
both forms of ops/attention_half and several tiles each; where fc2 is cut along K, joining its sums
belongs to the half. Everything runs through the engine's own
``Forward.attention_half`` on a second (shifted) block, proj and residual included, checked first
(fp64 oracle, poisoned outputs, three runs bitwise), then timed in CUDA graphs of chains whose
launches have weights of their own and start with a cold L2. At the end whole models with the best
forms. Lines go to DIR/attention_half_sweep.txt as they come.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import torch

from fastswin import ops
from fastswin.bench.attention_half_problems import (
    HALVES,
    SWIN_B,
    SWIN_L,
    SWIN_T,
    SWIN_V2_T,
    CompilePool,
    Half,
    Job,
    candidates,
)
from fastswin.bench.failures import describe
from fastswin.bench.small_batch import build
from fastswin.bench.small_batch_layers import CHAIN_BYTES, FLUSH_BYTES, graph_us
from fastswin.engine.bind import BlockOffsets, BoundPlan, Unjoined, bind
from fastswin.engine.forward import Forward
from fastswin.engine.fused_attention import FusedAttention, FusedRange
from fastswin.engine.plan import ModelPlan, StagePlan, make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import Affine, PreparedBlock, prepare
from fastswin.engine.warmup import compile_calls, kernel_calls
from fastswin.ops.split_k.config import SplitKConfig
from fastswin.testing.poison import PoisonEmpty
from fastswin.testing.tolerance import compare_to_oracle

HALF = PRECISIONS["fp16"]

#: Halves in one chain.
CHAIN = 20

#: Seconds kept for whole models at the end.
RESERVE_S = 10.0

#: (model, batch) of the whole models.
WHOLE_MODELS = (
    (SWIN_T, 1), (SWIN_V2_T, 1), (SWIN_B, 1), (SWIN_V2_T, 8), (SWIN_V2_T, 32), (SWIN_B, 8),
    (SWIN_L, 1), (SWIN_T, 8), (SWIN_T, 32), (SWIN_B, 32), (SWIN_T, 64),
)  # fmt: skip


class Log:
    """Prints lines and appends them to a file."""

    def __init__(self, folder: Path, deadline_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "attention_half_sweep.txt"
        self.path.write_text("", encoding="utf-8")
        self.start = time.monotonic()
        self.deadline = self.start + deadline_s

    def line(self, text: str) -> None:
        text = f"[{time.monotonic() - self.start:5.1f}] {text}"
        print(text, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()


@dataclasses.dataclass(frozen=True)
class Case:
    """One way through an attention half: the stage's plan, and what its block's readers add.

    ``unjoined`` is what an fc2 cut along K has left in front of it, as in every block but the
    first of such a stage.
    """

    stage: StagePlan
    offsets: BlockOffsets
    unjoined: Unjoined | None = None

    def __str__(self) -> str:
        words = f"{self.stage.qkv}, {self.stage.attention}, {self.stage.proj}"
        pdl = " pdl" if self.stage.pdl else ""
        return words + pdl if self.stage.attention == "triton" else f"{self.tiles}{pdl}"

    @property
    def tiles(self) -> str:
        config = self.stage.launch["attention"]
        return f"{type(config).__name__.removesuffix('Config')}{dataclasses.astuple(config)}"


class Model:
    """A model on the card with its packed weights."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.model = build(name).to(device)
        self.config = self.model.config
        self.weights = prepare(self.model, device, torch.float16)
        self.forward = Forward(self.config, self.weights, HALF)
        self.known: set = set()
        self._partials: dict[tuple[int, int, int], torch.Tensor] = {}

    def plan(self, batch: int, table: FusedAttention) -> ModelPlan:
        return make_plan(
            self.config, batch, self.config.image_size, self.device, HALF, fused_attention=table
        )

    def case(self, half: Half, form: FusedRange | None) -> Case:
        """The plan of a half, today's without a form."""
        key = (self.config.version, half.channels)
        plan = self.plan(half.batch, {} if form is None else {key: (form,)})
        bound = bind(plan, self.weights, HALF)
        stage = plan.stages[half.stage]
        return Case(stage, bound.offsets[half.stage][1], self.unjoined(half, stage))

    def unjoined(self, half: Half, stage: StagePlan) -> Unjoined | None:
        """Sums like those of fc2 cut along K, where the stage has it and joins them here (V1)."""
        if stage.mlp != "split-k" or self.config.version == 2:
            return None
        tiles = stage.launch["fc2"]
        assert isinstance(tiles, SplitKConfig)
        key = half.stage, half.batch, tiles.splits
        if key not in self._partials:
            generator = torch.Generator().manual_seed(half.stage)
            shape = (half.batch, *self.config.map_size(half.stage), half.channels)
            partials = 0.3 * torch.randn(tiles.splits, *shape, generator=generator)
            self._partials[key] = partials.to(self.device)
        return Unjoined(self._partials[key], self.block(half).fc2.bias)

    def compile_today(self, halves: list[Half]) -> None:
        """Kernels of the separate launches, in threads; of whole models those of every layer."""
        for batch in dict.fromkeys(half.batch for half in halves):
            stages = {half.stage for half in halves if half.batch == batch}
            bound = bind(self.plan(batch, {}), self.weights, HALF)
            images = self.images(batch).half()
            calls = kernel_calls(self.forward, bound, images, self.known)
            if (self.name, batch) not in WHOLE_MODELS:
                layers = ("norm", "qkv", "attention", "proj")
                calls = [c for c in calls if c.stage in stages and c.layer in layers]
            compile_calls(calls, self.device)

    def images(self, batch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(batch)
        size = self.config.image_size
        return torch.randn(batch, self.config.in_channels, *size, generator=generator).to(
            self.device
        )

    def block(self, half: Half) -> PreparedBlock:
        return self.weights.stages[half.stage][1]

    def copies(self, half: Half) -> list[PreparedBlock]:
        """Blocks of equal weights at different addresses, as many as a chain reads cold."""
        block = self.block(half)
        count = CHAIN if half.batch <= 8 else 1
        count = max(1, min(count, CHAIN_BYTES // (8 * half.channels**2)))

        def clone(linear: Affine) -> Affine:
            return dataclasses.replace(linear, weight=linear.weight.clone())

        return [block] + [
            dataclasses.replace(
                block, qkv=clone(block.qkv), proj=clone(block.proj),  # type: ignore[arg-type]
                tables={key: table.clone() for key, table in block.tables.items()},
            )
            for _ in range(count - 1)
        ]  # fmt: skip

    def stream(self, half: Half) -> torch.Tensor:
        """Distinct rows with a mean, ``[B, H, W, C]``."""
        generator = torch.Generator().manual_seed(half.stage)
        shape = (half.batch, *self.config.map_size(half.stage), half.channels)
        x = 1.5 * torch.randn(*shape, generator=generator) + 0.5
        return x.half().to(self.device)


def reference(
    model: Model, half: Half, case: Case, x: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The half in plain PyTorch, fp64 or eager half precision."""
    block, stage, C = model.block(half), case.stage, half.channels
    qkv, proj, norm = block.qkv, block.proj, block.norm1
    table = torch.float64 if dtype == torch.float64 else torch.float32

    def vector(v: torch.Tensor | None) -> torch.Tensor | None:
        return None if v is None else v.to(table)

    assert x.shape[3] == C
    x = x.to(dtype)
    if case.unjoined is not None:
        joined = case.unjoined.partials.to(table).sum(0)
        if case.unjoined.bias is not None:
            joined = joined + case.unjoined.bias.to(table)
        x = (x.to(table) + joined).to(dtype)
    return ops.attention_half(
        x, qkv.weight.to(dtype), vector(qkv.bias), num_heads=stage.num_heads,
        window_size=stage.window_size,
        shift_size=stage.shift_size if block.shifted else (0, 0), bias=vector(block.bias),
        pad_qkv=None if block.pad_qkv is None else block.pad_qkv.to(dtype),
        scale=None if norm is not None else block.scale, logit_scale=vector(block.logit_scale),
        norm_first=norm is None, offset=vector(case.offsets.norm1),
        proj_weight=proj.weight.to(dtype), proj_bias=vector(proj.bias),
        norm_weight=None if norm is None else vector(norm.weight),
        norm_bias=None if norm is None else vector(norm.bias), impl="reference",
    )  # fmt: skip


def check(model: Model, half: Half, case: Case, x: torch.Tensor) -> str:
    """What is wrong with a way, "" for nothing: the gate, and three runs bitwise."""
    first: torch.Tensor | None = None
    for _ in range(3):
        stream = x.clone()
        with PoisonEmpty():
            model.forward.attention_half(
                stream, model.block(half), case.stage, case.offsets, case.unjoined
            )
        if first is None:
            first = stream
        elif not torch.equal(first, stream):
            return "results differ from run to run"
    assert first is not None
    if not bool(torch.isfinite(first).all()):
        return "not finite"
    pending = case.offsets.norm2  # what the stream lacks until its next reader
    found = first.float() if pending is None else first.float() + pending
    oracle = reference(model, half, case, x, torch.float64)
    eager = reference(model, half, case, x, torch.float16)
    gate = compare_to_oracle(found, eager, oracle, torch.float16)
    if not gate.passed:
        return (
            f"max error {gate.max_error:.3g} (bound {gate.max_bound:.3g}), "
            f"rms {gate.rms_error:.3g} ({gate.rms_bound:.3g})"
        )
    return ""


def latency_us(
    model: Model, case: Case, x: torch.Tensor, blocks: list[PreparedBlock], flush: torch.Tensor
) -> float:
    """Median microseconds of one half in a chain that starts with a cold L2."""
    stream = x.clone()

    def run() -> None:
        for index in range(CHAIN):
            block = blocks[index % len(blocks)]
            model.forward.attention_half(stream, block, case.stage, case.offsets, case.unjoined)

    return graph_us(run, flush) / CHAIN


def sweep(log: Log, model: Model, half: Half, pool: CompilePool, best: dict) -> None:
    """Check and time one half; the best form goes to ``best`` where it beats today's."""
    flush = torch.empty(FLUSH_BYTES // 4, device=model.device)
    today = model.case(half, None)
    x, blocks = model.stream(half), model.copies(half)
    if why := check(model, half, today, x):
        log.line(f"{half}: today's launches are WRONG: {why}")
    us = latency_us(model, today, x, blocks, flush)
    log.line(f"{half}: today {us:.2f} us ({today})")
    times: dict[FusedRange, float] = {}
    for form, config in candidates(half):
        chosen = FusedRange(form, config=config)
        case = model.case(half, chosen)
        left = log.left_s - RESERVE_S
        if left < 0:
            log.line(f"{half}: out of time")
            break
        why = pool.error(job(model, half, case), left) or check(model, half, case, x)
        if why:
            log.line(f"    REJECTED {case}: {why}")
            continue
        times[chosen] = latency_us(model, case, x, blocks, flush)
        log.line(f"    {times[chosen]:8.2f} us  {us / times[chosen]:.2f}x  {case}")
    if times:
        fastest = min(times, key=lambda form: times[form])
        if times[fastest] < us:
            best[half] = fastest
            log.line(f"{half}: BEST {times[fastest]:.2f} against {us:.2f} us: {fastest}")
        else:
            log.line(f"{half}: today's stays, {us:.2f} against {times[fastest]:.2f} us")


def job(model: Model, half: Half, case: Case) -> Job:
    """The binary of a fused way."""
    block, stage = model.block(half), case.stage
    table = block.bias_table(stage.shift_size if block.shifted else (0, 0), HALF.dtype)
    config = stage.launch["attention"]
    form = "window" if stage.proj == "inside" else "heads"
    return Job(
        half.model, half.stage, form, config, stage.pdl,  # type: ignore[arg-type]
        case.offsets.norm1 is not None, table.dtype == torch.float16,
        form == "heads" and case.unjoined is not None,
    )  # fmt: skip


def whole_model(log: Log, model: Model, batch: int, best: dict[Half, FusedRange]) -> None:
    """A whole forward in a graph: today's plan, and with the best form of every stage."""
    table: FusedAttention = {
        (model.config.version, half.channels): (form,)
        for half, form in best.items()
        if half.model == model.name and half.batch == batch
    }
    images = model.images(batch)
    with torch.no_grad():
        truth = model.model(images)
    images = images.half()
    plans = {"today": model.plan(batch, {}), "fused": model.plan(batch, table)}
    for label, plan in plans.items():
        bound = bind(plan, model.weights, HALF)
        compile_calls(kernel_calls(model.forward, bound, images, model.known), model.device)
        outputs: list[torch.Tensor] = []

        def run(bound: BoundPlan = bound, outputs: list[torch.Tensor] = outputs) -> None:
            outputs[:] = [model.forward.logits(images, bound)]

        ms = graph_us(run, None) / 1e3
        error = (outputs[0].float() - truth).abs().max().item() / truth.abs().max().item()
        words = [s.attention for s in bound.plan.stages]
        log.line(
            f"{model.name} b{batch} {label}: {ms:.4f} ms, relative error {error:.1e}"
            f"{'' if error < 0.02 else ' WRONG'}, attention {words}"
        )


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.attention_half")
    parser.add_argument("--deadline-s", type=float, default=90.0)
    parser.add_argument("--out", type=Path, default=Path("attention_half"))
    parser.add_argument("--workers", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda")
    log = Log(options.out, options.deadline_s)
    pool = CompilePool(options.workers)
    best: dict[Half, FusedRange] = {}
    try:
        with torch.no_grad():
            models: dict[str, Model] = {}
            for half in HALVES:
                if half.model not in models:
                    models[half.model] = Model(half.model, device)
                for form, config in candidates(half):
                    model = models[half.model]
                    case = model.case(half, FusedRange(form, config=config))
                    pool.start(job(model, half, case))
            log.line(f"{len(HALVES)} halves, {len(pool)} kernels to compile")
            for name, model in models.items():
                model.compile_today([half for half in HALVES if half.model == name])
            log.line("today's kernels compiled")
            for half in HALVES:
                if log.left_s < RESERVE_S:
                    log.line(f"{half}: skipped, out of time")
                    continue
                try:
                    sweep(log, models[half.model], half, pool, best)
                except Exception as error:
                    log.line(f"{half}: FAILED {describe(error).message}")
            for name, batch in WHOLE_MODELS:
                if log.left_s < 0:
                    log.line(f"{name} b{batch}: skipped, out of time")
                    continue
                try:
                    whole_model(log, models[name], batch, best)
                except Exception as error:
                    log.line(f"{name} b{batch}: FAILED {describe(error).message}")
    finally:
        pool.close()
    log.line("done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
