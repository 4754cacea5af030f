"""What went wrong with one contender, as a line a person can read."""

from __future__ import annotations

import dataclasses
import gc
from typing import Literal

import torch

Status = Literal["ok", "red", "unavailable", "oom", "failed", "skipped"]


class UnavailableError(Exception):
    """A contender cannot run on this machine; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why there is no number.

    Attributes:
        status: "red" (wrong answer), "unavailable", "oom", "failed" or "skipped" (deadline).
        message: one line.
    """

    status: Status
    message: str


def describe(error: BaseException) -> Failure:
    """Turn an exception into a :class:`Failure`, keeping no reference to its frames."""
    if isinstance(error, UnavailableError):
        return Failure("unavailable", _one_line(error))
    if is_out_of_memory(error):
        return Failure("oom", f"out of memory: {_one_line(error)}")
    return Failure("failed", f"{type(error).__name__}: {_one_line(error)}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text
    )


def release_memory() -> None:
    """Give back what dropped contenders held: compiled code, graph pools, cached blocks."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:300]
