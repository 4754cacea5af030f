"""What this CPU's instructions mean for the choice of a runtime."""

from __future__ import annotations

import dataclasses
import functools
import platform
from pathlib import Path

import torch


@dataclasses.dataclass(frozen=True)
class Cpu:
    """Instructions that matter.

    Attributes:
        bf16: products of bf16 numbers (AVX512-BF16, AMX, or ARM's BF16).
        dot8: sums of four 8-bit products in 32 bits (VNNI, AMX, or ARM's dot product).
        saturating: 8-bit products are added in pairs of 16 bits, which may overflow.
    """

    bf16: bool
    dot8: bool
    saturating: bool


def cpu_from_flags(flags: frozenset[str], machine: str) -> Cpu:
    """Read instruction names as the Linux kernel spells them, such as ``avx512_vnni``."""
    x86 = machine.lower() in ("x86_64", "amd64", "i386", "i686")
    dot8 = bool(flags & {"avx512_vnni", "avx_vnni", "amx_int8", "dot", "i8mm", "asimddp"})
    return Cpu(
        bf16=bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}),
        dot8=dot8,
        saturating=x86 and not dot8,
    )


@functools.cache
def this_cpu() -> Cpu:
    """The CPU that runs this process."""
    return cpu_from_flags(_flags(), platform.machine())


def _flags() -> frozenset[str]:
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch 2.12 and later
    if capabilities is not None:
        return frozenset(name for name, value in capabilities().items() if value is True)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").partition(":")[2].split())
