"""Compile one launch for a GPU that is not there, and read what the assembler says about it.

Problems are built on meta tensors, so real sizes cost no memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import torch

_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_for(kernel, problem, capability: int):
    """Compile ``problem``'s launch of ``kernel`` for one compute capability, as the JIT would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[str, object] = dict(problem.constants)
    attributes: dict[tuple[int], list[list[object]]] = {}
    for position, (name, value) in enumerate(zip(names, problem.arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name] = "fp32"
            aligned = False
        elif value == 1:
            signature[name] = "constexpr"
            constants[name] = 1
            aligned = False
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    signature |= {name: "constexpr" for name in problem.constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": problem.num_warps},
    )


def resources(compiled) -> dict[str, int]:
    """Registers, stack bytes (spills live there) and static shared memory of one kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", cubin.name],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text))
    return {
        "registers": int(found["REG"]),
        "stack_bytes": int(found["STACK"]) + int(found["LOCAL"]),
        "shared_bytes": compiled.metadata.shared,
    }
