"""The kernel against the fp64 oracle, and against itself."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    GEOMETRY_CASES,
    LARGE_CASES,
    PRODUCT_CASES,
    Case,
    arguments,
    eager,
    oracle,
)

from fastswin import ops
from fastswin.testing.tolerance import assert_close_to_oracle

HALF = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, *HALF]  # the interpreter's bf16 products are garbage (Triton 3.8)


def run(made: dict, **changes) -> torch.Tensor:
    return ops.window_attention(**(made | changes), impl="triton")


#: Two images, two heads, four shifted and padded windows of 3x4 tokens.
MEMORY_CASE = Case("memory", (5, 7), (3, 4), (1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PRODUCT_CASES, ids=str)
def test_matches_the_oracle(case, dtype, randn):
    made = arguments(case, randn, dtype)
    assert_close_to_oracle(run(made), eager(made), oracle(made), dtype)


def dtypes_of(index: int) -> list[torch.dtype]:
    return DTYPES if torch.cuda.is_available() else DTYPES[index % 2 :][:1]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for i, case in enumerate(GEOMETRY_CASES) for dtype in dtypes_of(i)],
    ids=str,
)
def test_every_geometry_matches_the_oracle(case, dtype, randn):
    """Addresses count elements: in the interpreter one dtype each shows a wrong one."""
    made = arguments(case, randn, dtype)
    assert_close_to_oracle(run(made), eager(made), oracle(made), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_real_sizes_three_runs_bitwise(case, dtype, randn):
    made = arguments(case, randn, dtype)
    first = run(made)
    assert torch.equal(first, run(made))
    assert torch.equal(first, run(made))
    assert_close_to_oracle(first, eager(made), oracle(made), dtype)


@pytest.mark.gpu
def test_tf32_is_within_its_rounding(randn):
    made = arguments(LARGE_CASES[0], randn, torch.float32)
    truth = oracle(made)
    error = (run(made, input_precision="tf32") - truth).norm() / truth.norm()
    exact = (run(made) - truth).norm() / truth.norm()
    assert exact < 1e-6
    assert 1e-6 < error < 1e-3  # 10 mantissa bits, fp32 accumulation


@pytest.mark.parametrize(
    "case", [c for c in PRODUCT_CASES + GEOMETRY_CASES if "shifted" in c.name], ids=str
)
def test_large_scores_do_not_overflow(case, randn):
    """q.k of 32 values around 60 is 115,200: past fp16's range before the scale (SWO-21)."""
    made = arguments(case, randn, torch.float16, spread=60.0)
    assert_close_to_oracle(run(made), oracle(made).half(), oracle(made), torch.float16)


def layouts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same numbers in other memory layouts (SWO-12)."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], device=tensor.device)
    wide = wide.to(tensor.dtype)
    wide[..., ::2] = tensor
    bigger = torch.zeros(*tensor.shape[:-3], *(s + 1 for s in tensor.shape[-3:]))
    bigger = bigger.to(tensor)
    bigger[..., 1:, 1:, 1:] = tensor
    return {
        "transposed": tensor.transpose(1, 2).contiguous().transpose(1, 2),
        "every-second": wide[..., ::2],
        "crop": bigger[..., 1:, 1:, 1:],
    }


def test_any_memory_layout(randn):
    made = arguments(MEMORY_CASE, randn, torch.float16)
    expected = run(made)
    biases = layouts(made["bias"])
    for name, qkv in layouts(made["qkv"]).items():
        bias = biases[name]
        before = qkv.clone(), bias.clone()
        assert torch.equal(run(made, qkv=qkv, bias=bias), expected), name
        assert torch.equal(qkv, before[0]), name
        assert torch.equal(bias, before[1]), name


def test_expanded_qkv_is_read_through_stride_zero(randn):
    made = arguments(MEMORY_CASE, randn, torch.float32)
    one = made["qkv"][:1]
    expanded = run(made, qkv=one.expand(3, -1, -1, -1))
    assert torch.equal(expanded[2], run(made, qkv=one)[0])


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_empty_batch(impl, randn):
    made = arguments(MEMORY_CASE, randn, torch.float16)
    out = ops.window_attention(**(made | {"qkv": made["qkv"][:0]}), impl=impl)
    assert out.shape == (0, 5, 7, 32)
    assert out.dtype == torch.float16


def test_images_do_not_leak_into_each_other(randn):
    made = arguments(MEMORY_CASE, randn, torch.float32)
    whole = run(made)
    for image in range(2):
        alone = run(made, qkv=made["qkv"][image : image + 1])
        assert torch.equal(whole[image], alone[0])


def test_bias_table_equals_dense_bias(randn):
    made = arguments(MEMORY_CASE, randn, torch.float32)
    rows, cols = made["window_size"]
    table = randn((2 * rows - 1) * (2 * cols - 1), made["num_heads"])
    dense = torch.empty(made["num_heads"], rows * cols, rows * cols, device=table.device)
    for q in range(rows * cols):
        for k in range(rows * cols):
            dy, dx = q // cols - k // cols, q % cols - k % cols
            dense[:, q, k] = table[(dy + rows - 1) * (2 * cols - 1) + dx + cols - 1]
    by_table = run(made, bias=None, bias_table=table)
    assert torch.equal(by_table, run(made, bias=dense))


@pytest.mark.gpu
def test_more_windows_than_a_grid_axis_other_than_x_takes(randn):
    """65,535 is the limit of grid.y and grid.z; windows are counted in grid.x."""
    made = arguments(PRODUCT_CASES[0], randn, torch.float16)
    qkv = randn(70_000, 2, 2, 96, dtype=torch.float16)
    made |= {"qkv": qkv, "window_size": (2, 2), "bias": randn(2, 4, 4)}
    made["qkv_bias"] = None
    out = run(made)
    last = run(made, qkv=qkv[-1:])
    assert torch.equal(out[-1:], last)


@pytest.mark.gpu
def test_addresses_past_two_to_the_31(device):
    """qkv of 2.4e9 elements: a 32-bit offset would wrap in the last images (SWO-09)."""
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.empty(2600, 56, 56, 288, device=device, dtype=torch.float16)
    qkv.fill_(0.5)
    tail = torch.randn(2, 56, 56, 288, device=device, generator=generator).half()
    qkv[-2:] = tail
    options = {"num_heads": 3, "window_size": (7, 7), "shift_size": (3, 3), "impl": "triton"}
    out = ops.window_attention(qkv, **options)
    assert torch.equal(out[-2:], ops.window_attention(tail, **options))
    assert torch.equal(out[0], torch.full_like(out[0], 0.5))
