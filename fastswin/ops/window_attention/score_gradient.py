"""dS of one tile, which the kernels of dq and of dbias share.

P = exp2(S - max) / sum     dS = P * (dO V^T - delta)     delta = rowsum(dO * O)
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin.ops.window_attention.tile import (
    dropout_weights,
    power_of_2,
    scores,
)


@triton.jit
def score_gradient(
    q, q_norm, k, k_norm, v, do, row_max, row_scale, delta, scale, seed, window, head,
    query, key, bias_ptr, mask_ptr, drop_threshold, keep_factor,
    NP: tl.constexpr, COSINE: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dS of one tile, queries x keys."""
    in_table = (query < NP)[:, None] & (key < NP)[None, :]
    s = scores(
        q, q_norm, k, k_norm, scale, bias_ptr, mask_ptr, query[:, None] * NP + key[None, :],
        in_table, COSINE, HAS_MASK, PRECISION,
    )  # fmt: skip
    exact: tl.constexpr = q.dtype == tl.float32 and PRECISION == "ieee"
    p = power_of_2(s - row_max[:, None], exact) * row_scale[:, None]
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        dp = dp * dropout_weights(
            seed, window, head, query[:, None], key[None, :], drop_threshold, keep_factor
        )
    return p * (dp - delta[:, None])
