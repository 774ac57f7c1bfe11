"""What is wrong with a compiled model's loss scaling, in words, with the remedy.

Rules
- A layer that computes in float16 needs a scaled loss. Keras wraps the optimizer by itself only where the model's own policy is named
  "mixed_float16": not for a policy set layer by layer, nor with auto_scale_loss=False.
- bfloat16 has float32's range and needs none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from polyamp_keras.loss_scale_optimizer import LossScaleOptimizer

__all__ = ["float16_layers", "leaf_layers", "scaling_advice"]


def leaf_layers(layer: Any) -> Iterator[Any]:
    """Layers without layers of their own, in order; input layers, which compute nothing, are left out."""
    children = getattr(layer, "_layers", None) or getattr(layer, "layers", None) or []
    if not children and not isinstance(layer, keras.layers.InputLayer):
        yield layer
    for child in children:
        yield from leaf_layers(child)


def float16_layers(model: keras.Model) -> list[str]:
    """Names of the layers that compute in float16, containers left out."""
    return [layer.name for layer in leaf_layers(model) if getattr(layer, "compute_dtype", None) == "float16"]


def scaling_advice(model: keras.Model, optimizer: Any) -> str | None:
    """Warning text, or None where float16 is scaled by our optimizer, or there is no float16."""
    if isinstance(optimizer, LossScaleOptimizer):
        return None
    layers = float16_layers(model)
    if not layers:
        return None
    where = f"{len(layers)} layers compute in float16 ({', '.join(layers[:4])}{' ...' if len(layers) > 4 else ''})"
    remedy = "compile with optimizer=polyamp_keras.LossScaleOptimizer({inner})"
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = type(optimizer.inner_optimizer).__name__
        return (
            f"{where} and the optimizer is Keras' stock LossScaleOptimizer: no floor or ceiling, no count of skipped steps, no trace; "
            + remedy.format(inner=f"keras.optimizers.{inner}(...)")
        )
    if getattr(optimizer, "loss_scale_factor", None) is not None:
        return f"{where} and loss_scale_factor scales the loss without checking the gradients: one overflow ruins the weights; " + remedy.format(
            inner=f"keras.optimizers.{type(optimizer).__name__}(...), loss_scale={optimizer.loss_scale_factor}"
        )
    return f"{where} and the optimizer does not scale the loss: small gradients become zero and an overflow ruins the weights; " + remedy.format(
        inner=f"keras.optimizers.{type(optimizer).__name__}(...)"
    )
