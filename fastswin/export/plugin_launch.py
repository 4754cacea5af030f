"""Which kernel a plugin layer runs, with which constants and how many programs; no TensorRT here.

A layer is described by numbers known when the engine is built. Tiles are chosen as the PyTorch
operator chooses them (``default_config``), for the batch the engine is optimised for; the number of
programs is an expression of the batch and map that may be symbolic.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from fastswin.export.ptx import Ptx, compile_ptx
from fastswin.ops.layer_norm import config as layer_norm_config
from fastswin.ops.window_attention.config import (
    WindowAttentionConfig,
    default_config,
    num_programs,
    padded_tokens,
    tile_constants,
)
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.ops.window_attention.launch import (
    AttentionShape,
    output_strides,
    products_form,
    qkv_strides,
)

Pair = tuple[int, int]

#: Bytes of an element by Triton's name of its type.
ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}

#: Shared memory that any launcher may ask for; more needs cuFuncSetAttribute first, which nothing
#: promises that TensorRT calls for a plugin (CUDA C++ programming guide, table of specifications).
PLAIN_SHARED_BYTES = 48 * 1024

#: Multiprocessors of a common card of each generation, where the card itself is not asked:
#: T4, A100, RTX 3090, L4, H100, B200, RTX 5090.
MULTIPROCESSORS = {75: 40, 80: 108, 86: 82, 89: 58, 90: 132, 100: 148, 120: 170}


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """One window attention.

    Attributes:
        dtype, bias_dtype: "fp32", "fp16" or "bf16", of qkv and of the packed bias.
        batch, map_size: what the tiles are chosen for, ``B`` and ``(H, W)`` in tokens.
        largest_map: the largest ``(H, W)`` that the layer will see.
        fixed_map: whether ``map_size`` is the only one; else any map is taken as one with padding.
        num_heads, head_dim: ``nH`` and ``D``.
        window_size, shift_size: in tokens.
        cosine: V2's attention.
        capability: of the PTX, 86 for 8.6.
        multiprocessors: of the card; 0 takes a common one's.
    """

    dtype: str
    bias_dtype: str
    batch: int
    map_size: Pair
    largest_map: Pair
    fixed_map: bool
    num_heads: int
    head_dim: int
    window_size: Pair
    shift_size: Pair
    cosine: bool
    capability: int
    multiprocessors: int = 0

    @property
    def tokens(self) -> int:
        return self.window_size[0] * self.window_size[1]

    def default_config(self) -> WindowAttentionConfig:
        """Tiles that the operator would choose on this card, one program for a window and head."""
        rows, cols = self.windows(*self.map_size)
        chosen = default_config(
            self.batch * rows * cols, self.tokens, self.num_heads, self.head_dim,
            ITEMSIZE[self.dtype], self.multiprocessors or common_multiprocessors(self.capability),
            divmod(self.capability, 10), table_itemsize=ITEMSIZE[self.bias_dtype],
        )  # fmt: skip
        return dataclasses.replace(chosen, query_splits=1)

    def constants(self, config: WindowAttentionConfig) -> dict[str, Any]:
        """Compile-time constants, in the order of the kernel's parameters."""
        shape = AttentionShape(
            1, self.largest_map, self.windows(*self.largest_map), self.num_heads,
            self.head_dim, self.window_size, self.shift_size, partitioned=False,
        )  # fmt: skip
        table = torch.empty(padded_tokens(self.tokens), device="meta")
        strides = [*qkv_strides(shape), output_strides(shape)]
        constants = shape.constants(table, products_form(tf32=False), strides) | {
            "COSINE": self.cosine, "HAS_MASK": False, "HAS_STATS": False, "DROPOUT": False,
            "HAS_PAD": not self.fixed_map or shape.padding_slots > 0,
            "K1": 0, "K2": 0, "HEADS": 1, "BLOCK_K": 0, **tile_constants(config),
        }  # fmt: skip
        names = attention_adapter().arg_names[len(self.signature()) :]
        return {name: constants[name] for name in names}

    def signature(self) -> dict[str, str]:
        """Triton types of the parameters, in order."""
        return {
            "qkv_ptr": f"*{self.dtype}", "bias_ptr": f"*{self.bias_dtype}",
            "head_scale_ptr": "*fp32", "qkv_bias_ptr": "*fp32", "H": "i32", "W": "i32",
            "windows_per_col": "i32", "windows_per_row": "i32", "out_ptr": f"*{self.dtype}",
        }  # fmt: skip

    def windows(self, H: Any, W: Any) -> tuple[Any, Any]:
        """Windows per column and row of a map; numbers or symbolic expressions."""
        return num_windows((H, W), self.window_size)

    def programs(self, config: WindowAttentionConfig, B: Any, H: Any, W: Any) -> Any:
        """Programs for ``B`` maps of ``(H, W)`` tokens; numbers or symbolic expressions."""
        rows, cols = self.windows(H, W)
        return num_programs(B * rows * cols, self.tokens, self.num_heads, config)


def attention_adapter() -> Any:
    """The Triton function in TensorRT's argument order."""
    from fastswin.export import kernels

    return kernels.fastswin_window_attention


@functools.lru_cache(maxsize=256)
def compile_attention(layer: AttentionLayer) -> tuple[WindowAttentionConfig, Ptx]:
    """Tiles and PTX of a layer: the operator's, or the next smaller that need no opt-in.

    Raises:
        ImportError, RuntimeError: as :func:`fastswin.export.ptx.compile_ptx`.
    """
    chosen = layer.default_config()
    shallow = dataclasses.replace(chosen, heads_per_program=1, num_stages=2)
    online = dataclasses.replace(shallow, key_tiles=())
    last = dataclasses.replace(online, num_stages=1)
    for config in dict.fromkeys((chosen, shallow, online, last)):
        ptx = _compile_attention(layer, config)
        if ptx.shared_bytes <= PLAIN_SHARED_BYTES:
            return config, ptx
    raise RuntimeError(
        f"window_size {layer.window_size} with head_dim {layer.head_dim} in {layer.dtype} needs "
        f"{ptx.shared_bytes} bytes of shared memory, a plugin has {PLAIN_SHARED_BYTES}"
    )


def _compile_attention(layer: AttentionLayer, config: WindowAttentionConfig) -> Ptx:
    return compile_ptx(
        attention_adapter(), layer.signature(), layer.constants(config),
        capability=layer.capability, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LayerNormLayer:
    """One LayerNorm over the last axis.

    Attributes:
        dtype, weight_dtype: "fp32", "fp16" or "bf16", of the input and of weight and bias.
        channels: ``C``.
        capability: of the PTX, 86 for 8.6.
    """

    dtype: str
    weight_dtype: str
    channels: int
    capability: int

    @property
    def tiles(self) -> layer_norm_config.RowTiles:
        return layer_norm_config.row_tiles(self.channels)

    def signature(self) -> dict[str, str]:
        """Triton types of the parameters, in order."""
        return {
            "x_ptr": f"*{self.dtype}", "weight_ptr": f"*{self.weight_dtype}",
            "bias_ptr": f"*{self.weight_dtype}", "eps_ptr": "*fp32", "M": "i32",
            "out_ptr": f"*{self.dtype}",
        }  # fmt: skip

    def constants(self) -> dict[str, int]:
        """Compile-time constants, in the order of the kernel's parameters."""
        return {"C": self.channels, **self.tiles._asdict()}

    def programs(self, rows: Any) -> Any:
        """Programs for ``rows`` rows, a number or a symbolic expression."""
        return layer_norm_config.num_programs(rows, self.tiles)


@functools.lru_cache(maxsize=256)
def compile_layer_norm(layer: LayerNormLayer) -> Ptx:
    """PTX of a layer.

    Raises:
        ImportError, RuntimeError: as :func:`fastswin.export.ptx.compile_ptx`.
    """
    from fastswin.export import kernels

    return compile_ptx(
        kernels.fastswin_layer_norm, layer.signature(), layer.constants(),
        capability=layer.capability, num_warps=layer_norm_config.NUM_WARPS,
    )  # fmt: skip


def common_multiprocessors(capability: int) -> int:
    """Multiprocessors of a common card of a generation, the nearest older one where unknown."""
    known = [c for c in MULTIPROCESSORS if c <= capability]
    return MULTIPROCESSORS[max(known)] if known else MULTIPROCESSORS[75]
