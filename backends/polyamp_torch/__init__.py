"""polyamp for PyTorch: `GradScaler` and `autocast` by the spec, under the names and habits of `torch.amp`.

Public names are imported on first use, so that the plug-in module can be asked for its environment before torch loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyamp.lazy import attach

if TYPE_CHECKING:
    from polyamp_torch.autocasting import autocast
    from polyamp_torch.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]

__getattr__, __dir__ = attach(
    __name__,
    {"polyamp_torch.grad_scaler": ("GradScaler",), "polyamp_torch.autocasting": ("autocast",)},
)
