"""Keep the tables in README.md and docs/ equal to the records.

    python -m fastswin.bench.report --write     regenerate every marker block
    python -m fastswin.bench.report --check     fail (exit code 1) if one is stale

A block is what stands between ``<!-- bench:NAME:begin -->`` and ``<!-- bench:NAME:end -->``. NAME
is a suite, or ``suite@card-slug`` for one card; words after ``begin`` filter the rows:

    <!-- bench:model:begin dtype=fp16 batch=1,32 -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fastswin.bench.backend_accuracy import make_accuracy_table
from fastswin.bench.backends import make_backend_table
from fastswin.bench.export_tables import make_engine_table, make_export_table
from fastswin.bench.quant_tables import make_quant_table
from fastswin.bench.record import DEFAULT_ROOT, load_document
from fastswin.bench.startup_tables import make_startup_table
from fastswin.bench.tables import filter_records, make_table, to_markdown
from fastswin.bench.train import make_table as make_train_table
from fastswin.data.atomic import write_text

_BLOCK = re.compile(
    r"(?P<begin><!-- bench:(?P<name>[\w@.-]+):begin(?P<words>[^>]*?) -->\n)"
    r"(?P<body>.*?)"
    r"(?P<end><!-- bench:(?P=name):end -->)",
    re.DOTALL,
)
_MARKER = re.compile(r"<!-- bench:[\w@.-]+:(?:begin|end)[^>]*-->")

#: Suites whose table is not the usual one.
TABLES = {
    "backend_accuracy": make_accuracy_table,
    "backends": make_backend_table,
    "export": make_export_table,
    "quant": make_quant_table,
    "startup": make_startup_table,
    "tensorrt_rtx": make_engine_table,
    "train": make_train_table,
}

FILTER_FIELDS = ("case", "dtype", "batch", "variant")


def markdown_for(name: str, root: Path, filters: dict[str, list[str]] | None = None) -> str:
    """Markdown of one marker block: a table per card that has the suite.

    Args:
        name: ``suite`` or ``suite@card-slug``.
        root: folder of the cards' folders.
        filters: per field of a record, the values to keep.

    Raises:
        ValueError: a stored file is no record document.
    """
    suite, _, card = name.partition("@")
    parts = []
    for path in sorted(root.glob(f"{card or '*'}/{suite}.json")):
        document = load_document(path)
        if document is not None:
            document = filter_records(document, filters or {})
            table = TABLES.get(suite, make_table)(document)
            if table.rows:
                parts.append(to_markdown(table))
    return "\n\n".join(parts) or f"No records for {name} yet."


def render(text: str, root: Path) -> str:
    """A document's text with every marker block regenerated.

    Raises:
        ValueError: a marker without its partner, or an unknown filter.
    """
    rendered = _BLOCK.sub(
        lambda m: (
            m["begin"] + markdown_for(m["name"], root, _filters(m["words"])) + "\n" + m["end"]
        ),
        text,
    )
    if len(_MARKER.findall(text)) != 2 * len(_BLOCK.findall(text)):
        raise ValueError("a bench marker lacks its begin or end partner")
    return rendered


def stale_files(repository: Path, root: Path | None = None) -> dict[Path, str]:
    """README.md and docs/*.md whose blocks differ from the records, with their right text.

    Raises:
        ValueError: a broken marker; the message names the file.
    """
    stale = {}
    for path in [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]:
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        try:
            rendered = render(text, root or repository / DEFAULT_ROOT)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if rendered != text:
            stale[path] = rendered
    return stale


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastswin.bench.report")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="regenerate the marker blocks")
    action.add_argument("--check", action="store_true", help="exit 1 if a block is stale")
    parser.add_argument("--repository", type=Path, default=Path("."), help="root of the checkout")
    parser.add_argument("--results", type=Path, help="default: REPOSITORY/benchmarks/results")
    options = parser.parse_args(arguments)
    try:
        stale = stale_files(options.repository, options.results)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for path, text in stale.items():
        if options.write:
            write_text(path, text)
        print(f"{path}: {'written' if options.write else 'stale; run with --write'}")
    return 1 if stale and options.check else 0


def _filters(words: str) -> dict[str, list[str]]:
    filters = {}
    for word in words.split():
        field, equals, values = word.partition("=")
        if field not in FILTER_FIELDS or not equals:
            raise ValueError(f"filter must be one of {', '.join(FILTER_FIELDS)}=..., got {word!r}")
        filters[field] = values.split(",")
    return filters


if __name__ == "__main__":
    raise SystemExit(main())
