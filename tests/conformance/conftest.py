"""Observes cases in this process: the oracle's traces once, and any backend's on demand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from polyamp.backend import Backend
from polyamp.trace import StepRecord, Trace
from polyamp_conformance.cases import Case, all_cases
from polyamp_conformance.cases.base import Context, Verdict
from polyamp_conformance.oracle.backend import OracleBackend

sys.path.insert(0, str(Path(__file__).parents[1]))  # `saboteurs` lies beside this folder

Judge = Callable[[Backend, Case], Verdict]


def observe(case: Case, backend: Backend, references: Path) -> Trace:
    """A case's trace, without a worker and without files."""
    is_oracle = type(backend) is OracleBackend
    if is_oracle and case.prepare is not None:
        case.prepare(references)
    observation = case.observe(Context(backend, "cpu", "eager", references, is_oracle))
    records: list[StepRecord] = []
    while True:
        try:
            records.append(next(observation))
        except StopIteration as stop:
            return Trace({}, tuple(records), stop.value)


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    return {case.name: case for case in all_cases(0)}


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory, cases: dict[str, Case]) -> Callable[[Case], Trace]:
    """Expected trace of a case: its script's, or the oracle's."""
    folder = references(tmp_path_factory)

    @cache
    def of(name: str) -> Trace:
        case = cases[name]
        return case.expected or observe(case, OracleBackend(), folder)

    return lambda case: of(case.name)


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory, expected: Callable[[Case], Trace]) -> Judge:
    """Verdict on a backend for a case."""
    folder = references(tmp_path_factory)

    def verdict(backend: Backend, case: Case) -> Verdict:
        reference = expected(case)  # also writes the reference file that a replay starts from
        return case.judge(observe(case, backend, folder), reference)

    return verdict


def references(factory: pytest.TempPathFactory) -> Path:
    return factory.getbasetemp() / "references"
