"""Random problems against the fp64 oracle: small ones everywhere, N up to 1024 on a GPU."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from softmax_oracle import check_against_oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["contiguous", "offset", "wide rows", "heads last", "transposed"]
MASKS = ["none", "bool", "uint8", "float", "float grad"]


@st.composite
def problems(draw, largest):
    keys = draw(st.integers(1, largest))
    causal = draw(st.booleans())
    queries = keys if causal and keys < 40 else draw(st.integers(1, 5))
    return {
        "shape": (draw(st.integers(1, 3)), draw(st.integers(1, 4)), queries, keys),
        "dtype": draw(st.sampled_from(DTYPES)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "mask": draw(st.sampled_from(MASKS)),
        "mask_axes": draw(st.tuples(*[st.booleans()] * 3)),
        "bias": draw(st.booleans()),
        "causal": causal,
        "lens": causal and queries == keys and draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 0.125, -2.0])),
        "seed": draw(st.integers(0, 2**20)),
    }


def strided(t, layout):
    if layout == "offset":
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
    if layout == "wide rows":
        return torch.nn.functional.pad(t, (0, 3))[..., : t.shape[-1]]
    if layout == "heads last":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    return t


def check(problem, device):
    rng = torch.Generator().manual_seed(problem["seed"])
    shape, dtype = problem["shape"], problem["dtype"]

    def randn(*size):
        return torch.randn(*size, generator=rng).to(device)

    x = strided(randn(*shape).to(dtype), problem["layout"]).requires_grad_()
    kept = [n if k else 1 for n, k in zip(shape[:3], problem["mask_axes"], strict=True)]
    noise = randn(*kept, shape[3])
    mask = {
        "none": None,
        "bool": noise > 0.7,
        "uint8": (noise > 0.7).to(torch.uint8) * 3,
        "float": (noise > 0.7).to(dtype) * -100 + 0.5,
        "float grad": noise.requires_grad_(),
    }[problem["mask"]]
    bias = randn(*shape[1:]).to(dtype).requires_grad_() if problem["bias"] else None
    options = {"causal": problem["causal"], "scale": problem["scale"]}
    if problem["lens"]:
        options["seq_lens"] = torch.randint(0, shape[3] + 1, shape[:1], generator=rng)
    y, _ = check_against_oracle(
        x,
        grad=strided(randn(*shape).to(dtype), problem["layout"]),
        bias=bias,
        mask=mask,
        **options,
    )
    sums = y.float().sum(-1)
    unit = 8 * torch.finfo(dtype).eps * math.sqrt(shape[3])
    assert (((sums - 1).abs() < unit) | (sums == 0)).all()


@settings(max_examples=25, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(problem=problems(largest=70))
def test_small_problems(device, problem):
    check(problem, device)


@pytest.mark.gpu
@settings(max_examples=80, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(problem=problems(largest=1024))
def test_problems_up_to_1024_keys(device, problem):
    check(problem, device)
