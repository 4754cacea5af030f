"""Where cuBLAS keeps its scratch memory while a CUDA graph is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def library_workspace_in_pool() -> Iterator[None]:
    """Let a capture allocate cuBLAS's workspace from the graph's own pool.

    The workspace of a stream is cached for the process and its address ends up in the graph. One
    that existed before the capture lies outside the pool and is freed by whoever clears the cache,
    torch.compile's reduce-overhead mode for one; the next replay then writes to freed memory (seen
    on an H100: illegal memory access at batch 64). Cleared before and after, the workspace is the
    pool's, which lives as long as the graph. torch._inductor.cudagraph_trees does the same.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
