"""Runner: the oracle first, then one process per backend, then judgement on the traces.

Rules (docs/spec.md, section 9.1)
- A crash, a hang or a backend that does not load is that backend's failure and loses nothing of the others.
- A named backend that is missing fails before anything starts. Cases that were planned and not reached are "not run", never passed.
- An output folder is never mixed with another run: it must be new or empty, or hold an earlier run and `force` be given.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import polyamp
from polyamp.errors import PolyampError
from polyamp.registry import available_backends
from polyamp_conformance.judgement import judge_worker
from polyamp_conformance.results import FILE_NAME, RunResults
from polyamp_conformance.targets import ORACLE, check_target, folder_name, target_environment
from polyamp_conformance.worker import Job, events_path

__all__ = ["Options", "Progress", "default_jobs", "run"]

_OWN = ("reference", "traces", "workers", FILE_NAME, "junit.xml", "report.html")
_POLL_SECONDS = 0.1
_START_SECONDS = 120.0  # importing a framework on a busy machine is no hang
Progress = Callable[[str, int, int, str], None]
"""Called with backend, cases done, cases planned (0: not known yet) and what it is doing."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
        backends: target names; empty means every registered backend whose framework is installed.
        device: device of all targets but the oracle.
        families: only these case families.
        patterns: only cases whose name matches one of these shell patterns.
        seed: base seed of the training workloads.
        directory: output folder.
        force: whether to replace an earlier run in it.
        jobs: processes at a time.
        timeout: seconds without any sign of life after which a process counts as hung.
    """

    directory: Path
    backends: tuple[str, ...] = ()
    device: str = "cpu"
    families: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    seed: int = 0
    force: bool = False
    jobs: int = field(default_factory=lambda: default_jobs())
    timeout: float = 300.0


def default_jobs() -> int:
    """One process per core that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def run(options: Options, progress: Progress = lambda *_: None) -> RunResults:
    """Runs the suite and writes `results.jsonl` and `junit.xml` into the output folder.

    Raises:
        UnknownBackendError, MissingFrameworkError: a named backend can't be run.
        PolyampError: no case matches, no backend is installed, or the output folder is in use.
    """
    names = tuple(dict.fromkeys(options.backends or available_backends()))
    names = tuple(name for name in names if name != ORACLE)
    if not names and ORACLE not in options.backends:
        raise PolyampError("no backend is installed; run `polyamp backends` to see what to install")
    for name in names:
        check_target(name)
    if not _job(ORACLE, options).cases():
        raise PolyampError(f"no case matches families {list(options.families)} and patterns {list(options.patterns)}; see docs/spec.md, section 9")
    _prepare(options)
    began = datetime.now(UTC)
    seconds: dict[str, float] = {}
    deaths: dict[str, str] = {}
    for group in ([ORACLE], list(names)):
        _run_group(group, options, progress, seconds, deaths)
    outcomes = [
        judge_worker(
            options.directory,
            _job(name, options),
            deaths.get(name, ""),
            seconds.get(name, 0.0),
        )
        for name in (ORACLE, *names)
    ]
    shutil.rmtree(options.directory / "reference", ignore_errors=True)  # a hundred megabytes that the oracle makes again at will
    about = {
        "polyamp": polyamp.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device": options.device,
        "seed": options.seed,
        "date": began.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - began).total_seconds(), 1),
    }
    results = RunResults(about, tuple(t for t, _ in outcomes), tuple(r for _, rs in outcomes for r in rs))
    results.write(options.directory)
    return results


def _job(name: str, options: Options) -> Job:
    device = "cpu" if name == ORACLE else options.device
    return Job(name, device, options.seed, str(options.directory.resolve()), options.families, options.patterns)


def _prepare(options: Options) -> None:
    directory = options.directory
    try:
        if directory.exists() and any(directory.iterdir()):
            earlier = (directory / FILE_NAME).exists() or (directory / "workers").is_dir()
            if not earlier:
                raise PolyampError(f"{directory} is not empty and holds no earlier run; it is left as it is, choose another folder with -o")
            if not options.force:
                raise PolyampError(f"{directory} holds an earlier run; it is left as it is, choose another folder with -o or pass --force")
            for name in _OWN:
                path = directory / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PolyampError(f"can't use {directory} as the output folder: {error.strerror}") from error


class _Process:
    """A worker process and what it has reported so far."""

    def __init__(self, name: str, options: Options) -> None:
        self.name, self.began = name, time.monotonic()
        directory = options.directory.resolve()
        job = _job(name, options)
        self.events = events_path(directory, name)
        self.events.parent.mkdir(parents=True, exist_ok=True)
        self.log: IO[bytes] = (self.events.parent / f"{folder_name(name)}.log").open("wb")
        command = [sys.executable, "-m", "polyamp_conformance.worker", job.to_json()]
        self.process = subprocess.Popen(command, env=_environment(name), stdout=self.log, stderr=subprocess.STDOUT)
        self.read, self.done, self.planned = 0, 0, 0
        self.doing, self.last_sign = "starting", self.began

    def poll(self) -> bool:
        """Reads new events; returns whether the process has ended."""
        ended = self.process.poll() is not None
        text = self.events.read_text("utf-8") if self.events.exists() else ""
        fresh = text[self.read : text.rfind("\n") + 1]
        if fresh:
            self.read, self.last_sign = self.read + len(fresh), time.monotonic()
        for line in fresh.splitlines():
            event = json.loads(line)
            self.planned = event.get("cases", self.planned)
            self.done += event["event"] in ("done", "error")
            self.doing = event.get("case", self.doing) if event["event"] != "end" else "done"
        return ended

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _environment(name: str) -> Mapping[str, str]:
    return {**os.environ, **target_environment(name)}


def _run_group(names: Sequence[str], options: Options, progress: Progress, seconds: dict[str, float], deaths: dict[str, str]) -> None:
    waiting, running = list(names), list[_Process]()
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                running.append(_Process(waiting.pop(0), options))
            for process in list(running):
                ended = process.poll()
                silent = time.monotonic() - process.last_sign
                limit = options.timeout if process.planned else max(options.timeout, _START_SECONDS)
                if not ended and silent > limit:
                    process.kill()
                    ended, deaths[process.name] = True, f"hung: no sign of life for {limit:g} s in {process.doing}"
                if ended:
                    running.remove(process)
                    process.log.close()
                    seconds[process.name] = round(time.monotonic() - process.began, 1)
                    code = process.process.returncode
                    if code and process.name not in deaths:
                        deaths[process.name] = f"its process ended with {_ending(code)} in {process.doing}: {_tail(Path(process.log.name))}"
                progress(process.name, process.done, process.planned, process.doing)
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running:  # Ctrl-C or an error here: no process is left behind
            process.kill()
            process.log.close()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _tail(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "no output"
