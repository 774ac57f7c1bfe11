"""Errors of one replayed step, relative to the largest entry of each tensor.

Rules (docs/spec.md, section 9.4.4)
- SGD: the weight change, and the momentum.
- AdamW: both moments; and the weights against the written formula applied to the backend's own moments and step count, because where the
  true gradient is near zero the update's sign is noise.
- A skipped step: the number of elements that moved.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polyamp.backend import Snapshot
from polyamp.task import OptimizerSpec
from polyamp_conformance.cases.digest import moved
from polyamp_conformance.data import Array
from polyamp_conformance.oracle.optimizers import adamw_step

__all__ = ["step_errors"]


def step_errors(optimizer: OptimizerSpec, start: Snapshot, got: Snapshot, want: Snapshot, *, skipped: bool) -> dict[str, float]:
    """Error figures of a step for its record.

    Args:
        optimizer: optimizer of the task.
        start: state before the step.
        got: the backend's state after it.
        want: the oracle's state after it.
        skipped: whether the backend skipped.
    """
    if skipped:
        return {"moved": moved(start, got)}
    errors = {"slots_error": max(_error(got.slots[slot], want.slots[slot]) for slot in want.slots)}
    made = _difference(got.parameters, start.parameters)
    if optimizer.name == "sgd":
        wanted = _difference(want.parameters, start.parameters)
        errors["update_error"] = _error(made, wanted)
    else:
        own = {
            name: adamw_step(start.parameters[name], got.slots["m"][name], got.slots["v"][name], got.optimizer_steps, optimizer.hyperparameters)
            for name in start.parameters
        }
        errors["formula_error"] = _error(made, _difference(own, start.parameters))
    errors["gradient_ratio"] = _ratio(_gradients(optimizer, start, got), _gradients(optimizer, start, want))
    return errors


def _gradients(optimizer: OptimizerSpec, start: Snapshot, after: Snapshot) -> dict[str, Array]:
    """The unscaled gradients, up to a constant factor, as the first slot took them in: what it holds beyond its own decay."""
    slot, decay = ("v", "momentum") if optimizer.name == "sgd" else ("m", "beta1")
    kept = {name: optimizer.hyperparameters[decay] * np.asarray(v, np.float64) for name, v in start.slots[slot].items()}
    return _difference(after.slots[slot], kept)


def _difference(a: Mapping[str, Array], b: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.asarray(a[name], np.float64) - b[name] for name in b}


def _error(got: Mapping[str, Array], want: Mapping[str, Array]) -> float:
    """Largest deviation over the tensors, each relative to the largest wanted entry; infinite when anything is not finite."""
    worst = 0.0
    for name, reference in want.items():
        deviation = float(np.max(np.abs(np.asarray(got[name], np.float64) - reference), initial=0.0))
        worst = max(worst, deviation / max(float(np.max(np.abs(reference), initial=0.0)), 1e-30)) if np.isfinite(deviation) else np.inf
    return worst


def _ratio(got: Mapping[str, Array], want: Mapping[str, Array]) -> float:
    """Least-squares factor between two sets of tensors: 2 or 1/2 betrays unscaling with the wrong scale."""
    product = sum(float(np.vdot(np.asarray(got[name], np.float64), want[name])) for name in want)
    return product / max(sum(float(np.vdot(reference, reference)) for reference in want.values()), 1e-30)
