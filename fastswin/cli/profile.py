"""``fastswin profile``."""

from __future__ import annotations

from typing import Annotated

import typer

from fastswin.bench.profile import HEADER, Method, profile_model, summary, table_rows
from fastswin.cli.options import Device, Json, parse_device
from fastswin.cli.output import Progress, print_json, print_table
from fastswin.data.source import check_name, open_source


def profile(
    model: Annotated[str, typer.Option("--model", help="Name; see 'fastswin models'.")],
    batch: Annotated[int, typer.Option(min=1, help="Images.")] = 1,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, tf32, fp16 or bf16; default: fp16 on a GPU, fp32 on a CPU."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="trace (the driver's), loop (events), or auto: the first possible.")
    ] = "auto",
    tuning: Annotated[str, typer.Option(help="auto, off, or a table of 'fastswin tune'.")] = "auto",
    device: Device = None,
    json: Json = False,
) -> None:
    """Time every kernel of one forward, with its bytes, FLOPs and share of the roofline."""
    check_name(model)
    target = parse_device(device)
    chosen: Method = method  # type: ignore[assignment]  # profile_model checks it
    with Progress("profile") as progress:
        progress.say(f"{model}, batch {batch}")
        result = profile_model(
            open_source(model, pretrained=False).model,  # speed does not depend on weights
            precision or ("fp16" if target.type == "cuda" else "fp32"),
            batch,
            device=target,
            method=chosen,
            name=model,
            tuning=tuning,
        )
    if json:
        print_json(result.to_dict())
        return
    title = f"{model}, {result.precision}, batch {batch}, {result.device}"
    print_table(title, HEADER, table_rows(result), left=3)
    print(summary(result))
