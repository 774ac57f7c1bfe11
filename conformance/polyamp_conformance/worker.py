"""Worker: one process that observes the cases of one backend and writes traces.

Rules (docs/spec.md, section 9.1)
- It is started with a job as its only argument: a JSON text with backend, device, seed, families, patterns, directory.
- What happens goes to `workers/<backend>.jsonl` as it happens, so that a crash or hang loses nothing that was done.
- It never judges. An exception in a case is that case's error; the next case runs.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import polyamp
from polyamp.backend import Backend, Capabilities, Execution
from polyamp.errors import UnsupportedError
from polyamp.trace import Trace
from polyamp_conformance.cases import Case, all_cases, select
from polyamp_conformance.cases.base import Context
from polyamp_conformance.targets import ORACLE, folder_name, load_target

__all__ = ["Job", "events_path", "main", "trace_path"]


@dataclass(frozen=True)
class Job:
    """What one worker does."""

    backend: str
    device: str
    seed: int
    directory: str
    families: tuple[str, ...] = field(default=())
    patterns: tuple[str, ...] = field(default=())

    def cases(self) -> list[Case]:
        return select(all_cases(self.seed), self.families, self.patterns)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def events_path(directory: Path, backend: str) -> Path:
    return directory / "workers" / f"{folder_name(backend)}.jsonl"


def trace_path(directory: Path, backend: str, case: str, execution: str) -> Path:
    return directory / "traces" / folder_name(backend) / f"{case.replace('/', '.')}@{execution}.jsonl"


def main(argument: str) -> None:
    """Runs one job."""
    job = Job(**json.loads(argument))
    directory = Path(job.directory)
    path = events_path(directory, job.backend)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as events:
        _Worker(job, directory, events).run()


class _Worker:
    def __init__(self, job: Job, directory: Path, events: TextIO) -> None:
        self.job, self.directory, self.events = job, directory, events

    def emit(self, event: str, **facts: Any) -> None:
        self.events.write(json.dumps({"event": event, **facts}) + "\n")
        self.events.flush()

    def run(self) -> None:
        try:
            backend = load_target(self.job.backend)
            capabilities = backend.capabilities()
            versions, probe = dict(backend.versions()), dict(backend.probe(self.job.device))
        except Exception as error:
            self.emit("broken", message=_message(error), traceback=traceback.format_exc())
            return
        plan = list(self.plan(capabilities))
        self.emit("preflight", versions=versions, probe=probe, devices=list(capabilities.devices), cases=len(plan))
        header = {"polyamp": polyamp.__version__, "backend": self.job.backend, "versions": versions, "device": self.job.device, "environment": probe}
        for case, execution in plan:
            self.observe(case, execution, backend, header)
        self.emit("end")

    def plan(self, capabilities: Capabilities) -> Iterator[tuple[Case, Execution]]:
        unclaimed_device = self.job.device not in capabilities.devices
        for case in self.job.cases():
            lacking = [f"device {self.job.device}"] if unclaimed_device else case.needs.lacking(case.family, capabilities, self.job.device)
            if lacking:
                self.emit("not claimed", case=case.name, execution="-", message=f"{self.job.backend} does not claim {', '.join(lacking)}")
                continue
            executions = capabilities.executions if case.every_execution else capabilities.executions[:1]
            yield from ((case, execution) for execution in executions)

    def observe(self, case: Case, execution: Execution, backend: Backend, header: Mapping[str, Any]) -> None:
        self.emit("start", case=case.name, execution=execution)
        began = time.perf_counter()
        is_oracle = self.job.backend == ORACLE
        references = self.directory / "reference"
        context = Context(backend, self.job.device, execution, references, is_oracle)
        try:
            if is_oracle and case.prepare is not None:
                case.prepare(references)
            path = trace_path(self.directory, self.job.backend, case.name, execution)
            with Trace.writer(path, {**header, "execution": execution, "case": case.name, **case.header()}) as writer:
                observation = case.observe(context)
                while True:
                    try:
                        writer.append(next(observation))
                    except StopIteration as stop:
                        writer.close(stop.value)
                        break
        except UnsupportedError as error:
            self.emit("not claimed", case=case.name, execution=execution, message=str(error))
        except Exception as error:
            self.emit("error", case=case.name, execution=execution, message=_message(error), traceback=traceback.format_exc())
        else:
            self.emit("done", case=case.name, execution=execution, seconds=round(time.perf_counter() - began, 3))


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(sys.argv[1])
