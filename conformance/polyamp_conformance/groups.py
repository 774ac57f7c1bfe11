"""Groups: the columns of the summary tables, each a handful of cases that answer one question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polyamp_conformance.cases.base import Status
from polyamp_conformance.results import CaseResult, RunResults

__all__ = ["group_of", "groups", "mark", "worst"]

_ORDER = (Status.ERROR, Status.FAIL, Status.NOT_RUN, Status.UNDECIDED, Status.PASS, Status.NOT_CLAIMED)
_MARKS = {
    Status.PASS: "✓",
    Status.FAIL: "✗",
    Status.ERROR: "!",
    Status.UNDECIDED: "?",
    Status.NOT_CLAIMED: "–",  # noqa: RUF001
    Status.NOT_RUN: "∅",
}


def group_of(case: str) -> str:
    """Group of a case: its family, or for training its workload and mode (`digits-exact`, `digits-mlp replay`)."""
    family, _, rest = case.partition("/")
    if family != "training":
        return family
    workload, _, mode = rest.partition("/")
    return "digits-exact" if workload == "digits-exact" else f"digits-mlp {mode}"


def groups(run: RunResults) -> list[str]:
    """Groups of a run, in case order."""
    return list(dict.fromkeys(group_of(r.case) for r in run.results))


def worst(results: Iterable[CaseResult]) -> Status:
    """The status that speaks for a group."""
    found = {r.status for r in results}
    return next((status for status in _ORDER if status in found), Status.NOT_RUN)


def mark(results: Sequence[CaseResult]) -> str:
    """Cell text: a mark and how many passed of those that were asked."""
    status = worst(results)
    asked = [r for r in results if r.status is not Status.NOT_CLAIMED]
    if status is Status.NOT_CLAIMED:
        return f"{_MARKS[status]} not claimed"
    return f"{_MARKS[status]} {sum(r.status is Status.PASS for r in asked)}/{len(asked)}"
