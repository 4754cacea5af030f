"""The engine: snapshot of a model's weights, a plan per shape, graphs, one lock.

    engine = Engine("swin_tiny_patch4_window7_224", precision="fp16")
    logits = engine(images)                       # [B, 3, h, w] -> [B, classes]

The output is a function of weights and images alone. Calls from several threads take turns; on
several streams they are ordered by events.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Literal, NoReturn

import torch

from fastswin._triton.available import Impl, choose_impl, why_not_triton
from fastswin.engine.backends import Backend, BackendSelector, GraphRunner
from fastswin.engine.backends.open import open_runner
from fastswin.engine.bind import BoundPlan
from fastswin.engine.build import build_forward, device_name, find_device_table, resolve_device
from fastswin.engine.calls import Call, record_calls
from fastswin.engine.check import BlockRange, check_finite
from fastswin.engine.graphs import GraphLadder
from fastswin.engine.plans import Plans
from fastswin.engine.precision import (
    PRECISIONS,
    QUANTIZED,
    Precision,
    find_precision,
    matmul_mode,
)
from fastswin.engine.quantized.mix import MIXES, Mix
from fastswin.engine.report import EngineReport
from fastswin.engine.source import make_loader
from fastswin.engine.tuned import tuned_gain
from fastswin.engine.warmup import begin_hashing_compiler, compile_calls
from fastswin.models.config import SwinConfig
from fastswin.models.swin import SwinTransformer, check_images
from fastswin.quant.ranges import Calibration

#: Default ladder of captured batch sizes.
GRAPH_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Engine:
    """A Swin Transformer V1 or V2 for inference.

    Args:
        source: a model name (see ``fastswin.models.list_models``), a checkpoint path of any
            supported layout, or a live timm, torchvision, transformers, Microsoft or fastswin
            model. Weights are copied; the source is not modified.
        precision: "fp32", "tf32", "fp16" or "bf16"; from a calibrated model "int8", "int8_mode1",
            "int8_mode2" or "fp8", which on a CPU only "int8" runs at speed.
        device: where to run; None means the current GPU if there is one, else the CPU.
        pretrained: for a name, whether to load published weights (needs timm and its hub).
        config: for a checkpoint, its configuration where it cannot be told from the file.
        cuda_graphs: replay captured CUDA graphs; off runs every launch from the host.
        graph_batch_sizes: ladder of captured batch sizes.
        max_graphs: captured graphs kept; the least recently used is dropped.
        impl: "auto"; "triton" raises where the kernels cannot run; "reference" is plain PyTorch.
        tuning: "auto" takes the table of tuned kernels that ships for this GPU, if any; "off" takes
            the heuristics; a path takes the table that ``fastswin tune`` wrote there.
        backend: on a CPU, "openvino", "onnxruntime" or "torch"; "auto" takes the fastest that is
            installed and answers rightly.
        calibration: ranges of :func:`fastswin.quant.calibrate` for a quantised precision; None
            takes those that a calibrated checkpoint holds.
        mix: for a quantised precision, "auto" leaves layers wide that 8 bits would not make faster
            here, batch by batch; "scheme" quantises all that the scheme does.
        wide_dtype: for a quantised precision, the dtype of all that is not quantised: torch.float16
            (default on a GPU), torch.bfloat16, or on a CPU torch.float32 (default there).
        pdl: whether kernels use programmatic dependent launch and stages of few rows the forms
            built for it (compute capability 9.0, V1 and V2 in half precision); None decides by
            batch, and for many rows launches LayerNorm and the Hopper product behind it so.

    Raises:
        QuantizationError: a quantised precision without ranges of these weights for every layer;
            the message names the layers.
        ValueError, TypeError: an argument is off; the message names it and the legal values.
    """

    def __init__(
        self,
        source: str | os.PathLike | torch.nn.Module,
        precision: Literal[
            "fp32", "tf32", "fp16", "bf16", "int8", "int8_mode1", "int8_mode2", "fp8"
        ] = "fp16",
        *,
        device: str | torch.device | None = None,
        pretrained: bool = True,
        config: SwinConfig | None = None,
        cuda_graphs: bool = True,
        graph_batch_sizes: tuple[int, ...] = GRAPH_BATCH_SIZES,
        max_graphs: int = 16,
        impl: Impl = "auto",
        tuning: str | os.PathLike = "auto",
        backend: Backend = "auto",
        calibration: Calibration | None = None,
        mix: Mix = "auto",
        wide_dtype: torch.dtype | None = None,
        pdl: bool | None = None,
    ) -> None:
        if not graph_batch_sizes or min(graph_batch_sizes) < 1:
            raise ValueError(f"graph_batch_sizes must be positive, got {graph_batch_sizes}")
        if max_graphs < 1:
            raise ValueError(f"max_graphs must be at least 1, got {max_graphs}")
        self.device = resolve_device(device)
        self._precision = find_precision(precision, self.device, wide_dtype)
        if mix not in MIXES:
            raise ValueError(f"mix must be one of {MIXES}, got {mix!r}")
        if calibration is not None and not self._precision.quantized:
            raise ValueError(
                f"calibration is for quantised precisions {sorted(QUANTIZED)}, got precision "
                f"{precision!r}"
            )
        self._backends = BackendSelector(backend, self.device, self._precision, impl)
        blockers = [why_not_triton(self.device, self._precision.dtype)]
        if choose_impl(impl, "Engine", blockers) == "triton" and self.device.type == "cuda":
            begin_hashing_compiler()  # the interpreter needs no key
        self._table, self._tuning = find_device_table(tuning, self.device)
        if self._table is not None and self._precision.quantized:
            self._table, self._tuning = None, "off: tables were measured without 8-bit layers"
        self._load, self._description = make_loader(source, pretrained=pretrained, config=config)
        self._source, self._calibration, self._mix = source, calibration, mix
        self._ranges: Calibration | None = None
        self._runner: GraphRunner | None = None
        self._lock = threading.RLock()
        self._plans = Plans(self.device, impl, self._table, pdl, mix)
        self._graphs: GraphLadder | None = None
        if cuda_graphs and self.device.type == "cuda":
            self._graphs = GraphLadder(
                self._run,
                device=self.device,
                dtype=self._precision.dtype,
                batch_sizes=tuple(graph_batch_sizes),
                max_graphs=max_graphs,
            )
        self.refresh()

    @property
    def precision(self) -> str:
        """Name of the precision."""
        return self._precision.name

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the outputs."""
        return self._precision.dtype

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Engine cannot be copied or pickled (it holds a lock and captured graphs); "
            "build another one from the source"
        )

    def refresh(self) -> None:
        """Take the source's present weights; captured graphs and plans are dropped.

        CUDA graphs of your own that captured calls of this engine must be captured again.
        """
        with self._lock:
            model = self._load()
            self._runner = None
            if self._backends.graph:
                self._take(model, PRECISIONS["fp32"])  # what a runtime is given, and checked with
                with torch.no_grad(), self.own_numerics():
                    self._runner = open_runner(
                        self._backends, self._source, model, self._forward, self._eager,
                        self._calibration,
                    )  # fmt: skip
            if self._runner is None:
                self._take(model, self._precision)

    def _take(self, model: SwinTransformer, precision: Precision) -> None:
        self._forward, self._ranges = build_forward(
            model, self._source, self._calibration, precision, self.device
        )
        self.config: SwinConfig = model.config
        self._plans.take(self._forward, self._ranges)
        if self._graphs is not None:
            self._graphs.clear()

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of a batch.

        Args:
            images: ``[B, channels, h, w]``, float, normalised as the weights expect, on the
                engine's device; any B (also 0), any size of at least a patch, any strides.

        Returns:
            ``[B, num_classes]`` in the engine's dtype (pooled features without a head); a new
            tensor that stays valid.

        Raises:
            ValueError, TypeError: ``images`` does not fit; the message says what would.
        """
        return self._dispatch("logits", images)[0]

    def features(
        self, images: torch.Tensor, layout: Literal["NCHW", "NHWC"] = "NCHW"
    ) -> list[torch.Tensor]:
        """Feature pyramid: the output of every stage, before merging and without a final norm.

        Args:
            images: as in a call.
            layout: "NCHW" ``[B, C_i, H_i, W_i]`` (a channels-last view) or "NHWC".

        Raises:
            ValueError, TypeError: as in a call, or an unknown layout.
        """
        if layout not in ("NCHW", "NHWC"):
            raise ValueError(f"layout must be 'NCHW' or 'NHWC', got {layout!r}")
        maps = self._dispatch("features", images)
        return [m.permute(0, 3, 1, 2) if layout == "NCHW" else m for m in maps]

    def report(self, batch: int = 1, image_size: tuple[int, int] | None = None) -> EngineReport:
        """Which implementation each layer takes at a batch and image size, and why."""
        with self._lock:
            size = image_size or self.config.image_size
            bound, graphs = self._plans.bound(batch, size), self._graphs
            return EngineReport(
                source=self._description,
                device=device_name(self.device),
                precision=self.precision,
                weights_mib=self._forward.weights.num_bytes / 2**20,
                plan=bound.plan,
                graphs=() if graphs is None else tuple(graphs.keys()),
                tuning=self._tuning
                + tuned_gain(self._table, self.config, batch, size, self.precision),
                backend=self._backends.choice,
                programs=() if self._runner is None else self._runner.programs,
                scheme=self._scheme_line(),
                copies=() if graphs is None else graphs.copies(),
            )

    def _scheme_line(self) -> str:
        if self._ranges is None:
            return ""
        found = self._ranges
        return f"{found.scheme.name}, calibrated on {found.images} images, mix {self._mix!r}"

    def warmup(
        self, batches: Sequence[int] = (1,), image_size: tuple[int, int] | None = None
    ) -> int:
        """Compile the kernels that batches of these sizes launch, all side by side.

        A later process on a machine like this one finds them in Triton's cache on disk
        (``TRITON_CACHE_DIR``, else ``~/.triton/cache``). Graphs are not captured.

        Args:
            batches: images per call; with CUDA graphs they are rounded up to the ladder.
            image_size: ``(height, width)`` in pixels; None means the model's.

        Returns:
            How many distinct launches were made; 0 where no kernel runs, as on a CPU.

        Raises:
            ValueError: a batch below 1, or an image size that the model cannot take.
        """
        if not batches or min(batches) < 1:
            raise ValueError(f"batches must be positive, got {tuple(batches)}")
        size = image_size or self.config.image_size
        calls: list[Call] = []
        with self._lock, torch.no_grad(), self.own_numerics():
            for batch in sorted({self._rung(batch) for batch in batches}):
                images = torch.empty(
                    batch, self.config.in_channels, *size, device=self.device, dtype=self.dtype
                )
                self._check(images)
                bound = self._plans.bound(batch, size)
                calls += self._plans.new_calls(images, bound)
            compile_calls(calls, self.device)
        return len(calls)

    def calls(self, images: torch.Tensor) -> list[Call]:
        """The calls of one forward pass, run once without graphs: what a profiler times.

        Args:
            images: as in a call, at least one.

        Raises:
            ValueError, TypeError: as in a call, or a batch of 0.
        """
        self._check(images)
        if images.shape[0] == 0:
            raise ValueError("images must hold at least one image, got batch 0")
        with self._lock, torch.no_grad(), self.own_numerics():
            bound = self._plans.bound(images.shape[0], (images.shape[2], images.shape[3]))
            return record_calls(self._forward, bound, images)

    def _rung(self, batch: int) -> int:
        """The batch size that runs for ``batch`` images."""
        if self._graphs is None:
            return batch
        sizes = self._graphs.batch_sizes
        return next((size for size in sizes if size >= batch), sizes[-1])

    def check_finite(self, images: torch.Tensor) -> list[BlockRange]:
        """Largest magnitude after every block, to find where a half-precision model overflows.

        Raises:
            FloatingPointError: a value is not finite; the message names stage and block, and the
                precision to use instead.
            ValueError, TypeError: as in a call, or a batch of 0.
        """
        self._check(images)
        with self._lock, torch.no_grad(), self.own_numerics():
            bound = self._plans.bound(images.shape[0], (images.shape[2], images.shape[3]))
            return check_finite(self._forward, images, bound)

    def _dispatch(self, kind: str, images: torch.Tensor) -> list[torch.Tensor]:
        self._check(images)
        size = (images.shape[2], images.shape[3])
        with self._lock, torch.no_grad(), self.own_numerics():
            if self._runner is not None and images.shape[0]:
                return self._runner(kind, images)
            bound = self._plans.bound(images.shape[0], size)
            if images.shape[0] == 0:
                outputs = self._empty(kind, bound)
            elif self._use_graphs():
                assert self._graphs is not None
                outputs = self._graphs(kind, images)
            else:
                outputs, _ = self._run(kind, images)
        return outputs

    @contextlib.contextmanager
    def own_numerics(self) -> Iterator[None]:
        """The engine's precision, whatever the caller's autocast and TF32 switches say."""
        with (
            torch.autocast(self.device.type, enabled=False),
            matmul_mode(self._precision, self.device),
        ):
            yield

    def _use_graphs(self) -> bool:
        return self._graphs is not None and not torch.cuda.is_current_stream_capturing()

    def _run(self, kind: str, images: torch.Tensor) -> tuple[list[torch.Tensor], object]:
        """Outputs, and the tensors they were computed from."""
        bound = self._plans.bound(images.shape[0], (images.shape[2], images.shape[3]))
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._plans.compile(images, bound)
        if kind == "features":
            return self._forward.features(images, bound), (self._forward, bound)
        return [self._forward.logits(images, bound)], (self._forward, bound)

    def _eager(self, kind: str, images: torch.Tensor) -> list[torch.Tensor]:
        return self._run(kind, images)[0]

    def _empty(self, kind: str, bound: BoundPlan) -> list[torch.Tensor]:
        shapes: list[tuple[int, ...]] = [(0, self.config.num_classes or self.config.num_features)]
        if kind == "features":
            shapes = [(0, *stage.map_size, stage.channels) for stage in bound.plan.stages]
        return [torch.empty(shape, device=self.device, dtype=self.dtype) for shape in shapes]

    def _check(self, images: torch.Tensor) -> None:
        if not isinstance(images, torch.Tensor):
            raise TypeError(f"images must be a torch.Tensor, got {type(images).__name__}")
        check_images(images, self.config)
        if images.device != self.device:
            raise ValueError(
                f"images are on {images.device} but the engine is on {self.device}; "
                f"use images.to({str(self.device)!r})"
            )
