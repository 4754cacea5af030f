"""Which layers are quantised, and how: frozen values that travel with the weights as JSON.

    format      "int8" (symmetric, -127..127), "fp8" (e4m3, -448..448) or "wide" (not quantised)
    weight      one scale per output channel ``[N]``, or one per tensor
    activation  one static scale per tensor, or one per token computed when the layer runs
    output      "wide", or "quantized": written in the layer's format with static scales

Quantisable are the linear layers of blocks and mergings: ``qkv``, ``proj``, ``fc1``, ``fc2`` and
``reduction``. Softmax, LayerNorm, GELU, the residual stream, the patch embedding and the head stay
wide in every scheme. What fc1 and attention write is what fc2 and proj read, so those two tensors
are quantised as the *input* of fc2 and proj and have no setting of their own.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

Format = Literal["int8", "fp8", "wide"]
WeightGranularity = Literal["per_channel", "per_tensor"]
ActivationGranularity = Literal["per_tensor", "per_token"]
Output = Literal["wide", "quantized"]
ObserverName = Literal["max", "percentile", "entropy", "mse"]
LayerKind = Literal["qkv", "proj", "fc1", "fc2", "reduction"]

KINDS: tuple[LayerKind, ...] = get_args(LayerKind)

#: Largest magnitude of a quantised value.
LARGEST: dict[str, float] = {"int8": 127.0, "fp8": 448.0}


@dataclasses.dataclass(frozen=True)
class LayerScheme:
    """How one linear layer is quantised.

    Attributes:
        format: of its input and weight, and of its output where that is quantised.
        weight: granularity of the weight's scales.
        activation: granularity of the input's scales.
        output: whether it writes its format or the wide one.
        observer: how static ranges are chosen from what calibration saw.
        percentile: of the magnitudes, for the observer "percentile", in (50, 100].

    Raises:
        ValueError: an attribute is out of its legal values; the message names it.
    """

    format: Format = "int8"
    weight: WeightGranularity = "per_channel"
    activation: ActivationGranularity = "per_tensor"
    output: Output = "wide"
    observer: ObserverName = "mse"
    percentile: float = 99.99

    def __post_init__(self) -> None:
        for name, legal in _LEGAL.items():
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} must be one of {legal}, got {getattr(self, name)!r}")
        if not 50.0 < self.percentile <= 100.0:
            raise ValueError(f"percentile must lie in (50, 100], got {self.percentile}")

    @property
    def quantized(self) -> bool:
        """Whether the layer is quantised at all."""
        return self.format != "wide"


_LEGAL = {
    "format": get_args(Format),
    "weight": get_args(WeightGranularity),
    "activation": get_args(ActivationGranularity),
    "output": get_args(Output),
    "observer": get_args(ObserverName),
}

#: A layer left in the engine's wide dtype.
WIDE = LayerScheme(format="wide")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a whole model is quantised.

    Attributes:
        name: of the preset it comes from, or any other.
        qkv, proj, fc1, fc2, reduction: the scheme of each kind of layer.
        overrides: ``(pattern, layer scheme)`` pairs over layer names such as
            ``layers.0.blocks.1.mlp.fc2``; shell patterns, the last match wins.

    Raises:
        ValueError: per-token scales where a kernel sees only part of a token's row (proj and fc2),
            or a quantised fc1 output, which is fc2's input and follows fc2's format.
    """

    name: str
    qkv: LayerScheme = LayerScheme()
    proj: LayerScheme = LayerScheme()
    fc1: LayerScheme = LayerScheme()
    fc2: LayerScheme = LayerScheme()
    reduction: LayerScheme = LayerScheme()
    overrides: tuple[tuple[str, LayerScheme], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", tuple((p, s) for p, s in self.overrides))
        for kind in KINDS:
            _check_kind(kind, getattr(self, kind), kind)
        for pattern, layer in self.overrides:
            for kind in KINDS:
                if pattern.endswith(kind):
                    _check_kind(kind, layer, pattern)

    def layer(self, name: str) -> LayerScheme:
        """The scheme of one layer by its name.

        Raises:
            ValueError: not the name of a quantisable layer, or an override that is illegal for it.
        """
        kind = kind_of(name)
        found: LayerScheme = getattr(self, kind)
        for pattern, override in self.overrides:
            if fnmatch.fnmatchcase(name, pattern):
                found = override
        _check_kind(kind, found, name)
        return found

    def writes(self, name: str) -> Format:
        """The format in which a layer's result is stored: for fc1 that of fc2's input."""
        if kind_of(name) == "fc1":
            return self.layer(name.removesuffix("fc1") + "fc2").format
        layer = self.layer(name)
        return layer.format if layer.output == "quantized" else "wide"

    def override(self, overrides: Mapping[str, LayerScheme], name: str | None = None) -> Scheme:
        """A copy with more overrides, which win over those that are there."""
        return dataclasses.replace(
            self, name=name or self.name, overrides=(*self.overrides, *overrides.items())
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, the inverse of :meth:`from_dict`."""
        values = dataclasses.asdict(self)
        values["overrides"] = [[p, dataclasses.asdict(s)] for p, s in self.overrides]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scheme:
        """Build from :meth:`to_dict`.

        Raises:
            ValueError: unknown, missing or malformed content.
        """
        try:
            arguments = dict(values)
            for kind in KINDS:
                arguments[kind] = LayerScheme(**arguments[kind])
            arguments["overrides"] = tuple(
                (pattern, LayerScheme(**layer)) for pattern, layer in arguments["overrides"]
            )
            return cls(**arguments)
        except (KeyError, TypeError) as error:
            raise ValueError(f"scheme: malformed content ({error})") from error

    @property
    def fingerprint(self) -> str:
        """Hash of everything but the name: two schemes with one fingerprint quantise alike."""
        values = {key: value for key, value in self.to_dict().items() if key != "name"}
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def kind_of(name: str) -> LayerKind:
    """``layers.0.blocks.1.mlp.fc2`` to ``fc2``; ValueError for anything else."""
    last = name.rpartition(".")[2]
    for kind in KINDS:
        if last == kind:
            return kind
    raise ValueError(f"layer {name!r} is not quantisable; its last part must be one of {KINDS}")


def find_scheme(scheme: str | Scheme) -> Scheme:
    """A scheme itself, or the preset of a name.

    Raises:
        ValueError: no such preset; the message lists them.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in PRESETS:
        raise ValueError(f"scheme must be one of {sorted(PRESETS)}, got {scheme!r}")
    return PRESETS[scheme]


def _check_kind(kind: LayerKind, layer: LayerScheme, where: str) -> None:
    if kind in ("proj", "fc2") and layer.activation == "per_token":
        raise ValueError(
            f"{where}: activation must be 'per_tensor': the kernel that writes this input sees "
            "only part of a token's row; 'per_token' is legal for qkv, fc1 and reduction"
        )
    if kind == "fc1" and layer.output == "quantized":
        raise ValueError(f"{where}: output must be 'wide'; fc1 writes fc2's input format")


def _uniform(name: str, layer: LayerScheme, quantized_outputs: tuple[LayerKind, ...]) -> Scheme:
    narrow = dataclasses.replace(layer, output="quantized")
    layers = {kind: narrow if kind in quantized_outputs else layer for kind in KINDS}
    return Scheme(
        name, layers["qkv"], layers["proj"], layers["fc1"], layers["fc2"], layers["reduction"]
    )


#: Ready schemes by name.
PRESETS: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        # the two modes of the older engines, but with per-channel weights: 8 bits in and out of
        # every product, and the same with fc2 and merging left wide
        _uniform(
            "int8_mode1",
            LayerScheme(observer="percentile"),
            ("qkv", "proj", "fc2", "reduction"),
        ),
        _uniform("int8_mode2", LayerScheme(observer="percentile"), ("qkv", "proj")),
        # 8-bit q, k and v halve what attention reads; a residual epilogue writes wide for free
        _uniform("int8", LayerScheme(), ("qkv",)),
        # e4m3 has 2^15 between its largest and smallest normal: clipping would gain nothing
        _uniform("fp8", LayerScheme(format="fp8", observer="max"), ("qkv",)),
    )
}
