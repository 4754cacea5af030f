"""Forward and backward of one training step as two CUDA graphs, for steps the host cannot feed.

Swin-T at batch 128 is some 800 launches in 20 ms; Python needs longer than that to make them.
Replayed from graphs they cost two calls. What a graph demands is fixed: shape, dtype and device of
the images, and the parameters' places in memory. Optimizers that update in place, drop path,
dropout and gradient accumulation work as before; loss and optimizer stay outside.

Source: torch.cuda.make_graphed_callables, which does the capture.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, cast

import torch
from torch import nn

from fastswin.accelerate.averaging import GradientAverage
from fastswin.accelerate.casts import call_with_cast_weights

#: As many as torch.cuda.make_graphed_callables takes.
WARMUP_STEPS = 3

#: NCCL's watchdog looks at collectives ten times a second, from a thread of its own; its look at
#: one that is not marked as done yet would end a capture.
WATCHDOG_S = 0.5


class CapturedTraining(nn.Module):
    """A model whose training step replays two graphs; made by :func:`capture_training`.

    In eval mode, and without gradients, it is the model itself, for images of any shape.

    Attributes:
        model: the model given, unchanged; save and load *its* state dict.
    """

    def __init__(
        self,
        model: nn.Module,
        autocast: torch.dtype | None,
        images: torch.Tensor,
        average: GradientAverage | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._like = (images.shape, images.dtype, images.device)
        step = Step(model, autocast).train()
        static = images.clone()
        with contextlib.nullcontext() if average is None else average.installed():
            _warm_up(step, static)
            if average is not None:
                time.sleep(WATCHDOG_S)
            # cuBLAS's workspaces belong in the graphs' pool, and those of the warm-up to nobody
            torch._C._cuda_clearCublasWorkspaces()
            captured = torch.cuda.make_graphed_callables(step, (static,), num_warmup_iters=0)
        torch._C._cuda_clearCublasWorkspaces()
        self._step = [captured]  # not a submodule

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images ``[B, channels, h, w]`` as captured to logits ``[B, classes]``.

        Raises:
            ValueError: in training, images of another shape, dtype or device.
        """
        if not (self.training and torch.is_grad_enabled()):
            return self.model(images)
        if (images.shape, images.dtype, images.device) != self._like:
            shape, dtype, device = self._like
            raise ValueError(
                f"images must be {tuple(shape)}, {dtype} on {device} as captured, got "
                f"{tuple(images.shape)}, {images.dtype} on {images.device}; capture again for "
                "another shape (a DataLoader wants drop_last=True)"
            )
        self._keep_gradients()
        return cast("torch.Tensor", self._step[0](images))

    def _keep_gradients(self) -> None:
        """Move gradients that are to be added to out of the graphs' memory before a replay.

        Autograd takes a first gradient over without a copy, so ``p.grad`` is the graph's own
        tensor, in a pool where the next forward pass puts its activations.
        """
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


def _warm_up(step: nn.Module, images: torch.Tensor) -> None:
    """Compile kernels and make library handles, on a stream that no graph is captured on.

    make_graphed_callables would do it on the stream that it captures on (from torch 2.14 on), and
    the workspaces cached for that stream end up in the graphs, outside of their pool.
    """
    stream = torch.cuda.Stream(images.device)
    stream.wait_stream(torch.cuda.current_stream(images.device))
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_STEPS):
            out = step(images)
            wanted = [p for p in step.parameters() if p.requires_grad]
            torch.autograd.grad(out, wanted, torch.zeros_like(out))
    torch.cuda.synchronize(images.device)


class Step(nn.Module):
    """The forward pass as it is captured: casts of weights belong to the graph, not to a cache."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.autocast is None:
            with torch.autocast(images.device.type, enabled=False):
                return self.model(images)
        with torch.autocast(images.device.type, self.autocast, cache_enabled=False):
            return call_with_cast_weights(self.model, self.autocast, images)


def capture_training(
    model: nn.Module,
    images: torch.Tensor,
    *,
    autocast: torch.dtype | None = None,
    process_group: Any = None,
) -> CapturedTraining:
    """Capture a model's training step for images of one shape.

    Call it after :func:`accelerate`; train with what it returns::

        step = capture_training(model, images, autocast=torch.bfloat16)
        loss = criterion(step(images), labels)
        loss.backward()

    On several GPUs wrap the result in DistributedDataParallel. With ``process_group`` the graphs
    average gradients themselves, during the backward pass; two H200s reach the same rate both ways
    (93 % of twice one).

    Args:
        model: in training mode on a GPU; takes images and returns logits, both one tensor. Its
            parameters must stay where they are: ``load_state_dict`` may, ``to`` may not follow.
        images: ``[B, channels, h, w]`` on the model's device; three steps are run on them.
        autocast: torch.float16, torch.bfloat16 or None, applied inside the graphs.
        process_group: an initialised NCCL group (``torch.distributed.group.WORLD``) whose processes
            all call this together: they get the first one's parameters and buffers now, and equal
            gradients from every backward pass; the result is not to be wrapped in DDP as well.

    Returns:
        A module to call instead of the model. The graphs hold the activations of one step for as
        long as it lives.

    Raises:
        TypeError, ValueError: an argument is off; the message names it. Nothing is captured.
        RuntimeError: no GPU, or the model does what a CUDA graph cannot hold.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"autocast must be None, torch.float16 or torch.bfloat16, got {autocast}")
    if not isinstance(images, torch.Tensor) or images.ndim != 4 or images.shape[0] == 0:
        shape = tuple(getattr(images, "shape", ()))
        raise ValueError(f"images must be [B, channels, h, w] with B >= 1, got shape {shape}")
    if not model.training:
        raise ValueError("model must be in training mode; call model.train() first")
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        raise ValueError("model must have a parameter that requires a gradient")
    if parameter.device != images.device:
        raise ValueError(f"images are on {images.device} but the model is on {parameter.device}")
    if images.device.type != "cuda":
        raise RuntimeError(f"CUDA graphs need a GPU, the model is on {images.device}")
    average = None
    if process_group is not None:
        average = GradientAverage(model.parameters(), process_group)
        average.share_state(model)
    return CapturedTraining(model, autocast, images.detach(), average)
