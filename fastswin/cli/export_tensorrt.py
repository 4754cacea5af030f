"""``fastswin export tensorrt``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fastswin.cli.exit_codes import CheckFailedError
from fastswin.cli.export_options import (
    Check,
    Features,
    Fold,
    ImageSize,
    RandomWeights,
    Ranges,
    Scheme,
    choose_source,
    read_calibration,
)
from fastswin.cli.options import Checkpoint, Json, Model, parse_image_size, split_numbers
from fastswin.cli.output import note, print_json, print_table
from fastswin.export.report import ParityError
from fastswin.export.tensorrt import RTX_CAPABILITIES, BatchRange, build_engine
from fastswin.export.tensorrt_export import export_tensorrt
from fastswin.export.tensorrt_report import TensorRtReport


def tensorrt(
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write; default: <model>.engine here.")
    ] = None,
    model: Model = None,
    checkpoint: Checkpoint = None,
    onnx: Annotated[
        Path | None, typer.Option(help="Build from this ONNX file instead of a model.")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="fp32, tf32 or fp16; for --onnx only tf32 or not matters.")
    ] = "fp16",
    runtime: Annotated[
        str, typer.Option(help="tensorrt-rtx builds without a GPU; tensorrt tunes on this one.")
    ] = "tensorrt-rtx",
    capability: Annotated[
        list[str] | None,
        typer.Option(
            help="Compute capabilities for tensorrt-rtx, as in 86,89; default: "
            f"{','.join(map(str, RTX_CAPABILITIES))}."
        ),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(help=f"Smallest, usual and largest batch; default: {BatchRange()}."),
    ] = None,
    calibration: Ranges = None,
    scheme: Scheme = "int8",
    plugins: Annotated[
        bool, typer.Option("--plugins", help="Attention in our kernels; for tensorrt.")
    ] = False,
    image_size: ImageSize = None,
    features: Features = False,
    fold: Fold = True,
    check: Check = True,
    random_weights: RandomWeights = False,
    timing_cache: Annotated[
        Path | None, typer.Option(help="File with measured tactics; for tensorrt.")
    ] = None,
    optimization_level: Annotated[
        int | None, typer.Option(min=0, max=5, help="Builder effort.")
    ] = None,
    workspace_mib: Annotated[
        int | None, typer.Option(min=1, help="Most scratch memory of a layer, MiB.")
    ] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="For Ampere and all later GPUs; for tensorrt.")
    ] = False,
    keep_onnx: Annotated[Path | None, typer.Option(help="Keep the ONNX file here.")] = None,
    json: Json = False,
) -> None:
    """Write ONNX, compare it with the model, and build a TensorRT engine from it."""
    source, name = choose_source(model, checkpoint, onnx)
    path = output or Path(f"{name}.engine")
    builder: dict[str, Any] = {
        "runtime": runtime, "batches": parse_batches(batches), "timing_cache": timing_cache,
        "capabilities": split_numbers(capability, "--capability") or None,
        "optimization_level": optimization_level, "workspace_mib": workspace_mib,
        "portable": portable,
    }  # fmt: skip
    exported = None
    if onnx is not None:
        engine = build_engine(onnx, path, tf32=precision == "tf32", **builder)
    else:
        try:
            exported, engine = export_tensorrt(
                source, path, precision=precision, plugins=plugins,  # type: ignore[arg-type]
                image_size=parse_image_size(image_size), features=features, fold=fold,
                check=check, pretrained=not random_weights, keep_onnx=keep_onnx,
                calibration=read_calibration(calibration, scheme, source), **builder,
            )  # fmt: skip
        except ParityError as error:
            raise CheckFailedError(str(error)) from error
    if json:
        onnx_report = None if exported is None else exported.to_dict()
        print_json({"onnx": onnx_report, "engine": engine.to_dict()})
        return
    if exported is not None:
        checked = "not checked (--no-check)"
        if exported.parity is not None:
            checked = f"max abs diff {exported.parity.max_abs_diff:.2e} from the fp32 model"
        note(f"ONNX: {exported.node_count} nodes, {exported.precision}, {checked}")
    print_engines([(path.name, engine)])


def parse_batches(text: str | None) -> BatchRange | None:
    """``smallest:usual:largest`` as a range; None stays None.

    Raises:
        ValueError: not three positive integers in order.
    """
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise ValueError(f"--batches must be smallest:usual:largest as in 1:8:32, got {text!r}")
    return BatchRange(*map(int, parts))


def print_engines(engines: list[tuple[str, TensorRtReport]]) -> None:
    """A table with one line an engine: size, layers and times."""
    columns = ("engine", "for", "batches", "MiB", "network layers", "engine layers", "build s")
    rows = [
        (
            name,
            " ".join(f"sm_{c}" for c in engine.capabilities) or "this GPU",
            engine.batches or "fixed",
            f"{engine.engine_bytes / 2**20:.1f}",
            engine.network_layers.total(),
            engine.engine_layers.total() or "?",
            f"{engine.build_seconds:.1f}",
        )
        for name, engine in engines
    ]
    print_table(engines[0][1].runtime, columns, rows, left=2)
