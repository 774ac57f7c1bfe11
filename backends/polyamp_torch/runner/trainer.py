"""Trainer of the conformance suite, over `polyamp_torch.autocast` and `polyamp_torch.GradScaler`.

Rules (docs/spec.md, section 9)
- The step is the one that a user writes: autocast, `scale(loss).backward()`, `step(optimizer)`, `update()`.
- "compiled" runs forward and loss, and with them backward, as one compiled graph; scaler and optimizer are the same.
- Optimizer slots exist from the start, as zeros: torch would copy the first gradient into an absent momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyamp.backend import Execution, Snapshot
from polyamp.errors import UnsupportedError
from polyamp.task import Array, OptimizerSpec, StepOutcome, TrainingTask
from polyamp_torch.grad_scaler import GradScaler
from polyamp_torch.runner.compiler import compile_whole
from polyamp_torch.runner.model import TaskModel, task_loss

__all__ = ["SLOTS", "TorchTrainer"]

SLOTS: dict[str, dict[str, str]] = {"sgd": {"v": "momentum_buffer"}, "adamw": {"m": "exp_avg", "v": "exp_avg_sq"}}
"""Optimizer -> slot name of the suite -> torch's name of it."""


@cache
def _compiled_loss(device: str) -> Callable[[TaskModel, Tensor, Tensor], Tensor]:
    """One compiled function for all tasks: a second task of the same structure needs no compilation."""
    return compile_whole(task_loss, device)


class TorchTrainer:
    """Implements `polyamp.backend.Trainer`.

    Args:
        task: workload; its parameters are copied.
        device: torch device.
        execution: side of the compile boundary.

    Raises:
        polyamp.UnsupportedError: an optimizer that torch is not driven with here.
    """

    def __init__(self, task: TrainingTask, device: str, execution: Execution) -> None:
        self._device = device
        self._model = TaskModel(task, device)
        self._parameters = self._model.by_name
        self._spec = task.optimizer
        self._optimizer = _optimizer(task.optimizer, list(self._parameters.values()))
        self._fill_slots({slot: {} for slot in SLOTS[task.optimizer.name]}, 0)
        self._scaler = GradScaler(device, loss_scale=task.loss_scale)
        self._loss = task_loss if execution == "eager" else _compiled_loss(device)
        self._taken = 0

    def step(self, inputs: Array, targets: Array, loss_factor: float = 1.0) -> StepOutcome:
        self._optimizer.zero_grad()
        loss = self._loss(self._model, self._place(inputs), self._place(targets))
        self._scaler.scale(loss * loss_factor).backward()  # type: ignore[no-untyped-call]
        return self._finish(float(loss.item()))

    def apply(self, gradients: Mapping[str, Array]) -> StepOutcome:
        for name, parameter in self._parameters.items():
            parameter.grad = self._place(gradients[name]) if name in gradients else None
        self._scaler.scale(())  # the gradients come scaled: nothing is left to scale in this step
        return self._finish(math.nan)

    def snapshot(self) -> Snapshot:
        slots = SLOTS[self._spec.name]
        state = self._optimizer.state
        return Snapshot(
            parameters={name: _array(parameter) for name, parameter in self._parameters.items()},
            slots={slot: {name: _array(state[p][key]) for name, p in self._parameters.items()} for slot, key in slots.items()},
            optimizer_steps=self._taken,
            loss_scale=self._scaler.state_dict(),
        )

    def restore(self, snapshot: Snapshot) -> None:
        self._scaler.load_state_dict(snapshot.loss_scale)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._place(snapshot.parameters[name]))
        self._fill_slots(snapshot.slots, snapshot.optimizer_steps)
        self._taken = snapshot.optimizer_steps

    def predict(self, inputs: Array) -> Array:
        with torch.no_grad():
            return _array(self._model(self._place(inputs)).float())

    def _finish(self, loss: float) -> StepOutcome:
        self._scaler.step(self._optimizer)
        self._scaler.update()
        record = self._scaler.last_step
        assert record is not None, "update() records the step"
        if not record.skipped:
            self._taken += 1
            self._note_velocity()
        return StepOutcome(record.scale, record.scale_after, record.skipped, loss)

    def _note_velocity(self) -> None:
        """Without momentum torch keeps no velocity; it is the gradient then."""
        if self._spec.name == "sgd" and self._spec.hyperparameters["momentum"] == 0:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    self._optimizer.state[parameter]["momentum_buffer"] = parameter.grad.clone()

    def _fill_slots(self, slots: Mapping[str, Mapping[str, Array]], steps: int) -> None:
        for name, parameter in self._parameters.items():
            state: dict[str, Any] = {"step": torch.tensor(float(steps))} if self._spec.name == "adamw" else {}
            for slot, key in SLOTS[self._spec.name].items():
                state[key] = self._place(slots[slot][name]) if name in slots[slot] else torch.zeros_like(parameter)
            self._optimizer.state[parameter] = state

    def _place(self, values: Array) -> Tensor:
        placed = torch.tensor(np.ascontiguousarray(values), device=self._device)
        return placed.long() if placed.dtype is torch.int32 else placed


def _optimizer(spec: OptimizerSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    h = spec.hyperparameters
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, lr=h["learning_rate"], momentum=h["momentum"])
    if spec.name == "adamw":
        return torch.optim.AdamW(parameters, lr=h["learning_rate"], betas=(h["beta1"], h["beta2"]), eps=h["epsilon"], weight_decay=h["weight_decay"])
    raise UnsupportedError(f"optimizer {spec.name!r}: the torch backend offers {', '.join(SLOTS)}")


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy().copy()
