"""``fastswin warmup``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from fastswin.bench.tune_models import parse_batches
from fastswin.cli.options import Device, Json, parse_device, split_list
from fastswin.cli.output import Progress, print_json, print_table
from fastswin.data.source import check_name, open_source
from fastswin.engine import Engine


def warmup(
    model: Annotated[
        list[str], typer.Option("--model", "--models", help="Names; repeat or use commas.")
    ],
    batches: Annotated[
        str, typer.Option(help="1-64 (the captured ones in it) or 1,8,32.")
    ] = "1-64",
    precision: Annotated[
        list[str] | None, typer.Option(help="Precisions; repeat or use commas. Default: fp16.")
    ] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Compile a server's kernels into Triton's cache, so that its first result is quick."""
    names = split_list(model, "--model")
    for name in names:
        check_name(name)
    precisions = split_list(precision, "--precision") or ["fp16"]
    sizes = parse_batches(batches)
    target = parse_device(device)
    if target.type != "cuda":
        raise RuntimeError("warmup compiles for the GPU of this machine, and there is none")
    rows = []
    with Progress("warmup") as progress:
        for name in names:
            net = open_source(name, pretrained=False).model  # kernels do not depend on weights
            for chosen in precisions:
                start = time.perf_counter()
                engine = Engine(net, chosen, device=target)  # type: ignore[arg-type]
                launches = engine.warmup(sizes)
                rows.append((name, chosen, launches, time.perf_counter() - start))
                progress.say(f"{name} {chosen}: {launches} launches in {rows[-1][3]:.1f} s")
    columns = ("model", "precision", "launches", "seconds")
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    print_table(
        f"compiled for {target}, batches {', '.join(map(str, sizes))}",
        columns,
        [(*row[:3], f"{row[3]:.1f}") for row in rows],
        left=2,
    )
