"""``fastswin doctor``."""

from __future__ import annotations

from fastswin.cli.options import Json
from fastswin.cli.output import print_json, print_table
from fastswin.doctor import diagnose


def doctor(json: Json = False) -> None:
    """Say what this machine can run, and why not the rest."""
    found = diagnose()
    if json:
        print_json(found)
        return
    print_table("versions", ("what", "value"), found["versions"].items(), left=2)
    print_table(
        "GPUs",
        ("GPU", "name", "capability", "memory (GiB)", "usable"),
        [
            (g["index"], g["name"], g["capability"], g["memory_gib"], _usable(g))
            for g in found["gpus"]
        ]
        or [("-", "none visible to PyTorch", "", "", "")],
        left=5,
    )
    print_table(
        "precisions of the engine",
        ("precision", "device", "usable"),
        [(p["name"], p["device"], _usable(p)) for p in found["precisions"]],
        left=3,
    )
    for title, key in (("backends", "backends"), ("shipped models", "shipped_models")):
        print_table(
            title, ("name", "usable"), [(b["name"], _usable(b)) for b in found[key]], left=2
        )
    print_table(
        "optional packages",
        ("package", "version", "for", "to install"),
        [
            (p["name"], p["version"] or "-", p["purpose"], p["reason"] or "")
            for p in found["packages"]
        ],
        left=4,
    )


def _usable(row: dict) -> str:
    return f"no: {row['reason']}" if row["reason"] else "yes"
