"""Judgement: from a worker's events and traces to results. Runs after the workers, on files alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyamp.errors import TraceError
from polyamp.trace import Trace
from polyamp_conformance.cases.base import Case, Status, Verdict
from polyamp_conformance.preflight import faults
from polyamp_conformance.results import CaseResult, Target
from polyamp_conformance.targets import ORACLE
from polyamp_conformance.worker import Job, events_path, trace_path

__all__ = ["judge_trace", "judge_worker"]


def judge_worker(directory: Path, job: Job, death: str, seconds: float) -> tuple[Target, list[CaseResult]]:
    """Judges everything that one worker did, and names what it did not.

    Args:
        directory: output folder of the run.
        job: the worker's job.
        death: how the process ended, if not by itself.
        seconds: how long it ran.
    """
    events = _events(events_path(directory, job.backend))
    preflight: Mapping[str, Any] = next((e for e in events if e["event"] == "preflight"), {})
    broken: Mapping[str, Any] = next((e for e in events if e["event"] == "broken"), {})
    probe = preflight.get("probe", {})
    target = Target(job.backend, preflight.get("versions", {}), probe, tuple(faults(probe)), seconds, death or broken.get("message", ""))
    results: list[CaseResult] = []
    for case in job.cases():
        mine = [e for e in events if e.get("case") == case.name]
        ends = [e for e in mine if e["event"] in ("done", "error", "not claimed")]
        results += [_result(directory, job.backend, case, end, target.faults) for end in ends]
        open_ended = {e["execution"] for e in mine if e["event"] == "start"} - {e["execution"] for e in ends}
        results += [_blank(job.backend, case, execution, Status.ERROR, death or "the case did not end") for execution in sorted(open_ended)]
        if not mine:
            results.append(_blank(job.backend, case, "-", Status.NOT_RUN, target.message or "the worker did not reach this case"))
    return target, results


def _events(path: Path) -> list[dict[str, Any]]:
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _blank(backend: str, case: Case, execution: str, status: Status, message: str) -> CaseResult:
    return CaseResult(backend, case.name, execution, case.spec, status, message)


def _result(directory: Path, backend: str, case: Case, end: Mapping[str, Any], host_faults: tuple[str, ...]) -> CaseResult:
    execution = end["execution"]
    if end["event"] == "not claimed":
        return _blank(backend, case, execution, Status.NOT_CLAIMED, end["message"])
    if end["event"] == "error":
        return _blank(backend, case, execution, Status.ERROR, end["message"])
    path = trace_path(directory, backend, case.name, execution)
    expected = case.expected or trace_path(directory, ORACLE, case.name, "eager")
    verdict = judge_trace(case, path, expected)
    if verdict.status is Status.FAIL and case.family == "training" and host_faults:
        verdict = replace(verdict, status=Status.UNDECIDED, message=f"{verdict.message}. This host can fake that: {'; '.join(host_faults)}")
    return CaseResult(
        backend, case.name, execution, case.spec, verdict.status, verdict.message, verdict.facts, end["seconds"], str(path.relative_to(directory))
    )


def judge_trace(case: Case, observed: Path, expected: Path | Trace) -> Verdict:
    """Judges one trace file by its case's rule.

    Args:
        case: the case.
        observed: trace file of a backend.
        expected: the trace to hold it against, or its file.
    """
    try:
        reference = expected if isinstance(expected, Trace) else Trace.read(expected)
    except TraceError as error:
        return Verdict(Status.NOT_RUN, f"the oracle left nothing to compare with: {error}")
    try:
        return case.judge(Trace.read(observed), reference)
    except TraceError as error:
        return Verdict(Status.ERROR, str(error))
