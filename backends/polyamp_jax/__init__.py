"""polyamp for JAX: loss scale as a pytree, mixed-precision training over any optax optimizer, traces without host synchronisation.

Everything but `TraceRecorder` is pure and made for `jax.jit` with a donated state. Public names are imported on first use, so that the
plug-in module can be asked for its environment before JAX loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyamp.lazy import attach

if TYPE_CHECKING:
    from polyamp_jax.casting import cast_floating
    from polyamp_jax.finite import all_finite, gradient_status, leaf_names, select
    from polyamp_jax.loss_scale import LossScaleState, init, scale, unscale, update
    from polyamp_jax.mixed_precision import MixedPrecision, TrainState
    from polyamp_jax.recorder import TraceRecorder

__all__ = [
    "LossScaleState",
    "MixedPrecision",
    "TraceRecorder",
    "TrainState",
    "all_finite",
    "cast_floating",
    "gradient_status",
    "init",
    "leaf_names",
    "scale",
    "select",
    "unscale",
    "update",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "polyamp_jax.casting": ("cast_floating",),
        "polyamp_jax.finite": ("all_finite", "gradient_status", "leaf_names", "select"),
        "polyamp_jax.loss_scale": ("LossScaleState", "init", "scale", "unscale", "update"),
        "polyamp_jax.mixed_precision": ("MixedPrecision", "TrainState"),
        "polyamp_jax.recorder": ("TraceRecorder",),
    },
)
