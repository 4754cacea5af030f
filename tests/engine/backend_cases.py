"""Engines on each runtime, and the CPUs that decide about them."""

from __future__ import annotations

import pytest
from engine_cases import cpu_engine

from fastswin.engine.backends.cpu import Cpu

RUNTIMES = pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])

#: Instructions of an Intel Xeon since 2023, of one since 2019, and of an AMD EPYC before 2022.
AMX = Cpu(bf16=True, dot8=True, saturating=False)
VNNI = Cpu(bf16=False, dot8=True, saturating=False)
AVX2 = Cpu(bf16=False, dot8=False, saturating=True)


def runtime_engine(source, runtime: str, precision: str = "fp32", **arguments):
    return cpu_engine(source, precision, backend=runtime, **arguments)
