"""``python -m fastswin.bench.op_cluster_linear``: products in clusters against other launches.

The four products of blocks of the named variants at batch 1: tiles that ``ops.linear`` takes
with a ``ClusterLinearConfig`` against the launches that do the same without it. All are compiled
side by side, checked (fp64 oracle, three runs bitwise, statistics), then timed in a CUDA graph of a
chain whose products have weights of their own and start with a cold L2. Lines go to
DIR/cluster_linear.txt, the fastest form of a shape first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from fastswin._triton.launch import compiling_only
from fastswin.bench.cold_graphs import make_flush
from fastswin.bench.compile_ahead import CompilePool
from fastswin.bench.failures import describe
from fastswin.bench.op_cluster_linear_problems import (
    LAYERS,
    STAGES,
    Form,
    Job,
    Product,
    Shape,
    copies,
    forms,
    told,
)
from fastswin.ops.cluster_linear.config import why_no_cluster_linear


def compile_form(job: Job) -> str | None:
    """Compile what a form launches on the GPU, in this process; None, or what went wrong."""
    torch.set_num_threads(1)
    shape, form = job
    try:
        with torch.no_grad():
            product = Product(shape, torch.device("cuda"), 1)
            product.reset(form)
            with compiling_only():
                product.run(form, 0)
    except Exception as error:
        return describe(error).message
    return None


def lines(
    shape: Shape, device: torch.device, pool: CompilePool[Job], left_s: Callable[[], float]
) -> Iterator[str]:
    """One shape as text: its forms checked, then timed, the fastest first; then wrong ones."""
    product, flush = Product(shape, device, copies(shape)), make_flush(device)
    times: dict[Form, float] = {}
    wrong = []
    for form in forms(shape):
        name = f"{shape}: {told(shape, form)}"
        failed = pool.error((shape, form), left_s())
        if left_s() <= 0:
            wrong.append(f"{name}: skipped with what follows, out of time")
            break
        if failed:
            wrong.append(f"{name}: FAILED {failed}")
            continue
        try:
            if why := product.check(form):
                wrong.append(f"{name}: WRONG {why}")
            else:
                times[form] = product.latency_us(form, flush)
        except RuntimeError as error:
            wrong.append(f"{name}: FAILED {describe(error).message}")
    best = min((us for form, us in times.items() if isinstance(form, str)), default=None)
    for form in sorted(times, key=lambda form: times[form]):
        ratio = "" if best is None else f", {best / times[form]:.2f}x"
        yield f"{shape}: {times[form]:.2f} us{ratio} {told(shape, form)}"
    yield from wrong


def run(
    device: torch.device,
    out: Path,
    shapes: Sequence[Shape],
    deadline_s: float,
    pool: CompilePool[Job],
    say: Callable[[str], None] = print,
) -> bool:
    """Every shape; writes its lines and says whether all forms were right.

    Args:
        device: a GPU.
        out: folder of ``cluster_linear.txt``.
        shapes: in the order in which they are compiled and timed.
        deadline_s: no new shape is begun after this.
        pool: compiles.
        say: prints one line.
    """
    end = time.monotonic() + deadline_s
    out.mkdir(parents=True, exist_ok=True)
    for shape in shapes:
        for form in forms(shape):
            pool.start((shape, form))
    right = True
    with (out / "cluster_linear.txt").open("w", encoding="utf-8") as log, torch.no_grad():
        for shape in shapes:
            found: Sequence[str] = [f"{shape}: skipped, out of time"]
            if time.monotonic() < end:
                try:
                    found = list(lines(shape, device, pool, lambda: end - time.monotonic()))
                except RuntimeError as error:
                    found = [f"{shape}: FAILED {describe(error).message}"]
            for line in found:
                right &= "WRONG" not in line and "FAILED" not in line
                say(line)
                log.write(line + "\n")
                log.flush()
    return right


def parse_stages(text: str) -> list[tuple[int, int]]:
    """``"784x192,49x768"`` as rows and channels.

    Raises:
        ValueError: something else; the message says what is legal.
    """
    found = []
    for word in filter(None, text.split(",")):
        parts = word.split("x")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts):
            raise ValueError(f"must be rows x channels such as 784x192,49x768, got {word!r}")
        rows, channels = map(int, parts)
        if rows < 1 or channels < 128 or channels % 64:
            raise ValueError(f"must be of rows and 128, 192, 256, ... channels, got {word!r}")
        found.append((rows, channels))
    if not found:
        raise ValueError(f"must be rows x channels such as 784x192,49x768, got {text!r}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0 all right, 1 something wrong, 2 cannot run."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.op_cluster_linear")
    parser.add_argument("--out", type=Path, default=Path("cluster_linear"), help="of the lines")
    parser.add_argument("--deadline-s", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    default = ",".join(f"{rows}x{channels}" for rows, channels in STAGES)
    parser.add_argument("--shapes", default=default, help="comma-separated rows x channels")
    parser.add_argument("--layers", default=",".join(LAYERS), help="comma-separated names")
    options = parser.parse_args(arguments)
    try:
        stages = parse_stages(options.shapes)
    except ValueError as error:
        parser.error(f"--shapes {error}")
    layers = [layer for layer in options.layers.split(",") if layer]
    if not layers or not set(layers) <= LAYERS.keys():
        parser.error(f"--layers must be some of {','.join(LAYERS)}, got {options.layers!r}")
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    if not torch.cuda.is_available():
        print("cannot run: there is no GPU")
        return 2
    device = torch.device("cuda")
    if blocker := why_no_cluster_linear(device, torch.float16):
        print(f"cannot run: {blocker}")
        return 2
    shapes = [Shape(layer, *stage) for stage in stages for layer in layers]
    pool: CompilePool[Job] = CompilePool(options.workers, compile_form)
    try:
        return 0 if run(device, options.out, shapes, options.deadline_s, pool) else 1
    finally:
        pool.close()


if __name__ == "__main__":
    raise SystemExit(main())
