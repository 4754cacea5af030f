"""Half blocks in half precision and in 8 bits: which layers 8 bits make faster on this card.

    python -m fastswin.bench.quant_halves --models swin_tiny_patch4_window7_224 --batches 1,32 \
        --deadline-s 120 --out benchmarks/results

Per stage, in turn and in CUDA graphs, in us a block: the attention half (wide; qkv in 8 bits, with
attention's input in 8 bits or wide; proj too), the MLP half (wide; 8 bits in three kernels, or in
one) and patch merging; fp8 by our GEMM and by the library (quant_forms.py). What surrounds a
product is in its time, which is how a mix has to be judged (engine/quantized/mix.py). All blocks of
a stage run in a row, so that weights come from memory where they would in the model.

Written as it goes: ``<out>/<card>/quant_halves.json``, a list of
``{"case", "format", "batch", "stage", "channels", "rows", "half", "latency_us": {form: us}}``, and
beside it ``speed-<case>-<format>-b<batch>.json``, what ``fastswin calibrate --auto --speed`` reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from fastswin.bench.calibration import calibration_for
from fastswin.bench.captured import captured_candidate
from fastswin.bench.failures import Failure, describe, release_memory
from fastswin.bench.problems import DEFAULT_BATCHES, SUITES, Problem, parse_batches, parse_names
from fastswin.bench.quant_forms import HALVES, Form
from fastswin.bench.record import DEFAULT_ROOT, card_slug, device_name
from fastswin.bench.source import Source, SourceCache
from fastswin.bench.suites import choose_device, current_device
from fastswin.bench.timing import make_clock, measure
from fastswin.data.atomic import write_text
from fastswin.engine import Engine
from fastswin.engine.bind import BlockOffsets, bind
from fastswin.engine.precision import QUANTIZED
from fastswin.engine.quantized.formats import StageFormats
from fastswin.engine.quantized.forward import QuantizedForward
from fastswin.engine.quantized.library import FP8
from fastswin.engine.quantized.plan import why_not_one_kernel
from fastswin.engine.quantized.prepare import place_forms
from fastswin.engine.stage_plan import ModelPlan, StagePlan
from fastswin.engine.warmup import compile_calls, kernel_calls
from fastswin.models import list_models
from fastswin.ops.library_linear import library_linear_blocker
from fastswin.ops.quantized_mlp.config import quantized_mlp_blocker

Row = dict[str, Any]
Times = dict[str, float]
Progress = Callable[[str], None]

#: Runs of a stage in one CUDA graph: launched from the host, a block takes 200 us at any size.
CAPTURED_CALLS = 2

#: Discarded replays of a form: half a second of them for each of 50 forms is most of a run.
WARM_REPLAYS = 5

NO_OFFSETS = BlockOffsets(None, None)


class HalfTimer:
    """Times the halves of one calibrated model at one batch.

    Args:
        source: the model.
        problem: its dtype is the quantised precision.
        device: where.
        seconds: of samples for each form.
    """

    def __init__(
        self, source: Source, problem: Problem, device: torch.device, seconds: float
    ) -> None:
        self.problem, self.device, self.seconds = problem, device, seconds
        precision: Any = problem.dtype
        self.calibration = calibration_for(source, problem, device)
        self.engine = Engine(
            source.engine_source, precision, device=device, cuda_graphs=False, mix="scheme",
            calibration=self.calibration,
        )  # fmt: skip
        size = problem.swin_config.image_size
        self.plan: ModelPlan = self.engine.report(problem.batch, size).plan
        self.forward = cast(QuantizedForward, self.engine._forward)

    def compile(self) -> int:
        """Kernels of every form, side by side; returns how many distinct calls there were."""
        config = self.problem.swin_config
        images = torch.empty(
            self.problem.batch, config.in_channels, *config.image_size, device=self.device,
            dtype=self.engine.dtype,
        )  # fmt: skip
        known: set = set()
        calls = []
        for form in {form: None for half in HALVES for form in self.forms(half).values()}:
            stages = tuple(self.stage(stage, form) for stage in self.plan.stages)
            plan = dataclasses.replace(self.plan, stages=stages)
            place_forms(self.forward.weights, [s.formats for s in stages if s.formats])
            bound = bind(plan, self.forward.weights, self.forward.precision)
            calls += kernel_calls(self.forward, bound, images, known)
        compile_calls(calls, self.device)
        return len(calls)

    def forms(self, half: str) -> dict[str, Form]:
        """What is timed of a half, and by the CUDA library where that is an alternative."""
        found = dict(HALVES[half])
        if self.problem.dtype == "fp8" and library_linear_blocker(self.device, FP8) is None:
            for name, form in HALVES[half].items():
                by_library = form.in_library()
                found |= {f"{name}, {which}": same for which, same in by_library.items()}
        return found

    def stage(self, stage: StagePlan, form: Form) -> StagePlan:
        """A stage with the layers of a form in 8 bits, the others wide."""
        assert stage.formats is not None
        weights = self.forward.weights
        blocks = tuple(
            form.block(formats, weights.stages[stage.stage][number], self.fits_one_kernel(stage))
            for number, formats in enumerate(stage.formats.blocks)
        )
        reduction = stage.formats.reduction
        if reduction is not None:
            merging = weights.mergings[stage.stage].reduction
            reduction = form.layer("reduction", reduction, merging)
        return dataclasses.replace(stage, formats=StageFormats(blocks, reduction))

    def fits_one_kernel(self, stage: StagePlan) -> bool:
        """Whether one 8-bit kernel can hold the MLP of every block."""
        config = self.problem.swin_config
        ranges = self.calibration.layers
        at = [f"layers.{stage.stage}.blocks.{block}.mlp" for block in range(stage.depth)]
        return (
            stage.qkv != "reference"
            and quantized_mlp_blocker(stage.channels, config.hidden_dim(stage.stage)) is None
            and not any(
                why_not_one_kernel(config, ranges[f"{name}.fc1"], ranges[f"{name}.fc2"])
                for name in at
            )
        )

    def run(self, progress: Progress = lambda line: None) -> Iterator[Row]:
        """One row for every stage and half, as it is timed.

        Args:
            progress: receives what is done before the first row.
        """
        with torch.no_grad(), self.engine.own_numerics():
            progress(f"{self.problem}: {self.compile()} calls compiled")
            for stage in self.plan.stages:
                for half in HALVES:
                    if half != "merge" or stage.merge is not None:
                        yield self.row(stage, half)

    def row(self, stage: StagePlan, half: str) -> Row:
        H, W = stage.map_size
        generator = torch.Generator().manual_seed(stage.stage)
        shape = (self.problem.batch, H, W, stage.channels)
        x = torch.randn(shape, generator=generator).to(self.device, self.engine.dtype)
        wanted = self.forms(half)
        if not self.fits_one_kernel(stage):
            wanted = {name: form for name, form in wanted.items() if not form.one_kernel}
        calls = CAPTURED_CALLS if self.device.type == "cuda" else 0
        candidates = [
            captured_candidate(
                name, functools.partial(self.call, x, self.stage(stage, form), half), calls
            )
            for name, form in wanted.items()
        ]
        blocks = max(1, calls) * (1 if half == "merge" else stage.depth)
        timings = measure(
            candidates, make_clock(self.device), seconds=self.seconds, warmup=WARM_REPLAYS
        )
        return {
            "case": self.problem.model,
            "format": self.problem.dtype,
            "batch": self.problem.batch,
            "stage": stage.stage,
            "channels": stage.channels,
            "rows": self.problem.batch * H * W,
            "half": half,
            "words": {name: getattr(stage, name) for name in ("qkv", "proj", "mlp", "merge")},
            "latency_us": {
                form: t.message if isinstance(t, Failure) else round(1e3 * t.median_ms / blocks, 2)
                for form, t in timings.items()
            },
        }

    def call(self, x: torch.Tensor, stage: StagePlan, half: str) -> Callable[[], object]:
        """One half of every block over a stream of its own, which grows by bounded branches."""
        stream = x.clone()
        if half == "merge":
            return lambda: self.forward.merge(stream, stage.stage, stage, None)
        run = self.forward.attention_half if half == "attention" else self.forward.mlp_half
        blocks = self.forward.weights.stages[stage.stage]

        def call() -> None:
            for block in blocks:
                run(stream, block, stage, NO_OFFSETS)

        return call


def speed_table(rows: Sequence[Row], plan: ModelPlan, card: str) -> dict[str, Any]:
    """What ``quant.SpeedTable`` reads: us of every layer, wide and in 8 bits.

    A half's saving is split evenly over the layers that its form adds; of forms with the same
    layers the fastest counts.
    """
    layers: dict[str, list[float]] = {}
    for row in rows:
        at, times = f"layers.{row['stage']}", row["latency_us"]
        fastest: dict[tuple[str, ...], float] = {}
        for name, form in HALVES[row["half"]].items():
            if isinstance(us := times.get(name), float):
                fastest[form.layers] = min(us, fastest.get(form.layers, us))
        previous: tuple[str, ...] = ()
        for kinds, us in list(fastest.items())[1:]:
            added = [kind for kind in kinds if kind not in previous]
            for kind in added:
                pair = [fastest[previous] / len(added), us / len(added)]
                if kind == "reduction":
                    layers[f"{at}.downsample.reduction"] = pair
                    continue
                module = "mlp" if kind in ("fc1", "fc2") else "attn"
                for block in range(plan.stages[row["stage"]].depth):
                    layers[f"{at}.blocks.{block}.{module}.{kind}"] = pair
            previous = kinds
    return {"card": card, "batch": rows[0]["batch"], "layers": layers}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser("python -m fastswin.bench.quant_halves", description=__doc__)
    parser.add_argument("--models", default=",".join(SUITES["quant"]))
    parser.add_argument("--batches", default=",".join(map(str, DEFAULT_BATCHES)))
    parser.add_argument("--formats", default="int8,fp8")
    parser.add_argument("--device")
    parser.add_argument("--seconds", type=float, default=0.05, help="samples of each form")
    parser.add_argument("--deadline-s", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT)
    options = parser.parse_args(arguments)
    try:
        models = parse_names(options.models, list_models(), "models")
        formats = parse_names(options.formats, list(QUANTIZED), "formats")
        batches = parse_batches(options.batches)
        device, _ = choose_device(options.device)
    except (ValueError, RuntimeError) as error:
        print(f"fastswin: {error}", file=sys.stderr)
        return 2
    problems = [Problem(m, f, b) for m in models for f in formats for b in batches]
    return run(problems, device, options.out, options.seconds, options.deadline_s)


def run(
    problems: Sequence[Problem], device: torch.device, out: Path, seconds: float, deadline_s: float
) -> int:
    """Time all problems; 0 where every one was timed."""
    start, code = time.monotonic(), 0
    card = device_name(device)
    folder = out / card_slug(card)
    folder.mkdir(parents=True, exist_ok=True)
    sources = SourceCache()
    rows: list[Row] = []

    def say(line: str) -> None:
        print(f"[{time.monotonic() - start:4.0f} s] {line}", flush=True)

    for problem in problems:
        if time.monotonic() - start > deadline_s:
            say(f"{problem}: skipped, deadline of {deadline_s:g} s passed")
            code = 1
            continue
        found: list[Row] = []
        try:
            with current_device(device):
                timer = HalfTimer(sources.get(problem), problem, device, seconds)
                say(f"{problem}: calibrated and packed")
                for row in timer.run(say):
                    found.append(row)
                    text = json.dumps(rows + found, indent=1) + "\n"
                    write_text(folder / "quant_halves.json", text)
                    times = ", ".join(f"{form} {us}" for form, us in row["latency_us"].items())
                    say(
                        f"{problem} stage {row['stage']} ({row['rows']} x {row['channels']}) "
                        f"{row['half']}: {times} us"
                    )
                table = speed_table(found, timer.plan, card)
        except Exception as error:
            say(f"{problem}: {describe(error).message}")
            code = 1
            continue
        finally:
            rows += found
        name = f"speed-{problem.model}-{problem.dtype}-b{problem.batch}.json"
        write_text(folder / name, json.dumps(table, indent=1) + "\n")
        del timer
        release_memory()
    return code


if __name__ == "__main__":
    sys.exit(main())
