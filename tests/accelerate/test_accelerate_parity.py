"""Accelerated models give the answers and the gradients of the models they were."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_swins import CASES, blocks, build, images, logits, timm_model
from torch import nn

from fastswin import accelerate, restore

WITH_DROP_PATH = [case for case in CASES if not case.startswith("microsoft")]


def step(model, x, autocast=None):
    """Logits, gradients of every parameter by name, and the gradient of the images."""
    x = x.clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        y = logits(model, x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": y.detach(), "images": x.grad} | grads


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_matches_fp64(case):
    model, x = build(case), images(case)
    oracle, eager = step(copy.deepcopy(model).double(), x.double()), step(model, x)
    report = accelerate(model)
    swapped = [s.kind for s in report.swapped if s.framework != "torch"]
    assert [kind for kind in swapped if "Merging" not in kind] == [
        type(b).__name__.removeprefix("Fused") for b in blocks(model)
    ]
    assert len(swapped) == len(blocks(model)) + 1  # and the merging between the two stages
    assert report.kept == ()
    actual = step(model, x)
    assert (
        set(actual) == set(oracle) == {"logits", "images"} | dict(model.named_parameters()).keys()
    )
    largest = max(t.abs().max().item() for t in oracle.values())
    for name, truth in oracle.items():
        # 1e-5 of the tensor; of the largest one where a tensor is zero but for rounding, as the
        # bias of the keys
        bound = max(1e-5 * truth.abs().max().item(), 1e-6 * largest)
        assert (actual[name] - truth).abs().max() <= bound, name
        assert (eager[name] - truth).abs().max() <= bound, name


AUTOCAST = [
    ("timm V1", torch.bfloat16), ("timm V1", torch.float16), ("torchvision V2", torch.bfloat16),
    ("transformers V1", torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), AUTOCAST, ids=str)
def test_autocast_is_as_exact_as_the_model_itself(case, dtype):
    """Relative RMS of every gradient against fp64, and the dtype of the stream after each block."""
    model, x = build(case), images(case)
    oracle = step(copy.deepcopy(model).double(), x.double())
    results, dtypes = {}, {}
    for label in ("eager", "fused"):
        if label == "fused":
            accelerate(model)
        seen = dtypes[label] = []
        handles = [
            block.register_forward_hook(lambda m, i, o, seen=seen: seen.append(first(o).dtype))
            for block in blocks(model)
        ]
        results[label] = step(model, x, autocast=dtype)
        for handle in handles:
            handle.remove()
    assert dtypes["fused"] == dtypes["eager"]
    largest = max(t.norm().item() for t in oracle.values())
    wrong = {"eager": {}, "fused": {}}
    for name, truth in oracle.items():
        if truth.norm() < 1e-4 * largest:  # zero but for rounding, as the bias of the keys
            continue
        for label, result in results.items():
            assert result[name].dtype == results["eager"][name].dtype, name
            wrong[label][name] = ((result[name].double() - truth).norm() / truth.norm()).item()
    total = {k: math.sqrt(sum(e**2 for e in v.values()) / len(v)) for k, v in wrong.items()}
    assert total["fused"] <= 2 * total["eager"]  # the gate of every kernel
    for name, error in wrong["fused"].items():
        # a tensor of few elements can be right by luck in eager: then the model's mean is the gate
        assert error <= 3 * max(wrong["eager"][name], total["eager"]), name


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("case", WITH_DROP_PATH)
def test_drop_path_draws_what_the_model_drew(case):
    model, x = build(case, drop_path=0.5), images(case, batch=6)
    torch.manual_seed(11)
    expected = logits(model, x)
    with torch.no_grad():
        assert not torch.allclose(logits(copy.deepcopy(model).eval(), x), expected, atol=1e-3)
    accelerate(model)
    torch.manual_seed(11)
    torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-5)


DROPOUT = {
    "timm V1": {"proj_drop_rate": 0.4},
    "timm V2": {"proj_drop_rate": 0.4},
    "torchvision V1": {"dropout": 0.4},
    "transformers V1": {"hidden_dropout_prob": 0.4},
    "transformers V2": {"hidden_dropout_prob": 0.4},
    "ours V1": {"drop_rate": 0.4},
}


@pytest.mark.parametrize("case", DROPOUT)
def test_dropout_draws_what_the_model_drew(case):
    """The residual's bias cannot wait for the add when dropout stands between."""
    model, x = build(case, **DROPOUT[case]), images(case)
    torch.manual_seed(11)
    expected = logits(model, x)
    accelerate(model)
    torch.manual_seed(11)
    if case not in ("ours V1", "transformers V2"):
        # these drop in windows, the fused block in image order: other draws, same distribution
        runs = torch.stack([logits(model, x).detach() for _ in range(2)])
        assert not torch.allclose(runs[0], runs[1])
    else:
        torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-5)
    model.eval()
    fused = logits(model, x)
    assert torch.equal(logits(model, x), fused)
    restore(model)
    torch.testing.assert_close(fused, logits(model, x), rtol=1e-4, atol=1e-5)


def test_attention_dropout_is_active_in_training_only():
    model, x = build("timm V1", attn_drop_rate=0.5), images("timm V1")
    model.eval()
    expected = logits(model, x)
    accelerate(model)
    torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-5)
    model.train()
    assert not torch.allclose(logits(model, x), logits(model, x))


@pytest.mark.parametrize("version", [1, 2])
def test_timm_blocks_on_padded_shifted_maps_keep_timms_order(version):
    """SWO-02: timm pads after the shift; a shifted block on such a map runs its own forward."""
    model = timm_model(version, (72, 52)).train()  # maps 18x13 and 9x7 with window 4
    x = torch.randn(2, 3, 72, 52, generator=torch.Generator().manual_seed(1))
    expected = step(model, x)
    accelerate(model)
    actual = step(model, x)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-4)


def test_timm_set_input_size_after_acceleration():
    model, x = build("timm V1"), torch.randn(2, 3, 96, 64)
    accelerate(model)
    for m in (model, copy.deepcopy(model)):
        m.set_input_size(img_size=(96, 64), window_size=(6, 4))
        fused = logits(m, x)
        restore(m)
        torch.testing.assert_close(fused, logits(m, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["timm V1", "torchvision V2", "transformers V1"])
def test_channels_last_and_cropped_images(case):
    model, x = build(case), images(case)
    accelerate(model)
    expected = step(model, x)
    wide = torch.zeros(3, 3, x.shape[2] + 5, x.shape[3] + 7)
    wide[:, :, 2 : 2 + x.shape[2], 3 : 3 + x.shape[3]] = x
    for layout in (
        x.contiguous(memory_format=torch.channels_last),
        wide[:, :, 2 : 2 + x.shape[2], 3 : 3 + x.shape[3]],
    ):
        actual = step(model, layout)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["timm V1", "timm V2", "transformers V2"])
def test_cast_after_acceleration(case, dtype):
    """SWO-22: nothing that acceleration keeps is tied to a dtype."""
    model, x = build(case).eval(), images(case)
    accelerate(model)
    logits(model, x)
    for m in (model, copy.deepcopy(model)):
        m.to(dtype)
        fused = logits(m, x.to(dtype))
        assert fused.dtype == dtype
        restore(m)
        scale = 50 * torch.finfo(dtype).eps
        torch.testing.assert_close(fused, logits(m, x.to(dtype)), rtol=scale, atol=scale)


def test_attentions_of_transformers_come_from_its_own_forward():
    model, x = build("transformers V2").eval(), images("transformers V2")
    expected = model(x, output_attentions=True)
    accelerate(model)
    actual = model(x, output_attentions=True)
    assert len(actual.attentions) == len(expected.attentions) == 2
    for a, b in zip(actual.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(a, b)
    hidden = model(x, output_hidden_states=True).hidden_states
    for a, b in zip(hidden, expected.hidden_states or hidden, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dtype_of_the_stream_is_an_option():
    """On a CPU autocast keeps norms in the dtype that it finds; the option decides instead."""
    model, x = build("timm V2"), images("timm V2")
    seen, answers = [], {}
    for dtype in (None, torch.float32, torch.bfloat16):
        accelerate(model, residual_dtype=dtype)
        handles = [
            b.register_forward_hook(lambda m, i, o: seen.append(o.dtype)) for b in blocks(model)
        ]
        answers[dtype] = step(model, x, autocast=torch.bfloat16)["logits"].float()
        assert seen == [dtype or torch.bfloat16] * 4
        seen.clear()
        step(model, x)  # without autocast it has no say
        assert seen == [torch.float32] * 4
        seen.clear()
        for handle in handles:
            handle.remove()
    assert torch.equal(answers[None], answers[torch.bfloat16])
    wide = answers[torch.float32]
    assert 0 < (answers[None] - wide).abs().max() < 0.1 * wide.abs().max()


def test_layers_outside_the_blocks():
    model = nn.Sequential(timm_model(1, (64, 32)), nn.LayerNorm(5), nn.LayerNorm((3, 5)))
    report = accelerate(model)
    kept = {k.name: k.reason for k in report.kept}
    assert kept == {"2": "it normalises 2 axes, not the channels only"}
    x = torch.randn(5)
    assert torch.equal(model[1](x), nn.functional.layer_norm(x, (5,)))
