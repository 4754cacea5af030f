"""Where 8 bits bring no speed on this card, so that a layer stays wide although its scheme allows.

    gain = time of the wide form - time of (normalise and quantise, 8-bit GEMM, epilogue)

A scheme says what may be quantised; the mix "auto" takes from that what is slower than half
precision at the batch at hand. Its answers are therefore those of the scheme or closer to fp32,
and may differ between batches by what the layers in question lose; "scheme" quantises all that the
scheme does, at every batch alike.

Thresholds: H100, batches 1 and 32 of Swin-T and L, one GEMM at a time with its epilogue and whole
blocks in one graph; proj and merging: half blocks of Swin-L and B on an H200. Stage 1 of Swin-T,
100,352 rows of 96 channels: the fused fp16 MLP takes 57 us,
two int8 GEMMs with their LayerNorm 75; LayerNorm, qkv and attention 73 us against 63, since q, k
and v are written and read in half the bytes. proj takes about as long in 8 bits as in the library,
which accumulates onto the stream in place; what attention then writes in 8 bits decides.

`python -m fastswin.bench.quant_halves` measures every choice that is made here.
"""

from __future__ import annotations

from typing import Literal

Mix = Literal["auto", "scheme"]
MIXES: tuple[str, ...] = ("auto", "scheme")

NEVER = 1 << 62

#: Fewest rows from which an 8-bit qkv pays, by the widest stage that the number is for.
QKV_ROWS = {128: 50_000, 192: 6_000, 384: 1_000}

#: The same for both products of the MLP in kernels of their own; up to 128 channels one fused
#: kernel in half precision is faster at any number of rows.
MLP_ROWS = {128: NEVER, 192: 12_000, 384: 1_000}

#: The same for both in one 8-bit kernel, which takes precedence. Prototypes, us: 96 channels int8
#: 56.7, fp8 53.4, fp16 fused 54.0; 128 channels 73.4, 77.8, 81.5; 192 channels and 25,088 rows
#: 38.3, 37.3, 44.9 (two 8-bit kernels and their LayerNorm: 44.5), 100,352 rows 128, 121, 188 (168).
FUSED_MLP_ROWS = {
    "int8": {96: NEVER, 128: 50_000, 192: 12_000},
    "fp8": {96: NEVER, 128: 50_000, 192: 12_000},
}

#: Widest stage whose proj is as fast in half precision; the library's fp8 product of 768 channels
#: takes 10.0 us where fp16 in place takes 13.6, of 384 and 512 5.3 and 7.0 against 6.2 and 7.9.
WIDE_PROJ_CHANNELS = {"int8": 768, "fp8": 256}

#: Narrow stages whose proj pays in 8 bits nevertheless: fewest rows by exact channels. int8, us a
#: half block without and with it: 143 and 138 at 192 channels, 82.9 and 80.9 at 384, 61.1 and 57.6
#: at 768, 36.4 and 36.3 at 512.
NARROW_PROJ_ROWS = {
    "int8": {192: 50_000, 384: 20_000, 768: 1_000},
    "fp8": {128: 50_000, 192: 50_000},
}

#: Fewest rows from which an 8-bit patch merging pays. Swin-L at batch 32, us: 46.8, 34.6 and 26.7
#: in half precision, 39.1, 27.7 and 23.5 in int8, 36.0, 22.3 and 16.9 in fp8.
REDUCTION_ROWS = 6_000

#: Widest stage of few rows that stays wide. 8 bits read half the weights, 0.4 to 0.9 us a product
#: at 384 channels, 1 to 2 at 768; up to 512 half precision has fewer launches (attention half by
#: heads, LayerNorm behind fc1's product). With stages of 384 and 512 in 8 bits Swin-S took 0.486
#: ms at batch 1 in int8 and 0.478 in fp8 where fp16 takes 0.471, Swin-B 0.527 and 0.521 against
#: 0.521; Swin-L, whose weights are in stages of 768 and 1,536, 0.691 against 0.882 (H200).
SMALL_STAGE_CHANNELS = 512

#: Widest stage of few rows whose proj stays wide, and with it attention's output; in V2 every
#: layer, since nothing stands before qkv and fc1 that could quantise their input.
SMALL_PROJ_CHANNELS = 768


def why_wide(
    layer: str,
    format: str,
    rows: int,
    channels: int,
    *,
    small: bool = False,
    post_norm: bool = False,
) -> str | None:
    """None where 8 bits pay for a layer, else why it stays wide.

    Args:
        layer: "qkv", "proj", "fc1", "fc2" or "reduction".
        format: "int8" or "fp8".
        rows: tokens of the batch in this stage.
        channels: of this stage.
        small: whether the stage has the small-batch forms in half precision.
        post_norm: whether the model normalises after its products (V2).
    """
    if layer == "reduction":
        if rows >= REDUCTION_ROWS and not small and not post_norm:
            return None
        return f"wide: 8 bits bring no speed at {rows} rows of {channels} channels"
    if small:
        late = layer == "proj" or post_norm
        widest = SMALL_PROJ_CHANNELS if late else SMALL_STAGE_CHANNELS
        if channels > widest:
            return None
        return f"wide: {rows} rows of {channels} channels are bound by launches, not by weights"
    if layer == "proj":
        if channels > WIDE_PROJ_CHANNELS[format]:
            return None
        if rows >= NARROW_PROJ_ROWS[format].get(channels, NEVER):
            return None
        return f"wide: the library is as fast in half precision at {channels} channels"
    limits = QKV_ROWS if layer == "qkv" else MLP_ROWS
    if rows >= _needed(limits, channels, 0):
        return None
    return f"wide: 8 bits bring no speed at {rows} rows of {channels} channels"


def why_not_fused(format: str, rows: int, channels: int) -> str | None:
    """None where one 8-bit kernel for the whole MLP is fastest, else why not.

    Args:
        format: "int8" or "fp8".
        rows: tokens of the batch in this stage.
        channels: of this stage.
    """
    if rows >= _needed(FUSED_MLP_ROWS[format], channels, NEVER):
        return None
    return f"one 8-bit kernel is slower at {rows} rows of {channels} channels"


def _needed(limits: dict[int, int], channels: int, beyond: int) -> int:
    """The number for the narrowest entry that holds ``channels``, ``beyond`` past the widest."""
    return next((fewest for widest, fewest in limits.items() if channels <= widest), beyond)
