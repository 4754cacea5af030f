"""Owners of the library's descriptors: created, set, read back, and freed with the object."""

from __future__ import annotations

import ctypes
import weakref

import torch

from fastswin.ops.library_linear.constants import (
    COMPUTE_32F,
    DATA_TYPES,
    Algorithm,
    Attribute,
)
from fastswin.ops.library_linear.library import check, load_library


class Descriptor:
    """A descriptor with typed attributes; ``name`` is the library's noun in its functions."""

    name: str

    def __init__(self, *arguments: int) -> None:
        library = load_library()
        self.pointer = ctypes.c_void_p()
        create = f"cublasLt{self.name}Create"
        made = getattr(library, create)(ctypes.byref(self.pointer), *arguments)
        check(made, create, f"arguments {arguments}")
        destroy = getattr(library, f"cublasLt{self.name}Destroy")
        # at exit the library frees its own; its order against ours is not known
        weakref.finalize(self, destroy, self.pointer).atexit = False
        self._set = getattr(library, f"cublasLt{self.name}SetAttribute")
        self._get = getattr(library, f"cublasLt{self.name}GetAttribute")

    def set(self, attribute: Attribute, value: int | None) -> None:
        """Store a value; None is a null pointer.

        Raises:
            LibraryLinearError: the library does not know the attribute.
        """
        stored = attribute.ctype(value)
        status = self._set(
            self.pointer, attribute.number, ctypes.byref(stored), ctypes.sizeof(stored)
        )
        check(status, f"cublasLt{self.name}SetAttribute", f"attribute {attribute.number}")

    def get(self, attribute: Attribute) -> int | None:
        """Read a value back; a null pointer is None."""
        return _read(self._get, self.pointer, attribute, f"cublasLt{self.name}GetAttribute")


class MatmulDescriptor(Descriptor):
    """What is computed: transposes, epilogue and the pointers it reads; sums in fp32."""

    name = "MatmulDesc"

    def __init__(self) -> None:
        super().__init__(COMPUTE_32F, DATA_TYPES[torch.float32])


class MatrixLayout(Descriptor):
    """A column-major matrix ``[rows, cols]`` with ``ld`` elements from column to column."""

    name = "MatrixLayout"

    def __init__(self, dtype: torch.dtype, rows: int, cols: int, ld: int) -> None:
        super().__init__(DATA_TYPES[dtype], rows, cols, ld)


class SearchPreference(Descriptor):
    """Limits of the algorithm search."""

    name = "MatmulPreference"


def algorithm_attribute(algorithm: Algorithm, attribute: Attribute) -> int | None:
    """One configuration value of an algorithm that the search returned."""
    get = load_library().cublasLtMatmulAlgoConfigGetAttribute
    return _read(get, ctypes.byref(algorithm), attribute, "cublasLtMatmulAlgoConfigGetAttribute")


def _read(get: ctypes._FuncPointer, owner: object, attribute: Attribute, name: str) -> int | None:
    stored, written = attribute.ctype(), ctypes.c_size_t()
    status = get(
        owner, attribute.number, ctypes.byref(stored), ctypes.sizeof(stored), ctypes.byref(written)
    )
    check(status, name, f"attribute {attribute.number}")
    return stored.value
