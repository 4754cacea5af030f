"""Does training on fused operators learn the same? Fashion-MNIST, several seeds, with and without.

    python examples/compare_fashion.py --epochs 10 --side-by-side 6 --limit-s 240

First each way is timed alone: plain PyTorch, and fused operators replayed from CUDA graphs. Then
each seed trains both ways with one recipe, every run in a process of its own, ``--side-by-side`` of
them sharing the GPU; the number of epochs is the largest that fits ``--limit-s``, at most
``--epochs``. Printed and written to ``--record``: loss of every epoch, final test accuracy, images
per second, and three answers: the mean loss curves, plain and fused, lie no further apart than
plain runs of different seeds do, the mean final accuracy differs by at most 0.2 points, and how
much faster it was. Exit code 1 where one of the first two is no, or a run is missing. Further
options are train_fashion's.

Means, because two runs of one seed are no pair: rounding that differs once is amplified until they
are as far apart as runs of two seeds. The largest of three such distances exceeds the spread of
three plain seeds in every second comparison of plain runs with plain runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import train_fashion
from fashion_recipe import Recipe

from fastswin.bench.record import make_run_info
from fastswin.data.atomic import write_text
from fastswin.data.fashion_mnist import DEBIAN_FOLDER, load_split

#: What train_fashion is told, by label.
RUNS = {
    "plain": ("--no-compile", "--accelerate", "reference"),
    "fused": ("--no-compile", "--accelerate", "auto", "--capture"),
}

ACCURACY_POINTS = 0.2

#: Seconds for starting processes, capturing, and the passes over the test images.
RESERVE_S = 45.0

#: Runs that share a GPU take this much longer than one after the other, at worst; more where
#: something else is on it as well (``--sharing``).
SHARING = 1.25

#: Steps before timing, samples, steps of one sample.
TIMING = {"cuda": (10, 7, 10), "cpu": (1, 3, 1)}


def judge(results: dict[str, list[dict[str, Any]]], step_ms: dict[str, float]) -> dict[str, Any]:
    """The three answers.

    Args:
        results: what training.json holds, of every seed, by label.
        step_ms: time of one step alone on the device, by label.
    """
    curves = {k: list(zip(*(r["losses"] for r in v), strict=True)) for k, v in results.items()}
    spread = [max(epoch) - min(epoch) for epoch in curves["plain"]]
    means = {k: [statistics.mean(epoch) for epoch in v] for k, v in curves.items()}
    apart = [abs(p - f) for p, f in zip(means["plain"], means["fused"], strict=True)]
    accuracy = {k: [r["test_accuracy_percent"] for r in v] for k, v in results.items()}
    mean = {k: sum(v) / len(v) for k, v in accuracy.items()}
    return {
        "seeds": len(results["plain"]),
        "losses": {k: [r["losses"] for r in v] for k, v in results.items()},
        "loss_spread_of_plain_seeds": spread,
        "loss_distance_of_means": apart,
        "losses_within_spread": sum(apart) <= sum(spread),
        "accuracy_percent": accuracy,
        "accuracy_difference_points": mean["fused"] - mean["plain"],
        "accuracy_agrees": abs(mean["fused"] - mean["plain"]) <= ACCURACY_POINTS,
        "step_ms": step_ms,
        "speed_up": step_ms["plain"] / step_ms["fused"],
    }


def time_steps(arguments: list[str]) -> tuple[float, int]:
    """Median milliseconds of one optimiser step, and the steps of an epoch."""
    options = train_fashion.parse(arguments)
    recipe = Recipe(batch=options.batch)
    trainer = train_fashion.Trainer(options, recipe)
    warmup, samples, steps = TIMING[trainer.device.type]
    images, labels = (
        torch.from_numpy(a[: options.limit_train]).to(trainer.device)
        for a in load_split(options.data, "train")
    )
    index = torch.arange(min(recipe.batch, len(images)), device=trainer.device)
    times: list[float] = []
    for sample in range(samples + 1):
        began = time.perf_counter()
        for _ in range(steps if sample else warmup):
            loss = trainer.train_step(images, labels.long(), index)
        float(loss)  # waits for the device
        times.append((time.perf_counter() - began) * 1e3 / steps)
    return statistics.median(times[1:]), len(images) // len(index)


def epochs_that_fit(left_s: float, epoch_s: float, at_most: int, sharing: float = SHARING) -> int:
    """Epochs of all runs together, ``epoch_s`` seconds each, that fit ``left_s``; at least one."""
    return max(1, min(at_most, int((left_s - RESERVE_S) / (sharing * epoch_s))))


def command_of(arguments: list[str]) -> list[str]:
    """The command line of one training run."""
    return [sys.executable, train_fashion.__file__, *arguments]


def train_all(
    runs: list[tuple[Path, list[str]]],
    side_by_side: int,
    deadline: float,
    say: Callable[[str], None] = print,
) -> None:
    """Run each command with its folder as the place of its log, until ``time.monotonic`` says so.

    A run that is not done by then is stopped; its folder has no training.json.
    """
    threads = str(max(1, (os.cpu_count() or 1) // side_by_side))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    waiting, going = list(runs), {}
    try:
        while (waiting or going) and time.monotonic() < deadline:
            while waiting and len(going) < side_by_side:
                folder, command = waiting.pop(0)
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / "log.txt").open("w") as log:
                    going[folder] = subprocess.Popen(
                        command, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
            for folder, process in list(going.items()):
                if process.poll() is not None:
                    del going[folder]
                    last = (folder / "log.txt").read_text().strip().splitlines()[-2:]
                    say(f"{folder.name}: " + (" | ".join(last) or "no output"))
            time.sleep(0.1)
    finally:
        for folder, process in going.items():
            process.terminate()
            process.wait()
            say(f"{folder.name}: stopped")
        for folder, _ in waiting:
            say(f"{folder.name}: not started")


def curve_lines(answer: dict[str, Any]) -> list[str]:
    """The loss curves side by side: seeds of plain, seeds of fused, spread and distance."""
    lines = ["epoch  " + "  ".join(f"{k}-{s}" for k in RUNS for s in range(answer["seeds"]))]
    lines[0] += "   spread    apart"
    for i, (spread, apart) in enumerate(
        zip(
            answer["loss_spread_of_plain_seeds"],
            answer["loss_distance_of_means"],
            strict=True,
        )
    ):
        losses = "  ".join(f"{curve[i]:7.4f}" for k in RUNS for curve in answer["losses"][k])
        lines.append(f"{i + 1:5d}  {losses}  {spread:7.4f}  {apart:7.4f}")
    return lines


def document(answer: dict[str, Any], epochs: int, recipe: Recipe, device: str) -> dict[str, Any]:
    """The record: this machine and the answers."""
    info = asdict(make_run_info("train_fashion", torch.device(device), 0.0, 0.0))
    for ceiling in ("copy_tbs", "gemm_tflops"):  # nothing here is compared with them
        del info[ceiling]
    dtype = "bf16" if device.startswith("cuda") else "fp32"
    return {**info, "dtype": dtype, "epochs": epochs, "recipe": asdict(recipe), **answer}


def main(arguments: list[str] | None = None) -> int:
    """Time, train, judge and write; 0 where both answers are yes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=DEBIAN_FOLDER)
    parser.add_argument("--out", type=Path, default=Path("fashion-comparison"))
    parser.add_argument("--record", type=Path, help="default: comparison.json in --out")
    parser.add_argument("--epochs", type=int, default=10, help="at most this many")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--side-by-side", type=int, default=1, help="runs at a time")
    parser.add_argument("--limit-s", type=float, default=540.0, help="wall time of everything")
    parser.add_argument(
        "--sharing", type=float, default=SHARING,
        help="how much longer runs take than alone, one after the other",
    )  # fmt: skip
    options, further = parser.parse_known_args(arguments)
    began = time.monotonic()
    if options.seeds < 2:
        parser.error(f"--seeds must be at least 2, to know their spread, got {options.seeds}")
    if options.sharing <= 0:
        parser.error(f"--sharing must be above 0, got {options.sharing}")
    if options.side_by_side < 1:
        parser.error(f"--side-by-side must be at least 1, got {options.side_by_side}")
    common = ["--data", str(options.data), "--minutes", "0", *further]
    parsed = train_fashion.parse(common)

    step_ms: dict[str, float] = {}
    for label, how in RUNS.items():
        step_ms[label], steps = time_steps([*common, *how])
        rate = parsed.batch / step_ms[label] * 1e3
        print(f"{label}: {step_ms[label]:.2f} ms a step alone, {rate:.0f} images/s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the runs to come are other processes
    left_s = options.limit_s - (time.monotonic() - began)
    epoch_s = options.seeds * steps * sum(step_ms.values()) / 1e3
    epochs = epochs_that_fit(left_s, epoch_s, options.epochs, options.sharing)
    print(f"{epochs} epochs of {steps} steps, {options.seeds} seeds", flush=True)

    folders = {k: [options.out / f"{k}-{s}" for s in range(options.seeds)] for k in RUNS}
    runs = []
    for seed in range(options.seeds):
        for label, how in RUNS.items():
            folder = folders[label][seed]
            for name in ("checkpoint.pt", "training.json"):  # every run starts afresh
                (folder / name).unlink(missing_ok=True)
            own = ["--out", str(folder), "--epochs", str(epochs), "--seed", str(seed)]
            runs.append((folder, command_of([*common, *how, *own])))
    train_all(runs, options.side_by_side, began + options.limit_s)

    results: dict[str, list[dict[str, Any]]] = {label: [] for label in RUNS}
    for pair in zip(*folders.values(), strict=True):
        files = [folder / "training.json" for folder in pair]
        if all(file.exists() for file in files):
            for label, file in zip(RUNS, files, strict=True):
                results[label].append(json.loads(file.read_text(encoding="utf-8")))
    if len(results["plain"]) < 2:
        print("not judged: fewer than two seeds finished both ways")
        return 1
    answer = judge(results, step_ms)
    recipe = Recipe(batch=parsed.batch, max_epochs=epochs)
    record = options.record or options.out / "comparison.json"
    write_text(record, json.dumps(document(answer, epochs, recipe, parsed.device), indent=1) + "\n")
    print("\n".join(curve_lines(answer)))
    for label, values in answer["accuracy_percent"].items():
        print(f"{label}: test accuracy " + ", ".join(f"{v:.2f}" for v in values) + " %")
    print(
        f"losses within the spread: {answer['losses_within_spread']}; accuracy differs by "
        f"{answer['accuracy_difference_points']:+.3f} points: {answer['accuracy_agrees']}; "
        f"speed-up {answer['speed_up']:.2f}x; wrote {record}"
    )
    complete = answer["seeds"] == options.seeds
    return 0 if complete and answer["losses_within_spread"] and answer["accuracy_agrees"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
