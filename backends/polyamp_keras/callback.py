"""MixedPrecision callback: the trace of a `fit`, the scale and the skips in its logs, and warnings with the remedy.

Rules (docs/spec.md, sections 3.4 and 6)
- It observes; wrapping and scaling are the optimizer's. Nothing in training changes when it is left out.
- No hook runs after a batch, so Keras keeps dispatching batches asynchronously. The optimizer's ring is read every `drain_every` steps,
  before a batch, and at the end of an epoch: one host read for hundreds of steps.
- `self.model` is asked for at those moments alone: on the JAX backend that brings the optimizer's variables up to date.
- Put it first in `callbacks=[...]`: loggers that stand behind it see its keys; History and the progress bar always do.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import keras

import polyamp
from polyamp import LossScaleError, MisuseError, Policy, PolicyError, StepRecord, Trace
from polyamp.trace import TraceWriter
from polyamp_keras.advice import leaf_layers, scaling_advice
from polyamp_keras.loss_scale_optimizer import LossScaleOptimizer
from polyamp_keras.native import host
from polyamp_keras.versions import backend_name, versions

__all__ = ["MixedPrecision"]

_ON_STALL = ("raise", "stop", "warn")


class MixedPrecision(keras.callbacks.Callback):
    """Shows what the loss scale does during `fit`, and keeps it.

    Adds to the logs of every epoch: `loss_scale` (in force for the next step), `skipped_steps` (of the optimizer's whole life) and `skip_rate`
    (share of this epoch's steps).

    Args:
        trace: file to write the trace to, which must not exist; None writes none.
        header: further entries of the trace's header, e.g. `{"workload": "resnet", "seed": 0}`.
        overwrite: whether an existing trace file is replaced.
        on_stall: what happens after `max_consecutive_skips` skipped steps in a row: `"raise"` LossScaleStalled, `"stop"` training with a warning,
            or `"warn"` alone. It is noticed when the ring is read.
        drain_every: steps between two reads of the ring; defaults to half of its capacity, or to `max_consecutive_skips` where that is less.

    Raises:
        TraceError: on_train_begin, before any step: the trace file exists or can't be created.
        MisuseError: on_train_begin: a trace is asked for, but the optimizer is not `polyamp_keras.LossScaleOptimizer`.
        LossScaleStalled: during training, with `on_stall="raise"`.

    Example:
        >>> history = model.fit(x, y, callbacks=[polyamp_keras.MixedPrecision(trace="run.jsonl")])
        >>> history.history["loss_scale"], history.history["skipped_steps"]
    """

    def __init__(
        self,
        trace: str | Path | None = None,
        *,
        header: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        on_stall: Literal["raise", "stop", "warn"] = "raise",
        drain_every: int | None = None,
    ) -> None:
        super().__init__()
        if on_stall not in _ON_STALL:
            raise LossScaleError(f"on_stall={on_stall!r}: expected one of {', '.join(_ON_STALL)}")
        if drain_every is not None and (isinstance(drain_every, bool) or not isinstance(drain_every, int) or drain_every < 1):
            raise LossScaleError(f"drain_every={drain_every!r}: expected an integer >= 1, or None")
        self._path = trace
        self._header = dict(header or {})
        self._overwrite = overwrite
        self._on_stall = on_stall
        self._drain_every = drain_every
        self._writer: TraceWriter | None = None
        self._advised = False
        self._stall_reported = False
        self._next_step = 0
        self._batches_drained = 0
        self._due: float = math.inf
        self._epoch_start = (0, 0)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        model = self.model
        optimizer = model.optimizer
        advice = scaling_advice(model, optimizer)
        if advice and not self._advised:
            warnings.warn(advice, UserWarning, stacklevel=2)
        self._advised = True
        self._stall_reported = False
        if not isinstance(optimizer, LossScaleOptimizer):
            self._due = math.inf
            if self._path is not None:
                raise MisuseError(
                    f"trace={str(self._path)!r} needs the steps that polyamp_keras.LossScaleOptimizer records, the model is compiled with "
                    f"{type(optimizer).__name__}; wrap it, with loss_scale=polyamp.LossScale.none() where no scaling is wanted"
                )
            return
        self._due = self._interval(optimizer)
        per_execution = getattr(model, "steps_per_execution", 1)
        if self._due + per_execution > optimizer.ring_capacity:
            raise MisuseError(
                f"drain_every={self._due} and steps_per_execution={per_execution} overrun the optimizer's ring of {optimizer.ring_capacity} steps; "
                "lower drain_every or build LossScaleOptimizer with a larger ring_capacity="
            )
        self._next_step = int(optimizer.state_dict()["steps"])
        if self._path is not None:
            self._writer = Trace.writer(self._path, self._full_header(model, optimizer), overwrite=self._overwrite)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        self._batches_drained = 0
        if isinstance(optimizer, LossScaleOptimizer):
            state = optimizer.state_dict()
            # A callback that restores a checkpoint moves the counter between the hooks.
            self._next_step = int(state["steps"])
            self._epoch_start = (int(state["steps"]), int(state["skipped"]))

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if batch - self._batches_drained < self._due:
            return
        self._batches_drained = batch
        optimizer = self.model.optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            self._drain(optimizer, loss=None)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        logs = {} if logs is None else logs
        if not isinstance(optimizer, LossScaleOptimizer):
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and optimizer.built:
                logs["loss_scale"] = float(host(optimizer.dynamic_scale))
            return
        state = self._drain(optimizer, loss=logs.get("loss"))
        steps, skipped = self._epoch_start
        taken = int(state["steps"]) - steps
        logs["loss_scale"] = float(state["scale"])
        logs["skipped_steps"] = int(state["skipped"])
        logs["skip_rate"] = (int(state["skipped"]) - skipped) / taken if taken else 0.0

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _interval(self, optimizer: LossScaleOptimizer) -> int:
        if self._drain_every is not None:
            return self._drain_every
        half = optimizer.ring_capacity // 2
        return min(half, optimizer.loss_scale.max_consecutive_skips or half)

    def _full_header(self, model: keras.Model, optimizer: LossScaleOptimizer) -> dict[str, Any]:
        name = model.dtype_policy.name
        try:
            policy = str(Policy(name))
        except PolicyError:
            policy = name  # a quantized or custom Keras policy
        layers = dict(sorted(Counter(layer.dtype_policy.name for layer in leaf_layers(model)).items()))
        return {
            "backend": backend_name(),
            "polyamp": polyamp.__version__,
            "versions": versions(),
            "policy": policy,
            "layer_policies": layers,
            "loss_scale": str(optimizer.loss_scale),
            "first_step": self._next_step,
            **self._header,
        }

    def _drain(self, optimizer: LossScaleOptimizer, loss: float | None) -> dict[str, Any]:
        """Writes the steps since the last drain, looks for a stall, and returns the optimizer's state mapping."""
        state = optimizer.state_dict()
        steps = int(state["steps"])
        if self._writer is not None and steps > self._next_step:
            self._write(optimizer.recent_steps(self._next_step), steps)
        self._next_step = steps
        limit = optimizer.loss_scale.max_consecutive_skips
        if limit is None or int(state["consecutive_skips"]) < limit:
            self._stall_reported = False
        elif not self._stall_reported:
            self._stall_reported = True
            self._stall(optimizer, state, loss)
        return state

    def _write(self, records: tuple[StepRecord, ...], steps: int) -> None:
        assert self._writer is not None
        self._writer.extend(records)
        missing = steps - self._next_step - len(records)
        if missing:
            warnings.warn(
                f"the trace {self._writer.path} lacks {missing} steps before step {steps}: the optimizer's state was loaded, or its ring of steps "
                "was overrun",
                UserWarning,
                stacklevel=2,
            )

    def _stall(self, optimizer: LossScaleOptimizer, state: Mapping[str, Any], loss: float | None) -> None:
        error = optimizer.loss_scale.stalled_error(
            int(state["consecutive_skips"]), float(state["scale"]), loss_finite=None if loss is None else math.isfinite(loss)
        )
        if self._on_stall == "raise":
            if self._writer is not None:
                self._writer.__exit__(type(error), error, None)  # no footer: the run did not end cleanly
                self._writer = None
            raise error
        if self._on_stall == "stop":
            self.model.stop_training = True
        warnings.warn(f"{error}{'; training stops' if self._on_stall == 'stop' else ''}", UserWarning, stacklevel=2)
