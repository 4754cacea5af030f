"""Run a warp-specialised kernel's own source on a CPU: partitions are threads, tiles are tensors.

The Gluon functions' Python bodies are executed with stand-ins for the dialect: barriers count
arrivals and bytes and keep a phase as the hardware does, copies from memory land at once, products
are exact to fp32. Products read shared memory, and copies to memory theirs, as late as the thread
that started them waits for them. A wait that nobody ends fails by time, a slot that is overwritten
early shows in the result.
"""

from __future__ import annotations

import contextvars
import random
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from gluon_memory import PATIENCE, Barrier, Descriptor, Pointer, Shared, Tile, Value

__all__ = ["Descriptor", "Pointer", "bound_source", "handed_to_assembly", "run_source", "settled"]


class Product:
    """A product under way; its operands in shared memory are read when it is waited for."""

    def __init__(self, x: Any, w: Tile, acc: Any) -> None:
        self.parts: Any = (x, w, acc)
        self.shape = acc.shape
        self.result: torch.Tensor | None = None

    def end(self) -> None:
        x, w, acc = self.parts
        assert self.result is None
        self.result = _ended(acc) + x.data.float() @ w.data.float()


class Flying(threading.local):
    """What a thread has started and not waited for, oldest first."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[tuple[Descriptor, list[Any], Tile]] = []


_flying = Flying()


def _pause() -> None:
    if random.random() < 0.3:
        time.sleep(random.random() * 1e-4)


def _copy_in(
    desc: Descriptor, at: list[Any], barrier: Barrier, tile: Tile, pred: Any = True
) -> None:
    if not pred:
        return
    _pause()
    tile.data.copy_(desc.read(at))
    barrier.landed(desc.block_type.nbytes)


def _load(pointer: Pointer, mask: torch.Tensor | None = None, other: float = 0.0) -> torch.Tensor:
    if mask is None:
        return pointer.base[pointer.offset].as_subclass(Value)
    at = torch.where(mask, pointer.offset, 0)
    found = torch.where(mask, pointer.base[at], torch.tensor(other, dtype=pointer.base.dtype))
    return found.as_subclass(Value)


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    """Buffers by number and rows and columns, or one by rows and columns alone."""
    if dtype is torch.int64 or len(shape) == 3:
        return Shared(dtype, shape)
    return Shared(dtype, [1, *shape]).index(0)


def _maximum(a: Any, b: Any) -> Any:
    return a.clamp(min=b) if isinstance(a, torch.Tensor) and a.ndim else max(a, b)


def _zeros(shape: list[int], dtype: Any, layout: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(Value)


def _store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    mask = mask.expand_as(pointer.offset)
    pointer.base[pointer.offset[mask]] = value[mask]


def _layout(version: list, warps: list, shape: list) -> Any:
    return types.SimpleNamespace(warps_per_cta=warps, instr_shape=shape)


def _ended(value: Any) -> torch.Tensor:
    """A product's result; other values are their own."""
    if not isinstance(value, Product):
        return value
    assert value.result is not None, "a product is used before it has been waited for"
    return value.result


def _multiply(x: Any, w: Tile, acc: Any, is_async: bool) -> Product:
    assert is_async
    _pause()
    _flying.products.append(Product(x, w, acc))
    return _flying.products[-1]


def _wait_products(outstanding: int, deps: tuple) -> Any:
    _pause()
    while len(_flying.products) > outstanding:
        _flying.products.pop(0).end()
    found = [v.result if isinstance(v, Product) and v.result is not None else v for v in deps]
    return found[0] if len(deps) == 1 else tuple(found)


def _copy_out(desc: Descriptor, at: list[Any], tile: Tile) -> None:
    _flying.stores.append((desc, at, tile))


def _wait_stores(pending: Any) -> None:
    while len(_flying.stores) > int(pending):
        desc, at, tile = _flying.stores.pop(0)
        desc.write(at, tile.data)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


def _gelu_and_slope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    density = torch.exp(-0.5 * x * x) * 0.3989422804014327
    return _gelu(x), 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * density


def settled() -> None:
    """Raise where the calling thread ends with something under way."""
    assert not _flying.products, "a product that nobody waits for"
    assert not _flying.stores, "a copy out of shared memory that nobody waits for"


def _specialize(parts: list[tuple[Any, tuple]], warps: list[int], registers: list[int]) -> None:
    assert len(warps) == len(registers) == len(parts) - 1
    failures: list[BaseException] = []

    def run(function: Any, arguments: tuple) -> None:
        try:
            function(*arguments)
            settled()
        except BaseException as error:  # reported by the thread that waits
            failures.append(error)

    threads = [  # each knows what its creator does, such as its program
        threading.Thread(target=contextvars.copy_context().run, args=(run, *part), daemon=True)
        for part in parts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "hangs"


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _scope(
    module: Any, program_id: Callable[[int], torch.Tensor], programs: int,
    dialect: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """What a kernel's functions see: the dialect's stand-ins, then the module's own constants."""
    language = types.SimpleNamespace(
        int64=torch.int64, int32=torch.int32, float32=torch.float32, constexpr=int,
        program_id=program_id, num_programs=lambda axis: programs,
        static_range=range, cdiv=lambda a, b: (a + b - 1) // b, maximum=_maximum, minimum=min,
        arange=lambda first, after, layout: torch.arange(first, after),
        zeros=_zeros, zeros_like=torch.zeros_like, where=torch.where, rsqrt=torch.rsqrt,
        sqrt=torch.sqrt, exp2=torch.exp2, sum=lambda value, axis: value.sum(axis),
        max=lambda value, axis: value.amax(axis),
        convert_layout=lambda value, layout, assert_trivial=False: value, load=_load, store=_store,
        broadcast=torch.broadcast_tensors, permute=lambda value, order: value.permute(order),
        allocate_shared_memory=_allocate,
        NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda shape, dtype: None),
        SliceLayout=lambda axis, parent: None, NVMMADistributedLayout=_layout,
        BlockedLayout=lambda *shape: None, SwizzledSharedLayout=lambda *swizzle: None,
        DotOperandLayout=lambda operand, parent, width: None, to_tensor=bool,
        debug_barrier=lambda: None, warp_specialize=_specialize,
    )  # fmt: skip
    vars(language).update(dialect or {})
    scope: dict[str, Any] = {
        "gl": language, "tl": language, "range": range, "gelu": _gelu,
        "gelu_and_slope": _gelu_and_slope, "fence_async_shared": lambda: None,
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": _wait_products, "warpgroup_mma_init": lambda value: value,
        "mbarrier": types.SimpleNamespace(
            init=_init, MBarrierLayout=lambda: None,
            wait=lambda barrier, phase: barrier.wait(int(phase)),
            expect=lambda barrier, size, pred=True: barrier.arrive(1, size) if pred else None,
            arrive=lambda barrier, count, pred=True: barrier.arrive(count) if pred else None,
        ),
        "tma": types.SimpleNamespace(
            async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out,
            store_wait=_wait_stores,
        ),
    }  # fmt: skip
    constants = {name: v.value for name, v in vars(module).items() if name.isupper()}
    return scope | constants


def bound_source(
    module: Any, kernel: str, program_id: Callable[[int], torch.Tensor], programs: int,
    dialect: dict[str, Any] | None = None, **stand_ins: Any,
) -> Callable[..., Any]:  # fmt: skip
    """A Gluon kernel's body as a Python function of its arguments, for one program at a time.

    Args:
        module: where the kernel and what it calls are defined.
        kernel: its name.
        program_id: the number of the program that the calling thread runs, by axis.
        programs: size of the grid.
        dialect: of the dialect's own functions, others than here.
        stand_ins: for functions of the module that have no meaning outside the dialect.
    """
    scope = _scope(module, program_id, programs, dialect) | stand_ins
    pending = [vars(module)]
    while pending:
        for name, value in pending.pop().items():
            body = getattr(value, "fn", None)
            if body is not None and name not in scope:
                scope[name] = types.FunctionType(
                    body.__code__, scope, name, body.__defaults__, body.__closure__
                )
                # what it uses of its own module, where it is another
                pending.append({n: body.__globals__[n] for n in body.__code__.co_names
                                if n in body.__globals__})  # fmt: skip
    return scope[kernel]


def handed_to_assembly(module: Any, name: str, *arguments: Any) -> list[tuple[Any, ...]]:
    """Text, constraints and operands of each inline assembly of a function, and two answers.

    Whether the compiler may leave it out or move it (``is_pure``), and elements of one (``pack``).
    """
    seen = []

    def assembly(text, constraints, operands, dtype, is_pure, pack):
        seen.append((text, constraints, operands, is_pure, pack))

    bound_source(
        module, name, lambda axis: None, 0, {"inline_asm_elementwise": assembly}
    )(*arguments)  # fmt: skip
    return seen


def run_source(
    module: Any, kernel: str, programs: int, arguments: tuple, constants: dict[str, Any],
    **stand_ins: Any,
) -> None:  # fmt: skip
    """Run a Gluon kernel program by program; see its launcher for the arguments.

    Args:
        module, kernel, programs, stand_ins: see :func:`bound_source`.
        arguments: descriptors, pointers and numbers, in order.
        constants: compile-time parameters.
    """
    current = torch.tensor(0, dtype=torch.int32)
    body = bound_source(module, kernel, lambda axis: current.clone(), programs, **stand_ins)
    for program in range(programs):
        current.fill_(program)
        body(*arguments, **constants)
