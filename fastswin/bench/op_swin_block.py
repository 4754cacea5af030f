"""``python -m fastswin.bench.op_swin_block``: blocks in clusters against the engine's launches.

The first two stages of Swin-T and SwinV2-T at small batches: all blocks of a stage as the plan
launches them without ``ops.swin_block`` and with it, through the engine's own forward pass. Both
are checked first (fp64 oracle, three runs bitwise), then timed in a CUDA graph of a chain whose
blocks have weights of their own and start with a cold L2. Lines go to DIR/swin_block.txt.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from fastswin.bench.cold_graphs import graph_us, make_flush
from fastswin.bench.failures import describe
from fastswin.bench.small_batch_models import build
from fastswin.engine.bind import BoundPlan, bind
from fastswin.engine.forward import Forward
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.prepared import PreparedBlock
from fastswin.engine.whole_block import WholeBlocks
from fastswin.models.swin import SwinTransformer
from fastswin.testing.tolerance import assert_close_to_oracle

HALF = PRECISIONS["fp16"]

MODELS = ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256")
STAGES = (0, 1)
BATCHES = (1, 2, 4)

#: Blocks in a timed chain.
CHAIN = 20


class Stage:
    """The blocks of one stage of a model on a device, prepared once."""

    def __init__(self, model: SwinTransformer, index: int, device: torch.device) -> None:
        self.model, self.index, self.device = model, index, device
        self.config = model.config
        self.weights = prepare(model, device, HALF.dtype)
        self.forward = Forward(self.config, self.weights, HALF)

    def plan(self, batch: int, whole: bool) -> BoundPlan:
        """The engine's plan without blocks in one kernel, or with them whatever its table says."""
        key = self.config.version, self.config.dim(self.index)
        table: WholeBlocks = {key: 1 << 62} if whole else {}
        plan = make_plan(
            self.config, batch, self.config.image_size, self.device, HALF, whole_blocks=table
        )
        return bind(plan, self.weights, HALF)

    def stream(self, batch: int) -> torch.Tensor:
        """Distinct rows with a mean, ``[B, H, W, C]``."""
        generator = torch.Generator().manual_seed(self.index)
        shape = (batch, *self.config.map_size(self.index), self.config.dim(self.index))
        x = 1.5 * torch.randn(*shape, generator=generator) + 0.5
        return x.to(HALF.dtype).to(self.device)

    def run(self, x: torch.Tensor, bound: BoundPlan, blocks: Sequence[PreparedBlock]) -> None:
        """Blocks onto the stream in place, each as the plan computes those of its place."""
        stage, offsets = bound.plan.stages[self.index], bound.offsets[self.index]
        unjoined = None
        for number, block in enumerate(blocks):
            pending = offsets[number % len(offsets)]
            stats = self.forward.attention_half(x, block, stage, pending, unjoined)
            unjoined = self.forward.mlp_half(x, block, stage, pending, stats)
        self.forward.join(x, unjoined, stage)

    def output(self, x: torch.Tensor, bound: BoundPlan) -> torch.Tensor:
        """The stage's output, with the biases that the plan leaves to the next reader."""
        x = x.clone()
        self.run(x, bound, self.weights.stages[self.index])
        end = bound.stage_end[self.index]
        return x if end is None else (x.float() + end).to(x.dtype)

    def check(self, x: torch.Tensor, bound: BoundPlan) -> str:
        """What is wrong with a plan, "" if nothing."""
        layer = self.model.layers[self.index]
        oracle = copy.deepcopy(layer).double()(x.double())
        eager = copy.deepcopy(layer).to(x.dtype)(x)
        found = self.output(x, bound)
        try:
            assert_close_to_oracle(found, eager, oracle, x.dtype)
        except AssertionError as error:
            return str(error)
        same = all(torch.equal(self.output(x, bound), found) for _ in range(2))
        return "" if same else "runs differ"

    def latency_us(self, x: torch.Tensor, bound: BoundPlan, flush: torch.Tensor) -> float:
        """Median microseconds of a block in a chain that starts with a cold L2."""
        blocks = self.weights.stages[self.index]
        chain = [_with_own_weights(blocks[i % len(blocks)]) for i in range(CHAIN)]
        return graph_us(lambda: self.run(x, bound, chain), flush) / CHAIN


def _with_own_weights(block: PreparedBlock) -> PreparedBlock:
    """A copy at other addresses, tables and packed weights included."""
    linears = {
        name: dataclasses.replace(layer, weight=layer.weight.clone())
        for name in ("qkv", "proj", "fc1", "fc2")
        if (layer := getattr(block, name)) is not None
    }
    tables = {shift: table.clone() for shift, table in block.tables.items()}
    return dataclasses.replace(block, **linears, tables=tables, whole=None)


def lines(stage: Stage, name: str, batch: int) -> Iterator[str]:
    """One case as text: both ways checked, then timed."""
    head = f"{name} stage {stage.index} batch {batch}:"
    x = stage.stream(batch)
    ways = {"separate": stage.plan(batch, False), "one kernel": stage.plan(batch, True)}
    words = ways["one kernel"].plan.stages[stage.index]
    if words.attention != "block":
        yield f"{head} no block in one kernel: {words.reasons.get('block', 'another device')}"
        return
    wrong = {way: why for way, bound in ways.items() if (why := stage.check(x, bound))}
    if wrong:
        yield f"{head} WRONG {wrong}"
        return
    flush = make_flush(stage.device)
    us = {way: stage.latency_us(x.clone(), bound, flush) for way, bound in ways.items()}
    told = ", ".join(f"{way} {value:.2f} us a block" for way, value in us.items())
    yield f"{head} {told}, {us['separate'] / us['one kernel']:.2f}x"


def run(
    device: torch.device,
    out: Path,
    models: Sequence[str],
    batches: Sequence[int],
    deadline_s: float,
    say: Callable[[str], None] = print,
) -> bool:
    """Every case; writes its lines and says whether all were right.

    Args:
        device: a GPU.
        out: folder of ``swin_block.txt``.
        models: names of variants.
        batches: images.
        deadline_s: no new case is begun after this.
        say: prints one line.
    """
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    right = True
    with (out / "swin_block.txt").open("w", encoding="utf-8") as log, torch.no_grad():
        for name in models:
            model = build(name).to(device)
            for index in STAGES:
                stage = Stage(model, index, device)
                for batch in batches:
                    if time.monotonic() - start > deadline_s:
                        found = [f"{name} stage {index} batch {batch}: skipped, out of time"]
                    else:
                        try:
                            found = list(lines(stage, name, batch))
                        except RuntimeError as error:
                            found = [f"{name} batch {batch}: FAILED {describe(error).message}"]
                    for line in found:
                        right &= "WRONG" not in line and "FAILED" not in line
                        say(line)
                        log.write(line + "\n")
                        log.flush()
    return right


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0 all right, 1 something wrong, 2 cannot run."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.op_swin_block")
    parser.add_argument("--out", type=Path, default=Path("swin_block"), help="folder of the lines")
    parser.add_argument("--deadline-s", type=float, default=60.0)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated names")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    options = parser.parse_args(arguments)
    try:
        batches = [int(batch) for batch in options.batches.split(",") if batch]
    except ValueError:
        parser.error(f"--batches must be numbers such as 1,2,4, got {options.batches!r}")
    if not batches or min(batches) < 1:
        parser.error(f"--batches must be positive, got {options.batches!r}")
    if not torch.cuda.is_available():
        print("cannot run: there is no GPU")
        return 2
    models = [name for name in options.models.split(",") if name]
    return 0 if run(torch.device("cuda"), options.out, models, batches, options.deadline_s) else 1


if __name__ == "__main__":
    raise SystemExit(main())
