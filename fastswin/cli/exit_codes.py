"""Which exit code and which line an exception becomes."""

from __future__ import annotations

import torch

from fastswin.data.shipped import ShippedWeightsMissingError

OK = 0
CHECK_FAILED = 1
BAD_INPUT = 2
MISSING = 3
DEFECT = 4
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class CheckFailedError(Exception):
    """A parity, accuracy or correctness gate is red; the message says which."""


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and one line for an exception.

    Args:
        error: what a command raised, the parser's own usage errors included.
    """
    if hasattr(error, "format_message"):  # click's errors, which typer carries a copy of
        return BAD_INPUT, _one_line(error.format_message())
    if type(error).__name__ in ("Exit", "Abort"):
        return int(getattr(error, "exit_code", CHECK_FAILED)), "aborted"
    if isinstance(error, CheckFailedError):
        return CHECK_FAILED, f"check failed: {_one_line(str(error))}"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return MISSING, "out of memory; use a smaller --batch"
    if isinstance(error, (ImportError, ShippedWeightsMissingError, ConnectionError)):
        return MISSING, _one_line(str(error))
    if isinstance(error, OSError) and error.filename is not None:
        return BAD_INPUT, f"{error.filename}: {error.strerror}"
    if isinstance(error, (ValueError, TypeError, OSError)):
        return BAD_INPUT, _one_line(str(error))
    if isinstance(error, RuntimeError):  # a device, driver or kernel that cannot run here
        return MISSING, _one_line(str(error))
    return DEFECT, f"internal error: {type(error).__name__}: {_one_line(str(error))} (see --debug)"


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "no message"
