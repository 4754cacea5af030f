"""Swapping leaves everything around a model as it was, and swapping back leaves no trace."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tiny_swins import CASES, blocks, build, images, logits
from torch import nn

from fastswin import accelerate, restore
from fastswin.accelerate import capture
from fastswin.accelerate.capture import CapturedTraining
from fastswin.models.live import from_live


def snapshot(model):
    """Everything that acceleration must not replace, by identity."""
    return {
        "state": {k: (v.data_ptr(), v.dtype) for k, v in model.state_dict().items()},
        "parameters": {n: id(p) for n, p in model.named_parameters()},
        "buffers": {n: id(b) for n, b in model.named_buffers()},
        "modules": {n: id(m) for n, m in model.named_modules()},
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "training": {n: m.training for n, m in model.named_modules()},
    }


def classes(model):
    return {n: type(m) for n, m in model.named_modules()}


def attributes(model):
    return {n: set(m.__dict__) for n, m in model.named_modules()}


@pytest.mark.parametrize("case", CASES)
def test_restore_leaves_no_trace(case):
    model, x = build(case).eval(), images(case)
    blocks(model)[0].requires_grad_(False)
    before, kinds, keys = snapshot(model), classes(model), attributes(model)
    expected = logits(model, x)
    report = accelerate(model)
    assert snapshot(model) == before
    changed = {n for n, kind in classes(model).items() if kind is not kinds[n]}
    assert changed == {s.name for s in report.swapped}
    assert all(isinstance(m, kinds[n]) for n, m in model.named_modules())
    torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-5)
    assert restore(model) == len(report.swapped)
    assert classes(model) == kinds
    assert attributes(model) == keys
    assert snapshot(model) == before
    assert torch.equal(logits(model, x), expected)
    assert restore(model) == 0


@pytest.mark.parametrize("case", ["timm V2", "torchvision V1", "microsoft V1", "ours V2"])
def test_copies_and_pickles_are_accelerated(case):
    model, x = build(case).eval(), images(case)
    accelerate(model)
    expected = logits(model, x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    )
    for other in copies:
        assert classes(other) == classes(model)
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
        assert torch.equal(logits(other, x), expected)
        with torch.no_grad():
            next(other.parameters()).add_(1)
        assert torch.equal(logits(model, x), expected)
        assert restore(other) > 0
    assert torch.equal(logits(model, x), expected)


@pytest.mark.parametrize("case", ["timm V1", "torchvision V2", "transformers V1", "ours V2"])
def test_accelerated_models_are_sources_of_an_engine(case):
    model, x = build(case).eval(), images(case)
    expected = logits(model, x)
    accelerate(model)
    with torch.no_grad():
        torch.testing.assert_close(from_live(model)(x), expected.detach(), rtol=1e-4, atol=1e-5)


def test_averages_of_the_weights():
    from timm.utils import ModelEmaV3

    model, x = build("timm V1"), images("timm V1")
    accelerate(model)
    averaged, ema = torch.optim.swa_utils.AveragedModel(model), ModelEmaV3(model, decay=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        logits(model, x).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        ema.update(model)
    for average in (averaged.module, ema.module):
        fused = logits(average.eval(), x)
        assert not torch.allclose(fused, logits(model.eval(), x))
        restore(average)
        torch.testing.assert_close(fused, logits(average, x), rtol=1e-4, atol=1e-4)
    assert set(ema.module.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("case", ["timm V1", "transformers V2"])
def test_training_moves_the_same_parameters_as_before(case):
    """Three AdamW steps, accelerated between the first and the second, against the plain model."""
    plain, model, x = build(case), build(case), images(case)
    trained = []
    for m, swap in ((plain, False), (model, True)):
        names = {id(p): n for n, p in m.named_parameters()}
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3)
        for step in range(3):
            if swap and step == 1:
                accelerate(m)
            optimizer.zero_grad()
            for half in (x[:1], x[1:]):  # gradient accumulation
                logits(m, half).square().sum().backward()
            optimizer.step()
        assert [names[id(p)] for p in m.parameters()] == [n for n, _ in m.named_parameters()]
        assert all(id(p) in names for g in optimizer.param_groups for p in g["params"])
        trained.append(m.eval())
    with torch.no_grad():
        difference = logits(trained[0], x) - logits(trained[1], x)
    assert difference.abs().max() < 5e-3


def test_frozen_parts_and_no_grad():
    model, x = build("timm V1"), images("timm V1")
    accelerate(model)
    model.patch_embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    model.layers[1].blocks[0].attn.relative_position_bias_table.requires_grad_(False)
    logits(model, x).square().sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (not p.requires_grad), name
    with torch.no_grad():
        assert not logits(model, x).requires_grad
    model.requires_grad_(False)
    assert not logits(model, x).requires_grad


def test_hooks_around_and_inside_blocks():
    model, x = build("timm V2").eval(), images("timm V2")
    calls = []
    model.layers[0].register_forward_hook(lambda *a: calls.append("stage"))
    model.layers[1].blocks[0].register_forward_hook(lambda *a: calls.append("block"))
    expected = logits(model, x)
    calls.clear()
    report = accelerate(model)
    assert report.kept == ()
    torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-5)
    assert calls == ["stage", "block"]
    block = model.layers[1].blocks[1]
    handle = block.norm1.register_forward_hook(lambda *a: calls.append("norm1"))
    torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-5)
    assert calls[-1] == "norm1"
    kept = {k.name: k.reason for k in accelerate(model).kept}
    assert kept == {"layers.1.blocks.1": "norm1 has hooks, which a fused block would not call"}
    handle.remove()
    assert accelerate(model).kept == ()


def test_layers_replaced_after_acceleration_are_used():
    """Adapters with low-rank weights put another module where a linear layer was."""
    model, x = build("timm V1").eval(), images("timm V1")
    accelerate(model)
    before = logits(model, x)

    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1.0

    block = model.layers[0].blocks[1]
    adapter = Adapter(24, 96)
    adapter.load_state_dict(block.mlp.fc1.state_dict())
    block.mlp.fc1 = adapter
    fused = logits(model, x)
    assert not torch.allclose(fused, before, atol=1e-3)
    restore(model)
    torch.testing.assert_close(fused, logits(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["timm V1", "transformers V1"])
def test_gradient_checkpointing(case):
    model, x = build(case, drop_path=0.3), images(case)
    accelerate(model)
    results = []
    for enabled in (False, True):
        if case == "timm V1":
            model.set_grad_checkpointing(enabled)
        elif enabled:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(2)
        logits(model, x).square().sum().backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, g in results[0].items():
        torch.testing.assert_close(results[1][name], g, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["timm V1", "torchvision V2"])
def test_compiles_into_one_graph(case):
    """A plain block, merging, a plain and a shifted one: tracing takes seconds for each."""
    model, x = build(case, depths=(1, 2)), images(case)
    accelerate(model)
    model.zero_grad()
    logits(model, x).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    logits(compiled, x).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_overflow_reaches_the_scaler():
    """SWO-16: an overflow gives infinite gradients: one skipped step, a lower scale, no zeros."""
    model, x = build("timm V1"), images("timm V1")
    accelerate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    skipped = 0
    for _ in range(40):
        before = model.head.fc.weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = logits(model, x).float().square().mean()
        scaler.scale(loss).backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() == scale:
            break
        assert torch.equal(model.head.fc.weight, before)
        skipped += 1
    assert 0 < skipped < 40
    assert not torch.equal(model.head.fc.weight, before)
    assert all(p.isfinite().all() for p in model.parameters())


def _graphed_on_a_cpu(module, sample_args, num_warmup_iters):
    """What make_graphed_callables makes, without graphs: gradients always in the same memory."""
    run, parameters = module.forward, tuple(module.parameters())
    kept = [torch.empty_like(p) if p.requires_grad else None for p in parameters]

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, images, *parameters):
            with torch.enable_grad():
                ctx.output = run(images)
            return ctx.output.detach()

        @staticmethod
        def backward(ctx, gradient):
            wanted = [p for p in parameters if p.requires_grad]
            found = torch.autograd.grad(ctx.output, wanted, gradient)
            for own, new in zip([k for k in kept if k is not None], found, strict=True):
                own.copy_(new)
            return None, *(k if k is None else k.detach() for k in kept)

    return lambda images: Graphed.apply(images, *parameters)


def _train_in_parallel(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    # this process ends with the test
    torch.cuda.make_graphed_callables = _graphed_on_a_cpu
    capture._warm_up = lambda step, images: None
    for label in ("plain", "fused", "captured"):
        model = build("ours V1")
        model.patch_embed.requires_grad_(False)  # frozen before it is handed over
        model.layers[0].requires_grad_(False)
        if label != "plain":
            accelerate(model)
        called = model
        if label == "captured":
            called = CapturedTraining(model, None, torch.zeros(2, 3, 64, 48))
        parallel = nn.parallel.DistributedDataParallel(called, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            seed = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            parallel(torch.randn(2, 3, 64, 48, generator=seed)).square().sum().backward()
            optimizer.step()
        torch.save(model.state_dict(), f"{folder}/{label}-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_agree_with_the_plain_model(tmp_path):
    """SWO-15: DDP over gloo, frozen stages, no search for unused parameters; captured as well."""
    torch.multiprocessing.spawn(_train_in_parallel, (str(tmp_path),), nprocs=2)
    plain, fused, other, *captured = (
        torch.load(tmp_path / f"{n}.pt")
        for n in ("plain-0", "fused-0", "fused-1", "captured-0", "captured-1")
    )
    start = build("ours V1").state_dict()
    for name, value in plain.items():
        assert torch.equal(fused[name], other[name]), name
        assert all(torch.equal(fused[name], state[name]) for state in captured), name
        torch.testing.assert_close(fused[name], value, rtol=1e-3, atol=1e-4)
        frozen = name.startswith(("patch_embed", "layers.0"))
        assert torch.equal(fused[name], start[name]) or not frozen, name
    assert not torch.equal(fused["head.weight"], start["head.weight"])
