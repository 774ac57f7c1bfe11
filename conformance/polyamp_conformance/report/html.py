"""HTML report: one self-contained page - no script, no font and no picture from elsewhere.

It leads with the verdict, then the matrix, the trajectories, what failed, the host's numerics, and every single result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyamp.errors import TraceError
from polyamp.trace import Trace
from polyamp_conformance.cases import all_cases
from polyamp_conformance.groups import group_of, groups, mark, worst
from polyamp_conformance.report.plots import trajectories
from polyamp_conformance.report.terminal import verdict
from polyamp_conformance.results import RunResults
from polyamp_conformance.targets import ORACLE

__all__ = ["write_html"]

FILE_NAME = "report.html"


def write_html(run: RunResults, directory: Path) -> Path:
    """Renders the report of a run into its folder and returns the file."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("polyamp_conformance.report", "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    path = directory / FILE_NAME
    path.write_text(environment.get_template("report.html.j2").render(**_context(run, directory)), "utf-8")
    return path


def _context(run: RunResults, directory: Path) -> dict[str, Any]:
    columns = groups(run)
    titles = {case.name: case.title for case in all_cases(int(run.about["seed"]))}
    rows = []
    for target in run.targets:
        cells = [[r for r in run.of(target.name) if group_of(r.case) == column] for column in columns]
        rows.append({"target": target, "cells": [{"text": mark(cell), "status": worst(cell)} for cell in cells]})
    backends = [t.name for t in run.targets]
    cases = []
    for name in dict.fromkeys(r.case for r in run.results):
        mine = [r for r in run.results if r.case == name]
        cells = [[r for r in mine if r.backend == backend] for backend in backends]
        cases.append(
            {
                "name": name,
                "title": titles.get(name, ""),
                "spec": ", ".join(mine[0].spec),
                "cells": [{"text": mark(cell), "status": worst(cell), "results": cell} for cell in cells],
            }
        )
    return {
        "run": run,
        "about": run.description,
        "verdict": verdict(run),
        "columns": columns,
        "rows": rows,
        "backends": backends,
        "cases": cases,
        "plots": _plots(run, directory),
        "free": [r for r in run.results if "accuracy" in r.facts],
        "probes": sorted({key for target in run.targets for key in target.probe}),
    }


def _plots(run: RunResults, directory: Path) -> list[dict[str, str]]:
    plots = []
    for case in all_cases(int(run.about["seed"])):
        if not case.plotted or (case.name.startswith("training/digits-exact") and not case.every_execution):
            continue  # of the seeds of digits-exact one is drawn
        traces: dict[str, Trace] = {}
        for result in run.results:
            if result.case == case.name and result.trace is not None and result.backend not in traces:
                try:
                    traces[result.backend] = Trace.read(directory / result.trace)
                except TraceError:
                    continue
        traces = {name: trace for name, trace in traces.items() if trace.records}
        if traces:
            svg = trajectories(traces, f"{case.name}: loss scale", ORACLE)
            plots.append({"name": case.name, "title": case.title, "svg": svg})
    return plots
