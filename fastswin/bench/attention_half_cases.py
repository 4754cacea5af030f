"""Ways through the attention half of a model on the card: plans, blocks, inputs, binaries."""

from __future__ import annotations

import dataclasses

import torch

from fastswin.bench.attention_half_problems import WHOLE_MODELS, Half, Job
from fastswin.bench.cold_graphs import WEIGHT_BYTES
from fastswin.bench.small_batch_models import build
from fastswin.engine.bind import BlockOffsets, Unjoined, bind
from fastswin.engine.forward import Forward
from fastswin.engine.fused_attention import FusedAttention, FusedRange
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.prepared import Affine, PreparedBlock
from fastswin.engine.stage_plan import ModelPlan, StagePlan
from fastswin.engine.warmup import compile_calls, kernel_calls
from fastswin.ops.split_k.config import SplitKConfig

HALF = PRECISIONS["fp16"]

#: Halves in one chain.
CHAIN = 20


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
        count = max(1, min(count, WEIGHT_BYTES // (8 * half.channels**2)))

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
