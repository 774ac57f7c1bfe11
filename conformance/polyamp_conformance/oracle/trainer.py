"""The step as a transaction, written out: verdict, unscale, optimizer, one update of the scale.

Each stage is a method, so that tests can break one at a time and see the suite notice.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polyamp.backend import Snapshot
from polyamp.loss_scale import LossScale, LossScaleState
from polyamp.state import load_state_dict, state_dict
from polyamp.task import StepOutcome, TrainingTask
from polyamp_conformance.data import Array
from polyamp_conformance.oracle import network, optimizers
from polyamp_conformance.oracle.ops import Ops
from polyamp_conformance.oracle.rounding import Rounder
from polyamp_conformance.oracle.tape import Recorder

__all__ = ["OracleTrainer"]

Arrays = Mapping[str, Array]


class OracleTrainer:
    """Trains a task in numpy; implements `polyamp.backend.Trainer`."""

    def __init__(self, task: TrainingTask) -> None:
        self.task = task
        self.weights: dict[str, Array] = {k: np.array(v, np.float32) for k, v in task.parameters.items()}
        self.slots: dict[str, dict[str, Array]] = {
            slot: {k: np.zeros_like(v) for k, v in self.weights.items()} for slot in optimizers.SLOTS[task.optimizer.name]
        }
        self.optimizer_steps = 0
        self.config: LossScale = task.loss_scale
        self.state: LossScaleState = self.config.init()

    def step(self, inputs: Array, targets: Array, loss_factor: float = 1.0) -> StepOutcome:
        with np.errstate(over="ignore", invalid="ignore"):
            seed = float(np.float32(self.state.scale) * np.float32(loss_factor))
        result = network.gradients(self.task, self.compute_weights(), inputs, targets, seed)
        return self._finish(result.scaled, result.loss)

    def apply(self, gradients: Arrays) -> StepOutcome:
        return self._finish({k: np.asarray(g, np.float32) for k, g in gradients.items()}, float("nan"))

    def _finish(self, scaled: Arrays, loss: float) -> StepOutcome:
        before = self.state
        with np.errstate(all="ignore"):
            unscaled = self.unscale(scaled, before)
            finite = not self.config.check or self.is_finite(scaled, unscaled)
            if finite:
                self.optimizer_step(unscaled)
            else:
                self.skip(unscaled)
        self.state = self.transition(before, finite)
        return StepOutcome(before.scale, self.state.scale, not finite, loss)

    def compute_weights(self) -> Arrays:
        return self.weights

    def unscale(self, scaled: Arrays, state: LossScaleState) -> dict[str, Array]:
        inverse = np.float32(1) / np.float32(state.scale)
        return {k: g * inverse for k, g in scaled.items()}

    def is_finite(self, scaled: Arrays, unscaled: Arrays) -> bool:
        return all(np.isfinite(g).all() for g in (*scaled.values(), *unscaled.values()))

    def optimizer_step(self, unscaled: Arrays) -> None:
        self.optimizer_steps += 1
        self.weights, self.slots = optimizers.update(self.task.optimizer, self.weights, self.slots, unscaled, self.optimizer_steps)

    def skip(self, unscaled: Arrays) -> None:
        """A skipped step moves nothing."""

    def transition(self, state: LossScaleState, finite: bool) -> LossScaleState:
        return self.config.update(state, finite)

    def snapshot(self) -> Snapshot:
        slots = {slot: {k: v.copy() for k, v in values.items()} for slot, values in self.slots.items()}
        weights = {k: v.copy() for k, v in self.weights.items()}
        return Snapshot(weights, slots, self.optimizer_steps, state_dict(self.config, self.state))

    def restore(self, snapshot: Snapshot) -> None:
        self.config, self.state = load_state_dict(snapshot.loss_scale, self.config)
        self.weights = {k: np.array(snapshot.parameters[k], np.float32) for k in self.weights}
        self.slots = {slot: {k: np.array(snapshot.slots[slot][k], np.float32) for k in values} for slot, values in self.slots.items()}
        self.optimizer_steps = snapshot.optimizer_steps

    def predict(self, inputs: Array) -> Array:
        output, _ = network.forward(self.task, self.compute_weights(), inputs, Ops(Rounder(self.task.policy.compute_dtype), Recorder()))
        return output.value.astype(np.float32)
