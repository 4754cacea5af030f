"""Finding the cublasLt that PyTorch has loaded, and calling it.

PyTorch links the library, so importing torch maps it into the process; the very same file is opened
again here (one copy, one set of kernels). Nothing is compiled and nothing new is installed.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from pathlib import Path

import torch

#: cublasStatus_t of success.
SUCCESS = 0

_POINTER = ctypes.c_void_p
_OUT_POINTER = ctypes.POINTER(ctypes.c_void_p)
_SET = [_POINTER, ctypes.c_int, _POINTER, ctypes.c_size_t]
_GET = [*_SET, ctypes.POINTER(ctypes.c_size_t)]

#: Argument types of the functions in use; all of these return a cublasStatus_t.
_SIGNATURES: dict[str, list] = {
    "cublasLtCreate": [_OUT_POINTER],
    "cublasLtMatmulDescCreate": [_OUT_POINTER, ctypes.c_int, ctypes.c_int],
    "cublasLtMatmulDescDestroy": [_POINTER],
    "cublasLtMatmulDescSetAttribute": _SET,
    "cublasLtMatmulDescGetAttribute": _GET,
    "cublasLtMatrixLayoutCreate": [
        _OUT_POINTER, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64,
    ],
    "cublasLtMatrixLayoutDestroy": [_POINTER],
    "cublasLtMatrixLayoutSetAttribute": _SET,
    "cublasLtMatrixLayoutGetAttribute": _GET,
    "cublasLtMatmulPreferenceCreate": [_OUT_POINTER],
    "cublasLtMatmulPreferenceDestroy": [_POINTER],
    "cublasLtMatmulPreferenceSetAttribute": _SET,
    "cublasLtMatmulPreferenceGetAttribute": _GET,
    "cublasLtMatmulAlgoGetHeuristic": [*[_POINTER] * 7, ctypes.c_int, _POINTER, _POINTER],
    "cublasLtMatmulAlgoConfigGetAttribute": _GET,
    "cublasLtMatmul": [*[_POINTER] * 14, ctypes.c_size_t, _POINTER],
}  # fmt: skip


class LibraryLinearError(RuntimeError):
    """The library refused or failed.

    Attributes:
        status: its cublasStatus_t, for example 15, CUBLAS_STATUS_NOT_SUPPORTED.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def library_blocker() -> str | None:
    """Why the library cannot be called in this process; None where it can."""
    try:
        load_library()
    except OSError as error:
        return str(error)
    return None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library with its signatures declared.

    Raises:
        OSError: there is none, or it lacks a function; the message names what was tried.
    """
    if torch.version.hip is not None or torch.version.cuda is None:
        raise OSError("this PyTorch is built without CUDA, so it brings no cublasLt")
    tried = candidates()
    for name in tried:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return _declare(library, name)
    raise OSError(f"cublasLt was not found; tried {', '.join(tried)}")


def candidates() -> list[str]:
    """Files and names to open, best first: what this process has mapped, wheels, the system's."""
    major = (torch.version.cuda or "").split(".")[0]
    windows = sys.platform == "win32"
    name = f"cublasLt64_{major}.dll" if windows else f"libcublasLt.so.{major}"
    installed = Path(torch.__file__).parent
    folders = [
        installed.parent / "nvidia" / f"cu{major}" / "lib",  # wheels of CUDA 13
        installed.parent / "nvidia" / "cublas" / "lib",  # wheels of CUDA 12
        installed / "lib",  # builds that bundle the library
    ]
    found = [str(folder / name) for folder in folders if (folder / name).is_file()]
    return list(dict.fromkeys([*_mapped(name), *found, name]))


def _mapped(name: str) -> list[str]:
    """Paths under which this process has mapped the library (Linux)."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = [line.split(maxsplit=5)[5] for line in lines if name in line]
    return list(dict.fromkeys(paths))


def _declare(library: ctypes.CDLL, name: str) -> ctypes.CDLL:
    try:
        for function, arguments in _SIGNATURES.items():
            getattr(library, function).argtypes = arguments
            getattr(library, function).restype = ctypes.c_int
        library.cublasLtGetVersion.argtypes = []
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        for function in ("cublasLtGetStatusName", "cublasLtGetStatusString"):
            getattr(library, function).argtypes = [ctypes.c_int]
            getattr(library, function).restype = ctypes.c_char_p
    except AttributeError as error:
        raise OSError(f"{name} lacks a function: {error}") from None
    return library


@functools.cache
def library_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the loaded library, for example (13, 1, 1)."""
    number = load_library().cublasLtGetVersion()
    return number // 10000, number // 100 % 100, number % 100


def status_name(status: int) -> str:
    """The header's name of a cublasStatus_t and what it means."""
    library = load_library()
    name = library.cublasLtGetStatusName(status).decode()
    return f"{name} ({status}), {library.cublasLtGetStatusString(status).decode()}"


def check(status: int, function: str, subject: str) -> None:
    """Raise on a status other than success.

    Args:
        status: what the library returned.
        function: the library's function.
        subject: what it was called for: an argument or a problem.

    Raises:
        LibraryLinearError: names the function, the subject and the status.
    """
    if status != SUCCESS:
        raise LibraryLinearError(f"{function} for {subject}: {status_name(status)}", status)


_handles: dict[int, ctypes.c_void_p] = {}
_handles_lock = threading.Lock()


def handle(device_index: int) -> ctypes.c_void_p:
    """The library's context of one GPU, made at the first call and kept for the process.

    ``device_index`` must be the current device, with tensors on it. A handle may be used by several
    threads at once.
    """
    with _handles_lock:
        if device_index not in _handles:
            made = ctypes.c_void_p()
            check(
                load_library().cublasLtCreate(ctypes.byref(made)),
                "cublasLtCreate",
                f"cuda:{device_index}",
            )
            _handles[device_index] = made
        return _handles[device_index]
