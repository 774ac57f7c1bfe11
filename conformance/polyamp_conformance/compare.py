"""Compare: traces or whole runs of two machines, by the rules under which each case would be judged.

Rules (docs/spec.md, section 9.4)
- Two runs: every trace of B is held against A's trace of the same backend, case and execution; where A has not that backend, against
  A's oracle.
- Two trace files: by the rule of the case that their headers name, if it is the same one; otherwise step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polyamp.errors import PolyampError
from polyamp.trace import Trace
from polyamp.trace_diff import diff
from polyamp_conformance.cases import Case, all_cases
from polyamp_conformance.cases.base import Status, Verdict
from polyamp_conformance.results import CaseResult, RunResults
from polyamp_conformance.targets import ORACLE

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """One pair of traces and the verdict on the second."""

    name: str
    verdict: Verdict


def compare(a: Path, b: Path) -> list[Comparison]:
    """Compares two runs or two trace files.

    Raises:
        PolyampError: one is a folder and the other a file, something can't be read, or the runs share no case.
    """
    if a.is_dir() and b.is_dir():
        return _runs(a, b)
    if a.is_dir() or b.is_dir():
        raise PolyampError(f"can't compare a folder with a file: {a}, {b}; give two folders of runs or two trace files")
    return [Comparison(f"{a} and {b}", _traces(Trace.read(a), Trace.read(b)))]


def _traces(a: Trace, b: Trace) -> Verdict:
    name = a.header.get("case")
    if name is not None and name == b.header.get("case") and a.header.get("seed") == b.header.get("seed"):
        case = next((c for c in all_cases(int(a.header.get("seed", 0))) if c.name == name), None)
        if case is not None:
            return case.judge(b, a)
    divergence = diff(a, b, masters=True)
    if divergence is None:
        return Verdict(Status.PASS, f"{len(a.records)} steps agree, {len(a.skips)} of them skipped")
    return Verdict(Status.FAIL, str(divergence))


def _runs(a: Path, b: Path) -> list[Comparison]:
    left, right = RunResults.read(a), RunResults.read(b)
    if left.about["seed"] != right.about["seed"]:
        raise PolyampError(f"the runs have different seeds: {left.about['seed']} and {right.about['seed']}")
    cases = {case.name: case for case in all_cases(int(left.about["seed"]))}
    known = {(r.backend, r.case, r.execution): r for r in left.results if r.trace}
    comparisons = []
    for result in right.results:
        if result.trace is None or result.case not in cases:
            continue
        partner = known.get((result.backend, result.case, result.execution)) or known.get((ORACLE, result.case, "eager"))
        if partner is not None:
            name = f"{result.backend} {result.case} ({result.execution}) against {partner.backend}"
            comparisons.append(Comparison(name, _judge(cases[result.case], a, partner, b, result)))
    if not comparisons:
        raise PolyampError(f"{a} and {b} share no case")
    return comparisons


def _judge(case: Case, a: Path, left: CaseResult, b: Path, right: CaseResult) -> Verdict:
    return case.judge(Trace.read(b / str(right.trace)), Trace.read(a / str(left.trace)))
