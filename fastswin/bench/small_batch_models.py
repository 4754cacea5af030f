"""Whole models at small batches: plans with today's forms, the small ones and measured tiles."""

from __future__ import annotations

import dataclasses

import torch

from fastswin.bench.cold_graphs import graph_us, make_flush
from fastswin.bench.failures import describe
from fastswin.bench.small_batch_layers import Form, Layer
from fastswin.bench.small_batch_report import Report
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.forward import Forward
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.stage_plan import ModelPlan
from fastswin.engine.warmup import compile_calls, kernel_calls
from fastswin.models import create_model
from fastswin.models.swin import SwinTransformer


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
            cold_ms = graph_us(run, make_flush(self.device)) / 1e3
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
