"""Optimizers of a `TrainingTask` in optax, and their slots by the names that all backends share.

Rules (docs/spec.md, section 9.2)
- `optax.sgd` keeps trace = g + momentum * trace and adds -learning_rate * trace: the recipe of the spec, bit for bit.
- The learning rate of SGD is a constant schedule, because its state holds the count of optimizer steps; AdamW counts by itself.
- `optax.adamw` adds epsilon outside the root and scales the decoupled decay by the learning rate, as the spec does.
"""

from __future__ import annotations

from typing import Any

import optax

from polyamp.task import OptimizerSpec

__all__ = ["SLOTS", "build", "get_slots", "get_steps", "set_slots"]

SLOTS: dict[str, dict[str, str]] = {"sgd": {"v": "trace"}, "adamw": {"m": "mu", "v": "nu"}}
"""By optimizer: name of a slot -> name of its field in optax."""


def build(spec: OptimizerSpec) -> optax.GradientTransformation:
    """The optax transformation of a spec."""
    h = spec.hyperparameters
    if spec.name == "sgd":
        return optax.sgd(optax.constant_schedule(h["learning_rate"]), momentum=h["momentum"])
    return optax.adamw(h["learning_rate"], b1=h["beta1"], b2=h["beta2"], eps=h["epsilon"], weight_decay=h["weight_decay"])


def get_slots(spec: OptimizerSpec, opt_state: Any) -> dict[str, Any]:
    """Slots by shared name, each a tree like the parameters."""
    return {slot: optax.tree_utils.tree_get(opt_state, field) for slot, field in SLOTS[spec.name].items()}


def get_steps(opt_state: Any) -> Any:
    """Steps that the optimizer has taken: int32, 0-d."""
    return optax.tree_utils.tree_get(opt_state, "count")


def set_slots(spec: OptimizerSpec, opt_state: Any, slots: dict[str, Any], steps: Any) -> Any:
    """The optimizer state with other slots and another step count."""
    values = {field: slots[slot] for slot, field in SLOTS[spec.name].items()}
    return optax.tree_utils.tree_set(opt_state, **values, count=steps)
