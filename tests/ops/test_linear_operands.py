"""Linear layers, MLP and LayerNorm of tensors that lie in memory otherwise than kernels walk."""

from __future__ import annotations

import pytest
import torch

from fastswin import ops
from fastswin.ops.linear.config import GemmConfig, LayerNormLinearConfig, OneShotConfig
from fastswin.testing.tolerance import assert_close_to_oracle

FORMS = {
    "tiled": GemmConfig(16, 32, 32, 4, 2),
    "copy-engine": GemmConfig(64, 64, 64, 4, 3, tma=True),
    "rows-kept": LayerNormLinearConfig(16, 16, 1, 4, 1),
    "one-shot": OneShotConfig(16, 32, 4),
}


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of a row of memory."""
    return torch.stack((tensor, tensor + 1), -1).flatten(-2)[..., ::2]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous from two bytes behind a 16-byte boundary on."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


def operands(randn, normalised: bool) -> dict:
    made = {
        "x": randn(20, 64, dtype=torch.float16),
        "weight": randn(40, 64, dtype=torch.float16, spread=0.1),
        "bias": randn(40),
    }
    if normalised:
        return made | {"layer_norm_eps": 1e-5, "offset": randn(64)}
    return made | {"residual": randn(20, 40, dtype=torch.float16)}


@pytest.mark.parametrize("moved", [strided, shifted])
@pytest.mark.parametrize(
    ("form", "normalised"),
    [("tiled", False), ("copy-engine", False), ("rows-kept", True), ("one-shot", True),
     ("one-shot", False)],
    ids=["tiled", "copy-engine", "rows-kept", "one-shot-norm", "one-shot"],
)  # fmt: skip
def test_strides_and_alignment_change_no_bit(form, normalised, moved, randn):
    made = operands(randn, normalised)
    expected = ops.linear(**made, config=FORMS[form], impl="triton")
    other = {k: moved(v) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    assert torch.equal(ops.linear(**other, config=FORMS[form], impl="triton"), expected)


@pytest.mark.parametrize("normalised", [False, True], ids=["plain", "norm"])
def test_a_strided_result_is_written_by_the_reference(normalised, randn):
    made = operands(randn, normalised)
    room = torch.zeros(20, 80, dtype=torch.float16, device=made["x"].device)
    with pytest.raises(RuntimeError, match="out is not contiguous"):
        ops.linear(**made, out=room[:, ::2], impl="triton")
    assert not room.any()
    out = ops.linear(**made, out=room[:, ::2])
    assert torch.equal(out, ops.linear(**made, impl="reference"))
    assert not room[:, 1::2].any()


def test_a_wide_residual_does_not_widen_the_result(randn):
    made = operands(randn, False)
    made["residual"] = made["residual"].float()
    kernel, eager = (ops.linear(**made, impl=impl) for impl in ("triton", "reference"))
    assert eager.dtype == torch.float16
    oracle = ops.linear(**{k: v.double() for k, v in made.items()}, impl="reference")
    assert_close_to_oracle(kernel, eager, oracle, torch.float16)


def test_strided_weights_of_the_mlp(randn):
    made = {
        "x": randn(20, 32, dtype=torch.float16),
        "fc1_weight": randn(128, 32, dtype=torch.float16, spread=0.2),
        "fc1_bias": randn(128),
        "fc2_weight": randn(32, 128, dtype=torch.float16, spread=0.1),
        "fc2_bias": randn(32),
    }
    expected = ops.mlp(**made, impl="triton")
    turned = {name: made[name].t().contiguous().t() for name in ("x", "fc1_weight", "fc2_weight")}
    assert torch.equal(ops.mlp(**(made | turned), impl="triton"), expected)


@pytest.mark.parametrize("operator", ["mlp", "layer_norm"])
def test_a_strided_result_of_mlp_and_layer_norm(operator, randn):
    x = randn(4, 32, dtype=torch.float16)
    given = [x]
    if operator == "mlp":
        given += [randn(*s, dtype=torch.float16) for s in ((128, 32), (128,), (32, 128), (32,))]
    room = torch.zeros(4, 64, dtype=torch.float16, device=x.device)
    call = getattr(ops, operator)
    with pytest.raises(RuntimeError, match="out is not contiguous"):
        call(*given, out=room[:, ::2], impl="triton")
    assert not room.any()
    assert torch.equal(call(*given, out=room[:, ::2]), call(*given, impl="reference"))
    assert not room[:, 1::2].any()
