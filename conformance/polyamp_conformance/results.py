"""Results: what was found, as JSON Lines and as JUnit XML.

Rules
- `results.jsonl`: one line about the run, one line per backend (versions, probe), one line per backend, case and execution. Everything
  else - JUnit, terminal, HTML - is derived from it and from the traces.
- A run is green only when every result is "pass" or "not claimed", and at least one passed for every backend that was named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyamp.errors import PolyampError
from polyamp_conformance.cases.base import Status

__all__ = ["FILE_NAME", "CaseResult", "RunResults", "Target"]

FILE_NAME = "results.jsonl"


@dataclass(frozen=True)
class CaseResult:
    """One case on one backend in one execution."""

    backend: str
    case: str
    execution: str
    spec: tuple[str, ...]
    status: Status
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    trace: str | None = None

    @property
    def family(self) -> str:
        return self.case.partition("/")[0]


@dataclass(frozen=True)
class Target:
    """One backend of a run, as its process reported it."""

    name: str
    versions: Mapping[str, str] = field(default_factory=dict)
    probe: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class RunResults:
    """A whole run.

    Attributes:
        about: seed, device, platform, versions of polyamp and Python, date.
        targets: the backends, the oracle first.
        results: all results, in case order within a backend.
    """

    about: Mapping[str, Any]
    targets: tuple[Target, ...]
    results: tuple[CaseResult, ...]

    @property
    def description(self) -> str:
        """One line about the run for reports."""
        a = self.about
        return f"polyamp {a['polyamp']}, Python {a['python']}, {a['platform']}, device {a['device']}, seed {a['seed']}, {a['date']}"

    def of(self, backend: str) -> list[CaseResult]:
        return [r for r in self.results if r.backend == backend]

    @property
    def bad(self) -> list[CaseResult]:
        return [r for r in self.results if r.status not in (Status.PASS, Status.NOT_CLAIMED)]

    @property
    def findings(self) -> list[list[CaseResult]]:
        """What is not green, results of one backend with the same status and message together."""
        found: dict[tuple[str, Status, str], list[CaseResult]] = {}
        for result in self.bad:
            found.setdefault((result.backend, result.status, result.message), []).append(result)
        return list(found.values())

    @property
    def green(self) -> bool:
        return not self.bad and all(any(r.status is Status.PASS for r in self.of(t.name)) for t in self.targets)

    def write(self, directory: Path) -> None:
        """Writes `results.jsonl` and `junit.xml`."""
        lines = [{"kind": "run", **self.about}]
        lines += [{"kind": "target", **asdict(t)} for t in self.targets]
        lines += [{"kind": "result", **asdict(r)} for r in self.results]
        (directory / FILE_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        self._write_junit(directory / "junit.xml")

    @classmethod
    def read(cls, directory: Path) -> RunResults:
        """Reads the results of a finished run.

        Raises:
            PolyampError: the folder holds no results, or damaged ones.
        """
        path = directory / FILE_NAME
        try:
            lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            kinds = [line.pop("kind") for line in lines]
            about = next(line for line, kind in zip(lines, kinds, strict=True) if kind == "run")
            targets = tuple(Target(**{**line, "faults": tuple(line["faults"])}) for line, kind in zip(lines, kinds, strict=True) if kind == "target")
            results = tuple(
                CaseResult(**{**line, "spec": tuple(line["spec"]), "status": Status(line["status"])})
                for line, kind in zip(lines, kinds, strict=True)
                if kind == "result"
            )
        except FileNotFoundError:
            raise PolyampError(f"{directory} holds no {FILE_NAME}; give the folder of a finished `polyamp conformance run -o`") from None
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
            raise PolyampError(f"{path} is damaged: {error!r}; run the suite again") from error
        return cls(about, targets, results)

    def _write_junit(self, path: Path) -> None:
        from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

        document = JUnitXml("polyamp conformance")
        for target in self.targets:
            suite = TestSuite(target.name)
            for result in self.of(target.name):
                case = TestCase(f"{result.case}[{result.execution}]", classname=f"{target.name}.{result.family}", time=result.seconds)
                if result.status is Status.FAIL or result.status is Status.UNDECIDED:
                    case.result = [Failure(result.message, str(result.status))]
                elif result.status is Status.ERROR or result.status is Status.NOT_RUN:
                    case.result = [Error(result.message, str(result.status))]
                elif result.status is Status.NOT_CLAIMED:
                    case.result = [Skipped(result.message, "not claimed")]
                suite.add_testcase(case)
            document.add_testsuite(suite)
        document.write(str(path), pretty=True)
