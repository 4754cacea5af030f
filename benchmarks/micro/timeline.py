"""Where launches of a chain spend their time, by the card's own clock.

    PYTHONPATH=. python3 benchmarks/micro/timeline.py --rows 196 --channels 768

fc1 and fc2 of a stage, one behind the other with weights of their own, launched ahead in a CUDA
graph, as the product in clusters runs them (ops/cluster_linear). Into a copy of its source goes a
store of ``globaltimer`` at each of :data:`EVENTS`. Printed are microseconds behind the last end of
the kernel in front: of the earliest, the median and the latest program. What a trace shows as one
bar falls apart so: the wait, vectors, tiles, products, sums, stores.

A stamp costs a store that nobody waits for. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

KERNEL = "fastswin.ops.cluster_linear.kernel"

#: What happens, and the text in front of which (or with "+" behind which) it is noted.
EVENTS = {
    "begins": "    dtype: gl.constexpr = out_ptr.dtype.element_ty\n",
    "barriers": "    of_column = ",
    "weight asked": "    wait_for_previous(PDL)\n",
    "waited": "+    wait_for_previous(PDL)\n",
    "x asked": "    LINES: gl.constexpr = ",
    "first tiles": "+        wait_arrivals(ready + 8 * (step % SLOTS), step // SLOTS % 2)\n",
    "products": "    y = acc\n",
    "sums": "    if PARTS > 0:\n        y = (y - mean",
    "ends": "    if WRITE_STATS:\n",
}

#: Numbers that a program has room for, and programs of a launch at most.
PLACES, PROGRAMS = 16, 512

#: Blocks of the chain, and those at its beginning that are left out.
BLOCKS, SKIPPED = 12, 2

STAMP = '''
@gluon.jit
def _stamp(clock_ptr, EVENT: gl.constexpr):
    """Nanoseconds of the card's clock."""
    now = gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,~{memory}", [], dtype=gl.int64, is_pure=False, pack=1
    )
    gl.store(clock_ptr + gl.program_id(0) * 16 + EVENT, now)


'''


def stamped(source: str) -> str:
    """The kernel's source with stamps, which take the place of the statistics that it leaves.

    Raises:
        ValueError: the source has an event's place not once.
    """
    text = source
    for number, (event, place) in enumerate(EVENTS.items()):
        anchor = place.lstrip("+")
        if source.count(anchor) != 1:
            raise ValueError(f"{event}: the source has {source.count(anchor)} times {anchor!r}")
        stamp = f"    _stamp(stats_out_ptr, {number})\n"
        if event == "first tiles":
            stamp = f"        if step == 0:\n            _stamp(stats_out_ptr, {number})\n"
        before, after = text.split(anchor)
        text = before + (anchor + stamp if place[0] == "+" else stamp + anchor) + after
    text = text.replace("    if WRITE_STATS:\n", "    if PDL and not PDL:\n")
    kernel = "@gluon.jit(do_not_specialize="
    if source.count(kernel) != 1:
        raise ValueError(f"the source has {source.count(kernel)} kernels")
    return text.replace(kernel, STAMP + kernel)


def kernel_source() -> str:
    """The kernel's own source."""
    found = importlib.util.find_spec(KERNEL)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")


def load_stamped(folder: Path) -> ModuleType:
    """The kernel's module with stamps, where the launcher finds it."""
    copy = folder / "stamped_kernel.py"  # a JIT function's source is read from a file
    copy.write_text(stamped(kernel_source()), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(KERNEL, copy)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[KERNEL] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_chain(M: int, C: int) -> torch.Tensor:
    """Clock of every launch, event and program, ``[2 BLOCKS, PROGRAMS, PLACES]``, 0 where none."""
    from fastswin.ops.cluster_linear.choice import default_cluster_linear_config
    from fastswin.ops.cluster_linear.launch import cluster_linear_fwd

    tiles = [default_cluster_linear_config(M, *size) for size in ((4 * C, C), (C, 4 * C))]
    if None in tiles:
        raise SystemExit(f"no tiles for {M} rows of {C} channels")
    print("fc1", tiles[0], "\nfc2", tiles[1])
    device = torch.device("cuda")

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).mul_(size[-1] ** -0.5).half()

    x, hidden = randn(M, C), randn(M, 4 * C)
    stats = torch.ones(2, C // tiles[1].block_n, M, device=device)  # type: ignore[union-attr]
    vector = torch.zeros(4 * C, device=device)
    weights = [(randn(4 * C, C), randn(C, 4 * C)) for _ in range(BLOCKS)]
    clock = torch.zeros(2 * BLOCKS, PROGRAMS, PLACES, dtype=torch.int64, device=device)

    def chain() -> None:
        for block, (fc1, fc2) in enumerate(weights):
            cluster_linear_fwd(
                x, fc1, vector, "gelu", 1e-5, None, hidden, tiles[0], True, stats, vector,
                clock[2 * block],
            )  # fmt: skip
            cluster_linear_fwd(
                hidden, fc2, vector[:C], None, None, x, x, tiles[1], True, None, None,
                clock[2 * block + 1],
            )  # fmt: skip

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(3):
        torch.zeros(128 << 20, dtype=torch.uint8, device=device)  # weights leave L2
        graph.replay()
        torch.cuda.synchronize()
    return clock.cpu()


def table(clock: torch.Tensor) -> list[str]:
    """Lines of both products; see the module."""
    rows = [f"{'us':18s}{'earliest':>10s}{'median':>10s}{'latest':>10s}"]
    last = len(EVENTS) - 1
    for product, name in enumerate(("fc1", "fc2")):
        found = []
        for launch in range(2 * SKIPPED + product, len(clock), 2):
            own = clock[launch][clock[launch, :, last] > 0][:, : last + 1]
            behind = (own - clock[launch - 1, :, last].max()).double() / 1e3
            found.append(torch.stack((behind.amin(0), behind.median(0).values, behind.amax(0))))
        mean = torch.stack(found).mean(0)
        for event, label in enumerate(EVENTS):
            values = "".join(f"{value:10.2f}" for value in mean[:, event].tolist())
            rows.append(f"{name + ' ' + label:18s}{values}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=196)
    parser.add_argument("--channels", type=int, default=768)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load_stamped(Path(folder))
        print(*table(run_chain(options.rows, options.channels)), sep="\n")


if __name__ == "__main__":
    main()
