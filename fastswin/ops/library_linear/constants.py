"""Numbers of cublasLt.h, cublas_api.h and library_types.h (CUDA 12 and 13) that this room uses.

The header's enumerators, without their common prefix. They are part of the library's ABI: released
values do not change, so one set serves every version, and what a version does not know it refuses
with CUBLAS_STATUS_INVALID_VALUE.
"""

from __future__ import annotations

import ctypes
import dataclasses

import torch

#: cublasComputeType_t: products and sums in fp32.
COMPUTE_32F = 68

#: cudaDataType_t by torch dtype.
DATA_TYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
}

#: cublasOperation_t
OP_N, OP_T = 0, 1

#: cublasLtEpilogue_t by (gelu, bias). GELU is the library's tanh form.
EPILOGUES: dict[tuple[bool, bool], int] = {
    (False, False): 1,
    (False, True): 4,
    (True, False): 32,
    (True, True): 32 | 4,
}

#: cublasLtMatmulMatrixScale_t: one fp32 factor, or a vector along the outer dimension.
SCALE_SCALAR_32F, SCALE_OUTER_VEC_32F = 0, 3

#: cublasLtReductionScheme_t: split-K sums kept in fp32. INPLACE and OUTPUT_TYPE would round partial
#: sums to the output's dtype.
REDUCTION_COMPUTE_TYPE = 2


@dataclasses.dataclass(frozen=True)
class Attribute:
    """An attribute of a descriptor: its number in the header's enum and the type behind it."""

    number: int
    ctype: type[ctypes._SimpleCData]


class Matmul:
    """cublasLtMatmulDescAttributes_t."""

    TRANSA = Attribute(3, ctypes.c_int32)
    TRANSB = Attribute(4, ctypes.c_int32)
    EPILOGUE = Attribute(7, ctypes.c_uint32)
    BIAS_POINTER = Attribute(8, ctypes.c_void_p)
    A_SCALE_POINTER = Attribute(17, ctypes.c_void_p)
    B_SCALE_POINTER = Attribute(18, ctypes.c_void_p)
    D_SCALE_POINTER = Attribute(20, ctypes.c_void_p)
    FAST_ACCUM = Attribute(25, ctypes.c_int8)
    BIAS_DATA_TYPE = Attribute(26, ctypes.c_int32)
    A_SCALE_MODE = Attribute(31, ctypes.c_int32)
    B_SCALE_MODE = Attribute(32, ctypes.c_int32)


class Layout:
    """cublasLtMatrixLayoutAttribute_t."""

    TYPE = Attribute(0, ctypes.c_uint32)
    ROWS = Attribute(2, ctypes.c_uint64)
    COLS = Attribute(3, ctypes.c_uint64)
    LD = Attribute(4, ctypes.c_int64)


class Preference:
    """cublasLtMatmulPreferenceAttributes_t."""

    MAX_WORKSPACE_BYTES = Attribute(1, ctypes.c_uint64)
    REDUCTION_SCHEME_MASK = Attribute(3, ctypes.c_uint32)
    MIN_ALIGNMENT_A_BYTES = Attribute(5, ctypes.c_uint32)
    MIN_ALIGNMENT_B_BYTES = Attribute(6, ctypes.c_uint32)
    MIN_ALIGNMENT_C_BYTES = Attribute(7, ctypes.c_uint32)
    MIN_ALIGNMENT_D_BYTES = Attribute(8, ctypes.c_uint32)


class Config:
    """cublasLtMatmulAlgoConfigAttributes_t, read only here."""

    ID = Attribute(0, ctypes.c_int32)
    TILE_ID = Attribute(1, ctypes.c_uint32)
    SPLITK_NUM = Attribute(2, ctypes.c_int32)
    REDUCTION_SCHEME = Attribute(3, ctypes.c_uint32)
    STAGES_ID = Attribute(6, ctypes.c_uint32)
    CLUSTER_SHAPE_ID = Attribute(8, ctypes.c_uint16)


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t, opaque."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]
