"""Does training on fused operators learn the same? Fashion-MNIST, several seeds, with and without.

    python examples/compare_fashion.py --epochs 10 --limit-s 540

Each seed trains twice with one recipe: on plain PyTorch and on fused operators. Printed and written
to --out/comparison.json: loss of every epoch, final test accuracy, seconds, and three answers:
the loss curves differ by no more than plain runs of different seeds do, the mean final accuracy
differs by at most 0.2 points, and how much faster it was. Exit code 1 where one of the first two
is no.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import train_fashion

from fastswin.data.atomic import write_text
from fastswin.data.fashion_mnist import DEBIAN_FOLDER

#: Label, value of train_fashion's --accelerate.
RUNS = {"plain": "reference", "fused": "auto"}

ACCURACY_POINTS = 0.2


def judge(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The three answers, from ``training.json`` of every seed by label.

    The first epoch of a process warms up and is left out of the speed.
    """
    plain, fused = results["plain"], results["fused"]
    curves = list(zip(*(r["losses"] for r in plain), strict=True))
    spread = [max(epoch) - min(epoch) for epoch in curves]
    apart = [
        max(abs(p["losses"][i] - f["losses"][i]) for p, f in zip(plain, fused, strict=True))
        for i in range(len(curves))
    ]
    accuracy = {k: [r["test_accuracy_percent"] for r in v] for k, v in results.items()}
    mean = {k: sum(v) / len(v) for k, v in accuracy.items()}
    seconds = {k: sum(r["seconds"] for r in v) for k, v in results.items()}
    return {
        "seeds": len(plain),
        "loss_spread_of_plain_seeds": spread,
        "loss_distance_fused_from_plain": apart,
        "losses_within_spread": sum(apart) <= sum(spread),
        "accuracy_percent": accuracy,
        "accuracy_difference_points": mean["fused"] - mean["plain"],
        "accuracy_agrees": abs(mean["fused"] - mean["plain"]) <= ACCURACY_POINTS,
        "speed_up": seconds["plain"] / seconds["fused"],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DEBIAN_FOLDER)
    parser.add_argument("--out", type=Path, default=Path("fashion-comparison"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=540.0, help="start no seed after this")
    parser.add_argument("--extra", nargs="*", default=[], help="further options of train_fashion")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    results: dict[str, list[dict[str, Any]]] = {label: [] for label in RUNS}
    for seed in range(options.seeds):
        if time.monotonic() - began > options.limit_s:
            print(f"not done: seed {seed} would start after {options.limit_s:g} s")
            break
        for label, impl in RUNS.items():
            folder = options.out / f"{label}-{seed}"
            (folder / "checkpoint.pt").unlink(missing_ok=True)  # every run starts afresh
            results[label].append(
                train_fashion.main([
                    "--data", str(options.data), "--out", str(folder), "--minutes", "0",
                    "--epochs", str(options.epochs), "--seed", str(seed), "--no-compile",
                    "--accelerate", impl, *options.extra,
                ])
            )  # fmt: skip
    if len(results["plain"]) < 2:
        print("not judged: it takes two seeds to know their spread")
        return 1
    answer = judge(results)
    write_text(options.out / "comparison.json", json.dumps(answer, indent=2) + "\n")
    print(json.dumps(answer, indent=2))
    complete = answer["seeds"] == options.seeds
    return 0 if complete and answer["losses_within_spread"] and answer["accuracy_agrees"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
