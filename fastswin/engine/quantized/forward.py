"""The forward pass of a quantised engine: engine/forward.py's story with 8-bit layers told here.

    norm + quantise -> qkv -> q, k, v in 8 bits -> attention -> proj onto x, wide
    norm + quantise -> fc1, GELU, 8 bits -> fc2 onto x, wide        or all of this in one kernel

The residual stream, softmax, LayerNorm, GELU, patch embedding and head are those of the wide
engine. So is every layer that its plan leaves wide; the two meet in the tensors between them, and
whoever writes a tensor writes it in the format of its reader.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from fastswin._triton.available import Impl
from fastswin._triton.tiles import cdiv
from fastswin.engine.bind import BlockOffsets, Left, Offset, RowStats, Unjoined
from fastswin.engine.forward import Forward
from fastswin.engine.precision import FORMAT_DTYPES
from fastswin.engine.prepared import Linear, Norm, PreparedBlock
from fastswin.engine.quantized.formats import BlockFormats, LayerFormat
from fastswin.engine.quantized.prepare import LayerForms, OrderedAffine, Steps
from fastswin.engine.stage_plan import StagePlan


class QuantizedForward(Forward):
    """Runs a bound plan whose stages have formats."""

    def attention_half(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        left: Left = None,
    ) -> RowStats | None:
        """``x += attn(norm1(x))`` (V1) or ``x += norm1(attn(x))`` (V2), in place."""
        if stage.attention == "fused":
            return super().attention_half(x, block, stage, offsets, left)
        formats = _formats(stage, block)
        if formats.qkv.quantized:
            h, token_scale = self.attention_input(x, block, stage, offsets.norm1, left)
            stored = formats.attention != "wide"
            qkv = self.product(
                h, block.qkv, formats.qkv, token_scale, quantize_output=stored, pdl=stage.pdl
            )
        else:
            qkv = self.project_qkv(x, block, stage, offsets, left)
        attended = self.quantized_attention(qkv, block, stage)
        if formats.proj.quantized:
            self.add_product(x, attended, block.proj, formats.proj, block.norm1, stage.pdl)
            return None
        return self.project_back(x, attended, block, stage)

    def attention_input(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offset: Offset,
        left: Left,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What an 8-bit qkv reads, and its steps where every token has its own.

        What the block before has left is added to the stream by the LayerNorm that rounds, or,
        where another kernel rounds, by one of its own.
        """
        layer = _formats(stage, block).qkv
        scale = _steps(block.qkv).input_scale
        joins = scale is not None and block.norm1 is None and offset is None
        if joins and isinstance(left, Unjoined):
            h = self.ops.add_split_k(
                left.partials, x, left.bias, norm="pre", eps=self.eps, output_scale=scale,
                out_dtype=FORMAT_DTYPES[layer.format], impl="triton", pdl=stage.pdl,
            )  # fmt: skip
            return h, None
        self.join(x, left, stage)
        eps = self.eps if block.norm1 is None else None
        return self.quantized_input(x, block.qkv, layer, offset, eps, stage.pdl)

    def quantized_attention(
        self, qkv: torch.Tensor, block: PreparedBlock, stage: StagePlan
    ) -> torch.Tensor:
        """Window attention from what qkv wrote to what proj reads."""
        formats = _formats(stage, block)
        if formats.attention == "wide" and not formats.proj.quantized:
            return self.attention(qkv, block, stage)
        pad, qkv_scale = block.pad_qkv, None
        if formats.attention != "wide":
            steps = _steps(block.qkv)
            pad, qkv_scale = steps.pad_output, steps.output_scale
        output_scale, out_dtype = None, self.precision.dtype
        if formats.proj.quantized:
            output_scale = _steps(block.proj).input_scale
            out_dtype = FORMAT_DTYPES[formats.proj.format]
        output = {"qkv_scale": qkv_scale, "output_scale": output_scale, "out_dtype": out_dtype}
        shift = stage.shift_size if block.shifted else (0, 0)
        if stage.attention == "triton":
            table = block.attention_table(shift, self.precision.dtype, stage.compact_bias)
            return self.ops.packed_window_attention(
                qkv, table, block.head_scale, pad, block.scale, stage.num_heads,
                stage.window_size, shift, self.precision.tf32, **output, pdl=stage.pdl,
            )  # fmt: skip
        return self.ops.quantized_window_attention_ref(
            qkv, block.bias, stage.num_heads, stage.window_size, shift, block.scale,
            block.logit_scale, pad, **output,
        )  # fmt: skip

    def mlp_half(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        stats: RowStats | None = None,
    ) -> Left:
        """``x += mlp(norm2(x))`` (V1) or ``x += norm2(mlp(x))`` (V2), in place."""
        formats = _formats(stage, block)
        fc1, fc2 = formats.fc1, formats.fc2
        if not fc1.quantized and not fc2.quantized:
            return super().mlp_half(x, block, stage, offsets, stats)
        if formats.mlp == "fused":
            self.fused_mlp(x, block, offsets.norm2)
            return None
        reader = _steps(block.fc2) if fc2.quantized else None
        stored = reader if fc1.format == fc2.format else None  # fc1's epilogue writes fc2's input
        if fc1.quantized:
            eps = self.eps if block.norm2 is None else None
            h, token_scale = self.quantized_input(x, block.fc1, fc1, offsets.norm2, eps, stage.pdl)
            h = self.product(
                h, block.fc1, fc1, token_scale, reader=stored, activation="gelu", pdl=stage.pdl
            )
        else:
            h = self.hidden(x, block, stage, offsets, stats)
        if reader is not None and stored is None:
            h = self.ops.quantize(
                h, reader.input_scale, FORMAT_DTYPES[fc2.format], impl=_impl(fc2), pdl=stage.pdl
            )
        if fc2.quantized and stage.mlp == "split-k" and self.is_cut(block, fc2):
            forms = cast(LayerForms, block.fc2)
            partials = self.ops.split_k_linear(
                h, forms.packed, scale=forms.steps.scale, impl="triton",
                config=stage.launch.get("fc2"), pdl=stage.pdl,
            )  # fmt: skip
            return Unjoined(partials, forms.steps.bias)
        if fc2.quantized:
            self.add_product(x, h, block.fc2, fc2, block.norm2, stage.pdl)
        else:
            self.shrink(x, h, block, formats.endings(stage.proj, stage.mlp)[1], pdl=stage.pdl)
        return None

    def is_cut(self, block: PreparedBlock, layer: LayerFormat) -> bool:
        """Whether fc2 of few rows may be cut along K: V1, its result wide."""
        wide = _steps(block.fc2).output_scale is None
        return block.norm2 is None and layer.backend == "triton" and wide

    def fused_mlp(self, x: torch.Tensor, block: PreparedBlock, offset: Offset) -> None:
        """``x += offset + mlp(norm2(x + offset))`` in one 8-bit kernel, in place."""
        fc1, fc2 = cast(LayerForms, block.fc1), cast(LayerForms, block.fc2)
        self.ops.quantized_mlp(
            x, fc1.ordered.weight, fc1.ordered.scale, fc1.ordered.bias, fc2.packed,
            fc2.steps.scale, fc2.steps.bias, input_scale=fc1.steps.input_scale,
            hidden_scale=fc2.steps.input_scale, offset=offset, eps=self.eps, out=x, ordered=True,
            impl="triton",
        )  # fmt: skip

    def merge(
        self, x: torch.Tensor, index: int, stage: StagePlan, offset: Offset
    ) -> tuple[torch.Tensor, Left]:
        """Patch merging ``[B, H, W, C] -> [B, ceil(H/2), ceil(W/2), 2C]``."""
        assert stage.formats is not None
        layer = stage.formats.reduction
        if layer is None or not layer.quantized:
            return super().merge(x, index, stage, offset)
        merging = self.weights.mergings[index]
        impl, scale = _impl(layer), _steps(merging.reduction).input_scale
        eps = self.resample_eps if merging.norm is None else None
        token_scale: torch.Tensor | None
        if scale is None:  # one step a token needs the whole row first
            rows = self.ops.gather_neighbours(x, offset=offset, impl=impl, pdl=stage.pdl)
            rows, token_scale = self.quantized_tokens(rows, layer, None, eps, stage.pdl)
        else:
            token_scale = None
            if layer.format == "int8":
                # int8 stores NaN as a number and nothing but this product crosses a merging:
                # without marks a stream that overflowed would end in finite logits
                B, H, W, _ = x.shape
                token_scale = x.new_empty(B, cdiv(H, 2), cdiv(W, 2), dtype=torch.float32)
            rows = self.ops.gather_neighbours(
                x, layer_norm_eps=eps, offset=offset, output_scale=scale,
                out_dtype=FORMAT_DTYPES[layer.format], marks=token_scale, impl=impl, pdl=stage.pdl,
            )  # fmt: skip
        y = self.branch(rows, merging.reduction, layer, token_scale, stage.pdl)
        if token_scale is not None and _steps(merging.reduction).output_scale is not None:
            y.add_(token_scale[..., None] * 0.0)  # 8-bit storage lost the mark again
        if merging.norm is not None:
            norm = merging.norm
            self.ops.layer_norm(
                y, norm.weight, norm.bias, eps=self.resample_eps, out=y, impl=impl, pdl=stage.pdl
            )
        return y, None

    def quantized_input(
        self,
        x: torch.Tensor,
        linear: Linear,
        layer: LayerFormat,
        offset: Offset,
        eps: float | None,
        pdl: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a layer reads, and its steps ``[...]`` where every token has its own.

        Args:
            x: the residual stream ``[B, H, W, C]``.
            linear: the layer.
            layer: how it runs.
            offset: biases pending on the stream.
            eps: of the LayerNorm in front (V1), None where there is none.
            pdl: programmatic dependent launch.
        """
        scale, dtype, impl = (
            _steps(linear).input_scale,
            FORMAT_DTYPES[layer.format],
            _impl(layer),
        )
        if scale is None:
            return self.quantized_tokens(x, layer, offset, eps, pdl)
        if eps is None:
            return self.ops.quantize(x, scale, dtype, impl=impl, pdl=pdl), None
        return self.ops.layer_norm(
            x, eps=eps, offset=offset, output_scale=scale, out_dtype=dtype, impl=impl, pdl=pdl
        ), None

    def quantized_tokens(
        self, x: torch.Tensor, layer: LayerFormat, offset: Offset, eps: float | None, pdl: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows in 8 bits, normalised first unless ``eps`` is None, and the steps of each."""
        dtype, impl = FORMAT_DTYPES[layer.format], _impl(layer)
        if eps is None:
            return self.ops.quantize_per_token(x, dtype, impl=impl, pdl=pdl)
        return self.ops.layer_norm_per_token(
            x, eps=eps, offset=offset, dtype=dtype, impl=impl, pdl=pdl
        )

    def product(
        self,
        h: torch.Tensor,
        linear: Linear,
        layer: LayerFormat,
        token_scale: torch.Tensor | None = None,
        *,
        quantize_output: bool = False,
        reader: Steps | None = None,
        pdl: bool = False,
        **epilogue: Any,
    ) -> torch.Tensor:
        """One 8-bit product ``[..., K] -> [..., N]``, bias included.

        Args:
            h: 8-bit input.
            linear: the layer.
            layer: how it runs.
            token_scale: the input's steps ``[...]`` where every token has its own.
            quantize_output: whether it is stored with the layer's own output steps.
            reader: or with the input's step of the layer that reads it.
            pdl: programmatic dependent launch, which the library's products have not.
            epilogue: ``activation``, ``residual`` and ``out`` of the operator.
        """
        forms = cast(LayerForms, linear)
        steps = forms.steps
        if layer.backend == "cublaslt":
            operands = forms.library
            inverse = operands.output_inverse if quantize_output else None
            inverse = reader.input_inverse if reader is not None else inverse
            return self.ops.library_linear(
                h, operands.weight, operands.bias, scale=operands.scale, output_inverse=inverse,
                out_dtype=self.precision.dtype if inverse is None else h.dtype, impl="library",
                **epilogue,
            )  # fmt: skip
        scale = steps.output_scale if quantize_output else None
        scale = reader.input_scale if reader is not None else scale
        ordered = forms.is_ordered(layer, scale is not None)
        own = forms.ordered if ordered else OrderedAffine(forms.packed, steps.scale, steps.bias)
        return self.ops.quantized_linear(
            h, own.weight, own.scale, own.bias, row_scale=token_scale, output_scale=scale,
            out_dtype=None if scale is not None else self.precision.dtype, ordered=ordered,
            impl=_impl(layer), pdl=pdl, **epilogue,
        )  # fmt: skip

    def branch(
        self,
        h: torch.Tensor,
        linear: Linear,
        layer: LayerFormat,
        token_scale: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> torch.Tensor:
        """A product in the wide dtype, through 8 bits where the scheme stores it so."""
        steps = _steps(linear)
        if steps.output_scale is None:
            return self.product(h, linear, layer, token_scale, pdl=pdl)
        stored = self.product(h, linear, layer, token_scale, quantize_output=True, pdl=pdl)
        return stored.to(self.precision.dtype).mul_(steps.output_step)

    def add_product(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        linear: Linear,
        layer: LayerFormat,
        norm: Norm | None,
        pdl: bool,
    ) -> None:
        """``x += product(h)`` (V1) or ``x += norm(product(h))`` (V2), in place."""
        steps = _steps(linear)
        if norm is not None:
            self.add_normed(x, self.branch(h, linear, layer, pdl=pdl), norm, _impl(layer), pdl)
        elif steps.output_scale is None:
            self.product(h, linear, layer, pdl=pdl, residual=x, out=x)
        else:
            stored = self.product(h, linear, layer, quantize_output=True, pdl=pdl)
            x.add_(stored.to(x.dtype), alpha=steps.output_step)


def _formats(stage: StagePlan, block: PreparedBlock) -> BlockFormats:
    assert stage.formats is not None  # every plan of a quantised engine has them
    return stage.formats.blocks[block.number]


def _steps(linear: Linear) -> Steps:
    """Steps of a layer that a plan quantises."""
    return cast(LayerForms, linear).steps


def _impl(layer: LayerFormat) -> Impl:
    return "reference" if layer.backend == "reference" else "triton"
