"""Triton kernels to PTX that any launcher of plain CUDA kernels can run, without a GPU.

Two things keep Triton's own PTX from being launched with the kernel's arguments alone. Its entry
ends in two hidden pointers (global and profile scratch) that its launcher passes; a kernel that
allocates no scratch never reads them, so they are cut from the parameter list. And it names the
source files of the machine that compiled it; those lines are left out, so that the same kernel is
the same text everywhere.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from fastswin._triton.available import TRITON_INSTALLED, interpreting

#: PTX version, 80 for 8.0: an old one with the architecture, because the driver compiles the text.
#: 8.0 loads since driver 525 (CUDA 12.0), 8.7 since 570 (CUDA 12.8); PTX ISA, release notes.
PTX_VERSION, PTX_VERSION_BLACKWELL = 80, 87

_ENTRY = re.compile(r"(\.visible \.entry (\w+)\()([^)]*)(\))")
_SOURCE_LINE = re.compile(r"^[ \t]*\.(?:loc|file)\b.*\n", re.MULTILINE)
_DEBUG_SECTION = re.compile(r"^[ \t]*\.section[ \t]+\.debug\w*\s*\{[^}]*\}\n?", re.MULTILINE)
_COMMENT = re.compile(r"[ \t]*//.*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Ptx:
    """One kernel, ready for ``cuLaunchKernel``.

    Attributes:
        name: entry point.
        text: the PTX.
        capability: what it was compiled for, 86 for 8.6. Runs there and on later cards, except
            that 90 and later are compiled for exactly that architecture.
        threads: threads per block.
        shared_bytes: dynamic shared memory per block.
        parameters: PTX type of each parameter in order, "u64" for a pointer, "u32" for an integer.
    """

    name: str
    text: str
    capability: int
    threads: int
    shared_bytes: int
    parameters: tuple[str, ...]


def compile_ptx(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    capability: int,
    num_warps: int,
    num_stages: int = 3,
) -> Ptx:
    """Compile a Triton kernel for one compute capability.

    Args:
        kernel: a ``@triton.jit`` function.
        signature: Triton type by parameter name, such as "*fp16" or "i32", in the kernel's order;
            pointers must be aligned to 16 bytes when it runs.
        constants: value of every ``tl.constexpr`` parameter.
        capability: 86 for compute capability 8.6; at least 75.
        num_warps: warps per block.
        num_stages: depth of the pipeline of loops that name none.

    Returns:
        The kernel with exactly the parameters of ``signature``.

    Raises:
        ImportError: Triton is not installed.
        RuntimeError: Triton interprets in this process, or the kernel needs scratch memory.
        ValueError: the names do not fit the kernel.
    """
    if not TRITON_INSTALLED:
        raise ImportError("compiling kernels for TensorRT needs Triton: pip install triton")
    if interpreting():
        raise RuntimeError("PTX cannot be compiled in a process with TRITON_INTERPRET=1")
    if [*signature, *constants] != list(kernel.arg_names):
        wanted = set(kernel.arg_names) ^ {*signature, *constants}
        raise ValueError(f"{kernel.__name__}: signature and constants do not fit: {sorted(wanted)}")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict(signature) | dict.fromkeys(constants, "constexpr")
    position = {name: (index,) for index, name in enumerate(types)}
    source = ASTSource(
        kernel,
        types,
        {position[name]: value for name, value in constants.items()},
        {position[n]: [["tt.divisibility", 16]] for n, t in signature.items() if t[0] == "*"},
    )
    version = PTX_VERSION if capability < 100 else PTX_VERSION_BLACKWELL
    options = {"num_warps": num_warps, "num_stages": num_stages, "ptx_version": version}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    metadata = built.metadata
    if metadata.global_scratch_size or getattr(metadata, "profile_scratch_size", 0):
        raise RuntimeError(f"{kernel.__name__} needs scratch memory, which a plugin cannot pass")
    text = strip_source_lines(built.asm["ptx"])
    text, parameters = cut_hidden_parameters(text, len(signature))
    return Ptx(
        metadata.name, text, capability, 32 * metadata.num_warps, metadata.shared, parameters
    )


def strip_source_lines(ptx: str) -> str:
    """PTX without comments, source positions and debug sections."""
    return _COMMENT.sub("", _SOURCE_LINE.sub("", _DEBUG_SECTION.sub("", ptx)))


def cut_hidden_parameters(ptx: str, count: int) -> tuple[str, tuple[str, ...]]:
    """Keep the first ``count`` parameters of the entry point.

    Args:
        ptx: text with one entry point.
        count: parameters that the launcher will pass.

    Returns:
        The text, and the types of its parameters.

    Raises:
        RuntimeError: there are fewer parameters, or one that would be cut is read.
    """
    found = _ENTRY.search(ptx)
    if found is None:
        raise RuntimeError("the PTX has no entry point")
    parameters = [p.strip() for p in found[3].split(",")]
    if len(parameters) < count:
        raise RuntimeError(f"{found[2]} takes {len(parameters)} parameters, not {count}")
    body = ptx[found.end() :]
    for parameter in parameters[count:]:
        name = parameter.split()[-1]
        if re.search(rf"\b{re.escape(name)}\b", body):
            raise RuntimeError(f"{found[2]} reads {name}, which a plugin cannot pass")
    kept = ",\n\t".join(parameters[:count])
    text = f"{ptx[: found.start()]}{found[1]}\n\t{kept}\n{found[4]}{body}"
    return text, tuple(p.split()[1].lstrip(".") for p in parameters[:count])
