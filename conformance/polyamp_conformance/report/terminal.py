"""Terminal report: backend x group table, what failed and why, and what the training runs learned."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polyamp_conformance.cases.base import Status
from polyamp_conformance.groups import group_of, groups, mark, worst
from polyamp_conformance.results import RunResults

__all__ = ["print_report"]

_STYLES = {
    Status.PASS: "green",
    Status.FAIL: "bold red",
    Status.ERROR: "bold red",
    Status.UNDECIDED: "yellow",
    Status.NOT_CLAIMED: "dim",
    Status.NOT_RUN: "yellow",
}
_SHOWN = 12


def print_report(run: RunResults, console: Console) -> None:
    """Prints the summary of a run."""
    columns = groups(run)
    table = Table(title="Conformance", title_justify="left", caption="passed / asked, both sides of the compile boundary", caption_justify="left")
    table.add_column("backend", no_wrap=True)
    for column in columns:
        table.add_column(column.replace("digits-mlp ", "digits-mlp\n").replace("loss_scale", "loss scale"), justify="right")
    table.add_column("time", justify="right")
    for target in run.targets:
        mine = run.of(target.name)
        cells = []
        for column in columns:
            results = [r for r in mine if group_of(r.case) == column]
            cells.append(f"[{_STYLES[worst(results)]}]{mark(results)}[/]")
        table.add_row(target.name, *cells, f"{target.seconds:.0f} s")
    console.print(table)
    for target in run.targets:
        if target.message:
            console.print(f"[bold red]{target.name}[/]: {escape(target.message)}", soft_wrap=True)
        for fault in target.faults:
            console.print(f"[yellow]{target.name}[/]: this host can fake a mismatch: {escape(fault)}", soft_wrap=True)
    for finding in run.findings[:_SHOWN]:
        result, others = finding[0], len(finding) - 1
        name = f"{result.backend} {result.case} ({result.execution}, spec {', '.join(result.spec)})" + (f" and {others} more" if others else "")
        console.print(f"[{_STYLES[result.status]}]{result.status}[/] {escape(name)}: {escape(result.message)}", soft_wrap=True)
    if len(run.findings) > _SHOWN:
        console.print(f"... and {len(run.findings) - _SHOWN} more findings in the report", style="dim")
    _print_learned(run, console)
    console.print(f"[{'bold green' if run.green else 'bold red'}]{verdict(run)}[/]", soft_wrap=True)


def _print_learned(run: RunResults, console: Console) -> None:
    free = [r for r in run.results if "accuracy" in r.facts]
    if not free:
        return
    table = Table(title="Held-out accuracy on handwritten digits", title_justify="left")
    for column in ("backend", "optimizer", "float16", "float32", "skips", "parts from the oracle"):
        table.add_column(column, justify="left" if column in ("backend", "optimizer") else "right")
    for result in free:
        facts = result.facts
        optimizer = result.case.split("/")[1].removeprefix("digits-mlp-")
        at = facts["parts_at"] if facts["parts_at"] == "never" else f"step {facts['parts_at']}"
        table.add_row(
            result.backend, optimizer, f"{100 * facts['accuracy']:.1f} %", f"{100 * facts['accuracy_float32']:.1f} %", str(facts["skips"]), at
        )
    console.print(table)


def verdict(run: RunResults) -> str:
    """The outcome in a sentence."""
    names = [t.name for t in run.targets if t.name != "oracle"]
    asked = [r for r in run.results if r.status is not Status.NOT_CLAIMED]
    if run.green:
        return f"{', '.join(names) or 'oracle'}: all {len(asked)} results conform to the spec"
    idle = [t.name for t in run.targets if not any(r.status is Status.PASS for r in run.of(t.name))]
    reason = f"; nothing passed on {', '.join(idle)}" if idle else ""
    return f"{len(run.bad)} of {len(asked)} results do not conform to the spec{reason}"
