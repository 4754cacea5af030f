"""One start: a fresh process that loads a model and answers one batch, then says how long it took.

    python -m fastswin.bench.startup_child '{"variant": ..., "started": ..., "folder": ..., ...}'

Imports nothing that its variant does not need: importing is part of what is measured.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch


def main(argument: str) -> int:
    """Run the start that ``argument`` describes; prints its parts in seconds as JSON."""
    job = json.loads(argument)
    folder = Path(job["folder"])
    imported = time.time()
    torch.zeros(1, device=job["device"]).cpu()  # the device's context, which any program waits for
    touched = time.time()
    from safetensors.torch import load_file, save_file

    images = load_file(folder / "images.safetensors")["images"].to(job["device"])
    run = _fastswin(job, folder) if job["variant"] == "fastswin" else _torch(job, folder)
    if images.is_cuda:
        torch.cuda.synchronize()
    loaded = time.time()
    logits = run(images).float().cpu()  # waits for the device
    answered = time.time()
    save_file({"logits": logits.contiguous()}, folder / "logits.safetensors")
    parts = {
        "import_s": imported - job["started"],
        "context_s": touched - imported,
        "load_s": loaded - touched,
        "first_call_s": answered - loaded,
        "total_s": answered - job["started"],
    }
    print(json.dumps(parts), flush=True)
    return 0


def _fastswin(job: dict[str, Any], folder: Path) -> Any:
    from fastswin import Engine
    from fastswin.models import SwinConfig

    config = SwinConfig(**job["config"])
    return Engine(folder / "weights.safetensors", job["dtype"], device=job["device"], config=config)


def _torch(job: dict[str, Any], folder: Path) -> Any:
    from fastswin.bench.contenders import model_for
    from fastswin.bench.precision import fp32_scope
    from fastswin.bench.problems import Problem
    from fastswin.bench.source import build_source
    from fastswin.models import SwinConfig

    config = SwinConfig(**job["config"]) if job["own_config"] else None
    problem = Problem(
        job["model"], job["dtype"], job["batch"], config, str(folder / "weights.safetensors")
    )
    model: Any = model_for(build_source(problem), problem, torch.device(job["device"]))
    if job["variant"] == "compile":
        model = torch.compile(model, dynamic=False)
    elif job["variant"] == "compile-reduce-overhead":
        model = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def run(images: torch.Tensor) -> torch.Tensor:
        with fp32_scope(tf32=problem.tf32), torch.inference_mode():
            return model(images)

    return run


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
