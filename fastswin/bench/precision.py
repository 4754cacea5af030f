"""TF32 only where it was asked for, and the process left as it was found.

PyTorch keeps the TF32 choice twice: in the older ``allow_tf32`` flags and in the newer
``fp32_precision`` strings. Writing the older flags updates both, so both stay readable inside the
scope; writing the newer ones alone makes every later read of the older ones raise ("mix of the
legacy and new APIs"; seen with torch 2.11 and 2.14), and Inductor still reads an older one. So
:func:`fp32_scope` enters through the older flags and touches the newer ones only where the caller
had set them himself, or to restore what the older ones cannot express.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_BACKENDS: Any = torch.backends  # the newer flags are missing from its type stubs

#: Holder of each newer flag.
_NEW: dict[str, Any] = {
    "matmul": _BACKENDS.cuda.matmul,
    "conv": _BACKENDS.cudnn.conv,
    "rnn": _BACKENDS.cudnn.rnn,
    "cpu_matmul": _BACKENDS.mkldnn.matmul,
}


@dataclasses.dataclass(frozen=True)
class Tf32State:
    """Every flag that decides how fp32 products are computed.

    Attributes:
        allow_matmul, allow_cudnn: the older flags; None where PyTorch refuses to tell because the
            caller mixed both APIs.
        level: ``torch.get_float32_matmul_precision()``, None likewise.
        matmul, conv, rnn, cpu_matmul: the newer strings ("none", "ieee", "tf32", "bf16").
    """

    allow_matmul: bool | None
    allow_cudnn: bool | None
    level: str | None
    matmul: str
    conv: str
    rnn: str
    cpu_matmul: str


def tf32_state() -> Tf32State:
    """Read all flags without changing any."""
    with _quiet():
        return Tf32State(
            _read(lambda: torch.backends.cuda.matmul.allow_tf32),
            _read(lambda: torch.backends.cudnn.allow_tf32),
            _read(torch.get_float32_matmul_precision),
            **{name: holder.fp32_precision for name, holder in _NEW.items()},
        )


@contextlib.contextmanager
def fp32_scope(*, tf32: bool) -> Iterator[None]:
    """Compute fp32 products in TF32 (``tf32=True``) or in IEEE fp32 within the block.

    On leaving, also through an exception, every flag reads as it did before. cuDNN's default is
    TF32 on, so plain fp32 needs the scope as much as tf32 does.
    """
    before = tf32_state()
    try:
        _choose(tf32)
        yield
    finally:
        restore(before)


def restore(state: Tf32State) -> None:
    """Write flags so that :func:`tf32_state` equals ``state`` again."""
    with _quiet():
        if state.level is not None:
            torch.set_float32_matmul_precision(state.level)
        else:  # unreadable means that the older flag contradicts the newer one
            allow = state.allow_matmul
            torch.backends.cuda.matmul.allow_tf32 = (
                state.matmul != "tf32" if allow is None else allow
            )
        allow = state.allow_cudnn
        torch.backends.cudnn.allow_tf32 = state.conv != "tf32" if allow is None else allow
        for name, holder in _NEW.items():
            wanted = getattr(state, name)
            if holder.fp32_precision == wanted:
                continue
            holder.fp32_precision = "none"  # inherits, as an untouched flag does
            if holder.fp32_precision != wanted:
                holder.fp32_precision = wanted


def _choose(tf32: bool) -> None:
    with _quiet():
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        for name in ("matmul", "conv", "rnn"):
            holder = _NEW[name]
            if (holder.fp32_precision == "tf32") != tf32:  # inherited from the caller's newer flag
                holder.fp32_precision = "tf32" if tf32 else "ieee"


def _read(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:  # both APIs were mixed
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch announces the newer API on every first use of the older one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
