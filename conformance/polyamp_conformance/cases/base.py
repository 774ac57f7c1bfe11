"""Case: one question to a backend, its section of the spec, and the rule that judges the answer.

Rules (docs/spec.md, section 9)
- `observe` runs in the backend's process and yields step records; what it returns becomes totals in the trace's footer.
- `judge` runs afterwards, on traces alone: the observed one and the expected one (the oracle's, or a script's). So traces of another
  machine are judged in the same way.
- What the backend does not claim is never run: it is reported as "not claimed".
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from polyamp.backend import Backend, Capabilities, Execution
from polyamp.trace import StepRecord, Trace

__all__ = ["Case", "Context", "Judge", "Needs", "Observation", "Status", "Verdict"]

Observation = Generator[StepRecord, None, Mapping[str, Any] | None]


class Status(StrEnum):
    """Outcome of one case on one backend. Only `PASS` and `NOT_CLAIMED` leave a run green."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"
    UNDECIDED = "undecided"
    NOT_CLAIMED = "not claimed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Verdict:
    """A judgement.

    Attributes:
        status: outcome.
        message: what was found, in words; for a failure it names step, both scales, headroom and the likely cause.
        facts: figures for the report.
    """

    status: Status
    message: str
    facts: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """Where a case is observed.

    Attributes:
        backend: the target.
        device: device name.
        execution: side of the compile boundary.
        references: folder of the oracle's reference files.
        is_oracle: whether this process is the oracle, which also writes the references.
    """

    backend: Backend
    device: str
    execution: Execution
    references: Path
    is_oracle: bool = False


@dataclass(frozen=True)
class Needs:
    """What a case asks a backend to claim."""

    formats: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()

    def lacking(self, family: str, capabilities: Capabilities, device: str) -> list[str]:
        """Names of what is needed and not claimed."""
        claimed = {
            "formats": capabilities.formats.get(device, ()),
            "layers": capabilities.layers,
            "losses": capabilities.losses,
            "optimizers": capabilities.optimizers,
        }
        missing = [] if family in capabilities.families else [f"family {family}"]
        return missing + [f"{kind[:-1]} {name}" for kind, names in claimed.items() for name in getattr(self, kind) if name not in names]


Judge = Callable[[Trace, Trace], Verdict]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One conformance case.

    Attributes:
        name: `family/case`, unique.
        spec: sections of docs/spec.md that it checks.
        title: what it shows, in a line.
        observe: runs it on a backend.
        judge: rule for the answer.
        needs: what a backend has to claim.
        expected: expected trace, where it is written down; None when the oracle's trace is the expectation.
        every_execution: whether it runs on each side of the compile boundary, or only on the one that users get by default.
        plotted: whether the report plots its scale.
        prepare: run once by the oracle before anything else, to write reference files.
        header: gives workload, policy, loss scale, seed for the trace's header; called when the case is run, so that listing cases builds no data.
    """

    name: str
    spec: tuple[str, ...]
    title: str
    observe: Callable[[Context], Observation]
    judge: Judge
    needs: Needs = field(default_factory=Needs)
    expected: Trace | None = None
    every_execution: bool = False
    plotted: bool = False
    prepare: Callable[[Path], None] | None = None
    header: Callable[[], Mapping[str, Any]] = dict

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]
