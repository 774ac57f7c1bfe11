"""A loss scaler with mutable state, written from docs/spec.md, sections 3.2 and 7.

It takes configuration and state mapping from the core, as any backend does, and the arithmetic from nobody: float32 comes from the
standard library's arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from polyamp import LossScale, LossScaleState
from polyamp.state import load_state_dict, state_dict

__all__ = ["Scaler"]


class Scaler:
    """Counts steps and moves the scale. Fields that are not in the mapping hold nothing that matters."""

    def __init__(self, loss_scale: LossScale) -> None:
        self._adopt(loss_scale, loss_scale.init())

    def update(self, finite: bool) -> None:
        """Takes note of one step."""
        self.steps += 1
        if finite:
            self._finite_step()
        else:
            self._skipped_step()

    def state_dict(self) -> Mapping[str, Any]:
        """Portable mapping of configuration and state."""
        state = LossScaleState(
            scale=self._scale[0],
            good_steps=self.good_steps,
            hysteresis_left=self.patience,
            skipped=self.skipped,
            consecutive_skips=self.skips_in_a_row,
            steps=self.steps,
        )
        return state_dict(self.config, state)

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        """Continues from a mapping; one that can't be loaded leaves everything as it was."""
        self._adopt(*load_state_dict(mapping, self.config))

    def _adopt(self, config: LossScale, state: LossScaleState) -> None:
        self.config = config
        # One float32 each; what is assigned to an element is rounded to nearest even.
        self._scale, self._growth, self._backoff, self._floor, self._ceiling = (
            array("f", [value]) for value in (state.scale, config.growth_factor, config.backoff_factor, config.min_scale, config.max_scale)
        )
        self.good_steps, self.patience = state.good_steps, state.hysteresis_left
        self.skipped, self.skips_in_a_row, self.steps = state.skipped, state.consecutive_skips, state.steps

    def _finite_step(self) -> None:
        self.skips_in_a_row = 0
        self.good_steps += 1
        due = self.config.kind == "dynamic" and self.good_steps >= self.config.growth_interval
        if due:
            self.good_steps = 0
            grown = array("f", [self._scale[0] * self._growth[0]])
            if grown[0] <= self._ceiling[0]:
                self._scale = grown
        if due or self.config.hysteresis_refill == "finite":
            self.patience = self.config.hysteresis

    def _skipped_step(self) -> None:
        self.good_steps = 0
        self.skipped += 1
        self.skips_in_a_row += 1
        if self.config.kind != "dynamic":
            return
        if self.patience > 1:
            self.patience -= 1
        else:
            self._scale[0] = max(array("f", [self._scale[0] * self._backoff[0]])[0], self._floor[0])
