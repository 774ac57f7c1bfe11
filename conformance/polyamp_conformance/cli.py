"""`polyamp conformance`: run the suite, report on a run, compare two.

Rules
- Exit status: 0 conforming or equal, 1 not, 2 what was asked can't be done.
- `run` ends in a table on the terminal, and in `results.jsonl`, `junit.xml` and `report.html` in the output folder.
- Errors of this package reach the root command as `PolyampError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["conformance"]


@click.group()
def conformance() -> None:
    """Run the conformance suite, report on it, compare results."""


@conformance.command()
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Backend, or module:attribute; repeatable. Default: all installed.")
@click.option("--device", default="cpu", show_default=True, help="Device of all backends.")
@click.option("--family", "families", multiple=True, type=click.Choice(["loss_scale", "step", "training"]), help="Only this family of cases.")
@click.option("--case", "patterns", multiple=True, metavar="GLOB", help="Only cases whose name matches, such as 'training/digits-exact/*'.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**31), help="Base seed of the training workloads.")
@click.option("--jobs", "-j", type=click.IntRange(1), help="Processes at a time. Default: one per core.")
@click.option("--timeout", default=300.0, show_default=True, type=click.FloatRange(1), help="Seconds of silence that count as a hang.")
@click.option("--output", "-o", default="polyamp-report", show_default=True, type=click.Path(path_type=Path, file_okay=False), help="Output folder.")
@click.option("--force", is_flag=True, help="Replace an earlier run in the output folder.")
@click.pass_context
def run(
    ctx: click.Context,
    backends: tuple[str, ...],
    device: str,
    families: tuple[str, ...],
    patterns: tuple[str, ...],
    seed: int,
    jobs: int | None,
    timeout: float,
    output: Path,
    force: bool,
) -> None:
    """Run identical seeded workloads on all backends and judge them against the oracle.

    \b
    Exit status: 0 all results conform, 1 some do not, 2 the run could not be made.
    """
    from rich.console import Console

    from polyamp_conformance.progress import LiveProgress
    from polyamp_conformance.report.html import write_html
    from polyamp_conformance.report.terminal import print_report
    from polyamp_conformance.runner import Options, default_jobs
    from polyamp_conformance.runner import run as run_suite

    options = Options(
        directory=output,
        backends=backends,
        device=device,
        families=families,
        patterns=patterns,
        seed=seed,
        force=force,
        jobs=jobs or default_jobs(),
        timeout=timeout,
    )
    with LiveProgress(Console(stderr=True)) as progress:
        results = run_suite(options, progress)
    report = write_html(results, output)
    print_report(results, _console())
    click.echo(f"report: {report}")
    ctx.exit(0 if results.green else 1)


@conformance.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.pass_context
def report(ctx: click.Context, directory: Path) -> None:
    """Print the report of a finished run, and render its HTML page again.

    \b
    Exit status: 0 all results conform, 1 some do not, 2 there is no such run.
    """
    from polyamp_conformance.report.html import write_html
    from polyamp_conformance.report.terminal import print_report
    from polyamp_conformance.results import RunResults

    results = RunResults.read(directory)
    path = write_html(results, directory)
    print_report(results, _console())
    click.echo(f"report: {path}")
    ctx.exit(0 if results.green else 1)


@conformance.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.pass_context
def compare(ctx: click.Context, a: Path, b: Path) -> None:
    """Hold run or trace B against run or trace A, by the rules of each case; B may come from another machine.

    \b
    Exit status: 0 they agree, 1 they do not, 2 they can't be compared.
    """
    from polyamp_conformance.cases.base import Status
    from polyamp_conformance.compare import compare as compare_paths

    comparisons = compare_paths(a, b)
    for comparison in comparisons:
        click.echo(f"{comparison.verdict.status}  {comparison.name}: {comparison.verdict.message}")
    bad = [c for c in comparisons if c.verdict.status is not Status.PASS]
    click.echo(f"{len(comparisons) - len(bad)} of {len(comparisons)} agree")
    ctx.exit(1 if bad else 0)


def _console() -> Console:
    import sys

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)
