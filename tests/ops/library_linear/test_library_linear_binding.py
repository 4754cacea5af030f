"""The binding itself, without a GPU: the library is found, its numbers and layouts are right."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from fastswin.ops.library_linear import constants, library
from fastswin.ops.library_linear.descriptors import (
    MatmulDescriptor,
    MatrixLayout,
    SearchPreference,
)
from fastswin.ops.library_linear.library import LibraryLinearError
from fastswin.ops.library_linear.plan import describe_matmul, describe_preference
from fastswin.ops.library_linear.problem import FP8, Problem

HEADERS = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/include/cublasLt.h"))


def attributes(family: type) -> list[tuple[str, constants.Attribute]]:
    return [(k, v) for k, v in vars(family).items() if isinstance(v, constants.Attribute)]


def header_values(path: Path) -> dict[str, int]:
    """Enumerators of a C header whose values are numbers or other enumerators joined by ``|``."""
    found: dict[str, int] = {}
    for name, text in re.findall(
        r"^\s+(CU\w+)\s*=\s*([^,/\n]+?)\s*(?:,|/|$)", path.read_text(), re.M
    ):
        terms = text.strip("() ").split("|")
        values = [found.get(t.strip(), t.strip()) for t in terms]
        if all(isinstance(v, int) or v.isdigit() for v in values):
            found[name] = sum(int(v) for v in values)
    return found


def test_library_is_the_one_that_torch_has_loaded():
    assert library.library_blocker() is None
    mapped = library.candidates()[0]
    assert Path(mapped).is_file()
    assert "cublasLt" in Path(mapped).name
    assert ctypes.CDLL(mapped)._handle == library.load_library()._handle
    major, _, _ = library.library_version()
    assert major == int(torch.version.cuda.split(".")[0])


def test_library_comes_from_a_wheel_that_ships_its_header():
    """So that the next test has something to compare with."""
    in_wheel = "nvidia" in Path(library.candidates()[0]).parts
    assert bool(HEADERS) == in_wheel


@pytest.mark.parametrize("path", HEADERS, ids=lambda p: p.parts[-3])
def test_numbers_are_those_of_the_header(path):
    lt = header_values(path)
    types = header_values(path.with_name("library_types.h"))
    api = header_values(path.with_name("cublas_api.h"))
    for family, prefix in (
        (constants.Matmul, "MATMUL_DESC"), (constants.Layout, "MATRIX_LAYOUT"),
        (constants.Preference, "MATMUL_PREF"), (constants.Config, "ALGO_CONFIG"),
    ):  # fmt: skip
        for name, attribute in attributes(family):
            assert lt[f"CUBLASLT_{prefix}_{name}"] == attribute.number, name
    epilogues = {
        (False, False): "DEFAULT", (False, True): "BIAS", (True, False): "GELU",
        (True, True): "GELU_BIAS",
    }  # fmt: skip
    assert constants.EPILOGUES == {k: lt[f"CUBLASLT_EPILOGUE_{v}"] for k, v in epilogues.items()}
    scales = "CUBLASLT_MATMUL_MATRIX_SCALE_"
    assert lt[f"{scales}SCALAR_32F"] == constants.SCALE_SCALAR_32F
    assert lt[f"{scales}OUTER_VEC_32F"] == constants.SCALE_OUTER_VEC_32F
    reduction = lt["CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE"]
    assert reduction == constants.REDUCTION_COMPUTE_TYPE
    assert api["CUBLAS_COMPUTE_32F"] == constants.COMPUTE_32F
    assert (api["CUBLAS_OP_N"], api["CUBLAS_OP_T"]) == (constants.OP_N, constants.OP_T)
    names = {torch.float32: "32F", torch.float16: "16F", torch.bfloat16: "16BF", FP8: "8F_E4M3"}
    assert constants.DATA_TYPES == {k: types[f"CUDA_R_{v}"] for k, v in names.items()}


def test_structures_are_laid_out_as_in_c():
    result = constants.HeuristicResult
    assert ctypes.sizeof(constants.Algorithm) == 8 * 8
    assert ctypes.sizeof(result) == 64 + 8 + 4 + 4 + 4 * 4
    offsets = {name: getattr(result, name).offset for name, _ in result._fields_}
    assert offsets == {
        "algorithm": 0, "workspace_bytes": 64, "state": 72, "waves": 76, "reserved": 80,
    }  # fmt: skip


def make(kind: str):
    if kind == "layout":
        return MatrixLayout(torch.float16, 64, 32, 64), constants.Layout
    if kind == "matmul":
        return MatmulDescriptor(), constants.Matmul
    return SearchPreference(), constants.Preference


@pytest.mark.parametrize("kind", ["matmul", "layout", "preference"])
def test_attributes_come_back_as_set(kind):
    """Also checks their sizes: the library refuses a value of another size."""
    descriptor, family = make(kind)
    for number, (_, attribute) in enumerate(attributes(family), start=1):
        value = 4096 + 16 * number if attribute.ctype is ctypes.c_void_p else number
        descriptor.set(attribute, value)
        assert descriptor.get(attribute) == value
        if attribute.ctype is ctypes.c_void_p:
            descriptor.set(attribute, None)
            assert descriptor.get(attribute) is None


@pytest.mark.parametrize("kind", ["matmul", "layout", "preference"])
def test_wrong_size_or_number_is_refused_by_name(kind):
    descriptor, family = make(kind)
    wrong_size = constants.Attribute(attributes(family)[0][1].number, ctypes.c_int16)
    unknown = constants.Attribute(999, ctypes.c_int32)
    for attribute in (wrong_size, unknown):
        with pytest.raises(LibraryLinearError, match="INVALID_VALUE") as caught:
            descriptor.set(attribute, 1)
        assert caught.value.status == 7
        assert f"attribute {attribute.number}" in str(caught.value)


def test_descriptor_of_an_fp8_product():
    problem = Problem(
        64, 96, 32, FP8, FP8, torch.float16, gelu=True, scaling="tensor", output_scaled=True
    )
    matmul = describe_matmul(problem)
    assert matmul.get(constants.Matmul.TRANSA) == 1
    assert matmul.get(constants.Matmul.TRANSB) == 0
    assert matmul.get(constants.Matmul.EPILOGUE) == 36
    assert matmul.get(constants.Matmul.BIAS_DATA_TYPE) == 2
    assert matmul.get(constants.Matmul.FAST_ACCUM) == 1
    assert matmul.get(constants.Matmul.A_SCALE_MODE) == constants.SCALE_SCALAR_32F
    assert matmul.get(constants.Matmul.D_SCALE_POINTER) is None
    assert problem.c_dtype == torch.float16  # what the manual pairs with an fp8 output


def test_descriptor_of_a_half_precision_product_leaves_fp8_settings_alone():
    problem = Problem(5, 96, 32, torch.bfloat16, torch.bfloat16, residual=True)
    matmul = describe_matmul(problem)
    assert matmul.get(constants.Matmul.EPILOGUE) == 1
    assert matmul.get(constants.Matmul.FAST_ACCUM) == 0
    assert problem.c_dtype == torch.bfloat16


def test_descriptor_of_scales_per_channel():
    problem = Problem(5, 96, 32, FP8, torch.float16, scaling="channel")
    matmul = describe_matmul(problem)
    assert matmul.get(constants.Matmul.A_SCALE_MODE) == constants.SCALE_OUTER_VEC_32F
    assert matmul.get(constants.Matmul.B_SCALE_MODE) == constants.SCALE_OUTER_VEC_32F


def test_preference_holds_the_alignments_of_the_problem():
    problem = Problem(5, 96, 32, torch.float16, torch.float16, alignments=(256, 128, 64, 32, 16))
    preference = describe_preference(problem)
    assert [
        preference.get(getattr(constants.Preference, f"MIN_ALIGNMENT_{m}_BYTES")) for m in "ABCD"
    ] == [256, 128, 64, 32]
    assert preference.get(constants.Preference.REDUCTION_SCHEME_MASK) == 2
    assert preference.get(constants.Preference.MAX_WORKSPACE_BYTES) == 32 << 20


def test_layout_is_column_major_of_the_transpose():
    layout = MatrixLayout(FP8, 32, 5, 32)
    assert layout.get(constants.Layout.TYPE) == 28
    assert layout.get(constants.Layout.ROWS) == 32
    assert layout.get(constants.Layout.COLS) == 5
    assert layout.get(constants.Layout.LD) == 32


def test_status_becomes_a_message_that_names_what_was_asked():
    library.check(0, "cublasLtMatmul", "anything")
    with pytest.raises(LibraryLinearError) as caught:
        library.check(15, "cublasLtMatmul", "[4, 32] @ [96, 32].T float16")
    assert str(caught.value).startswith(
        "cublasLtMatmul for [4, 32] @ [96, 32].T float16: CUBLAS_STATUS_NOT_SUPPORTED (15)"
    )
    assert caught.value.status == 15


@pytest.fixture
def fresh_loader():
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


def test_missing_library_has_a_reason(monkeypatch, fresh_loader):
    monkeypatch.setattr(library, "candidates", lambda: ["libnothing.so.1", "libnothing.so.2"])
    assert library.library_blocker() == (
        "cublasLt was not found; tried libnothing.so.1, libnothing.so.2"
    )


def test_library_without_a_needed_function_has_a_reason(monkeypatch, fresh_loader):
    monkeypatch.setattr(library, "candidates", lambda: ["libc.so.6"])
    assert "libc.so.6 lacks a function" in library.library_blocker()


def test_cpu_build_of_torch_has_a_reason(monkeypatch, fresh_loader):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in library.library_blocker()
