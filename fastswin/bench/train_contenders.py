"""The ways to train one model that a user would choose between, each as one optimiser step.

    eager                       the framework's model under autocast
    compile                     torch.compile of it
    compile-reduce-overhead     the same, replayed from CUDA graphs
    fastswin                    fastswin.accelerate of it
    fastswin-compile            torch.compile of that
    fastswin-graph              fastswin, replayed from CUDA graphs (capture_training)
    fastswin-bf16-stream        fastswin with the residual stream in bf16 (other numbers: opt-in)
    fastswin-bf16-stream-graph  both

All start from copies of the same weights, with AdamW (fused on a GPU) and the same images. Every
record states the dtype that the residual stream has after the first block.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastswin.accelerate import accelerate, capture_training
from fastswin.bench.source import Source

VARIANTS = (
    "eager", "compile", "compile-reduce-overhead", "fastswin", "fastswin-compile",
    "fastswin-graph", "fastswin-bf16-stream", "fastswin-bf16-stream-graph",
)  # fmt: skip

#: Autocast dtype by the name of the precision; None trains in fp32.
DTYPES: dict[str, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": None,
}

LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.05


@dataclasses.dataclass
class Trainee:
    """A model on its way through training.

    Attributes:
        variant: one of :data:`VARIANTS`.
        model: the module that owns the parameters.
        forward: what is called: the model, compiled or parallel.
        optimizer: AdamW over the model's parameters.
        scaler: scales the loss in fp16, idle otherwise.
        autocast: dtype, None for fp32.
    """

    variant: str
    model: nn.Module
    forward: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    scaler: Any
    autocast: torch.dtype | None

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of one batch, in fp32."""
        kind = images.device.type
        enabled = self.autocast is not None
        with torch.autocast(kind, self.autocast or torch.bfloat16, enabled=enabled):
            logits = self.forward(images)
        return F.cross_entropy(logits.float(), labels)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One optimiser step; the loss, still on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(images, labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def restart(self) -> None:
        """Forget what optimizer and scaler have learnt; the weights stay."""
        self.optimizer.state.clear()
        kind = next(self.model.parameters()).device.type
        self.scaler = torch.amp.GradScaler(kind, enabled=self.scaler.is_enabled())

    def gradients(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradient of every parameter without dropout and drop path; leaves the model as it was."""
        self.model.eval()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(images, labels).backward()
        found = {n: p.grad.float() for n, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        return found


def build_trainee(
    variant: str,
    source: Source,
    dtype: str,
    device: torch.device,
    images: torch.Tensor,
    process_group: Any = None,
) -> Trainee:
    """A fresh copy of the source's weights, ready to train.

    Args:
        variant: one of :data:`VARIANTS`.
        source: the model; without timm its eager form has its attention on plain PyTorch.
        dtype: key of :data:`DTYPES`.
        device: where it trains.
        images: a batch of the steps to come; captured variants take no other shape.
        process_group: whose processes a captured variant averages gradients over.

    Raises:
        ValueError: unknown ``variant`` or ``dtype``, or a group for what is not captured.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if process_group is not None and not variant.endswith("-graph"):
        raise ValueError(f"variant must end with -graph to average in its graphs, got {variant!r}")
    ours = variant.startswith("fastswin")
    model = copy.deepcopy(source.engine_source if ours else source.model)
    model = model.to(device).requires_grad_(True).train()
    if ours:
        stream = torch.bfloat16 if "bf16-stream" in variant else None
        accelerate(model, residual_dtype=stream)
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if variant in ("compile", "fastswin-compile"):
        forward = torch.compile(model, dynamic=False)
    elif variant == "compile-reduce-overhead":
        forward = torch.compile(model, dynamic=False, mode="reduce-overhead")
    elif variant.endswith("-graph"):
        forward = capture_training(
            model, images, autocast=DTYPES[dtype], process_group=process_group
        )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY,
        fused=device.type == "cuda",
    )  # fmt: skip
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")
    return Trainee(variant, model, forward, optimizer, scaler, DTYPES[dtype])


def stream_dtype(trainee: Trainee, images: torch.Tensor) -> list[str]:
    """Dtype of the residual stream after each block, as it runs."""
    seen: list[str] = []

    def note(module: nn.Module, arguments: object, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        seen.append(str(tensor.dtype).removeprefix("torch."))

    blocks = [
        m for m in trainee.model.modules()
        if "Block" in type(m).__name__ and hasattr(m, "norm1") and hasattr(m, "norm2")
    ]  # fmt: skip
    handles = [block.register_forward_hook(note) for block in blocks]
    try:
        labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        plain = dataclasses.replace(trainee, forward=trainee.model)
        with torch.no_grad():
            plain.loss(images, labels)
    finally:
        for handle in handles:
            handle.remove()
    return seen
