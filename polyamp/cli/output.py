"""Output: rich tables and JSON on standard output.

Rules
- What is piped is plain text, up to 120 columns wide; what goes to a terminal follows its width.
- Cell texts are never read as rich markup: they come from files and metadata.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_json", "print_table"]

_PIPED_WIDTH = 120


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()) -> None:
    """Prints a table.

    Args:
        columns: column titles.
        rows: cells, shown with `str`.
        right: titles of the columns that are aligned to the right.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    aligned = set(right)
    for column in columns:
        table.add_column(Text(column), justify="right" if column in aligned else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    Console(file=sys.stdout, width=width, highlight=False).print(table)


def print_json(document: Any) -> None:
    """Prints a document as indented JSON."""
    click.echo(json.dumps(document, indent=2))
