"""The calls of a forward pass that reach the device, as data.

    images, bound plan -> Call(0, "qkv", ops.linear, arguments, result, count=2), ...

Two users: compiling kernels before the first image (warmup.py), which only needs the arguments, and
the profiler (bench/profile.py), which runs every call again. The operators are noted through
``Forward``'s stand-in, PyTorch's functions through a ``TorchFunctionMode``; views move no data and
are left out. Blocks repeat the same calls: one of each kind is kept, so that the activations of a
whole network are never held at once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastswin.engine import operators
from fastswin.engine.bind import BoundPlan
from fastswin.engine.call_results import empty_result
from fastswin.engine.forward import Forward
from fastswin.engine.prepared import PreparedBlock
from fastswin.engine.quantized.prepare import LayerForms
from fastswin.ops.cluster_mlp.weights import PackedMlp
from fastswin.ops.swin_block.packing import PackedBlock


@dataclasses.dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        stage: index, or None for embedding, pool and head.
        layer: "qkv", "attention", "proj", "norm", "fc1", "fc2", "mlp", "merge", "embed", "pool",
            "head", "add" or the function's own name.
        function: what was called.
        args, kwargs: with these.
        result: and what it returned; of a pair the first.
        count: calls of this kind (same layer, function and shapes) in the stage.
    """

    stage: int | None
    layer: str
    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    result: torch.Tensor
    count: int = 1

    @property
    def name(self) -> str:
        """The function's name; ``ops.`` marks an operator of fastswin."""
        name = self.function.__name__.strip("_")
        return f"ops.{name}" if self.function in OPERATORS.values() else name

    @property
    def signature(self) -> Hashable:
        """Equal for calls that run the same kernels on data of the same shapes."""
        arguments = [(str(i), value) for i, value in enumerate(self.args)]
        arguments += sorted(self.kwargs.items())
        return self.name, tuple((name, _describe(value)) for name, value in arguments)

    def run(self) -> Any:
        """The call once more, on the same tensors."""
        return self.function(*self.args, **self.kwargs)


OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(operators, name) for name in operators.__all__
}

#: Layer of an operator whose weight does not say it.
_LAYERS = {
    "packed_window_attention": "attention",
    "packed_attention_half": "attention",
    "packed_heads_attention": "attention",
    "packed_mlp": "mlp",
    "packed_swin_block": "block",
    "window_attention_ref": "attention",
    "quantized_window_attention_ref": "attention",
    "layer_norm_per_token": "norm",
    "quantize": "quantize",
    "quantize_per_token": "quantize",
    "add": "add",
    "add_split_k": "norm",
    "layer_norm": "norm",
    "mlp": "mlp",
    "quantized_mlp": "mlp",
    "gather_neighbours": "merge",
    "merge_neighbours": "merge",
    "norm_pool_head": "head",
    "patch_embed": "embed",
    "norm_pool": "pool",
    "iadd": "add",
}


#: Operators that read the weights of several layers.
_SEVERAL_LAYERS = (
    "mlp", "quantized_mlp", "packed_attention_half", "packed_heads_attention", "packed_mlp",
    "packed_swin_block",
)  # fmt: skip

#: Operators without ``impl=``: kernels in any case.
_ALWAYS_KERNELS = (
    operators.packed_window_attention, operators.packed_attention_half,
    operators.packed_heads_attention, operators.packed_mlp, operators.packed_swin_block,
)  # fmt: skip


def record_calls(
    forward: Forward, bound: BoundPlan, images: torch.Tensor, *, execute: bool = True
) -> list[Call]:
    """Run a forward pass and note its calls, in order of their first appearance.

    Args:
        forward: the model's.
        bound: the plan for these images.
        images: ``[B, channels, h, w]`` on the engine's device, B >= 1.
        execute: whether operators run; if not, their results are memory of the right shape and no
            kernel is compiled.
    """
    recorder = _Recorder(execute)
    noted = type(forward)(forward.config, forward.weights, forward.precision, recorder)
    with recorder:
        x, left = noted.embed(images, bound.plan)
        for index, stage in enumerate(bound.plan.stages):
            blocks = list(zip(forward.weights.stages[index], bound.offsets[index], strict=True))
            for block, offsets in blocks:
                recorder.enter(index, _weights_of(block))
                stats = noted.attention_half(x, block, stage, offsets, left)
                left = noted.mlp_half(x, block, stage, offsets, stats)
            noted.join(x, left, stage)
            if stage.merge is not None:
                recorder.enter(index, {}, default="merge")
                x, left = noted.merge(x, index, stage, bound.stage_end[index])
        recorder.enter(None, {}, default="head")
        noted.classify(x, bound)
    return recorder.calls()


def _weights_of(block: PreparedBlock) -> dict[int, str]:
    found = {}
    for name in ("qkv", "proj", "fc1", "fc2"):
        linear = getattr(block, name)
        for weight in linear.placed if isinstance(linear, LayerForms) else [linear.weight]:
            found[weight.data_ptr()] = name
    return found


class _Recorder(TorchFunctionMode):
    """Notes calls; also the stand-in for operators.py."""

    def __init__(self, execute: bool) -> None:
        super().__init__()
        self._calls: dict[Hashable, Call] = {}
        self._counts: Counter[Hashable] = Counter()
        self._execute = execute
        self._inside = False
        self.enter(None, {}, default="embed")

    def calls(self) -> list[Call]:
        """One of each kind, with how many there were."""
        return [
            dataclasses.replace(call, count=self._counts[key]) for key, call in self._calls.items()
        ]

    def enter(self, stage: int | None, weights: dict[int, str], default: str = "") -> None:
        """Say where in the model the next calls are."""
        self._stage, self._weights, self._default = stage, weights, default

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        if name not in OPERATORS:
            raise AttributeError(name)
        function = OPERATORS[name]
        return lambda *args, **kwargs: self._operator(function, args, kwargs)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._inside and _moves_data(func, args, kwargs, result):
            self._note(func, args, kwargs, result)
        return result

    def _operator(
        self, function: Callable[..., torch.Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        self._inside = True
        try:
            if self._execute or not launches_kernel(function, kwargs):
                result = function(*args, **kwargs)
            elif kwargs.get("out") is not None:
                result = kwargs["out"]
            elif function is operators.add_split_k and kwargs.get("norm") != "pre":
                result = None
            else:
                result = empty_result(function, args, kwargs)
        finally:
            self._inside = False
        self._note(function, args, kwargs, result)
        return result

    def _note(self, function: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        name = function.__name__.strip("_")
        pointers = [a.data_ptr() for a in args if isinstance(a, torch.Tensor)]
        layer = next((self._weights[p] for p in pointers if p in self._weights), None)
        if name in _SEVERAL_LAYERS or layer is None:
            layer = _LAYERS.get(name) or self._default or name
        first = result[0] if isinstance(result, tuple) else result
        if first is None:  # added in place
            first = args[1]
        call = Call(self._stage, layer, function, args, kwargs, first)
        key = call.stage, call.layer, call.signature
        self._calls.setdefault(key, call)
        self._counts[key] += 1


def _moves_data(func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> bool:
    """Whether a function wrote tensor memory, rather than describe it."""
    if not isinstance(result, torch.Tensor) or func.__name__.startswith(("empty", "new_empty")):
        return False
    sources = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    storages = {a.untyped_storage().data_ptr() for a in sources}
    if result.untyped_storage().data_ptr() not in storages:
        return True
    name = func.__name__
    in_place = (name.endswith("_") and not name.startswith("__")) or name.startswith("__i")
    return in_place or kwargs.get("out") is not None


def _describe(value: Any) -> Hashable:
    """What of an argument decides which kernel runs."""
    if isinstance(value, torch.Tensor):
        aligned = value.data_ptr() % 16 == 0
        return tuple(value.shape), value.dtype, value.stride(), aligned
    if isinstance(value, PackedBlock | PackedMlp):
        return tuple(_describe(tensor) for tensor in value.tensors())
    return tuple(value) if isinstance(value, list) else value


def launches_kernel(function: Callable[..., torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operator's call launches a kernel of fastswin."""
    return function in _ALWAYS_KERNELS or kwargs.get("impl") == "triton"
