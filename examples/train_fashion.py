"""Train the small Swin that ships with fastswin, on Fashion-MNIST, on one GPU in a few minutes.

Three stages on 28x28 tokens (patch 1, window 7): 28x28x64 -> 14x14x128 -> 7x7x256, 1.8 M
parameters. AdamW, warm-up and cosine, bf16 autocast, label smoothing, mixup, drop path, an average
of the weights; the data set lives on the GPU as uint8 and every augmentation is a batch operation
there. The schedule is fitted to ``--minutes``: its progress goes from 0 to 1 over the epochs that
still fit, so a slower card trains for fewer epochs but always ends annealed.

Nothing is selected on the test set: it is read once, after the last step.

    python examples/train_fashion.py --data /usr/share/datasets/fashion-mnist --minutes 4

An interrupted run goes on from ``--out``/checkpoint.pt. Written: swin_fashion_mnist.safetensors
(weights, configuration, preprocessing, class names) and training.json (recipe and result).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from fastswin.data.atomic import replacing, write_text
from fastswin.data.fashion_mnist import DEBIAN_FOLDER, PREPROCESS, class_names, load_split
from fastswin.data.preprocess import metadata_for
from fastswin.models import SwinConfig, SwinTransformer

CONFIG = SwinConfig(
    image_size=(28, 28),
    patch_size=1,
    in_channels=1,
    num_classes=10,
    embed_dim=64,
    depths=(2, 4, 1),
    num_heads=(2, 4, 8),
    window_size=(7, 7),
    drop_path_rate=0.1,
)

#: The background of these images, normalised.
BLACK = -PREPROCESS.mean[0] / PREPROCESS.std[0]


@dataclass(frozen=True)
class Recipe:
    """What decides the weights, apart from the data, the seed and the card's arithmetic."""

    batch: int = 512
    peak_learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup_fraction: float = 0.05
    label_smoothing: float = 0.1
    clip_grad_norm: float = 1.0
    ema_decay: float = 0.999
    crop_padding: int = 2
    flip_probability: float = 0.5
    erase_probability: float = 0.3
    mixup_alpha: float = 0.2
    max_epochs: int = 120


def augment(x: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    """Random flip, padded crop and erasing of normalised images ``[B, 1, 28, 28]``."""
    B, _, H, W = x.shape

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=x.device, generator=generator)

    x = torch.where(uniform(B, 1, 1, 1) < recipe.flip_probability, x.flip(3), x)

    pad = recipe.crop_padding
    padded = F.pad(x, (pad,) * 4, value=BLACK)
    offset = (uniform(2, B, 1) * (2 * pad + 1)).long()
    rows = offset[0] + torch.arange(H, device=x.device)
    columns = offset[1] + torch.arange(W, device=x.device)
    images = torch.arange(B, device=x.device)
    x = padded[images[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(3, 1)

    area = 0.02 + 0.28 * uniform(B)  # of the image, the side ratio log-uniform in [1/3, 3]
    ratio = torch.exp((2 * uniform(B) - 1) * math.log(3.0))
    height, width = (area * ratio).sqrt() * H, (area / ratio).sqrt() * W
    top, left = uniform(B) * (H - height).clamp_min(0), uniform(B) * (W - width).clamp_min(0)
    row, column = torch.arange(H, device=x.device), torch.arange(W, device=x.device)
    inside = (
        ((row >= top[:, None]) & (row < (top + height)[:, None]))[:, :, None]
        & ((column >= left[:, None]) & (column < (left + width)[:, None]))[:, None, :]
        & (uniform(B) < recipe.erase_probability)[:, None, None]
    )
    noise = torch.randn(x.shape, device=x.device, generator=generator)
    return torch.where(inside[:, None], noise, x)


def mixup(
    x: torch.Tensor, labels: torch.Tensor, recipe: Recipe, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blend each image and its smoothed one-hot target with another of the batch.

    The weight is Beta(a, a), drawn as ``u^(1/a) / (u^(1/a) + v^(1/a))`` given that the sum is at
    most 1 (Joehnk); draws that miss are not blended, which keeps it one batch operation.
    """
    target = F.one_hot(labels, CONFIG.num_classes).float()
    target = target * (1 - recipe.label_smoothing) + recipe.label_smoothing / CONFIG.num_classes
    if recipe.mixup_alpha <= 0:
        return x, target
    B = len(x)
    u, v = torch.rand(2, B, device=x.device, generator=generator).pow(1 / recipe.mixup_alpha)
    weight = torch.where(u + v <= 1, u / (u + v).clamp_min(1e-30), 1.0)
    partner = torch.randperm(B, device=x.device, generator=generator)
    image_weight, target_weight = weight.view(B, 1, 1, 1), weight.view(B, 1)
    return (
        x * image_weight + x[partner] * (1 - image_weight),
        target * target_weight + target[partner] * (1 - target_weight),
    )


def learning_rate(progress: float, recipe: Recipe) -> float:
    """Linear warm-up, then cosine to zero; progress runs from 0 to 1."""
    if progress < recipe.warmup_fraction:
        return recipe.peak_learning_rate * (progress + 1e-3) / (recipe.warmup_fraction + 1e-3)
    t = (progress - recipe.warmup_fraction) / (1 - recipe.warmup_fraction)
    return recipe.peak_learning_rate * 0.5 * (1 + math.cos(math.pi * min(t, 1.0)))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; norms, biases and the relative position bias tables do not."""
    decay, plain = [], []
    for name, parameter in model.named_parameters():
        flat = parameter.ndim < 2 or name.endswith("relative_position_bias_table")
        (plain if flat else decay).append(parameter)
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


@torch.no_grad()
def average(ema: torch.nn.Module, model: torch.nn.Module, step: int, decay: float) -> None:
    """``ema = d * ema + (1 - d) * model``, with a small ``d`` while the model is young."""
    d = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - d)


class Trainer:
    """Model, average, optimiser and schedule position: all that an interrupted run needs."""

    def __init__(self, options: argparse.Namespace, recipe: Recipe) -> None:
        self.options, self.recipe = options, recipe
        self.device = torch.device(options.device)
        torch.manual_seed(options.seed)
        self.model = SwinTransformer(CONFIG).to(self.device).train()
        self.ema = copy.deepcopy(self.model).eval()
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, recipe.weight_decay),
            lr=recipe.peak_learning_rate,
            fused=self.device.type == "cuda",
        )
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        self.progress, self.epoch, self.step = 0.0, 0, 0
        self.epochs_here = 0  # of this process, as the first one compiles
        self.seconds_before = 0.0  # spent by earlier, interrupted runs
        self.losses: list[float] = []
        self.started = time.perf_counter()
        self.checkpoint = options.out / "checkpoint.pt"
        self.forward = self.model
        if options.compile and self.device.type == "cuda":
            self.forward = torch.compile(self.model)

    @property
    def seconds(self) -> float:
        """Wall time of the whole training so far, compilation included."""
        return self.seconds_before + time.perf_counter() - self.started

    def save(self) -> None:
        state = {
            "recipe": asdict(self.recipe) | {"seed": self.options.seed},
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "progress": self.progress,
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
        }
        with replacing(self.checkpoint) as temporary:
            torch.save(state, temporary)

    def resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if state["recipe"] != asdict(self.recipe) | {"seed": self.options.seed}:
            raise SystemExit(f"{self.checkpoint} belongs to another recipe; remove it or use --out")
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.progress, self.epoch, self.step = state["progress"], state["epoch"], state["step"]
        self.seconds_before, self.losses = state["seconds"], state["losses"]
        print(f"resumed after epoch {self.epoch}, progress {self.progress:.3f}", flush=True)

    def run(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on uint8 images ``[n, 28, 28]`` until the schedule's progress is 1."""
        batch = min(self.recipe.batch, len(images))
        steps = len(images) // batch
        epochs_left = self.recipe.max_epochs - self.epoch
        while epochs_left > 0 and self.progress < 1 - 1e-9:
            began = time.perf_counter()
            order = torch.randperm(len(images), device=self.device, generator=self.generator)
            total = torch.zeros((), device=self.device)
            for i in range(steps):
                remaining_steps = epochs_left * steps - i
                self.set_learning_rate()
                total += self.train_step(images, labels, order[i * batch : (i + 1) * batch])
                self.progress += (1 - self.progress) / remaining_steps
            loss = float(total) / steps  # waits for the device, so the times below are true
            seconds = time.perf_counter() - began
            self.epoch += 1
            self.epochs_here += 1
            self.losses.append(loss)
            epochs_left = self.epochs_that_fit(seconds, epochs_left - 1)
            print(
                f"epoch {self.epoch:3d}  loss {loss:.4f}  {seconds:.2f} s  "
                f"{steps * batch / seconds:.0f} images/s  progress {self.progress:.3f}  "
                f"{epochs_left} epochs left",
                flush=True,
            )
            if self.epoch % 5 == 0 or epochs_left == 0:
                self.save()

    def epochs_that_fit(self, epoch_seconds: float, at_most: int) -> int:
        """Epochs left within the budget; the first epoch compiles, so the second decides."""
        if not self.options.minutes or self.epochs_here < 2 or at_most == 0:
            return at_most
        reserve = 10.0  # seconds for the test pass and the files
        left = self.options.minutes * 60 - reserve - self.seconds
        return max(1, min(at_most, int(left / epoch_seconds)))

    def set_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.progress, self.recipe)

    def train_step(
        self, images: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """One optimiser step on the images of ``index``; the loss, still on the device."""
        x = augment(PREPROCESS.normalise(images[index]), self.recipe, self.generator)
        x, target = mixup(x, labels[index], self.recipe, self.generator)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.forward(x)
        loss = F.cross_entropy(logits.float(), target)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad_norm)
        self.optimizer.step()
        average(self.ema, self.model, self.step, self.recipe.ema_decay)
        self.step += 1
        return loss.detach()


def test_accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """fp32 top-1 in percent.

    Gradients stay enabled so that attention takes its differentiable reference, not the kernels
    that these weights are meant to test.
    """
    correct = 0
    for part, truth in zip(images.split(500), labels.split(500), strict=True):
        logits = model(PREPROCESS.normalise(part)).detach()
        correct += int((logits.argmax(1) == truth).sum())
    return 100.0 * correct / len(images)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=DEBIAN_FOLDER, help="folder of the four IDX files")
    add("--out", type=Path, default=Path("fashion-run"), help="folder for what is written")
    add("--minutes", type=float, default=4.0, help="wall-time budget; 0 runs all --epochs")
    add("--epochs", type=int, default=Recipe.max_epochs, help="at most this many")
    add("--batch", type=int, default=Recipe.batch)
    add("--learning-rate", type=float, default=Recipe.peak_learning_rate)
    add("--mixup-alpha", type=float, default=Recipe.mixup_alpha)
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--no-compile", dest="compile", action="store_false", help="skip torch.compile")
    add("--limit-train", type=int, help="use only the first N training images")
    add("--limit-test", type=int, help="use only the first N test images")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict:
    """Train, test once, write both files; returns what training.json holds."""
    options = parse(arguments)
    recipe = Recipe(
        batch=options.batch,
        max_epochs=options.epochs,
        peak_learning_rate=options.learning_rate,
        mixup_alpha=options.mixup_alpha,
    )
    trainer = Trainer(options, recipe)
    device = trainer.device
    train, test = (
        [torch.from_numpy(a[:limit]).to(device) for a in load_split(options.data, split)]
        for split, limit in (("train", options.limit_train), ("test", options.limit_test))
    )
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters} parameters, {len(train[0])} training images, {device}", flush=True)
    trainer.resume()
    trainer.run(train[0], train[1].long())

    weights = options.out / "swin_fashion_mnist.safetensors"
    with replacing(weights) as temporary:
        metadata = metadata_for(PREPROCESS, list(class_names()))
        metadata["fastswin_config"] = json.dumps(CONFIG.to_dict())
        save_file(trainer.ema.state_dict(), temporary, metadata)
    accuracy = test_accuracy(trainer.ema, test[0], test[1].long())
    result = {
        "model": "swin_fashion_mnist",
        "config": CONFIG.to_dict(),
        "parameters": parameters,
        "recipe": asdict(recipe),
        "seed": options.seed,
        "train_images": len(train[0]),
        "test_images": len(test[0]),
        "test_accuracy_percent": round(accuracy, 4),
        "epochs": trainer.epoch,
        "steps": trainer.step,
        "losses": [round(loss, 5) for loss in trainer.losses],
        "seconds": round(trainer.seconds, 2),
        "budget_minutes": options.minutes,
        "compiled": trainer.forward is not trainer.model,
        "autocast": "bfloat16" if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    write_text(options.out / "training.json", json.dumps(result, indent=2) + "\n")
    print(f"test accuracy {accuracy:.2f} % after {trainer.epoch} epochs, {trainer.seconds:.0f} s")
    print(f"wrote {weights} ({weights.stat().st_size / 1e6:.2f} MB) and training.json")
    return result


if __name__ == "__main__":
    main()
