"""`polyamp trace`: show, compare and plot trace files.

Rules (docs/spec.md, section 6)
- A truncated trace is read up to its last whole line, and that is said on standard error.
- `diff` exits with 0 when the traces agree, 1 when they differ, 2 when they can't be compared.
- `plot` never replaces a file without --force, and writes it only when the whole picture is there.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from polyamp.cli.failure import Failure
from polyamp.trace import StepRecord, Trace
from polyamp.trace_diff import diff as trace_diff

__all__ = ["trace"]

_MAX_RANGES = 40
_COLUMNS = ("step", "scale", "after", "skipped", "loss")


@click.group()
def trace() -> None:
    """Show, compare and plot traces."""


@trace.command()
@click.argument("path", metavar="FILE")
@click.option("--rows", default=5, show_default=True, type=click.IntRange(0), help="Steps to print at either end.")
@click.option("--all", "everything", is_flag=True, help="Print every step.")
def show(path: str, rows: int, everything: bool) -> None:
    """Print a trace: header, totals, skipped steps, first and last steps."""
    from polyamp.cli.output import print_table

    found = _read(path)
    for name, value in found.header.items():
        click.echo(f"{name}: {value if isinstance(value, str) else json.dumps(value)}")
    click.echo("\n".join(_totals(found)))
    records = found.records
    shown = [records] if everything or len(records) <= 2 * rows else [part for part in (records[:rows], records[len(records) - rows :]) if part]
    if not any(shown):
        return
    cells: list[tuple[object, ...]] = []
    for index, part in enumerate(shown):
        if index:
            cells.append(("...",) * len(_COLUMNS))
        cells += [_cells(record) for record in part]
    click.echo()
    print_table(_COLUMNS, cells, right=("step", "scale", "after", "loss"))


@trace.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--masters", is_flag=True, help="Compare the digests of the master weights too.")
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, masters: bool) -> None:
    """Name the first step at which two traces part, and why.

    Exit status: 0 they agree, 1 they differ, 2 they can't be compared.
    """
    left, right = _read(a), _read(b)
    if masters:
        for path, found in ((a, left), (b, right)):
            if not found.records or not all(record.digest for record in found.records):
                raise Failure(f"{path} has no digest of the master weights for every step; record them, or compare without --masters")
    divergence = trace_diff(left, right, masters=masters)
    if divergence is not None:
        click.echo(f"first trace: {a}\nsecond trace: {b}\n{divergence}")
        ctx.exit(1)
    what = "scale, skips and master weights" if masters else "scale and skips"
    click.echo(f"{what} agree over {len(left.records)} steps, {len(left.skips)} of them skipped")


@trace.command()
@click.argument("paths", metavar="FILES...", nargs=-1, required=True)
@click.option("-o", "--output", required=True, help="Picture to write: .png or .svg.")
@click.option("--force", is_flag=True, help="Replace the picture if it exists.")
@click.option("--title", default="Loss scale", show_default=True, help="Title of the picture.")
def plot(paths: tuple[str, ...], output: str, force: bool, title: str) -> None:
    """Draw the loss scale of one or more traces, skipped steps as ticks."""
    from polyamp.cli.plot import draw

    target = Path(output)
    kind = target.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise Failure(f"can't write {output}: expected a name that ends in .png or .svg")
    if target.exists() and not force:
        raise Failure(f"{output} exists and is left as it is; choose another name, or pass --force to replace it")
    traces = [(_label(path, found), found) for path in paths for found in [_read(path)]]
    picture = draw(traces, kind, title)
    try:
        with target.open("wb" if force else "xb") as file:
            file.write(picture)
    except OSError as error:
        raise Failure(f"can't write {output}: {error.strerror}") from error
    click.echo(f"wrote {output}")


def _read(path: str) -> Trace:
    found = Trace.read(path)
    if found.truncated:
        click.echo(f"note: {path} is truncated: its last line is half-written and left out", err=True)
    elif found.footer is None:
        click.echo(f"note: {path} has no footer: the run did not end cleanly, or goes on", err=True)
    return found


def _label(path: str, found: Trace) -> str:
    backend = found.header.get("backend")
    return f"{Path(path).stem} ({backend})" if isinstance(backend, str) else Path(path).stem


def _totals(found: Trace) -> Iterator[str]:
    records = found.records
    reasons = Counter(record.reason or "no reason recorded" for record in records if record.skipped)
    detail = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    yield f"steps: {len(records)}"
    yield f"skipped: {len(found.skips)}" + (f" ({detail}): {_ranges(found.skips)}" if detail else "")
    if records:
        scales = [record.scale for record in records]
        first, low, high, last = map(_scale, (scales[0], min(scales), max(scales), records[-1].scale_after))
        yield f"scale: {first} at first, {low} to {high}, {last} at last"
    if found.footer is not None and found.footer.get("steps") != len(records):
        yield f"footer: counts {found.footer.get('steps')} steps, the file holds {len(records)}: lines were removed or added"


def _scale(scale: float) -> str:
    """Writes a scale exactly: integers in full up to 2^30, other powers of two as such, all else in 9 digits, which identify a float32."""
    if scale.is_integer() and abs(scale) <= 2**30:
        return str(int(scale))
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.9g}"


def _ranges(steps: tuple[int, ...]) -> str:
    """Writes 3, 4, 5, 9 as `3-5 9`, and counts what goes beyond `_MAX_RANGES` pieces."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    rest = len(runs) - _MAX_RANGES
    text = " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_RANGES])
    return text if rest <= 0 else f"{text} and {rest} more runs"


def _cells(record: StepRecord) -> tuple[object, ...]:
    skipped = (record.reason or "skipped") if record.skipped else ""
    loss = "" if record.loss is None else f"{record.loss:.6g}"
    return record.step, _scale(record.scale), _scale(record.scale_after), skipped, loss
