"""Step ring: the last steps of the optimizer, kept on the device, so that each one reaches the trace without a host read a step.

Rules (docs/spec.md, section 6)
- Two variables of `capacity` rows: `scales` float32 (scale, scale after) and `marks` int32 (step, reason code). Step s lies in row s mod capacity.
- A row carries its step's number: what is left over from an earlier run is recognised, and what was overwritten is noticed.
- Reasons: "overflow" where a gradient held an infinity, or left float32 when it was unscaled; "nan" where all that was not finite was NaN. A step
  without any gradient is taken, with the reason "no_gradients".
- The rows are working memory: they are not written to checkpoints, and loading a state clears them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from polyamp import StepRecord
from polyamp_keras.native import host

__all__ = ["NONFINITE_INF", "NONFINITE_NAN", "NO_GRADIENTS", "TAKEN", "StepRing"]

Tensor = Any

TAKEN, NONFINITE_INF, NONFINITE_NAN, NO_GRADIENTS = 0, 1, 2, 3
_REASONS = {TAKEN: None, NONFINITE_INF: "overflow", NONFINITE_NAN: "nan", NO_GRADIENTS: "no_gradients"}
_SKIPPED = (NONFINITE_INF, NONFINITE_NAN)
_EMPTY = -1


class StepRing:
    """The two variables and what is done with them.

    Args:
        scales: variable, float32, (capacity, 2).
        marks: variable, int32, (capacity, 2).
    """

    def __init__(self, scales: Any, marks: Any) -> None:
        self.scales = scales
        self.marks = marks
        self.capacity = int(scales.shape[0])

    def write(self, step: Tensor, scale: Tensor, scale_after: Tensor, code: Tensor) -> None:
        """Records one step, on the device."""
        row = ops.reshape(ops.mod(step, self.capacity), (1, 1))
        self.scales.assign(ops.scatter_update(self.scales.value, row, ops.reshape(ops.stack([scale, scale_after]), (1, 2))))
        self.marks.assign(ops.scatter_update(self.marks.value, row, ops.reshape(ops.stack([step, code]), (1, 2))))

    def clear(self) -> None:
        self.marks.assign(np.full((self.capacity, 2), _EMPTY, dtype="int32"))

    def read(self, since: int, until: int) -> tuple[StepRecord, ...]:
        """Records of the steps in [since, until) that the ring still holds, in order. One host read."""
        marks, scales = host(self.marks), host(self.scales)
        records = []
        for step in range(max(since, until - self.capacity), until):
            row = step % self.capacity
            if int(marks[row, 0]) != step:
                continue
            code = int(marks[row, 1])
            scale, scale_after = (float(value) for value in scales[row])
            records.append(StepRecord(step=step, scale=scale, scale_after=scale_after, skipped=code in _SKIPPED, reason=_REASONS[code]))
        return tuple(records)
