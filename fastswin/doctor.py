"""What this machine can run, and why not the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from typing import Any

import torch

import fastswin
from fastswin._triton.available import MIN_CAPABILITY, interpreting, why_not_triton
from fastswin.data.shipped import SHIPPED
from fastswin.engine.precision import PRECISIONS, find_precision

#: Optional package (import name, distribution): (extra that installs it, what it is for).
OPTIONAL = {
    ("typer", "typer"): ("cli", "this command line"),
    ("rich", "rich"): ("cli", "tables"),
    ("timm", "timm"): ("timm", "pretrained weights, class names, accelerating timm models"),
    ("PIL", "pillow"): ("vision", "reading photos"),
    ("torchvision", "torchvision"): ("vision", "accelerating torchvision models"),
    ("transformers", "transformers"): ("hf", "accelerating Hugging Face models"),
    ("matplotlib", "matplotlib"): ("plot", "figures"),
    ("openvino", "openvino"): ("openvino", "the fastest fp32 and bf16 on CPUs"),
    ("onnxruntime", "onnxruntime"): ("onnxruntime", "int8 on CPUs, checks of exported files"),
}


def diagnose() -> dict[str, Any]:
    """Versions, devices, precisions, backends and optional packages, JSON-ready.

    Returns:
        ``versions``, ``gpus``, ``precisions``, ``backends``, ``packages`` and ``shipped_models``;
        every entry that cannot be used has a ``reason``, null otherwise.
    """
    return {
        "versions": _versions(),
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())],
        "precisions": _precisions(),
        "backends": _backends(),
        "packages": _packages(),
        "shipped_models": [
            {
                "name": name,
                "reason": None if path.is_file() else "its weights are not in this installation",
            }
            for name, path in SHIPPED.items()
        ],
    }


def default_device() -> torch.device:
    """The current GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_precisions(device: torch.device) -> list[str]:
    """The precisions that a device runs, in the order of :data:`PRECISIONS`."""
    return [name for name in PRECISIONS if _why_not_precision(name, device) is None]


def _why_not_precision(name: str, device: torch.device) -> str | None:
    try:
        find_precision(name, device)
    except ValueError as error:
        return str(error)
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, Any]:
    return {
        "fastswin": fastswin.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "triton_interpreter": interpreting(),
    }


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    old = f"compute capability {capability[0]}.{capability[1]} is below 7.5"
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{capability[0]}.{capability[1]}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "reason": old if capability < MIN_CAPABILITY else None,
    }


def _precisions() -> list[dict[str, Any]]:
    device = default_device()
    return [
        {"name": name, "device": str(device), "reason": _why_not_precision(name, device)}
        for name in PRECISIONS
    ]


def _backends() -> list[dict[str, Any]]:
    device = default_device()
    no_gpu = None if torch.cuda.is_available() else _why_no_gpu()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    rows = {
        "triton kernels": no_gpu
        if no_gpu and not interpreting()
        else why_not_triton(device, torch.float32),
        "cuda graphs": no_gpu,
        "torch.compile": None if compiler else "no C++ compiler (g++ or clang++) on the PATH",
        "pytorch reference": None,
    }
    return [{"name": name, "reason": reason} for name, reason in rows.items()]


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty"
    return "no NVIDIA GPU is visible to PyTorch"


def _packages() -> list[dict[str, Any]]:
    rows = []
    for (module, distribution), (extra, purpose) in OPTIONAL.items():
        installed = importlib.util.find_spec(module) is not None
        rows.append(
            {
                "name": distribution,
                "version": _version(distribution) if installed else None,
                "purpose": purpose,
                "reason": None if installed else f"pip install 'fastswin[{extra}]'",
            }
        )
    return rows


def default_bench_grid(device: torch.device) -> tuple[list[str], list[int]]:
    """Dtypes and batches to time where none are named; a CPU gets one that ends in minutes."""
    if device.type == "cuda":
        return ["fp16", "bf16"], [1, 8, 32, 64]
    return ["fp32"], [1]
