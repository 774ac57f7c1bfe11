"""Records of steps, kept on the device and read when somebody asks.

Rules (docs/spec.md, section 6)
- Taking a record waits for nothing: it holds references to the step's tensors.
- Reading it waits for the device once for any number of steps.
- Reasons of a skip: `"forward"` when a loss itself was not finite; else `"overflow"` when a gradient held an infinity and `"nan"` when all
  non-finite values were NaN; None where the gradients were never looked at on the way (fused optimizers). A step without any gradient
  is taken, with the reason `"no_gradients"`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyamp.trace import StepRecord, TraceWriter
from polyamp_torch.loss_scale_state import ScaleState

__all__ = ["PendingRecord", "TraceBuffer", "resolve"]


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """A step whose numbers are still on the device.

    Attributes:
        before: state in force for the step.
        after: state for the next one.
        flags: one 0-d flag an optimizer.
        losses: detached 1-element losses that were scaled in this step.
        has_inf: 0-d bool, whether a gradient of a skipped step held an infinity; None where nobody looked.
        no_gradients: whether no parameter of any optimizer had a gradient.
    """

    before: ScaleState
    after: ScaleState
    flags: tuple[Tensor, ...]
    losses: tuple[Tensor, ...]
    has_inf: Tensor | None
    no_gradients: bool

    def scalars(self) -> list[Tensor]:
        """All numbers of the record, as 0-d tensors in the order in which `resolve` takes them."""
        has_inf = [] if self.has_inf is None else [self.has_inf]
        return [self.before.scale, self.after.scale, *self.flags, *has_inf, *self.losses]


def resolve(pending: Sequence[PendingRecord]) -> list[StepRecord]:
    """Reads records on the host, with two reads in all."""
    if not pending:
        return []
    device = pending[0].before.scale.device
    scalars = [scalar.reshape(()).to(device, torch.float32, non_blocking=True) for record in pending for scalar in record.scalars()]
    numbers = iter(torch.stack(scalars).tolist())
    steps = torch.stack([record.before.steps for record in pending]).tolist()
    return [_record(record, step, [next(numbers) for _ in record.scalars()]) for record, step in zip(pending, steps, strict=True)]


def _record(pending: PendingRecord, step: int, numbers: list[float]) -> StepRecord:
    scale, scale_after, *rest = numbers
    count = len(pending.flags)
    flags, rest = rest[:count], rest[count:]
    has_inf = None if pending.has_inf is None else bool(rest.pop(0))
    skipped = any(flags)
    loss = torch.tensor(rest)
    reason: str | None = None
    if skipped:
        reason = {None: None, True: "overflow", False: "nan"}[has_inf]
        reason = reason if bool(loss.isfinite().all()) else "forward"
    elif pending.no_gradients:
        reason = "no_gradients"
    return StepRecord(
        step=step,
        scale=scale,
        scale_after=scale_after,
        skipped=skipped,
        reason=reason,
        loss=rest[0] if len(rest) == 1 else None,
        values={"optimizers": float(count), "skipped_optimizers": sum(flags)} if count > 1 else {},
    )


class TraceBuffer:
    """Collects records and writes them to a trace every `every` steps, and what is left when it is dropped or the program ends.

    Args:
        writer: open trace.
        every: steps between two reads of the device, >= 1.
        owned: whether nobody else holds the writer, so that dropping this buffer ends its file.
    """

    def __init__(self, writer: TraceWriter, every: int, *, owned: bool) -> None:
        self.writer = writer
        self._every = every
        self._pending: list[PendingRecord] = []
        # A script that forgets close() loses no step; the footer is what it goes without.
        self._rescue = weakref.finalize(self, _rescue, self._pending, writer, owned)

    def add(self, record: PendingRecord) -> None:
        self._pending.append(record)
        if len(self._pending) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Writes what was collected; waits for the device."""
        _write(self._pending, self.writer)

    def close(self) -> None:
        """Writes the rest and the footer."""
        self.flush()
        self._rescue.detach()
        self.writer.close()


def _write(pending: list[PendingRecord], writer: TraceWriter) -> None:
    records = resolve(pending)
    pending.clear()
    if not writer.closed:
        writer.extend(records)


def _rescue(pending: list[PendingRecord], writer: TraceWriter, owned: bool) -> None:
    _write(pending, writer)
    if owned:
        writer.abandon()
