"""A training task as an `nn.Module`.

Rules (docs/spec.md, section 9)
- Weights are float32 parameters of layout (in, out); autocast casts them where they are used.
- `x @ w` and then `+ b`: `F.linear` would add the bias before it rounds.
- The bias is cast by hand, because a sum of mixed inputs promotes. Its gradient is reduced in float32 by torch.
- A snapped weight is snapped after the cast, where 16 bits can no longer land on a tie, and lets the gradient pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyamp.task import Dense, Snap, TrainingTask
from polyamp_torch.autocasting import autocast

__all__ = ["DenseLayer", "TaskModel", "task_loss"]


class _StraightThroughSnap(torch.autograd.Function):
    """Nearest multiple of `step` within +-limit; gradient of the identity."""

    @staticmethod
    def forward(weight: Tensor, step: float, limit: float) -> Tensor:
        return torch.clamp(torch.round(weight / step) * step, -limit, limit)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[object, ...], output: Tensor) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class DenseLayer(nn.Module):
    """`activation(x @ w + b)`; weight (in, out), bias (out,), both float32.

    Args:
        layer: names and form.
        weight: initial weight.
        bias: initial bias, or None.
        compute_dtype: dtype of the region that it will be called in.
    """

    def __init__(self, layer: Dense, weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.activation = layer.activation
        self.snap: Snap | None = layer.snap
        self.compute_dtype = compute_dtype

    def forward(self, inputs: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.snap is not None:
            weight = _StraightThroughSnap.apply(weight.to(self.compute_dtype), self.snap.step, self.snap.limit)  # type: ignore[no-untyped-call]
        outputs = inputs @ weight
        if self.bias is not None:
            outputs = outputs + self.bias.to(self.compute_dtype)
        if self.activation == "relu":
            return F.relu(outputs)
        return torch.tanh(outputs) if self.activation == "tanh" else outputs


class TaskModel(nn.Module):
    """Network and loss of a task under its policy.

    Args:
        task: what to build.
        device: where parameters go.
    """

    def __init__(self, task: TrainingTask, device: str) -> None:
        super().__init__()
        compute_dtype = getattr(torch, task.policy.compute_dtype)

        def value(name: str) -> Tensor:
            return torch.tensor(task.parameters[name], dtype=torch.float32, device=device)

        layers = [DenseLayer(layer, value(layer.weight), value(layer.bias) if layer.bias else None, compute_dtype) for layer in task.layers]
        self.layers = nn.Sequential(*layers)
        self.policy = str(task.policy)
        self.device_type = torch.device(device).type
        self.output_dtype = getattr(torch, task.policy.output_dtype)
        self.loss = task.loss
        named = {layer.weight: module.weight for layer, module in zip(task.layers, layers, strict=True)}
        named |= {layer.bias: module.bias for layer, module in zip(task.layers, layers, strict=True) if layer.bias and module.bias is not None}
        self.by_name: dict[str, nn.Parameter] = {name: named[name] for name in task.parameters}

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs (batch, outputs) in the policy's output dtype."""
        with autocast(self.policy, self.device_type):
            outputs: Tensor = self.layers(inputs)
        return outputs.to(self.output_dtype)


def task_loss(model: TaskModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Scalar float32 loss of a batch."""
    outputs = model(inputs)
    with autocast(model.policy, model.device_type):
        if model.loss == "mse":
            return F.mse_loss(outputs, targets)
        return F.cross_entropy(outputs, targets)
