"""TensorRT engines from ONNX files: TensorRT 10 and 11 for this machine's GPU, and TensorRT-RTX.

Networks are strongly typed: the types are those that the graph states, so an fp32 graph gives an
fp32 engine and casts and Q/DQ pairs are obeyed. TensorRT tunes on the GPU of this machine;
TensorRT-RTX's builder needs none and makes an engine for the compute capabilities it is given,
which the user's machine finishes compiling when it loads it.

Source: NVIDIA's documentation of TensorRT 10 and 11 and of TensorRT-RTX 1.x ("CPU-only AOT").
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from fastswin.data.atomic import replacing
from fastswin.export.tensorrt_report import BatchRange, TensorRtReport

__all__ = ["BatchRange", "TensorRtReport", "build_engine"]

Runtime = Literal["tensorrt", "tensorrt-rtx"]

#: Capabilities of TensorRT-RTX engines unless others are asked for: RTX 30, 40 and 50.
RTX_CAPABILITIES = (86, 89, 120)

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}

_LAYER_KIND = re.compile(r"LayerType: (\w+)")


def build_engine(
    onnx_path: str | os.PathLike,
    engine_path: str | os.PathLike,
    *,
    runtime: Runtime = "tensorrt-rtx",
    capabilities: Sequence[int] | None = None,
    batches: BatchRange | None = None,
    tf32: bool = False,
    timing_cache: str | os.PathLike | None = None,
    optimization_level: int | None = None,
    workspace_mib: int | None = None,
    portable: bool = False,
) -> TensorRtReport:
    """Build one engine from an ONNX file and write it whole or not at all.

    Args:
        onnx_path: a graph with a fixed image size, such as :func:`fastswin.export.onnx.export_onnx`
            writes; ``fastswin::WindowAttention`` nodes become plugins with our kernels
            (TensorRT only).
        engine_path: file to write.
        runtime: "tensorrt", tuned on this machine's GPU, or "tensorrt-rtx", built without one.
        capabilities: for "tensorrt-rtx" alone: compute capabilities, 86 for 8.6; None takes
            :data:`RTX_CAPABILITIES`.
        batches: range of a dynamic batch axis; None takes 1 to 32, tuned for 8. Illegal for a
            graph with a fixed batch.
        tf32: let fp32 products use TF32.
        timing_cache: for "tensorrt" alone: file with measured tactics, read where it exists and
            written after; makes a second build fast and the same.
        optimization_level: builder effort, 0 to 5; None leaves the builder's default.
        workspace_mib: most scratch memory of one layer in MiB; None leaves it to the builder.
        portable: for "tensorrt" alone: an engine for Ampere and all later GPUs, which may be
            slower.

    Returns:
        What was built.

    Raises:
        ImportError: the runtime is not installed; the message names the extra or package.
        FileNotFoundError: there is no ``onnx_path``.
        ValueError: an argument is out of its legal range or does not fit the graph or runtime.
        RuntimeError: the parser or builder refuses; the message is its first error.
    """
    onnx_path, engine_path = Path(onnx_path), Path(engine_path)
    if runtime not in get_args(Runtime):
        raise ValueError(f"runtime must be one of {get_args(Runtime)}, got {runtime!r}")
    _check_arguments(runtime, capabilities, timing_cache, optimization_level, portable)
    if not onnx_path.is_file():
        raise FileNotFoundError(2, "No such file or directory", str(onnx_path))
    trt = import_runtime(runtime)
    targets = _targets(trt, runtime, capabilities)
    log = _make_log(trt)
    builder = _refused(log, lambda: trt.Builder(log))
    network = builder.create_network(_network_flags(trt, runtime))
    started = time.perf_counter()
    plugins = _parse(trt, network, log, onnx_path, runtime, portable)
    parse_seconds = time.perf_counter() - started
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if not tf32:  # on by default in TensorRT
        config.clear_flag(trt.BuilderFlag.TF32)
    if optimization_level is not None:
        config.builder_optimization_level = optimization_level
    if workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_mib << 20)
    if portable:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    for index, target in enumerate(targets):
        config.num_compute_capabilities = len(targets)
        if not config.set_compute_capability(target, index):
            raise RuntimeError(f"{runtime} refuses compute capability {target.name}")
    profile_batches = _add_profile(builder, network, config, batches)
    cache_path = None if timing_cache is None else Path(timing_cache)
    if cache_path is not None:
        known = cache_path.read_bytes() if cache_path.exists() else b""
        if not config.set_timing_cache(config.create_timing_cache(known), False):
            raise ValueError(f"timing_cache {cache_path} is of another GPU or TensorRT version")
    started = time.perf_counter()
    engine = builder.build_serialized_network(network, config)
    build_seconds = time.perf_counter() - started
    if engine is None:
        raise RuntimeError(f"{runtime}: {log.first_error or 'the builder made no engine'}")
    with replacing(engine_path) as temporary:
        temporary.write_bytes(memoryview(engine))
    if cache_path is not None:
        with replacing(cache_path) as temporary:
            temporary.write_bytes(memoryview(config.get_timing_cache().serialize()))
    layers = [network.get_layer(i).type.name.lower() for i in range(network.num_layers)]
    return TensorRtReport(
        path=engine_path, runtime=f"{runtime} {trt.__version__}",
        capabilities=tuple(int(t.name.removeprefix("SM")) for t in targets),
        batches=profile_batches, tf32=tf32, plugins=plugins, network_layers=Counter(layers),
        engine_layers=Counter(log.engine_layers), engine_bytes=engine_path.stat().st_size,
        parse_seconds=parse_seconds, build_seconds=build_seconds,
    )  # fmt: skip


def import_runtime(runtime: Runtime) -> Any:
    """The runtime's Python package.

    Raises:
        ImportError: it, or the libraries under it, are missing; the message says what to install.
    """
    remedy = {
        "tensorrt": "TensorRT for data-centre GPUs is needed: pip install tensorrt",
        "tensorrt-rtx": "TensorRT-RTX is needed: pip install 'fastswin[tensorrt]'",
    }[runtime]
    try:
        return importlib.import_module(_MODULES[runtime])
    except ImportError as error:
        found = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        raise ImportError(f"{remedy}{found}") from error


def _check_arguments(
    runtime: str,
    capabilities: Sequence[int] | None,
    timing_cache: str | os.PathLike | None,
    optimization_level: int | None,
    portable: bool,
) -> None:
    if runtime == "tensorrt" and capabilities is not None:
        raise ValueError(
            "capabilities belong to runtime='tensorrt-rtx'; TensorRT builds for this machine's GPU"
        )
    if runtime == "tensorrt-rtx" and timing_cache is not None:
        raise ValueError("timing_cache belongs to runtime='tensorrt'; TensorRT-RTX times nothing")
    if runtime == "tensorrt-rtx" and portable:
        raise ValueError("portable belongs to runtime='tensorrt'; give capabilities instead")
    if optimization_level is not None and not 0 <= optimization_level <= 5:
        raise ValueError(f"optimization_level must lie in [0, 5], got {optimization_level}")


def _targets(trt: Any, runtime: str, capabilities: Sequence[int] | None) -> list[Any]:
    """Members of ``ComputeCapability``, none for TensorRT."""
    if runtime == "tensorrt":
        return []
    wanted = RTX_CAPABILITIES if capabilities is None else tuple(capabilities)
    members = trt.ComputeCapability.__members__
    legal = sorted(int(n[2:]) for n in members if n.startswith("SM"))
    if not wanted or len(set(wanted)) != len(wanted) or not set(wanted) <= set(legal):
        raise ValueError(f"capabilities must be distinct numbers of {legal}, got {list(wanted)}")
    return [members[f"SM{c}"] for c in wanted]


def _network_flags(trt: Any, runtime: str) -> int:
    """Strong typing, which TensorRT 11 always has; its flag there is deprecated."""
    if runtime == "tensorrt" and int(trt.__version__.split(".")[0]) >= 11:
        return 0
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def _parse(trt: Any, network: Any, log: Any, path: Path, runtime: str, portable: bool) -> int:
    """Fill the network; the number of plugin layers."""
    from fastswin.export.plugin_graph import has_attention_nodes, plugin_model

    parser = trt.OnnxParser(network, log)
    plugins = 0
    if has_attention_nodes(path):
        if runtime == "tensorrt-rtx":
            raise ValueError(
                f"{path.name} holds fastswin::WindowAttention, and TensorRT-RTX takes no plugins; "
                "export with attention='plain'"
            )
        from fastswin.export.plugin import register_plugins

        register_plugins()
        serialized, plugins = plugin_model(path, **_this_card(portable))
        parsed = parser.parse(serialized, str(path))  # the path leads to external weights
    else:
        parsed = parser.parse_from_file(str(path))
    if not parsed:
        reasons = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise RuntimeError(f"{runtime} cannot read {path.name}: {reasons[0] if reasons else ''}")
    return plugins


def _this_card(portable: bool) -> dict[str, Any]:
    """Capability and multiprocessors that plugins are compiled for."""
    import torch

    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = 80 if portable else 10 * card.major + card.minor
    return {"capability": capability, "multiprocessors": card.multi_processor_count}


def _add_profile(
    builder: Any, network: Any, config: Any, batches: BatchRange | None
) -> BatchRange | None:
    """The range of a dynamic batch axis; None where the graph's batch is fixed."""
    images = network.get_input(0)
    batch, *rest = images.shape
    if -1 in rest:
        raise ValueError("the graph's image size is dynamic; an engine needs a fixed one")
    if batch != -1:
        if batches is not None:
            raise ValueError(f"batches belong to a dynamic batch axis; the graph's is {batch}")
        return None
    batches = batches or BatchRange()
    profile = builder.create_optimization_profile()
    sizes = (batches.smallest, batches.usual, batches.largest)
    profile.set_shape(images.name, *((size, *rest) for size in sizes))
    if config.add_optimization_profile(profile) < 0:
        raise RuntimeError(f"the builder refuses batches {batches}")
    return batches


def _refused(log: Any, make: Any) -> Any:
    """Call a constructor of TensorRT, whose failure is a TypeError without the reason."""
    try:
        return make()
    except TypeError as error:
        raise RuntimeError(f"TensorRT cannot start: {log.first_error or error}") from error


def _make_log(trt: Any) -> Any:
    """A logger that prints nothing and keeps the first error and the engine's list of layers."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.first_error = ""
            self.engine_layers: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            bad = (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR)
            if severity in bad and not self.first_error:
                self.first_error = " ".join(message.split())
            elif message.startswith("Layers:"):
                self.engine_layers = _LAYER_KIND.findall(message)

    return Log()
