"""Trace: the per-step record of scale, skip and reason, as append-only JSON Lines.

Rules (docs/spec.md, section 6)
- One header line, one line a step, one footer line with totals. A line is written whole and flushed.
- After a crash the file is valid up to its last whole line: reading drops a half-written last line and sets `truncated`.
  A damaged line anywhere else is an error that names the line.
- A record holds the scale in force for the step and the one after it. Non-finite numbers are written as the strings "inf", "-inf", "nan".
- Writing never replaces an existing file unless it is asked to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from polyamp.errors import TraceError

__all__ = ["REASONS", "SCHEMA_VERSION", "StepRecord", "Trace", "TraceWriter"]

SCHEMA_VERSION = 1
REASONS = ("overflow", "nan", "forward", "no_gradients", "injected")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step.

    Attributes:
        step: 0-based number of the step.
        scale: float32 scale in force for the step.
        scale_after: scale in force for the next one.
        skipped: whether the optimizer was left out.
        reason: why it was skipped, one of `REASONS`; None for a step that was taken, or where the backend can't tell.
        loss: unscaled loss, where it was recorded.
        digest: hash of the float32 master weights after the step, where it was asked for.
        values: further named numbers, such as headroom, non-finite counts or amax per tensor.
    """

    step: int
    scale: float
    scale_after: float
    skipped: bool
    reason: str | None = None
    loss: float | None = None
    digest: str | None = None
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """A trace in memory.

    Attributes:
        header: who ran what: backend, framework versions, device, policy, loss_scale, seed, workload, environment.
        records: the steps, in order.
        footer: totals; None when the run did not end cleanly.
        truncated: whether a half-written last line was dropped.
    """

    header: Mapping[str, Any]
    records: tuple[StepRecord, ...]
    footer: Mapping[str, Any] | None = None
    truncated: bool = False

    @property
    def skips(self) -> tuple[int, ...]:
        """Numbers of the skipped steps."""
        return tuple(r.step for r in self.records if r.skipped)

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Reads a trace file.

        Raises:
            TraceError: no such file, not a trace, an unknown schema version, or a damaged line that is not the last one.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise TraceError(f"can't read trace {path}: {error.strerror}") from error
        lines = data.split(b"\n")
        truncated = lines[-1] != b""
        whole = lines[:-1]
        if not whole:
            raise TraceError(f"{path} has no whole line: it is empty, or the run ended before its header was written")
        documents = [_decode(line, number, path) for number, line in enumerate(whole, 1)]
        header = documents[0]
        if header.get("kind") != "header":
            raise TraceError(f"{path}, line 1: expected a header, got kind {header.get('kind')!r}; is it a polyamp trace?")
        if header.get("schema") != SCHEMA_VERSION:
            raise TraceError(f"{path} has schema {header.get('schema')!r}, this polyamp reads {SCHEMA_VERSION}; upgrade polyamp")
        footer = documents.pop() if len(documents) > 1 and documents[-1].get("kind") == "footer" else None
        records = tuple(_record(document, number, path) for number, document in enumerate(documents[1:], 2))
        return cls(_strip(header), records, _strip(footer) if footer else None, truncated)

    @staticmethod
    def writer(path: str | Path, header: Mapping[str, Any] | None = None, *, overwrite: bool = False) -> TraceWriter:
        """Opens a new trace file for appending; use it as a context manager."""
        return TraceWriter(path, header or {}, overwrite=overwrite)

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes the whole trace to a new file."""
        with TraceWriter(path, self.header, overwrite=overwrite) as writer:
            writer.extend(self.records)


class TraceWriter:
    """Appends records to a trace file as they come.

    Raises:
        TraceError: the file exists and `overwrite` is False, or can't be created.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        reserved = {"kind", "schema"} & header.keys()
        if reserved:
            raise TraceError(f"header key {', '.join(sorted(reserved))} is the trace format's own; choose another name")
        text = _encode({"kind": "header", "schema": SCHEMA_VERSION, **header})
        try:
            if not self.path.parent.is_dir():
                self.path.parent.mkdir(parents=True)
        except OSError as error:
            raise TraceError(f"can't create the folder of trace {path}: {error.strerror}") from error
        try:
            self._file: TextIO = self.path.open("w" if overwrite else "x", encoding="utf-8", newline="\n")
        except FileExistsError:
            raise TraceError(f"trace {path} exists and is left as it is; choose another name, remove it, or pass overwrite=True") from None
        except OSError as error:
            raise TraceError(f"can't create trace {path}: {error.strerror}") from error
        self._steps = self._skipped = 0
        self._final_scale: float | None = None
        self._write(text)

    def append(self, record: StepRecord) -> None:
        """Writes one step and flushes it."""
        if record.reason is not None and record.reason not in REASONS:
            raise TraceError(f"reason {record.reason!r}; expected one of {', '.join(REASONS)} or None")
        self._write(_encode({"kind": "step", **{k: v for k, v in asdict(record).items() if v is not None and v != {}}}))
        self._steps += 1
        self._skipped += record.skipped
        self._final_scale = record.scale_after

    @property
    def closed(self) -> bool:
        """Whether the file is closed, with or without its footer."""
        return self._file.closed

    def extend(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            self.append(record)

    def close(self, totals: Mapping[str, Any] | None = None) -> None:
        """Writes the footer, with further `totals` such as an accuracy. A trace that is not closed stays readable."""
        if not self._file.closed:
            counted = {"steps": self._steps, "skipped": self._skipped, "final_scale": self._final_scale}
            self._write(_encode({"kind": "footer", **(totals or {}), **counted}))
            self._file.close()

    def abandon(self) -> None:
        """Closes the file without a footer: a reader sees that the run did not end cleanly."""
        self._file.close()

    def _write(self, text: str) -> None:
        self._file.write(text + "\n")
        self._file.flush()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()


_NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _plain(value: Any) -> Any:
    """JSON has no infinities or NaN: they travel as strings. Scalars and arrays of any framework become Python numbers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _encode(document: Mapping[str, Any]) -> str:
    return json.dumps(_plain(document), allow_nan=False, separators=(",", ":"), default=str)


def _decode(line: bytes, number: int, path: str | Path) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}, line {number} is damaged: {error}; lines before it are sound, cut the file there to read them") from error
    if not isinstance(document, dict):
        raise TraceError(f"{path}, line {number}: expected a JSON object, got {type(document).__name__}; is it a polyamp trace?")
    return document


_FIELDS = {f.name for f in fields(StepRecord)}


def _number(value: Any) -> float:
    return _NONFINITE[value] if isinstance(value, str) else float(value)


def _record(document: Mapping[str, Any], number: int, path: str | Path) -> StepRecord:
    try:
        if document.get("kind") != "step":
            raise ValueError(f"expected a step, got kind {document.get('kind')!r}")
        values: dict[str, Any] = {k: v for k, v in document.items() if k in _FIELDS}
        values |= {k: _number(values[k]) for k in ("scale", "scale_after", "loss") if k in values}
        values["values"] = {k: _number(v) for k, v in values.get("values", {}).items()}
        if not isinstance(values["skipped"], bool) or type(values["step"]) is not int:
            raise ValueError("step must be an integer and skipped a bool")
        return StepRecord(**values)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise TraceError(f"{path}, line {number} is not a step record: {error!r}") from error


def _strip(document: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in document.items() if k not in ("kind", "schema")}
