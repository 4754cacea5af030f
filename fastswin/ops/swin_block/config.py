"""Which blocks the cluster kernel takes, and how much shared memory it needs (kernel.py)."""

from __future__ import annotations

from fastswin._triton.available import why_no_gluon

#: Channels of a head, all that the kernel knows: a program's share of the stream.
HEAD_DIM = 32

#: Heads, so programs of a cluster: more than 6 do not fit with the weights of a whole block.
MAX_HEADS = 6

#: Tokens of a window: in rows of a warp that are not a window's, nobody may be missing.
MIN_TOKENS, MAX_TOKENS = 49, 64


def live_threads(tokens: int) -> int:
    """Threads of a program's 128 that hold a row of a window of 49 to 64 tokens.

    Thread ``t`` of a warp holds rows ``16 warp + t // 4`` and eight further.
    """
    return 96 + 4 * min(tokens - 48, 8)


def tail_bytes(num_heads: int, tokens: int) -> int:
    """Of a program's shared memory what its cluster writes to: exchange.py's tail.

    128 bytes to spare and as many of barriers; of each program two lists of row statistics, and two
    pieces of rows or one of sums; 512 bytes behind, which threads without a row read.
    """
    return 768 + num_heads * (2 * 8 * 64 + 64 * live_threads(tokens))


def swin_block_blocker(
    C: int,
    num_heads: int,
    hidden: int,
    window_size: tuple[int, int],
    map_size: tuple[int, int],
) -> str | None:
    """Reason why the kernel does not take such a block, or is not there; None where it does.

    Args:
        C, num_heads: channels and heads.
        hidden: units of the MLP.
        window_size, map_size: in tokens.
    """
    tokens = window_size[0] * window_size[1]
    if num_heads * HEAD_DIM != C:
        return f"heads of {HEAD_DIM} channels are needed, not {num_heads} in {C}"
    if not 1 < num_heads <= MAX_HEADS:
        return f"{num_heads} heads: 2 to {MAX_HEADS} programs hold a block's weights"
    if hidden != 4 * C:
        return f"an MLP of {4 * C} units is needed, not {hidden}"
    if not MIN_TOKENS <= tokens <= MAX_TOKENS:
        return f"windows of {MIN_TOKENS} to {MAX_TOKENS} tokens are needed, not {tokens}"
    if any(side % window for side, window in zip(map_size, window_size, strict=True)):
        return f"a map of {map_size} is no multiple of a window of {window_size}"
    if map_size[0] * map_size[1] * C >= 2**31:
        return "tokens of one image are addressed in 32 bits"
    return gluon_blocker()


def gluon_blocker() -> str | None:
    """Reason why the installed Triton lacks Gluon for this kernel, None where it has it."""
    return why_no_gluon("fastswin.ops.swin_block.kernel")
