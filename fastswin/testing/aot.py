"""Compile what the launchers launch, for any NVIDIA GPU, on a machine without one.

:func:`record_launches` runs launchers on CPU tensors (``torch.empty`` costs nothing) and notes each
kernel with its arguments instead of launching it; :func:`compile_launch` compiles one for a compute
capability and reports what the assembler says. Needs Triton outside its interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

#: Shared memory one program may use, bytes, by compute capability (CUDA C++ programming guide,
#: table of technical specifications).
SHARED_MEMORY_LIMIT = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}

#: Capabilities whose PTX without fp8 is that of 8.0 but for the order of some instructions (Triton
#: 3.8), so that 8.0's is assembled for them.
SAME_CODE = {86: 80, 89: 80}

_TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bool: "i1",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel call: function, arguments in order, options such as num_warps, and its grid."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.kernel.__name__


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the assembler reports: bytes of shared memory and of spilled registers, registers.

    ``serialized`` says that Hopper's asynchronous products wait for each other: the assembler does
    that, with a remark, where it finds their registers used while they are under way.
    ``idle_barriers`` are those that are made and then not used: their memory is another buffer's
    as well, whose values their beginning may destroy.
    ``dependent`` says that the code waits and triggers directly behind each wait (programmatic
    dependent launch, _triton/pdl.py), None that it does neither; False is a mistake.
    """

    name: str
    capability: int
    shared_bytes: int
    spill_bytes: int
    registers: int
    dependent: bool | None = None
    serialized: bool = False
    idle_barriers: int = 0


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collect launches inside the block; nothing runs, outputs stay as allocated."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        options: dict[str, Any] = {}
        for option in ("num_warps", "num_stages", "maxnreg", "launch_pdl"):
            if option in kwargs:
                options[option] = kwargs.pop(option)
        launches.append(Launch(self, arguments | kwargs, options, tuple(grid)))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile one recorded launch for ``capability`` (90 means 9.0).

    Triton stops at PTX and the assembler runs once, here. What is written to Triton's cache lies in
    a folder of its own, since it lacks a binary.
    """
    identity = binary_identity(launch)
    generated_for = capability
    if "fp8e4nv" not in identity:
        generated_for = SAME_CODE.get(capability, capability)
    key = identity, generated_for
    if key not in _generated:
        _generated[key] = _generate(launch, generated_for)
    ptx, shared_bytes, idle_barriers = _generated[key]
    registers, spills, serialized = assembler_report(ptx, capability)
    return Compiled(
        launch.name, capability, shared_bytes, spills, registers, _dependent(ptx), serialized,
        idle_barriers,
    )  # fmt: skip


def binary_identity(launch: Launch) -> str:
    """Equal for launches that run the same binary: kernel, types, constants, options."""
    return f"{launch.kernel.__module__}.{launch.name} {_describe(launch)} {launch.options}"


#: PTX, bytes of shared memory and idle barriers by binary and capability.
_generated: dict[tuple[str, int], tuple[str, int, int]] = {}


def _generate(launch: Launch, capability: int) -> tuple[str, int, int]:
    """PTX of a launch, the shared memory of one program, and barriers that nobody uses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import ASTSource

    source_type: Any = ASTSource
    if launch.kernel.is_gluon():
        from triton.experimental.gluon import _runtime

        source_type = _runtime.GluonASTSource
    source = source_type(launch.kernel, *_describe(launch))
    folder = os.path.join(triton.knobs.cache.dir, "without_binaries")
    with (
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder),
        mock.patch.object(CUDABackend, "make_cubin", return_value=b""),
    ):
        target = GPUTarget("cuda", capability, 32)
        built = triton.compile(source, target=target, options=launch.options)
    return built.asm["ptx"], built.metadata.shared, idle_barriers(built.asm["ttgir"])


def idle_barriers(ttgir: str) -> int:
    """Barriers of a kernel in Triton's GPU dialect that are initialised and then not used.

    Args:
        ttgir: text of the kernel, after the compiler has laid out tensors.
    """
    idle = 0
    for name in re.findall(r"(%\w+) = ttg\.local_alloc\b.*xi64,", ttgir):
        lines = _lines_with(name, ttgir)
        views = [re.match(r"\s*(%\w+) = ttg\.memdesc_index\b", line) for line in lines]
        uses = [
            line
            for line, view in zip(lines, views, strict=True)
            for line in (_lines_with(view[1], ttgir) if view else [line])
        ]
        made = [line for line in uses if "ttng.init_barrier" in line]
        idle += bool(made) and len(made) == len(uses)
    return idle


def fills_with_zeros(launch: Launch, capability: int) -> bool:
    """Whether all copies of 16 bytes of a compiled launch happen and say what of them is not 0."""
    ptx, *_ = _generated[binary_identity(launch), capability]
    copies = re.findall(r"^.*cp\.async\.c[ag]\..*$", ptx, re.MULTILINE)
    sized = r"\s*cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10, %r\d+;"
    return bool(copies) and all(re.fullmatch(sized, copy) for copy in copies)


def _lines_with(name: str, text: str) -> list[str]:
    """Lines that use a value, without the one that defines it."""
    used = re.compile(rf"{re.escape(name)}(?![\w#])")
    return [
        line
        for line in text.splitlines()
        if used.search(line) and not line.lstrip().startswith(f"{name} =")
    ]


def _dependent(ptx: str) -> bool | None:
    found = re.findall(r"griddepcontrol\.(\w+)", ptx)
    if not found:
        return None
    return found == ["wait", "launch_dependents"] * (len(found) // 2)


def _describe(launch: Launch) -> tuple[dict, dict, dict]:
    """Triton's types, constants and divisibility hints of a launch's arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    unspecialized = set(launch.kernel.do_not_specialize or ())
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.arguments.get(name, parameter.default)
        if parameter.is_constexpr or value is None:
            signature[name], constants[(index,)] = "constexpr", value
        elif hasattr(value, "block_shape"):
            shape = ",".join(map(str, value.block_shape))
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # Gluon's have one
            signature[name] = f"tensordesc<{_TRITON_TYPES[value.base.dtype]}[{shape}]{layout}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TRITON_TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in unspecialized:
            signature[name], constants[(index,)] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in unspecialized:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def assembler_report(ptx: str, capability: int) -> tuple[int, int, bool]:
    """Registers, spilled bytes, and whether products are serialized, from ``ptxas -v``."""
    import triton.backends.nvidia as nvidia

    folder = Path(nvidia.__file__).parent / "bin"
    ptxas = folder / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    if not ptxas.exists():
        ptxas = folder / "ptxas"
    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "kernel.ptx")
        source.write_text(ptx)
        result = subprocess.run(
            [str(ptxas), "-v", f"--gpu-name={architecture}", str(source), "-o", f"{scratch}/out"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    registers = re.search(r"Used (\d+) registers", result.stderr)
    spills = re.search(r"(\d+) bytes spill stores", result.stderr)
    serialized = "wgmma.mma_async instructions are serialized" in result.stderr
    return (
        int(registers[1]) if registers else 0, int(spills[1]) if spills else 0, serialized
    )  # fmt: skip
