"""Launches whose arguments Triton binds once per kind of call.

``kernel[grid](...)`` binds, specialises and hashes 30 to 60 arguments each time. Inference hides
that behind CUDA graphs; a training step of 200 such launches does not: on an H100's host Swin-T
took 86 ms a step for 22 ms of kernels. :func:`launch` keeps the compiled kernel by what Triton
specialises on (types, constants, alignment of pointers, integers that are 1 or multiples of 16) and
calls it directly the next time. Tensors count by kind also where they are given by name.

Threads may compile side by side, but must not load what they compiled: Triton's launchers are C
modules of one name, and loading one a second time writes into the module object that another thread
is about to read (of 60 models built at once on an H200 one got another kernel's launcher:
"function takes exactly 34 arguments (51 given)"). Within :func:`compiling_only` launches compile
and do no more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from fastswin._triton.device import on_device

#: Compiled kernels with the parameters behind those in order, name and default, by kind of call.
_COMPILED: dict[Hashable, tuple[Any, list[tuple[str, Any]]]] = {}

#: Whether launches in this context compile only; a new thread begins with False.
_COMPILE_ONLY: ContextVar[bool] = ContextVar("fastswin_compile_only", default=False)


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Launches within compile their kernel, unless it is known, and run nothing."""
    token = _COMPILE_ONLY.set(True)
    try:
        yield
    finally:
        _COMPILE_ONLY.reset(token)


def compiles_only() -> bool:
    """Whether this context is within :func:`compiling_only`."""
    return _COMPILE_ONLY.get()


def on_grid(kernel: Any, grid: tuple[int, ...], compile_only: bool = False) -> Callable[..., Any]:
    """``kernel[grid]``, or its compilation alone within :func:`compiling_only`.

    Args:
        kernel: a ``triton.jit`` function.
        grid: programs along each axis.
        compile_only: compile in any context.
    """
    if compile_only or _COMPILE_ONLY.get():
        return functools.partial(kernel.warmup, grid=grid)
    return kernel[grid]


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run ``kernel`` on a grid of ``programs``, on the device of its first argument.

    Args:
        kernel: a ``triton.jit`` function.
        programs: size of the grid's first axis; the others are 1.
        arguments: run-time arguments in order, the first one a tensor.
        constants: every other parameter by name, compile-time values or tensors, and launch options
            such as ``num_warps``.
    """
    if _COMPILE_ONLY.get():
        on_grid(kernel, (programs,))(*arguments, **constants)
        return
    key = kind_of_call(kernel, arguments, constants)
    with on_device(arguments[0].device):
        if found := _COMPILED.get(key):
            compiled, behind = found
            compiled[(programs, 1, 1)](
                *arguments, *[constants.get(name, default) for name, default in behind]
            )
            return
        compiled = kernel[(programs,)](*arguments, **constants)
        if compiled is not None:  # the interpreter compiles nothing
            parameters = list(kernel.signature.parameters.values())[len(arguments) :]
            _COMPILED[key] = (compiled, [(p.name, p.default) for p in parameters])


def kind_of_call(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Hashable:
    """Equal for calls that run the same binary on the same device."""
    named = tuple((name, _by_name(value)) for name, value in constants.items())
    return id(kernel), arguments[0].device, named, tuple(map(_kind, arguments))


def _by_name(value: Any) -> Hashable:
    """A compile-time value is itself part of the code, a tensor counts by its kind."""
    return _kind(value) if isinstance(value, torch.Tensor) else value


def _kind(argument: Any) -> Hashable:
    """What of an argument the compiled code depends on."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31, argument < 2**63
    if hasattr(argument, "block_shape"):  # a tensor descriptor
        return argument.base.dtype, *argument.block_shape
    return type(argument).__name__
