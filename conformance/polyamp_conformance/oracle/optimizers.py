"""Optimizers of the oracle, in float32, one rounding per written operation.

Rules (docs/spec.md, section 9.2)
- SGD: v = momentum * v + g; w = w - learning_rate * v.
- AdamW: m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g^2; w = w - lr * ((m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd * w).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polyamp.task import OptimizerSpec
from polyamp_conformance.data import Array

__all__ = ["SLOTS", "adamw_step", "update"]

SLOTS = {"sgd": ("v",), "adamw": ("m", "v")}
_F32 = np.float32


def adamw_step(w: Array, m: Array, v: Array, t: int, hyper: Mapping[str, float]) -> Array:
    """New weights of AdamW from already updated moments, after t optimizer steps."""
    lr, b1, b2 = (_F32(hyper[k]) for k in ("learning_rate", "beta1", "beta2"))
    c1, c2 = _F32(1) - b1 ** _F32(t), _F32(1) - b2 ** _F32(t)
    step = (m / c1) / (np.sqrt(v / c2) + _F32(hyper["epsilon"]))
    new: Array = w - lr * (step + _F32(hyper["weight_decay"]) * w)
    return new


def update(
    spec: OptimizerSpec, weights: Mapping[str, Array], slots: Mapping[str, Mapping[str, Array]], grads: Mapping[str, Array], t: int
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """One optimizer step.

    Args:
        spec: optimizer and hyperparameters.
        weights: float32 masters.
        slots: slot name -> parameter name -> float32 array.
        grads: unscaled float32 gradients.
        t: number of this step, from 1.

    Returns:
        New weights and new slots; the given ones are not changed.
    """
    hyper = spec.hyperparameters
    new_weights: dict[str, Array] = {}
    new_slots: dict[str, dict[str, Array]] = {slot: {} for slot in SLOTS[spec.name]}
    for name, w in weights.items():
        g = grads[name]
        if spec.name == "sgd":
            momentum = _F32(hyper["momentum"]) * slots["v"][name] + g
            new_slots["v"][name] = momentum
            new_weights[name] = w - _F32(hyper["learning_rate"]) * momentum
        else:
            m = _F32(hyper["beta1"]) * slots["m"][name] + _F32(1 - hyper["beta1"]) * g
            v = _F32(hyper["beta2"]) * slots["v"][name] + _F32(1 - hyper["beta2"]) * (g * g)
            new_slots["m"][name], new_slots["v"][name] = m, v
            new_weights[name] = adamw_step(w, m, v, t, hyper)
    return new_weights, new_slots
