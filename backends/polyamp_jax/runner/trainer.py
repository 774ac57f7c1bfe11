"""Trainer and scale driver of the conformance suite, over the public `MixedPrecision` and `LossScaleState`.

Rules (docs/spec.md, section 9)
- "compiled" is one jitted step that donates its state. "eager" runs operation by operation, with `jax.disable_jit`: branches included.
- The scale is always an argument of the step: XLA cancels a constant one.
- Snapshots are numpy copies, because the arrays they come from are donated to the next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from polyamp.backend import Execution, Snapshot
from polyamp.loss_scale import LossScale
from polyamp.task import Array, StepOutcome, TrainingTask
from polyamp_jax.finite import all_finite
from polyamp_jax.loss_scale import LossScaleState
from polyamp_jax.mixed_precision import MixedPrecision, TrainState
from polyamp_jax.runner import model, optimizers

if TYPE_CHECKING:
    from jax import Device

__all__ = ["JaxScaleDriver", "JaxTrainer"]


class _Runner:
    """Runs pure functions on one device, on one side of the compile boundary."""

    def __init__(self, device: Device, execution: Execution) -> None:
        self.device = device
        self.eager = execution == "eager"

    def prepare(self, function: Callable[..., Any], *, donate: bool = True) -> Callable[..., Any]:
        if self.eager:
            return self._placed(function)
        return self._placed(jax.jit(function, donate_argnums=(0,) if donate else ()))

    def _placed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with jax.default_device(self.device), jax.disable_jit() if self.eager else contextlib.nullcontext():
                return function(*args)

        return run

    def put(self, tree: Any) -> Any:
        """Copies a tree to the device; a later donation leaves the given arrays alone."""
        return jax.device_put(jax.tree.map(lambda leaf: np.array(leaf), tree), self.device)


class JaxScaleDriver:
    """Implements `polyamp.backend.ScaleDriver` with real gradients through `all_finite` and `LossScaleState.update`."""

    def __init__(self, config: LossScale, device: Device, execution: Execution) -> None:
        self._runner = _Runner(device, execution)
        self._state = self._runner.put(LossScaleState.init(config))
        self._update = self._runner.prepare(lambda state, grads: state.update(all_finite(grads)))
        good = {"a": np.ones((2, 3), np.float32), "b": np.ones((4,), np.float32)}
        bad = {"a": good["a"], "b": np.array([1, 1, np.inf, 1], np.float32)}
        self._gradients = {True: self._runner.put(good), False: self._runner.put(bad)}

    def update(self, finite: bool) -> None:
        self._state = self._update(self._state, self._gradients[finite])

    def state_dict(self) -> Mapping[str, Any]:
        return self._state.state_dict()

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        self._state = self._runner.put(LossScaleState.from_state_dict(mapping, self._state.config))


class JaxTrainer:
    """Implements `polyamp.backend.Trainer`."""

    def __init__(self, task: TrainingTask, device: Device, execution: Execution) -> None:
        self.task = task
        self._runner = _Runner(device, execution)
        self._mp = MixedPrecision(task.policy, optimizers.build(task.optimizer), task.loss_scale)
        self._state: TrainState = self._runner.put(self._mp.init(dict(task.parameters)))
        self._step = self._runner.prepare(self._train)
        self._apply = self._runner.prepare(self._mp.apply_gradients)
        self._predict = self._runner.prepare(lambda params, x: model.forward(task, self._mp.cast_to_compute(params), x), donate=False)

    def step(self, inputs: Array, targets: Array, loss_factor: float = 1.0) -> StepOutcome:
        x, y, factor = self._runner.put((inputs, targets, np.float32(loss_factor)))
        return self._outcome(partial(self._step, self._state, x, y, factor))

    def apply(self, gradients: Mapping[str, Array]) -> StepOutcome:
        scaled = self._runner.put({name: np.asarray(gradients[name], np.float32) for name in self.task.parameters})
        return self._outcome(lambda: (self._apply(self._state, scaled), np.nan))

    def snapshot(self) -> Snapshot:
        state = self._state
        slots = optimizers.get_slots(self.task.optimizer, state.opt_state)
        return Snapshot(_numpy(state.params), _numpy(slots), int(optimizers.get_steps(state.opt_state)), state.loss_scale.state_dict())

    def restore(self, snapshot: Snapshot) -> None:
        fresh = self._mp.init({name: snapshot.parameters[name] for name in self.task.parameters})
        slots = {slot: {name: values[name] for name in self.task.parameters} for slot, values in snapshot.slots.items()}
        opt_state = optimizers.set_slots(self.task.optimizer, fresh.opt_state, slots, np.int32(snapshot.optimizer_steps))
        loss_scale = LossScaleState.from_state_dict(snapshot.loss_scale, self._state.loss_scale.config)
        self._state = self._runner.put(replace(fresh, opt_state=opt_state, loss_scale=loss_scale))

    def predict(self, inputs: Array) -> Array:
        return np.asarray(self._predict(self._state.params, self._runner.put(inputs)), np.float32)

    def _train(self, state: TrainState, x: Any, y: Any, factor: Any) -> tuple[TrainState, Any]:
        def loss_fn(params: Any) -> tuple[Any, Any]:
            loss = model.loss(self.task, model.forward(self.task, params, x), y)
            return loss * factor, loss

        (_, loss), grads = self._mp.value_and_grad(loss_fn, has_aux=True)(state)
        return self._mp.apply_gradients(state, grads), loss

    def _outcome(self, advance: Callable[[], tuple[TrainState, Any]]) -> StepOutcome:
        before = float(self._state.loss_scale.scale)
        self._state, loss = advance()
        after = self._state.loss_scale
        return StepOutcome(before, float(after.scale), bool(after.last_skipped), float(loss))


def _numpy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.array(leaf), tree)
