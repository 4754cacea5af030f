"""The PTX that an engine embeds, launched as the engine launches it, against the operators."""

from __future__ import annotations

import ctypes

import pytest
import torch
from tensorrt_stand_in import front_end, plan

from fastswin import ops
from fastswin.export.plugin import register_plugins
from fastswin.ops.window_attention.packing import LOG2_E, pack_bias, pack_head_scale
from fastswin.testing.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu

DTYPES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BF16"}


def launch(planned, sizes: dict[str, int], inputs: list[torch.Tensor], out: torch.Tensor) -> None:
    """``cuLaunchKernel`` with inputs, 32-bit integers, output, and nothing of Triton's launcher."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        status = getattr(cuda, name)(*arguments)
        assert status == 0, f"{name} returned {status}"

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(planned.ptx.encode()))
    call("cuModuleGetFunction", ctypes.byref(function), module, planned.kernel.encode())
    values: list[ctypes._SimpleCData] = [ctypes.c_uint64(t.data_ptr()) for t in inputs]
    values += [ctypes.c_int32(i) for i in planned.integers(sizes)]
    values += [ctypes.c_uint64(out.data_ptr())]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    sides = [ctypes.c_uint(n) for n in (*planned.grid(sizes), *planned.block)]
    shared = ctypes.c_uint(planned.shared_bytes)
    call("cuLaunchKernel", function, *sides, shared, stream, pointers, None)
    torch.cuda.synchronize()
    call("cuModuleUnload", module)


@pytest.fixture
def tensorrt():
    torch.zeros(1, device="cuda")  # a context, which the driver's calls below use
    with front_end() as module:
        register_plugins()
        yield module


def this_card() -> dict[str, int]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "capability": 10 * properties.major + properties.minor,
        "multiprocessors": properties.multi_processor_count,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(
    ("map_size", "window", "shift", "heads", "cosine", "batches"),
    [
        pytest.param((56, 56), 7, 3, 3, False, (8, 1, 3), id="swin-t-stage1"),
        pytest.param((14, 14), 7, 0, 12, False, (8, 2), id="swin-t-stage3"),
        pytest.param((30, 17), 7, 3, 4, False, (2, 5), id="padded"),
        pytest.param((64, 64), 8, 4, 3, True, (4, 1), id="swinv2-w8"),
        pytest.param((32, 32), 16, 8, 4, True, (2, 3), id="swinv2-w16"),
        pytest.param((24, 24), 12, 6, 4, False, (2, 3), id="w12"),
        pytest.param((24, 48), 24, 12, 2, True, (1, 2), id="w24-online"),
    ],
)
def test_attention(tensorrt, randn, dtype, map_size, window, shift, heads, cosine, batches):
    H, W = map_size
    channels, square, shifts = 3 * 32 * heads, (window, window), (shift, shift)
    half_table = dtype == torch.float16 and not cosine
    bias = randn(heads, window**2, window**2)
    packed = pack_bias(
        bias, heads, square, shifts, bias.device, torch.float16 if half_table else torch.float32
    )
    logit_scale = 2.0 + randn(heads, 1, 1) if cosine else None
    head_scale = pack_head_scale(logit_scale)
    if head_scale is None:
        head_scale = torch.full((heads,), 32**-0.5 * LOG2_E, device="cuda")
    qkv_bias = randn(channels)
    planned = plan(
        tensorrt, "PackedWindowAttention",
        {"num_heads": heads, "window_height": window, "window_width": window,
         "shift_height": shift, "shift_width": shift, "cosine": int(cosine), **this_card()},
        [(DTYPES[dtype], ["B", H, W, channels]), (DTYPES[packed.dtype], list(packed.shape)),
         ("FLOAT", [heads]), ("FLOAT", [channels])],
        {"B": batches[0]}, {"B": max(batches)},
    )  # fmt: skip
    for batch in batches:
        qkv = randn(batch, H, W, channels, dtype=dtype)
        out = torch.full((batch, H, W, channels // 3), float("nan"), dtype=dtype, device="cuda")
        launch(planned, {"B": batch}, [qkv, packed, head_scale, qkv_bias], out)
        arguments = {"num_heads": heads, "window_size": square, "shift_size": shifts}
        tensors = {"bias": bias, "logit_scale": logit_scale, "qkv_bias": qkv_bias}
        operator = ops.window_attention(qkv, **tensors, **arguments, impl="triton")
        eager = ops.window_attention(qkv, **tensors, **arguments, impl="reference")
        wide = {k: None if t is None else t.double() for k, t in tensors.items()}
        oracle = ops.window_attention(qkv.double(), **wide, **arguments, impl="reference")
        assert_close_to_oracle(out, eager, oracle, dtype)
        assert_close_to_oracle(out, operator, oracle, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("channels", [96, 100, 768])
def test_layer_norm(tensorrt, randn, dtype, channels):
    weight, bias = randn(channels, dtype=dtype), randn(channels, dtype=dtype)
    eps = torch.tensor([1e-5], device="cuda")
    planned = plan(
        tensorrt, "LayerNorm", {"capability": this_card()["capability"]},
        [(DTYPES[dtype], ["B", 14, 9, channels]), (DTYPES[dtype], [channels]),
         (DTYPES[dtype], [channels]), ("FLOAT", [1])],
        {"B": 8}, {"B": 8},
    )  # fmt: skip
    for batch in (8, 1, 3):
        x = 3 * randn(batch, 14, 9, channels, dtype=dtype) + 1
        out = torch.full_like(x, float("nan"))
        launch(planned, {"B": batch}, [x, weight, bias, eps], out)
        operator = ops.layer_norm(x, weight, bias, impl="triton")
        eager = ops.layer_norm(x, weight, bias, impl="reference")
        oracle = ops.layer_norm(x.double(), weight.double(), bias.double(), impl="reference")
        assert_close_to_oracle(out, eager, oracle, dtype)
        assert_close_to_oracle(out, operator, oracle, dtype)
