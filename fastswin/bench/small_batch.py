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
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from fastswin import ops
from fastswin.bench.cold_graphs import graph_us, make_flush
from fastswin.bench.compile_ahead import CompilePool
from fastswin.bench.failures import describe
from fastswin.bench.small_batch_chains import chain_us, check, copies
from fastswin.bench.small_batch_forms import forms
from fastswin.bench.small_batch_layers import EPS, Form, Layer, Tensors, compile_form
from fastswin.bench.small_batch_models import Model
from fastswin.bench.small_batch_report import Report

SWIN_T = "swin_tiny_patch4_window7_224"
SWIN_B = "swin_base_patch4_window7_224"

#: Launches of the chains of part (a).
LAUNCHES = 60

#: New candidates of each layer: of Swin-T at batch 1, Swin-B at 1, Swin-T at 8.
MOST = (13, 6, 6)


def norms(x: torch.Tensor, buffers: list[torch.Tensor], pdl: bool) -> None:
    """LayerNorms one after another, each on the result of the one before."""
    for index in range(LAUNCHES):
        x = ops.layer_norm(x, eps=EPS, out=buffers[index % 2], impl="triton", pdl=pdl)


def chain_reference(x: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` LayerNorms one after another, in PyTorch."""
    for _ in range(count):
        x = F.layer_norm(x.float(), (x.shape[-1],), eps=EPS).to(x.dtype)
    return x


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
    pool: CompilePool[tuple[Layer, Form]],
    wanted: list[Layer],
    most: int,
    device: torch.device,
    reserve_s: float,
) -> dict[Layer, tuple[float, Form]]:
    """Part (b): the best form of every layer and its microseconds."""
    best: dict[Layer, tuple[float, Form]] = {}
    flush = make_flush(device)
    for layer in wanted:
        times: dict[Form, float] = {}
        tensors = Tensors(layer, device, copies(layer))
        for form in forms(layer, most):
            left = report.left_s - reserve_s
            if left < 0:
                break
            try:
                why = pool.error((layer, form), left) or check(tensors, form)
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
    pool = CompilePool(options.workers, compile_form)
    groups = [stage_layers(SWIN_T, 1), stage_layers(SWIN_B, 1), stage_layers(SWIN_T, 8)]
    for group, most in zip(groups, MOST, strict=True):
        for layer in group:
            for form in forms(layer, most):
                pool.start((layer, form))
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
