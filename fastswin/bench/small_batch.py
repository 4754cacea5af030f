"""Does programmatic dependent launch pay, and which forms do few rows want?

    PYTHONPATH=. python3 -m fastswin.bench.small_batch --deadline-s 100 --out DIR

Three parts, printed as they come and written to DIR/small_batch.json:

(a) chains of LayerNorms and GEMMs in one CUDA graph, without and with programmatic launch
(b) the layers of Swin-T at batch 1 (then Swin-B at 1, Swin-T at 8): forms x tiles, checked first
(c) whole models at batches 1 and 8: today's forms and the small ones, each without and with
    programmatic launch, then the small ones with the best tiles of (b)

Compiles in processes of its own while it measures. Parts run in the order a, c, b, c with tiles, so
that a short deadline still says the most important.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastswin import ops
from fastswin.bench.failures import describe
from fastswin.bench.small_batch_layers import (
    EPS,
    FLUSH_BYTES,
    CompilePool,
    Form,
    Layer,
    Tensors,
    chain_reference,
    chain_us,
    check,
    copies,
    forms,
    graph_us,
)
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.forward import Forward
from fastswin.engine.plan import ModelPlan, make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.warmup import compile_calls, kernel_calls
from fastswin.models import create_model
from fastswin.models.swin import SwinTransformer

SWIN_T = "swin_tiny_patch4_window7_224"
SWIN_B = "swin_base_patch4_window7_224"

#: Launches of the chains of part (a).
LAUNCHES = 60

#: New candidates of each layer: of Swin-T at batch 1, Swin-B at 1, Swin-T at 8.
MOST = (13, 6, 6)


class Report:
    """Prints lines and keeps records."""

    def __init__(self, folder: Path, deadline_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "small_batch.json"
        self.start = time.monotonic()
        self.deadline = self.start + deadline_s
        self.records: list[dict[str, Any]] = []

    def line(self, text: str, **record: Any) -> None:
        print(f"[{time.monotonic() - self.start:5.1f}] {text}", flush=True)
        if record:
            self.records.append(record)
            self.path.write_text(json.dumps(self.records, indent=0), encoding="utf-8")

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()


def norms(x: torch.Tensor, buffers: list[torch.Tensor], pdl: bool) -> None:
    """LayerNorms one after another, each on the result of the one before."""
    for index in range(LAUNCHES):
        x = ops.layer_norm(x, eps=EPS, out=buffers[index % 2], impl="triton", pdl=pdl)


def chains(report: Report, device: torch.device) -> None:
    """Part (a)."""
    for M, C in ((196, 384), (3136, 96)):
        x = torch.randn(M, C, device=device).half()
        times, results = {}, {}
        for pdl in (False, True):
            y = [torch.empty_like(x) for _ in range(2)]
            times[pdl] = graph_us(partial(norms, x, y, pdl), None) / LAUNCHES
            results[pdl] = y[(LAUNCHES - 1) % 2]
        same = torch.equal(results[False], results[True])
        off = (results[True].float() - chain_reference(x, LAUNCHES).float()).abs().max().item()
        report.line(
            f"(a) {LAUNCHES} LayerNorms [{M}, {C}]: {times[False]:.2f} us a launch plain, "
            f"{times[True]:.2f} programmatic; bits {'equal' if same else 'DIFFER: WRONG'}, off by "
            f"{off:.4f}{'' if off < 0.05 else ' WRONG'}",
            part="a", rows=M, channels=C, plain_us=times[False], pdl_us=times[True], same=same,
        )  # fmt: skip
        if times[True] > 0.95 * times[False]:
            report.line("(a) WARNING: programmatic launch brings nothing in this graph")


def build(name: str) -> SwinTransformer:
    """A seeded model whose biases and norms are not those of initialisation."""
    torch.manual_seed(0)
    model = create_model(name, pretrained=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def with_pdl(plan: ModelPlan, pdl: bool) -> ModelPlan:
    """The same forms, launched plainly or programmatically."""
    stages = tuple(dataclasses.replace(stage, pdl=pdl) for stage in plan.stages)
    return dataclasses.replace(plan, stages=stages, pdl=pdl)


def with_tiles(plan: ModelPlan, best: dict[Layer, tuple[float, Form]], batch: int) -> ModelPlan:
    """The small forms with measured tiles, where those of (b) are of the same form."""
    stages = []
    for stage in plan.stages:
        launch = dict(stage.launch)
        for name in ("qkv", "proj", "fc1", "fc2", "merge"):
            found = best.get(Layer(name, batch, stage.map_size[0], stage.channels))
            if found is None:
                continue
            kind, config = found[1].kind, found[1].config
            fits = {"proj": "fused", "fc1": "fused" if stage.mlp == "split" else "tiled"}
            if name == "qkv" and kind in ("fused", "tiled"):
                launch[name], stage = config, dataclasses.replace(stage, qkv=kind)
            elif fits.get(name) == kind:
                launch[name] = config
        stages.append(dataclasses.replace(stage, launch=launch))
    return dataclasses.replace(plan, stages=tuple(stages))


class Model:
    """A model on a device, its fp32 logits, and plans timed in graphs."""

    def __init__(self, name: str, device: torch.device, report: Report) -> None:
        self.name, self.device, self.report = name, device, report
        self.precision = PRECISIONS["fp16"]
        self.model = build(name).to(device)
        self.weights = prepare(self.model, device, torch.float16)
        self.forward = Forward(self.model.config, self.weights, self.precision)
        self.known: set = set()

    def compare(self, batch: int, best: dict[Layer, tuple[float, Form]] | None = None) -> None:
        """Part (c) at one batch."""
        config = self.model.config
        size = config.image_size
        images = torch.randn(batch, config.in_channels, *size, device=self.device)
        with torch.no_grad():
            truth = self.model(images)
        images = images.half()
        plans = {}
        if best is None:
            now = make_plan(config, batch, size, self.device, self.precision, pdl=False)
            small = make_plan(config, batch, size, self.device, self.precision, pdl=True)
            plans = {
                "today": now, "today + pdl": with_pdl(now, True),
                "small": with_pdl(small, False), "small + pdl": small,
                "small + head": dataclasses.replace(small, head="fused"),
            }  # fmt: skip
        else:
            small = make_plan(config, batch, size, self.device, self.precision, pdl=True)
            tuned = with_tiles(small, best, batch)
            plans = {"tuned, plain": with_pdl(tuned, False), "tuned + pdl": tuned}
        results: dict[str, torch.Tensor] = {}
        for label, plan in plans.items():
            try:
                results[label] = self._one(label, batch, plan, images, truth)
            except Exception as error:
                self.report.line(f"(c) {self.name} b{batch} {label}: FAILED {describe(error)}")
        for plain, ahead in (("today", "today + pdl"), ("small", "small + pdl")):
            both = [results[label] for label in (plain, ahead) if label in results]
            if len(both) == 2 and not torch.equal(*both):
                self.report.line(f"(c) b{batch} WRONG: {ahead} differs from {plain} in bits")

    def _one(
        self, label: str, batch: int, plan: ModelPlan, images: torch.Tensor, truth: torch.Tensor
    ) -> torch.Tensor:
        bound = bind(plan, self.weights, self.precision)
        with torch.no_grad():
            compile_calls(kernel_calls(self.forward, bound, images, self.known), self.device)
            outputs: list[torch.Tensor] = []

            def run() -> None:
                outputs[:] = [self.forward.logits(images, bound)]

            launches = sum(c.count for c in record_calls(self.forward, bound, images))
            ms = graph_us(run, None) / 1e3  # back to back: weights are evicted by the model itself
            logits = outputs[0].clone()
            cold_ms = graph_us(run, self.flush) / 1e3
        repeats = torch.equal(logits, outputs[0])
        error = (logits.float() - truth).abs().max().item() / truth.abs().max().item()
        bad = "" if repeats and error < 0.02 else " WRONG"
        self.report.line(
            f"(c) {self.name} b{batch} {label:13s} {ms:.4f} ms ({cold_ms:.4f} cold), "
            f"{launches} calls, relative error {error:.1e}{bad}",
            part="c", model=self.name, batch=batch, plan=label, ms=ms, cold_ms=cold_ms,
            error=error,
        )  # fmt: skip
        return logits

    @property
    def flush(self) -> torch.Tensor:
        return torch.empty(FLUSH_BYTES // 4, device=self.device)


def stage_layers(name: str, batch: int) -> list[Layer]:
    """Layers of a model at 224 pixels, the deepest stage first."""
    C, side, found = (96 if name == SWIN_T else 128), 56, []
    for stage in range(4):
        names = ["qkv", "proj", "fc1", "fc2"] + (["merge"] if stage < 3 else [])
        if batch == 1 or stage >= 2:
            found.append([Layer(n, batch, side, C) for n in names])
        C, side = 2 * C, side // 2
    order = [2, 3, 1, 0] if batch == 1 else [0, 1]
    return [layer for index in order for layer in found[index]]


def layers(
    report: Report,
    pool: CompilePool,
    wanted: list[Layer],
    most: int,
    device: torch.device,
    reserve_s: float,
) -> dict[Layer, tuple[float, Form]]:
    """Part (b): the best form of every layer and its microseconds."""
    best: dict[Layer, tuple[float, Form]] = {}
    flush = torch.empty(FLUSH_BYTES // 4, device=device)
    for layer in wanted:
        times: dict[Form, float] = {}
        tensors = Tensors(layer, device, copies(layer))
        for form in forms(layer, most):
            left = report.left_s - reserve_s
            if left < 0:
                break
            try:
                why = pool.error(layer, form, left) or check(tensors, form)
                if why is None:
                    times[form] = chain_us(tensors, form, flush)
            except Exception as error:
                why = describe(error).message
            if why is not None:
                report.line(f"(b) {layer}: {form}: REJECTED: {why}", part="b", rejected=str(form))
        if not times:
            continue
        ranked = sorted(times, key=lambda form: times[form])
        best[layer] = (times[ranked[0]], ranked[0])
        shown = ranked[:4] + [f for f in ranked[4:] if f.kind == "library" or not f.pdl]
        report.line(
            f"(b) {layer.name} b{layer.batch} {layer.shape}: "
            + "; ".join(f"{times[form]:.2f} {form}" for form in shown),
            part="b", layer=dataclasses.asdict(layer),
            times={str(form): round(us, 3) for form, us in times.items()},
        )  # fmt: skip
    return best


def main() -> int:
    """Run all parts; exit code 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.small_batch")
    parser.add_argument("--deadline-s", type=float, default=100.0)
    parser.add_argument("--out", type=Path, default=Path("small_batch"))
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    device = torch.device("cuda")
    report = Report(options.out, options.deadline_s)
    pool = CompilePool(options.workers)
    groups = [stage_layers(SWIN_T, 1), stage_layers(SWIN_B, 1), stage_layers(SWIN_T, 8)]
    for group, most in zip(groups, MOST, strict=True):
        for layer in group:
            for form in forms(layer, most):
                pool.start(layer, form)
    try:
        chains(report, device)
        tiny = Model(SWIN_T, device, report)
        tiny.compare(1)
        best = layers(report, pool, groups[0], MOST[0], device, reserve_s=20.0)
        tiny.compare(1, best)
        tiny.compare(8)
        for group, most in zip(groups[1:], MOST[1:], strict=True):
            best |= layers(report, pool, group, most, device, reserve_s=5.0)
        if report.left_s > 0:
            tiny.compare(8, best)
    finally:
        pool.close()
    wrong = [r for r in report.records if r.get("rejected")]
    report.line(f"done; {len(wrong)} candidates rejected")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
