"""Where 8 bits bring no speed on this card, so that a layer stays wide although its scheme allows.

    gain = time of the wide form - time of (normalise and quantise, 8-bit GEMM, epilogue)

A scheme says what may be quantised; the mix "auto" takes from that what is slower than half
precision at the batch at hand. Its answers are therefore those of the scheme or closer to fp32,
and may differ between batches by what the layers in question lose; "scheme" quantises all that the
scheme does, at every batch alike.

Thresholds: H100, batches 1 and 32 of Swin-T and L, one GEMM at a time with its epilogue and whole
blocks in one graph. Stage 1 of Swin-T, 100,352 rows of 96 channels: the fused fp16 MLP takes 57 us,
two int8 GEMMs with their LayerNorm 75; LayerNorm, qkv and attention 73 us against 63, since q, k
and v are written and read in half the bytes. proj takes as long in 8 bits as in the library, which
accumulates onto the stream in place, up to 768 channels.
"""

from __future__ import annotations

from typing import Literal

Mix = Literal["auto", "scheme"]
MIXES: tuple[str, ...] = ("auto", "scheme")

#: Fewest rows from which an 8-bit qkv pays, by the widest stage that the number is for.
QKV_ROWS = {128: 50_000, 192: 6_000, 384: 1_000}

#: The same for both products of the MLP; up to 128 channels one fused kernel in half precision is
#: faster at any number of rows.
MLP_ROWS = {128: 1 << 62, 192: 12_000, 384: 1_000}

#: Widest stage whose proj is as fast in half precision; the library's fp8 product of 768 channels
#: takes 10.0 us where fp16 in place takes 13.6.
WIDE_PROJ_CHANNELS = {"int8": 768, "fp8": 512}

#: Widest stage of few rows that stays wide: its kernels hold their LayerNorm and are launched ahead
#: (engine/small_batch.py). Reading half the weights saves 2.4 us a block at 768 channels, two more
#: launches cost 4; at 1,536 channels it saves 9.
SMALL_STAGE_CHANNELS = 768


def why_wide(
    layer: str, format: str, rows: int, channels: int, *, small: bool = False
) -> str | None:
    """None where 8 bits pay for a layer, else why it stays wide.

    Args:
        layer: "qkv", "proj", "fc1", "fc2" or "reduction".
        format: "int8" or "fp8".
        rows: tokens of the batch in this stage.
        channels: of this stage.
        small: whether the stage has the small-batch forms in half precision.
    """
    if layer == "reduction":
        return "wide: 8 bits would save less than 1 % of a model, and cost most accuracy here"
    if small and channels <= SMALL_STAGE_CHANNELS:
        return f"wide: {rows} rows are bound by launches, of which 8 bits need more"
    if layer == "proj":
        if channels > WIDE_PROJ_CHANNELS[format]:
            return None
        return f"wide: the library is as fast in half precision at {channels} channels"
    limits = QKV_ROWS if layer == "qkv" else MLP_ROWS
    needed = next((fewest for widest, fewest in limits.items() if channels <= widest), 0)
    if rows >= needed:
        return None
    return f"wide: 8 bits bring no speed at {rows} rows of {channels} channels"
