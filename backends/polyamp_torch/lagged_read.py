"""Reading device scalars on the host without waiting for the device.

Rules (docs/spec.md, section 3.4)
- On the CPU a read is free and immediate.
- On an accelerator a copy to pinned memory is started and looked at later: a value arrives some steps after it was put, never out of
  order, and at most one copy is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["LaggedRead"]


class LaggedRead:
    """One slot for a few scalars on their way to the host.

    Args:
        device: device of the tensors.
        count: how many scalars are put at a time.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._pinned = None if device.type == "cpu" else _pinned_buffer(count)
        self._event = None if device.type == "cpu" else torch.Event(device)
        self._waiting: tuple[int, Sequence[Tensor] | None] | None = None

    def put(self, tag: int, values: Sequence[Tensor]) -> None:
        """Sends 0-d tensors on their way, unless others still are.

        Args:
            tag: number that comes back with the values.
            values: 0-d tensors; they arrive as float32.
        """
        if self._waiting is not None:
            return
        if self._pinned is None or self._event is None:
            self._waiting = (tag, values)
            return
        self._pinned.copy_(torch.stack([value.float() for value in values]), non_blocking=True)
        self._event.record()
        self._waiting = (tag, None)

    def poll(self) -> tuple[int, list[float]] | None:
        """Tag and values that have arrived, or None; never waits."""
        if self._waiting is None:
            return None
        tag, values = self._waiting
        if values is not None:
            self._waiting = None
            return tag, [float(value.item()) for value in values]
        if self._pinned is None or self._event is None or not self._event.query():
            return None
        self._waiting = None
        return tag, self._pinned.tolist()


def _pinned_buffer(count: int) -> Tensor:
    """Host memory that a device copies to on its own."""
    return torch.zeros(count, dtype=torch.float32, pin_memory=True)
