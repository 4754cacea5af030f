"""Dispatch, registration, and every refusal with the argument's name in it."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, arguments

from fastswin import ops
from fastswin.ops.window_attention import register
from fastswin.ops.window_attention.config import default_config, key_tiles, padded_tokens
from fastswin.ops.window_attention.packing import pack_bias

CASE = Case("api", (8, 8), (4, 4), (2, 2))
PADDED = Case("padded-cosine", (5, 7), (3, 4), (1, 2), cosine=True)

REFUSALS = {
    "rank": ({"qkv": (8, 8, 96)}, ValueError, "qkv must be"),
    "heads": ({"num_heads": 5}, ValueError, "num_heads=5"),
    "no-heads": ({"num_heads": 0}, ValueError, "num_heads=0"),
    "window": ({"window_size": (0, 4)}, ValueError, "window_size"),
    "shift": ({"shift_size": (4, 0)}, ValueError, "shift_size"),
    "negative-shift": ({"shift_size": (-1, 0)}, ValueError, "shift_size"),
    "bias-shape": ({"bias": (2, 16, 15)}, ValueError, r"bias must be \[2, 16, 16\]"),
    "table-shape": (
        {"bias": None, "bias_table": (48, 2)}, ValueError, r"bias_table must be \[49, 2\]",
    ),
    "both-biases": ({"bias_table": (49, 2)}, ValueError, "bias or bias_table"),
    "both-scales": ({"scale": 1.0, "logit_scale": (2,)}, ValueError, "scale .* or logit_scale"),
    "logit-scale": ({"logit_scale": (3,)}, ValueError, "logit_scale"),
    "qkv-bias": ({"qkv_bias": (95,)}, ValueError, r"qkv_bias must be \[96\]"),
    "dropout": ({"dropout_p": 1.0}, ValueError, "dropout_p"),
    "precision": ({"input_precision": "fp8"}, ValueError, "input_precision"),
    "impl": ({"impl": "cuda"}, ValueError, "impl must be one of"),
    "empty-map": ({"qkv": (2, 0, 8, 96)}, ValueError, "map must not be empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_arguments_are_named(name, randn):
    changes, error, message = REFUSALS[name]
    made = arguments(CASE, randn, torch.float32)
    made |= {k: randn(*v) if isinstance(v, tuple) and k not in _PAIRS else v
             for k, v in changes.items()}  # fmt: skip
    with pytest.raises(error, match=message):
        ops.window_attention(**made)


_PAIRS = {"window_size", "shift_size"}


def test_integer_input_is_refused(randn):
    made = arguments(CASE, randn, torch.float32)
    with pytest.raises(TypeError, match="float tensor"):
        ops.window_attention(**(made | {"qkv": made["qkv"].int()}))


@pytest.mark.parametrize("name", ["bias", "qkv_bias"])
def test_mixed_devices_are_named(name, randn):
    made = arguments(CASE, randn, torch.float32)
    with pytest.raises(ValueError, match=f"{name} is on meta"):
        ops.window_attention(**(made | {name: made[name].to("meta")}))


MASK_REFUSALS = {
    "int64": (torch.zeros(3, 9, 9, dtype=torch.int64), TypeError, "int64"),
    "shape": (torch.zeros(3, 9, 8), ValueError, r"mask must be \[nW, 9, 9\]"),
    "count": (torch.zeros(4, 9, 9), ValueError, "nW=4"),
    "zero-one": (torch.eye(9).repeat(3, 1, 1), ValueError, "only 0 and 1"),
}


@pytest.mark.parametrize("name", MASK_REFUSALS)
def test_bad_masks_are_named(name, randn):
    mask, error, message = MASK_REFUSALS[name]
    q, k, v = (randn(6, 2, 9, 16) for _ in range(3))
    with pytest.raises(error, match=message):
        ops.window_attention_partitioned(q, k, v, mask=mask.to(q.device))


def test_all_zero_float_mask_is_legal(randn):
    q, k, v = (randn(6, 2, 9, 16) for _ in range(3))
    zero = torch.zeros(3, 9, 9, device=q.device)
    with_mask = ops.window_attention_partitioned(q, k, v, mask=zero, impl="reference")
    plain = ops.window_attention_partitioned(q, k, v, impl="reference")
    torch.testing.assert_close(with_mask, plain)


def test_explicit_triton_never_falls_back(randn):
    made = arguments(CASE, randn, torch.float32)
    with pytest.raises(RuntimeError, match="float64"):
        ops.window_attention(**(made | {"qkv": made["qkv"].double()}), impl="triton")
    wide = arguments(Case("wide", (2, 2), (2, 2), head_dim=129), randn, torch.float32)
    with pytest.raises(RuntimeError, match="head_dim 129"):
        ops.window_attention(**wide, impl="triton")


def test_auto_is_differentiable(randn):
    made = arguments(CASE, randn, torch.float32)
    qkv, bias = made["qkv"].requires_grad_(), made["bias"].requires_grad_()
    ops.window_attention(**made).square().sum().backward()
    for grad in (qkv.grad, bias.grad):
        assert bool(torch.isfinite(grad).all())
        assert grad.abs().sum() > 0


def test_dropout_is_replayable_and_unbiased(randn):
    made = arguments(Case("d", (8, 8), (8, 8), num_heads=1, batch=1), randn, torch.float32)
    options = {"dropout_p": 0.5, "impl": "reference"}
    first = ops.window_attention(**made, dropout_seed=3, **options)
    assert torch.equal(first, ops.window_attention(**made, dropout_seed=3, **options))
    assert not torch.equal(first, ops.window_attention(**made, dropout_seed=4, **options))
    made["qkv"] = made["qkv"].expand(50, -1, -1, -1)  # each image draws its own weights
    draws = [ops.window_attention(**made, dropout_seed=s, **options) for s in range(8)]
    mean = torch.cat(draws).mean(0)
    plain = ops.window_attention(**(made | {"qkv": made["qkv"][:1]}), impl="reference")[0]
    assert (mean - plain).abs().mean() < 0.1 * plain.abs().mean() + 0.05


@pytest.mark.parametrize("case", [CASE, PADDED], ids=str)
def test_opcheck(case, randn):
    made = arguments(case, randn, torch.float32)
    window, shift = made["window_size"], made["shift_size"]
    packed = pack_bias(made["bias"], case.num_heads, window, shift, made["qkv"].device)
    scale = torch.ones(case.num_heads, device=packed.device) if case.cosine else None
    torch.library.opcheck(
        register.window_attention_fwd,
        (made["qkv"], packed, scale, made["qkv_bias"], 0.25, case.num_heads, window, shift, False),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_opcheck_of_windows_that_are_cut_already(randn):
    q = randn(2, 2, 9, 16)
    packed = pack_bias(None, 2, (3, 3), (0, 0), q.device)
    torch.library.opcheck(
        register.window_attention_partitioned_fwd,
        (q, q.clone(), q.clone(), packed, None, None, 0.25, False),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_whole_graph_compile(randn):
    made = arguments(CASE, randn, torch.float32)
    qkv = made.pop("qkv")
    impl = "triton" if torch.cuda.is_available() else "reference"

    def attend(x):
        return ops.window_attention(x, **made, impl=impl) * 2

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(qkv), attend(qkv))


@pytest.mark.parametrize(
    ("tokens", "tiles"),
    [(1, (16,)), (49, (64,)), (64, (64,)), (100, (64, 64)), (81, (64, 32)), (144, (128, 16)),
     (150, (128, 32)), (196, ()), (256, ()), (576, ())],
    ids=str,
)  # fmt: skip
def test_key_tiles_are_exact_powers_of_two(tokens, tiles):
    if tiles == (64, 64):
        tiles = (128,)  # two equal powers of two are one
    assert key_tiles(tokens) == tiles
    assert padded_tokens(tokens) >= tokens


@pytest.mark.parametrize("tokens", range(1, 600, 7))
def test_heuristic_is_always_valid(tokens):
    for heads in (1, 3, 6, 11, 48):
        config = default_config(512, tokens, heads, 32, 2, 132)
        assert heads % config.heads_per_program == 0
        assert config.block_q & (config.block_q - 1) == 0
        assert not config.key_tiles or sum(config.key_tiles) >= tokens
