"""Train a Swin Transformer on an image folder or tar shards, on any number of GPUs.

    python examples/train.py --data photos --model swin_tiny_patch4_window7_224
    torchrun --nproc-per-node=4 examples/train.py --data shards --batch 128

AdamW, warm-up and cosine, mixup, label smoothing, drop path, bf16 autocast, on fastswin's fused
operators (``--plain`` without). ``--batch`` is per process. An interrupted run goes on from
``--out``/checkpoint.pt at the step where it was saved, with the same photos, draws and weights that
an uninterrupted one would have had: everything random follows from the seed and the step.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from train_data import Augmented, EpochOrder, Photos, open_photos

import fastswin
from fastswin import models
from fastswin.data.atomic import replacing


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases, position tables and temperatures do not."""
    decay, plain = [], []
    for name, parameter in model.named_parameters():
        flat = parameter.ndim < 2 or name.endswith(("bias_table", "logit_scale", "pos_embed"))
        (plain if flat else decay).append(parameter)
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Linear warm-up over ``warmup`` steps, then cosine to zero at ``steps``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def mixup(
    x: torch.Tensor, target: torch.Tensor, alpha: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blend the batch with itself reversed, by one weight from Beta(alpha, alpha).

    Args:
        x: images ``[B, C, H, W]``.
        target: ``[B, classes]``.
        alpha: 0 leaves both as they are.
        generator: on the CPU; the weight is the ratio of two gamma draws.
    """
    if alpha <= 0:
        return x, target
    a, b = torch._standard_gamma(torch.full((2,), alpha), generator=generator).tolist()
    weight = a / (a + b) if a + b > 0 else 1.0
    return x.lerp(x.flip(0), 1 - weight), target.lerp(target.flip(0), 1 - weight)


class Trainer:
    """One process of the run: model, optimizer and the step they have reached."""

    def __init__(self, options: argparse.Namespace, photos: Photos) -> None:
        self.options = options
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        torch.manual_seed(options.seed)  # the same weights in every process
        changes = {"image_size": tuple(options.image_size)} if options.image_size else {}
        self.model = models.create_model(
            options.model, num_classes=len(photos.class_names), drop_path_rate=options.drop_path,
            **changes,
        )  # fmt: skip
        self.model.to(self.device).train()
        if not options.plain:
            report = fastswin.accelerate(self.model)
            self.say(str(report))
        self.forward: nn.Module = self.model
        if options.compile:
            self.model.compile()
        if self.world > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.forward = nn.parallel.DistributedDataParallel(
                self.model, device_ids=ids, gradient_as_bucket_view=True,
                broadcast_buffers=False,  # a Swin's are constants
            )  # fmt: skip
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, options.weight_decay), lr=options.learning_rate,
            fused=self.device.type == "cuda",
        )  # fmt: skip
        self.photos = photos
        self.data = Augmented(photos, self.model.config.image_size, options.seed)
        self.steps_per_epoch = len(photos) // (options.batch * self.world)
        if self.steps_per_epoch == 0:
            raise ValueError(f"--batch {options.batch} x {self.world} exceeds {len(photos)} photos")
        self.steps = options.epochs * self.steps_per_epoch
        self.step = 0
        self.checkpoint = options.out / "checkpoint.pt"
        self.resume()

    def recipe(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be continued."""
        keys = (
            "model", "image_size", "epochs", "batch", "learning_rate", "weight_decay", "warmup",
            "mixup", "label_smoothing", "drop_path", "clip", "seed",
        )  # fmt: skip
        recipe = {key: getattr(self.options, key) for key in keys}
        return recipe | {"world": self.world, "photos": len(self.photos)}

    def save(self) -> None:
        """Write the state atomically; one process does."""
        if self.rank:
            return
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "recipe": self.recipe(), "class_names": self.photos.class_names,
        }  # fmt: skip
        with replacing(self.checkpoint) as temporary:
            torch.save(state, temporary)

    def resume(self) -> None:
        """Go on from the checkpoint where there is one."""
        if not self.checkpoint.is_file():
            return
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if state["recipe"] != self.recipe():
            raise ValueError(f"{self.checkpoint} belongs to another recipe; remove it or use --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.say(f"resumed at step {self.step} of {self.steps}")

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def run(self) -> None:
        """Train to the last step, or to ``--stop-after`` of this call."""
        options = self.options
        stop = self.steps if options.stop_after is None else self.step + options.stop_after
        while self.step < min(stop, self.steps):
            epoch, first = divmod(self.step, self.steps_per_epoch)
            order = EpochOrder(
                len(self.data), options.batch, epoch=epoch, seed=options.seed, first_step=first,
                rank=self.rank, world=self.world,
            )  # fmt: skip
            loader = DataLoader(
                self.data, options.batch, sampler=order, num_workers=options.workers,
                pin_memory=self.device.type == "cuda", persistent_workers=False,
            )  # fmt: skip
            began, done, total = time.perf_counter(), 0, torch.zeros((), device=self.device)
            for images, labels in loader:
                total += self.train_step(images, labels)
                done += 1
                self.step += 1
                if self.step % options.save_every == 0:
                    self.save()
                if self.step >= min(stop, self.steps):
                    break
            loss, seconds = float(total) / done, time.perf_counter() - began
            rate = done * options.batch * self.world / seconds
            self.say(f"epoch {epoch}  step {self.step}  loss {loss:.4f}  {rate:.0f} images/s")
        self.save()

    def train_step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One optimizer step; the loss, still on the device."""
        options = self.options
        # drop path and mixup draw by step and process, so that a resumed run draws the same
        torch.manual_seed(hash((options.seed, self.step, self.rank)) % 2**63)
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(
                self.step, self.steps, options.warmup, options.learning_rate
            )
        images = images.to(self.device, non_blocking=True)
        target = F.one_hot(labels.to(self.device), len(self.photos.class_names)).float()
        images, target = mixup(images, target, options.mixup, generator)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not options.fp32):
            logits = self.forward(images)
        loss = F.cross_entropy(logits.float(), target, label_smoothing=options.label_smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        self.optimizer.step()
        return loss.detach()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of class folders, or of .tar shards")
    add("--out", type=Path, default=Path("train-run"), help="folder for checkpoint.pt")
    add("--model", default="swin_tiny_patch4_window7_224")
    add("--image-size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"))
    add("--epochs", type=int, default=300)
    add("--batch", type=int, default=128, help="images per process")
    add("--learning-rate", type=float, default=5e-4, help="peak")
    add("--warmup", type=int, default=1000, help="steps")
    add("--weight-decay", type=float, default=0.05)
    add("--mixup", type=float, default=0.8, help="alpha; 0 for none")
    add("--label-smoothing", type=float, default=0.1)
    add("--drop-path", type=float, default=0.2)
    add("--clip", type=float, default=5.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=8, help="loader processes")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--fp32", action="store_true", help="no autocast")
    add("--plain", action="store_true", help="without fastswin.accelerate")
    add("--compile", action="store_true", help="torch.compile on top")
    add("--save-every", type=int, default=1000, help="steps between checkpoints")
    add("--stop-after", type=int, help="save and stop after this many steps")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Trainer:
    options = parse(arguments)
    parallel = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if parallel:
        backend = "nccl" if options.device.startswith("cuda") else "gloo"
        torch.distributed.init_process_group(backend)
    try:
        trainer = Trainer(options, open_photos(options.data))
        trainer.run()
    finally:
        if parallel:
            torch.distributed.destroy_process_group()
    return trainer


if __name__ == "__main__":
    main()
