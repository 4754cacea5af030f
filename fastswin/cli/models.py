"""``fastswin models``."""

from __future__ import annotations

from fastswin.cli.options import Json
from fastswin.cli.output import Progress, print_json, print_table
from fastswin.data.catalogue import catalogue


def models(json: Json = False) -> None:
    """List the named models."""
    with Progress("counting parameters") as progress:
        rows = []
        for entry in catalogue():
            rows.append(entry)
            progress.advance()
    if json:
        print_json(rows)
        return
    print_table(
        "models",
        ("name", "version", "image", "window", "C", "depths", "heads", "params (M)", "weights"),
        [
            (
                row["name"],
                f"V{row['version']}",
                "x".join(map(str, row["image_size"])),
                "x".join(map(str, row["window_size"])),
                row["embed_dim"],
                "-".join(map(str, row["depths"])),
                "-".join(map(str, row["num_heads"])),
                f"{row['parameters'] / 1e6:.1f}",
                row["weights"],
            )
            for row in rows
        ],
    )
