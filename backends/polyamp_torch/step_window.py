"""What a scaler remembers from one update to the next.

Rules (docs/spec.md, section 4)
- One window is one training step: any number of scaled losses, one verdict an optimizer, one update.
- Only detached one-element losses are kept: enough to tell a forward overflow from a backward one, and nothing of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyamp.errors import MisuseError
from polyamp_torch.unscaling import Remaining, dense_gradients

__all__ = ["StepWindow"]


@dataclass
class StepWindow:
    """Events since the last update.

    Attributes:
        scaled: whether `scale` was called.
        losses: detached 0-d losses.
        optimizers: optimizers that have a verdict, by `id`.
        with_gradients: whether any parameter had a gradient, or nobody looked.
        remaining: parameters that were handled, with the factor that their gradients still need.
        has_inf: 0-d bool, whether a gradient of a skipped optimizer held an infinity; None where nobody looked.
    """

    scaled: bool = False
    losses: list[Tensor] = field(default_factory=list)
    optimizers: dict[int, Optimizer] = field(default_factory=dict)
    with_gradients: bool = False
    remaining: Remaining = field(default_factory=dict)
    has_inf: Tensor | None = None

    def scale(self, value: Any, scale: Tensor | None) -> Any:
        """Multiplies a nested structure of tensors by `scale`, 16-bit ones in float32; None leaves them as they are.

        Raises:
            polyamp.MisuseError: something that is neither a tensor nor a container.
        """
        if isinstance(value, Tensor):
            if value.numel() == 1:
                self.losses.append(value.detach().reshape(()))
            if scale is None:
                return value
            wide = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
            return wide * scale.to(value.device, non_blocking=True)
        if isinstance(value, Mapping):
            return type(value)((key, self.scale(item, scale)) for key, item in value.items())  # type: ignore[call-arg]
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(self.scale(item, scale) for item in value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.scale(item, scale) for item in value)
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
            return (self.scale(item, scale) for item in value)
        raise MisuseError(f"scale() got {type(value).__name__}; expected a tensor, or a nested list, tuple, mapping or iterator of tensors")

    def note_infinities(self, optimizer: Optimizer, device: torch.device) -> None:
        """Looks whether a skipped optimizer's gradients hold an infinity or NaN alone; does not wait for the answer."""
        found = [torch.isinf(values).any().to(device, non_blocking=True) for _, values in dense_gradients(optimizer)]
        self.has_inf = torch.stack(found if self.has_inf is None else [*found, self.has_inf]).any()

    def losses_are_finite(self) -> bool:
        """Whether every loss was finite; waits for the device."""
        return all(bool(torch.isfinite(loss)) for loss in self.losses)

    def culprits(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients are not finite: those given to the optimizer, else their place in it. Waits for the device."""
        names: list[str] = []
        for optimizer in self.optimizers.values():
            bad = {id(parameter) for parameter, values in dense_gradients(optimizer) if not bool(torch.isfinite(values).all())}
            for number, group in enumerate(optimizer.param_groups):
                known = group.get("param_names") or [f"param_groups[{number}]['params'][{i}]" for i in range(len(group["params"]))]
                names.extend(name for name, parameter in zip(known, group["params"], strict=True) if id(parameter) in bad)
        return tuple(names)
