"""Presets: configurations under which the spec's transition reproduces another library's trajectory, step by step.

Rules (docs/spec.md, section 3.5)
- Equality holds where the other library's scale is defined and within [2^-100, 2^100].
- Overrides are given in the other library's own terms: flax grows on the (growth_interval + 1)-th finite step, and the preset adds that one.
- Sources: torch 2.13 `amp/grad_scaler.py`, jmp 0.0.4, flax 0.12 `training/dynamic_scale.py`, Keras 3.15 `loss_scale_optimizer.py`,
  tf_keras `mixed_precision`, apex `amp/scaler.py`, DeepSpeed `fp16/loss_scaler.py`, Megatron-LM `grad_scaler.py`,
  Paddle `amp/grad_scaler.py`, MindSpore `amp.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.errors import LossScaleError
from polyamp.scale_range import MAX_SCALE, MIN_SCALE

__all__ = ["PRESETS", "preset"]

_UNBOUNDED = {"min_scale": MIN_SCALE, "max_scale": MAX_SCALE, "max_consecutive_skips": None}
_FLOOR_1 = {**_UNBOUNDED, "min_scale": 1.0}

PRESETS: dict[str, dict[str, Any]] = {
    "torch": {**_UNBOUNDED, "init_scale": 2.0**16},
    "jmp": {**_FLOOR_1, "init_scale": 2.0**15},
    "flax": {**_UNBOUNDED, "init_scale": 2.0**16},
    "keras": {**_UNBOUNDED, "init_scale": 2.0**15},
    "tf_keras": {**_FLOOR_1, "init_scale": 2.0**15},
    "apex": {**_UNBOUNDED, "init_scale": 2.0**16, "max_scale": 2.0**24},
    "deepspeed": {**_FLOOR_1, "init_scale": 2.0**16, "growth_interval": 1000, "hysteresis": 2, "hysteresis_refill": "growth"},
    "megatron": {**_FLOOR_1, "init_scale": 2.0**32, "growth_interval": 1000, "hysteresis": 2, "hysteresis_refill": "growth"},
    "paddle": {**_FLOOR_1, "init_scale": 2.0**16},
    "mindspore": {**_FLOOR_1, "init_scale": 2.0**24},
}
"""Defaults of each library; jmp has none for the scale, 2^15 is its documentation's."""


def preset(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `LossScale.dynamic` for another library's defaults, with overrides in that library's own terms.

    Raises:
        LossScaleError: no preset of this name.
    """
    if name not in PRESETS:
        raise LossScaleError(f"no preset {name!r}; expected one of {', '.join(PRESETS)}")
    values = {**PRESETS[name], **overrides}
    if name == "flax":
        values["growth_interval"] = values.get("growth_interval", 2000) + 1
    return values
