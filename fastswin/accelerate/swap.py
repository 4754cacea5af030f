"""Changing the class of a module in place, and back.

A fused class is ``type("Fused" + name, (mixin, original), {})``: an instance of the original still,
with another ``forward``. It is made on demand for whatever class a model has, so pickling and
copying cannot find it by name; ``__reduce_ex__`` names the two classes it is made of instead.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, cast

import torch
from torch import nn

from fastswin._triton.available import Impl

#: Attribute of a swapped module that holds its options.
OPTIONS = "_fastswin"


@dataclasses.dataclass(frozen=True)
class Options:
    """How a swapped module runs.

    Attributes:
        residual_dtype: dtype of the residual stream under autocast; None follows the model's own
            code (fp32 until a projection's half-precision output replaces the stream).
        recompute_gelu: make ``gelu(a)`` again in the backward instead of keeping it.
        impl: "auto", "triton" or "reference", for every fused operator.
    """

    residual_dtype: torch.dtype | None = None
    recompute_gelu: bool = True
    impl: Impl = "auto"


class Fused:
    """First base of every fused class.

    Its abstract methods are checked by :func:`fused_class`: with the metaclass of ``abc.ABC`` a
    module's layout would be another one, and Python would refuse to change its class.
    """

    _fastswin: Options

    #: The class that :func:`unfuse` gives back; set on the fused classes.
    _fastswin_original: type[nn.Module]

    @staticmethod
    @abc.abstractmethod
    def _fastswin_blocker(module: Any) -> str | None:
        """Why this module cannot be swapped, None where it can."""

    def _fastswin_own_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module's own class."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        reduced = cast("tuple", super().__reduce_ex__(protocol))
        mixin = type(self).__mro__[1]
        return (_new_fused, (mixin, self._fastswin_original), *reduced[2:])


#: Fused classes made so far: one per pair, so that types compare and compiled graphs are found.
_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def fused_class(mixin: type[Fused], original: type[nn.Module]) -> type[nn.Module]:
    """The class that runs ``original`` modules by ``mixin``'s forward pass.

    Raises:
        TypeError: an abstract method is left in ``mixin``.
    """
    key = mixin, original
    if key not in _CLASSES:
        for name in dir(mixin):
            if getattr(getattr(mixin, name), "__isabstractmethod__", False):
                raise TypeError(f"{mixin.__name__} lacks {name}")
        members = {
            "__module__": mixin.__module__,
            "__doc__": f"{original.__name__} on fused operators.",
            "_fastswin_original": original,
        }
        made = type(f"Fused{original.__name__}", (mixin, original), members)
        _CLASSES.setdefault(key, made)
    return _CLASSES[key]


def _new_fused(mixin: type[Fused], original: type[nn.Module]) -> nn.Module:
    """An empty instance, for unpickling and copying."""
    kind = fused_class(mixin, original)
    return kind.__new__(kind)


def fuse(module: nn.Module, mixin: type[Fused], options: Options) -> None:
    """Swap one module in place."""
    module.__class__ = fused_class(mixin, type(module))
    module.__dict__[OPTIONS] = options


def unfuse(module: nn.Module) -> None:
    """Undo :func:`fuse`."""
    module.__class__ = cast("Any", module)._fastswin_original
    del module.__dict__[OPTIONS]
