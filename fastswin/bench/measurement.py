"""Measure one problem: references, build, check, time side by side, records."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from fastswin.bench.contenders import Contender, build_contender
from fastswin.bench.correctness import Check, Gate, check, make_gate
from fastswin.bench.failures import Failure, Status, describe, release_memory
from fastswin.bench.memory import peak_mib
from fastswin.bench.precision import restore, tf32_state
from fastswin.bench.problems import Problem, seeded_images
from fastswin.bench.record import Record, RunInfo, stamp
from fastswin.bench.roofline import Ceilings, roofline_ms, swin_flops
from fastswin.bench.source import Source
from fastswin.bench.timing import Candidate, Timing, make_clock, measure

#: Entered while a problem has the device to itself.
Exclusive = Callable[[], contextlib.AbstractContextManager[object]]

#: Distinct image batches that the timed calls rotate through.
INPUT_SETS = 4


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one contender on one problem.

    Attributes:
        problem, variant: what was tried.
        status: "ok", or why there is no number.
        message: one line; empty where ok.
        record: the stored record where ok.
    """

    problem: Problem
    variant: str
    status: Status
    message: str = ""
    record: Record | None = None


class Measurement:
    """One problem from references to records."""

    def __init__(
        self,
        problem: Problem,
        source: Source,
        device: torch.device,
        ceilings: Ceilings,
        info: RunInfo,
    ) -> None:
        self.problem, self.source, self.device = problem, source, device
        self.ceilings, self.info = ceilings, info

    def run(
        self,
        names: Sequence[str],
        seconds: float,
        warmup: int | None,
        iterations: int | None,
        cold_build_s: Mapping[tuple[Problem, str], float],
        progress: Callable[[str], None],
        exclusive: Exclusive = contextlib.nullcontext,
    ) -> list[Outcome]:
        """Build and check all contenders, then time them inside ``exclusive()``."""
        problem = self.problem
        release_memory()
        gate = make_gate(self.source, problem, self.device)
        images = [
            seeded_images(problem, problem.batch, self.device, seed) for seed in range(INPUT_SETS)
        ]
        checked: dict[str, tuple[Contender, Check]] = {}
        peaks: dict[str, float | None] = {}
        failures: dict[str, Failure] = {}
        for name in names:
            progress(f"{problem} {name}: building")
            result = self.build_and_check(name, gate, images[0])
            if isinstance(result, Failure):
                failures[name] = result
            else:
                checked[name] = result
                peaks[name] = own_peak_mib(result[0], images[0])
        candidates = [
            make_candidate(contender, images, peaks[name])
            for name, (contender, _) in checked.items()
        ]
        with exclusive():
            timings = measure(
                candidates,
                make_clock(self.device),
                seconds=seconds,
                warmup=warmup,
                iterations=iterations,
            )
        outcomes = []
        for name in names:
            timing = failures.get(name) or timings[name]
            if isinstance(timing, Failure):
                outcomes.append(Outcome(problem, name, timing.status, timing.message))
                continue
            contender, answer = checked[name]
            record = self.record(contender, answer, gate, timing)
            if (problem, name) in cold_build_s:
                record["cold_build_s"] = cold_build_s[problem, name]
            outcomes.append(Outcome(problem, name, "ok", record=stamp(self.info, record)))
        return outcomes

    def build_and_check(
        self, name: str, gate: Gate, images: torch.Tensor
    ) -> tuple[Contender, Check] | Failure:
        """A contender that answers rightly, or what is wrong with it."""
        flags = tf32_state()
        try:
            contender = build_contender(name, self.source, self.problem, images)
            answer = check(contender, gate, self.problem.batch)
        except Exception as error:
            return describe(error)
        finally:
            changed = tf32_state() != flags
            restore(flags)
        if changed:
            return Failure("red", "it changed PyTorch's global TF32 flags")
        return Failure("red", answer.failure) if answer.failure else (contender, answer)

    def record(self, contender: Contender, answer: Check, gate: Gate, timing: Timing) -> Record:
        """The record of a timed contender, not stamped yet."""
        problem = self.problem
        config = problem.swin_config
        return {
            "case": problem.model,
            "dtype": problem.dtype,
            "batch": problem.batch,
            "variant": contender.variant,
            "median_ms": timing.median_ms,
            "p20_ms": timing.p20_ms,
            "p80_ms": timing.p80_ms,
            "p90_ms": timing.p90_ms,
            "peak_mib": timing.peak_mib,
            "roofline_ms": roofline_ms(
                config,
                problem.batch,
                problem.dtype,
                self.ceilings,
                problem.image_dtype(self.device),
            ),
            "max_abs_err": answer.max_abs_err,
            "graph": contender.graph or timing.graph,
            "tf32": contender.tf32,
            "build_s": contender.build_s,
            "count": timing.count,
            "calls_per_sample": timing.calls_per_sample,
            "images_per_s": problem.batch / timing.median_ms * 1e3,
            "tflops": swin_flops(config, problem.batch) / timing.median_ms * 1e-9,
            "gemm_tflops": self.ceilings.gemm_tflops[problem.dtype],
            "rel_rms_err": answer.rel_rms_err,
            "top1_agreement": answer.top1,
            "top1_decided": answer.decided,
            "gate_max_abs": gate.max_abs,
            "gate_rel_rms": gate.rel_rms,
            "framework": self.source.framework,
            "weights": "checkpoint" if problem.checkpoint else "seeded random",
            **contender.notes,
        }


def own_peak_mib(contender: Contender, images: torch.Tensor) -> float | None:
    """Peak of one call, while no later contender holds memory; None on a CPU."""
    if not images.is_cuda:
        return None
    with contender.scope():
        return peak_mib(lambda: contender.forward(images), contender.held_before_mib)


def make_candidate(
    contender: Contender, images: Sequence[torch.Tensor], peak: float | None
) -> Candidate:
    """What is timed: the contender on image batches in turn."""
    turn = 0

    def call() -> object:
        nonlocal turn
        turn += 1
        return contender.forward(images[turn % len(images)])

    return Candidate(
        contender.variant,
        call,
        peak_mib=peak,
        scope=contender.scope,
    )
