"""Make one table of several of one kind of card, and place it where engines find it.

    python -m fastswin.bench.tune_merge A.json B.json --out all.json   whole: can be continued
    python -m fastswin.bench.tune_merge A.json B.json --ship           fastswin/assets/tuning/

What ships holds the rows that answer, with their ranges, and the models' times; rows that brought
nothing stay with the tables they were measured in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fastswin.data.atomic import write_text
from fastswin.tuning.document import TableRefusedError, card_slug, format_document, read_document
from fastswin.tuning.merge import merge_documents, shipped
from fastswin.tuning.table import SHIPPED


def merge_tables(
    paths: Sequence[Path], out: Path | None, folder: Path | None
) -> tuple[list[Path], list[str]]:
    """Merge tables into files.

    Args:
        paths: tables of ``fastswin tune``.
        out: where the whole table goes, or None.
        folder: where what ships goes, named by its card, or None.

    Returns:
        The files written, and a line for every conflict.

    Raises:
        TableRefusedError: tables that do not belong together; nothing is written.
        FileNotFoundError: there is no such table.
    """
    merged, conflicts = merge_documents([(path.name, read_document(path)) for path in paths])
    written: list[Path] = []
    if out is not None:
        write_text(out, format_document(merged))
        written.append(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / f"{card_slug(merged['card'])}.json"
        write_text(place, format_document(shipped(merged)))
        written.append(place)
    return written, conflicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge from the command line. Exit code 2: tables that do not belong together."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.tune_merge")
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="the whole table")
    parser.add_argument(
        "--ship", nargs="?", type=Path, const=SHIPPED, help="a folder; default: the package's own"
    )
    options = parser.parse_args(arguments)
    if options.out is None and options.ship is None:
        parser.error("nothing to write: give --out or --ship")
    try:
        written, conflicts = merge_tables(options.tables, options.out, options.ship)
    except (TableRefusedError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    for line in conflicts:
        print(f"conflict: {line}", file=sys.stderr)
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
