"""Train the small Swin that ships with fastswin, on Fashion-MNIST, on one GPU in a few minutes.

Three stages on 28x28 tokens (images enlarged to 112x112, patch 4, window 7): 28x28x64 ->
14x14x128 -> 7x7x256, 1.9 M parameters. AdamW, warm-up and cosine, bf16 autocast, label smoothing,
drop path, an average of the weights; the data set lives on the GPU as uint8 and every augmentation
is a batch operation there. The schedule is fitted to ``--minutes``: its progress goes from 0 to 1
over the epochs that still fit, so a slower card trains for fewer epochs but always ends annealed.

Nothing is selected on the test set: it is read once, after the last step.

    python examples/train_fashion.py --data /usr/share/datasets/fashion-mnist --minutes 4

An interrupted run goes on from ``--out``/checkpoint.pt. Written: swin_fashion_mnist.safetensors
(weights, configuration, preprocessing, class names) and training.json (recipe and result).
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from fashion_recipe import CONFIG, Recipe, augment, learning_rate, mixup

from fastswin import accelerate, capture_training
from fastswin.data.atomic import replacing, write_text
from fastswin.data.fashion_mnist import DEBIAN_FOLDER, PREPROCESS, class_names, load_split
from fastswin.data.preprocess import metadata_for
from fastswin.models import SwinTransformer, save_checkpoint


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
        if options.accelerate:
            accelerate(self.model, impl=options.accelerate)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, recipe.weight_decay),
            lr=recipe.peak_learning_rate,
            fused=self.device.type == "cuda",
        )
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        self.progress, self.epoch, self.step = 0.0, 0, 0
        self.epochs_here = 0  # of this process; the first one warms up
        self.seconds_before = 0.0  # spent by earlier, interrupted runs
        self.losses: list[float] = []
        self.started = time.perf_counter()
        self.checkpoint = options.out / "checkpoint.pt"
        self.forward = self.compiled() if options.compile else self.model
        if options.capture:
            self.forward = self.captured()

    def compiled(self) -> torch.nn.Module:
        """The model through torch.compile, or itself where this machine cannot compile it."""
        if self.device.type != "cuda":
            return self.model
        forward = torch.compile(self.model)
        example = torch.zeros(self.recipe.batch, 1, *CONFIG.image_size, device=self.device)
        try:
            with torch.autocast("cuda", torch.bfloat16):
                forward(example).sum().backward()
        except Exception as error:  # any fault of the compiler: eager trains as well, slower
            reason = str(error).strip().splitlines()[0]
            print(f"torch.compile failed, training eagerly: {reason}", flush=True)
            return self.model
        self.model.zero_grad(set_to_none=True)
        print(f"compiled in {self.seconds:.0f} s", flush=True)
        return forward

    def captured(self) -> torch.nn.Module:
        """The model with its steps in CUDA graphs, or itself where there is no GPU.

        Drop path draws what it would have drawn without the capture.
        """
        if self.device.type != "cuda":
            return self.model
        example = torch.zeros(self.recipe.batch, 1, *CONFIG.image_size, device=self.device)
        with torch.random.fork_rng([torch.cuda.current_device()]):
            return capture_training(self.model, example, autocast=torch.bfloat16)

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
        """Epochs left within the budget, by the time of the latest, warm one."""
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
        x = PREPROCESS.enlarge(x)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.forward(x)
        loss = F.cross_entropy(logits.float(), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad_norm)
        self.optimizer.step()
        average(self.ema, self.model, self.step, self.recipe.ema_decay)
        self.step += 1
        return loss.detach()


def test_accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """fp32 top-1 in percent, on plain PyTorch: no kernel that these weights are meant to test."""
    model = copy.deepcopy(model)
    accelerate(model, impl="reference")
    correct = 0
    for part, truth in zip(images.split(500), labels.split(500), strict=True):
        logits = model(PREPROCESS(part)).detach()
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
    add("--accelerate", choices=("auto", "reference"), help="fused blocks, or plain PyTorch")
    add("--capture", action="store_true", help="replay steps from CUDA graphs; with --no-compile")
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
    if options.device.startswith("cuda"):  # for what autocast leaves in fp32
        torch.set_float32_matmul_precision("high")
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

    options.out.mkdir(parents=True, exist_ok=True)
    weights = options.out / "swin_fashion_mnist.safetensors"
    save_checkpoint(trainer.ema, weights, metadata_for(PREPROCESS, list(class_names())))
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
        "compiled": options.compile and trainer.forward is not trainer.model,
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
