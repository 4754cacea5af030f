"""The calls of a forward pass as data: complete, counted, repeatable, and without running it."""

from __future__ import annotations

import queue
import threading
from unittest import mock

import pytest
import torch
from engine_cases import cpu_engine, images_like, tiny

from fastswin._triton.launch import on_grid
from fastswin.engine import operators
from fastswin.engine.bind import bind
from fastswin.engine.call_results import empty_result
from fastswin.engine.calls import OPERATORS, launches_kernel, record_calls
from fastswin.engine.forward import Forward
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.warmup import begin_hashing_compiler, compile_calls, kernel_calls

CPU = torch.device("cpu")


def planned(version, batch=2, **settings):
    """A forward pass whose every layer launches kernels, and images for it."""
    model = tiny(version, **settings)
    chosen = PRECISIONS["fp16"]
    plan = make_plan(model.config, batch, model.config.image_size, CPU, chosen, "triton")
    weights = prepare(model, CPU, chosen.dtype)
    forward = Forward(model.config, weights, chosen)
    return forward, bind(plan, weights, chosen), images_like(model, batch).to(chosen.dtype)


@pytest.mark.parametrize("version", [1, 2])
def test_calls_are_counted_and_computed_as_the_engine_does(version):
    model = tiny(version)
    engine, images = cpu_engine(model, backend="torch"), images_like(model)
    calls = engine.calls(images)
    assert torch.equal(calls[-1].result, engine(images))
    counts = {}
    for call in calls:
        counts[call.stage, call.layer] = counts.get((call.stage, call.layer), 0) + call.count
    for stage, depth in enumerate(model.config.depths):
        for layer in ("qkv", "attention", "proj", "fc1", "fc2"):
            assert counts[stage, layer] == depth, (stage, layer)
        assert counts[stage, "norm"] >= 2 * depth
    assert counts[0, "merge"] == 2  # gather and projection
    assert [counts[None, layer] for layer in ("embed", "pool", "head")] == [1, 1, 1]


def test_a_call_can_be_run_again():
    model = tiny(1)
    engine, images = cpu_engine(model, backend="torch"), images_like(model)
    qkv = next(c for c in engine.calls(images) if c.layer == "qkv")
    assert torch.equal(qkv.run(), qkv.result)


def test_an_empty_batch_has_no_calls():
    model = tiny(1)
    with pytest.raises(ValueError, match="got batch 0"):
        cpu_engine(model, backend="torch").calls(images_like(model, 0))


@pytest.mark.parametrize("version", [1, 2])
def test_without_running_them_calls_have_the_shapes_of_real_ones(version):
    case = planned(version, batch=1, depths=(1, 1), image_size=(16, 20))
    refuse = {"side_effect": AssertionError("a kernel was launched")}
    with (
        mock.patch("fastswin.ops.linear.forward.linear_fwd", **refuse),
        mock.patch("fastswin.ops.linear.forward.layer_norm_linear_fwd", **refuse),
        mock.patch("fastswin.ops.layer_norm.forward.layer_norm_fwd", **refuse),
        mock.patch("fastswin.ops.window_attention.forward.window_attention_fwd", **refuse),
        mock.patch("fastswin.ops.patch_embed.forward.patch_embed_fwd", **refuse),
        mock.patch("fastswin.ops.patch_merging.forward.gather_neighbours_fwd", **refuse),
        mock.patch("fastswin.ops.pool.forward.norm_pool_fwd", **refuse),
    ):
        quiet = record_calls(*case, execute=False)
    real = record_calls(*case)
    assert [(c.stage, c.layer, c.count, c.result.shape, c.result.dtype) for c in quiet] == [
        (c.stage, c.layer, c.count, c.result.shape, c.result.dtype) for c in real
    ]


def test_every_operator_of_the_forward_pass_has_a_shape_rule():
    seen = set()
    for version in (1, 2):
        for call in record_calls(*planned(version), execute=False):
            seen.add(call.function)
    references = {operators.window_attention_ref, operators.quantized_window_attention_ref}
    kernels = set(OPERATORS.values()) - references
    quantized = {  # test_quantized_engine.py compares theirs
        operators.quantized_linear, operators.quantize, operators.quantize_per_token,
        operators.layer_norm_per_token, operators.library_linear, operators.quantized_mlp,
    }  # fmt: skip
    # the tiny model has too few rows for the fused MLP, a CPU takes no small-batch forms
    small = {operators.merge_neighbours, operators.norm_pool_head}
    small |= {operators.packed_heads_attention, operators.packed_attention_half}
    small |= {operators.split_k_linear, operators.add_split_k, operators.packed_swin_block}
    small |= {operators.linear_post_norm, operators.packed_mlp}
    assert kernels - seen <= quantized | {operators.mlp} | small
    with pytest.raises(NotImplementedError, match="window_attention_ref's result"):
        empty_result(operators.window_attention_ref, (torch.empty(1),), {})


class Kernel:
    """What Triton does with a kernel: ``[grid]`` loads and launches, ``warmup`` compiles."""

    def __init__(self):
        self.launched, self.compiled = [], []

    def __getitem__(self, grid):
        return self.launched.append

    def warmup(self, argument, *, grid):
        self.compiled.append(argument)


def test_each_kernel_is_compiled_once():
    forward, bound, images = planned(1)
    known = set()
    calls = kernel_calls(forward, bound, images, known)
    assert calls[0].layer == "attention"  # the slowest to compile goes first
    assert len({call.signature for call in calls}) == len(calls) == len(known)
    assert all(launches_kernel(call.function, call.kwargs) for call in calls)
    assert kernel_calls(forward, bound, images, known) == []
    other = planned(1, batch=3)
    assert kernel_calls(*other, known)  # other shapes may need other binaries


def test_calls_are_compiled_in_threads_and_made_in_this_one_without_gradients():
    forward, bound, images = planned(1)
    calls = kernel_calls(forward, bound, images, set())
    kernel = Kernel()
    here, compiled, made = threading.current_thread(), [], []

    def note(call):
        on_grid(kernel, (1,))(call.signature)
        own = threading.current_thread() is here
        (made if own else compiled).append((call.signature, torch.is_grad_enabled()))

    with mock.patch("fastswin.engine.calls.Call.run", note):
        compile_calls(calls, CPU, threads=3)
    wanted = [(c.signature, False) for c in calls]
    assert made == wanted
    assert sorted(map(str, compiled)) == sorted(map(str, wanted[1:]))
    assert kernel.launched == [c.signature for c in calls]  # a launch loads: never in a thread
    assert sorted(map(str, kernel.compiled)) == sorted(str(c.signature) for c in calls[1:])


def test_errors_of_compiling_come_through():
    calls = kernel_calls(*planned(1), set())
    here = threading.current_thread()

    def fail(call):
        if threading.current_thread() is not here:
            raise RuntimeError("no compiler")

    with (
        mock.patch("fastswin.engine.calls.Call.run", fail),
        pytest.raises(RuntimeError, match="no compiler"),
    ):
        compile_calls(calls, CPU, threads=3)


def test_the_compiler_is_hashed_in_a_thread_where_triton_says_how(monkeypatch):
    """The function is private: a Triton without it hashes at the first compilation."""
    hashed = queue.SimpleQueue()
    key = lambda: hashed.put(threading.current_thread())  # noqa: E731
    monkeypatch.setattr("triton.runtime.cache.triton_key", key, raising=False)
    begin_hashing_compiler()
    assert hashed.get(timeout=10) is not threading.current_thread()
    monkeypatch.delattr("triton.runtime.cache.triton_key")
    begin_hashing_compiler()
    assert hashed.empty()


def test_warmup_on_a_cpu_has_nothing_to_do():
    engine = cpu_engine(tiny(1), backend="torch")
    assert engine.warmup([1, 4]) == 0
    with pytest.raises(ValueError, match="batches must be positive"):
        engine.warmup([0])


@pytest.mark.gpu
def test_warmup_compiles_what_calls_launch():
    """After it, nothing is compiled: Triton's hook after compilation stays silent."""
    import triton

    from fastswin import Engine

    engine = Engine(tiny(1), "fp16")
    assert engine.warmup([1, 3]) > 10
    compiled = []
    hooks = triton.knobs.runtime
    before = hooks.jit_post_compile_hook
    hooks.jit_post_compile_hook = lambda **event: compiled.append(event)
    try:
        for batch in (1, 3, 4):
            engine(images_like(tiny(1), batch).cuda().half())
    finally:
        hooks.jit_post_compile_hook = before
    assert compiled == []
