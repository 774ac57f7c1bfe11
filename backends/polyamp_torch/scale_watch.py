"""What the host knows of the scale without asking: a lower bound, and whether the run has stalled.

Rules (docs/spec.md, sections 3.4 and 4)
- The bound assumes that every step since the last read was skipped, so it never exceeds the scale. While it is at least 1, a finite scaled
  gradient can't unscale to infinity, and the second pass over the gradients is left out.
- A stall is found by a read that may lag; it is never missed, because the count of skips in a row only ends with a finite step.
"""

from __future__ import annotations

import torch

from polyamp import LossScale
from polyamp_torch.lagged_read import LaggedRead
from polyamp_torch.loss_scale_state import ScaleState

__all__ = ["ScaleWatch"]

_ROUNDING = 1 - 2**-23  # rounding lowers a float32 product by at most one part in 2^24


class ScaleWatch:
    """Follows the states of one scaler.

    Args:
        config: configuration in force.
        scale: scale in force now.
        device: device of the states.
    """

    def __init__(self, config: LossScale, scale: float, device: torch.device) -> None:
        self._factor = config.backoff_factor * _ROUNDING if config.kind == "dynamic" else 1.0
        self._min_scale = config.min_scale
        self._max_skips = config.max_consecutive_skips
        self._bound = scale
        self._updates = 0
        self._read = LaggedRead(device, 2)

    @property
    def may_overflow(self) -> bool:
        """Whether the scale may be below 1, so that unscaling may turn a finite gradient into infinity."""
        return self._bound < 1.0

    def follow(self, state: ScaleState) -> tuple[int, float] | None:
        """Takes note of the state after an update.

        Returns:
            Skips in a row and the scale, when they have reached `max_consecutive_skips`; else None.
        """
        self._updates += 1
        self._bound = max(self._bound * self._factor, self._min_scale)
        if self._max_skips is None and self._min_scale >= 1.0:
            return None
        self._read.put(self._updates, (state.consecutive_skips, state.scale))
        arrived = self._read.poll()
        if arrived is None:
            return None
        tag, (skips, scale) = arrived
        self._bound = max(scale * self._factor ** (self._updates - tag), self._min_scale)
        return (int(skips), scale) if self._max_skips is not None and skips >= self._max_skips else None
