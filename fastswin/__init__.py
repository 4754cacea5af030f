"""fastswin: Swin Transformers, fast on the GPU, with the same answers.

Names load when they are first used, so that ``import fastswin.ops`` brings the operators alone, as
a process wants them that serves a program of :mod:`fastswin.export.program`.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastswin import models, ops
    from fastswin.accelerate import accelerate, capture_training, restore
    from fastswin.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "Engine", "__version__", "accelerate", "capture_training", "models", "ops", "restore",
]  # fmt: skip

#: Public names that are no rooms of the package, and the room that defines each.
_DEFINED_IN = {"Engine": "engine", "restore": "accelerate", "capture_training": "accelerate"}


class _Package(types.ModuleType):
    """The package, whose function ``accelerate`` bears the name of the room that defines it."""

    @property
    def accelerate(self) -> Any:
        return importlib.import_module(f"{__name__}.accelerate").accelerate

    @accelerate.setter
    def accelerate(self, room: types.ModuleType) -> None:
        """The import system sets a room on its package once it is loaded; the function stays."""

    def __getattr__(self, name: str) -> Any:
        if name in _DEFINED_IN:
            return getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


if not TYPE_CHECKING:  # for a type checker the names are those imported above
    sys.modules[__name__].__class__ = _Package
