"""A tiny model, fixed ceilings and a stand-in engine: the harness is tested, not the kernels."""

from types import SimpleNamespace

import pytest
import torch

from fastswin.bench import suites
from fastswin.bench.problems import Problem
from fastswin.bench.roofline import Ceilings
from fastswin.engine.backends import Choice
from fastswin.models import SwinConfig

TINY = SwinConfig(
    image_size=(16, 24),
    embed_dim=24,
    depths=(1, 2),
    num_heads=(2, 4),
    window_size=(2, 3),
    num_classes=10,
)


class StandInEngine:
    """Has the engine's constructor, call and report, and runs the source as it is."""

    def __init__(self, source, precision="fp16", device=None, backend="auto", calibration=None):
        self.model = source
        self.dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
        self.device = torch.device(device)

    def report(self):
        return SimpleNamespace(backend=Choice("torch", "fp32", "a stand-in"))

    def __call__(self, images):
        with torch.inference_mode():
            return self.model(images.float()).to(self.dtype)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny products gain nothing from more, and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_problem():
    return Problem("tiny", "fp32", 2, TINY)


@pytest.fixture
def engine(monkeypatch):
    """Installs :class:`StandInEngine`; tests may patch it further."""
    monkeypatch.setattr("fastswin.engine.Engine", StandInEngine)
    return StandInEngine


@pytest.fixture
def run_suite(monkeypatch, tmp_path, engine):
    """``run_model_suite`` on the CPU with fixed ceilings, writing below ``tmp_path``."""
    dtypes = ("fp32", "tf32", "fp16", "bf16", "int8")
    ceilings = Ceilings(0.01, dict.fromkeys(dtypes, 0.02))
    monkeypatch.setattr(suites, "measure_ceilings", lambda device, dtypes: ceilings)

    def run(problems, variants=("fastswin", "eager"), device="cpu", **options):
        options = {"warmup": 0, "iterations": 1, **options}
        return suites.run_model_suite(problems, variants, device, tmp_path, **options)

    return run
