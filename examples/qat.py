"""Quantisation-aware training of the shipped Fashion-MNIST model, with fixed seeds.

The student starts from the calibrated weights and learns from the fp32 teacher (distillation) and
the labels; activation ranges stay those of calibration. One GPU needs seconds a scheme and epoch:

    python examples/qat.py --data /usr/share/datasets/fashion-mnist --epochs 3 \\
        --scheme int8,int8_mode1,int8_mode2,fp8

Written: <out>/swin_qat.safetensors with the trained weights and their ranges, and training.json; of
several schemes in <out>/<scheme>. The test set is read once, after the last step. The same seed on
the same machine gives the same weights on a CPU; on a GPU sums may round differently from run to
run. Products are TF32 there: 8-bit numbers and their products are exact in it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
from fashion_recipe import Recipe, augment

from fastswin import quant
from fastswin.bench.precision import fp32_scope
from fastswin.bench.record import device_name
from fastswin.data.atomic import write_text
from fastswin.data.fashion_mnist import (
    DEBIAN_FOLDER,
    PREPROCESS,
    class_names,
    fashion_mnist_slice,
    load_split,
)
from fastswin.data.preprocess import metadata_for
from fastswin.data.source import open_source
from fastswin.models import SwinTransformer


def calibrate(model: SwinTransformer, scheme: str, device: torch.device) -> quant.Calibration:
    """Ranges from the 512 shipped training images."""
    pixels = torch.from_numpy(fashion_mnist_slice("calibration")[0])
    return quant.calibrate(model, (PREPROCESS(p.to(device)) for p in pixels.split(64)), scheme)


def train(
    student: quant.QatModel,
    teacher: SwinTransformer,
    images: torch.Tensor,
    labels: torch.Tensor,
    options: argparse.Namespace,
) -> list[float]:
    """Train in place on uint8 images ``[n, 28, 28]``; the mean loss of every epoch."""
    device = images.device
    generator = torch.Generator(device).manual_seed(options.seed)
    optimizer = torch.optim.AdamW(student.parameters(), lr=options.learning_rate, weight_decay=0.0)
    batch = min(options.batch, len(images))
    steps = options.steps or options.epochs * (len(images) // batch)
    losses, total, began = [], 0.0, time.perf_counter()
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(len(images), device=device, generator=generator)
        index, order = order[:batch], order[batch:]
        x = augment(PREPROCESS.normalise(images[index]), Recipe(), generator)
        x = PREPROCESS.enlarge(x)
        optimizer.zero_grad(set_to_none=True)
        with fp32_scope(tf32=True):
            with torch.no_grad():
                target = teacher(x)
            loss = quant.distillation_loss(student(x), target, labels[index])
            loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        total += float(loss.detach())
        if (step + 1) % options.log_every == 0 or step + 1 == steps:
            since = (step % options.log_every) + 1
            losses.append(total / since)
            total = 0.0
            rate = (step + 1) * batch / (time.perf_counter() - began)
            print(f"step {step + 1}/{steps}  loss {losses[-1]:.5f}  {rate:.0f} img/s", flush=True)
    return losses


def accuracy(forward: object, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Top-1 in percent of uint8 images."""
    assert callable(forward)
    correct = 0
    with torch.no_grad():
        for part, truth in zip(images.split(100), labels.split(100), strict=True):
            correct += int((forward(PREPROCESS(part)).argmax(1) == truth).sum())
    return 100.0 * correct / len(images)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Train one scheme; what training.json holds."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    source = open_source("swin_fashion_mnist")
    teacher = source.model.to(device).eval()
    model = copy.deepcopy(teacher)
    calibration = calibrate(model, options.scheme, device)
    student = quant.QatModel(model, calibration).train()
    images, labels = (torch.from_numpy(a).to(device) for a in load_split(options.data, "train"))
    test, truth = (
        torch.from_numpy(a[: options.test_images]).to(device)
        for a in load_split(options.data, "test")
    )
    began = time.perf_counter()
    losses = train(student, teacher, images, labels.long(), options)
    seconds = time.perf_counter() - began
    finished = student.finish()
    options.out.mkdir(parents=True, exist_ok=True)
    path = quant.save_quantized(
        model.eval(),
        finished,
        options.out / "swin_qat.safetensors",
        metadata_for(PREPROCESS, list(class_names())),
    )
    result = {
        "scheme": options.scheme,
        "seed": options.seed,
        "batch": options.batch,
        "learning_rate": options.learning_rate,
        "losses": losses,
        "seconds": round(seconds, 1),
        "device": device_name(device),
        "torch": torch.__version__,
        "test_images": len(test),
        "fp32_percent": accuracy(teacher, test, truth),
        "post_training_percent": accuracy(quant.QuantizedSwin(teacher, calibration), test, truth),
        "trained_percent": accuracy(quant.QuantizedSwin(model, finished), test, truth),
    }
    write_text(options.out / "training.json", json.dumps(result, indent=2) + "\n")
    print(
        f"{options.scheme}: top-1 of {len(test)} test images: fp32 {result['fp32_percent']:.2f} %, "
        f"post-training {result['post_training_percent']:.2f} %, trained "
        f"{result['trained_percent']:.2f} %"
    )
    print(f"wrote {path}")
    return result


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    """One result a scheme."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=DEBIAN_FOLDER, help="folder of the four IDX files")
    add("--out", type=Path, default=Path("qat-run"), help="folder for what is written")
    add("--scheme", default="int8", help=f"some of {','.join(sorted(quant.PRESETS))}")
    add("--epochs", type=int, default=3)
    add("--steps", type=int, help="optimiser steps instead of epochs")
    add("--batch", type=int, default=256)
    add("--learning-rate", type=float, default=2e-5)
    add("--seed", type=int, default=0)
    add("--test-images", type=int, help="first test images only; default: all 10,000")
    add("--log-every", type=int, default=50, help="steps between two lines")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    schemes = options.scheme.split(",")
    if unknown := [scheme for scheme in schemes if scheme not in quant.PRESETS]:
        parser.error(f"--scheme must be of {', '.join(sorted(quant.PRESETS))}, got {unknown[0]!r}")
    results = []
    for scheme in schemes:
        out = options.out if len(schemes) == 1 else options.out / scheme
        results.append(run(argparse.Namespace(**(vars(options) | {"scheme": scheme, "out": out}))))
    return results


if __name__ == "__main__":
    main()
