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
import time
from pathlib import Path

import torch

from fastswin.bench.attention_half_cases import CHAIN, HALF, Case, Model, job
from fastswin.bench.attention_half_check import check
from fastswin.bench.attention_half_problems import (
    HALVES,
    WHOLE_MODELS,
    Half,
    Job,
    candidates,
    compile_job,
)
from fastswin.bench.cold_graphs import graph_us, make_flush
from fastswin.bench.compile_ahead import CompilePool
from fastswin.bench.failures import describe
from fastswin.engine.bind import BoundPlan, bind
from fastswin.engine.fused_attention import FusedAttention, FusedRange
from fastswin.engine.prepared import PreparedBlock
from fastswin.engine.warmup import compile_calls, kernel_calls

#: Seconds kept for whole models at the end.
RESERVE_S = 10.0


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


def sweep(log: Log, model: Model, half: Half, pool: CompilePool[Job], best: dict) -> None:
    """Check and time one half; the best form goes to ``best`` where it beats today's."""
    flush = make_flush(model.device)
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
    pool = CompilePool(options.workers, compile_job)
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
