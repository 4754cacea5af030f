"""Launch configurations of the attention backward, tried on the card: what the default should be.

Kernels are compiled first, by several processes on tensors without data, into Triton's cache; then
each configuration is timed on real data in one process.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fastswin.bench.failures import describe, release_memory
from fastswin.bench.op_window_attention_problems import PROBLEMS, AttentionProblem
from fastswin.bench.queued_calls import queued_ms
from fastswin.ops.window_attention.backward_config import (
    BackwardConfig,
    TileConfig,
    TiledBackwardConfig,
    WholeBackwardConfig,
    default_backward_config,
    exact_tail,
    takes_whole_windows,
)

#: Configurations printed of each problem.
BEST = 8

Job = tuple[AttentionProblem, BackwardConfig]


def configurations(problem: AttentionProblem) -> list[BackwardConfig]:
    """Candidates of one problem, the default first."""
    itemsize = problem.torch_dtype.itemsize
    default = default_backward_config(problem.tokens, 32, itemsize, plain=not problem.cosine)
    if takes_whole_windows(problem.tokens, 32, itemsize):
        found: Iterator[BackwardConfig] = itertools.chain(
            (
                WholeBackwardConfig(warps, stages, programs)
                for warps, stages, programs in itertools.product(
                    (4, 8), (1, 2, 3, 4), (132, 264, 396, 528)
                )
            ),
            (
                WholeBackwardConfig(4, stages, programs, by_kind=True, holds_bias=holds)
                for stages, programs, holds in itertools.product(
                    (2, 3, 4, 5), (264, 528), (True, False)
                )
            ),
        )
    else:
        found = _tiled(problem.tokens, default)
    return list(dict.fromkeys([default, *found]))


def _tiled(tokens: int, default: BackwardConfig) -> Iterator[BackwardConfig]:
    """One kernel varied at a time: the three do not interact."""
    assert isinstance(default, TiledBackwardConfig)
    whole = [16, 32, 64, 128]
    for resident, walked, warps, stages in itertools.product(whole, whole, (1, 2, 4), (1, 2)):
        values = resident * walked // (32 * warps)
        if not 8 <= values <= 64 or (stages == 2 and (warps < 4 or walked > 64)):
            continue
        tile = TileConfig(resident, walked, exact_tail(tokens, walked), warps, stages)
        yield TiledBackwardConfig(tile, default.dkv, default.dbias, default.programs)
        yield TiledBackwardConfig(default.dq, tile, default.dbias, default.programs)
        if resident >= 32 and walked >= 32:
            kept = TileConfig(resident, walked, 0, warps, stages)
            yield TiledBackwardConfig(default.dq, default.dkv, kept, default.programs)
    for programs in (528, 2112, 4224):
        yield TiledBackwardConfig(default.dq, default.dkv, default.dbias, programs)


def _call(
    problem: AttentionProblem, config: BackwardConfig, device: torch.device
) -> Callable[[], Any]:
    """One backward, gradients of qkv, bias and temperature, tables packed beforehand."""
    from fastswin.ops.window_attention.backward import window_attention_bwd
    from fastswin.ops.window_attention.backward_problem import Needs
    from fastswin.ops.window_attention.config import padded_tokens

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if device.type == "meta":
            return torch.empty(*shape, dtype=dtype, device=device)
        return torch.randn(*shape, device=device).to(dtype)

    B, side, C, N = problem.batch, problem.side, problem.channels, problem.tokens
    NP, windows = padded_tokens(N), B * (side // problem.window) ** 2
    qkv = empty(B, side, side, 3 * C, dtype=problem.torch_dtype)
    grad = empty(B, side, side, C, dtype=problem.torch_dtype)
    out = empty(B, side, side, C, dtype=problem.torch_dtype)
    # any row statistics take the same time
    row_stats = empty(windows, problem.heads, N, 2).abs() + 8.0
    table = empty(4, problem.heads, NP, NP)
    head_scale = empty(problem.heads).abs() if problem.cosine else None
    needs = Needs(True, True, True, True, logit_scale=problem.cosine, pad=False, qkv_sum=True)
    return lambda: window_attention_bwd(
        grad, qkv, out, row_stats, table, head_scale, None, 32**-0.5, problem.heads,
        (problem.window,) * 2, (problem.shift,) * 2, False, needs, config=config,
    )  # fmt: skip


def _compile(job: Job) -> str:
    """Compile one configuration's kernels into the cache; why it cannot be, or nothing."""
    from fastswin.testing.aot import record_launches

    try:
        with record_launches() as launches:
            _call(*job, torch.device("meta"))()
        for launch in launches:
            launch.kernel.warmup(grid=(1,), **launch.arguments, **launch.options)
    except Exception as error:
        return describe(error).message
    return ""


def sweep(device: torch.device, names: Sequence[str], workers: int, deadline_s: float) -> None:
    """Compile, time and print; problems that do not fit the deadline are named."""
    start = time.monotonic()
    problems = [p for p in PROBLEMS if not names or p.case in names]
    jobs = [(p, config) for p in problems for config in configurations(p)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        answers = list(pool.map(_compile, jobs, chunksize=2))
    failed = {job: why for job, why in zip(jobs, answers, strict=True) if why}
    for (problem, config), why in list(failed.items())[:8]:
        print(f"{problem.case} {config}: {why}")
    print(f"{len(jobs)} compiled, {len(failed)} not, {time.monotonic() - start:.0f} s", flush=True)
    for problem in problems:
        if time.monotonic() - start > deadline_s:
            print(f"{problem.case}: skipped, the deadline is over")
            continue
        rows = []
        for config in configurations(problem):
            if (problem, config) in failed:
                continue
            try:
                rows.append((queued_ms(_call(problem, config, device)), config))
            except Exception as error:
                print(f"{problem.case} {config}: {describe(error).message}")
        default = configurations(problem)[0]
        print(f"{problem.case} {problem.dtype} backward, {len(rows)} configurations")
        ordered = sorted(rows, key=lambda row: row[0])
        shown = ordered[:BEST] + [row for row in ordered[BEST:] if row[1] == default]
        for latency_ms, config in shown:
            mark = "default " if config == default else ""
            print(f"  {latency_ms:8.4f} ms  {mark}{config}", flush=True)
        release_memory()
