"""From any checkpoint to a model: read, recognise, rename, configure, fit, report.

    file or dict -> tensors -> layout -> official names -> SwinConfig -> SwinTransformer

Nothing is dropped silently: a missing or unexpected weight, or a shape that does not fit, raises
unless ``allow_partial`` says otherwise, and zero weights in common always raise.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple, get_args

import torch

from fastswin.models.checkpoint.detect import detect_layout
from fastswin.models.checkpoint.errors import CheckpointError
from fastswin.models.checkpoint.fit import Fit, fit_state
from fastswin.models.checkpoint.infer import infer_config
from fastswin.models.checkpoint.layout import Layout, State, is_v2
from fastswin.models.checkpoint.read import Source, read_checkpoint
from fastswin.models.checkpoint.report import LoadReport, few
from fastswin.models.checkpoint.save import CONFIG_KEY
from fastswin.models.config import SwinConfig
from fastswin.models.swin import SwinTransformer
from fastswin.models.variants import find_variant

ResizeBias = Literal["never", "bicubic"]


class LoadedCheckpoint(NamedTuple):
    """A loaded model with its report and the file's extra metadata."""

    model: SwinTransformer
    report: LoadReport
    metadata: dict[str, Any]


def load_checkpoint(
    source: Source,
    *,
    config: SwinConfig | None = None,
    model_name: str | None = None,
    ema: bool = False,
    resize_bias: ResizeBias = "never",
    num_classes: int | None = None,
    allow_partial: bool = False,
) -> LoadedCheckpoint:
    """Load a Swin checkpoint of any framework.

    Args:
        source: path of a ``.safetensors`` or PyTorch file, or a state dict, wrapped or bare.
        config: the exact model to build; excludes ``model_name``.
        model_name: a published variant; the number of classes still comes from the checkpoint.
            Without either, the configuration comes from the file's metadata or from its shapes.
        ema: take averaged weights where the file holds both.
        resize_bias: "bicubic" resizes bias tables and position embeddings of another size.
        num_classes: classes of the model; None keeps the checkpoint's, 0 drops the head.
        allow_partial: load what fits; missing weights (and a head of another class count) keep
            their initial values and are reported.

    Returns:
        The model (eval mode, fp32, CPU), the report, and metadata saved beside the weights.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: not readable, not a Swin, or not a fit; one line that says what.
        ValueError: an argument is off.
    """
    if config is not None and model_name is not None:
        raise ValueError("give config or model_name, not both")
    if resize_bias not in get_args(ResizeBias):
        raise ValueError(f"resize_bias must be one of {get_args(ResizeBias)}, got {resize_bias!r}")
    raw = read_checkpoint(source, ema=ema)
    detected = detect_layout(raw.state)
    state = detected.layout.to_official(detected.state)
    config, origin = _choose_config(state, detected.layout, config, model_name, raw.metadata)
    if num_classes is not None:
        config = config.replace(num_classes=num_classes)
    fit = fit_state(
        state, config, resize=resize_bias == "bicubic", allow_partial=allow_partial,
        drop_head=num_classes == 0,
    )  # fmt: skip
    report = LoadReport(
        layout=detected.layout.name,
        prefix=detected.prefix,
        wrapper=raw.wrapper,
        ema=raw.ema,
        config_from=origin,
        matched=tuple(fit.state),
        missing=fit.missing,
        unexpected=fit.unexpected,
        reshaped=fit.reshaped,
        ignored=fit.ignored,
    )
    _check_coverage(report, allow_partial)
    return LoadedCheckpoint(_build(config, fit), report, _extra_metadata(raw.metadata))


def _choose_config(
    state: State,
    layout: Layout,
    config: SwinConfig | None,
    model_name: str | None,
    metadata: dict[str, str],
) -> tuple[SwinConfig, str]:
    """What was asked for, else what the file says, else what its shapes tell."""
    if config is not None:
        return config, "config"
    convention = layout.window_convention(2 if is_v2(state) else 1)
    if model_name is not None:
        head = state.get("head.weight")
        return find_variant(model_name).replace(
            num_classes=0 if head is None else head.shape[0], window_convention=convention
        ), "model_name"
    if CONFIG_KEY in metadata:
        try:
            return SwinConfig.from_dict(json.loads(metadata[CONFIG_KEY])), "file"
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"metadata {CONFIG_KEY!r} is not usable: {error}") from error
    try:
        return infer_config(state, convention), "inferred"
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"no Swin configuration has these shapes: {error}") from error


def _check_coverage(report: LoadReport, allow_partial: bool) -> None:
    if not report.matched:
        raise CheckpointError(
            f"no weight of this checkpoint fits the model: {len(report.missing)} missing, "
            f"{len(report.unexpected)} unexpected ({few(report.unexpected)})"
        )
    if allow_partial or not (report.missing or report.unexpected):
        return
    parts = [
        f"{len(names)} {label} ({few(names)})"
        for label, names in (("missing", report.missing), ("unexpected", report.unexpected))
        if names
    ]
    raise CheckpointError(
        f"checkpoint and model differ: {', '.join(parts)}; pass the right config= or model_name=, "
        "or allow_partial=True to load the rest"
    )


def _build(config: SwinConfig, fit: Fit) -> SwinTransformer:
    """The model with its own fp32 copies of the weights."""
    weights = {
        name: tensor.to("cpu", torch.float32, copy=True).contiguous()
        for name, tensor in fit.state.items()
    }
    if fit.missing:  # initial values are needed
        model = SwinTransformer(config)
        model.load_state_dict(weights, strict=False)
    else:
        with torch.device("meta"):
            model = SwinTransformer(config)
        model.load_state_dict(weights, assign=True)
    return model.requires_grad_(True).eval()


def _extra_metadata(metadata: dict[str, str]) -> dict[str, Any]:
    """Metadata values as JSON where they are JSON."""
    extra: dict[str, Any] = {}
    for key, text in metadata.items():
        if key in (CONFIG_KEY, "format"):
            continue
        try:
            extra[key] = json.loads(text)
        except json.JSONDecodeError:
            extra[key] = text
    return extra
