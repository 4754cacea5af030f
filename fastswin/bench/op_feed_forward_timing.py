"""Times of the feed-forward layer on one problem: its parts, every configuration, whole contenders.

Calls are queued back to back behind a wait, so that no launch from the host is seen. A
configuration is timed only where it is right.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fastswin.bench.failures import describe, release_memory
from fastswin.bench.memory import held_mib, peak_mib
from fastswin.bench.op_feed_forward_check import Judge, backward, both, forward
from fastswin.bench.op_feed_forward_problems import (
    FeedForwardProblem,
    Operands,
    backward_candidates,
    forward_candidates,
)
from fastswin.bench.queued_calls import ROUNDS, queued_ms
from fastswin.ops.feed_forward.config import EpilogueConfig, FeedForwardConfig, FusedConfig

#: About 4 ms in which the host queues a round of calls, several launches each.
HEAD_START_CYCLES = 8_000_000

#: What is tried in each direction beside the library.
CANDIDATES = {"forward": forward_candidates, "backward": backward_candidates}

Call = Callable[[], object]
Config = FusedConfig | EpilogueConfig

#: By form, milliseconds of its fastest right configuration; None is the library's.
Best = dict[type, tuple[float, Config | None]]


@dataclasses.dataclass
class Log:
    """Lines and records, on disk at once.

    Attributes:
        folder: where the two files go.
        records: one for each timed or red configuration.
    """

    folder: Path
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def say(self, line: str) -> None:
        print(line, flush=True)
        with (self.folder / "op_feed_forward.txt").open("a") as file:
            file.write(line + "\n")

    def record(self, **fields: Any) -> None:
        self.records.append(fields)
        text = json.dumps(self.records, indent=1, default=str)
        (self.folder / "op_feed_forward.json").write_text(text)


def median_ms(call: Call, device: torch.device) -> float:
    """Median milliseconds a call; on a CPU, of as many single ones as rounds."""
    if device.type == "cuda":
        return queued_ms(call, HEAD_START_CYCLES)
    call()
    times_ms = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - began) * 1e3)
    return sorted(times_ms)[ROUNDS // 2]


class ProblemTimer:
    """Times one problem's contenders; tells and records what it finds.

    Args:
        problem: which.
        device: where.
        dtype: of rows and weights.
        log: of the run.
    """

    def __init__(
        self, problem: FeedForwardProblem, device: torch.device, dtype: torch.dtype, log: Log
    ) -> None:
        self.problem, self.device, self.log = problem, device, log
        self.judge = Judge.of(problem, device, dtype)
        self.operands = problem.make(device, dtype)

    def time_all(self) -> None:
        """Parts, then both directions of every configuration, then whole contenders."""
        self.time_parts()
        best: dict[str, Best] = {}
        for direction, candidates in CANDIDATES.items():
            best[direction] = self.time_direction(direction, [None, *candidates(self.problem)])
        chosen = {"library": FeedForwardConfig()}
        for form in (FusedConfig, EpilogueConfig):
            if all(form in best[direction] for direction in best):
                halves = (best["forward"][form][1], best["backward"][form][1])
                chosen[form.__name__.removesuffix("Config").lower()] = FeedForwardConfig(*halves)
        o = self.operands
        for name, config in chosen.items():
            step = functools.partial(both, o, config)
            start = functools.partial(forward, o, config)
            self.time_both(name, step, start)
            self.log.say(f"           {config}")
        dtype = o.x.dtype
        leaves = [t.to(dtype).requires_grad_() for t in (o.x, o.fc1, o.bias, o.fc2)]

        def eager_forward() -> torch.Tensor:
            return F.linear(F.gelu(F.linear(*leaves[:3])), leaves[3])

        self.time_both(
            "eager", lambda: torch.autograd.grad(eager_forward(), leaves, o.dy), eager_forward
        )

    def time_parts(self) -> None:
        """What the library's form consists of, and the two ways to fp32 weight gradients."""
        from fastswin.ops.feed_forward.backward import gelu_bwd, weight_gradient

        o = self.operands
        bias = o.bias.to(o.x.dtype)
        pre = F.linear(o.x, o.fc1, bias)
        act, dpre = F.gelu(pre), o.dy @ o.fc2
        parts: dict[str, Call] = {
            "fc1": lambda: F.linear(o.x, o.fc1, bias),
            "gelu": lambda: F.gelu(pre),
            "fc2": lambda: F.linear(act, o.fc2),
            "dy fc2": lambda: o.dy @ o.fc2,
            "gelu backward": lambda: gelu_bwd(dpre, pre, need_h=True, need_bias=True),
            "dpre fc1": lambda: dpre @ o.fc1,
            "dfc1 cast": lambda: weight_gradient(dpre, o.x, torch.float32, direct=False),
            "dfc1 fp32": lambda: weight_gradient(dpre, o.x, torch.float32, direct=True),
            "dfc2 cast": lambda: weight_gradient(o.dy, act, torch.float32, direct=False),
            "dfc2 fp32": lambda: weight_gradient(o.dy, act, torch.float32, direct=True),
        }
        told = []
        for name, call in parts.items():
            try:
                latency_ms = median_ms(call, self.device)
            except Exception as error:
                told.append(f"{name}: {describe(error).message}")
                continue
            self.log.record(case=self.problem.case, part=name, median_ms=latency_ms)
            told.append(f"{name} {latency_ms:.4f}")
        self.log.say("  parts, ms: " + ", ".join(told))

    def time_direction(self, direction: str, candidates: Sequence[Config | None]) -> Best:
        """The fastest right configuration of every form, in one direction."""
        case, say, record = self.problem.case, self.log.say, self.log.record
        _, pre = forward(self.operands, FeedForwardConfig())
        best: Best = {}
        for config in candidates:
            whole = partner(config, direction, self.problem)
            try:
                wrong = self.judge.verdict(whole)
                if wrong:
                    say(f"  {direction:8} RED {wrong}: {config}")
                    record(case=case, direction=direction, config=config, red=wrong)
                    continue
                call = _one_direction(direction, self.operands, pre, whole)
                latency_ms = median_ms(call, self.device)
            except Exception as error:
                say(f"  {direction:8} {describe(error).message}: {config}")
                release_memory()
                continue
            say(f"  {direction:8} {latency_ms:8.4f} ms  {config or 'library'}")
            record(case=case, direction=direction, config=config, median_ms=latency_ms)
            form = type(config)
            if form not in best or latency_ms < best[form][0]:
                best[form] = latency_ms, config
        return best

    def time_both(self, name: str, call: Call, kept: Callable[[], Any]) -> None:
        """Both directions of one contender, with its memory.

        Args:
            name: of the contender.
            call: forward and backward.
            kept: forward alone; what it returns is alive until the backward.
        """
        fields: dict[str, Any] = {"median_ms": median_ms(call, self.device)}
        if self.device.type == "cuda":
            held = held_mib()
            fields["peak_mib"] = peak_mib(call, held)
            alive = kept()
            fields["kept_mib"] = held_mib() - held
            del alive
        self.log.record(case=self.problem.case, direction="both", contender=name, **fields)
        self.log.say(f"  both     {name}: " + ", ".join(f"{k} {v:.4f}" for k, v in fields.items()))


def partner(config: Config | None, direction: str, problem: FeedForwardProblem) -> Any:
    """A whole configuration of one direction's: fused needs a fused other half, others none."""
    other: Config | None = None
    if isinstance(config, FusedConfig):
        candidates = CANDIDATES["forward" if direction == "backward" else "backward"]
        other = next(c for c in candidates(problem) if isinstance(c, FusedConfig))
    halves = (config, other) if direction == "forward" else (other, config)
    return FeedForwardConfig(*halves)


def _one_direction(
    direction: str, o: Operands, pre: torch.Tensor | None, config: FeedForwardConfig
) -> Call:
    if direction == "forward":
        return lambda: forward(o, config)
    return lambda: backward(o, None if config.fused else pre, config)
