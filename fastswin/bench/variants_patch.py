"""Changes of the engine that a variants file makes before an engine is built.

    set_item("engine.whole_block:WHOLE_BLOCKS", (1, 96), 64)      a table's entry, in place
    del_item("engine.whole_block:WHOLE_BLOCKS", (2, 192))         the same, removed
    set_constant("engine.choice:FUSED_MLP_CHANNELS", 96)          a name, wherever it is imported
    replace_source("ops.hopper_gemm.kernel:_tile", "old", "new")  text of a JIT function

A place is ``module:NAME``, the module's name without "fastswin.". What would change nothing is
refused, so that a variant is never the baseline by mistake. Not reached are values that are read
when they are defined: defaults of arguments and of dataclass fields.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

_ABSENT = object()


def set_item(place: str, key: Any, value: Any) -> None:
    """Set an entry of a table, for all who share the table.

    Args:
        place: ``module:NAME`` of a dict or list.
        key: of the entry, or its index; a dict may lack it.
        value: the new one.

    Raises:
        ValueError: there is no such place, or the entry has that value.
        IndexError: the list has no such entry.
    """
    _, _, table = _find(place)
    present = table.get(key, _ABSENT) if isinstance(table, dict) else table[key]
    if _equal(present, value):
        raise ValueError(f"place {place}[{key!r}] is {value!r} already")
    table[key] = value
    _forget_derived()


def del_item(place: str, key: Any) -> None:
    """Remove an entry of a table, for all who share the table.

    Args:
        place: ``module:NAME`` of a dict.
        key: of the entry.

    Raises:
        ValueError: there is no such place or entry.
    """
    _, _, table = _find(place)
    if key not in table:
        raise ValueError(f"place {place} has no entry {key!r}")
    del table[key]
    _forget_derived()


def set_constant(place: str, value: Any) -> None:
    """Rebind a module's name, and the same name where another module has imported it.

    Args:
        place: ``module:NAME`` of anything.
        value: the new one.

    Raises:
        ValueError: there is no such place, or it has that value.
    """
    owner, name, old = _find(place)
    if _equal(old, value):
        raise ValueError(f"place {place} is {value!r} already")
    for module in _own_modules():
        if module is owner or _equal(vars(module).get(name, _ABSENT), old):
            setattr(module, name, value)
    _forget_derived()


def replace_source(place: str, old: str, new: str, count: int = 1) -> None:
    """Replace text in the source of a JIT function, before it is compiled.

    Args:
        place: ``module:NAME`` of a function under ``@triton.jit`` or ``@gluon.jit``.
        old: the text, in the source as the function's ``src`` has it.
        new: what takes its place.
        count: how often the source holds it.

    Raises:
        ValueError: there is no such place, it is no JIT function, the source holds the text more or
            less often, or both texts are the same.
    """
    _, _, function = _find(place)
    if not hasattr(function, "_unsafe_update_src"):
        kind = type(function).__name__
        raise ValueError(f"place {place} must be a JIT function, it is of type {kind}")
    found = function.src.count(old)
    if found != count:
        raise ValueError(f"old must be in the source of {place} {count} times, it is {found} times")
    if old == new:
        raise ValueError(f"new must differ from old, both are {new!r}")
    function._unsafe_update_src(function.src.replace(old, new))
    _forget_derived()


def _find(place: str) -> tuple[ModuleType, str, Any]:
    """Module, name and present value of a place."""
    path, _, name = place.partition(":")
    if not path or not name:
        raise ValueError(f"place must be 'module:NAME', got {place!r}")
    importlib.import_module("fastswin.engine")  # so that who imports the name has imported it
    path = path if path.split(".")[0] == "fastswin" else f"fastswin.{path}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise ValueError(f"place {place!r}: {error}") from None
    if not hasattr(module, name):
        raise ValueError(f"place {place!r}: {path} has no {name!r}")
    return module, name, getattr(module, name)


def _own_modules() -> list[ModuleType]:
    modules = list(sys.modules.items())
    return [m for name, m in modules if name.split(".")[0] == "fastswin" and m is not None]


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are one, or plain and of the same type and value."""
    return a is b or (type(a) is type(b) and isinstance(a, int | float | str | tuple) and a == b)


def _forget_derived() -> None:
    """Drop what was derived before the change: cached results, and hashes of kernels.

    A kernel's hash covers the functions that it calls, so those of all are dropped.
    """
    for module in _own_modules():
        for value in list(vars(module).values()):
            if hasattr(value, "_unsafe_update_src"):
                value.hash = None
            elif isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
